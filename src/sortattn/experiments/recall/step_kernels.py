"""The parts of one training step as Triton kernels, in the order of their launch; `fused` launches them.

Runs of different lengths share a launch: a program takes one tile of rows of one run, from a list of tiles, and does
nothing for a run that has ended. Sides are 0 for queries and 1 for keys. Every sum has a fixed order, so that the same
state always gives the same bits.

`KIND` is the kernel's name. Scores come from pairs of coordinates (`_pair`, for kernels of `s - t`) or from inner
products of features; what is summed over the dimensions is never stored. What one kernel leaves to the next has `pitch`
rows for every run, whole tiles, so that the loops need no masks; beyond the end of a run points and features are zero.
"""

# ruff: noqa: N803 (constants of a Triton kernel are arguments in capitals)

import triton
import triton.language as tl

# a difference times this is beyond +-1 unless it is zero; it is a power of two, so that nothing is rounded
STEEP = tl.constexpr(2.0**100)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(tiles, lengths, ROWS: tl.constexpr):
    """Of this program's tile: the run, its rows, its length."""
    run = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.multiple_of(tl.load(tiles + 2 * tl.program_id(0) + 1), ROWS)
    return run, first + tl.arange(0, ROWS), tl.load(lengths + run)


@triton.jit
def _pair(KIND: tl.constexpr, difference):
    """The term of one dimension."""
    if KIND == "gauss" or KIND == "riesz":
        term = difference * difference
    elif KIND == "add_laplace":
        term = tl.exp2(tl.abs(difference) * -LOG2_E)
    elif KIND == "add_bump":
        term = tl.maximum(1.0 - tl.abs(difference), 0.0)
    else:
        term = tl.abs(difference)
    return term


@triton.jit
def _steepen(KIND: tl.constexpr, point):
    """Coordinates as `_slope` wants them."""
    if KIND != "gauss" and KIND != "riesz":
        point *= STEEP
    return point


@triton.jit
def _slope(KIND: tl.constexpr, difference):
    """The derivative of the score by a coordinate, from that of the other side minus its own.

    For riesz it is that of `-distance`, times the distance.
    """
    if KIND == "gauss" or KIND == "riesz":
        slope = difference
    else:
        # the sign, and zero at zero, as the mean of both sides
        slope = tl.clamp(difference, -1.0, 1.0)
        if KIND == "add_laplace":
            slope *= tl.exp2(tl.abs(difference) * (-LOG2_E / STEEP))
        elif KIND == "add_bump":
            slope = tl.where(tl.abs(difference) < STEEP, slope, 0.0)
    return slope


@triton.jit
def _relu(point):
    return (point + tl.abs(point)) / 2


@triton.jit
def _above(point):
    """The derivative of `_relu`."""
    return tl.where(point > 0, 1.0, tl.where(point == 0, 0.5, 0.0))


@triton.jit
def project(
    tokens, query_map, key_map, points, columns, sizes, tiles, lengths, active, runs, longest, pitch,
    KIND: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TAU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`points (2, P, pitch, D)`: `W u / tau` of both sides.

    For pairs (`KIND` is not "features") also their transpose, `columns`; for the Riesz kernels, norms `sizes`.
    """
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    side = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    token = tl.load(tokens + (run * longest + rows)[:, None] * D + dims[None, :], mask=inside, other=0.0)
    place = run * D * D + dims[:, None] * D + dims[None, :]
    within = (dims < D)[None, :] & (dims < D)[:, None]
    if side == 0:
        matrix = tl.load(query_map + place, mask=within, other=0.0)
    else:
        matrix = tl.load(key_map + place, mask=within, other=0.0)
    kind = tokens.dtype.element_ty
    point = tl.dot(token, tl.trans(matrix), input_precision=PRECISION, out_dtype=kind) / TAU
    part = side * runs + run
    tl.store(points + (part * pitch + rows)[:, None] * D + dims[None, :], point, mask=inside)
    if KIND != "features":
        tl.store(columns + (part * D + dims)[None, :] * pitch + rows[:, None], point, mask=inside)
    if KIND == "riesz":
        tl.store(sizes + part * pitch + rows, tl.sqrt(tl.sum(point * point, 1)))
    elif KIND == "add_riesz":
        tl.store(sizes + part * pitch + rows, tl.sum(tl.abs(point), 1))


@triton.jit
def features(
    points, found, tiles, lengths, active, runs, pitch,
    KIND: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """`found (2, P, pitch, COUNT)`: the feature map of both sides."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    part = tl.program_id(1) * runs + run
    dims = tl.arange(0, WIDTH)
    base = points + (part * pitch + rows)[:, None] * D
    target = found + (part * pitch + rows)[:, None] * COUNT
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    point = tl.load(base + dims[None, :], mask=inside, other=0.0)
    if KIND == "relu":
        tl.store(target + dims[None, :], _relu(point), mask=inside)
    elif KIND == "elu":
        tl.store(target + dims[None, :], tl.where(point > 0, point + 1.0, tl.exp(tl.minimum(point, 0.0))), mask=inside)
    elif KIND == "tri":
        tl.store(target + dims[None, :], tl.sin(point), mask=inside)
        tl.store(target + D + dims[None, :], tl.cos(point), mask=inside)
    else:
        for turn in tl.static_range(3):
            tl.store(
                target + 2 * D * turn + dims[None, :],
                _relu(point) * _half(base, (dims + turn + SHIFT) % (2 * D), inside, D), mask=inside,
            )  # fmt: skip
            tl.store(
                target + 2 * D * turn + D + dims[None, :],
                _relu(-point) * _half(base, (dims + D + turn + SHIFT) % (2 * D), inside, D), mask=inside,
            )  # fmt: skip


@triton.jit
def _half(base, index, inside, D: tl.constexpr):
    """The entries of `(relu(x), relu(-x))` with these indices."""
    point = tl.load(base + (index % D)[None, :], mask=inside, other=0.0)
    return _relu(tl.where((index < D)[None, :], point, -point))


@triton.jit
def scores(
    queries, keys, sizes, zeros, found, distances, tiles, active, runs, pitch,
    KIND: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
    SIDE: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`found (P, pitch, pitch)`: the Gram matrix, or its logarithm for softmax, gauss and laplace."""
    run = tl.load(tiles + 3 * tl.program_id(0))
    if not tl.load(active + run):
        return
    places = tl.arange(0, SIDE)
    rows = tl.multiple_of(tl.load(tiles + 3 * tl.program_id(0) + 1), SIDE) + places
    others = tl.multiple_of(tl.load(tiles + 3 * tl.program_id(0) + 2), SIDE) + places
    kind = found.dtype.element_ty
    if PAIRS:
        # loaded, since Triton gives a thread neighbours of what is loaded, and single columns of what is made
        total = tl.load(zeros + places[:, None] * SIDE + places[None, :])
        for dim in tl.range(0, COUNT, loop_unroll_factor=UNROLL):
            point = tl.load(queries + (run * COUNT + dim) * pitch + rows)
            mark = tl.load(keys + (run * COUNT + dim) * pitch + others)
            total += _pair(KIND, point[:, None] - mark[None, :])
        if KIND == "gauss":
            total *= -0.5
        elif KIND == "laplace":
            total = -total
        elif KIND == "riesz" or KIND == "add_riesz":
            distance = tl.sqrt(total) if KIND == "riesz" else total
            own, other = tl.load(sizes + run * pitch + rows), tl.load(sizes + (runs + run) * pitch + others)
            total = own[:, None] + other[None, :] - distance + EPSILON
    else:
        total = tl.zeros((SIDE, SIDE), kind)
        for begin in range(0, COUNT, CHUNK):
            index = begin + tl.arange(0, CHUNK)
            row = tl.load(
                queries + (run * pitch + rows)[:, None] * COUNT + index[None, :],
                mask=(index < COUNT)[None, :], other=0.0,
            )  # fmt: skip
            column = tl.load(
                keys + (run * pitch + others)[:, None] * COUNT + index[None, :],
                mask=(index < COUNT)[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(row, tl.trans(column), total, input_precision=PRECISION, out_dtype=kind)
    place = (run * pitch + rows)[:, None] * pitch + others[None, :]
    tl.store(found + place, total)
    if KIND == "riesz":
        tl.store(distances + place, distance)


@triton.jit
def normalise(
    matrix, distances, row_loss, tiles, lengths, active, pitch,
    ROOT: tl.constexpr, EXPONENTIAL: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Replaces scores by the gradient of the loss per token; `row_loss (P, pitch)` is what each row adds.

    With `ROOT` also the distances by the gradient over them. Beyond the last column of a run the gradient is zero.
    """
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    others = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (others < length)[None, :]
    place = (run * pitch + rows)[:, None] * pitch + others[None, :]
    # whole chunks, as `slopes` reads them
    written = (rows < length)[:, None] & (others < tl.cdiv(length, CHUNK) * CHUNK)[None, :]
    score = tl.load(matrix + place, mask=written, other=0.0)
    if EXPONENTIAL:
        score = tl.where(inside, score, -float("inf"))
        # rows beyond the run have no largest score
        largest = tl.where(rows < length, tl.max(score, 1), 0.0)
        weight = tl.exp(score - largest[:, None])
        attention = weight / tl.where(rows < length, tl.sum(weight, 1), 1.0)[:, None]
    else:
        score = tl.where(inside, score, 0.0)
        total = tl.sum(score, 1)
        attention = score / tl.maximum(total, FLOOR)[:, None]
    error = attention - tl.where(rows[:, None] == others[None, :], 1.0, 0.0)
    tl.store(row_loss + run * pitch + rows, tl.sum(error * error, 1), mask=rows < length)
    wanted = 2.0 * error / length
    mean = tl.sum(wanted * attention, 1)
    if EXPONENTIAL:
        gradient = attention * (wanted - mean[:, None])
    else:
        # a normaliser at its floor does not move
        mean = tl.where(total >= FLOOR, mean, 0.0)
        gradient = tl.where(inside, (wanted - mean[:, None]) / tl.maximum(total, FLOOR)[:, None], 0.0)
    tl.store(matrix + place, gradient, mask=written)
    if ROOT:
        distance = tl.load(distances + place, mask=written, other=0.0)
        # the root has no derivative at zero, and none is taken
        share = tl.where(distance > 0, gradient / tl.where(distance > 0, distance, 1.0), 0.0)
        tl.store(distances + place, share, mask=written)


@triton.jit
def add_up(matrix, found, tiles, lengths, active, runs, pitch, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """`found (2, P, pitch)`: the sums of rows and of columns of the gradient, for the norms of the Riesz kernels."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    side = tl.program_id(1)
    base = matrix + run * pitch * pitch
    total = tl.zeros((ROWS,), found.dtype.element_ty)
    for begin in range(0, length, CHUNK):
        steps = begin + tl.arange(0, CHUNK)
        if side == 0:
            total += tl.sum(tl.load(base + rows[:, None] * pitch + steps[None, :]), 1)
        else:
            held = (steps < length)[:, None]
            total += tl.sum(tl.load(base + steps[:, None] * pitch + rows[None, :], mask=held, other=0.0), 0)
    tl.store(found + (side * runs + run) * pitch + rows, total)


@triton.jit
def slopes(
    marks, sizes, sums, matrix, distances, found, tiles, lengths, active, runs, pitch,
    KIND: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TAU: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`found (2, P, pitch, COUNT)`: the gradient by the features of both sides (`marks`), or by their `W u`.

    Beyond the end of a run the marks are zero, and the weights finite.
    """
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    side = tl.program_id(1)
    own, other = side * runs + run, (1 - side) * runs + run
    index = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    held = index < COUNT
    inside = (rows < length)[:, None] & held[None, :]
    kind = found.dtype.element_ty
    total = tl.zeros((ROWS, WIDTH), kind)
    if PAIRS:
        # a key reads its column of the matrix, a query its row
        down, along = tl.where(side == 0, pitch, 1), tl.where(side == 0, 1, pitch)
        # of riesz by the difference, the gradient over the distance
        weights = (distances if KIND == "riesz" else matrix) + run * pitch * pitch + rows * down
        point = tl.load(marks + (own * pitch + rows)[:, None] * COUNT + index[None, :], mask=held[None, :], other=0.0)
        here = _steepen(KIND, point)
        for step in tl.range(0, length, loop_unroll_factor=UNROLL):
            mark = _steepen(KIND, tl.load(marks + (other * pitch + step) * COUNT + index, mask=held, other=0.0))
            total += tl.load(weights + step * along)[:, None] * _slope(KIND, mark[None, :] - here)
        if KIND == "riesz" or KIND == "add_riesz":
            sum = tl.load(sums + own * pitch + rows)[:, None]
            if KIND == "riesz":
                norm = tl.load(sizes + own * pitch + rows)[:, None]
                total += sum / tl.where(norm > 0, norm, 1.0) * point
            else:
                total += sum * tl.clamp(point * STEEP, -1.0, 1.0)
    else:
        base = matrix + run * pitch * pitch
        for begin in range(0, length, CHUNK):
            steps = begin + tl.arange(0, CHUNK)
            if side == 0:
                weight = tl.load(base + rows[:, None] * pitch + steps[None, :])
            else:
                weight = tl.trans(tl.load(base + steps[:, None] * pitch + rows[None, :]))
            mark = tl.load(
                marks + (other * pitch + steps)[:, None] * COUNT + index[None, :], mask=held[None, :], other=0.0
            )
            total = tl.dot(weight, mark, total, input_precision=PRECISION, out_dtype=kind)
    tl.store(found + (own * pitch + rows)[:, None] * COUNT + index[None, :], total / TAU, mask=inside)


@triton.jit
def undo_features(
    points, features, slopes, deltas, tiles, lengths, active, runs, pitch,
    KIND: tl.constexpr, SHIFT: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """`deltas (2, P, pitch, D)`, by `W u` of both sides, from the gradient by the features."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    part = tl.program_id(1) * runs + run
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    base = points + (part * pitch + rows)[:, None] * D
    slope = slopes + (part * pitch + rows)[:, None] * COUNT
    feature = features + (part * pitch + rows)[:, None] * COUNT
    point = tl.load(base + dims[None, :], mask=inside, other=0.0)
    if KIND == "dpfp":
        delta = _above(point) * _half_slope(base, slope, dims, inside, SHIFT, D)
        delta -= _above(-point) * _half_slope(base, slope, dims + D, inside, SHIFT, D)
    else:
        delta = tl.load(slope + dims[None, :], mask=inside, other=0.0)
        if KIND == "relu":
            delta *= _above(point)
        elif KIND == "elu":
            delta *= tl.minimum(tl.load(feature + dims[None, :], mask=inside, other=0.0), 1.0)
        else:
            sine, cosine = (
                tl.load(feature + dims[None, :], mask=inside, other=0.0),
                tl.load(feature + D + dims[None, :], mask=inside, other=0.0),
            )
            delta = delta * cosine - tl.load(slope + D + dims[None, :], mask=inside, other=0.0) * sine
    tl.store(deltas + (part * pitch + rows)[:, None] * D + dims[None, :], delta, mask=inside)


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
    deltas, query_map, key_map, found, squares, tiles, lengths, active, runs, longest, pitch, slots,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`found (P, N, D)`, by the tokens; and the sum of its squares over the tile."""
    run, rows, length = _place(tiles, lengths, ROWS)
    if not tl.load(active + run):
        return
    dims = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (dims < D)[None, :]
    within = (dims < D)[None, :] & (dims < D)[:, None]
    place = run * D * D + dims[:, None] * D + dims[None, :]
    kind = found.dtype.element_ty
    total = tl.zeros((ROWS, WIDTH), kind)
    for side in tl.static_range(2):
        delta = tl.load(
            deltas + ((side * runs + run) * pitch + rows)[:, None] * D + dims[None, :], mask=inside, other=0.0
        )
        matrix = tl.load((query_map if side == 0 else key_map) + place, mask=within, other=0.0)
        total = tl.dot(delta, matrix, total, input_precision=PRECISION, out_dtype=kind)
    tl.store(found + (run * longest + rows)[:, None] * D + dims[None, :], total, mask=inside)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1) // ROWS
    tl.store(squares + run * slots + tile, tl.sum(total * total))


@triton.jit
def map_gradient(
    tokens, deltas, found, squares, lengths, active, runs, longest, pitch, slots, used,
    D: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
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
            deltas + (part * pitch + rows)[:, None] * D + mine[None, :],
            mask=(rows < length)[:, None] & (mine < D)[None, :], other=0.0,
        )  # fmt: skip
        token = tl.load(
            tokens + (run * longest + rows)[:, None] * D + dims[None, :],
            mask=(rows < length)[:, None] & (dims < D)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(delta), token, total, input_precision=PRECISION, out_dtype=found.dtype.element_ty)
    place = part * D * D + mine[:, None] * D + dims[None, :]
    tl.store(found + place, total, mask=(mine < D)[:, None] & (dims < D)[None, :])
    tl.store(squares + run * slots + used + side * tl.num_programs(2) + piece, tl.sum(total * total))


@triton.jit
def note(
    row_loss, squares, time, loss, lowest, active, steps, factors, lengths, pitch, slots,
    TARGET: tl.constexpr, CLIP: tl.constexpr, FLOOR: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The loss of a run, whether it goes on, and `factors (P, 3)`: of its gradient, of mean and square in Adam."""
    run = tl.program_id(0)
    if not tl.load(active + run):
        return
    rows = tl.arange(0, WIDTH)
    found = tl.sum(tl.load(row_loss + run * pitch + rows, mask=rows < tl.load(lengths + run), other=0.0))
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
