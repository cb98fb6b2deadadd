"""The fleet behind a live run: speeds, links and presence of each client, from its trace, with the fit's error.

A job's computing lies between `Begun` and `Finished`; its upload between `Finished` (or the request for the send
buffer) and `Arrived`, which includes the server's disk; its download between the order and `Begun`, less the time that
the model lay in the receive buffer. All of it is on the server's clock, and of each the median counts. Half of the
quickest heartbeat is the latency of a link, the rest of a transfer its bandwidth.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.experiments.assemble import build_method
from offbeat.experiments.experiment import Experiment
from offbeat.live.publish import LIVE
from offbeat.records import Arrived, Begun, Fetch, Finished, Joined, Left, Offer, Overwritten, Row, Start
from offbeat.runs.disk import write_file
from offbeat.runs.stored import Stored

PHASES = ("down", "compute", "up")


@dataclass
class Seen:
    """What a trace shows of one client."""

    down: list[float] = field(default_factory=list)  # seconds of each transfer
    up: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)  # seconds of each local step
    changes: list[tuple[float, bool]] = field(default_factory=lambda: [(0.0, True)])
    lost: int = 0  # jobs, though the client came back at once
    begun: int = 0


def observe(rows: Iterable[Row], waits: dict[tuple[int, int], float]) -> dict[int, Seen]:
    """Pass the rows of a trace once."""
    seen: defaultdict[int, Seen] = defaultdict(Seen)
    ordered: dict[tuple[int, int], float] = {}
    offered: dict[int, float] = {}
    working: dict[tuple[int, int], tuple[float, Begun]] = {}
    ended: dict[tuple[int, int], float] = {}
    asked: dict[int, float] = {}
    gone: dict[int, float] = {}
    for now, record in rows:
        if isinstance(record, Start):
            ordered[record.client, record.version] = now
        elif isinstance(record, Offer):
            offered[record.version] = now
        elif isinstance(record, Fetch):
            asked[record.client] = now
        elif isinstance(record, Begun):
            one = seen[record.client]
            one.begun += 1
            working[record[:2]] = (now, record)
            since = ordered.pop((record.client, record.version), offered.get(record.version))
            if since is not None:
                one.down.append(max(0.0, now - since - waits.get(record[:2], 0.0)))
        elif isinstance(record, Finished) and record[:2] in working:
            since, begun = working.pop(record[:2])
            ended[record[:2]] = now
            seen[record.client].compute.append((now - since) / begun.steps)
        elif isinstance(record, Arrived):
            since = max(ended.pop(record[:2], now), asked.pop(record.client, 0.0))
            seen[record.client].up.append(now - since)
        elif isinstance(record, Overwritten):
            working.pop(record[:2], None)
            ended.pop(record[:2], None)
        elif isinstance(record, Left):
            gone[record.client] = now
        elif isinstance(record, Joined):
            left = gone.pop(record.client, 0.0)
            if left == now:
                seen[record.client].lost += 1
            else:
                away(seen[record.client], left)
                seen[record.client].changes.append((now, True))
    for client, left in gone.items():
        away(seen[client], left)
    return seen


def away(one: Seen, since: float) -> None:
    """A client has left; one that was never there begins so."""
    if one.changes[-1][0] == since:
        one.changes.pop()
    one.changes.append((since, False))


def fit(run: str | Path) -> dict[str, Any]:
    """A fleet's table, as the fleet `recorded` reads it, and under `error` how well it describes the run."""
    path = Path(run)
    stored = Stored(path)
    if LIVE not in stored.manifest.live:
        raise OffbeatError(f"{path} holds no live run; its fleet is the one in its config")
    stored.check()
    experiment = Experiment.of(stored.config(limits=False))
    if build_method(experiment.method).when.speaks_of == "clusters":
        raise OffbeatError(
            f"the trace of {path} speaks of clusters, so it does not show single devices; fit another run"
        )
    facts = json.loads((path / LIVE).read_text())
    told = {
        (int(c), int(j)): s for c, each in facts["waits"].items() for j, s in zip(each[::2], each[1::2], strict=True)
    }
    seen = observe(stored.rows(), told)
    return table(seen, facts["fleet"], facts, stored.manifest.run)


def table(seen: dict[int, Seen], clients: int, facts: dict[str, Any], run: str) -> dict[str, Any]:
    everyone = Seen()
    for name in PHASES:
        setattr(everyone, name, [x for one in seen.values() for x in getattr(one, name)])
    whole: dict[str, list[Any]] = {name: [] for name in ("step_seconds", "down_latency", "up_latency", "down_bandwidth",
                                                         "up_bandwidth", "presence")}  # fmt: skip
    ratios: list[float] = []
    errors: dict[str, list[float]] = {name: [] for name in PHASES}
    for client in range(clients):
        one = seen.get(client, Seen(changes=[(0.0, False)]))
        typical = {name: middle(getattr(one, name) or getattr(everyone, name)) for name in PHASES}
        for name in PHASES:
            errors[name] += [abs(x / typical[name] - 1) for x in getattr(one, name) if typical[name] > 0]
        ratios += [math.log(x / typical["compute"]) for x in one.compute if x > 0 and typical["compute"] > 0]
        latency = facts["clients"].get(str(client), {}).get("seconds", 0.0) / 2
        whole["step_seconds"].append(typical["compute"])
        for way in ("down", "up"):
            delay = min(latency, typical[way])
            rest = typical[way] - delay
            whole[f"{way}_latency"].append(delay)
            whole[f"{way}_bandwidth"].append(facts["sizes"][way] / rest if rest > 0 else None)
        whole["presence"].append(one.changes)
    begun = sum(one.begun for one in seen.values())
    lost = sum(one.lost for one in seen.values())
    return {
        "clients": clients, "run": run, **whole, "jitter": spread(ratios), "drop_out": lost / begun if begun else 0.0,
        "error": {name: middle(values) for name, values in errors.items()},
        "observed": {name: len(getattr(everyone, name)) for name in PHASES},
    }  # fmt: skip


def middle(values: list[float]) -> float:
    return median(values) if values else 0.0


def spread(logs: list[float]) -> float:
    """The sigma of a log-normal factor, by its middle half: a first job that is slow to start does not count."""
    if len(logs) < 8:
        return 0.0
    ordered = sorted(logs)
    return (ordered[3 * len(logs) // 4] - ordered[len(logs) // 4]) / 1.349


def write(run: str | Path, out: Path) -> dict[str, Any]:
    """Fit, and write the fleet's file."""
    fitted = fit(run)
    write_file(out, lambda at: at.write_text(json.dumps(fitted, indent=1, allow_nan=False) + "\n"))
    return fitted
