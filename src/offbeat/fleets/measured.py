"""Fleets that somebody measured: a device is one entry of several lists, read from a table of comma-separated values.

A fleet of as many clients as devices has them in their order; one of another size draws a device for each client, with
all that was measured of it, so that slow phones keep their slow links.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offbeat.errors import ConfigError, in_words, unknown
from offbeat.fleets.clusters import MBIT
from offbeat.fleets.distributions import Array, LawSpec, draws, number_problems, read
from offbeat.fleets.fleet import Fleet, improbable
from offbeat.fleets.presence import EachOnOff, OnOff

MOST = 1_000_000  # rows of a table
SHOWN = 12  # problems of a table that are named one by one
FASTEST = 1e6  # Mbit/s: no link carries more


class Column(NamedTuple):
    """A quantity that a table may have: the option it becomes, and its units with the factor to the option's own."""

    option: str
    units: dict[str, float]
    positive: bool = True
    largest: float = math.inf
    means: str = ""


TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
LINK = {"mbit": 1.0, "kbit": 1e-3, "gbit": 1e3, "mbyte": 8.0, "kbyte": 8e-3}
QUANTITIES = {
    "step": Column("step_seconds", TIME, means="time of one local step (one batch)"),
    "down": Column("down_mbit", LINK, largest=FASTEST, means="link from the server, per second"),
    "up": Column("up_mbit", LINK, largest=FASTEST, means="link to the server, per second"),
    "latency": Column("latency", TIME, positive=False, means="delay of a message, one way"),
    "on": Column("mean_on", TIME, means="how long the device stays, on average"),
    "off": Column("mean_off", TIME, means="how long it stays away, on average"),
}
NAMES = ("client", "device", "name", "id")  # columns that only say which device it is


@dataclass(frozen=True)
class Table:
    """What was read: the fleet's options, and what was left out."""

    options: dict[str, list[float]]
    devices: int
    ignored: tuple[str, ...]


def measured(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: float | list[float] = 0.01,  # one device, as the other fleets have it
    down_mbit: list[float] | None = None,
    up_mbit: list[float] | None = None,
    latency: list[float] | None = None,
    mean_on: list[float] | None = None,
    mean_off: list[float] | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Measured devices, one entry of each list; `offbeat fleet from-csv` writes them. Links that are not given take no
    time for bytes; with `mean_on` and `mean_off` (s) devices come and go."""
    steps = step_seconds if isinstance(step_seconds, list | tuple) else [step_seconds]
    lists = {"step_seconds": steps, "down_mbit": down_mbit, "up_mbit": up_mbit, "latency": latency,
             "mean_on": mean_on, "mean_off": mean_off}  # fmt: skip
    problems = list_problems(lists)
    problems += improbable(drop_out)
    law = None if jitter is None else read(jitter, "jitter", problems)
    if (mean_on is None) != (mean_off is None):
        problems.append("mean_on and mean_off go together; give both, or neither for devices that are always there")
    if problems:
        raise ConfigError(problems)
    devices = len(steps)
    which = np.arange(clients)
    if clients != devices:
        which = np.minimum((draws(clients, seed, "device") * devices).astype(np.int64), devices - 1)

    def of(values: Sequence[float] | None, missing: float, factor: float = 1.0) -> Array:
        return np.full(clients, missing) if values is None else np.asarray(values, np.float64)[which] * factor

    late = of(latency, 0.0)
    presence = None
    if mean_on is not None and mean_off is not None:
        presence = EachOnOff(tuple(OnOff(float(mean_on[i]), float(mean_off[i]), seed) for i in which))
    return Fleet(
        name="measured", clients=clients, step_seconds=of(steps, 0.0), down_latency=late, up_latency=late,
        down_bandwidth=of(down_mbit, math.inf, MBIT), up_bandwidth=of(up_mbit, math.inf, MBIT), jitter=law,
        drop_out=drop_out, presence=presence,
    )  # fmt: skip


def list_problems(lists: dict[str, Any]) -> list[str]:
    """Lists of unequal lengths, and entries that no device has."""
    problems = []
    sizes = {name: len(values) for name, values in lists.items() if values is not None}
    if not sizes["step_seconds"]:
        problems.append("step_seconds has no entry; give one number for each device")
    elif len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        problems.append(f"lists of unequal lengths ({said}); give one number for each device")
    for name, values in lists.items():
        bad = [s for place, value in enumerate(values or ())
               for s in number_problems(f"{name}, device {place}", value, positive=name != "latency")]  # fmt: skip
        problems += bad[:3] + ([f"{name}: {len(bad) - 3} more entries of the kind"] if len(bad) > 3 else [])
    return problems


# ---- tables -------------------------------------------------------------------------------------
def read_table(path: Path) -> Table:
    """A CSV file with a header; every problem at once, by row (the first after the header is row 1) and column."""
    rows = cells(path)
    header = [name.strip().lower() for name in rows[0]]
    columns, ignored, problems = columns_of(path.name, header)
    if problems:
        raise ConfigError(problems)
    options: dict[str, list[float]] = {column.option: [] for _, column, _ in columns.values()}
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            problems.append(f"{path.name}, row {number}: {len(row)} cells under {len(header)} columns")
            continue
        for place, (name, column, factor) in columns.items():
            value, problem = figure(row[place], column, factor)
            options[column.option].append(value)
            if problem:
                problems.append(f"{path.name}, row {number}, column '{name}': {problem}")
    if problems:
        rest = len(problems) - SHOWN
        raise ConfigError(problems[:SHOWN] + ([f"... and {rest} more cells of the kind"] if rest > 0 else []))
    return Table(options, len(rows) - 1, tuple(ignored))


def cells(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path} is not a text in UTF-8; save it as CSV in UTF-8"]) from None
    first = text.partition("\n")[0]
    mark = next((sign for sign in ",;\t" if sign in first), ",")
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=mark, strict=True) if any(map(str.strip, row))]
    except csv.Error as error:
        raise ConfigError([f"{path} is no table of comma-separated values: {error}"]) from None
    if len(rows) < 2:
        raise ConfigError([f"{path} has no row under its header; give one row for each device"])
    if len(rows) > MOST + 1:
        raise ConfigError([f"{path} has {len(rows) - 1:,} rows, and {MOST:,} is the most; leave some out"])
    return rows


def columns_of(where: str, header: list[str]) -> tuple[dict[int, tuple[str, Column, float]], list[str], list[str]]:
    """The columns that are known, by place; those that are not; and what is wrong with the header."""
    known: dict[int, tuple[str, Column, float]] = {}
    ignored, problems = [], []
    for place, name in enumerate(header):
        quantity, _, unit = name.partition("_")
        column = QUANTITIES.get(quantity)
        unit = unit.removesuffix("_s").removesuffix("ps") if quantity in ("down", "up") else unit
        if column is None:
            if name not in NAMES:
                ignored.append(name)
        elif unit not in column.units:
            could = ", ".join(f"{quantity}_{each}" for each in column.units)
            problems.append(f"{where}, column '{name}': its unit is not known; write it as one of {could}")
        elif column.option in (taken := [other.option for _, other, _ in known.values()]):
            first = list(known.values())[taken.index(column.option)][0]
            problems.append(f"{where}: columns '{first}' and '{name}' both give the {quantity}; keep one")
        else:
            known[place] = (name, column, column.units[unit])
    options = {column.option for _, column, _ in known.values()}
    if "step_seconds" not in options and not any("column 'step" in problem for problem in problems):
        hint = next((unknown("column", name, ["step_s", "step_ms"]) for name in ignored if name[:2] == "st"), "")
        problems.append(
            f"{where} has no column for the time of a local step; name it step_s or step_ms "
            f"(its columns: {', '.join(header)}){'; ' + hint if hint else ''}"
        )
    for one, other in (("mean_on", "mean_off"), ("mean_off", "mean_on")):
        if one in options and other not in options:
            problems.append(f"{where} says how long devices stay or are away, but not the other; give on_s and off_s")
    return known, ignored, problems


def figure(text: str, column: Column, factor: float) -> tuple[float, str]:
    """The number of a cell in the option's unit, and what is wrong with it."""
    text = text.strip()
    if not text:
        return 1.0, "the cell is empty; give a number, or leave the device out"
    try:
        value = float(text)
    except ValueError:
        return 1.0, f"{in_words(text)} is no number; write it with a point and without a unit"
    if not math.isfinite(value) or value < 0 or (column.positive and value == 0):
        return 1.0, f"{text}; it must be a finite number {'above 0' if column.positive else 'from 0'}"
    if value * factor > column.largest:
        return 1.0, f"{text} is {value * factor:.3g} Mbit/s, and no link carries that; is it of another unit?"
    return float(f"{value * factor:.12g}"), ""
