"""What the Triton kernels of the grid share: places on a line of nodes, ramps between them, and products.

The place of a point in cell i with share a is `i + a`. The ramp of node g is 0 below the cell that begins at g, 1 above
it and the share inside: the hat of g is the difference of two ramps, and a sum of ramps knows as much as one of hats.
What saturates needs no rounding, and a ramp is one instruction where a hat takes several.
"""

import triton
import triton.language as tl


@triton.jit
def ramp(place, shift):
    """`place - node` clamped to 0 ... 1, with broadcasting; `shift` is minus the node.

    It is loaded, see `layout.shifts`, though it could be computed: only where everything comes from memory does Triton
    make weights in those registers from which tensor cores take them; otherwise they pass through shared memory, which
    takes half as long again.
    """
    return tl.minimum(tl.maximum(place + shift, 0.0), 1.0)


@triton.jit
def product(weight, rows, total, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """`total + weight @ rows` on tensor cores, in the type of the rows; the interpreter has no bfloat16."""
    weight = weight.to(rows.dtype)
    if EMULATED:
        return tl.dot(weight.to(tl.float32), rows.to(tl.float32), total)
    else:
        return tl.dot(weight, rows, total, input_precision=PRECISION)


@triton.jit
def split_place(place):
    """The cell and the share of places."""
    cell = place.to(tl.int32)
    return cell, place - cell.to(tl.float32)
