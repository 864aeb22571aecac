"""What the paper leaves open of Adam, chosen by the kernel, or as in the authors' code."""

from dataclasses import dataclass

# the choices of `--adam`
OWN, AUTHORS = "own", "authors"


@dataclass(frozen=True)
class Adam:
    """Epsilons of tokens and of both matrices, and the decay of the means.

    A step is as long as the rate while a gradient is above its epsilon, and falls with it below. Gradients are those of
    the loss per token.
    """

    token_epsilon: float
    matrix_epsilon: float
    beta1: float = 0.9
    beta2: float = 0.999


AUTHORS_ADAM = Adam(1e-4, 1e-3)
# A step of W_Q against W_K takes all queries off their keys at once, the farther the longer the tokens are; one of a
# token moves its query and its key together. So tokens take full steps to the end, and matrices small ones.
TOKENS_LEAD = Adam(1e-12, 0.1, beta2=0.99)
# Where a feature is a coordinate, two tokens that share one are at a minimum. Out of it lead, with elu, steps of the
# matrices, which move all tokens; with relu, which has no slope in features that a token lacks, full steps of tokens
# along what rounding leaves of a gradient (the squares of smaller ones vanish). Both without memory of what led in.
OWN_ADAM = {"relu": Adam(1e-20, 1e4, beta1=0.0, beta2=0.9), "elu": Adam(1e-2, 3e-5, beta1=0.0, beta2=0.9)}


def adam_for(kernel: str, choice: str) -> Adam:
    """That of the authors for all kernels, or the kernel's own."""
    return AUTHORS_ADAM if choice == AUTHORS else OWN_ADAM.get(kernel, TOKENS_LEAD)
