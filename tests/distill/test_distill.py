"""Distillation of small models: what is learned, by which rates, and that a run continues as if never interrupted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sortattn
from sortattn import distill as d
from sortattn.distill import store
from sortattn.distill.answers import answered
from sortattn.distill.objectives import embedding
from sortattn.errors import CommandError

from ..integrations import tiny

ROOT = Path(__file__).parents[2]
NAME = "nomic" if tiny.VERSION >= 5 else "llama"
LAYERWISE = d.Stage("layerwise", steps=4, rate=1e-3, final_rate=5e-4)
END_TO_END = d.Stage("end-to-end", steps=4, rate=1e-4, final_rate=1e-5, warmup=0.5)


def batches(number):
    """Padded random tokens."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, tiny.VOCABULARY, (4, tiny.LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def make(name=NAME, kernel="add_laplace", **options):
    return d.pair(tiny.build(name), kernel, **options)


def stages(teacher, student, layerwise=LAYERWISE, end_to_end=END_TO_END):
    return [(layerwise, d.Layerwise(teacher, student)), (end_to_end, d.EndToEnd(teacher, student))]


def taught(work, batch):
    with torch.no_grad():
        lesson = batch["expected"] if "expected" in batch else work.teach(batch)
    return list(work.losses(batch, lesson))


def weights(student):
    return {name: part.clone() for name, part in student.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def run(folder, every=100, interrupt=None, settings=None, **options):
    """A whole run with a new pair; `interrupt` is the number of batches after which it stops."""
    teacher, student = make(**options)
    seen = []

    def given(number):
        if interrupt is not None and len(seen) == interrupt:
            raise KeyboardInterrupt
        seen.append(number)
        return batches(number)

    rows = d.distill(student, stages(teacher, student), given, folder, settings or d.Settings(every=every))
    return rows, student


# stages


def test_the_copy_has_the_weights_of_the_teacher_and_another_attention():
    before = tiny.build(NAME)
    given = tiny.inputs(NAME)
    expected = tiny.output(before, given)
    teacher, student = make()
    assert same(teacher.state_dict(), before.state_dict())
    assert same(teacher.state_dict(), student.state_dict())
    assert (tiny.output(teacher, given) - expected).norm() <= 1e-5 * expected.norm()
    assert (tiny.output(student, given) - expected).norm() > 1e-2 * expected.norm()
    assert not any(part.requires_grad for part in teacher.parameters())


def test_a_teacher_with_kernel_attention_keeps_it():
    first = sortattn.convert(tiny.build(NAME), "gauss")
    expected = tiny.output(first, tiny.inputs(NAME))
    teacher, student = d.pair(first, "add_laplace")
    assert tiny.output(teacher, tiny.inputs(NAME)).equal(expected)
    assert all(part.requires_grad for part in student.parameters())


def test_layer_losses_are_those_of_the_attention_modules_on_the_teachers_inputs():
    teacher, student = make()
    batch = batches(0)
    losses = taught(d.Layerwise(teacher, student), batch)
    assert len(losses) == 2
    inputs, outputs = [], []
    modules = [module for module in teacher.modules() if hasattr(module, "is_causal")]
    for module in modules:
        module.register_forward_pre_hook(lambda m, a, k: inputs.append((a, k)), with_kwargs=True)
        module.register_forward_hook(lambda m, a, out: outputs.append(out[0]))
    teacher(**batch)
    real = batch["attention_mask"].bool()
    for place, module in enumerate(module for module in student.modules() if hasattr(module, "is_causal")):
        arguments, options = inputs[place]
        rows = module(*arguments, **options)[0]
        assert losses[place].item() == pytest.approx((rows - outputs[place])[real].square().mean().item(), rel=1e-5)


def test_layers_do_not_depend_on_each_other():
    teacher, student = make()
    first, second = taught(d.Layerwise(teacher, student), batches(0))
    groups = d.Layerwise(teacher, student).groups()
    assert all(g is None for g in torch.autograd.grad(first, groups[1], allow_unused=True))
    assert all(g is not None for g in torch.autograd.grad(second, groups[1], allow_unused=True))


def test_embeddings_are_matched_over_the_real_tokens():
    teacher, student = make()
    batch = batches(0)
    (loss,) = taught(d.EndToEnd(teacher, student), batch)
    # a short text alone, without its padding
    embeddings = []
    for model in (student, teacher):
        rows = [
            tiny.output(model, {"input_ids": tokens[mask.bool()][None], "attention_mask": mask[mask.bool()][None]})
            for tokens, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        embeddings.append(torch.cat([row.mean(1) for row in rows]))
    expected = (embeddings[0] - embeddings[1]).square().mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_logits_are_matched_by_their_divergence_at_a_temperature():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    student, teacher = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    p, q = (part.div(4.0).softmax(-1) for part in (teacher, student))
    expected = 16.0 * (p * (p / q).log()).sum(-1).mean()
    assert d.logit_loss(Output(student), Output(teacher), {}).item() == pytest.approx(expected.item(), rel=1e-5)
    assert d.logit_loss(Output(teacher), Output(teacher), {}).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_other_models_are_distilled_too(name, tmp_path):
    teacher, student = make(name)
    loss = d.logit_loss if name == "llama" else d.embedding_loss
    works = [(LAYERWISE, d.Layerwise(teacher, student)), (END_TO_END, d.EndToEnd(teacher, student, loss))]
    rows = d.distill(student, works, lambda number: tiny.inputs(name), tmp_path)
    assert len(rows) == 8
    assert rows[3].loss < rows[0].loss
    assert rows[7].loss < rows[4].loss


def test_the_paper_s_schedules():
    assert d.LAYERWISE.steps == d.END_TO_END.steps == 10_000
    assert [d.LAYERWISE.learning_rate(step) for step in (0, 9_999)] == pytest.approx([5e-4, 5e-5])
    rates = [d.END_TO_END.learning_rate(step) for step in (0, 499, 999, 1_000, 9_999)]
    assert rates == pytest.approx([5e-8, 2.5e-5, 5e-5, 5e-5, 1e-5])
    assert d.END_TO_END.learning_rate(5_499) == pytest.approx(3e-5, rel=1e-3)


# a run


def test_the_student_comes_closer_and_the_teacher_stays(tmp_path):
    teacher, student = make(learn_bandwidth=True)
    before, start = weights(teacher), weights(student)
    long = d.Stage("layerwise", steps=30, rate=5e-3, final_rate=5e-4)
    rows = d.distill(student, stages(teacher, student, long), lambda number: batches(0), tmp_path)
    assert [row.stage for row in rows] == ["layerwise"] * 30 + ["end-to-end"] * 4
    assert rows[29].loss < 0.7 * rows[0].loss
    assert same(weights(teacher), before)
    changed = [name for name, part in weights(student).items() if not part.equal(start[name])]
    assert any(name.endswith("log_bandwidth") for name in changed)


def test_the_layerwise_stage_touches_attention_alone(tmp_path):
    teacher, student = make()
    start = weights(student)
    d.distill(student, stages(teacher, student)[:1], batches, tmp_path)
    changed = [name for name, part in weights(student).items() if not part.equal(start[name])]
    assert changed
    assert all("attn" in name for name in changed)


def test_an_interrupted_run_continues_exactly(tmp_path):
    rows, whole = run(tmp_path / "whole")
    # three steps into the second stage, with checkpoints after every second step
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", every=2, interrupt=7)
    saved = store.load_checkpoint(tmp_path / "parts")
    assert (saved["stage"], saved["step"]) == ("end-to-end", 2)
    # in the middle of the first stage as well
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "early", every=2, interrupt=3)
    for folder in ("parts", "early"):
        continued, student = run(tmp_path / folder, every=2)
        assert same(weights(student), weights(whole))
        assert [(row.stage, row.step, row.loss) for row in continued] == [(r.stage, r.step, r.loss) for r in rows]
        assert store.read_losses(tmp_path / folder) == continued


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    rows, student = run(tmp_path)
    again, other = run(tmp_path, interrupt=0)
    assert again == rows
    assert same(weights(student), weights(other))


def test_every_stage_leaves_a_model_that_can_be_loaded(tmp_path):
    _, student = run(tmp_path, learn_bandwidth=True)
    sortattn.register()
    kernel = "sortattn_add_laplace"
    loaded = type(student).from_pretrained(tmp_path / "end-to-end", attn_implementation=kernel).eval()
    assert same(weights(loaded), weights(student))
    assert tiny.output(loaded, tiny.inputs(NAME)).equal(tiny.output(student, tiny.inputs(NAME)))
    assert (tmp_path / "layerwise" / "config.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_accumulated_batches_are_one_large_batch(tmp_path):
    def large(number):
        parts = [batches(2 * number), batches(2 * number + 1)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    teacher, one = make()
    d.distill(one, stages(teacher, one)[:1], large, tmp_path / "large")
    teacher, two = make()
    d.distill(two, stages(teacher, two)[:1], batches, tmp_path / "two", d.Settings(accumulation=2))
    for name, part in weights(one).items():
        assert (part - weights(two)[name]).norm() <= 1e-3 * (part.norm() + 1e-6), name


def test_bf16_learns_in_float32(tmp_path):
    rows, student = run(tmp_path / "bf16", settings=d.Settings(precision="bf16"))
    exact, _ = run(tmp_path / "fp32")
    assert all(part.dtype == torch.float32 for part in student.parameters())
    assert rows[0].loss == pytest.approx(exact[0].loss, rel=0.05)
    assert rows[0].loss != exact[0].loss
    with pytest.raises(ValueError, match="unknown precision 'fp8', expected one of fp32, bf16"):
        d.Settings(precision="fp8")


def test_gradients_are_clipped(tmp_path):
    teacher, student = make()
    start = weights(student)
    # so small that Adam's epsilon counts: nothing moves
    d.distill(student, stages(teacher, student), batches, tmp_path, d.Settings(clip=1e-12))
    for name, part in weights(student).items():
        assert (part - start[name]).abs().max() < 1e-4, name


def test_every_process_waits_for_a_model_that_an_interrupt_has_prevented(tmp_path, monkeypatch):
    run(tmp_path)
    waits = []
    monkeypatch.setattr(d.parallel, "wait", lambda: waits.append((tmp_path / "end-to-end").exists()))
    # of two processes one sees the folder before the other has written it, and one after
    run(tmp_path)
    shutil.rmtree(tmp_path / "end-to-end")
    run(tmp_path)
    assert waits == [True, True]


def test_two_processes_are_one_with_twice_the_batches(tmp_path):
    script = Path(__file__).with_name("two_processes.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    command = [*torchrun, str(script), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "terminate called without an active exception" in done.stderr:
        # a thread of torch's own, as a process ends that has finished its work: seen once in dozens of runs
        shutil.rmtree(tmp_path / "two")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    _, student = run(tmp_path / "one", settings=d.Settings(accumulation=2))
    kernel = "sortattn_add_laplace"
    other = type(student).from_pretrained(tmp_path / "two" / "end-to-end", attn_implementation=kernel)
    for name, part in weights(student).items():
        assert (part - weights(other)[name]).norm() <= 1e-4 * (part.norm() + 1e-6), name
    rows = [store.read_losses(tmp_path / name) for name in ("one", "two")]
    assert [row.loss for row in rows[1]] == pytest.approx([row.loss for row in rows[0]], rel=1e-4)


# several students


def pupils(folder, kernels=("add_laplace", "tri", "gauss")):
    model = tiny.build(NAME)
    pairs = {kernel: d.pair(model, kernel) for kernel in kernels}
    return [d.Pupil(pair[1], stages(*pair), folder / kernel) for kernel, pair in pairs.items()]


def test_students_learn_together_what_they_learn_alone(tmp_path):
    together = pupils(tmp_path / "together")
    rows = d.distill_together(together, batches)
    for place, kernel in enumerate(("add_laplace", "tri", "gauss")):
        alone, student = run(tmp_path / "alone" / kernel, kernel=kernel)
        assert same(weights(student), weights(together[place].student))
        assert [(row.stage, row.step, row.loss) for row in rows[place]] == [(r.stage, r.step, r.loss) for r in alone]
        assert (tmp_path / "together" / kernel / "end-to-end" / "config.json").exists()


def test_the_teacher_is_asked_once_for_all_of_a_layerwise_stage(tmp_path):
    together = pupils(tmp_path)
    asked = []
    together[0].stages[0][1].teacher.register_forward_hook(lambda *call: asked.append(1))
    d.distill_together([d.Pupil(pupil.student, pupil.stages[:1], pupil.folder) for pupil in together], batches)
    assert len(asked) == LAYERWISE.steps


def test_students_that_were_interrupted_at_different_steps_continue(tmp_path):
    whole = pupils(tmp_path / "whole")
    d.distill_together(whole, batches)
    seen = []

    def interrupted(number):
        seen.append(number)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return batches(number)

    with pytest.raises(KeyboardInterrupt):
        d.distill_together(pupils(tmp_path / "parts")[:1], interrupted, d.Settings(every=2))
    steps = [store.load_checkpoint(tmp_path / "parts" / kernel) for kernel in ("add_laplace", "tri")]
    assert [saved and saved["step"] for saved in steps] == [2, None]
    parts = pupils(tmp_path / "parts")
    d.distill_together(parts, batches)
    for one, other in zip(whole, parts, strict=True):
        assert same(weights(one.student), weights(other.student))


# what the teacher has said before


def test_answers_that_are_known_are_used_and_asked_for_once(tmp_path):
    teacher, student = make()
    numbers = range(10_000_000, 10_000_004)
    asked = []
    teacher.register_forward_hook(lambda *call: asked.append(1))

    def known(**facts):
        return answered(teacher, embedding, batches, numbers, tmp_path / "answers.pt", d.Settings(), facts)

    given = known(data="these")
    assert len(asked) == 4
    assert "expected" not in given(3)
    assert given(10_000_002)["expected"].shape == (4, 32)
    first, second = (taught(d.EndToEnd(teacher, student), batch) for batch in (given(10_000_002), batches(10_000_002)))
    assert first[0].item() == pytest.approx(second[0].item(), rel=1e-5)
    assert len(asked) == 5
    known(data="these")
    assert len(asked) == 5
    known(data="others")
    assert len(asked) == 9
    (tmp_path / "answers.pt").write_bytes(b"half")
    known(data="others")
    assert len(asked) == 13
    next(teacher.parameters()).data += 1
    known(data="others")
    assert len(asked) == 17


# what can go wrong


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with store.alone_in(tmp_path / "run"), pytest.raises(CommandError, match="another process trains in .*run; wait"):
        run(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    run(tmp_path / "run")


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    run(tmp_path)
    before = store.load_checkpoint(tmp_path)

    def full(state, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        store.save_checkpoint(tmp_path, {"stage": "layerwise"})
    monkeypatch.undo()
    assert store.load_checkpoint(tmp_path)["step"] == before["step"]
    assert not list(tmp_path.glob(".*"))


def test_an_interrupt_while_a_model_is_written_leaves_the_old_one(tmp_path):
    folder = tmp_path / "model"
    store.replace(folder, lambda draft: (draft.mkdir(), (draft / "a").write_text("old")))

    def interrupted(draft):
        draft.mkdir()
        (draft / "a").write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.replace(folder, interrupted)
    assert (folder / "a").read_text() == "old"
    store.replace(folder, lambda draft: (draft.mkdir(), (draft / "a").write_text("new")))
    assert (folder / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(CommandError, match=r"was made with clip=1\.0, this run has clip=0\.5; choose another folder"):
        run(tmp_path, settings=d.Settings(clip=0.5, every=100))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, every=2, interrupt=3)
    with pytest.raises(CommandError, match="is of a model of another shape"):
        run(tmp_path, every=2, learn_bandwidth=True)


@pytest.mark.parametrize("contents", [b"", b"not a checkpoint"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, contents):
    (tmp_path / "checkpoint.pt").write_bytes(contents)
    with pytest.raises(CommandError, match="is no checkpoint of this program"):
        run(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"stage": Harm()}, tmp_path / "checkpoint.pt")
    with pytest.raises(CommandError, match="is no checkpoint of this program"):
        run(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_losses_of_another_program_are_forgotten(tmp_path):
    (tmp_path / "losses.csv").write_text("stage,step,loss,learning_rate,gradient_norm,seconds\nother,1,1,1,1,1\n")
    assert len(run(tmp_path)[0]) == 8


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    teacher, student = make()
    next(student.parameters()).data[:] = torch.nan
    with pytest.raises(CommandError, match="the loss of step 1 is not finite"):
        d.distill(student, stages(teacher, student)[1:], batches, tmp_path)


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from sortattn.distill.plot import save_curves

    rows, _ = run(tmp_path)
    save_curves(rows, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[:4] == b"\x89PNG"
