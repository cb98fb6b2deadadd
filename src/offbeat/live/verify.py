"""Replay of a live run: the same commands, event for event; and, where the shards are at hand, the same numbers.

Time was real, so nothing can run the clock again: the trace is told to the policy through the guard, row by row. The
shards are at hand where the experiment's own task gives every client the samples that it had (their digests are in
`live.json`). Then the sampled jobs are computed again from their recorded starts, and the whole run from its trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.errors import OffbeatError
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import refuse_older_streams
from offbeat.keys import generator
from offbeat.live.jobs import Shard, Worker, task_facts
from offbeat.live.publish import JOBS, LIVE
from offbeat.records import COMMANDS, Begun
from offbeat.runs.disk import read_tensors
from offbeat.runs.lock import Lock
from offbeat.runs.loop import go
from offbeat.runs.outcome import Outcome
from offbeat.runs.repeat import TOLERANCES, Distance, distance
from offbeat.runs.stored import Stored, read_metrics, read_model
from offbeat.schedule.trace import Replay

JOB_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 1e-1, "bf16": 1e-1}


@dataclass(frozen=True)
class Verified:
    """What a replay of a live run found. Jobs and model are None where the shards are not at hand."""

    rows: int
    commands: int
    commits: int
    jobs: int | None  # computed again
    apart: float | None  # the largest relative distance of an update from the one that came
    job_tolerance: float
    model: Distance | None
    missing: tuple[str, ...]  # why numbers were not looked at

    @property
    def within(self) -> bool:
        jobs = self.apart is None or self.apart <= self.job_tolerance
        return jobs and (self.model is None or self.model.within)

    def json(self) -> dict[str, Any]:
        model = None if self.model is None else self.model.json()
        return {"same_commands": True, **{k: v for k, v in vars(self).items() if k != "model"}, "model": model,
                "within": self.within}  # fmt: skip

    def __str__(self) -> str:
        said = f"same commands over {self.commits} commits ({self.commands} commands, {self.rows} rows)"
        if self.apart is not None:
            said += (
                f"; {self.jobs} jobs computed again, at most {self.apart:.2g} apart (tolerance {self.job_tolerance:g})"
            )
        if self.model is not None:
            said += f"; the model of the whole trace computed again: {self.model}"
        return said + "".join(f"; {reason}" for reason in self.missing)


def verify(out: str | Path, tolerance: float | None = None, **objects: Any) -> Verified:
    """Hold a finished live run against policy and solver. `objects` are a task, method or fleet of one's own."""
    path = Path(out)
    Stored(path)
    with Lock(path, reader=True):
        stored = Stored(path)
        experiment = Experiment.of(stored.config(limits=False) | objects)
        stored.check_config(experiment.table())
        stored.check()
        if not stored.manifest.finished:
            raise OffbeatError(f"the live run in {path} has not ended; `offbeat serve` goes on with it")
        built = build(experiment)
        facts = json.loads((path / LIVE).read_text())
        rows = stored.rows()
        driver = Replay(rows, built.method.when, built.units, generator(experiment.seed, "policy"), rows.last_begins())
        refuse_older_streams(stored, built.task.sampling)
        commands = many = 0
        for _, record in driver:
            many += 1
            commands += isinstance(record, COMMANDS)
        commits = len(driver.last) - 1
        missing = missing_shards(built, facts)
        job_tolerance = tolerance if tolerance is not None else JOB_TOLERANCE[experiment.precision]
        if missing:
            return Verified(many, commands, commits, None, None, job_tolerance, None, missing)
        jobs, apart = recomputed(built, stored)
        model = whole_run(built, stored, tolerance)
    return Verified(many, commands, commits, jobs, apart, job_tolerance, model, ())


def missing_shards(built: Built, facts: dict[str, Any]) -> tuple[str, ...]:
    """Why the numbers cannot be looked at."""
    x, y = built.task.training
    others, lost = [], 0
    for client, known in facts["clients"].items():
        rows = torch.as_tensor(np.asarray(built.task.shards[int(client)], dtype=np.int64))
        if Shard(x[rows], y[rows]).digest != known.get("shard"):
            others.append(client)
        lost += known.get("memory_lost", 0)
    missing = []
    if others:
        missing.append(f"the shards of {len(others)} clients are not at hand, so no job was computed again")
    if lost:
        missing.append(f"clients lost their memory {lost} times, so no job was computed again")
    return tuple(missing)


def recomputed(built: Built, run: Stored) -> tuple[int, float | None]:
    """The sampled jobs from their recorded starts: how many, and how far the farthest update is from the one sent."""
    stored, facts = read_tensors(run.path / JOBS)
    sampled = {(client, job) for client, job, *_ in facts.get("jobs", ())}
    jobs = [record for _, record in run.rows() if isinstance(record, Begun) and record[:2] in sampled]
    table, farthest = built.experiment.table(), 0.0
    for begun in jobs:
        x, y = built.task.training
        rows = torch.as_tensor(np.asarray(built.task.shards[begun.client], dtype=np.int64))
        shard = Shard(x[rows], y[rows], built.task.model, built.task.loss)
        allowed = frozenset(name.partition(" ")[2] for name in built.sources)
        worker = Worker(
            begun.client,
            built.task.clients,
            table,
            task_facts(built.task, table),
            shard,
            built.experiment.device,
            allowed,
        )
        name = f"{begun.client}/{begun.job}"
        again = worker.up.unpack(
            worker.compute(begun, bytearray(stored[f"start/{name}"].numpy().tobytes())), worker.device
        )
        sent = worker.up.unpack(bytearray(stored[f"update/{name}"].numpy().tobytes()), worker.device)
        for vector in worker.up.vectors:
            size = float(sent[vector].norm())
            moved = float((again[vector] - sent[vector]).norm())
            farthest = max(farthest, moved / size if size else moved)
    return len(jobs), farthest if jobs else None


def whole_run(built: Built, stored: Stored, tolerance: float | None) -> Distance:
    """The run computed again from its trace, by the simulator's engine, up to the commit that it ended with: whatever
    ended it, the two models have to be of one version."""
    rows = stored.rows()
    last = rows.last_begins()
    commits = len(last) - 1
    experiment = replace(built.experiment, until={"commits": commits})
    built = replace(built, experiment=experiment)
    driver = Replay(rows, built.method.when, built.units, generator(experiment.seed, "policy"), last)
    outcome: Outcome = go(experiment, built, built.engine(), built.horizon(driver), built.account(), None, None)
    if outcome.commits != commits:
        raise OffbeatError(f"the trace in {stored.path} has {commits} commits; {outcome.commits} could be made again")
    near = TOLERANCES[experiment.precision] if tolerance is None else tolerance
    reason = ("jobs were computed by clients, one by one",)
    model, metrics = read_model(stored.path), read_metrics(stored.path)
    return distance(outcome.model, model, outcome.metrics, metrics, reason, near, experiment.precision)
