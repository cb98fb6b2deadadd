"""A far solver answers late, out of order, twice, or never: the run is the same, or stops with a sentence."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from offbeat import Experiment
from offbeat.engines.engine import Engine
from offbeat.engines.updates import Answer
from offbeat.errors import OffbeatError
from offbeat.experiments.assemble import build
from offbeat.records import Begun
from offbeat.runs.loop import go
from offbeat.runs.outcome import Outcome

METHODS: list[dict[str, Any]] = [
    {"name": "fedbuff", "buffer_size": 3, "local_steps": 3},
    {"name": "dlsgd-hetero", "n": 4, "local_steps": 3},
    {"name": "local-sgd", "n": 8, "local_steps": 3},
    {"name": "scaffold", "n": 6, "local_steps": 3},
    {"name": "fednova", "n": 6, "local_steps": 3},
    {"name": "fedagrac", "n": 6, "local_steps": 3},
    {"name": "fedasync", "local_steps": 3},
    {"name": "async-hl-sgd", "buffer_size": 2, "gossip_every": 2, "local_steps": 4},
]


class Far:
    """Stands between an engine and its solver: keeps every answer back, cut into single jobs, and hands them out by a
    script of its own."""

    def __init__(self, solver: Any, script: str, seed: int) -> None:
        self.solver, self.script, self.rng = solver, script, random.Random(seed)
        self.kept: list[Answer] = []
        self.handed: list[Answer] = []
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)

    def submit(self, versions: Mapping[int, Any], jobs: Sequence[Begun], plans: Sequence[Any] = ()) -> None:
        self.solver.submit(versions, jobs, plans)
        answer = self.solver.collect()
        assert answer is not None
        blocks, first = self.solver.blocks, 0
        for row, job in enumerate(answer.jobs):
            devices = blocks.size(job) if blocks else 1
            updates = {name: rows[row : row + 1] for name, rows in answer.updates.items()}
            self.kept.append(Answer([job], updates, answer.bad[first : first + devices]))
            first += devices
        self.most = max(self.most, len(self.kept))

    def collect(self) -> Answer | None:
        if self.script == "unknown" and self.rng.random() < 0.3:
            stranger = self.kept[0].jobs[0]._replace(job=10_000)
            return self.kept[0]._replace(jobs=[stranger])
        if self.script == "other version" and self.rng.random() < 0.3:
            return self.kept[0]._replace(jobs=[self.kept[0].jobs[0]._replace(version=77)])
        if self.script == "twice" and self.handed and self.rng.random() < 0.4:
            return self.rng.choice(self.handed)
        if self.script == "never" and len(self.handed) > 20:
            return None
        if not self.kept:
            return None
        place = {"late": len(self.kept) - 1, "in order": 0}.get(self.script, self.rng.randrange(len(self.kept)))
        self.handed.append(self.kept.pop(place))
        return self.handed[-1]


def started(method: dict[str, Any]) -> tuple[Any, Engine]:
    fleet: dict[str, Any] = {"name": "straggling"}
    if method["name"].endswith("hl-sgd"):
        fleet["clusters"] = {"sizes": [4, 3, 3, 2]}
    built = build(
        Experiment(
            method=method, fleet=fleet, task={"name": "digits", "clients": 12}, device="cpu", until={"commits": 12}
        )
    )
    return built, built.engine()


def finished(built: Any, engine: Engine) -> Outcome:
    return go(built.experiment, built, engine, built.horizon(built.clock()), built.account(), None, None)


@pytest.mark.parametrize("method", METHODS, ids=[method["name"] for method in METHODS])
def test_answers_may_come_late_out_of_order_and_twice(method: dict[str, Any]) -> None:
    built, engine = started(method)
    want = finished(built, engine)
    for seed, script in enumerate(["in order", "late", "out of order", "twice", "unknown", "other version"]):
        built, engine = started(method)
        engine.solver = far = Far(engine.solver, script, seed)
        got = finished(built, engine)
        assert all(torch.equal(got.model[name], want.model[name]) for name in want.model), script
        same = ("commits", "client_steps", "bytes_up", "jobs_computed", "waves", "loss_final")
        assert [got.result[name] for name in same] == [want.result[name] for name in same], script
        assert (got.result["answers_refused"] > 0) == (script in ("twice", "unknown", "other version")), script
        assert far.most > 1 or method["name"] == "fedasync"


def test_a_run_that_goes_on_still_counts_the_answers_it_refused() -> None:
    built, engine = started({"name": "fedbuff", "buffer_size": 3, "local_steps": 3})
    engine.solver = Far(engine.solver, "twice", 0)
    finished(built, engine)
    assert engine.refused > 0
    _, again = started({"name": "fedbuff", "buffer_size": 3, "local_steps": 3})
    again.restore(*engine.state())
    assert again.report()["answers_refused"] == engine.refused


def test_a_commit_waits_for_its_own_jobs_alone() -> None:
    built, engine = started({"name": "fedbuff", "buffer_size": 3, "local_steps": 3})
    engine.solver = Far(engine.solver, "in order", 0)
    horizon = built.horizon(built.clock())
    next(engine.commits(horizon))
    assert engine.awaited  # others of the first wave are still under way


def test_an_answer_that_never_comes_stops_the_run_with_a_sentence() -> None:
    built, engine = started({"name": "fedbuff", "buffer_size": 3, "local_steps": 3})
    engine.solver = Far(engine.solver, "never", 0)
    with pytest.raises(OffbeatError, match=r"jobs were never answered, such as job \d+ of client \d+.*resume"):
        finished(built, engine)
