"""Fleets by name: the table of builders, and `build`, which checks a name and its options whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from offbeat.errors import ConfigError, unknown
from offbeat.fleets import phones, synthetic
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.steps import StepSpec, step_plan
from offbeat.options import option_problems

FLEETS: dict[str, Callable[..., Fleet]] = {
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


def build(name: str, clients: int = 100, seed: int = 0, local_steps: StepSpec | None = None, **given: Any) -> Fleet:
    """The fleet of that name; every fleet takes `local_steps`, a step law. Raises ConfigError with every problem at
    once.

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
    try:
        fleet = make(*size, **fitting)
        if local_steps is not None:
            fleet = replace(fleet, local_steps=step_plan(local_steps, fleet.step_seconds, seed))
        found += [f"fleet '{name}': {sentence}" for sentence in fleet.problems()]
    except ConfigError as error:
        found += [f"fleet '{name}': {sentence}" for sentence in error.problems]
    if found:
        raise ConfigError(found)
    return fleet
