"""Rates by version: a constant, or a schedule that falls as versions are committed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offbeat.errors import ConfigError, unknown
from offbeat.options import fits, option_problems

Rate: TypeAlias = float | Mapping[str, Any] | Callable[[int], float]


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


def cosine(value: float, versions: int, floor: float = 0.0) -> Callable[[int], float]:
    """From `value` down to `floor` over so many versions, along half a cosine."""
    return lambda v: floor + (value - floor) * 0.5 * (1 + math.cos(math.pi * min(v, versions) / versions))


SCHEDULES: dict[str, Callable[..., Callable[[int], float]]] = {
    "constant": constant, "step": step, "stages": stages, "inverse-sqrt": inverse_sqrt, "cosine": cosine,
}  # fmt: skip


def rate(given: Rate, name: str = "client_lr", zero: bool = False) -> Callable[[int], float]:
    """A rate from a number, a function of the version, or a table like `{schedule = "step", value = 0.1, at = [50]}`.
    It must be positive, or, with `zero`, not negative.

    >>> [rate({"schedule": "step", "value": 1.0, "at": [2]})(v) for v in (0, 1, 2)]
    [1.0, 1.0, 0.1]
    """
    if isinstance(given, Mapping):
        options = dict(given)
        kind = options.pop("schedule", "constant")
        if not isinstance(kind, str) or kind not in SCHEDULES:
            raise ConfigError([unknown("rate schedule", str(kind), SCHEDULES)])
        problems = option_problems(f"{name}: schedule '{kind}'", SCHEDULES[kind], options)
        if problems:
            raise ConfigError(problems)
        bad = [
            f"{name}: {key} = {options[key]}; it must be positive"
            for key in ("scale", "versions")
            if options.get(key, 1) <= 0
        ]
        bad += [f"{name}: {key} = {options[key]}; it must not be negative" for key in ("factor", "floor")
                if options.get(key, 0) < 0]  # fmt: skip
        if not all(fits(v, int) for v in options.get("at", [])):
            bad.append(f"{name}: at = {options['at']}; it must be a list of versions")
        if kind == "stages" and len(options["values"]) != len(options["at"]) + 1:
            bad.append(f"{name}: {len(options['values'])} values for {len(options['at'])} changes; give one value more")
        bad += [f"{name}: values has {v!r}; give finite numbers, 0 or more" for v in options.get("values", ())
                if not fits(v, float) or not 0 <= v < math.inf]  # fmt: skip
        if bad:
            raise ConfigError(bad)
        made = SCHEDULES[kind](**options)
    else:
        made = given if callable(given) else constant(float(given))
    first = made(0)
    if not math.isfinite(first) or first < 0 or (first == 0 and not zero):
        raise ConfigError([f"{name} = {first}; a rate must be a positive number{', or 0' if zero else ''}"])
    return made
