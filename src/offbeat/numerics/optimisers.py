"""Server optimisers: how a commit's direction (a pseudo-gradient: the model moves against it) changes the model.

A pair of pure functions, `init` and `apply`; their slots live in the server's state under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import ConfigError, unknown
from offbeat.method import State
from offbeat.numerics.rates import Rate, rate
from offbeat.options import option_problems


@dataclass(frozen=True)
class ServerOptimiser:
    init: Callable[[Tensor], State]
    apply: Callable[[State, Tensor, int], State]  # (state, direction, version) -> state


def sgd(lr: Rate, momentum: float = 0.0) -> ServerOptimiser:
    """`m <- momentum m + direction;  w <- w - lr m`."""
    at = rate(lr)

    def init(model: Tensor) -> State:
        return {"model": model} | ({"momentum": torch.zeros_like(model)} if momentum else {})

    def apply(state: State, direction: Tensor, version: int) -> State:
        if not momentum:
            return state | {"model": state["model"] - at(version) * direction}
        m = momentum * state["momentum"] + direction
        return state | {"model": state["model"] - at(version) * m, "momentum": m}

    return ServerOptimiser(init, apply)


def adam(lr: Rate, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> ServerOptimiser:
    """FedAdam (Reddi et al., 2021, Algorithm 2): no bias correction; eps is the paper's tau."""
    at = rate(lr)

    def init(model: Tensor) -> State:
        return {"model": model, "first": torch.zeros_like(model), "second": torch.full_like(model, eps**2)}

    def apply(state: State, direction: Tensor, version: int) -> State:
        first = beta1 * state["first"] + (1 - beta1) * direction
        second = beta2 * state["second"] + (1 - beta2) * direction.square()
        model = state["model"] - at(version) * first / (second.sqrt() + eps)
        return state | {"model": model, "first": first, "second": second}

    return ServerOptimiser(init, apply)


def beside(*names: str) -> Callable[[Tensor], State]:
    """The first state of a server that has other vectors beside its model: zeros."""
    return lambda model: {"model": model} | {name: torch.zeros_like(model) for name in names}


OPTIMISERS: dict[str, Callable[..., ServerOptimiser]] = {"sgd": sgd, "adam": adam}


def server_optimiser(lr: Rate, spec: str | Mapping[str, Any] = "sgd") -> ServerOptimiser:
    """From a name, or a table such as `{name = "sgd", momentum = 0.9}`."""
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", "sgd")
    if not isinstance(name, str) or name not in OPTIMISERS:
        raise ConfigError([unknown("server optimiser", str(name), OPTIMISERS)])
    problems = option_problems(f"server optimiser '{name}'", OPTIMISERS[name], options, ("lr",))
    for decay in ("momentum", "beta1", "beta2"):
        if not problems and not 0 <= options.get(decay, 0) < 1:
            problems.append(f"server optimiser '{name}': {decay} = {options[decay]}; it must lie in [0, 1)")
    if problems:
        raise ConfigError(problems)
    return OPTIMISERS[name](lr, **options)
