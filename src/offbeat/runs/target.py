"""When to stop, and when a target was reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import shown, unknown
from offbeat.options import fits

LIMITS = (
    "accuracy", "accuracy_smoothed", "loss", "virtual_seconds", "commits", "samples", "bytes_up", "bytes_down",
    "bytes_d2d",
)  # fmt: skip
SMOOTH = 5  # evaluations in the running mean of the smoothed crossing


def limit_problems(until: Mapping[str, Any]) -> list[str]:
    """What is wrong with a table of limits; empty when nothing is."""
    found = [f"until: {unknown('limit', name, LIMITS)}" for name in until if name not in LIMITS]
    for name in set(until) & set(LIMITS):
        value = until[name]
        if not fits(value, float) or math.isinf(value):
            found.append(f"until.{name} = {shown(value)}; it must be a {'' if name == 'loss' else 'positive '}number")
        elif name != "loss" and value <= 0:
            found.append(f"until.{name} = {shown(value)}; it must be a positive number")
        elif name.startswith("accuracy") and value > 1:
            found.append(f"until.{name} = {value}; accuracy is a share between 0 and 1, so write 0.9 for 90 %")
        elif name in ("commits", "samples") and value != int(value):
            found.append(f"until.{name} = {value}; it must be a whole number")
    if not until:
        found.append(f"until is empty, so the run would never end; give one of {', '.join(LIMITS)}")
    return found


def stop_reason(until: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Which limit the last of the metrics rows has reached, or None."""
    row = rows[-1]
    for name, width in (("accuracy", 1), ("accuracy_smoothed", SMOOTH)):
        if name in until and crossing(rows[-width:], until[name], width):
            return f"{name} {row['accuracy']:.4f} >= {until[name]}" if width == 1 else f"{name} >= {until[name]}"
    if "loss" in until and row["loss"] <= until["loss"]:
        return f"loss {row['loss']:.4f} <= {until['loss']}"
    return None


@dataclass(frozen=True)
class Crossing:
    """The first evaluation at which a target was met."""

    commit: int
    virtual_seconds: float


def crossing(rows: Sequence[Mapping[str, Any]], target: float, smooth: int = 1) -> Crossing | None:
    """The first crossing of an accuracy, by single evaluations or by the mean of the last `smooth` of them."""
    seen: list[float] = []
    for row in rows:
        if row["accuracy"] is None:
            continue
        seen.append(row["accuracy"])
        if len(seen) >= smooth and sum(seen[-smooth:]) / smooth >= target:
            return Crossing(row["commit"], row["virtual_seconds"])
    return None
