"""`sortattn text eval` and `sortattn text pareto`: from the options to scores and times."""

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from ...bench.command import check_names, usable_device
from ...bench.machine import now, this_machine, version
from ...bench.progress import progress
from ...bench.run import use_threads
from ...choose import NAMES
from ...errors import CommandError
from ...kernels import KERNELS
from ...records import Records
from ...table import render
from . import hub, pareto, scores
from .data import Pairs, Report, Retrieval, read_cranfield, read_qmsum, read_sts, show
from .encoder import Encoder, load, saved_kernel
from .evaluate import first, retrieval, similarity, texts
from .hub import HubTask
from .results import Question, Result, Results

# tokens of a sentence or an abstract; meetings have lengths of their own
TOKENS = 512


def evaluate_text(options: Namespace) -> int:
    """Evaluates what the options ask for; returns the exit code."""
    check_names("kernel", options.kernel, list(KERNELS))
    if options.smoke:
        options.limit, options.lengths = 4, [64]
    device = usable_device(options.device)
    use_threads(options.threads)
    results = Results(options.out / "results.csv", fresh=options.fresh)
    asked = list(_tasks(options))
    if not asked:
        raise CommandError(
            "expected something to evaluate on: --sts FILE, --cranfield FOLDER, --qmsum FILE or --mteb NAME"
        )
    encoder = None
    with progress(sum(_size(task) for _, task in asked)) as advance:
        for question, task in asked:
            if question in results:
                advance(f"{question.task}: in {results.path} already", _size(task))
                continue
            encoder = _encoder(question, device, encoder)
            results.add(_answer(encoder, question, task, device, advance))
    wanted = [question for question, _ in asked]
    _show_results([row for row in results.rows if row.question in wanted], results.path)
    return 0


def show_scores(options: Namespace) -> int:
    """Prints the table of all scores in a file; returns the exit code."""
    rows = Results(options.results).rows
    if not rows:
        raise CommandError(f"no scores in {options.results}: expected a file that `sortattn text eval` has written")
    print(scores.score_table(rows, options.format))
    if options.format != "csv":
        print(f"\n{scores.conditions(rows)}\n\nThe paper's figures: {scores.published()[1]}")
    return 0


def pareto_text(options: Namespace) -> int:
    """Times what the options ask for, and draws it with the scores there are; returns the exit code."""
    kernels, backends = options.kernel or list(KERNELS), options.backend or ["auto"]
    check_names("kernel", kernels, list(KERNELS))
    check_names("backend", backends, NAMES)
    device = usable_device(options.device)
    use_threads(options.threads)
    lengths = [64] if options.smoke else sorted(set(options.lengths))
    path, source = options.out / "pareto.csv", options.results or options.out / "results.csv"
    results = Results(source).rows
    kept = Records(path, pareto.Point, {})
    points = kept.rows
    cases = [
        (kernel, backend, tokens, options.precision, device)
        for tokens in lengths
        for kernel, backend in [pareto.SOFTMAX, *((kernel, backend) for kernel in kernels for backend in backends)]
    ]
    missing = [case for case in cases if case not in [point.case for point in points]]
    models = {}
    with progress(len(missing)) as advance:
        for case in missing:
            kernel, backend, tokens, *_ = case
            advance(f"{kernel} ({backend}), {tokens:,} tokens", 0)
            if tokens not in models:
                models = {tokens: load(options.model, tokens=tokens, device=device)[0]}
            kept.add(pareto.measure(models[tokens], *case))
            advance("", 1)
    _show_pareto([point for point in points if point.case in cases], results, options.out)
    return 0


def _show_pareto(points: list, results: list[Result], folder: Path) -> None:
    print(pareto.time_table(points, results))
    if all(pareto.quality(results, point.kernel, point.tokens) is None for point in points):
        print("\nPlot: none, as no evaluation has these lengths; run `sortattn text eval --qmsum ...` first")
        return
    try:
        pareto.save_plot(points, results, folder / "pareto.png")
        print(f"\nPlot: {folder / 'pareto.png'}")
    except ImportError:
        print("\nPlot: none; it needs matplotlib: pip install 'sortattn[bench]'")


def _tasks(options: Namespace) -> Iterator[tuple[Question, Pairs | Retrieval | HubTask]]:
    report = Report()
    tasks = [(read_sts(path, report), TOKENS) for path in options.sts]
    tasks += [(read_cranfield(options.cranfield, report), TOKENS)] if options.cranfield else []
    meetings = [read_qmsum(path, report) for path in options.qmsum]
    tasks += [(task, tokens) for tokens in sorted(set(options.lengths)) for task in meetings]
    show(report)
    if options.limit is not None:
        tasks = [(first(task, options.limit), tokens) for task, tokens in tasks]
    tasks += [(task, options.mteb_tokens) for task in hub.hub_tasks(options.mteb)] if options.mteb else []
    for model in options.model:
        for kernel in options.kernel or [saved_kernel(model)]:
            for task, tokens in tasks:
                yield Question(model, kernel, task.name, tokens, options.limit or 0, options.prefixes), task


def _size(task: Pairs | Retrieval | HubTask) -> int:
    return 0 if isinstance(task, HubTask) else texts(task)


def _encoder(question: Question, device: str, last: Encoder | None) -> Encoder:
    """An encoder for this question: the last one, if it has the same model with the same positions."""
    if last is not None and last.serves(question.model, question.kernel, question.tokens):
        return replace(last, tokens=question.tokens)
    kernel = None if question.kernel == saved_kernel(question.model) else question.kernel
    model, tokenizer = load(question.model, tokens=question.tokens, device=device, kernel=kernel)
    return Encoder(model, tokenizer, question.tokens, question.model, question.kernel)


def _answer(encoder: Encoder, question: Question, task, device: str, advance) -> Result:
    started = time.perf_counter()
    name = f"{question.task}, {question.tokens:,} tokens"

    def done(count: int) -> None:
        # how many texts a task of the hub has is not known before
        advance(name, 0 if isinstance(task, HubTask) else count)

    if isinstance(task, HubTask):
        metric, value, count = hub.evaluate_hub(encoder, task, question.prefixes, done)
    else:
        measure, metric = (similarity, "spearman") if isinstance(task, Pairs) else (retrieval, "ndcg@10")
        value, count = measure(encoder, task, question.prefixes, done), texts(task)
    seconds = round(time.perf_counter() - started, 2)
    return Result(
        **asdict(question), metric=metric, value=round(value, 6), texts=count, seconds=seconds, device=device,
        transformers=version("transformers") or "", **asdict(this_machine(device)), date=now(),
    )  # fmt: skip


def _show_results(rows: list[Result], path: Path) -> None:
    header = ["model", "kernel", "task", "tokens", "metric", "value", "texts", "seconds"]
    lines = [
        [
            row.model,
            row.kernel,
            row.task,
            f"{row.tokens:,}",
            row.metric,
            f"{row.value:.4f}",
            f"{row.texts:,}",
            f"{row.seconds:.1f}",
        ]
        for row in rows
    ]
    print(render(header, lines, "text", left=3))
    print(f"\nResults: {path}")
