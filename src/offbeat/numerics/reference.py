"""What a client of FedaGrac keeps as nu_i for its next correction: the mean of its gradients (line 11), or, by equation
(4), a client that took more steps than the mean keeps its first.

Who was fast is known only when the round is over, so a client remembers both, and its steps as a vector; the server
tells the mean number of steps, one number, as a vector too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.method import State, Update
from offbeat.numerics import optimisers

REMEMBERS = {"mean": ("nu_i",), "equation-4": ("nu_i", "first_i", "steps_i")}
BROADCASTS = {"mean": ("nu",), "equation-4": ("nu", "mean steps")}
RELIABLE = {"mean": None, "equation-4": "reference = 'equation-4'"}  # what needs all clients in every round


def broadcasts(reference: str) -> tuple[str, ...]:
    return ("model", *BROADCASTS[reference])


def init(reference: str) -> Callable[[Tensor], State]:
    """The server's first state."""
    return optimisers.beside(*BROADCASTS[reference])


def require(reference: str, whole: bool) -> None:
    """Equation (4) speaks of rounds in which everyone takes part and sends all."""
    if reference != "mean" and not whole:
        raise ConfigError(["equation (4) needs all clients in every round, and no saving; or take reference = 'mean'"])


def nu_i(given: State) -> Tensor:
    """nu_i, of the round before."""
    if "steps_i" not in given:
        return given["nu_i"]
    fast = given["steps_i"] > given["mean steps"] * (1 + 1e-6)
    return torch.where(fast, given["first_i"], given["nu_i"])


def own(reference: str, mean: Tensor, first: Tensor, steps: Tensor) -> Update:
    """What a client takes along."""
    if reference == "mean":
        return {"nu_i": mean}
    return {"nu_i": mean, "first_i": first, "steps_i": torch.zeros_like(mean) + steps}


def beside_model(reference: str, nu: Tensor, share: Tensor, steps: Tensor) -> State:
    """What the server tells beside its model."""
    if reference == "mean":
        return {"nu": nu}
    average = (share.double() @ steps.double()).to(nu.dtype)
    return {"nu": nu, "mean steps": torch.zeros_like(nu) + average}
