"""The run of a live server without a network: told what happened, restarted from its journal, ended by its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from live_world import digits
from offbeat import Experiment, build
from offbeat.live.conduct import Run
from offbeat.live.journal import Journal, write_payload
from offbeat.records import Arrived, Begun, Commit, Finished

FEDASYNC = {"name": "fedasync", "local_steps": 2, "client_lr": 0.1}


class Alone:
    """A run with one client, whose updates are all the same."""

    def __init__(self, folder: Path, **table: Any) -> None:
        self.built = build(Experiment.of(digits(FEDASYNC, 1, **table)))
        self.journal = Journal(folder)
        self.run = Run(self.built, self.journal, 1 << 20)
        if self.journal.count:
            self.run.restore()
        self.journal.start()

    def begin(self) -> None:
        self.run.begin([0])

    def update(self) -> None:
        """One job, from its begin to its commit."""
        self.start()
        self.land()

    def start(self) -> None:
        self.begun = Begun(0, self.run.guard.numbers[0], self.run.server.version, 2)
        self.run.tell(self.begun)

    def land(self, value: float = 0.01) -> None:
        vectors = {name: torch.full((self.run.up.dimension,), value) for name in self.run.up.vectors}
        buffer = self.run.up.pack(vectors, lambda place: place)
        self.run.tell(Finished(*self.begun[:2]))
        write_payload(self.journal.payload(*self.begun[:2]), buffer)
        self.run.arrive(Arrived(*self.begun), self.run.up.unpack(buffer, torch.device("cpu")))

    def killed(self) -> None:
        """What is durable stays, and nothing else is written."""
        self.run.durable().result()
        self.run.states.close()
        self.journal.close()

    def times(self) -> list[float]:
        self.run.durable().result()
        return [now for now, record in self.journal.rows() if isinstance(record, Commit)]


def test_no_commit_comes_after_the_limit_on_seconds(tmp_path: Path) -> None:
    alone = Alone(tmp_path, until={"virtual_seconds": 100.0})
    alone.begin()
    alone.update()
    assert not alone.run.over()
    alone.start()
    alone.run.since -= 200.0
    assert alone.run.now() > 200.0
    alone.land()  # the clock had gone on after somebody looked at it
    assert alone.times()[-1] == 100.0
    assert alone.run.over()
    assert alone.run.ended == "virtual_seconds: the next commit comes after 100.0 s"
    alone.start()  # from now on nothing counts
    assert alone.run.commits == 2
    assert alone.run.guard.numbers[0] == 2


def test_a_run_that_ended_and_was_killed_before_it_said_so_has_ended(tmp_path: Path) -> None:
    table = {"until": {"commits": 50, "loss": 100.0}, "evaluate": {"every_commits": 2}}
    alone = Alone(tmp_path, **table)
    alone.begin()
    alone.update()
    assert alone.run.ended is None
    alone.update()
    ended = alone.run.ended
    assert ended is not None
    assert "loss" in ended
    alone.killed()
    again = Alone(tmp_path, **table)
    assert again.run.ended == ended
    assert torch.equal(again.run.server.state["model"], alone.run.server.state["model"])
