"""Tables of results, on the terminal and as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from offbeat.runs.bands import interval
from offbeat.runs.layout import markdown as markdown
from offbeat.runs.tables import laid_out


def show_records(title: str, records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of records: a column for every plain figure or word in any of them."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    plain = [name for name in columns if all(isinstance(r.get(name), str | float | int | None) for r in records)]
    show(title, plain, [[spoken(record.get(name)) for name in plain] for record in records], console)


def spoken(value: Any) -> str:
    """A figure with the digits that a reader wants."""
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def amount(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def average(results: Sequence[Mapping[str, Any]], *path: str) -> float | None:
    """The mean over seeds of one figure; None where a seed does not have it."""
    numbers: list[float] = []
    for result in results:
        value: Any = result
        for name in path:
            value = None if value is None else value.get(name)
        if value is None:
            return None
        numbers.append(float(value))
    return mean(numbers)


SHORT = {"the test set": "test", "the training data": "train", "the held-out parts of shards": "held-out"}


class Figures(NamedTuple):
    """A table: names, cells, and a rank for each column, of which the largest is the first to go."""

    columns: list[str]
    rows: list[list[str]]
    ranks: list[int]


def comparison_table(runs: Mapping[str, Sequence[Mapping[str, Any]]], target: str | None) -> Figures:
    """One row per label, figures averaged over seeds; of several seeds with the half of a 95 % interval. Beside the
    name of a metric stands the data that it comes from."""
    every = [result for results in runs.values() for result in results]
    scored = any(result["accuracy_final"] is not None for result in every)
    named: list[tuple[str, int, Callable[[Sequence[Mapping[str, Any]]], str]]] = []
    if scored:
        named.append((titled("accuracy", every), 1, lambda r: spread(r, 4, "accuracy_final")))
        named.append(("best", 4, lambda r: amount(average(r, "accuracy_best"), 4)))
    named.append((titled("loss", every), 5 if scored else 1, lambda r: significant(average(r, "loss_final"))))
    for name in further(every):
        named.append((titled(name, every), 3, partial(last_value, name)))
    named += [
        ("commits", 7, lambda r: amount(average(r, "commits"), 0)),
        ("virtual s", 6, lambda r: amount(average(r, "virtual_seconds"), 1)),
        ("client-steps", 10, lambda r: amount(average(r, "client_steps"), 0)),
        ("MB up", 8, lambda r: amount(millions(average(r, "bytes_up")), 1)),
        ("MB down", 9, lambda r: amount(millions(average(r, "bytes_down")), 1)),
        ("MB d2d", 13, lambda r: amount(millions(average(r, "bytes_d2d")), 1)),
        ("stale", 11, lambda r: amount(average(r, "staleness", "mean"), 1)),
        ("idle", 12, lambda r: amount(average(r, "idle_share"))),
    ]
    if target is not None:
        named.append((f"s to {target}", 2, lambda r: time_to(r, target)))
    rows = [[label, *(tell(results) for _, _, tell in named)] for label, results in runs.items()]
    return Figures(["method", *(name for name, _, _ in named)], rows, [0, *(rank for _, rank, _ in named)])


def titled(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A metric with its data, where that is the same in all results."""
    data = {result.get("metrics", {}).get(name, {}).get("data") for result in results}
    if len(data) > 1 or not data or None in data:
        return name
    return f"{name} ({SHORT[one]})" if (one := str(data.pop()).split(" (")[0]) in SHORT else name


def further(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics that were asked for; of single clients the worst alone."""
    names = dict.fromkeys(name for result in results for name in result.get("metrics", {}))
    heads = ("own_", "held_out_", "unseen_", "shard_")
    worst = [name for name in names if name.startswith(heads) and name.endswith(("accuracy_worst", "loss_worst"))]
    scores = [name for name in worst if "accuracy" in name]
    plain = [name for name in names if not name.startswith(heads) and name not in ("accuracy", "loss")]
    return [*plain, *(scores if any(filled(results, name) for name in scores) else worst)]


def last_value(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    return significant(average(results, "metrics", name, "final"))


def filled(results: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(result.get("metrics", {}).get(name, {}).get("final") is not None for result in results)


def millions(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def spread(results: Sequence[Mapping[str, Any]], digits: int, *path: str) -> str:
    """A mean, and the half of its 95 % interval where there are several seeds."""
    values = [result[path[0]] for result in results]
    if None in values:
        return "-"
    bounds = interval(values)
    return f"{bounds.mean:,.{digits}f}" + ("" if bounds.high is None else f" ±{bounds.half:.{digits}f}")


def time_to(results: Sequence[Mapping[str, Any]], target: str) -> str:
    times = [(result["reached"].get(target) or {}).get("virtual_seconds") for result in results]
    there = [value for value in times if value is not None]
    if len(there) == len(times):
        return f"{mean(there):,.1f}"
    return f"{len(there)} of {len(times)} seeds" if there else "not reached"


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console,
    ranks: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """A table on a terminal of any width, or in a pipe, where no column goes."""
    lines = laid_out(columns, rows, console.width, ranks, drop=console.is_terminal)
    for line in [*textwrap.wrap(title, max(20, console.width)), *lines]:
        console.print(line, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)


def write_table(path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{markdown(columns, rows)}")
    return path


# ---- what was measured --------------------------------------------------------------------------
READINGS = ("", "value", "95 % interval", "how", "says")


class Measured(Protocol):
    @property
    def readings(self) -> Sequence[Any]: ...


def reading_rows(measured: Measured) -> list[list[str]]:
    rows = []
    for reading in measured.readings:
        ends = "" if reading.low is None else f"{reading.low:.4g} to {reading.high:.4g}"
        rows.append([reading.symbol, f"{reading.value:.4g}", ends, reading.how, reading.said])
    return rows


def schedule_lines(schedule: Any, method: str = "") -> list[str]:
    never = f"; {schedule.never} were never heard" if schedule.never else ""
    lines = [
        f"schedule of {schedule.commits} commits{f' of {method}' if method else ''}: "
        f"staleness {schedule.staleness_mean:.2f} on average, at most "
        f"{schedule.staleness}; whoever is heard least has {schedule.least:.0%} of an equal part{never}"
    ]
    if schedule.likely is not None:
        lines.append(f"with 99 % chance nobody stays undrawn for more than {schedule.likely:.0f} commits (DLSGD)")
    return lines


def counsel_lines(name: str, counsel: Any) -> list[str]:
    """What a theorem admits, and which of its conditions the configured rates fail."""
    lines = [f"{name}: cannot be asked: {sentence}" for sentence in counsel.refused]
    for whose, advice in (("admits", counsel.own), ("yours", counsel.yours)):
        if advice is None:
            continue
        bound = "" if advice.bound is None else f", {advice.bounded} at most {advice.bound:.3g}"
        said = "its own rates" if whose == "admits" and advice.failing else whose
        lines.append(f"{name}: {said}: client_lr {advice.client_lr:.3g}, server_lr {advice.server_lr:.3g}{bound}")
        for condition in advice.failing:
            sign = "at least" if condition.least else "at most"
            lines.append(
                f"    fails {condition.name}: {condition.text}: {condition.given:.3g}, {sign} {condition.allowed:.3g}"
            )
        if whose == "admits":
            lines += [f"    {note}" for note in advice.notes]
    return lines
