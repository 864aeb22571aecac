"""Inside a chunk of a causal call, in 16 bits: terms of pairs in float16, which tensor cores sum over the dimensions.

A warp has 32 queries, 16 in either of two products, and takes the keys one by one. Of every 16 dimensions a thread
holds four of two queries and loads four of the key, and makes two terms of a query in one or two instructions. They are
the first factor of a product; the second one is one in the column of the key. So they are added up in float32, and the
sums of 16 queries and eight keys lie as products of tensor cores do. Triton has no such product: here a tensor is one
register of every thread.
"""

import triton
import triton.language as tl

# queries of a warp
QUERIES = 32

_TYPES = tl.constexpr("=f,=f,=f,=f,r,r,r,r,l,l,f,f,f,f")
_ONES = tl.constexpr(0x3C003C003C003C00)
_MINUS = tl.constexpr(-0x43FF43FF43FF4400)


def _terms(body: str) -> tl.constexpr:
    """Of queries $4 ... $7 and the key $8, `a`: terms, multiplied with $9 and added to $10 ... $13."""
    return tl.constexpr(
        "{.reg .b32 t0, t1, p0, p1, c, a0, a1, a2, a3; mov.b64 {t0, t1}, $8; mov.b64 {p0, p1}, $9; "
        + body
        + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0, $1, $2, $3}, {a0, a1, a2, a3}, {p0, p1}, {$10, $11, $12, $13};}"
    )


def _four(line: str) -> str:
    """An instruction for all four registers: `a`, `s` of the query and `t` of the key."""
    return "".join(
        line.replace("@a", f"a{i}").replace("@s", f"${4 + i}").replace("@t", f"t{i // 2}") + "; " for i in range(4)
    )


# max(s - t, 0)
_RIESZ = _terms("mov.b32 c, 0xBC00BC00; " + _four("fma.rn.relu.f16x2 @a, @t, c, @s"))
_BUMP = _terms(
    "mov.b32 c, 0x3C003C00; "
    + _four("sub.f16x2 @a, @s, @t")
    + _four("abs.f16x2 @a, @a")
    + _four("sub.sat.f16x2 @a, c, @a")
)
# of points times log2(e)
_LAPLACE = _terms(
    _four("sub.f16x2 @a, @s, @t")
    + _four("abs.f16x2 @a, @a")
    + _four("neg.f16x2 @a, @a")
    + _four("ex2.approx.f16x2 @a, @a")
)
# the key is the second factor, and minus one the first: less max(-t, 0) of eight keys
_LESS = tl.constexpr(
    "{.reg .b32 t0, t1, m, n, z; mov.b64 {t0, t1}, $4; mov.b64 {m, n}, $5; mov.b32 z, 0; "
    "neg.f16x2 t0, t0; neg.f16x2 t1, t1; max.f16x2 t0, t0, z; max.f16x2 t1, t1, z; "
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {m, m, m, m}, {t0, t1}, {$6, $7, $8, $9};}"
)


@triton.jit
def reach(
    nodes, problem, tau, D: tl.constexpr, DIMS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, WHOLE: tl.constexpr
):
    """How many bandwidths from zero the points of a head are, as nodes tell, and whether float16 holds differences."""
    line = nodes + (problem * D + tl.minimum(tl.arange(0, DIMS), D - 1)) * GP
    far = tl.max(tl.maximum(tl.abs(tl.load(line + 1)), tl.abs(tl.load(line + G - 2))), 0)
    return far / tau, far < 16384 * (1.0 if WHOLE else tau)


@triton.jit
def _add(sums, query, key, column, KIND: tl.constexpr):
    """Of 16 dimensions: `sums` and the terms of 16 queries with the key, in a column."""
    if KIND == "riesz":
        asm: tl.constexpr = _RIESZ
    elif KIND == "bump":
        asm: tl.constexpr = _BUMP
    else:
        asm: tl.constexpr = _LAPLACE
    return tl.inline_asm_elementwise(
        asm,
        _TYPES,
        [query[0], query[1], query[2], query[3], key, column, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _less(sums, key, minus):
    """Of 16 dimensions: `sums` less what is negative of eight keys, that of a thread among them."""
    return tl.inline_asm_elementwise(
        _LESS,
        "=f,=f,=f,=f,l,l,f,f,f,f",
        [key, minus, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_queries(points, row, last, thread, D: tl.constexpr):
    """Of the points `row` and `row + 8` of a thread, for every 16 dimensions, the four registers of a first factor."""
    found = ()
    for step in tl.static_range(D // 16):
        low = tl.load(points + tl.minimum(tl.maximum(row, 0), last) * (D // 4) + step * 4 + thread % 4)
        high = tl.load(points + tl.minimum(tl.maximum(row + 8, 0), last) * (D // 4) + step * 4 + thread % 4)
        four = (low.to(tl.int32), high.to(tl.int32), (low >> 32).to(tl.int32), (high >> 32).to(tl.int32))
        found = found + (four,)
    return found


@triton.jit
def _load_key(keys, n, spot, seen, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(keys + spot)
    else:
        return tl.load(keys + spot, mask=n < seen, other=0)


@triton.jit
def _eight(
    keys, n0, seen, first, second, begin, begin_second, thread, D: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr
):
    """The sums of a thread with the eight keys from `n0` on: `(threads, 2 keys, 2 queries, 2 products)`."""
    sums, more = begin, begin_second
    if KIND == "riesz":
        minus = tl.full(thread.shape, _MINUS, tl.int64)
        for step in tl.static_range(D // 16):
            n = n0 + thread // 4 % 8
            key = _load_key(keys, n, n * (D // 4) + step * 4 + thread % 4, seen, EVEN)
            sums, more = _less(sums, key, minus), _less(more, key, minus)
    for j in tl.static_range(8):
        column = tl.where(thread // 4 % 8 == j, _ONES, 0)
        for step in tl.static_range(D // 16):
            key = _load_key(keys, n0 + j, (n0 + j) * (D // 4) + step * 4 + thread % 4, seen, EVEN)
            sums, more = _add(sums, first[step], key, column, KIND), _add(more, second[step], key, column, KIND)
    return tl.join(
        tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3])),
        tl.join(tl.join(more[0], more[1]), tl.join(more[2], more[3])),
    )


@triton.jit
def pairs_kernel(
    queries,
    keys,
    nodes,
    bandwidth,
    rows,
    weight,
    out,
    totals,
    epsilon,
    length,
    seen,
    offset,
    first,
    channels,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KIND: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What `near_kernel` says, for `queries (P, GROUP * length, D)` and `keys (P, seen, D)` in float16.

    They are divided by the bandwidth, or with WHOLE are as they came. Heads with points that are too far out for
    float16 are left to `near_kernel`.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    head, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    tile = first + tl.program_id(0)
    place = tile * ROWS + tl.arange(0, ROWS)
    own = place - offset
    at = (problem * GROUP + head) * length + own
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    tau = tl.load(bandwidth + problem)
    far, mine = reach(nodes, problem, tau, D, DIMS, G, GP, WHOLE)
    here = (own >= 0) & (own < length) & mine
    # places before all keys see nothing
    start = tl.maximum(tile * ROWS // CHUNK * CHUNK, 0)
    stop = tl.where(mine, tl.minimum((tile + 1) * ROWS, seen), start)
    # a power of two, with which the sums of all dimensions are numbers in float16 too
    most = D * (2 * far + epsilon) if KIND == "riesz" else D * 1.0
    scale = tl.exp2(tl.floor(15.0 - tl.log2(tl.maximum(most, 1e-30))))
    queries = (queries + (problem * GROUP + head) * length * D).to(tl.pointer_type(tl.int64))
    keys = (keys + problem * seen * D).to(tl.pointer_type(tl.int64))
    WARPS: tl.constexpr = ROWS // 32
    thread = tl.arange(0, ROWS)
    row = tile * ROWS + thread // 32 * 32 + thread // 4 % 8 - offset
    low = _load_queries(queries, row, length - 1, thread, D)
    high = _load_queries(queries, row + 16, length - 1, thread, D)
    zero = tl.zeros((ROWS,), tl.float32)
    begin, begin_high = (zero, zero, zero, zero), (zero, zero, zero, zero)
    if KIND == "riesz":
        minus, nothing = tl.full((ROWS,), _MINUS, tl.int64), tl.zeros((ROWS,), tl.int64)
        for step in tl.static_range(D // 16):
            begin = _add(begin, low[step], nothing, minus, KIND)
            begin_high = _add(begin_high, high[step], nothing, minus, KIND)
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for n0 in range(start, stop, 16):
        n = n0 + tl.arange(0, 16)
        sums = tl.join(
            _eight(keys, n0, seen, low, high, begin, begin_high, thread, D, KIND, EVEN),
            _eight(keys, n0 + 8, seen, low, high, begin, begin_high, thread, D, KIND, EVEN),
        )
        # warps, rows, columns in pairs, two of them, rows eight on, products, columns eight on
        sums = tl.permute(tl.reshape(sums, (WARPS, 8, 4, 2, 2, 2, 2)), (0, 5, 4, 1, 6, 2, 3))
        sums = tl.reshape(sums, (ROWS, 16))
        if KIND == "riesz":
            # |s| + |t| - |s - t| is twice max(s, 0) + max(-t, 0) - max(s - t, 0)
            sums = D * epsilon * scale - sums * (2 * scale / tau if WHOLE else 2 * scale)
        else:
            sums *= scale
        allowed = n[None, :] <= place[:, None]
        if MASKED:
            allowed = allowed & (tl.load(weight + problem * seen + n, mask=n < seen, other=0.0) > 0)[None, :]
        sums = tl.where(allowed, sums, 0.0)
        total += tl.sum(sums, 1)
        rows_at = rows + (problem * seen + n)[:, None] * channels + channel[None, :]
        value = tl.load(rows_at, mask=(n < seen)[:, None] & has[None, :], other=0.0)
        if value.dtype == tl.float16:
            found = tl.dot(sums.to(tl.float16), value, found)
        else:
            found = tl.dot(sums, value.to(tl.float32), found, input_precision=PRECISION)
    tl.store(out + at[:, None] * channels + channel[None, :], found / scale, mask=here[:, None] & has[None, :])
    tl.store(totals + at, total / scale, mask=here)
