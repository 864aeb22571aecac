"""What an encoder is worth: Spearman's correlation on pairs of sentences, nDCG@10 on retrieval."""

from collections.abc import Callable

import torch
from torch import Tensor

from .data import Pairs, Retrieval
from .encoder import Encoder
from .metrics import ndcg, spearman

Done = Callable[[int], None]
# the task prefixes of nomic-embed-text
SENTENCE, QUERY, DOCUMENT = "classification: ", "search_query: ", "search_document: "
DEPTH = 10


def similarity(encoder: Encoder, pairs: Pairs, prefixes: bool, done: Done = lambda count: None) -> float:
    """Spearman's correlation of the cosines with the scores."""
    sentences = [(SENTENCE if prefixes else "") + text for text in (*pairs.first, *pairs.second)]
    first, second = encoder.embed(sentences, done).chunk(2)
    return spearman((first * second).sum(-1), torch.tensor(pairs.scores))


def retrieval(encoder: Encoder, task: Retrieval, prefixes: bool, done: Done = lambda count: None) -> float:
    """The mean nDCG@10 over the queries."""
    documents = encoder.embed([(DOCUMENT if prefixes else "") + text for text in task.documents.values()], done)
    queries = encoder.embed([(QUERY if prefixes else "") + text for text in task.queries.values()], done)
    return mean_ndcg(queries @ documents.T, task)


def mean_ndcg(scores: Tensor, task: Retrieval) -> float:
    """The mean nDCG@10 of `scores (queries, documents)`; of equal scores the earlier document comes first."""
    names = list(task.documents)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :DEPTH].tolist()
    values = [
        ndcg([names[place] for place in row], task.gains[query], DEPTH)
        for query, row in zip(task.queries, order, strict=True)
    ]
    return sum(values) / len(values)


def texts(task: Pairs | Retrieval) -> int:
    """How many texts the task has to embed."""
    return 2 * len(task.scores) if isinstance(task, Pairs) else len(task.documents) + len(task.queries)


def first(task: Pairs | Retrieval, count: int) -> Pairs | Retrieval:
    """The first `count` pairs, or the first `count` documents and queries that they answer."""
    if isinstance(task, Pairs):
        return Pairs(task.name, task.first[:count], task.second[:count], task.scores[:count])
    documents = dict(list(task.documents.items())[:count])
    answered = {
        query: {name: found[name] for name in found if name in documents} for query, found in task.gains.items()
    }
    gains = dict([(query, found) for query, found in answered.items() if found][:count])
    return Retrieval(task.name, documents, {query: task.queries[query] for query in gains}, gains)
