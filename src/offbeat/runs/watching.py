"""A run as it goes, in a terminal: the curve as dots, limits as bars, the last stretch of the timeline, staleness."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offbeat.runs import palette
from offbeat.runs.chronicle import Chronicle, again, in_use, read_run
from offbeat.runs.manifest import NAME, read_manifest
from offbeat.runs.stored import read_trace
from offbeat.runs.timeline import Span, Timeline, timeline_of

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character: rows of two
SIGNS = {"download": "<", "compute": "#", "unused": "x", "wait": "=", "upload": ">", "lost": "!", "away": " "}
STYLES = {"download": "blue", "compute": "bold green", "unused": "magenta", "wait": "yellow", "upload": "cyan",
          "lost": "red", "away": ""}  # fmt: skip
RANK = {kind: place for place, kind in enumerate(("compute", "unused", "upload", "download", "wait", "lost", "away"))}
ROWS = 16  # clients of the timeline


def watch(path: Path, every: float = 1.0, once: bool = False, console: Console | None = None) -> None:
    """Show a run until it ends; in a pipe, or `once`, where it stands."""
    console = console or Console(width=None if sys.stdout.isatty() else 100)
    while console.is_terminal and not once and in_use(path) and not begun(path):
        time.sleep(every)
    shown, lines = looked(path)
    if once or not console.is_terminal or shown.state != "running":
        console.print(view(shown, lines, console.width))
        return
    with Live(view(shown, lines, console.width), console=console, auto_refresh=False) as live:
        try:
            written = 0
            while shown.state == "running":
                time.sleep(every)
                now = (path / NAME).stat().st_mtime_ns
                if now != written or not in_use(path):  # else there is nothing new
                    shown, lines = looked(path)
                    live.update(view(shown, lines, console.width), refresh=True)
                written = now
        except KeyboardInterrupt:
            return  # the run goes on without us


def begun(path: Path) -> bool:
    """Whether a run has written down where it stands."""
    manifest = read_manifest(path)
    return manifest is not None and bool(manifest.config)


def looked(path: Path) -> tuple[Chronicle, Timeline]:
    rows = again(lambda: read_trace(path))
    return read_run(path, rows=rows), timeline_of(rows)


def state(path: Path) -> dict[str, Any]:
    """Where a run stands, for programs."""
    run, line = looked(path)
    last = dict(run.metrics[-1]) if run.metrics else {}
    return {
        "run": str(path), "state": run.state, "ended": run.ended, "method": run.method, "seed": run.seed, **last,
        "commits_recorded": len(line.commits), "until": dict(run.config["until"]), "limits": limits(run, line),
        "never_heard": sum(not many for many in run.heard),
    }  # fmt: skip


def limits(run: Chronicle, line: Timeline) -> dict[str, float]:
    """How much of each limit is used up."""
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    spent = {**last, "commits": len(line.commits), "virtual_seconds": line.end}
    shares = {}
    for name, limit in run.config["until"].items():
        value = spent.get("accuracy" if name.startswith("accuracy") else name)
        if value is not None and limit:
            shares[name] = limit / value if name == "loss" and value else value / limit
    return {name: min(1.0, float(share)) for name, share in shares.items()}


def view(run: Chronicle, line: Timeline, width: int) -> Group:
    wide = max(40, min(width, 140))
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    head = Text(f"{run.method} on {run.config['task']['name']}, fleet {run.config['fleet']['name']}, seed {run.seed}")
    head.stylize("bold")
    figures = [f"commit {len(line.commits):,}", palette.duration(line.end) + " virtual"]
    figures += [f"{name} {last[name]:.4g}" for name in ("accuracy", "loss") if last.get(name) is not None]
    if last:
        figures.append(palette.size(last["bytes_up"] + last["bytes_down"] + last["bytes_d2d"]) + " sent")
    parts: list[Any] = [head, Text(f"{run.state}: {run.ended}"), Text("  ".join(figures))]
    for name, share in limits(run, line).items():
        full = round(share * (wide - 30))
        parts.append(Text(f"{name:<18} {'=' * full}{'.' * (wide - 30 - full)} {share:>4.0%}"))
    score = "accuracy" if last.get("accuracy") is not None else "loss"
    values = [(row["virtual_seconds"], row[score]) for row in run.metrics if row.get(score) is not None]
    if len(values) > 1:
        parts += [Text(""), Text(f"{score} against virtual time", style="dim"), *plot(values, wide - 10, 7)]
    parts += [Text(""), *strip(line, wide)]
    parts += [Text(""), Text(staleness(run.staleness)), Text(heard(run.heard))]
    return Group(*parts)


def plot(values: Sequence[tuple[float, float]], wide: int, tall: int) -> list[Text]:
    """A curve in Braille dots, two by four to a character, with its range at the left."""
    low, high = min(y for _, y in values), max(y for _, y in values)
    first, last = values[0][0], values[-1][0]
    cells = [[0] * wide for _ in range(tall)]
    before: tuple[int, int] | None = None
    for x, y in values:
        column = round((x - first) / max(last - first, 1e-12) * (2 * wide - 1))
        row = round((high - y) / max(high - low, 1e-12) * (4 * tall - 1))
        from_column, from_row = before or (column, row)
        many = max(1, abs(column - from_column))
        for step in range(1, many + 1):
            c = from_column + round(step / many * (column - from_column))
            r = from_row + round(step / many * (row - from_row))
            cells[r // 4][c // 2] |= DOTS[r % 4][c % 2]
        before = column, row
    lines = []
    for number, cell in enumerate(cells):
        label = f"{high:8.3g} " if number == 0 else f"{low:8.3g} " if number == tall - 1 else " " * 9
        lines.append(Text(label + "".join(chr(0x2800 + dots) for dots in cell)))
    return lines


def strip(line: Timeline, wide: int, jobs: int = 3) -> list[Text]:
    """What the first clients did in the last stretch, in which a usual client does a few jobs."""
    computing = sorted(span.end - span.since for span in line.spans if span.kind == "compute")
    if not computing:
        return [Text("nothing was computed yet", style="dim")]
    usual = computing[len(computing) // 2]
    since = max(0.0, line.end - max(jobs * 2 * usual, line.end / 1000))
    room = wide - 8
    clients = sorted({span.client for span in line.spans})[:ROWS]
    rows: dict[int, list[str]] = {client: [""] * room for client in clients}
    for span in line.spans:
        if span.client in rows and span.end > since:
            mark(rows[span.client], span, since, line.end)
    title = f"the last {palette.duration(line.end - since)} of {len(clients)} clients:  "
    legend = "  ".join(f"{sign} {kind}" for kind, sign in SIGNS.items() if sign.strip())
    shown = [Text(title + legend, style="dim", no_wrap=True, overflow="ellipsis")]
    for client, cells in rows.items():
        text = Text(f"{client:>6}  ")
        for kind in cells:
            text.append(SIGNS.get(kind, "\u00b7"), STYLES.get(kind, "dim"))
        shown.append(text)
    return shown


def mark(cells: list[str], span: Span, since: float, end: float) -> None:
    """Fill the cells that a span covers; where two meet in one, computing shows."""
    scale = len(cells) / max(end - since, 1e-12)
    first, last = max(0, int((span.since - since) * scale)), min(len(cells), math.ceil((span.end - since) * scale))
    for place in range(first, last):
        if not cells[place] or RANK[span.kind] < RANK[cells[place]]:
            cells[place] = span.kind


def staleness(stale: Mapping[int, int]) -> str:
    """
    >>> staleness({0: 3, 1: 1})
    'staleness: mean 0.25; half at most 0, 95 % at most 1, all at most 1'
    """
    total = sum(stale.values())
    if not total:
        return "staleness: nothing was committed yet"
    mean = sum(k * many for k, many in stale.items()) / total
    below = dict(zip(sorted(stale), accumulate(stale[k] for k in sorted(stale)), strict=True))
    half, most = (next(k for k, many in below.items() if many >= part * total) for part in (0.5, 0.95))
    return f"staleness: mean {mean:.2f}; half at most {half}, 95 % at most {most}, all at most {max(stale)}"


def heard(counts: Sequence[int]) -> str:
    """
    >>> heard([4, 0, 2])
    'participation: 1 of 3 never heard; 0 to 4 updates, 2.0 on average'
    """
    never = sum(not many for many in counts)
    mean = sum(counts) / max(1, len(counts))
    return (
        f"participation: {never} of {len(counts)} never heard; {min(counts, default=0)} to {max(counts, default=0)} "
        f"updates, {mean:.1f} on average"
    )
