"""MTEB and LoCo: tasks of the `mteb` package, which fetches their data from the hub."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import CommandError
from .encoder import Encoder
from .evaluate import DOCUMENT, QUERY, SENTENCE

CLUSTERING = "clustering: "
# LoCo (Saad-Falcon et al., 2024) is not among mteb's benchmarks; its queries and documents have these names on the hub
LOCO = "LoCo"
LOCO_PARTS = (
    "summ_screen_fd", "gov_report", "qmsum", "qasper_title", "qasper_abstract", "multifieldqa", "2wikimqa",
    "passage_retrieval", "legal_case_reports", "courtlistener_HTML", "courtlistener_Plain_Text", "stackoverflow",
)  # fmt: skip
LOCO_QUERIES, LOCO_DOCUMENTS = "hazyresearch/LoCoV1-Queries", "hazyresearch/LoCoV1-Documents"


@dataclass(frozen=True)
class HubTask:
    """A task of mteb under its name."""

    name: str
    task: object


def hub_tasks(names: Sequence[str]) -> list[HubTask]:
    """The tasks of these benchmarks, `LoCo` among them, or under these names of their own."""
    mteb = _mteb()
    found = []
    for name in names:
        if name == LOCO:
            found += [_loco(part) for part in LOCO_PARTS]
            continue
        try:
            found += mteb.get_benchmark(name).tasks
        except KeyError:
            try:
                found.append(mteb.get_task(name))
            except KeyError as error:
                raise CommandError(f"mteb knows no benchmark and no task {name!r}; LoCo is known too") from error
    return [HubTask(f"mteb-{task.metadata.name}", task) for task in found]


def evaluate_hub(
    encoder: Encoder, task: HubTask, prefixes: bool, done: Callable[[int], None]
) -> tuple[str, float, int]:
    """The name of the task's main score, its value, and how many texts were embedded for it."""
    mteb = _mteb()
    model = _model(encoder, prefixes, done)
    try:
        with warnings.catch_warnings():
            # of its own affairs: a missing licence, a newer version of a task
            warnings.simplefilter("ignore")
            result = mteb.evaluate(model, task.task, cache=None, show_progress_bar=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CommandError(
            f"cannot evaluate {task.name}: its data come from the hub, which must be reached ({reason})"
        ) from error
    return task.task.metadata.main_score, float(result.task_results[0].get_score()), model.texts


def _mteb():
    try:
        import mteb
    except ImportError as error:
        raise CommandError(f"MTEB and LoCo need mteb: pip install 'sortattn[mteb]' ({error})") from error
    return mteb


def prefix(kind: str, asked: str | None) -> str:
    """nomic's prefix for texts of a kind of task, of queries and documents if `asked` says which."""
    if asked is not None:
        return QUERY if asked == "query" else DOCUMENT
    return CLUSTERING if "Clustering" in kind else SENTENCE


def _model(encoder: Encoder, prefixes: bool, done: Callable[[int], None]):
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder

    class Model(AbsEncoder):
        """What mteb asks for embeddings; they have length one, and cosines are its default."""

        mteb_model_meta = ModelMeta.create_empty({"name": f"sortattn/{encoder.kernel}", "revision": "local"})
        texts = 0

        def encode(self, inputs, *, task_metadata, hf_split, hf_subset, prompt_type=None, **options):
            texts = [text for batch in inputs for text in batch["text"]]
            before = prefix(task_metadata.type, getattr(prompt_type, "value", prompt_type)) if prefixes else ""
            self.texts += len(texts)
            return encoder.embed([before + text for text in texts], done).numpy()

    return Model()


def _loco(part: str):
    """A part of LoCo as a task of mteb."""
    from mteb.abstasks import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Loco(AbsTaskRetrieval):
        """The queries of a part with the documents that answer them."""

        metadata = TaskMetadata(
            name=f"LoCo-{part}",
            description=f"LoCo v1, {part}",
            dataset={"path": LOCO_DOCUMENTS, "revision": "main"},
            type="Retrieval",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, *arguments, **options) -> None:
            if not self.data_loaded:
                self.dataset = {"default": {"test": read_loco(part)}}
                self.data_loaded = True

    return Loco()


def read_loco(part: str) -> dict:
    """The part as mteb wants a retrieval: corpus, queries, and the relevant documents of each."""
    from datasets import Dataset

    documents = {row["pid"]: row["passage"] for row in _rows(LOCO_DOCUMENTS, part) if row["passage"]}
    asked = {row["qid"]: row for row in _rows(LOCO_QUERIES, part)}
    relevant = {
        name: {answer: 1 for answer in row["answer_pids"] if answer in documents} for name, row in asked.items()
    }
    relevant = {name: answers for name, answers in relevant.items() if answers}
    return {
        "corpus": Dataset.from_list([{"id": name, "text": text} for name, text in documents.items()]),
        "queries": Dataset.from_list([{"id": name, "text": asked[name]["query"]} for name in relevant]),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


def _rows(name: str, part: str):
    import datasets

    return (row for row in datasets.load_dataset(name, split="test") if row["dataset"] == part)
