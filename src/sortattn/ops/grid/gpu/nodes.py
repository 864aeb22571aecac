"""Where the nodes stand, for one dimension of one head by program: `place` of `grid.nodes`, on a sorted sample."""

import triton
import triton.language as tl

from .language import STATS, find_bin, share_and_sum


@triton.jit
def _before(line, x, POWER: tl.constexpr, RIGHT: tl.constexpr):
    """How many numbers of an ascending line in memory, of `2^POWER`, are below every x (RIGHT: or equal to it).

    What a program has written there itself it finds in its cache: as a tensor it would pass through shared memory, with
    two barriers, at each of these steps.
    """
    found = tl.zeros(x.shape, tl.int32)
    for turn in tl.static_range(POWER):
        step = 1 << (POWER - 1 - turn)
        number = tl.load(line + found + (step - 1))
        if RIGHT:
            found = tl.where(number <= x, found + step, found)
        else:
            found = tl.where(number < x, found + step, found)
    return found


@triton.jit
def _upto(sums, count):
    """The prefix of a running sum that has `count` terms."""
    return tl.where(count > 0, tl.gather(sums, tl.maximum(count - 1, 0), 0), 0.0)


@triton.jit
def _nodes_before(own, b, POWER: tl.constexpr):
    """How many of `2^POWER` ascending numbers are below every b."""
    found = tl.zeros(b.shape, tl.int32)
    for turn in tl.static_range(POWER):
        step = 1 << (POWER - 1 - turn)
        found = tl.where(tl.gather(own, found + (step - 1), 0) < b, found + step, found)
    return found


@triton.jit
def _as_half(number):
    """The bits of a float16, in the last ones of an integer."""
    number = tl.minimum(tl.maximum(number, -65504.0), 65504.0)
    return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _share(begin, width, tau, EXPONENTIAL: tl.constexpr):
    """The weight of a cell's second node, at `begin` from the first one, in the sum of both."""
    if EXPONENTIAL:
        share, _ = share_and_sum(begin / tau, (width - begin) / tau)
        return share
    else:
        return begin / tl.maximum(width, 1e-37)


@triton.jit
def _bins(
    nodes, before, behind, bottom, per_bin, tau, out, G: tl.constexpr, GP: tl.constexpr, EXPONENTIAL: tl.constexpr
):
    """Codes of points are linear pieces of bins: of every bin a place where the code is whole, and slopes beside it.

    In two words: that code and, as a float16, how far its place is behind the middle of the bin; the slopes of codes
    before and behind it, as float16. The place is a node, if one is in the bin, and all is by the width of a bin.
    """
    b = tl.arange(0, 4 * GP)
    size, has = 1 / per_bin, behind > before
    # `find_bin` rounds to the nearest one, and before that what it adds
    middle = b - (tl.fma(-bottom, per_bin, 8388608.0) - 8388608.0)
    edge = (middle - 0.5) * size
    node = tl.minimum(tl.maximum(tl.where(has, before, before - 1), 0), G - 1)
    cell, left = tl.minimum(node, G - 2), tl.maximum(node - 1, 0)
    start, own = tl.gather(nodes, cell, 0), tl.gather(nodes, node, 0)
    width = tl.gather(nodes, cell + 1, 0) - start
    anchor = tl.where(has, own, edge)
    # behind the anchor; of a short piece no digits would be left
    first = tl.minimum(tl.maximum(anchor - start, 0.0), width)
    last = tl.minimum(first + tl.maximum(edge + size - anchor, 0.01 * size), width)
    share, share_ = _share(first, width, tau, EXPONENTIAL), _share(last, width, tau, EXPONENTIAL)
    slope = (share_ - share) * 512 * (size / tl.maximum(last - first, 1e-37))
    # before it, if it is a node
    width_left = tl.gather(nodes, left + 1, 0) - tl.gather(nodes, left, 0)
    back = tl.minimum(tl.maximum(anchor - edge, 0.01 * size), width_left)
    share_ = _share(width_left - back, width_left, tau, EXPONENTIAL)
    slope_left = tl.where(has, (1 - share_) * 512 * (size / tl.maximum(back, 1e-37)), slope)
    # the whole code that is nearest in the middle
    code = (cell + share) * 512
    whole = tl.floor(code + 0.5 * slope + 0.5)
    place = tl.where(slope > 1e-4, (whole - code) / tl.maximum(slope, 1e-4) - 0.5, 0.0)
    # as `locate` finds that of a point, so that a point on a node is there
    place = tl.where(has, tl.fma(own, per_bin, -middle), place)
    whole = tl.where(has, node * 512, whole.to(tl.int32))
    tl.store(out + 2 * b, whole & 0xFFFF | (_as_half(place) << 16))
    tl.store(out + 2 * b + 1, _as_half(slope_left) | (_as_half(slope) << 16))


@triton.jit
def _factors(nodes, tau, out, G: tl.constexpr, GP: tl.constexpr):
    """For exponentials, of every cell its middle m and a number w: factors times 2^15 are `w (2^(x - m) + 2^(m - x))`.

    There x and m are times `log2(e) / tau`.
    """
    g = tl.arange(0, GP)
    start, stop = tl.gather(nodes, tl.minimum(g, G - 1), 0), tl.gather(nodes, tl.minimum(g + 1, G - 1), 0)
    width = (stop - start) / tau
    tl.store(out + 2 * g, (start + stop) * (0.5 * 1.4426950408889634 / tau))
    tl.store(out + 2 * g + 1, 32768 * tl.exp(-0.5 * width) / (1 + tl.exp(-width)))


@triton.jit
def _index(nodes, bottom, top, tau, out, G: tl.constexpr, POWER: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """What a search for cells begins with: `2^POWER` pairs of numbers, four bytes for each of them, and four pairs.

    The pair of a cell is its start and one over its width; the last one is one over the width of a bin, and how many
    steps a binary search inside the fullest bin takes. The bytes are the cell at the start of every bin, of equal width
    from `bottom` to `top`. A node below a point is in the same bin or one before it, however both are rounded.

    Where no bin has two nodes, the last pairs say all that a code needs, see `_bins`; behind them are those for factors
    of exponentials. Where bins are wider than a quarter of the bandwidth, pieces would be too coarse: points search.
    """
    GP: tl.constexpr = 1 << POWER
    BINS: tl.constexpr = 4 * GP
    g, b = tl.arange(0, GP), tl.arange(0, BINS)
    width = tl.gather(nodes, tl.minimum(g + 1, GP - 1), 0) - nodes
    per_width = tl.where(width > 1e-37, 1 / width, 0.0)
    per_bin = BINS / (top - bottom)
    own = tl.where(g < G, find_bin(nodes, bottom, per_bin, BINS), BINS)
    before = _nodes_before(own, b, POWER)
    behind = tl.where(b < BINS - 1, tl.gather(before, tl.minimum(b + 1, BINS - 1), 0), G)
    most, steps = tl.max(behind - before, 0), 0
    for power in tl.static_range(POWER):
        steps += (most >= (1 << power)).to(tl.int32)
    if EXPONENTIAL:
        steps = tl.where(per_bin * tau < 4, tl.maximum(steps, 2), steps)
    last = g == G - 1
    tl.store(out + 2 * g, tl.where(last, per_bin, nodes))
    tl.store(out + 2 * g + 1, tl.where(last, steps.to(tl.float32), per_width))
    cell = tl.minimum(tl.maximum(before - 1, 0), G - 2)
    out += 2 * GP
    tl.store(out.to(tl.pointer_type(tl.int8)) + b, cell.to(tl.int8))
    if GP <= 64:
        out += GP
        words = out.to(tl.pointer_type(tl.int32))
        _bins(nodes, before, behind, bottom, per_bin, tau, words, G, GP, EXPONENTIAL)
        if EXPONENTIAL:
            _factors(nodes, tau, out + 8 * GP, G, GP)


@triton.jit
def nodes_kernel(
    line,
    bandwidth,
    nodes,
    stats,
    used,
    width,
    D: tl.constexpr,
    G: tl.constexpr,
    POWER: tl.constexpr,
    NODES_POWER: tl.constexpr,
    ANCHOR: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    SORT: tl.constexpr,
):
    """From `line (P * D, width)` to `nodes (P * D, GP)` and what is known of cells, `stats (P * D, STATS, GP)`.

    The line is twice as long as the points need: it is left in order, behind it the shares that nodes are placed by.
    Without SORT the line is in order already. With ANCHOR one node stands at zero, if that is among the points: then
    hats reproduce absolute values. Of every cell three lines of the stats say how far inside its points lie and their
    part of what either node holds, see `correction`; then there are those for `locate`, see `_index`, and the last one
    is what is added at a node on the diagonal for a change of slope of minus one at zero.
    """
    S: tl.constexpr = 1 << POWER
    GP: tl.constexpr = 1 << NODES_POWER
    at = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, S)
    line += at * width
    points = tl.load(line + j, mask=j < used, other=float("inf"))
    if SORT:
        points = tl.sort(points)
        # all have been read
        tl.debug_barrier()
    tl.store(line + j, points)
    tl.debug_barrier()
    real = points < float("inf")
    count = tl.sum(real.to(tl.int32), 0)
    low, high = tl.min(points, 0), tl.max(tl.where(real, points, float("-inf")), 0)

    # equal steps of the integral of the root of the density, about one node at most in a gap
    gap = tl.where(j + 1 < count, tl.load(line + tl.minimum(j + 1, S - 1)) - points, 0.0)
    share = tl.sqrt(gap)
    share = tl.minimum(share, tl.sum(share, 0) / (G - 4))
    tl.store(line + S + j, tl.cumsum(share, 0))
    tl.debug_barrier()
    g = tl.arange(0, GP)
    target = tl.sum(share, 0) * ((g - 1).to(tl.float32) / (G - 3))
    piece = tl.minimum(_before(line + S, target, POWER, True), count - 2)
    start, stop = tl.load(line + piece), tl.load(line + piece + 1)
    reached = tl.where(piece > 0, tl.load(line + S + tl.maximum(piece - 1, 0)), 0.0)
    own = tl.load(line + S + piece) - reached
    part = (target - reached) / tl.where(own > 0, own, 1.0)
    part = tl.minimum(tl.maximum(tl.where(own > 0, part, 0.0), 0.0), 1.0)
    free = start + part * (stop - start)

    # to the nearest point within half a cell
    after = tl.minimum(tl.maximum(_before(line, free, POWER, False), 1), count - 1)
    below, above = tl.load(line + after - 1), tl.load(line + after)
    left = tl.where(g > 2, tl.gather(free, tl.maximum(g - 1, 0), 0), low)
    right = tl.where(g < G - 3, tl.gather(free, tl.minimum(g + 1, GP - 1), 0), high)
    falls = (free - below < above - free) & (free - below <= (free - left) / 2)
    rises = (free - below >= above - free) & (above - free <= (right - free) / 2)
    place = tl.where(falls, below, tl.where(rises, above, free))
    inner = (g >= 2) & (g <= G - 3)
    if ANCHOR:
        distance = tl.where(inner, tl.abs(place), float("inf"))
        nearest = tl.min(tl.where(distance == tl.min(distance, 0), g, GP), 0)
        nearest = tl.where((low < 0) & (high > 0), nearest, GP)
        place = tl.where(g == nearest, 0.0, place)
    tau = tl.load(bandwidth + at // D)
    # wide enough that a slope across it has digits, whatever the scale and the offset of the data
    margin = (high - low) / G + tau / 16 + tl.maximum(tl.abs(low), tl.abs(high)) / 4096
    place = tl.where(g == 1, low, tl.where(g == G - 2, high, place))
    place = tl.where(g == 0, low - margin, tl.where(g == G - 1, high + margin, place))
    place = tl.where(g < G, place, float("inf"))
    nodes += at * GP
    tl.store(nodes + g, place)
    tl.debug_barrier()

    cell = tl.minimum(tl.maximum(_before(nodes, points, NODES_POWER, True) - 1, 0), G - 2)
    start = tl.load(nodes + cell)
    a = tl.where(real, (points - start) / (tl.load(nodes + cell + 1) - start), 0.0)
    first = _before(line, place, POWER, False)
    first = tl.where(g < G, tl.minimum(first, count), count)
    last = tl.gather(first, tl.minimum(g + 1, GP - 1), 0)
    shares, inside, spread = tl.cumsum(a, 0), tl.cumsum((a > 0).to(tl.float32), 0), tl.cumsum(a * (1 - a), 0)
    above_sum = _upto(shares, last) - _upto(shares, first)
    number = _upto(inside, last) - _upto(inside, first)
    far = (_upto(spread, last) - _upto(spread, first)) / tl.maximum(number, 1.0)
    below_sum = (last - first).to(tl.float32) - above_sum
    held = below_sum + tl.where(g > 0, tl.gather(above_sum, tl.maximum(g - 1, 0), 0), 0.0)
    held = tl.maximum(held, 1e-9)
    out = stats + at * STATS * GP + g
    far = tl.minimum(tl.maximum(6 * far, 0.0), 1.0)
    at_start = tl.minimum(number / held, 1.0)
    at_end = tl.minimum(number / tl.gather(held, tl.minimum(g + 1, GP - 1), 0), 1.0)
    tl.store(out, far)
    tl.store(out + GP, at_start)
    tl.store(out + 2 * GP, at_end)
    width = (tl.gather(place, tl.minimum(g + 1, GP - 1), 0) - place) / tau
    if EXPONENTIAL:
        # 2 tanh(width / 2)
        width = 2 * (1 - tl.exp(-width)) / (1 + tl.exp(-width))
    width = tl.where(g < G - 1, width / 24 * far, 0.0)
    before = tl.where(g > 0, tl.gather(width * at_end * at_end, tl.maximum(g - 1, 0), 0), 0.0)
    tl.store(out + (STATS - 1) * GP, width * at_start * at_start + before)
    _index(place, low - margin, high + margin, tau, stats + (at * STATS + 3) * GP, G, NODES_POWER, EXPONENTIAL)
