"""The walker's CUDA sources compile for every kind of kernel, and what the host makes of a kernel's terms."""

import contextlib
import math

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import (
    cuda,
    cuda_chain,
    cuda_coil,
    cuda_mutual,
    cuda_reel,
    cuda_relay,
    cuda_sort,
    cuda_trade,
    cuda_walk,
    room,
    sign,
)
from sortattn.ops.sorted.api import _derivative
from sortattn.ops.sorted.tracks import tracks_of

from .cases import BOX, CASES, SIDED
from .nvrtc import ARCHITECTURES, machine_code

pytest.importorskip("cuda.core")

KERNELS = {name: sortattn.KERNELS.get(name, CASES[name].kernel) for name in SIDED} | {"box": BOX.kernel}


def on_a_gpu(monkeypatch, kernel) -> None:
    """Lets the code for GPUs run as for a large one, with something in place of its kernels."""
    monkeypatch.setattr(launch, "Kernel", kernel)
    monkeypatch.setattr(room, "device", lambda device: room.Device(132, 50 << 20, 227 << 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def all_defines(terms, dtype=torch.float32, width=64, ordered=False, passing=False, along=False):
    """For sums of values, for the gradient of queries, and for those of values and keys together."""
    for tracks, added, multiplied in (
        (tracks_of(terms, mirrored=False), True, False),
        (tracks_of(_derivative(terms), mirrored=False), False, True),
        (tracks_of(terms, mirrored=True, slopes=True), True, True),
    ):
        yield cuda_walk.defines_of(
            tracks, dtype, width, added=added, multiplied=multiplied, ordered=ordered, passing=passing, along=along
        )


def compile_walks(name, architecture, **options) -> None:
    for defines in all_defines(KERNELS[name].terms()):
        assert b"walk" in machine_code(cuda_walk.SOURCE, defines, architecture, **options)
        code = machine_code(cuda_walk.MOMENTS, cuda_walk.for_moments(defines), architecture, **options)
        for entry in (b"summarise", b"accumulate"):
            assert entry in code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_walks_of_values_and_of_gradients_compile(name, architecture):
    compile_walks(name, architecture)


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_walks_compile_as_for_a_user(name):
    compile_walks(name, "sm_90", optimised=True)


@pytest.mark.parametrize(
    ("each", "warps"),
    # two turns in place of three; hardly fewer in all; as many; without end; no number of runs
    [(46.5, 24), (69.8, 20), (40.0, 20), (1000.0, 20), (math.inf, 20), (0.0, 20)],
)
def test_runs_of_a_spline_have_more_warps_where_the_last_turn_would_be_empty(each, warps):
    spline, line = (tracks_of(KERNELS[name].terms(), mirrored=False) for name in ("add_bump", "add_laplace"))
    assert cuda_walk.resident(spline, True, False, each) == warps
    # with products there are no registers for more, and with one node there are that many already
    assert cuda_walk.resident(spline, True, True, each) == 20
    assert cuda_walk.resident(spline, False, True, each) == 16
    assert cuda_walk.resident(line, True, False, each) == 24


@pytest.mark.parametrize(("number", "warps"), [(2048, 24), (3000, 20)])
def test_the_walk_of_a_call_is_compiled_for_so_many_warps(number, warps, monkeypatch):
    found = []

    class Noted:
        def __init__(self, source, entry, defines=()):
            found.append((entry, dict(defines).get("RESIDENT")))

        def __call__(self, *arguments, **options):
            pass

    on_a_gpu(monkeypatch, Noted)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    points, rows = (torch.empty(48, number, 64, device="meta") for _ in range(2))
    lines = cuda.points(points)
    cuda.scatter(lines, lines, rows, None, KERNELS["add_bump"].terms(), 1.0, False)
    assert ("walk", warps) in found


@pytest.mark.parametrize(
    ("dtype", "width", "ordered"),
    [(torch.float64, 64, False), (torch.float32, 32, False), (torch.float32, 128, False), (torch.float32, 64, True)],
    ids=["float64", "few_channels", "many_channels", "ordered"],
)
def test_other_types_and_widths_compile(dtype, width, ordered):
    terms = KERNELS["add_bump"].terms()
    for defines in all_defines(terms, dtype, width, ordered):
        assert b"walk" in machine_code(cuda_walk.SOURCE, defines, "sm_90")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("width", "passing"), [(32, True), (64, False), (64, True)])
def test_relays_compile(width, passing, architecture):
    walking = next(all_defines(KERNELS["add_riesz"].terms(), width=width, passing=passing))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        warps = cuda_relay.warps_of(width, dtype.itemsize)
        defines = cuda_relay.defines_of(walking, warps, 1 + (width == 64), dtype)
        assert b"relay" in machine_code(cuda_relay.SOURCE, defines, architecture)
        code = machine_code(cuda_relay.HALVES, defines, architecture)
        for entry in (b"sum_halves", b"fill"):
            assert entry in code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("width", "passing"), [(32, True), (64, False), (64, True)])
def test_walks_around_wound_lines_compile(width, passing, architecture):
    walking = next(all_defines(KERNELS["add_bump"].terms(), width=width, passing=passing))
    defines = *cuda_relay.defines_of(walking, cuda_coil._WARPS, 1 + (width == 64)), ("CELLS", cuda_coil.CELLS)
    assert b"coil" in machine_code(cuda_coil.SOURCE, defines, architecture)
    code = machine_code(cuda_coil.WHOLE, defines, architecture)
    for entry in (b"begin_cells", b"add_cells"):
        assert entry in code
    assert b"wind" in machine_code(cuda_coil.WINDING, (("CELLS", cuda_coil.CELLS), ("STRAYS", 0)), architecture)
    assert b"mend" in machine_code(cuda_coil.MEND, defines, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("width", "along"), [(32, True), (64, False), (64, True)])
def test_gradients_around_wound_lines_compile(width, along, architecture):
    tracks = tracks_of(KERNELS["add_bump"].terms(), mirrored=True, slopes=True)
    defines = cuda_reel.macros(cuda_trade.macros(tracks, width, parts=1, along=along))
    assert b"reel" in machine_code(cuda_reel.SOURCE, defines, architecture)
    assert b"untie" in machine_code(cuda_reel.TIES, defines, architecture)
    for weighted in (0, 1):
        code = machine_code(cuda_reel.TALLY, (*defines, ("WEIGHTED", weighted)), architecture)
        for entry in (b"tally", b"begin_reel"):
            assert entry in code


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("width", "passing"), [(32, True), (64, False), (64, True)])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace"])
def test_walks_of_all_gradients_compile(name, width, passing, architecture):
    tracks = tracks_of(KERNELS[name].terms(), mirrored=False, slopes=True)
    assert cuda_mutual.serves(tracks, torch.float32)
    *_, defines = all_defines(KERNELS[name].terms(), width=width, passing=passing, along=passing)
    assert b"mutual" in machine_code(cuda_mutual.SOURCE, defines, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("width", "passing"), [(32, True), (64, False), (64, True)])
def test_chains_compile(width, passing, architecture):
    *_, walking = all_defines(KERNELS["add_riesz"].terms(), width=width, passing=passing, along=passing)
    defines = cuda_relay.defines_of(walking, cuda_relay.WARPS, 1 + (width == 64))
    assert b"chain" in machine_code(cuda_chain.SOURCE, defines, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_delivery_compiles(architecture):
    assert b"deliver" in machine_code(cuda._DELIVER, (("EACH", cuda._EACH),), architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_walks_of_all_gradients_of_splines_compile(width, architecture):
    tracks = tracks_of(KERNELS["add_bump"].terms(), mirrored=True, slopes=True)
    defines = cuda_trade.macros(tracks, width, parts=1, along=width == 64)
    for source, entries in ((cuda_trade.SOURCE, (b"trade",)), (cuda_trade.BRIDGE, (b"bridge", b"settle"))):
        code = machine_code(source, defines, architecture)
        for entry in entries:
            assert entry in code


def test_only_gradients_of_compact_splines_without_jumps_are_walked_along_the_keys():
    kinds = {
        "jump": sortattn.Spline([-1.0, 1.0], [0.0, -0.5, 0.0], jumps=[1.0, 0.0]),
        "not compact": sortattn.Spline([-1.0, 1.0], [0.0, -0.5, 0.0], offset=1.0),
        "two nodes above zero": sortattn.Spline([0.0, 1.0, 3.0], [0.0, 1.0, -0.5, 0.0]),
    }
    served = [
        name
        for name, kernel in (KERNELS | kinds).items()
        for tracks in (tracks_of(kernel.terms(), mirrored=True, slopes=True),)
        if cuda_trade.serves(tracks, torch.float32)
    ]
    assert served == ["add_bump", "two nodes above zero"]
    assert not cuda_trade.serves(tracks_of(KERNELS["add_bump"].terms(), mirrored=True, slopes=True), torch.float64)


def test_only_gradients_of_kernels_that_are_their_own_transpose_are_walked_together():
    served = [
        name
        for name, kernel in KERNELS.items()
        if cuda_mutual.serves(tracks_of(kernel.terms(), mirrored=False, slopes=True), torch.float32)
    ]
    assert served == ["add_riesz", "add_laplace"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_walks_of_long_heads_compile(architecture):
    for defines in all_defines(KERNELS["add_laplace"].terms(), passing=True):
        assert b"walk" in machine_code(cuda_walk.SOURCE, defines, architecture)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_that_a_call_of_a_sign_sum_launches_compiles(architecture, dtype, monkeypatch):
    """Forward and backward, with and without atomics."""
    compiled = {}

    class Compiled:
        def __init__(self, source, entry, defines=()):
            if (source, defines) not in compiled:
                compiled[source, defines] = machine_code(source, defines, architecture)
            assert entry.encode() in compiled[source, defines]

        def __call__(self, *arguments, **options):
            pass

    on_a_gpu(monkeypatch, Compiled)
    monkeypatch.setattr(sign, "walker", lambda device: cuda)
    points = [torch.zeros(1, 300, 2, dtype=dtype, requires_grad=True) for _ in range(4)]
    for ordered in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda ordered=ordered: ordered)
        sortattn.weighted_sign_sum(*points, backend="sorted").sum().backward()
    walks = [dict(defines) for source, defines in compiled if source == cuda_walk.SOURCE]
    assert {(walk["PRODUCTS"], walk["ORDERED"]) for walk in walks} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sorts_compile(architecture):
    kinds = [(sorter, torch.float32, wound) for sorter in cuda_sort.SORTERS for wound in (False, True)]
    kinds += [(cuda_sort.SORTERS[-1], dtype, False) for dtype in (torch.float16, torch.bfloat16)]
    for sorter, dtype, wound in kinds:
        code = machine_code(cuda_sort.SOURCE, cuda_sort._defines(*sorter, dtype, wound), architecture)
        for entry in (b"sort_runs", b"split", b"sort_parts", b"sort_rest", b"merge_runs"):
            assert entry in code


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("derivative", [False, True], ids=["values", "derivative"])
@pytest.mark.parametrize("mirrored", [False, True], ids=["plain", "transposed"])
def test_the_tracks_add_up_to_the_kernel_at_ties_too(name, derivative, mirrored):
    kernel = KERNELS[name]
    terms = _derivative(kernel.terms()) if derivative else kernel.terms()
    tracks = tracks_of(terms, mirrored)
    # between the nodes, at them, and far outside, on both sides of zero
    targets = [-2.3, 0.0, 0.5, 3.0]
    steps = [-7.0, -0.3, 0.0, 0.4, 9.0, *terms.nodes.tolist(), *(-terms.nodes).tolist()]

    def polynomial(table, z):
        return sum(c * z**i for i, c in enumerate(table)) * math.exp(-terms.rate * z)

    def by_terms(u):
        return sum(
            polynomial(table, z) * (0.5 if z == 0 else 1.0)
            for node, below, above in zip(terms.nodes.tolist(), terms.below.tolist(), terms.above.tolist(), strict=True)
            for table, z in ((below, u - node), (above, -u - node))
            if z >= 0
        )

    def definition(s, t):
        if not terms.folded:
            return by_terms(s - t)
        return sum(
            (by_terms(sign * (s - t)) - by_terms(sign * s)) * (sign if terms.folded < 0 else 1)
            for sign in (1, -1)
            if sign * t > 0 and (sign * s > 0 or (s == 0 and terms.folded < 0))
        )

    def by_tracks(s, t):
        total = 0.0
        for i in range(tracks.number):
            track = tracks.only(i)
            flipped, closed, negated = track.mirrored, track.closed, track.negated
            *numbers, rate = track.tables[0]
            assert rate == terms.rate
            nodes = numbers[: tracks.nodes]
            # below and, if sources above count, above
            tables = torch.tensor(numbers[tracks.nodes :]).reshape(-1, tracks.nodes, tracks.powers).tolist()
            assert len(tables) == 1 + tracks.both
            target, source = (-s, -t) if flipped else (s, t)
            if tracks.folded and (source <= 0 or target < 0 or (target == 0 and tracks.folded > 0)):
                continue
            # a folded track begins with all sources at zero, of which those at an odd kernel's zero count half
            places = [(source, 1.0), (0.0, -1.0)] if tracks.folded else [(source, 1.0)]
            part = 0.0
            for place, share in places:
                for above, side in enumerate(tables):
                    for node, table in zip(nodes, side, strict=True):
                        z = (place - target if above else target - place) - node
                        tie = 0.5 if tracks.halves else float(closed != above)
                        part += share * (1.0 if z > 0 else tie if z == 0 else 0.0) * polynomial(table, z)
            total += -part if negated else part
        return total

    for s in targets:
        for step in steps:
            t = s - step
            expected = definition(s, t) if not mirrored else definition(t, s)
            if mirrored and terms.folded:
                # its own transpose, and the derivative's is by the other argument
                expected = definition(s, t) * (-1 if terms.folded < 0 else 1)
            assert by_tracks(s, t) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_kernel_with_more_nodes_than_there_is_room_for_is_refused():
    nodes = torch.arange(200, dtype=torch.float64)
    terms = sortattn.Spline(nodes, torch.ones(201, dtype=torch.float64)).terms()
    with pytest.raises(RuntimeError, match="no room for 200 nodes .* use backend='tiled'"):
        list(all_defines(terms))


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_without_atomics_two_warps_that_run_at_a_time_have_different_targets(name, monkeypatch):
    """Where sums are added in place, a launch has one track, one dimension or product, and all products one part."""
    launches = []

    class Recorder:
        def __init__(self, source, entry, defines=()):
            self.entry, self.defines = entry, dict(defines)

        def __call__(self, grid, block, *arguments, shared=0):
            if self.entry == "walk":
                launches.append((self.defines, grid[1], arguments[15:17], arguments[-3]))

    on_a_gpu(monkeypatch, Recorder)
    terms = KERNELS[name].terms()
    dims, channels = 3, 200
    lines = cuda.Lines(torch.zeros(2, dims, 40), torch.zeros(2, dims, 40, dtype=torch.int32), torch.zeros(2, 40, dims))
    rows, extra = torch.zeros(2, 40, channels), torch.zeros(2, 40)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    cuda.scatter(lines, lines, rows, extra, terms, 1.0, False)
    points = torch.empty(2, 40, dims)
    into = (points, points.clone(), torch.empty_like(rows), torch.empty_like(extra))
    cuda.gradients(lines, lines, rows, extra, rows, extra, terms, _derivative(terms), 1.0, into)
    tracks = tracks_of(terms, False).number
    # sums: tracks times dimensions; products: tracks times parts; both: times all of them
    assert len(launches) == tracks * dims + tracks * 2 + tracks * dims * 2
    for defines, parts, (_, sides), some_dims in launches:
        assert defines["ORDERED"] == 1
        assert sides == 1
        assert some_dims == 1 or defines["PRODUCTS"]
        assert parts == 1 or not (defines["PRODUCTS"] or defines["SLOPES"])
