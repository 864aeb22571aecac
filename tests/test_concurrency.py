"""Several threads at once, a fork in between, and results that do not depend on the number of threads."""

import multiprocessing
import threading
import time

import pytest
import torch

import sortattn
from sortattn import threads as pool
from sortattn.ops.recorded import recorded

from .cases import CASES, FEATURES, Shape, assert_close, cotangent, draw, leaves

pytestmark = pytest.mark.usefixtures("cpu_only")

KERNELS = [*(CASES[name] for name in ("add_riesz", "add_laplace", "add_bump", "spline", "matern32"))]
every_kernel = pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)


def everything(case, inputs, gradient, backend: str = "sorted", **options) -> list[torch.Tensor]:
    """The output and all gradients, that of the bandwidth among them."""
    bandwidth = torch.tensor(case.bandwidth(inputs[0].shape[-1]), dtype=inputs[0].dtype)
    points = leaves(*inputs, bandwidth)
    output = sortattn.kernel_attention(*points[:3], case.kernel, bandwidth=points[3], backend=backend, **options)
    return [output.detach(), *torch.autograd.grad(output, points, gradient)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# thread counts

SIZES = {
    "small": Shape((2, 3), 63, 100, 5, 7),
    "one_head_C64": Shape((1,), 1000, 1200, 20, 64),
    "C130": Shape((1,), 300, 400, 20, 130),
    # enough numbers for torch's own reductions to be cut between threads
    "many_points": Shape((1,), 6000, 6000, 16, 16),
}


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES.keys())
@every_kernel
def test_one_thread_and_two_give_the_same_bits(case, shape, threads):
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)
    results = []
    for count in (1, 2, 1):
        threads(count)
        results.append(everything(case, inputs, gradient))
    assert same(results[0], results[2])
    for name, one, two in zip(("output", "query", "key", "value", "bandwidth"), results[0], results[1], strict=True):
        assert torch.equal(one, two), f"{name} differs between one thread and two"


@pytest.mark.parametrize("dims", [5, 20])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", CASES)
def test_one_thread_and_two_give_the_same_bits_by_blocks_and_by_features(name, causal, dims, threads):
    # one head and as many pairs, or points, as torch cuts a sum with a single result at; a few keys beyond two blocks,
    # but not for torch's own attention, whose gradients then differ by the number of threads
    shape, backend = Shape((1,), 300, 400 if name == "softmax" else 522, dims, 13), "tiled"
    if name in FEATURES:
        shape, backend = Shape((1,), 3000, 4000, dims, 12), "linear"
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)
    results = []
    for count in (1, 2):
        threads(count)
        results.append(everything(CASES[name], inputs, gradient, backend, is_causal=causal))
    assert same(*results)


def test_one_thread_and_two_give_the_same_bits_with_masked_and_grouped_keys(threads):
    shape = Shape((4,), 400, 3000, 16, 16)
    query, key, value = draw(shape, torch.float32)
    inputs, gradient = (query, key[:2], value[:2]), cotangent(shape, torch.float32)
    mask = torch.rand(3000, generator=torch.Generator().manual_seed(0)) < 0.5
    results = []
    for count in (1, 2):
        threads(count)
        results.append(everything(CASES["spline"], inputs, gradient, key_mask=mask, enable_gqa=True))
    assert same(*results)


def test_one_thread_and_two_give_the_same_gradients_of_coefficients(threads):
    inputs = draw(Shape((2,), 3000, 3000, 8, 16), torch.float32)
    results = []
    for count in (1, 2):
        threads(count)
        slopes = torch.tensor([-0.25, 0.75, -0.5, 0.125], requires_grad=True)
        kernel = sortattn.Spline([-1.0, 0.5, 2.0], slopes, offset=1.0)
        sortattn.kernel_attention(*inputs, kernel, backend="sorted").square().sum().backward()
        results.append([slopes.grad])
    assert same(*results)


# several Python threads


@pytest.mark.parametrize("count", [1, 2], ids=["one_worker", "two_workers"])
def test_eight_threads_at_once_get_what_they_would_get_alone(count, threads):
    threads(count)
    jobs = [(case, Shape((2, 2), 150, 170 + i, 6, 7)) for i, case in enumerate(KERNELS)]
    jobs += [(CASES[name], Shape((2, 2), 150, 180, 6, 7)) for name in ("laplace", "softmax", "elu")]
    assert len(jobs) == 8

    def work(case, shape):
        backend = {"laplace": "tiled", "softmax": "tiled", "elu": "linear"}.get(case.name, "sorted")
        return everything(case, draw(shape, torch.float32), cotangent(shape, torch.float32), backend)

    alone = [work(*job) for job in jobs]
    together, errors = [[] for _ in jobs], []
    start = threading.Barrier(len(jobs))

    def repeat(i):
        try:
            torch.set_num_threads(count)
            start.wait(60)
            together[i].extend(work(*jobs[i]) for _ in range(5))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=repeat, args=(i,), daemon=True) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not errors
    assert not any(worker.is_alive() for worker in workers), "a thread hangs"
    for expected, results in zip(alone, together, strict=True):
        assert len(results) == 5
        assert all(same(expected, result) for result in results)


# forks


def _in_child(queue, case, backend, inputs, gradient):
    # not `everything`, which copies first: torch's own loops are the caller's matter until the first call is made
    points = [part.detach().requires_grad_() for part in inputs]
    output = sortattn.kernel_attention(*points, case.kernel, backend=backend)
    queue.put([part.numpy() for part in (output.detach(), *torch.autograd.grad(output, points, gradient))])


CHILDREN = {
    "sorted": ("add_laplace", "sorted", Shape((4,), 90, 110, 4, 7)),
    # so many numbers that torch's own loops are parallel, in the parent; in a child they would wait for ever
    "sorted_long": ("add_laplace", "sorted", Shape((2,), 3000, 3000, 16, 16)),
    "tiled_long": ("add_laplace", "tiled", Shape((2,), 500, 500, 16, 16)),
    "linear_long": ("elu", "linear", Shape((2,), 3000, 3000, 16, 16)),
    "softmax_long": ("softmax", "tiled", Shape((2,), 1000, 1000, 16, 16)),
}


@pytest.mark.skipif(
    not hasattr(multiprocessing, "get_context") or "fork" not in multiprocessing.get_all_start_methods(),
    reason="no fork here",
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("name", "backend", "shape"), CHILDREN.values(), ids=CHILDREN.keys())
def test_a_forked_child_computes_as_its_parent_does(name, backend, shape, threads):
    threads(2)
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)
    # the last is the gradient of the bandwidth
    before = everything(CASES[name], inputs, gradient, backend)[:-1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [
        context.Process(target=_in_child, args=(queue, CASES[name], backend, inputs, gradient), daemon=True)
        for _ in range(2)
    ]
    for child in children:
        child.start()
    try:
        for _ in children:
            result = [torch.from_numpy(part) for part in queue.get(timeout=60)]
            if backend == "sorted":
                assert same(result, before)
            for one, other in zip(result, before, strict=True):
                assert_close(one, other, 1e-5)
        for child in children:
            child.join(60)
            assert child.exitcode == 0
    finally:
        for child in children:
            child.kill()
            child.join()
    # and the parent goes on
    assert same(everything(CASES[name], inputs, gradient, backend)[:-1], before)
    assert torch.get_num_threads() == 2


# the pool itself


def test_the_pool_runs_every_task_once(threads):
    for count in (1, 2, 5):
        threads(count)
        done = []
        pool.run(done.append, [(i,) for i in range(100)])
        assert sorted(done) == list(range(100))
        pool.run(done.append, [])


def test_the_pool_uses_as_many_threads_as_torch_has(threads):
    threads(3)
    meeting = threading.Barrier(3)
    names = set()

    def task(_):
        # passes only if three run at the same time
        meeting.wait(30)
        names.add(threading.get_ident())

    pool.run(task, [(i,) for i in range(3)])
    assert len(names) == 3


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_in_a_task_reaches_the_caller(count, threads):
    threads(count)

    def task(i):
        time.sleep(0.001)
        if i == 7:
            raise KeyError("seven")

    with pytest.raises(KeyError, match="seven"):
        pool.run(task, [(i,) for i in range(20)])
    # and the pool goes on
    done = []
    pool.run(done.append, [(1,), (2,), (3,)])
    assert sorted(done) == [1, 2, 3]


def test_a_pool_that_takes_no_more_work_leaves_it_to_the_caller(threads, monkeypatch):
    """As it is when the interpreter ends, and threads or what runs at the exit go on."""
    threads(2)
    ended = pool._Pool()
    ended.submit(1, lambda: None).result()
    ended.executor.shutdown()
    monkeypatch.setattr(pool, "_pool", ended)
    done = []
    pool.run(done.append, [(1,), (2,), (3,)])
    assert done == [1, 2, 3]


def test_autograd_is_at_work_inside_of_an_operator_and_only_there():
    @torch.library.custom_op("sortattn_tests::slope_of_square", mutates_args=())
    def slope_of_square(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        assert not (leaf * leaf).requires_grad
        return recorded(lambda: torch.autograd.grad((leaf * leaf).sum(), leaf)[0])

    with torch.no_grad():
        assert torch.equal(slope_of_square(torch.arange(3.0)), 2 * torch.arange(3.0))
        assert recorded(torch.is_grad_enabled)
        assert not torch.is_grad_enabled()
    with pytest.raises(KeyError, match="gone"):
        recorded(lambda: {}["gone"])


@pytest.mark.parametrize(("name", "backend"), [("tri", "tiled"), ("laplace", "tiled"), ("add_laplace", "grid")])
def test_a_backward_pass_waits_for_no_other_thread(name, backend, monkeypatch, threads):
    """With CUDA tensors it runs on the only thread that computes gradients; whoever waits there waits for ever."""
    threads(1)
    points = leaves(*draw(Shape((2,), 12, 12, 3, 2), torch.float32))
    output = sortattn.kernel_attention(*points, name, backend=backend, is_causal=True)

    def start(thread):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert all(part.isfinite().all() for part in torch.autograd.grad(output.sum(), points))


@pytest.mark.parametrize("name", ["laplace", "add_riesz", *FEATURES])
def test_tiled_gradients_need_no_grad_mode_of_the_caller(name):
    inputs, gradient = draw(Shape((2,), 9, 11, 3, 2), torch.float32), cotangent(Shape((2,), 9, 11, 3, 2), torch.float32)
    points = leaves(*inputs)
    output = sortattn.kernel_attention(*points, name, backend="tiled")
    with torch.no_grad():
        gradients = torch.autograd.grad(output, points, gradient)
    assert all((part != 0).any() for part in gradients)
