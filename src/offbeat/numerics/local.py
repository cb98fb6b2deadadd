"""Local rules: what one client does with its gradients, on one flat vector; the engine adds the client axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import ConfigError, unknown
from offbeat.method import Job, Local, State, Update
from offbeat.numerics.fast.dense import Descend
from offbeat.numerics.rates import Rate, client_rate
from offbeat.options import fits

OPTIONS = ("clip", "momentum", "weight_decay")


class Path(NamedTuple):
    """Where a client stands: its iterate, and, where they are used, its momentum and where it began (else empty)."""

    y: Tensor
    momentum: Tensor | tuple[()]
    start: Tensor | tuple[()]


def sgd(client_lr: Rate, options: Mapping[str, float] | None = None, proximal: float = 0.0) -> Local:
    """`y <- y - lr g`, with options `clip` (norm of the gradient), `weight_decay` and `momentum`, and a proximal pull.

    g <- g min(1, clip / |g|) + weight_decay y + proximal (y - x0);   m <- momentum m + g;   y <- y - lr m.
    Sends delta = x0 - y.
    """
    momentum, weight_decay, clip = checked(dict(options or {}), proximal)

    def begin(server: State, job: Job) -> Path:
        x = server["model"]
        return Path(x, torch.zeros_like(x) if momentum else (), x if proximal else ())

    def step(path: Path, g: Tensor, job: Job) -> Path:
        y, m, x0 = path
        if clip is not None:
            g = g * torch.clamp(clip / (g.norm() + 1e-12), max=1.0)
        if weight_decay:
            g = g + weight_decay * y
        if isinstance(x0, Tensor):
            g = g + proximal * (y - x0)
        if isinstance(m, Tensor):
            g = m = momentum * m + g
        return Path(descend(y, job.lr, g), m, x0)

    def finish(server: State, path: Path, job: Job) -> Update:
        return {"delta": server["model"] - path.y}

    return Local(begin, step, finish, {"lr": client_rate(client_lr)})


def descend(y: Tensor, lr: Tensor, g: Tensor, correction: Tensor | None = None) -> Tensor:
    """`y - lr (g + correction)`, in one pass over memory."""
    moved: Tensor = Descend.apply(y, lr, g, correction)  # type: ignore[no-untyped-call]
    return moved


class Corrected(NamedTuple):
    """A client whose every gradient is corrected by the same vector."""

    y: Tensor
    c: Tensor


def corrected_step(path: Corrected, g: Tensor, job: Job) -> Corrected:
    """`y <- y - lr (g + c)`."""
    return path._replace(y=descend(path.y, job.lr, g, path.c))


def gradient() -> Local:
    """The client does not move: it sends the mean of its stochastic gradients at the model it was given."""

    class Sum(NamedTuple):
        y: Tensor
        total: Tensor

    def begin(server: State, job: Job) -> Sum:
        return Sum(server["model"], torch.zeros_like(server["model"]))

    def step(carry: Sum, g: Tensor, job: Job) -> Sum:
        return Sum(carry.y, carry.total + g)

    def finish(server: State, carry: Sum, job: Job) -> Update:
        return {"gradient": carry.total / job.steps}

    return Local(begin, step, finish, {"lr": client_rate(1.0)}, sends=("gradient",))


def checked(options: dict[str, float], proximal: float) -> tuple[float, float, float | None]:
    """The three options, or a sentence on each that makes no step."""
    found = [unknown("client option", name, OPTIONS) for name in options if name not in OPTIONS]
    for name, value in (options | {"proximal": proximal}).items():
        if not fits(value, float) or not 0 <= value < math.inf:
            found.append(f"{name} = {value!r}; it must be a number that is not negative")
    if found:
        raise ConfigError(found)
    if options.get("clip") == 0:
        found.append("clip = 0 would stop every step; give a positive norm or leave it out")
    if options.get("momentum", 0.0) >= 1:
        found.append(f"momentum = {options['momentum']}; it must be below 1")
    if found:
        raise ConfigError(found)
    return options.get("momentum", 0.0), options.get("weight_decay", 0.0), options.get("clip")
