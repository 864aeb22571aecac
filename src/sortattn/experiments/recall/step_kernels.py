"""The parts of one training step as Triton kernels, in the order of their launch; `fused` launches them.

Runs of different lengths share a launch: a program takes one tile of rows of one run, from a list of tiles, and does
nothing for a run that has ended. Sides are 0 for queries and 1 for keys. Every sum has a fixed order, so that the same
state always gives the same bits.

`KIND` is the kernel's name ("" where no feature map has to be undone). Scores come from pairs of coordinates (`_pair`,
for kernels of `s - t`) or from inner products of features; what is summed over the dimensions is never stored.
"""

import triton
import triton.language as tl

# a difference times this is beyond +-1 unless it is zero; it is a power of two, so that nothing is rounded
STEEP = tl.constexpr(2.0**100)


@triton.jit
def _place(tiles, lengths, ROWS: tl.constexpr):
    """Of this program's tile: the run, its rows, its length."""
    run = tl.load(tiles + 2 * tl.program_id(0))
    rows = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
    return run, rows, tl.load(lengths + run)


@triton.jit
def _pair(KIND: tl.constexpr, difference):
    """The term of one dimension: what is summed to a score, up to `_score`."""
    if KIND == "gauss":
        term = -0.5 * difference * difference
    elif KIND == "riesz":
        term = difference * difference
    elif KIND == "add_laplace":
        term = tl.exp(-tl.abs(difference))
    elif KIND == "add_bump":
        term = tl.maximum(1.0 - tl.abs(difference), 0.0)
    else:
        term = -tl.abs(difference)
    return term


@triton.jit
def _scale(KIND: tl.constexpr, point):
    """Coordinates as `_slope` wants them."""
    if KIND != "gauss" and KIND != "riesz":
        point *= STEEP
    return point


@triton.jit
def _slope(KIND: tl.constexpr, difference):
    """The derivative of a term by the coordinate of its own side; of `-distance`, times the distance, for riesz."""
    if KIND == "gauss" or KIND == "riesz":
        slope = -difference
    else:
        # the sign, and zero at zero, as the mean of both sides
        slope = -tl.clamp(difference, -1.0, 1.0)
        if KIND == "add_laplace":
            slope *= tl.exp(tl.abs(difference) * (-1 / STEEP))
        elif KIND == "add_bump":
            slope = tl.where(tl.abs(difference) < STEEP, slope, 0.0)
    return slope


@triton.jit
def _size(KIND: tl.constexpr, point):
    """What a coordinate adds to its own norm, which is part of the score for the Riesz kernels."""
    if KIND == "riesz":
        size = point * point
    else:
        size = tl.abs(point)
    return size


@triton.jit
def _relu(point):
    return (point + tl.abs(point)) / 2


@triton.jit
def _above(point):
    """The derivative of `_relu`."""
    return tl.where(point > 0, 1.0, tl.where(point == 0, 0.5, 0.0))


@triton.jit
def project(
    tokens, query_map, key_map, points, columns, tiles, lengths, active, runs, longest,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TAU: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """`points (2, P, N, D)`: `W u / tau` of both sides; for pairs also their transpose, `columns`."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    side = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    token = tl.load(tokens + (run * longest + rows)[:, None] * D + dims[None, :], mask=inside, other=0.0)
    place = run * D * D + dims[None, :] * D + dims[:, None]
    within = (dims < D)[None, :] & (dims < D)[:, None]
    if side == 0:
        matrix = tl.load(query_map + place, mask=within, other=0.0)
    else:
        matrix = tl.load(key_map + place, mask=within, other=0.0)
    point = tl.dot(token, matrix, input_precision="ieee", out_dtype=tokens.dtype.element_ty) / TAU
    part = side * runs + run
    tl.store(points + (part * longest + rows)[:, None] * D + dims[None, :], point, mask=inside)
    if PAIRS:
        tl.store(columns + (part * D + dims)[None, :] * longest + rows[:, None], point, mask=inside)


@triton.jit
def features(
    points, found, tiles, lengths, active, runs, longest,
    KIND: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """`found (2, P, N, COUNT)`: the feature map of both sides."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    part = tl.program_id(1) * runs + run
    index = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (index < COUNT)[None, :]
    base = points + (part * longest + rows)[:, None] * D
    if KIND == "dpfp":
        first = index % (2 * D)
        second = (first + index // (2 * D) + SHIFT) % (2 * D)
        feature = _half(base, first, inside, D) * _half(base, second, inside, D)
    else:
        point = tl.load(base + (index % D)[None, :], mask=inside, other=0.0)
        if KIND == "tri":
            feature = tl.where((index < D)[None, :], tl.sin(point), tl.cos(point))
        elif KIND == "relu":
            feature = _relu(point)
        else:
            feature = tl.where(point > 0, point + 1.0, tl.exp(tl.minimum(point, 0.0)))
    tl.store(found + (part * longest + rows)[:, None] * COUNT + index[None, :], feature, mask=inside)


@triton.jit
def _half(base, index, inside, D: tl.constexpr):
    """The entries of `(relu(x), relu(-x))` with these indices."""
    point = tl.load(base + (index % D)[None, :], mask=inside, other=0.0)
    return _relu(tl.where((index < D)[None, :], point, -point))


@triton.jit
def scores(
    queries, keys, found, distances, tiles, lengths, active, longest,
    KIND: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
    SIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`found (P, N, N)`: the Gram matrix, or its logarithm for softmax, gauss and laplace."""
    run = tl.load(tiles + 3 * tl.program_id(0))
    if not tl.load(active + run):
        return
    rows = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.arange(0, SIDE)
    others = tl.load(tiles + 3 * tl.program_id(0) + 2) + tl.arange(0, SIDE)
    length = tl.load(lengths + run)
    kind = found.dtype.element_ty
    total = tl.zeros((SIDE, SIDE), kind)
    if PAIRS:
        own, other = tl.zeros((SIDE,), kind), tl.zeros((SIDE,), kind)
        for dim in range(COUNT):
            point = tl.load(queries + (run * COUNT + dim) * longest + rows, mask=rows < length, other=0.0)
            mark = tl.load(keys + (run * COUNT + dim) * longest + others, mask=others < length, other=0.0)
            total += _pair(KIND, point[:, None] - mark[None, :])
            if KIND == "riesz" or KIND == "add_riesz":
                own += _size(KIND, point)
                other += _size(KIND, mark)
        if KIND == "riesz":
            own, other, distance = tl.sqrt(own), tl.sqrt(other), tl.sqrt(total)
            total = -distance
        if KIND == "riesz" or KIND == "add_riesz":
            total += own[:, None] + other[None, :] + EPSILON
    else:
        for begin in range(0, COUNT, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            row = tl.load(
                queries + (run * longest + rows)[:, None] * COUNT + index[None, :],
                mask=(rows < length)[:, None] & (index < COUNT)[None, :], other=0.0,
            )  # fmt: skip
            column = tl.load(
                keys + (run * longest + others)[None, :] * COUNT + index[:, None],
                mask=(others < length)[None, :] & (index < COUNT)[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(row, column, total, input_precision=PRECISION, out_dtype=kind)
    place = (run * longest + rows)[:, None] * longest + others[None, :]
    inside = (rows < length)[:, None] & (others < length)[None, :]
    tl.store(found + place, total, mask=inside)
    if KIND == "riesz":
        tl.store(distances + place, distance, mask=inside)


@triton.jit
def normalise(
    matrix, distances, row_loss, tiles, lengths, active, longest,
    ROOT: tl.constexpr, EXPONENTIAL: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Replaces scores by the gradient of the loss per token; `row_loss (P, N)` is what each row adds to the loss.

    With `ROOT` also the distances by the gradient over them.
    """
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    others = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (others < length)[None, :]
    place = (run * longest + rows)[:, None] * longest + others[None, :]
    if EXPONENTIAL:
        score = tl.load(matrix + place, mask=inside, other=-float("inf"))
        # rows beyond the run have no largest score
        largest = tl.where(rows < length, tl.max(score, 1), 0.0)
        weight = tl.exp(score - largest[:, None])
        attention = weight / tl.where(rows < length, tl.sum(weight, 1), 1.0)[:, None]
    else:
        score = tl.load(matrix + place, mask=inside, other=0.0)
        total = tl.sum(score, 1)
        attention = score / tl.maximum(total, FLOOR)[:, None]
    error = attention - tl.where(inside & (rows[:, None] == others[None, :]), 1.0, 0.0)
    tl.store(row_loss + run * longest + rows, tl.sum(error * error, 1), mask=rows < length)
    wanted = 2.0 * error / length
    mean = tl.sum(wanted * attention, 1)
    if EXPONENTIAL:
        gradient = attention * (wanted - mean[:, None])
    else:
        # a normaliser at its floor does not move
        mean = tl.where(total >= FLOOR, mean, 0.0)
        gradient = (wanted - mean[:, None]) / tl.maximum(total, FLOOR)[:, None]
    tl.store(matrix + place, gradient, mask=inside)
    if ROOT:
        distance = tl.load(distances + place, mask=inside, other=0.0)
        # the root has no derivative at zero, and none is taken
        share = tl.where(distance > 0, gradient / tl.where(distance > 0, distance, 1.0), 0.0)
        tl.store(distances + place, share, mask=inside)


@triton.jit
def slopes(
    marks, matrix, distances, found, tiles, lengths, active, runs, longest,
    KIND: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`found (2, P, N, COUNT)`: the gradient by the points, or by the features, of both sides (`marks`)."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    side = tl.program_id(1)
    own, other = side * runs + run, (1 - side) * runs + run
    index = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    held = index < COUNT
    # a key reads its column of the matrix, a query its row
    down, along = tl.where(side == 0, longest, 1), tl.where(side == 0, 1, longest)
    weights = run * longest * longest + rows * down
    inside = (rows < length)[:, None] & held[None, :]
    kind = found.dtype.element_ty
    total = tl.zeros((ROWS, WIDTH), kind)
    if PAIRS:
        sums = tl.zeros((ROWS,), kind)
        point = tl.load(marks + (own * longest + rows)[:, None] * COUNT + index[None, :], mask=inside, other=0.0)
        here = _scale(KIND, point)
        for step in tl.range(0, length, loop_unroll_factor=UNROLL):
            mark = tl.load(marks + (other * longest + step) * COUNT + index, mask=held, other=0.0)
            weight = tl.load(matrix + weights + step * along, mask=rows < length, other=0.0)
            if KIND == "riesz" or KIND == "add_riesz":
                sums += weight
            if KIND == "riesz":
                weight = tl.load(distances + weights + step * along, mask=rows < length, other=0.0)
            total += weight[:, None] * _slope(KIND, here - _scale(KIND, mark)[None, :])
        if KIND == "riesz":
            norm = tl.sqrt(tl.sum(point * point, 1))
            total += (sums / tl.where(norm > 0, norm, 1.0))[:, None] * point
        if KIND == "add_riesz":
            total += sums[:, None] * tl.clamp(point * STEEP, -1.0, 1.0)
    else:
        for begin in range(0, length, CHUNK):
            steps = begin + tl.arange(0, CHUNK)
            weight = tl.load(
                matrix + weights[:, None] + (steps * along)[None, :],
                mask=(rows < length)[:, None] & (steps < length)[None, :], other=0.0,
            )  # fmt: skip
            mark = tl.load(
                marks + (other * longest + steps)[:, None] * COUNT + index[None, :],
                mask=(steps < length)[:, None] & held[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(weight, mark, total, input_precision=PRECISION, out_dtype=kind)
    tl.store(found + (own * longest + rows)[:, None] * COUNT + index[None, :], total, mask=inside)


@triton.jit
def _chain(
    points, slopes, part, rows, dims, inside, longest,
    KIND: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The gradient by the points of one side from that by its features."""
    base = points + (part * longest + rows)[:, None] * D
    slope = slopes + (part * longest + rows)[:, None] * COUNT
    if KIND == "dpfp":
        point = tl.load(base + dims[None, :], mask=inside, other=0.0)
        gradient = _above(point) * _half_slope(base, slope, dims, inside, SHIFT, D)
        gradient -= _above(-point) * _half_slope(base, slope, dims + D, inside, SHIFT, D)
    else:
        gradient = tl.load(slope + dims[None, :], mask=inside, other=0.0)
        if KIND == "relu" or KIND == "elu" or KIND == "tri":
            point = tl.load(base + dims[None, :], mask=inside, other=0.0)
            if KIND == "relu":
                gradient *= _above(point)
            elif KIND == "elu":
                gradient *= tl.exp(tl.minimum(point, 0.0))
            else:
                turned = tl.load(slope + D + dims[None, :], mask=inside, other=0.0)
                gradient = gradient * tl.cos(point) - turned * tl.sin(point)
    return gradient


@triton.jit
def _half_slope(base, slope, index, inside, SHIFT: tl.constexpr, D: tl.constexpr):
    """The gradient by the entries of `(relu(x), relu(-x))`: each is in six of the products."""
    total = tl.zeros(inside.shape, slope.dtype.element_ty)
    for turn in tl.static_range(3):
        after = (index + turn + SHIFT) % (2 * D)
        before = (index + 2 * D - turn - SHIFT) % (2 * D)
        here = tl.load(slope + (2 * D * turn + index)[None, :], mask=inside, other=0.0)
        there = tl.load(slope + (2 * D * turn + before)[None, :], mask=inside, other=0.0)
        total += here * _half(base, after, inside, D) + there * _half(base, before, inside, D)
    return total


@triton.jit
def token_gradient(
    points, slopes, query_map, key_map, deltas, found, squares, tiles, lengths, active, runs, longest, slots,
    KIND: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    """`deltas (2, P, N, D)`, by `W u` of both sides, and `found (P, N, D)`, by the tokens; `squares` of the latter."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    within = (dims < D)[None, :] & (dims < D)[:, None]
    place = run * D * D + dims[:, None] * D + dims[None, :]
    total = tl.zeros((ROWS, WIDTH), found.dtype.element_ty)
    for side in tl.static_range(2):
        part = side * runs + run
        delta = _chain(points, slopes, part, rows, dims, inside, longest, KIND, SHIFT, D, COUNT) / TAU
        tl.store(deltas + (part * longest + rows)[:, None] * D + dims[None, :], delta, mask=inside)
        matrix = tl.load((query_map if side == 0 else key_map) + place, mask=within, other=0.0)
        total = tl.dot(delta, matrix, total, input_precision="ieee", out_dtype=found.dtype.element_ty)
    tl.store(found + (run * longest + rows)[:, None] * D + dims[None, :], total, mask=inside)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1) // ROWS
    tl.store(squares + run * slots + tile, tl.sum(total * total))


@triton.jit
def map_gradient(
    tokens, deltas, found, squares, lengths, active, runs, longest, slots, used,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`found (2, P, D, D)`, by `W_Q` and `W_K`; a program has `PIECE` rows of one of them."""
    run, side, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not tl.load(active + run):
        return
    length = tl.load(lengths + run)
    part = side * runs + run
    dims = tl.arange(0, WIDTH)
    mine = piece * PIECE + tl.arange(0, PIECE)
    total = tl.zeros((PIECE, WIDTH), found.dtype.element_ty)
    for begin in range(0, length, CHUNK):
        rows = begin + tl.arange(0, CHUNK)
        delta = tl.load(
            deltas + (part * longest + rows)[None, :] * D + mine[:, None],
            mask=(rows < length)[None, :] & (mine < D)[:, None], other=0.0,
        )  # fmt: skip
        token = tl.load(
            tokens + (run * longest + rows)[:, None] * D + dims[None, :],
            mask=(rows < length)[:, None] & (dims < D)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(delta, token, total, input_precision="ieee", out_dtype=found.dtype.element_ty)
    place = part * D * D + mine[:, None] * D + dims[None, :]
    tl.store(found + place, total, mask=(mine < D)[:, None] & (dims < D)[None, :])
    tl.store(squares + run * slots + used + side * tl.num_programs(2) + piece, tl.sum(total * total))


@triton.jit
def note(
    row_loss, squares, time, loss, lowest, active, steps, factors, lengths, longest, slots,
    TARGET: tl.constexpr, CLIP: tl.constexpr, FLOOR: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The loss of a run, whether it goes on, and `factors (P, 3)`: of its gradient, of mean and square in Adam."""
    run = tl.program_id(0)
    if not tl.load(active + run):
        return
    rows = tl.arange(0, WIDTH)
    found = tl.sum(tl.load(row_loss + run * longest + rows, mask=rows < tl.load(lengths + run), other=0.0))
    least = tl.load(lowest + run)
    # not the smaller of both, which could be NaN
    tl.store(lowest + run, tl.where(found < least, found, least))
    tl.store(loss + run, found)
    ended = found < TARGET
    tl.store(active + run, ended == 0)
    tl.store(steps + run, tl.load(steps + run) + tl.where(ended, 0, 1))
    slot = tl.arange(0, SLOTS)
    norm = tl.sqrt(tl.sum(tl.load(squares + run * slots + slot, mask=slot < slots, other=0.0)))
    now = tl.load(time) + 1.0
    tl.store(factors + 3 * run, tl.minimum(CLIP / (norm + FLOOR), 1.0))
    tl.store(factors + 3 * run + 1, 1.0 / (1.0 - tl.exp(now * LOG_BETA1)))
    tl.store(factors + 3 * run + 2, 1.0 / (1.0 - tl.exp(now * LOG_BETA2)))


@triton.jit
def _move(
    parameter, mean, square, gradient, place, from_place, inside, factors, run,
    RATE: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    slope = tl.load(gradient + from_place, mask=inside, other=0.0) * tl.load(factors + 3 * run)
    first = tl.load(mean + place, mask=inside, other=0.0)
    second = tl.load(square + place, mask=inside, other=0.0)
    first += (1.0 - BETA1) * (slope - first)
    second += (1.0 - BETA2) * (slope * slope - second)
    tl.store(mean + place, first, mask=inside)
    tl.store(square + place, second, mask=inside)
    height = tl.sqrt(second * tl.load(factors + 3 * run + 2)) + EPSILON
    step = RATE * (first * tl.load(factors + 3 * run + 1)) / height
    tl.store(parameter + place, tl.load(parameter + place, mask=inside, other=0.0) - step, mask=inside)


@triton.jit
def adam(
    tokens, tokens_mean, tokens_square, query_map, query_map_mean, query_map_square, key_map, key_map_mean,
    key_map_square, by_tokens, by_maps, factors, time, tiles, lengths, active, runs, longest, count,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, RATE: tl.constexpr, BETA1: tl.constexpr,
    BETA2: tl.constexpr, TOKEN_EPSILON: tl.constexpr, MATRIX_EPSILON: tl.constexpr,
):  # fmt: skip
    """One step of Adam: the first `count` programs have the tiles of tokens, the others one row tile of the maps."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(time, tl.load(time) + 1.0)
    dims = tl.arange(0, WIDTH)
    if program < count:
        run, rows, length = _place(tiles, lengths, ROWS)
        if tl.load(active + run):
            inside = (rows < length)[:, None] & (dims < D)[None, :]
            place = (run * longest + rows)[:, None] * D + dims[None, :]
            _move(tokens, tokens_mean, tokens_square, by_tokens, place, place, inside, factors, run,
                  RATE, BETA1, BETA2, TOKEN_EPSILON)  # fmt: skip
    else:
        pieces: tl.constexpr = (D + ROWS - 1) // ROWS
        run = (program - count) // pieces
        rows = (program - count) % pieces * ROWS + tl.arange(0, ROWS)
        if tl.load(active + run):
            inside = (rows < D)[:, None] & (dims < D)[None, :]
            place = (run * D + rows)[:, None] * D + dims[None, :]
            _move(query_map, query_map_mean, query_map_square, by_maps, place, place, inside, factors, run,
                  RATE, BETA1, BETA2, MATRIX_EPSILON)  # fmt: skip
            _move(key_map, key_map_mean, key_map_square, by_maps, place, place + runs * D * D, inside, factors, run,
                  RATE, BETA1, BETA2, MATRIX_EPSILON)  # fmt: skip
