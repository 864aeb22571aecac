"""Prints how far the fused steps for GPUs are from those of the definition, in float64, as JSON: `{kernel: error}`.

Run with TRITON_INTERPRET=1, which computes Triton's kernels on the CPU; it has to be set before Triton is imported.
"""

import json

import torch

from sortattn.experiments.recall import fused
from sortattn.experiments.recall.adam import adam_for
from sortattn.experiments.recall.training import TRAINED, Batch, Trainer, start

# lengths below, at and above the tiles, one of them twice as long as a tile of rows
SIZES, HEAD_DIM = (3, 20, 35), 3


# every kernel, with epsilons that are above what rounding leaves of a gradient; and the other choices of Adam
CASES = [*((name, "authors") for name in TRAINED), ("add_laplace", "own"), ("elu", "own")]


def error(name: str, adam: str) -> float:
    """The largest `difference` of the states after two steps; in the run before the last queries and keys are equal."""
    batch = Batch(name, SIZES, 1, HEAD_DIM, "cpu", adam)
    states = [as_double(start(batch)) for _ in range(2)]
    for state in states:
        generator = torch.Generator().manual_seed(1)
        for part in ("query_map", "key_map"):
            state[part][-1] += 0.2 * torch.randn(HEAD_DIM, HEAD_DIM, generator=generator, dtype=torch.float64)
        # a run that has ended
        state["active"][0] = False
    step = fused.FusedStep(TRAINED[name], [size for size, _ in batch.runs], states[1], adam_for(name, adam))
    Trainer(batch, states[0]).advance(2)
    for _ in range(2):
        step.take()
    assert not torch.equal(states[1]["tokens"][1:], as_double(start(batch))["tokens"][1:])
    assert torch.equal(states[1]["tokens"][0], states[0]["tokens"][0])
    return max(difference(*(state[part] for state in states)) for part in states[0])


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest, relative to what is above one; what a run that has ended has on one side only does not count."""
    one, two = (part[1:].double() if part.dim() else part.double() for part in (one, two))
    return float(((one - two).abs() / two.abs().clamp(min=1)).max())


def as_double(state: dict) -> dict:
    return {name: part.double() if part.is_floating_point() else part for name, part in state.items()}


if __name__ == "__main__":
    # tensor cores are not interpreted
    fused.PRECISION = "ieee"
    print(json.dumps({f"{name} {adam}": error(name, adam) for name, adam in CASES}))
