"""Fleets by name: the table of builders, and `build`, which checks a name and its options whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from offbeat.config import registry
from offbeat.config.options import LARGEST, fits, option_problems
from offbeat.config.room import too_large
from offbeat.errors import ConfigError, in_words
from offbeat.fleets import measured, phones, recorded, synthetic
from offbeat.fleets.clusters import ClusterSpec, clusters_of
from offbeat.fleets.fleet import Fleet, clustered
from offbeat.fleets.steps import StepSpec, asks_speeds, step_plan

BYTES = 200  # of a client in a fleet and on its clock, at least


def equipped(make: Callable[..., Fleet]) -> Callable[..., Fleet]:
    """A builder whose fleets take `local_steps`, a step law, and `clusters`, beside its own options."""
    common = {"clusters": ClusterSpec | None, "local_steps": StepSpec | None}
    signature = inspect.signature(make)
    added = {name: hint for name, hint in common.items() if name not in signature.parameters}

    @wraps(make)
    def made(clients: int = 100, seed: int = 0, *, local_steps: StepSpec | None = None, **options: Any) -> Fleet:
        spec = options.pop("clusters", None) if "clusters" in added else None
        fleet = make(clients, seed, **options)
        if spec is not None:
            fleet = clustered(fleet, clusters_of(spec, clients, seed))
        plan = None if local_steps is None else step_plan(local_steps, fleet.step_seconds, seed)
        return replace(fleet, local_steps=plan)

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]
    made.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])  # type: ignore[attr-defined]
    made.__annotations__ = make.__annotations__ | added
    return made


MAKERS: dict[str, Callable[..., Fleet]] = {
    "custom": synthetic.custom,
    "dlsgd-cifar10": synthetic.dlsgd_cifar10,
    "dlsgd-fashion-mnist": synthetic.dlsgd_fashion_mnist,
    "equal": synthetic.equal,
    "exponential": synthetic.exponential,
    "hlsgd": synthetic.hlsgd,
    "lognormal": synthetic.lognormal,
    "measured": measured.measured,
    "phones": phones.phones,
    "phones-flash": phones.phones_flash,
    "recorded": recorded.recorded,
    "straggling": synthetic.straggling,
    "uniform": synthetic.uniform,
}
FLEETS = {name: equipped(make) for name, make in MAKERS.items()}


def maker(name: str) -> Callable[..., Fleet]:
    """The builder of that name; one from outside takes step laws and clusters as well."""
    function = registry.find("fleet", name)
    if name in FLEETS:
        return FLEETS[name]

    if lacks := [each for each in ("clients", "seed") if each not in inspect.signature(function).parameters]:
        raise ConfigError(
            [f"fleet '{name}' has no parameter {' and no '.join(lacks)}; it is called with clients and seed"]
        )

    @wraps(function)
    def make(clients: int, seed: int, **options: Any) -> Fleet:
        fleet: Fleet = registry.make("fleet", name, clients, seed, **options)
        if problems := fleet.problems():
            raise ConfigError(problems)
        if fleet.clients != clients:
            raise ConfigError([f"it has {fleet.clients} clients where {clients} were asked for; they must be the same"])
        return fleet

    return equipped(make)


def build(name: str, clients: int = 100, seed: int = 0, **given: Any) -> Fleet:
    """The fleet of that name. Raises ConfigError with every problem at once.

    >>> build("equal", 3, latency=0.5).up_latency
    array([0.5, 0.5, 0.5])
    """
    make = maker(name)
    parameters = inspect.signature(make).parameters
    own = tuple(parameters.keys() - {"clients", "seed"})
    problems = option_problems(f"fleet '{name}'", make, given, ("clients", "seed"))
    problems += option_problems(f"fleet '{name}'", make, {"clients": clients, "seed": seed}, own)
    if isinstance(clients, int) and clients < 1:
        problems.append(f"fleet '{name}': clients = {clients}; a fleet needs at least 1")
    elif fits(clients, int):
        problems += too_large(
            f"fleet '{name}' of {in_words(clients)} clients", BYTES * float(clients), "take fewer clients"
        )
    if problems and not (fits(clients, int) and 1 <= clients <= LARGEST):
        clients = 1
    # A first problem does not hide those of the other options.
    size = (1, 0) if problems else (clients, seed)
    fitting = {k: v for k, v in given.items() if not option_problems("", make, {k: v}, tuple(parameters.keys() - {k}))}
    if any(p.default is p.empty and key not in ("clients", "seed", *fitting) for key, p in parameters.items()):
        raise ConfigError(problems)  # it cannot be called
    law = fitting.pop("local_steps", None) if problems else None
    spec = fitting.pop("clusters", None) if problems else None
    if problems and "clusters" in inspect.signature(MAKERS.get(name, make)).parameters:
        fitting["clusters"] = 1  # its own are of a fleet of another size
    try:
        if spec is not None and fits(clients, int) and clients > 0:
            problems += [f"fleet '{name}': {sentence}" for sentence in clusters_of(spec, clients, 0).problems(clients)]
    except ConfigError as error:
        problems += [f"fleet '{name}': {sentence}" for sentence in error.problems]
    try:
        if law is not None and not asks_speeds(law):  # the fleet's speeds are not known
            step_plan(law, np.ones(clients if fits(clients, int) and clients > 0 else 1), 0)
        fleet = make(*size, **fitting)
        problems += [f"fleet '{name}': {sentence}" for sentence in fleet.problems()]
    except ConfigError as error:
        said = f"fleet '{name}'"
        problems += [text if text.startswith(said) else f"{said}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(problems)
    return fleet
