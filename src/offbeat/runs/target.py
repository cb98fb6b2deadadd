"""When to stop, and when a target was reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from offbeat.config.options import fits
from offbeat.errors import in_words, unknown

LIMITS = (
    "accuracy", "accuracy_smoothed", "loss", "virtual_seconds", "commits", "samples", "bytes_up", "bytes_down",
    "bytes_d2d",
)  # fmt: skip
SILENT = "nobody said whether more of '{}' is better; say it (more_is_better = true or false)"
SMOOTH = 5  # evaluations in the running mean of the smoothed crossing


class Figure(Protocol):
    """What a metric is: whether more of it is better (None: nobody said), and whether it is a share."""

    @property
    def more_is_better(self) -> bool | None: ...
    @property
    def share(self) -> bool: ...


def plain_name(name: str) -> str:
    """The metric that a limit speaks of.

    >>> plain_name("mae_smoothed"), plain_name("mae")
    ('mae', 'mae')
    """
    return name.removesuffix("_smoothed")


def width_of(name: str) -> int:
    """The evaluations over which the mean of a metric must meet a limit.

    >>> width_of("mae_smoothed"), width_of("mae")
    (5, 1)
    """
    return SMOOTH if name.endswith("_smoothed") else 1


def limit_problems(until: Mapping[str, Any], figures: Mapping[str, Figure] | None = None) -> list[str]:
    """What is wrong with a table of limits; empty when nothing is. `figures` are metrics that may be limits, too."""
    figures = figures or {}
    problems = []
    for name in until:
        if name in LIMITS or plain_name(name) in figures:
            continue
        problems.append(f"until: {unknown('limit', name, {*LIMITS, *figures})}")
    for name in until:
        value, figure = until[name], figures.get(plain_name(name))
        if name not in LIMITS and figure is None:
            continue
        free = name == "loss" or name not in LIMITS
        if not fits(value, float) or math.isinf(value):
            problems.append(f"until.{name} = {in_words(value)}; it must be a {'' if free else 'positive '}number")
        elif name not in LIMITS and figure is not None and figure.more_is_better is None:
            problems.append(f"until.{name}: {SILENT.format(plain_name(name))}")
        elif name not in LIMITS and figure is not None and figure.share and not 0 <= value <= 1:
            problems.append(f"until.{name} = {in_words(value)}; it is a share between 0 and 1")
        elif not free and value <= 0:
            problems.append(f"until.{name} = {in_words(value)}; it must be a positive number")
        elif name.startswith("accuracy") and value > 1:
            problems.append(f"until.{name} = {value}; accuracy is a share between 0 and 1, so write 0.9 for 90 %")
        elif name in ("commits", "samples") and value != int(value):
            problems.append(f"until.{name} = {value}; it must be a whole number")
    if not until:
        problems.append(f"until is empty, so the run would never end; give one of {', '.join(LIMITS)}")
    return problems


def target_problems(targets: Any, figures: Mapping[str, Figure]) -> list[str]:
    """What is wrong with targets: a list of accuracies, or a table with a list for each metric."""
    if isinstance(targets, list | tuple):
        wrong = [each for each in targets if not fits(each, float) or not 0 < each <= 1]
        return [f"targets: {in_words(each)} is not an accuracy between 0 and 1" for each in wrong]
    if not isinstance(targets, Mapping):
        given = "it must be a list of accuracies, such as [0.8, 0.9], or a table such as {mae = [0.1]}"
        return [f"targets = {in_words(targets)}; {given}"]
    problems = []
    for name, values in targets.items():
        if name not in figures:
            problems.append(f"targets: {unknown('metric', name, figures)}")
        elif figures[name].more_is_better is None:
            problems.append(f"targets.{name}: {SILENT.format(name)}")
        elif not isinstance(values, list | tuple) or not all(fits(each, float) for each in values):
            problems.append(f"targets.{name} = {in_words(values)}; it must be a list of numbers")
    return problems


def target_list(targets: Any, until: Mapping[str, float], figures: Mapping[str, Figure]) -> list[tuple[str, float]]:
    """All targets of a run, by metric and value; limits on metrics count too. Smoothed limits come first, and each is
    also a target by single evaluations; then comes accuracy."""
    given = targets if isinstance(targets, Mapping) else {"accuracy": targets}
    pairs = {(name, float(value)): None for name, values in given.items() for value in values}
    for name, value in until.items():
        if plain_name(name) in figures and name != "loss":
            pairs |= {(name, float(value)): None, (plain_name(name), float(value)): None}
    return sorted(pairs, key=lambda pair: (width_of(pair[0]) == 1, plain_name(pair[0]) != "accuracy", pair))


def target_key(name: str, value: float) -> str:
    """How a result calls a target.

    >>> target_key("accuracy", 0.9), target_key("mae", 0.1), target_key("accuracy_smoothed", 0.9)
    ('0.9', 'mae 0.1', 'accuracy_smoothed 0.9')
    """
    return str(value) if name == "accuracy" else f"{name} {value}"


def target_of(key: str) -> tuple[str, float]:
    """The metric and the value of a target that a result calls so.

    >>> target_of("0.9"), target_of("mae 0.1")
    (('accuracy', 0.9), ('mae', 0.1))
    """
    name, _, value = key.strip().rpartition(" ")
    return name.strip() or "accuracy", float(value)


def stop_reason(
    until: Mapping[str, float], rows: Sequence[Mapping[str, Any]], figures: Mapping[str, Figure] | None = None
) -> str | None:
    """Which limit the last of the metrics rows has reached, or None."""
    row = rows[-1]
    for limit in until:
        name, width = plain_name(limit), width_of(limit)
        if limit in LIMITS or (figures or {}).get(name) is None:
            continue
        more = bool((figures or {})[name].more_is_better)
        if crossing(recent(rows, name, width), until[limit], width, name, more):
            said = f"{limit} {row[name]:.4g}" if width == 1 else limit
            return f"{said} {'>=' if more else '<='} {until[limit]}"
    for name, width in (("accuracy", 1), ("accuracy_smoothed", SMOOTH)):
        if name in until and crossing(recent(rows, "accuracy", width), until[name], width):
            return f"{name} {row['accuracy']:.4f} >= {until[name]}" if width == 1 else f"{name} >= {until[name]}"
    if "loss" in until and row["loss"] <= until["loss"]:
        return f"loss {row['loss']:.4f} <= {until['loss']}"
    return None


def recent(rows: Sequence[Mapping[str, Any]], name: str, width: int) -> list[Mapping[str, Any]]:
    """The last rows, up to `width`, in which a metric has a value; none where the very last has none."""
    if rows[-1].get(name) is None:
        return []
    return list(islice((row for row in reversed(rows) if row.get(name) is not None), width))[::-1]


@dataclass(frozen=True)
class Crossing:
    """The first evaluation at which a target was met."""

    commit: int
    virtual_seconds: float
    between: float = field(default=math.nan, compare=False)  # where a straight line from the one before meets it


def crossing(
    rows: Sequence[Mapping[str, Any]], target: float, smooth: int = 1, name: str = "accuracy", more: bool = True
) -> Crossing | None:
    """The first crossing of a metric, by single evaluations or by the mean of the last `smooth` of them."""
    seen: list[float] = []
    before: tuple[float, float] | None = None  # when, and the mean
    for row in rows:
        if row.get(name) is None:
            continue
        seen.append(row[name])
        if len(seen) < smooth:
            continue
        now, mean = float(row["virtual_seconds"]), sum(seen[-smooth:]) / smooth
        if mean >= target if more else mean <= target:
            start, level = before or (now, mean - 1.0)
            return Crossing(row["commit"], now, start + (target - level) / (mean - level) * (now - start))
        before = (now, mean) if math.isfinite(mean) else None
    return None
