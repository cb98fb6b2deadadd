"""Rates: a constant, or a schedule by version or, for clients, by local step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offbeat.config.options import fits, option_problems
from offbeat.errors import ConfigError, unknown
from offbeat.method import ClientRate, StepRate

Rate: TypeAlias = float | Mapping[str, Any] | Callable[..., float] | StepRate


def constant(value: float) -> Callable[[int], float]:
    return lambda version: value


def step(value: float, at: list[int], factor: float = 0.1) -> Callable[[int], float]:
    """`value`, multiplied by `factor` at each version in `at`."""
    return lambda version: value * math.prod(factor for v in at if version >= v)


def stages(values: list[float], at: list[int]) -> Callable[[int], float]:
    """The first of `values`, and the next from each version in `at` on."""
    return lambda version: values[sum(version >= v for v in at)]


def inverse_sqrt(value: float, scale: float = 1.0) -> Callable[[int], float]:
    """`value / sqrt(1 + version / scale)`."""
    return lambda version: float(value / math.sqrt(1 + version / scale))


def cosine(value: float, versions: int, floor: float = 0.0, warm_up: int = 0) -> Callable[[int], float]:
    """From `value` down to `floor` over so many versions, along half a cosine; the first `warm_up` of them go up to
    `value` in equal parts."""
    return lambda version: half_cosine(value, floor, warm_up, version, versions)


def warm_up(value: float, steps: int) -> StepRate:
    """Up to `value` in equal parts over the first `steps` local steps of each job."""
    return StepRate(lambda version, step, job: value * min(1.0, (step + 1) / steps))


def local_cosine(value: float, floor: float = 0.0, warm_up: int = 0) -> StepRate:
    """From `value` towards `floor` over the local steps of each job, along half a cosine; the first `warm_up` of them
    go up to `value` in equal parts."""
    return StepRate(lambda version, step, job: half_cosine(value, floor, warm_up, step, job))


def half_cosine(value: float, floor: float, warm_up: int, now: int, end: int) -> float:
    """
    >>> [round(half_cosine(1.0, 0.0, 2, now, 6), 3) for now in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if now < warm_up:
        return value * (now + 1) / warm_up
    left = max(1, end - warm_up)
    return floor + (value - floor) * 0.5 * (1 + math.cos(math.pi * min(now - warm_up, left) / left))


SCHEDULES: dict[str, Callable[..., ClientRate]] = {
    "constant": constant, "step": step, "stages": stages, "inverse-sqrt": inverse_sqrt, "cosine": cosine,
    "warm-up": warm_up, "local-cosine": local_cosine,
}  # fmt: skip


def rate(given: Rate, name: str = "server_lr", zero: bool = False) -> Callable[[int], float]:
    """A rate by version, from a number, a function of the version, or a table like
    `{schedule = "step", value = 0.1, at = [50]}`. It must be positive, or, with `zero`, not negative.

    >>> [rate({"schedule": "step", "value": 1.0, "at": [2]})(v) for v in (0, 1, 2)]
    [1.0, 1.0, 0.1]
    """
    by = client_rate(given, name, zero)
    if isinstance(by, StepRate):
        raise ConfigError([f"{name} depends on the local step, and there is none here; give a rate by version"])
    return by


def client_rate(given: Rate, name: str = "client_lr", zero: bool = False) -> ClientRate:
    """The same for clients: it may depend on the local step too. A function may take (version), (version, step) or
    (version, step, steps of the job).

    >>> warm = client_rate({"schedule": "warm-up", "value": 1.0, "steps": 4})
    >>> [warm.at(0, step, 10) for step in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    """
    if isinstance(given, Mapping):
        by = scheduled(dict(given), name)
    elif isinstance(given, StepRate):
        by = given
    else:
        by = by_arguments(given) if callable(given) else constant(float(given))
    first = by.at(0, 0, 1) if isinstance(by, StepRate) else by(0)
    if not math.isfinite(first) or first < 0 or (first == 0 and not zero):
        raise ConfigError([f"{name} = {first}; a rate must be a positive number{', or 0' if zero else ''}"])
    return by


def by_arguments(function: Callable[..., float]) -> ClientRate:
    """A function as a rate, by how many arguments it asks for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asked = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(asked) == 2:
        return StepRate(lambda version, step, steps: function(version, step))
    return StepRate(function) if len(asked) == 3 else function


def every(versions: int, by: ClientRate) -> ClientRate:
    """The same rate for so many versions one after the other."""
    if isinstance(by, StepRate):
        return StepRate(lambda version, step, steps: by.at(version // versions, step, steps))
    return lambda version: by(version // versions)


def scheduled(options: dict[str, Any], name: str) -> ClientRate:
    """The rate that a table names, or a sentence on each thing that is wrong with it."""
    kind = options.pop("schedule", "constant")
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise ConfigError([unknown("rate schedule", str(kind), SCHEDULES)])
    problems = option_problems(f"{name}: schedule '{kind}'", SCHEDULES[kind], options)
    if problems:
        raise ConfigError(problems)
    bad = [
        f"{name}: {key} = {options[key]}; it must be positive"
        for key in ("scale", "versions", "steps")
        if options.get(key, 1) <= 0
    ]
    bad += [f"{name}: {key} = {options[key]}; it must not be negative" for key in ("factor", "floor", "warm_up")
            if options.get(key, 0) < 0]  # fmt: skip
    if not all(fits(v, int) for v in options.get("at", [])):
        bad.append(f"{name}: at = {options['at']}; it must be a list of versions")
    if kind == "stages" and len(options["values"]) != len(options["at"]) + 1:
        bad.append(f"{name}: {len(options['values'])} values for {len(options['at'])} changes; give one value more")
    bad += [f"{name}: values has {v!r}; give finite numbers, 0 or more" for v in options.get("values", ())
            if not fits(v, float) or not 0 <= v < math.inf]  # fmt: skip
    if bad:
        raise ConfigError(bad)
    return SCHEDULES[kind](**options)
