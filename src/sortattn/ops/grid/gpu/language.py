"""What the Triton kernels of the grid share: places on a line of nodes, ramps between them, and products.

The place of a point in cell i with share a is `i + a`. The ramp of node g is 0 below the cell that begins at g, 1 above
it and the share inside: the hat of g is the difference of two ramps, and a sum of ramps knows as much as one of hats.
What saturates needs no rounding, and a ramp is one instruction where a hat takes several.

Places are float32, or codes: integers of 16 bits, nine of them behind the point. A ramp of codes is an integer from 0
to 512, and the bits of such an integer are those of the float16 that is 2^-24 times as large: two weights in one
instruction, which tensor cores take as they are.

The weights of exponentials in a cell do not sum to one. Where others have codes, they are a share of their sum and the
sum itself, the factor of the point: then a place is a word, in its first half the code, in the other the factor as a
float16 times 2^15 or, where codes have eight bits, a bfloat16 times 2^127.
"""

import triton
import triton.language as tl

# lines of what is known of cells, see `nodes_kernel`
STATS = tl.constexpr(17)


@triton.jit
def ramp(place, shift, FAST: tl.constexpr):
    """`place - node` clamped to 0 ... 1, with broadcasting; `shift` is minus the node. Of codes it is 0 ... 512.

    It is loaded, see `layout.shifts`, though it could be computed: only where everything comes from memory does Triton
    make weights in those registers from which tensor cores take them; otherwise they pass through shared memory, which
    takes half as long again. FAST: two at a time, where the assembler is NVIDIA's.
    """
    if place.dtype != tl.int16:
        return tl.minimum(tl.maximum(place + shift, 0.0), 1.0)
    elif FAST:
        place, shift = tl.broadcast(place, shift)
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, l; mov.b32 l, 0x02000200; add.s16x2 t, $1, $2; min.relu.s16x2 $0, t, l;}",
            "=r,r,r",
            [place, shift],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        number = place.to(tl.int32) + shift.to(tl.int32)
        return tl.minimum(tl.maximum(number, 0), 512).to(tl.int16)


@triton.jit
def coarse_ramp(place, shift, FAST: tl.constexpr):
    """`ramp` of codes with eight bits behind the point, as bfloat16 from 0 to 4.

    The bits of an integer up to 256 are those of the bfloat16 that is 2^-133 times as large, from which a product makes
    a number of its usual range. A ramp of nine bits would have to be rounded, by way of float32.
    """
    if FAST:
        place, shift = tl.broadcast(place, shift)
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, l, u; mov.b32 l, 0x01000100; mov.b32 u, 0x7F007F00; add.s16x2 t, $1, $2; "
            "min.relu.s16x2 t, t, l; mul.bf16x2 $0, t, u;}",
            "=r,r,r",
            [place, shift],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        number = place.to(tl.int32) + shift.to(tl.int32)
        return (tl.minimum(tl.maximum(number, 0), 256).to(tl.float32) * (1 / 64)).to(tl.bfloat16)


@triton.jit
def code_of(word):
    """The codes of places, words or no more than these."""
    if word.dtype == tl.int32:
        word = word.to(tl.int16)
    return word


@triton.jit
def factor_of(word, BITS: tl.constexpr):
    """The factors of words as these have them."""
    bits = (word >> 16).to(tl.int16)
    if BITS == 8:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def factored_ramp(word, shift, BITS: tl.constexpr, FAST: tl.constexpr):
    """`ramp` times the factor of a point: 0 ... 1 in float16, with eight BITS 0 ... 4 in bfloat16, see `coarse_ramp`.

    The factor is the product that makes numbers of their usual range from bits of integers.
    """
    place, factor = code_of(word), factor_of(word, BITS)
    if FAST:
        place, shift = tl.broadcast(place, shift)
        factor, place = tl.broadcast(factor, place)
        if factor.dtype == tl.bfloat16:
            what: tl.constexpr = "mov.b32 l, 0x01000100; add.s16x2 t, $1, $2; min.relu.s16x2 t, t, l; mul.bf16x2"
        else:
            what: tl.constexpr = "mov.b32 l, 0x02000200; add.s16x2 t, $1, $2; min.relu.s16x2 t, t, l; mul.f16x2"
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, l; " + what + " $0, t, $3;}",
            "=r,r,r,r",
            [place, shift, factor],
            dtype=factor.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        number = place.to(tl.int32) + shift.to(tl.int32)
        if factor.dtype == tl.bfloat16:
            number = tl.minimum(tl.maximum(number, 0), 256).to(tl.float32) * 2.0**-133
        else:
            number = tl.minimum(tl.maximum(number, 0), 512).to(tl.float32) * 2.0**-24
        return (number * factor.to(tl.float32)).to(factor.dtype)


@triton.jit
def product(weight, rows, total, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """`total + weight @ rows` on tensor cores, in the type of the rows; see `unit`. The interpreter has no bfloat16."""
    if weight.dtype == tl.int16:
        weight = weight.to(tl.float16, bitcast=True)
    weight = weight.to(rows.dtype)
    if EMULATED:
        return tl.dot(weight.to(tl.float32), rows.to(tl.float32), total)
    else:
        return tl.dot(weight, rows, total, input_precision=PRECISION)


@triton.jit
def unit(places, BITS: tl.constexpr = 9):
    """What a `product` has to be multiplied with, for a pointer to places: codes have weights of 2^-15 for one.

    With eight BITS they are those of `coarse_ramp`.
    """
    if BITS == 8:
        return 0.25
    elif places.dtype.element_ty == tl.int16:
        return 32768.0
    else:
        return 1.0


@triton.jit
def find_bin(x, bottom, per_bin, BINS: tl.constexpr):
    """In which of BINS bins of equal width points are: never in one before that of a smaller point.

    Behind 2^23 a float32 has no bits behind the point, so its last bits are the integer.
    """
    place = tl.fma(x, per_bin, tl.fma(-bottom, per_bin, 8388608.0))
    place = tl.minimum(tl.maximum(place, 8388608.0), 8388607.0 + BINS)
    return place.to(tl.int32, bitcast=True) & (BINS - 1)


@triton.jit
def load_pair(pairs, at):
    """Both numbers of the pairs `at` from a pointer to float32, in one look-up."""
    first, second = load_words(pairs, at)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def load_words(pairs, at):
    """The same as integers."""
    pair = tl.load(pairs.to(tl.pointer_type(tl.int64)) + at)
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def share_and_sum(begin, end):
    """Of the weights `sinh(end) / sinh(h)` and `sinh(begin) / sinh(h)`, h their sum: the second's share, and both.

    No exponent is positive, and narrow cells lose no digits.
    """
    width, least = begin + end, tl.minimum(begin, end)
    whole, inner = tl.exp(-width), tl.exp(2 * least - width)
    # from the middle of the cell, tanh(u) / tanh(h / 2)
    part = 0.5 * (1 - inner) * (1 + whole) / ((1 + inner) * tl.maximum(1 - whole, 1e-30))
    share = 0.5 + tl.where(begin < end, -part, part)
    share = tl.where(width < 0.05, begin / tl.maximum(width, 1e-37), share)
    return share, tl.exp(-least) * (1 + inner) / (1 + whole)


@triton.jit
def split_place(place):
    """The cell and the share of places; codes have nine bits."""
    if place.dtype == tl.int16 or place.dtype == tl.int32:
        number = code_of(place).to(tl.int32)
        return number >> 9, (number & 511).to(tl.float32) * (1 / 512)
    else:
        cell = place.to(tl.int32)
        return cell, place - cell.to(tl.float32)
