"""The run of a live server without a network: told what happened, restarted from its journal, ended by its limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from live_world import digits
from offbeat import Experiment, build
from offbeat.errors import BadNumbers, OffbeatError
from offbeat.live.checks import Limits
from offbeat.live.conduct import Run
from offbeat.live.door import Options
from offbeat.live.journal import Journal, write_payload
from offbeat.live.live_server import LiveServer
from offbeat.live.outlet import Outlet
from offbeat.live.serve import gone_on_with
from offbeat.live.sessions import Session
from offbeat.live.transport import Peer
from offbeat.live.wire import Accepted, End, Update, chunks, digest
from offbeat.records import Arrived, Begun, Commit, Finished
from offbeat.runs.manifest import Manifest

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
        self.begun = Begun(0, self.run.guard.numbers[0], self.run.server.version, 2, self.run.guard.steps[0])
        self.run.tell(self.begun)

    def land(self, value: float = 0.01) -> None:
        vectors = {name: torch.full((self.run.up.dimension,), value) for name in self.run.up.vectors}
        buffer = self.run.up.pack(vectors, lambda place: place)
        self.run.tell(Finished(*self.begun[:2]))
        write_payload(self.journal.payload(*self.begun[:2]), buffer)
        self.run.arrive(Arrived(*self.begun[:4]), self.run.up.unpack(buffer, torch.device("cpu")))

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


def test_a_model_of_no_use_ends_the_run_and_is_kept(tmp_path: Path) -> None:
    table = {"until": {"commits": 50}, "evaluate": {"every_commits": 1}}
    alone = Alone(tmp_path, **table)
    alone.begin()
    alone.start()
    alone.land(float("inf"))
    assert isinstance(alone.run.failure, BadNumbers)
    assert alone.run.over()
    alone.killed()
    again = Alone(tmp_path, **table).run
    assert again.ended == alone.run.ended
    assert isinstance(again.failure, BadNumbers)


def test_a_full_disk_is_cleared_of_what_went_into_commits(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.begin()
    for _ in range(3):
        alone.update()
    alone.run.durable().result()
    assert len(list((tmp_path / "payloads").iterdir())) == 3
    alone.run.make_room()
    alone.run.states.close()
    assert not list((tmp_path / "payloads").iterdir())
    alone.journal.close()
    again = Alone(tmp_path).run
    assert torch.equal(again.server.state["model"], alone.run.server.state["model"])


def test_a_sampled_job_that_begins_again_has_its_new_start(tmp_path: Path) -> None:
    run = Alone(tmp_path).run
    run.packets = {0: bytearray(b"old"), 1: bytearray(b"new")}
    start = run.journal.sample(0, 0, "start")
    for version, kept in ((0, b"old"), (1, b"new")):
        run.sample(Begun(0, 0, version, 2))
        assert start.read_bytes() == kept
    run.sample(Begun(0, 0, 7, 2))  # a version that is not at hand any more
    assert not run.sampled
    assert not start.exists()


def test_two_updates_for_one_job_at_once_are_one(tmp_path: Path) -> None:
    """A client was cut off, came back and sent its update again, while the first was on its way to the disk."""
    alone = Alone(tmp_path)
    alone.begin()
    alone.start()
    run = alone.run

    async def main() -> list[Any]:
        server = LiveServer(alone.built, run, Options(), "run")
        answers: list[Any] = []
        works = []
        for value in (0.01, 0.02):
            session = Session(0, "", Peer(None, 0, None, ""), Outlet(lambda frame: asyncio.sleep(0)))
            buffer = bytes(run.up.pack({n: torch.full((run.up.dimension,), value) for n in run.up.vectors}, int))
            opening = Update("run", run.epoch, *alone.begun[1:4], len(buffer))
            server.intake.open(session, opening)
            for piece in chunks(memoryview(buffer)):
                server.intake.add(session, piece)
            works.append(server.intake.end(session, End(digest(buffer))))
        await asyncio.gather(*works)
        while not server.outgoing.empty():
            answers += [answer for _, answer in server.outgoing.get_nowait()[2]]
        return answers

    assert asyncio.run(main()) == [Accepted(0), Accepted(0)]
    assert run.commits == 1
    assert [file.name for file in (tmp_path / "payloads").iterdir()] == ["0-0.bin"]
    alone.killed()
    again = Alone(tmp_path).run
    assert torch.equal(again.server.state["model"], run.server.state["model"])


def test_a_run_whose_clients_are_all_shut_out_says_so(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.begin()
    server = LiveServer(alone.built, alone.run, Options(), "run")
    session = Session(0, "", Peer(None, 0, None, ""), Outlet(lambda frame: asyncio.sleep(0)))
    for _ in range(9):
        server.offence(session, "norm")
    with pytest.raises(OffbeatError, match=r"all 1 clients are shut out; .* 10 times norm; a lower client rate"):
        server.offence(session, "norm")
    alone.killed()
    for offences, shut in ((10, True), (20, False)):
        options = Options(limits=Limits(offences=offences))
        again = LiveServer(alone.built, Alone(tmp_path).run, options, "run")
        assert bool(again.checks.of(0).shut_out) == shut


def test_a_job_that_was_finished_unheard_is_finished_when_the_next_begins(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.begin()
    alone.start()
    server = LiveServer(alone.built, alone.run, Options(), "run")
    assert alone.run.place(0) == (-1, 1, 0)
    assert not server.accepts(Begun(0, 1, 0, 2, 1))  # no place at which a job of this client can begin
    assert alone.run.place(0) == (-1, 1, 0)
    server.accepts(Begun(0, 1, 0, 2, 2))
    assert alone.run.place(0) == (0, 1, 2)
    alone.killed()
    assert Alone(tmp_path).run.place(0) == (0, 1, 2)


def test_a_live_run_of_an_older_version_is_not_continued(tmp_path: Path) -> None:
    Manifest(format=3).write(tmp_path)
    with pytest.raises(OffbeatError, match="was begun by an older Offbeat"):
        gone_on_with(tmp_path, Experiment(method="fedbuff"))
