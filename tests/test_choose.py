"""The choice of `auto`: always a backend that serves the call, the sorted one where it is long."""

from pathlib import Path

import pytest
import torch

import sortattn
from sortattn import choose
from sortattn.bench.paper.run import PaperRow
from sortattn.bench.store import Row
from sortattn.ops.grid import checked
from sortattn.ops.grid.options import nodes_for
from sortattn.records import read
from sortattn.validation import make_problem

from .cases import CASES, Shape, assert_close, draw, refusal, relative_error

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAPER, CAUSAL, MADE = (RESULTS / f"h200-{name}.csv" for name in ("paper", "causal", "made"))
MADE_CAUSAL = RESULTS / "h200-made-causal.csv"

pytestmark = pytest.mark.usefixtures("cpu_only")


def chosen(case, shape: Shape, **options) -> str:
    kernel = sortattn.KERNELS.get(case.name, case.kernel)
    inputs = (part.expand(*part.shape) for part in draw(shape, torch.float32))
    return choose.cheapest(make_problem(*inputs, kernel, **options), kernel, normalised=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 100, 5000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_auto_takes_a_backend_that_serves_the_call(case, length, causal):
    name = chosen(case, Shape((1,), length, length, 4, 4), is_causal=causal)
    assert name != "keops"
    assert refusal(name, case, "cpu", causal=causal) is None


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_auto_sorts_what_is_long_and_only_that(name, causal):
    assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8), is_causal=causal) == "sorted"
    assert chosen(CASES[name], Shape((1,), 8, 8, 64, 64), is_causal=causal) != "sorted"


@pytest.mark.parametrize("name", ["tri", "relu", "elu", "dpfp"])
def test_auto_uses_feature_maps_where_there_are_many_points(name):
    assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8)) == "linear"


def test_auto_never_makes_a_dense_matrix_of_a_long_sequence():
    for name in ("softmax", "gauss", "laplace", "riesz"):
        assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8)) == "tiled"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """As if the CPU were one."""
    for kind in ("", " with gradients", " causal", " causal with gradients"):
        monkeypatch.setitem(choose._COSTS, f"cpu{kind}", choose._COSTS[f"sm_90{kind}"])


def taken_by_long(name: str, length: int, gradients: bool, causal: bool = False) -> str:
    kernel = CASES[name].kernel if name in MADE_BY_USERS else sortattn.KERNELS[name]
    inputs = (torch.zeros(1, 1, 1).expand(48, length, 64).requires_grad_(gradients) for _ in range(3))
    return choose.cheapest(make_problem(*inputs, kernel, is_causal=causal), kernel, normalised=True)


MADE_BY_USERS = ("spline", "matern32")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_auto_sorts_shorter_sequences_on_a_gpu_where_gradients_are_asked_for(name):
    assert [taken_by_long(name, length, False) for length in (700, 3000)] == ["tiled", "sorted"]
    assert [taken_by_long(name, length, True) for length in (512, 1500)] == ["tiled", "sorted"]
    with torch.no_grad():
        assert taken_by_long(name, 700, True) == "tiled"


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "with_gradients"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump", *MADE_BY_USERS])
def test_on_a_gpu_auto_takes_what_was_faster_there(name, causal, gradients):
    times = measured(name, causal, "forward+backward" if gradients else "forward")
    both = sorted(set.intersection(*(set(column) for column in times.values())))
    faster = {n: min(times, key=lambda backend: times[backend][n]) for n in both}
    assert faster[both[-1]] == "sorted"
    assert len(both) > 2
    for n in both:
        # near the crossing either will do
        assert times[taken_by_long(name, n, gradients, causal)][n] <= 1.15 * times[faster[n]][n], n


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "with_gradients"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_on_a_gpu_the_grid_has_the_lowest_estimate_of_long_causal_calls(name, gradients):
    # add_riesz takes 1.4 and 2.9 ms with 64 nodes where sorting takes 7.4 and 17
    for length in (8192, 16_384):
        inputs = [torch.zeros(1, 1, 1).expand(48, length, 64).requires_grad_(gradients) for _ in range(3)]
        kernel = sortattn.KERNELS[name]
        problem = make_problem(*inputs, kernel, is_causal=True)
        assert choose.cheapest(problem, kernel, True, (*choose.EXACT, "grid")) == "grid"


def measured(name: str, causal: bool, passes: str) -> dict[str, dict[int, float]]:
    """Milliseconds by backend and N on an H200."""
    if name in MADE_BY_USERS or causal:
        file = (MADE_CAUSAL if causal else MADE) if name in MADE_BY_USERS else CAUSAL
        rows = [(row, row.median_ms) for row in read(file, Row)]
    else:
        rows = [(row, row.mean_ms) for row in read(PAPER, PaperRow)]
    found = [(row.backend, row.n, ms) for row, ms in rows if (row.kernel, row.passes) == (name, passes)]
    return {which: {n: ms for backend, n, ms in found if backend == which} for which in ("tiled", "sorted")}


def test_a_gpu_is_judged_by_its_architecture_or_by_the_default(monkeypatch):
    def costs_on(capability: tuple[int, int]) -> dict:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return choose._COSTS[choose._kind_of(torch.device("cuda", 0))]

    monkeypatch.setitem(choose._COSTS, "sm_80", {})
    assert costs_on((8, 0)) is choose._COSTS["sm_80"]
    assert costs_on((9, 0)) is choose._COSTS["sm_90"]
    assert costs_on((12, 0)) is choose._COSTS[choose._DEFAULT]


def test_the_cost_model_can_be_printed():
    text = choose.cost_table()
    for word in ("sorted", "tiled", "reference", "linear", "add_laplace", "softmax", "P M N D"):
        assert word in text


# precision


@pytest.fixture
def rounding():
    sortattn.set_precision("rounding")
    yield
    sortattn.set_precision("exact")


def taken(shape: Shape, dtype: torch.dtype, **options) -> str:
    """The backend of a call with `auto`, with its setting."""
    kernel = sortattn.KERNELS["add_riesz"]
    problem = make_problem(*draw(shape, dtype), kernel, **options)
    run = choose.backend("auto", problem, kernel, normalised=True)
    if isinstance(run, choose.Checked):
        near = torch.equal(run.attention(problem, kernel), run.grid.attention(problem, kernel))
        if near:
            return f"grid:{run.grid.setting}"
        run = run.exact
    return run.__name__.split(".")[2]


@pytest.fixture
def cheap_grid(monkeypatch):
    """As if the grid were fast, as it is on GPUs."""
    costs = choose._COSTS["cpu causal"]["add_riesz"] | {"grid": choose.Cost(call=1.0)}
    monkeypatch.setitem(choose._COSTS["cpu causal"], "add_riesz", costs)


LONG = Shape((1,), 6000, 6000, 4, 4)
# what bfloat16 asks for with so few dimensions
NODES = nodes_for(2.0**-8, sortattn.KERNELS["add_riesz"], LONG.dims)


def test_auto_is_exact_unless_told_otherwise():
    assert sortattn.get_precision() == "exact"
    assert taken(LONG, torch.bfloat16, is_causal=True) == "causal"


@pytest.mark.usefixtures("rounding", "cheap_grid")
def test_rounding_takes_the_grid_for_16_bits_where_it_is_faster():
    assert taken(LONG, torch.bfloat16, is_causal=True).startswith("grid:")
    assert taken(LONG, torch.float16, is_causal=True).startswith("grid:")
    assert taken(LONG, torch.float32, is_causal=True) == "causal"
    # here sorting is faster
    assert taken(LONG, torch.bfloat16) == "sorted"


@pytest.mark.usefixtures("rounding", "cheap_grid")
def test_rounding_is_exact_where_the_estimate_is_too_large(monkeypatch):
    monkeypatch.setattr(checked, "by_head", lambda *_: torch.tensor([1e-4, 0.1]))
    assert taken(LONG, torch.bfloat16, is_causal=True) == "causal"


@pytest.mark.usefixtures("rounding", "cheap_grid")
def test_rounding_is_exact_where_no_number_can_be_read(monkeypatch):
    monkeypatch.setattr(checked, "by_head", lambda *_: pytest.fail("the estimate was read"))
    query, key, value = draw(LONG, torch.bfloat16)

    def call(query):
        return sortattn.kernel_attention(query, key[0], value[0], "add_riesz", is_causal=True)

    torch.func.vmap(call)(query)
    torch.compile(call, backend="eager")(query[0])


@pytest.mark.usefixtures("rounding", "cheap_grid")
@pytest.mark.parametrize("function", [sortattn.kernel_attention, sortattn.kernel_sum])
def test_rounding_costs_no_more_than_rounding(function):
    inputs = draw(LONG, torch.bfloat16)
    exact = [part.double() for part in inputs]
    wanted = function(*exact, "add_riesz", is_causal=True)
    assert_close(function(*inputs, "add_riesz", is_causal=True), wanted, 8e-3)


@pytest.mark.usefixtures("rounding", "cheap_grid")
def test_rounding_makes_sums_and_gradients_of_the_grid_once(monkeypatch):
    calls = []
    for name in ("attention", "kernel_sum"):
        method = getattr(choose.Grid, name)
        monkeypatch.setattr(choose.Grid, name, lambda *given, m=method: calls.append(m) or m(*given))
    for count, function in enumerate((sortattn.kernel_attention, sortattn.kernel_sum), 1):
        results = []
        for backend in ("auto", f"grid:{NODES}"):
            points = [part.requires_grad_() for part in draw(LONG, torch.bfloat16)]
            output = function(*points, "add_riesz", is_causal=True, backend=backend)
            results.append([output, *torch.autograd.grad(output.sum(), points)])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        assert len(calls) == 2 * count


def test_an_unknown_precision_is_a_clear_error():
    with pytest.raises(ValueError, match="precision must be one of exact, rounding, got 'low'"):
        sortattn.set_precision("low")


@pytest.mark.usefixtures("rounding")
def test_one_head_with_large_values_does_not_hide_the_error_of_another():
    query, key, value = (part.bfloat16() for part in torch.randn(3, 1, 2, 2048, 16).unbind())
    value[0, 1] *= 1e-3
    query[0, 1] *= 30
    key[0, 1] *= 30
    output, exact = (
        sortattn.kernel_attention(query, key, value, "add_laplace", is_causal=True, backend=backend)
        for backend in ("auto", "tiled")
    )
    for head in range(2):
        assert relative_error(output[0, head], exact[0, head].double()) < 1e-2


@pytest.mark.usefixtures("rounding", "cheap_grid")
def test_rounding_works_under_autocast():
    points = torch.randn(1, 1, 3000, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = sortattn.kernel_attention(points, points, points, "add_riesz", is_causal=True)
    assert output.dtype == torch.bfloat16
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("name", [None, 128, "sorted:", "grid:", "tiled:64"])
def test_what_is_no_name_of_a_backend_is_refused(name):
    points = torch.randn(1, 4, 2)
    with pytest.raises(ValueError, match="unknown backend"):
        sortattn.kernel_attention(points, points, points, backend=name)
