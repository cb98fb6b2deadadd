"""Client optimisers: what one client makes of a gradient before it steps, on one flat vector.

A step is y <- y - lr d, and an optimiser gives the direction d from the gradient; its slots are vectors that begin at
zero. The formulas and defaults are those of `torch.optim`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from offbeat.config.options import fits
from offbeat.errors import ConfigError, in_words, unknown

Slots: TypeAlias = dict[str, Tensor]
Keep: TypeAlias = Literal["reset", "kept"]  # what becomes of the slots at the end of a job


class ClientOptimiser(NamedTuple):
    slots: tuple[str, ...]
    direction: Callable[[Tensor, Tensor, Slots, Tensor], tuple[Tensor, Slots]]  # (g, y, slots, number of the step)
    linear: bool = True  # the direction is a sum of gradients with weights that do not depend on them


class Options(NamedTuple):
    """What a client does with its gradients."""

    optimiser: ClientOptimiser
    clip: float | None
    kept: bool


def sgd(momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> ClientOptimiser:
    """g <- g + weight_decay y;   m <- momentum m + g;   d = m, or g + momentum m (Nesterov)."""

    def direction(g: Tensor, y: Tensor, slots: Slots, t: Tensor) -> tuple[Tensor, Slots]:
        if weight_decay:
            g = g + weight_decay * y
        if not momentum:
            return g, slots
        m = momentum * slots["momentum"] + g
        return (g + momentum * m if nesterov else m), {"momentum": m}

    return ClientOptimiser(("momentum",) if momentum else (), direction)


def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> ClientOptimiser:
    """m and v are decaying means of g and g^2;   d = m' / (sqrt(v') + eps) + weight_decay y, with m' and v' corrected
    for their start at zero."""

    def direction(g: Tensor, y: Tensor, slots: Slots, t: Tensor) -> tuple[Tensor, Slots]:
        m = beta1 * slots["first"] + (1 - beta1) * g
        v = beta2 * slots["second"] + (1 - beta2) * g * g
        scale = torch.sqrt(v) / torch.sqrt(1 - beta2**t) + eps
        d = m / (1 - beta1**t) / scale
        return (d + weight_decay * y if weight_decay else d), {"first": m, "second": v}

    return ClientOptimiser(("first", "second"), direction, linear=False)


def rmsprop(
    alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
) -> ClientOptimiser:
    """g <- g + weight_decay y;   v <- alpha v + (1 - alpha) g^2;   d = g / (sqrt(v) + eps), with momentum if wanted."""

    def direction(g: Tensor, y: Tensor, slots: Slots, t: Tensor) -> tuple[Tensor, Slots]:
        if weight_decay:
            g = g + weight_decay * y
        v = alpha * slots["second"] + (1 - alpha) * g * g
        d = g / (torch.sqrt(v) + eps)
        if not momentum:
            return d, {"second": v}
        m = momentum * slots["momentum"] + d
        return m, {"momentum": m, "second": v}

    return ClientOptimiser((*(("momentum",) if momentum else ()), "second"), direction, linear=False)


OPTIMISERS: dict[str, Callable[..., ClientOptimiser]] = {"sgd": sgd, "adamw": adamw, "rmsprop": rmsprop}
COMMON = ("optimiser", "clip", "state")
BELOW_ONE = ("momentum", "beta1", "beta2", "alpha")


def client_options(given: Mapping[str, Any] | None) -> Options:
    """From a table such as `{optimiser = "adamw", beta2 = 0.99, clip = 1.0, state = "kept"}`, or a sentence on each
    thing that makes no step."""
    options = dict(given or {})
    name = options.pop("optimiser", "sgd")
    if not isinstance(name, str) or name not in OPTIMISERS:
        raise ConfigError([unknown("client optimiser", str(name), OPTIMISERS)])
    make = OPTIMISERS[name]
    known = (*inspect.signature(make).parameters, *COMMON)
    problems = [unknown("client option", key, known) for key in options if key not in known]
    state = options.pop("state", "reset")
    if state not in get_args(Keep):
        problems.append(f"state = {in_words(state)}; it is one of {', '.join(map(repr, get_args(Keep)))}")
    nesterov = options.get("nesterov", False)
    if not isinstance(nesterov, bool):
        problems.append(f"nesterov = {nesterov!r}; it must be true or false")
    for key, value in options.items():
        if key != "nesterov" and (not fits(value, float) or not 0 <= value < math.inf):
            problems.append(f"{key} = {value!r}; it must be a number that is not negative")
    if problems:
        raise ConfigError(problems)
    clip = options.pop("clip", None)
    if clip == 0:
        problems.append("clip = 0 would stop every step; give a positive norm or leave it out")
    if options.get("eps") == 0:
        problems.append("eps = 0 would divide by zero; give a small positive number")
    problems += [f"{key} = {options[key]}; it must be below 1" for key in BELOW_ONE if options.get(key, 0.0) >= 1]
    if nesterov and not options.get("momentum"):
        problems.append("nesterov = true needs a momentum; give one, such as 0.9")
    optimiser = make(**options) if not problems else sgd()
    if state == "kept" and not optimiser.slots:
        problems.append("state = 'kept', but plain SGD has none; give a momentum or another optimiser, or leave it out")
    if problems:
        raise ConfigError(problems)
    return Options(optimiser, clip, state == "kept")
