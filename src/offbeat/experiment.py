"""Running experiments: from the start, from a checkpoint, from a trace.

result = run(Experiment(method={"name": "fedbuff"}, until={"accuracy": 0.9}))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat import toml
from offbeat.assemble import build
from offbeat.config import Experiment
from offbeat.keys import generator
from offbeat.records import Commit
from offbeat.runs.loop import Outcome, go
from offbeat.runs.progress import Progress
from offbeat.runs.store import Store, read_checkpoint, read_metrics, read_trace
from offbeat.schedule.trace import Replay


def run(experiment: Experiment, out: str | Path | None = None, progress: Progress | None = None) -> Outcome:
    """Run an experiment from its start; with `out`, into a run directory."""
    built = build(experiment)
    store = None
    if out is not None:
        store = Store(Path(out), experiment.toml()).clear()
    engine = built.engine()
    return go(experiment, built, engine, built.horizon(built.clock()), built.account(engine), store, progress)


def resume(
    out: str | Path,
    until: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    **objects: Any,
) -> Outcome:
    """Go on with a run that stopped, for whatever reason, as if it had not. `until` may set a further limit.

    Time never depends on values, so the schedule is run again from the seed and checked against the stored trace;
    the numerics go on from the checkpoint. Objects of your own (task=..., method=..., fleet=...) are passed again.
    """
    path = Path(out)
    held, facts = read_checkpoint(path)
    experiment = Experiment.of(toml.read(path / "config.toml") | objects)
    if until:
        experiment = replace(experiment, until=dict(until))
    built = build(experiment)
    known = (row for row in read_metrics(path, facts) if row["commit"] <= facts["version"])
    metrics = [row for row in known if row["commit"] != facts["closing"]]
    recorded = read_trace(path, facts)
    engine, horizon = built.engine(), built.horizon(built.clock())
    account = built.account(engine)
    engine.restore(held, facts)
    store = Store(path, experiment.toml(), facts["generation"] + 1)
    return go(experiment, built, engine, horizon, account, store, progress, (metrics, recorded, facts["wall_seconds"]))


def replay(out: str | Path, **objects: Any) -> Outcome:
    """Run again from a stored trace instead of the clock: the policy must say the same, the model must be the same."""
    path = Path(out)
    experiment = Experiment.of(toml.read(path / "config.toml") | objects)
    built = build(experiment)
    rows = read_trace(path)
    driver = Replay(rows, built.method.when, built.units, generator(experiment.seed, "policy"), built.clock())
    engine = built.engine()
    engine.follow(read_checkpoint(path)[1])
    horizon = built.horizon(driver, last=sum(type(record) is Commit for _, record in rows))
    return go(experiment, built, engine, horizon, built.account(engine), None, None)
