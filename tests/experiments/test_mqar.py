"""Multi-query associative recall: the task, the model, and the command around them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sortattn.cli import main
from sortattn.experiments.mqar import command
from sortattn.experiments.mqar.command import Row, accuracy_table, best
from sortattn.experiments.mqar.model import make_model
from sortattn.experiments.mqar.plot import draw
from sortattn.experiments.mqar.task import NOTHING, length_for, make_batch
from sortattn.experiments.mqar.training import TEST_SEED, Run, Trainer, make_trainer, questions, rate_at, seed_of
from sortattn.records import read

ROOT = Path(__file__).parents[2]
RUN = Run("softmax", 4, 32, 1e-2, 0, 32, 64, 2, 1, 64, 400, "cpu")


def batch(count=64, seed=0, **shape):
    shape = {"pairs": 4, "length": 32, "vocabulary": 40, **shape}
    return make_batch(count, generator=torch.Generator().manual_seed(seed), **shape)


def rows_of(folder):
    return read(folder / "mqar.csv", Row)


def without_time(rows):
    return [replace(row, seconds=0.0, date="") for row in rows]


# the task


def test_every_label_is_the_value_that_stood_behind_its_key():
    inputs, labels = batch()
    for tokens, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
        pairs = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        asked = [(place, label) for place, label in enumerate(wanted) if label != NOTHING]
        # each key once, after the pairs, an even number of places from their end
        assert sorted(tokens[place] for place, _ in asked) == sorted(pairs)
        assert all(pairs[tokens[place]] == label for place, label in asked)
        assert all(place >= 8 and place % 2 == 0 for place, _ in asked)


def test_keys_are_distinct_and_of_the_lower_half_and_values_of_the_upper():
    inputs, _ = batch(500)
    keys, values = inputs[:, 0:8:2], inputs[:, 1:8:2]
    assert (keys.min(), keys.max()) == (1, 19)
    assert (values.min(), values.max()) == (20, 39)
    for part in (keys, values):
        assert all(len(set(row)) == 4 for row in part.tolist())


def test_queries_come_early_by_a_power_law_and_all_else_is_noise():
    inputs, labels = batch(4000, pairs=1, length=34, vocabulary=40)
    places = (labels != NOTHING).nonzero()[:, 1]
    share = torch.bincount((places - 2) // 2, minlength=16) / 4000
    law = torch.arange(1, 17).double() ** -0.99
    torch.testing.assert_close(share.double(), law / law.sum(), atol=0.03, rtol=0)
    # a token that nobody asks for may be any, 0 among them
    assert set(inputs[:, 3::2].flatten().tolist()) == set(range(40))


def test_a_batch_depends_on_its_seed_only():
    one, two, other = batch(seed=3), batch(seed=3), batch(seed=4)
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize("shape", [{"pairs": 20}, {"length": 14}, {"length": 33}])
def test_what_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="expected an even length of at least"):
        batch(**shape)


def test_lengths_are_those_of_the_benchmark():
    assert {pairs: length_for(pairs) for pairs in (4, 8, 16, 64)} == {4: 64, 8: 128, 16: 256, 64: 512}


# the model


@pytest.mark.parametrize("kernel", ["softmax", "add_laplace", "add_bump", "tri", "elu", "dpfp"])
def test_a_query_does_not_see_what_comes_after_it(kernel):
    model = make_model(16, 8, kernel, layers=2, heads=2, seed=0)
    tokens = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[3, 5], [5, 7]])
    later = tokens.clone()
    later[0, 6:], later[1, 8:] = 1, 1
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 16
    logits = model(tokens, places)
    assert logits.shape == (2, 2, 16)
    torch.testing.assert_close(model(later, places), logits, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(model(changed, places), logits, rtol=1e-4)


def test_weights_depend_on_the_seed_and_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    one, two, other = (make_model(16, 8, "elu", layers=1, heads=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.tokens.weight, two.tokens.weight)
    assert not torch.equal(one.tokens.weight, other.tokens.weight)


def test_softmax_learns_to_recall():
    trainer = Trainer(RUN)
    assert trainer.test(4) < 0.5
    trainer.advance(200)
    # picking any of the four values would be a quarter
    assert trainer.test(4) > 0.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", ["softmax", "add_laplace", "elu"])
def test_a_gpu_takes_the_same_steps_by_a_graph(kernel):
    run = replace(RUN, kernel=kernel, device="cuda")
    plain, graph = Trainer(run), make_trainer(run)
    for trainer in (plain, graph):
        trainer.advance(25)
        trainer.wait()
    assert graph.done == 25
    assert graph.loss == pytest.approx(plain.loss, rel=1e-3)


def test_a_state_carried_over_goes_on_bitwise():
    whole, half, rest = (Trainer(replace(RUN, batch=4, kernel="add_bump")) for _ in range(3))
    whole.advance(12)
    half.advance(5)
    rest.load(half.state())
    rest.advance(7)
    assert rest.loss == whole.loss
    for one, two in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_every_step_and_seed_has_sequences_of_its_own_and_none_is_tested_on():
    runs = [replace(RUN, seed=seed) for seed in (0, 1, 2)]
    seeds = [seed_of(run, step) for run in runs for step in range(RUN.most_steps)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < TEST_SEED
    one, other = (questions(run, seed_of(run, 0))[0] for run in runs[:2])
    assert not torch.equal(one, other)


def test_the_learning_rate_rises_and_falls():
    rates = [rate_at(step, RUN) for step in range(RUN.most_steps)]
    assert rates[39] == max(rates) == RUN.rate
    assert rates[:40] == sorted(rates[:40])
    assert rates[39:] == sorted(rates[39:], reverse=True)
    assert rates[-1] < 0.01 * RUN.rate


# the command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder that an undisturbed smoke run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["mqar", "--smoke", "--threads", "1", "--out", str(folder)]) == 0
    return folder


def test_the_smoke_run_leaves_rows_and_a_figure(whole):
    rows = rows_of(whole)
    assert [(row.kernel, row.pairs, row.width) for row in rows] == [
        (kernel, 2, width) for kernel in ("softmax", "elu") for width in (8, 16)
    ]
    assert all(0 <= row.accuracy <= 1 and row.length == 64 for row in rows)
    assert sorted(path.name for path in whole.iterdir()) == ["mqar.csv", "mqar.png"]
    assert (whole / "mqar.png").read_bytes().startswith(b"\x89PNG")


def test_a_smoke_run_takes_the_options_that_are_given(tmp_path):
    given = ["--kernel", "tri", "--pairs", "1", "--width", "4", "--batch", "2", "--steps", "3"]
    assert main(["mqar", "--smoke", *given, "--threads", "1", "--out", str(tmp_path)]) == 0
    (row,) = rows_of(tmp_path)
    assert (row.kernel, row.pairs, row.width, row.batch, row.most_steps) == ("tri", 1, 4, 2, 3)


def test_an_interrupted_run_ends_with_130_and_continues_to_bitwise_the_same_rows(whole, tmp_path, interrupt):
    arguments = ["mqar", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    code, errors = interrupt(arguments, lambda: any(tmp_path.glob("mqar.*.checkpoint")))
    assert code == 130
    assert "the same command continues" in errors
    assert main(arguments) == 0
    assert without_time(rows_of(tmp_path)) == without_time(rows_of(whole))
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_finished_run_trains_nothing_again(whole, monkeypatch, capsys):
    monkeypatch.setattr(command, "train", lambda *args: pytest.fail("trained again"))
    assert main(["mqar", "--smoke", "--threads", "1", "--out", str(whole)]) == 0
    assert "2 pairs" in capsys.readouterr().out


def test_the_figure_shows_the_best_rate_and_seed(whole):
    rows = rows_of(whole)
    worse = [replace(row, rate=1.0, accuracy=row.accuracy / 2) for row in rows]
    assert best(rows + worse) == best(rows)
    narrow, wide = draw(rows + worse, "conditions").axes
    heights = {line.get_label(): line.get_ydata()[0] for line in wide.get_lines()}
    assert heights == {row.kernel: 100 * row.accuracy for row in rows if row.width == 16}
    assert (narrow.get_title(), wide.get_title()) == ("width 8", "width 16")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (["--kernel", "sofmax"], "unknown kernel 'sofmax'"),
        (["--heads", "3"], "expected widths that are multiples of --heads 3, got 32"),
        (["--vocabulary", "9"], "4 pairs need a --vocabulary above 9, got 9"),
    ],
)
def test_wrong_wishes_are_refused(tmp_path, capsys, wish, message):
    assert main(["mqar", "--out", str(tmp_path), "--threads", "1", *wish]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_document_shows_the_committed_sweep():
    rows = read(ROOT / "benchmarks" / "results" / "mqar-h200.csv", Row)
    assert len({row.key for row in rows}) == len(rows)
    assert accuracy_table(rows, "markdown") in (ROOT / "docs" / "experiments.md").read_text()
