"""Server optimisers: how a commit's direction (a pseudo-gradient: the model moves against it) changes the model.

A pair of pure functions, `init` and `apply`; their slots live in the server's state under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.config.options import option_problems
from offbeat.errors import ConfigError, unknown
from offbeat.method import State
from offbeat.numerics.rates import Rate, rate


@dataclass(frozen=True)
class ServerOptimiser:
    init: Callable[[Tensor], State]
    apply: Callable[[State, Tensor, int], State]  # (state, direction, version) -> state


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False) -> ServerOptimiser:
    """`m <- momentum m + direction;  w <- w - lr m`, or with Nesterov's momentum `w - lr (direction + momentum m)`."""
    at = rate(lr)
    if nesterov and not momentum:
        raise ConfigError(["server optimiser 'sgd': nesterov = true needs a momentum; give one, such as 0.9"])

    def init(model: Tensor) -> State:
        return {"model": model} | ({"momentum": torch.zeros_like(model)} if momentum else {})

    def apply(state: State, direction: Tensor, version: int) -> State:
        if not momentum:
            return state | {"model": state["model"] - at(version) * direction}
        m = momentum * state["momentum"] + direction
        ahead = direction + momentum * m if nesterov else m
        return state | {"model": state["model"] - at(version) * ahead, "momentum": m}

    return ServerOptimiser(init, apply)


def momentum(lr: Rate, momentum: float = 0.9) -> ServerOptimiser:
    """FedAvgM (Hsu, Qi, Brown, 2019): `sgd` with a momentum."""
    return sgd(lr, momentum)


def nesterov(lr: Rate, momentum: float = 0.9) -> ServerOptimiser:
    """`sgd` with Nesterov's momentum."""
    return sgd(lr, momentum, nesterov=True)


def adagrad(lr: Rate, beta1: float = 0.0, eps: float = 1e-3) -> ServerOptimiser:
    """FedAdagrad (Reddi et al., 2021, Algorithm 2): v <- v + direction^2; eps is the paper's tau."""
    return adaptive(lr, beta1, eps, lambda v, square: v + square)


def adam(
    lr: Rate, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3, bias_correction: bool = False
) -> ServerOptimiser:
    """FedAdam (the same): v <- beta2 v + (1 - beta2) direction^2. With `bias_correction` as in Kingma and Ba (2015),
    from zero on."""
    fade = (beta1, beta2) if bias_correction else None
    return adaptive(lr, beta1, eps, lambda v, square: beta2 * v + (1 - beta2) * square, fade)


def yogi(lr: Rate, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> ServerOptimiser:
    """FedYogi (the same): v <- v - (1 - beta2) direction^2 sign(v - direction^2)."""
    return adaptive(lr, beta1, eps, lambda v, square: v - (1 - beta2) * square * torch.sign(v - square))


def adaptive(
    lr: Rate, beta1: float, eps: float, renewed: Callable[[Tensor, Tensor], Tensor],
    fade: tuple[float, float] | None = None,
) -> ServerOptimiser:  # fmt: skip
    """m <- beta1 m + (1 - beta1) direction;  v <- renewed(v, direction^2);  w <- w - lr m / (sqrt(v) + eps).

    v begins at eps^2. With `fade` m and v start at zero and are divided by 1 - fade^t.
    """
    at = rate(lr)

    def init(model: Tensor) -> State:
        start = 0.0 if fade else eps**2
        return {"model": model, "first": torch.zeros_like(model), "second": torch.full_like(model, start)}

    def apply(state: State, direction: Tensor, version: int) -> State:
        first = beta1 * state["first"] + (1 - beta1) * direction
        second = renewed(state["second"], direction.square())
        one, two = (1 - beta ** (version + 1) for beta in fade) if fade else (1.0, 1.0)
        model = state["model"] - at(version) * (first / one) / ((second / two).sqrt() + eps)
        return state | {"model": model, "first": first, "second": second}

    return ServerOptimiser(init, apply)


def beside(*names: str) -> Callable[[Tensor], State]:
    """The first state of a server that has other vectors beside its model: zeros."""
    return lambda model: {"model": model} | {name: torch.zeros_like(model) for name in names}


OPTIMISERS: dict[str, Callable[..., ServerOptimiser]] = {
    "sgd": sgd, "momentum": momentum, "nesterov": nesterov, "adagrad": adagrad, "adam": adam, "yogi": yogi,
}  # fmt: skip


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
    if not problems and not options.get("eps", 1) > 0:
        problems.append(f"server optimiser '{name}': eps = {options['eps']}; it must be positive")
    if problems:
        raise ConfigError(problems)
    return OPTIMISERS[name](lr, **options)
