"""A run directory as others see it, while the run goes on or after: config, figures, staleness, who was heard.

What a finished run wrote down is read; what one that goes on has not yet written down follows from its trace. Nothing
is locked, so another process may write meanwhile: a file that goes in between is asked for again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from offbeat.config import toml
from offbeat.errors import ConfigError, OffbeatError
from offbeat.records import Begun, Commit, Row
from offbeat.runs.columns import StoredRows
from offbeat.runs.lock import LOCK
from offbeat.runs.manifest import read_manifest
from offbeat.runs.stored import Stored, read_metrics, sources

T = TypeVar("T")


@dataclass(frozen=True)
class Chronicle:
    """One run. `staleness` counts updates by how many versions they were behind, `heard` the updates of each client (of
    a run with clusters that goes on: of each cluster)."""

    path: Path
    label: str
    config: Mapping[str, Any]
    text: str  # of config.toml
    state: str  # finished, running or left
    ended: str
    metrics: Sequence[Mapping[str, Any]]
    staleness: Mapping[int, int]
    heard: Sequence[int]
    result: Mapping[str, Any] | None  # of a finished run
    environment: str

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def clients(self) -> int:
        return len(self.heard)

    @property
    def targets(self) -> list[float]:
        until = self.config.get("until", {})
        own = [until[name] for name in ("accuracy", "accuracy_smoothed") if name in until]
        return sorted({float(target) for target in [*self.config.get("targets", ()), *own]})


def read_run(path: Path, label: str = "", rows: Iterable[Row] | None = None) -> Chronicle:
    """The run in a directory. `rows` is its trace, where it is at hand."""
    return again(lambda: read_once(Path(path), label, rows))


def again(read: Callable[[], T], times: int = 4) -> T:
    """What a reader gives, though another process replaces files while it reads."""
    for left in reversed(range(times)):
        try:
            return read()
        except (OffbeatError, FileNotFoundError):
            if not left:
                raise
            time.sleep(0.1)
    raise AssertionError("unreachable")


def read_once(path: Path, label: str, rows: Iterable[Row] | None) -> Chronicle:
    stored = Stored(path)
    manifest = stored.manifest
    if not manifest.config:
        raise OffbeatError(f"the run in {path} has written nothing yet; wait for its first checkpoint")
    config = toml.parse(manifest.config)
    state = "finished" if manifest.finished else "running" if in_use(path) else "left"
    metrics = read_metrics(path)
    places = [", ".join(f"{key} {value}" for key, value in where.items()) for where in manifest.environments]
    result: dict[str, Any] | None = None
    if manifest.finished:
        stored.check("result.json", "clients.parquet")
        result = json.loads((path / "result.json").read_bytes())
        assert result is not None
        staleness = {int(k): int(many) for k, many in result["staleness"]["histogram"].items()}
        heard = pq.read_table(path / "clients.parquet").column("updates").to_pylist()
        ended = result["ended"]
    else:
        staleness, counts = derived(trace_rows(path) if rows is None else rows)
        clients = int(config["task"].get("clients") or 0) - int(config.get("evaluate", {}).get("unseen") or 0)
        heard = [counts[client] for client in range(max(clients, 1 + max(counts, default=0)))]
        ended = "still running" if state == "running" else "not ended; `offbeat resume` goes on"
    name = label or str(config["method"]["name"])
    return Chronicle(
        path, name, config, manifest.config, state, ended, metrics, staleness, heard, result, "; ".join(places)
    )


def trace_rows(path: Path) -> StoredRows:
    """The rows of a run's trace, read as they are asked for: no run is too long."""
    return StoredRows(sources(path, "trace"))


def derived(rows: Iterable[Row]) -> tuple[dict[int, int], Counter[int]]:
    """Staleness and updates of each client, from a trace."""
    versions: dict[tuple[int, int], int] = {}
    stale: Counter[int] = Counter()
    heard: Counter[int] = Counter()
    commits = 0
    for _, record in rows:
        if isinstance(record, Begun):
            versions[record[:2]] = record.version
        elif isinstance(record, Commit):
            stale.update(commits - versions[job] for job in record.jobs)
            heard.update(client for client, _ in record.jobs)
            commits += 1
    return dict(stale), heard


def in_use(path: Path) -> bool:
    """Whether a process holds the directory."""
    try:
        handle = os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def run_folders(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """The run directories that paths name, each with its label: runs, comparisons, or folders of either."""
    runs: dict[Path, str] = {}
    problems = []
    for path in paths:
        if not path.is_dir():
            problems.append(f"there is no directory {path}; give one that `offbeat run` or `compare` left")
            continue
        inside = runs_in(path)
        if not inside:
            problems.append(f"there is no run in {path}; give a directory that `offbeat run` or `compare` left")
        runs |= dict(inside)
    if problems:
        raise ConfigError(problems)
    return list(runs.items())


def runs_in(path: Path, deep: int = 2) -> list[tuple[Path, str]]:
    manifest = read_manifest(path)
    if manifest is not None and manifest.kind == "run":
        return [(path, "")]
    if manifest is not None and manifest.runs:
        return [(path / name, name.rpartition("-seed")[0]) for name in manifest.runs if readable(path / name)]
    if not deep:
        return []
    return [one for inner in sorted(path.iterdir()) if inner.is_dir() and not inner.is_symlink()
            for one in runs_in(inner, deep - 1)]  # fmt: skip


def readable(path: Path) -> bool:
    """A run of a comparison that has begun."""
    return path.is_dir() and (manifest := read_manifest(path)) is not None and bool(manifest.config)


def grouped(runs: Sequence[Chronicle]) -> dict[str, list[Chronicle]]:
    """Runs by label; those that differ in their seed alone stand together, those that differ otherwise apart."""
    groups: dict[str, list[Chronicle]] = {}
    for run in runs:
        groups.setdefault(toml.write({"label": run.label, **apart(run)}), []).append(run)
    labels: dict[str, list[Chronicle]] = {}
    for group in groups.values():
        others = [other for other in groups.values() if other is not group and other[0].label == group[0].label]
        name = group[0].label + (f" ({difference(group[0], [o[0] for o in others])})" if others else "")
        while name in labels:
            name += "'"
        labels[name] = group
    return labels


def apart(run: Chronicle) -> dict[str, Any]:
    """What must agree for two runs to be seeds of one line."""
    free = ("seed", "until", "targets", "checkpoint_seconds", "client_memory", "device", "memory_gib")
    return {key: value for key, value in run.config.items() if key not in free}


def difference(run: Chronicle, others: Sequence[Chronicle]) -> str:
    """The options by which a run differs from others of its label, shortly."""
    own = flat(apart(run))
    different = {k for other in others for k, v in flat(apart(other)).items() if own.get(k) != v}
    different |= {key for key in own for other in others if key not in flat(apart(other))}
    said = [f"{key.rpartition('.')[2]} {own[key]}" for key in sorted(different) if key in own]
    return ", ".join(said[:3]) or run.path.name


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """
    >>> flat({"a": {"b": 1}, "c": 2})
    {'a.b': '1', 'c': '2'}
    """
    entries: dict[str, str] = {}
    for key, value in table.items():
        entries |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
    return entries
