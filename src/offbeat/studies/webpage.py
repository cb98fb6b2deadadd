"""`offbeat report`: one self-contained page about runs. All figures go into it as JSON, and a script of its own draws
them; it fetches nothing. The same runs give the same bytes."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import ConfigError, OffbeatError
from offbeat.experiments.assemble import make_fleet
from offbeat.experiments.experiment import Experiment
from offbeat.fleets.clusters import MBIT
from offbeat.fleets.fleet import Fleet
from offbeat.runs import cluster_layout, palette
from offbeat.runs.bands import band, interval
from offbeat.runs.chronicle import Chronicle, again, grouped, read_run, run_folders, trace_rows
from offbeat.runs.store import strict
from offbeat.runs.target import crossing
from offbeat.runs.timeline import KINDS, MEANS, Timeline, timeline_of
from offbeat.tasks.looks import drawn_clients

LARGEST = 3_000_000  # bytes of a page
DETAIL = 2_200_000  # bytes of it for spans, all timelines together
TICKS = 1 << 22  # of a timeline: times are whole numbers of them
BINS, GROUPS = 300, 100  # of the overview beyond the spans that fit
ROWS = 1_000_000  # of a trace that are read for its timeline
POINTS = 600  # of a line of one seed
SPENT = {
    "commit",
    "virtual_seconds",
    "client_steps",
    "samples",
    "bytes_up",
    "bytes_down",
    "bytes_d2d",
    "staleness_mean",
}
Groups = Mapping[str, Sequence[Chronicle]]


def report(paths: Sequence[str | Path], out: str | Path, title: str = "", targets: Sequence[float] = ()) -> Path:
    """Write a page about the runs in these directories (runs, comparisons, or folders of either)."""
    runs = [read_run(path, label) for path, label in run_folders([Path(path) for path in paths])]
    text = page(grouped(runs), title, targets)
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def page(groups: Groups, title: str = "", targets: Sequence[float] = ()) -> str:
    """The page as text: the parts of `runs/page/`, with the figures of these runs."""
    if not groups:
        raise ConfigError(["nothing to report; give a directory that `offbeat run` or `compare` left"])
    first = next(iter(groups.values()))[0]
    title = title or f"{first.config['task']['name']} on {first.config['fleet']['name']}"
    detail = DETAIL
    while True:
        body = json.dumps(strict(figures(groups, targets, detail)), separators=(",", ":"), ensure_ascii=True)
        parts = {
            "TITLE": html.escape(title),
            "STYLE": part("page.css"),
            "SCRIPT": part("page.js"),
            "DATA": body.replace("<", "\\u003c"),  # no name ends the script
        }
        text = part("skeleton.html")
        for name, inside in parts.items():
            text = text.replace(f"%{name}%", inside)
        if len(text) <= LARGEST or detail < 1000:
            return text
        detail //= 2


def part(name: str) -> str:
    return (files("offbeat.runs") / "page" / name).read_text(encoding="utf-8")


def figures(groups: Groups, targets: Sequence[float], detail: int) -> dict[str, Any]:
    aims = sorted({*targets, *(t for runs in groups.values() for run in runs for t in run.targets)}) or chosen(groups)
    scores = scores_of(groups)
    fleets = {label: fleet_of(runs[0]) for label, runs in groups.items()}
    axes = axes_of(groups)
    states = Counter(run.state for runs in groups.values() for run in runs)
    many = sum(states.values())
    lead = f"{many} run{'s' if many > 1 else ''}: " + ", ".join(f"{count} {state}" for state, count in states.items())
    return {
        "lead": lead + ". Times are virtual: what the fleet's devices and links would take.",
        "palette": {"light": palette.COLOURS, "dark": palette.DARK, "dashes": palette.DASHES},
        "means": MEANS,
        "scores": scores,
        "targets": aims,
        "axes": axes,
        "lines": [line(label, runs, scores, axes, fleets[label]) for label, runs in groups.items()],
        "table": target_table(groups, aims),
        "fairness": fairness_table(groups, fleets),
        "timelines": [
            timeline_columns(label, runs[0], fleets[label], detail // len(groups)) for label, runs in groups.items()
        ],
        "fleets": fleet_parts(fleets),
        "clusters": cluster_parts(fleets),
        "runs": [run_part(label, run) for label, runs in groups.items() for run in runs],
    }


# ---- curves -------------------------------------------------------------------------------------
def scores_of(groups: Groups) -> list[str]:
    """What was looked at in the model: every figure of the evaluations that is not an account of what was spent."""
    rows = [row for runs in groups.values() for run in runs for row in run.metrics]
    names = dict.fromkeys(name for row in rows for name in row if name not in SPENT)
    return [name for name in names if any(isinstance(row.get(name), int | float) for row in rows)]


def axes_of(groups: Groups) -> dict[str, Any]:
    """What the curves can be drawn against, with the unit that suits these runs."""
    axes = {}
    for name in ("virtual_seconds", "commits", "samples", "bytes", "bytes_up", "bytes_down", "bytes_d2d"):
        key = palette.AXES[name][0]
        ends = [value_at_end(run, key) for runs in groups.values() for run in runs]
        if max(ends, default=0.0) > 0:
            unit = palette.unit_of(name, max(ends))
            axes[name] = {"label": palette.axis_label(name, unit), "size": unit.size}
    return axes or {"commits": {"label": "commits", "size": 1}}


def value_at_end(run: Chronicle, key: str) -> float:
    last: Mapping[str, Any] = run.metrics[-1] if run.metrics else {}
    return float(last.get("bytes_up", 0) + last.get("bytes_down", 0) if key == "bytes" else last.get(key) or 0)


def line(
    label: str, runs: Sequence[Chronicle], scores: Sequence[str], axes: Mapping[str, Any], fleet: Fleet | None
) -> dict[str, Any]:
    seeds = [run.metrics for run in runs if run.metrics]
    bands: dict[str, dict[str, Any]] = {}
    for score in scores:
        for axis in axes:
            made = band(seeds, palette.AXES[axis][0], score)._asdict()
            bands.setdefault(score, {})[axis] = {name: thinned(values) for name, values in made.items() if values}
    bands = {s: {a: b for a, b in by.items() if b} for s, by in bands.items()}
    stale: Counter[int] = Counter()
    for run in runs:
        stale.update(dict(run.staleness))
    heard = together(runs)
    return {
        "label": label, "seeds": len(runs), "bands": bands, "staleness": staleness_part(stale),
        "lorenz": lorenz(heard), "pairs": pairs(heard, fleet),
    }  # fmt: skip


def thinned(values: Sequence[float], most: int = POINTS) -> list[float]:
    """At most so many of the values, evenly, with the last; in five digits."""
    places = range(len(values)) if len(values) <= most else np.linspace(0, len(values) - 1, most).round().astype(int)
    return [short(values[place]) for place in places]


def short(value: float) -> float:
    return float(f"{value:.5g}")


def together(runs: Sequence[Chronicle]) -> Any:
    """Updates of each client, the mean over seeds."""
    size = max(run.clients for run in runs)
    return np.mean([np.pad(np.asarray(run.heard, float), (0, size - run.clients)) for run in runs], axis=0)


def staleness_part(stale: Mapping[int, int]) -> dict[str, Any]:
    """The distribution function of staleness; its far end is cut where 99.9 % lie below."""
    total = sum(stale.values())
    places = sorted(stale)
    share = list(np.cumsum([stale[k] for k in places]) / max(1, total))
    mean = sum(k * many for k, many in stale.items()) / max(1, total)
    edge = next((k for k, part in zip(places, share, strict=True) if part >= 0.999), max(places, default=0))
    kept = [i for i, k in enumerate(places) if k <= edge]
    kept = kept if len(kept) <= 400 else sorted({kept[int(i)] for i in np.linspace(0, len(kept) - 1, 400)})
    return {"at": [places[i] for i in kept], "share": [short(float(share[i])) for i in kept], "mean": short(mean),
            "edge": edge}  # fmt: skip


def lorenz(heard: Any) -> list[list[float]]:
    """(share of the clients, share of the updates), the least heard first."""
    ordered = np.sort(heard)
    total = max(float(ordered.sum()), 1e-12)
    share = np.concatenate([[0.0], np.cumsum(ordered) / total])
    along = np.linspace(0, 1, len(share))
    places = np.unique(np.linspace(0, len(share) - 1, min(len(share), 200)).round().astype(int))
    return [[short(float(along[i])) for i in places], [short(float(share[i])) for i in places]]


def gini(heard: Any) -> float:
    """0: all are heard equally often; near 1: hardly more than one is.

    >>> gini([1, 1, 1, 1]), gini([0, 0, 0, 4])
    (0.0, 0.75)
    """
    ordered = np.sort(np.asarray(heard, float))
    many, total = len(ordered), ordered.sum()
    return float(2 * (np.arange(1, many + 1) * ordered).sum() / (many * total) - (many + 1) / many) if total else 0.0


def pairs(heard: Any, fleet: Fleet | None) -> list[list[float]] | None:
    """Seconds per step and updates of (some of) the clients."""
    if fleet is None or len(heard) != fleet.clients:
        return None
    places = np.unique(np.linspace(0, fleet.clients - 1, min(fleet.clients, 800)).round().astype(int))
    return [[short(float(fleet.step_seconds[i])) for i in places], [short(float(heard[i])) for i in places]]


# ---- tables -------------------------------------------------------------------------------------
def chosen(groups: Groups) -> list[float]:
    """Where no config has a target: the largest twentieth that a seed of every line has reached."""
    best = [
        max((row["accuracy"] for run in runs for row in run.metrics if row.get("accuracy") is not None), default=0.0)
        for runs in groups.values()
    ]
    level = math.floor(min(best) * 20) / 20
    return [round(level, 2)] if level > 0 else []


def target_table(groups: Groups, targets: Sequence[float]) -> dict[str, Any]:
    """Time to each target with its 95 % interval over seeds; what was not reached is said."""
    columns = ["", "seeds"]
    columns += [f"time to {target:g}" for target in targets]
    columns += ["final accuracy", "final loss", "virtual time", "commits", "sent", "staleness", "idle"]
    rows = []
    for label, runs in groups.items():
        row = [label, str(len(runs))]
        row += [reached(runs, target) for target in targets]
        ends = [run.metrics[-1] for run in runs if run.metrics]
        row.append(spread([r["accuracy"] for r in ends if r["accuracy"] is not None], "{:.4f}"))
        row.append(spread([r["loss"] for r in ends if r["loss"] is not None], "{:.4g}"))
        row.append(palette.duration(average([r["virtual_seconds"] for r in ends])))
        row.append(f"{average([r['commit'] for r in ends]):,.0f}")
        row.append(palette.size(average([r["bytes_up"] + r["bytes_down"] + r["bytes_d2d"] for r in ends])))
        row.append(f"{average([r['staleness_mean'] for r in ends]):.2f}")
        idle = [run.result["idle_share"] for run in runs if run.result]
        row.append(f"{average(idle):.0%}" if idle else "-")
        rows.append(row)
    note = "Mean over seeds and its 95 % interval; idle is the share of the clients' time in which they do not compute."
    if targets:
        note += " A target counts as reached at the first evaluation that meets it, on the task's test set."
    return {"columns": columns, "rows": rows, "note": note}


def reached(runs: Sequence[Chronicle], target: float) -> str:
    times = [at.virtual_seconds for run in runs if (at := crossing(run.metrics, target)) is not None]
    if not times:
        best = max((row["accuracy"] or 0.0 for run in runs for row in run.metrics), default=0.0)
        return f"not reached (best {best:.3f})"
    if len(times) < len(runs):
        return f"{palette.duration(float(np.mean(times)))} in {len(times)} of {len(runs)} seeds"
    made = interval(times)
    unit = palette.unit_of("virtual_seconds", made.mean)
    half = f" \u00b1 {made.half / unit.size:.2g}" if made.high is not None else ""
    return f"{made.mean / unit.size:.3g}{half} {unit.name}"


def average(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    made = interval(values)
    return form.format(made.mean) + (f" \u00b1 {made.half:.2g}" if made.high is not None else "")


def fairness_table(groups: Groups, fleets: Mapping[str, Fleet | None]) -> dict[str, Any]:
    columns = ["", "never heard", "least", "mean", "most", "Gini", "updates of the slowest fifth"]
    rows = []
    for label, runs in groups.items():
        heard, fleet = together(runs), fleets[label]
        slow = "-"
        if fleet is not None and fleet.clients == len(heard) and fleet.clients >= 5 and heard.sum():
            last = np.argsort(fleet.step_seconds, kind="stable")[-(fleet.clients // 5) :]
            slow = f"{heard[last].sum() / heard.sum():.1%} (an equal part: {len(last) / fleet.clients:.0%})"
        rows.append([
            label, f"{(heard == 0).sum()} of {len(heard)}", f"{heard.min():.3g}", f"{heard.mean():.3g}",
            f"{heard.max():.3g}", f"{gini(heard):.2f}", slow,
        ])  # fmt: skip
    return {"columns": columns, "rows": rows}


# ---- timelines ----------------------------------------------------------------------------------
def timeline_columns(label: str, run: Chronicle, fleet: Fleet | None, room: int) -> dict[str, Any]:
    """Spans as columns of small whole numbers: starts as differences, times in ticks. As many as fit the room, from
    the start on; beyond them the share of time in which clients compute, in bins."""
    stored = again(lambda: trace_rows(run.path))
    line = again(lambda: timeline_of(islice(stored, ROWS)))
    rows = 1 + max((span.client for span in line.spans), default=0)
    clusters = fleet is not None and fleet.clusters is not None and rows <= len(fleet.clusters.each) < fleet.clients
    if fleet is not None and not clusters:
        rows = max(rows, fleet.clients)
    tick = max(line.end, 1e-9) / TICKS
    spans = sorted(line.spans)
    columns: dict[str, list[int]] = {name: [] for name in "ckvsd"}
    last, spent, until = 0, 0, line.end
    for number, span in enumerate(spans):
        since, length = round(span.since / tick), max(1, round((span.end - span.since) / tick))
        values = (span.client, KINDS.index(span.kind), span.version, since - last, length)
        spent += sum(len(str(value)) + 1 for value in values)
        if spent > room:
            until = spans[number].since
            break
        last = since
        for name, value in zip("ckvsd", values, strict=True):
            columns[name].append(value)
    shown = len(columns["c"])
    note = f"{run.path.name or label}: {len(spans):,} spans of {rows:,} {'clusters' if clusters else 'clients'}"
    if len(stored) > ROWS:
        note += f" from the first {ROWS:,} of {len(stored):,} rows of its trace"
    if shown < len(spans):
        note += (
            f"; the first {shown:,}, up to {palette.duration(until)}, are drawn one by one, and from there on shades "
            "show the share of the time in which clients compute"
        )
    commits = line.commits if len(line.commits) <= 20_000 else line.commits[:: -(-len(line.commits) // 20_000)]
    pace = None
    if fleet is not None and not clusters and rows <= 20_000:
        pace = [short(float(s)) for s in fleet.step_seconds]
    return {
        "label": f"{label}, seed {run.seed}", "rows": rows, "end": line.end, "tick": tick, "until": until, **columns,
        "commits": [short_time(t) for t in commits], "note": note + ".", "unit": "cluster" if clusters else "client",
        "overview": overview(line, rows) if shown < len(spans) else None, "pace": pace,
    }  # fmt: skip


def short_time(value: float) -> float:
    return float(f"{value:.8g}")


def overview(line: Timeline, rows: int) -> dict[str, Any]:
    """The share of computing by groups of clients and bins of time, in ninths."""
    groups = min(rows, GROUPS)
    busy = np.zeros((groups, BINS + 1))
    width = max(line.end, 1e-9) / BINS
    for span in line.spans:
        if span.kind not in ("compute", "unused"):
            continue
        group = span.client * groups // rows
        first, final = int(span.since / width), min(BINS - 1, int(span.end / width))
        for place in range(first, final + 1):
            busy[group, place] += max(0.0, min(span.end, (place + 1) * width) - max(span.since, place * width))
    many = np.bincount([row * groups // rows for row in range(rows)], minlength=groups)
    ninths = np.clip((9 * busy[:, :BINS] / (width * many[:, None])).round(), 0, 9).astype(int)
    return {"rows": groups, "bins": BINS, "busy": "".join(map(str, ninths.ravel()))}


# ---- fleet, clusters, config --------------------------------------------------------------------
def fleet_of(run: Chronicle) -> Fleet | None:
    """The run's fleet, built again from its config; None where that cannot be done here."""
    unseen = int(run.config.get("evaluate", {}).get("unseen") or 0)
    clients = int(run.config["task"].get("clients") or run.clients + unseen)
    experiment = Experiment.of({k: v for k, v in run.config.items() if k in ("fleet", "seed")})
    try:
        return make_fleet(experiment, clients - unseen, drawn_clients(unseen, clients, experiment.seed))
    except OffbeatError:
        return None


def fleet_parts(fleets: Mapping[str, Fleet | None]) -> list[dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for fleet in fleets.values():
        if fleet is None:
            continue
        steps = fleet.step_seconds
        fast, middle, slow = (float(np.quantile(steps, q)) for q in (0.05, 0.5, 0.95))
        said = (
            f"{fleet.name}: {fleet.clients:,} clients; a local step takes {palette.duration(fast)} to "
            f"{palette.duration(slow)} (5 to 95 %), {palette.duration(middle)} in the middle"
        )
        said += "" if fleet.presence is None else "; clients come and go"
        said += f"; a job is lost with probability {fleet.drop_out:g}" if fleet.drop_out else ""
        columns = {
            "steps": quantiles(steps), "down": quantiles(fleet.down_bandwidth / MBIT),
            "up": quantiles(fleet.up_bandwidth / MBIT),
        }  # fmt: skip
        parts.setdefault(json.dumps([said, columns]), {"said": said + ".", "notes": list(fleet.notes), **columns})
    return list(parts.values())[:4]


def quantiles(values: Any) -> list[float]:
    known = np.sort(values[np.isfinite(values)])
    return thinned(known.tolist(), 300) if len(known) else []


def cluster_parts(fleets: Mapping[str, Fleet | None], most: int = 8, largest: int = 200) -> list[dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for fleet in fleets.values():
        if fleet is None or fleet.clusters is None:
            continue
        slowest = max(float(fleet.step_seconds.max()), 1e-12)
        for numbers in list(cluster_layout.alike(fleet.clusters.each, fleet).values())[:most]:
            cluster = fleet.clusters.each[numbers[0]]
            if cluster.size > largest:
                continue
            graph = cluster_layout.together(cluster)
            places = cluster_layout.layout(graph)
            weights = np.mean([matrix + matrix.T for matrix in cluster.mixing], axis=0) / 2
            heaviest = max((float(weights[i, j]) for i, j in graph.edges), default=1.0) or 1.0
            title = f"{fleet.name}, {cluster_layout.named(numbers)}: {cluster.size} devices, rho {cluster.rho:.3f}"
            nodes = [
                [short(float(places[i][0])), short(float(places[i][1])), short(fleet.step_seconds[m] / slowest), int(m)]
                for i, m in enumerate(cluster.members)
            ]
            edges = [[int(i), int(j), short(float(weights[i, j]) / heaviest)] for i, j in graph.edges]
            parts.setdefault(json.dumps([title, edges]), {"title": title, "nodes": nodes, "edges": edges})
    return list(parts.values())


def run_part(label: str, run: Chronicle) -> dict[str, Any]:
    return {
        "label": label, "seed": run.seed, "ended": run.ended, "config": run.text, "environment": run.environment,
        "command": f"offbeat run {run.path.name or 'RUN'}/config.toml --out NEW   # anew\n"
        f"offbeat replay {run.path.name or 'RUN'}               # from its trace",
    }  # fmt: skip
