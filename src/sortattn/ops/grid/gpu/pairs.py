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

# ones and minus ones in float16
_ONES, _MINUS = tl.constexpr(0x3C003C003C003C00), tl.constexpr(-0x43FF43FF43FF4400)
_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def _both(*terms: str, constant: str = "0") -> tl.constexpr:
    """The terms of 16 dimensions of the queries $8 ... $15 with the key $16, times $17, added to the sums $18 ... $25.

    `terms` are one instruction after the other for a register: `@a` from `@s` of the queries and `@t` of the key. There
    may be another for the second two of four dimensions, behind a bar.
    """
    code = f"{{.reg .b32 t<2>, p<2>, c, a<8>; mov.b64 {{t0, t1}}, $16; mov.b64 {{p0, p1}}, $17; mov.b32 c, {constant}; "
    for term in terms:
        for at in range(8):
            # of queries eight apart the first two dimensions, then the second two; and so of the other product
            second = at // 2 % 2
            one = term.split("|")[second if "|" in term else 0]
            code += one.replace("@a", f"a{at}").replace("@s", f"${8 + at}").replace("@t", f"t{second}") + "; "
    code += f"{_PRODUCT} {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{p0, p1}}, {{$18, $19, $20, $21}}; "
    code += f"{_PRODUCT} {{$4, $5, $6, $7}}, {{a4, a5, a6, a7}}, {{p0, p1}}, {{$22, $23, $24, $25}};}}"
    return tl.constexpr(code)


# max(s - t, 0) and max(s, t), which are made by different units at the same time
_RIESZ = _both("fma.rn.relu.f16x2 @a, @t, c, @s|max.f16x2 @a, @s, @t", constant="0xBC00BC00")
_BUMP = _both("sub.f16x2 @a, @s, @t", "abs.f16x2 @a, @a", "sub.sat.f16x2 @a, c, @a", constant="0x3C003C00")
# of points times log2(e)
_LAPLACE = _both("sub.f16x2 @a, @s, @t", "abs.f16x2 @a, @a", "neg.f16x2 @a, @a", "ex2.approx.f16x2 @a, @a")
# the second factor is max(-t, 0) or max(t, 0) of eight keys $8, the first one minus one
_LESS = tl.constexpr(
    "{.reg .b32 t<2>, m, n, z; mov.b64 {t0, t1}, $8; mov.b64 {m, n}, $9; mov.b32 z, 0; "
    "neg.f16x2 t0, t0; max.f16x2 t0, t0, z; max.f16x2 t1, t1, z; "
    f"{_PRODUCT} {{$0, $1, $2, $3}}, {{m, m, m, m}}, {{t0, t1}}, {{$10, $11, $12, $13}}; "
    f"{_PRODUCT} {{$4, $5, $6, $7}}, {{m, m, m, m}}, {{t0, t1}}, {{$14, $15, $16, $17}};}}"
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
def _add(sums, queries, key, column, KIND: tl.constexpr):
    """Of 16 dimensions: `sums` and the terms of the queries with a key, in its column."""
    if KIND == "riesz":
        code: tl.constexpr = _RIESZ
    elif KIND == "bump":
        code: tl.constexpr = _BUMP
    else:
        code: tl.constexpr = _LAPLACE
    return tl.inline_asm_elementwise(
        code,
        "=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r,r,r,r,r,l,l,f,f,f,f,f,f,f,f",
        queries + (key, column) + sums,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _less(sums, key, minus):
    """Of 16 dimensions: `sums` less what eight keys, among them that of a thread, give for queries that are zero."""
    return tl.inline_asm_elementwise(
        _LESS,
        "=f,=f,=f,=f,=f,=f,=f,=f,l,l,f,f,f,f,f,f,f,f",
        (key, minus) + sums,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _fetch(address):
    """Has the memory at addresses loaded into the cache of the multiprocessor."""
    return tl.inline_asm_elementwise(
        "{prefetch.global.L1 [$1]; mov.b32 $0, 0;}", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_query(queries, row, last, thread, step, D: tl.constexpr):
    """Four dimensions of a query as two registers."""
    four = tl.load(queries + tl.minimum(tl.maximum(row, 0), last) * (D // 4) + step * 4 + thread % 4)
    return four.to(tl.int32), (four >> 32).to(tl.int32)


@triton.jit
def _load_key(keys, n, step, thread, seen, D: tl.constexpr, EVEN: tl.constexpr):
    """Four dimensions of a key."""
    spot = keys + n * (D // 4) + step * 4 + thread % 4
    if EVEN:
        return tl.load(spot)
    else:
        return tl.load(spot, mask=n < seen, other=0)


@triton.jit
def _eight(keys, n0, seen, queries, begin, thread, D: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr):
    """The sums of a thread with the eight keys from `n0` on: `(threads, 2 keys, 2 queries, 2 products)`."""
    sums = begin
    if KIND == "riesz":
        minus = tl.full(thread.shape, _MINUS, tl.int64)
        for step in tl.static_range(D // 16):
            sums = _less(sums, _load_key(keys, n0 + thread // 4 % 8, step, thread, seen, D, EVEN), minus)
    for j in tl.static_range(8):
        column = tl.where(thread // 4 % 8 == j, _ONES, 0)
        for step in tl.static_range(D // 16):
            sums = _add(sums, queries[step], _load_key(keys, n0 + j, step, thread, seen, D, EVEN), column, KIND)
    return tl.join(
        tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3])),
        tl.join(tl.join(sums[4], sums[5]), tl.join(sums[6], sums[7])),
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
    rows += problem * seen * channels + part * CHANNELS
    WARPS: tl.constexpr = ROWS // 32
    thread = tl.arange(0, ROWS)
    row = tile * ROWS + thread // 32 * 32 + thread // 4 % 8 - offset
    points = ()
    for step in tl.static_range(D // 16):
        one = _load_query(queries, row, length - 1, thread, step, D)
        two = _load_query(queries, row + 8, length - 1, thread, step, D)
        three = _load_query(queries, row + 16, length - 1, thread, step, D)
        four = _load_query(queries, row + 24, length - 1, thread, step, D)
        points = points + ((one[0], two[0], one[1], two[1], three[0], four[0], three[1], four[1]),)
    zero = tl.zeros((ROWS,), tl.float32)
    begin = (zero, zero, zero, zero, zero, zero, zero, zero)
    if KIND == "riesz":
        minus, nothing = tl.full((ROWS,), _MINUS, tl.int64), tl.zeros((ROWS,), tl.int64)
        for step in tl.static_range(D // 16):
            begin = _add(begin, points[step], nothing, minus, KIND)
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for n0 in range(start, stop, 16):
        n = n0 + tl.arange(0, 16)
        # by half of the lanes the next keys, by the others their rows
        ahead = tl.minimum(n0 + 16 + thread % 16, seen - 1)
        key_at, row_at = (keys + ahead * (D // 4)).to(tl.int64), (rows + ahead * channels).to(tl.int64)
        _fetch(tl.where(thread % 32 < 16, key_at, row_at))
        sums = tl.join(
            _eight(keys, n0, seen, points, begin, thread, D, KIND, EVEN),
            _eight(keys, n0 + 8, seen, points, begin, thread, D, KIND, EVEN),
        )
        # warps, rows, columns in pairs, two of them, rows eight on, products, columns eight on
        sums = tl.permute(tl.reshape(sums, (WARPS, 8, 4, 2, 2, 2, 2)), (0, 5, 4, 1, 6, 2, 3))
        sums = tl.reshape(sums, (ROWS, 16))
        if KIND == "riesz":
            # |s| + |t| - |s - t| is twice max(s, 0) + max(-t, 0) - max(s - t, 0), or max(s, 0) + max(t, 0) - max(s, t)
            sums = D * epsilon * scale - sums * (2 * scale / tau if WHOLE else 2 * scale)
        else:
            sums *= scale
        allowed = n[None, :] <= place[:, None]
        if MASKED:
            allowed = allowed & (tl.load(weight + problem * seen + n, mask=n < seen, other=0.0) > 0)[None, :]
        sums = tl.where(allowed, sums, 0.0)
        total += tl.sum(sums, 1)
        rows_at = rows + n[:, None] * channels + tl.arange(0, CHANNELS)[None, :]
        value = tl.load(rows_at, mask=(n < seen)[:, None] & has[None, :], other=0.0)
        if value.dtype == tl.float16:
            found = tl.dot(sums.to(tl.float16), value, found)
        else:
            found = tl.dot(sums, value.to(tl.float32), found, input_precision=PRECISION)
    tl.store(out + at[:, None] * channels + channel[None, :], found / scale, mask=here[:, None] & has[None, :])
    tl.store(totals + at, total / scale, mask=here)
