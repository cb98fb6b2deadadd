"""Fleets by name: the table of builders, and `build`, which checks a name and its options whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from offbeat.errors import ConfigError, unknown
from offbeat.fleets import phones, synthetic
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.steps import StepSpec, step_plan
from offbeat.options import fits, option_problems


def stepping(make: Callable[..., Fleet]) -> Callable[..., Fleet]:
    """A builder whose fleets take `local_steps`, a step law, beside its own options."""

    @wraps(make)
    def made(clients: int = 100, seed: int = 0, *, local_steps: StepSpec | None = None, **options: Any) -> Fleet:
        fleet = make(clients, seed, **options)
        plan = None if local_steps is None else step_plan(local_steps, fleet.step_seconds, seed)
        return replace(fleet, local_steps=plan)

    signature = inspect.signature(make)
    law = inspect.Parameter("local_steps", inspect.Parameter.KEYWORD_ONLY, default=None)
    made.__signature__ = signature.replace(parameters=[*signature.parameters.values(), law])  # type: ignore[attr-defined]
    made.__annotations__ = make.__annotations__ | {"local_steps": StepSpec | None}
    return made


MAKERS: dict[str, Callable[..., Fleet]] = {
    "custom": synthetic.custom,
    "dlsgd-cifar10": synthetic.dlsgd_cifar10,
    "dlsgd-fashion-mnist": synthetic.dlsgd_fashion_mnist,
    "equal": synthetic.equal,
    "exponential": synthetic.exponential,
    "lognormal": synthetic.lognormal,
    "phones": phones.phones,
    "phones-flash": phones.phones_flash,
    "straggling": synthetic.straggling,
    "uniform": synthetic.uniform,
}
FLEETS = {name: stepping(make) for name, make in MAKERS.items()}


def build(name: str, clients: int = 100, seed: int = 0, **given: Any) -> Fleet:
    """The fleet of that name. Raises ConfigError with every problem at once.

    >>> build("equal", 3, latency=0.5).up_latency
    array([0.5, 0.5, 0.5])
    """
    if name not in FLEETS:
        raise ConfigError([unknown("fleet", name, FLEETS)])
    make = FLEETS[name]
    found = option_problems(f"fleet '{name}'", make, given, ("clients", "seed"))
    found += option_problems(f"fleet '{name}'", make, {"clients": clients, "seed": seed})
    if isinstance(clients, int) and clients < 1:
        found.append(f"fleet '{name}': clients = {clients}; a fleet needs at least 1")
    # A first problem does not hide those of the other options.
    size = (1, 0) if found else (clients, seed)
    fitting = {k: v for k, v in given.items() if not option_problems("", make, {k: v})}
    law = fitting.pop("local_steps", None) if found else None
    try:
        if law is not None and "deadline" not in str(law):  # the fleet's speeds are not known
            step_plan(law, np.ones(clients if fits(clients, int) and clients > 0 else 1), 0)
        fleet = make(*size, **fitting)
        found += [f"fleet '{name}': {sentence}" for sentence in fleet.problems()]
    except ConfigError as error:
        found += [f"fleet '{name}': {sentence}" for sentence in error.problems]
    if found:
        raise ConfigError(found)
    return fleet
