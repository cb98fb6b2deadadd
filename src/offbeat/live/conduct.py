"""The run as the live server sees it, without a network: told what happened, it says what to send to whom.

The same guard, conductor and commits as in a simulation, on real times. Every event and command is a row of the
journal; restarting is passing these rows again. What leaves (`Effect`) is handed out when the rows are on the disk.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat import keys
from offbeat.engines.engine import Done
from offbeat.errors import BadNumbers, StorageError
from offbeat.experiments.assemble import Built
from offbeat.live.journal import PAYLOAD, Journal, write_payload
from offbeat.live.live_engine import LiveEngine
from offbeat.live.packets import broadcast_layout, mean_layout, prime_layout, update_layout
from offbeat.live.state_files import StateFiles
from offbeat.method import Update
from offbeat.records import (
    Arrived,
    Begun,
    Command,
    Commit,
    Drop,
    Fetch,
    Finished,
    JobName,
    Left,
    Offer,
    Overwritten,
    Record,
    Row,
    Start,
    WakeAt,
    Woke,
)
from offbeat.runs.callbacks import Callbacks
from offbeat.runs.disk import reason
from offbeat.runs.logbook import Logbook
from offbeat.runs.progress import Progress
from offbeat.schedule.guard import Guard, feed
from offbeat.schedule.horizon import Step
from offbeat.schedule.ticks import PER_SECOND, ticks

SAMPLED = 16  # jobs whose start and update are kept for replay ...
EVERY = 25  # ... one of so many


class Effect(NamedTuple):
    """Something to send: an order, fetch or drop to a client; an offer to all, or the newest one shown to a client; an
    alarm to set; or the end."""

    kind: str
    client: int = -1
    version: int = -1
    steps: int = 0
    time: float = 0.0
    tag: int = -1


class Run:
    """One live run: guard, commits, account. One thread speaks to it."""

    def __init__(self, built: Built, journal: Journal, memory: float, progress: Progress | None = None) -> None:
        self.built, self.journal, self.memory = built, journal, memory
        self.engine = LiveEngine(built)
        self.server, rule = self.engine.server, built.method.what
        self.down, self.sent = broadcast_layout(rule, self.engine.flat), update_layout(rule, self.engine.flat)
        # A payload is what was sent, or, of a cluster, the mean of what its devices sent.
        self.up = self.sent if built.hybrid is None else mean_layout(rule, self.engine.flat)
        self.priming = prime_layout(rule, self.engine.flat)
        watching = Callbacks([] if progress is None else [progress])
        self.log = Logbook(built.experiment, built, self.engine, built.account(), None, watching)
        self.guard = Guard(built.method.when, built.units, keys.generator(built.experiment.seed, "policy"))
        self.clients = built.units
        self.limit = built.experiment.until.get("virtual_seconds", math.inf)
        self.epoch: int = journal.fact("epoch", 0) + 1
        self.begun = False
        self.ended: str | None = None
        self.failure: BadNumbers | None = None  # that it ended with
        self.base, self.since = 0.0, time.monotonic()  # the run's time at a moment of this process
        self.latest = 0.0  # the time of the last row
        self.gathered: list[Row] = []  # since the last commit
        self.open: dict[int, dict[int, Begun]] = {}
        self.epochs: dict[JobName, int] = {}
        self.finished: dict[int, int] = {}  # the last finished job of each client
        self.arrivals: dict[JobName, Begun] = {}  # whose payload waits for its commit
        self.held: dict[JobName, Update] = {}  # decoded payloads, as many as there is room for
        self.pending: dict[int, Start] = {}  # orders under way
        self.offer: Offer | None = None
        self.asked: set[int] = set()
        self.alarms: dict[int, float] = {}
        self.packets: dict[int, bytearray] = {}
        self.states = StateFiles(journal, self.engine)
        self.primed: dict[int, Tensor] = {}
        self.starts = 0  # jobs begun, for the sample
        self.sampled: set[JobName] = journal.sampled("start")

    # ---- time -----------------------------------------------------------------------------------
    def now(self) -> float:
        """Seconds since the run began, in whole ticks. The system's clock counts only from one server to the next, and
        never backwards."""
        elapsed = ticks(self.base + time.monotonic() - self.since) / PER_SECOND
        self.latest = max(self.latest, elapsed)
        return self.latest

    # ---- beginning ------------------------------------------------------------------------------
    def begin(self, present: Iterable[int]) -> list[Effect]:
        """The first commands, with those who are there."""
        there = sorted(present)
        self.base, self.since, self.begun, self.latest = 0.0, time.monotonic(), True, 0.0
        self.journal.set_fact("began", time.time())
        self.packets[0] = self.packet()
        self.log.look()
        self.note_metrics()
        for client in sorted(set(range(self.clients)) - set(there)):
            self.row(0.0, Left(client))
        return self.obey(0.0, self.guard.begin(0.0, there))

    def prime(self, client: int, gradient: Tensor) -> bool:
        """A client's gradient over its shard at version 0; whether all are there now."""
        self.primed[client] = gradient
        if len(self.primed) < self.clients:
            return False
        rule, server, many = self.built.method.what, self.server, self.clients
        assert rule.share is not None
        share = rule.share(server.everyone())
        gradients = torch.stack([self.primed[client] for client in range(many)])
        server.keep(torch.arange(many), gradients)
        with self.engine.settings:
            server.prime(share.to(gradients.dtype) @ gradients)
        self.primed.clear()
        self.states.write(self.packets, wait=True)
        return True

    # ---- restarting -----------------------------------------------------------------------------
    def restore(self) -> list[Effect]:
        """Be where the journal ends. The orders that were under way are effects again."""
        journal = self.journal
        self.begun = True
        self.log.recall(journal.metrics())
        self.epochs = journal.epochs()
        done, self.packets = self.states.read() or (0, {})
        self.packets.setdefault(self.server.version, self.packet())
        for _, (now, record) in feed(self.guard, journal.rows()):
            self.latest = now
            self.gathered.append((now, record))
            if isinstance(record, Commit):
                self.commit(now, record, again=self.commits < done)
            else:
                self.absorb(record)
        self.base, self.since = max(self.latest, time.time() - journal.fact("began")), time.monotonic()
        self.states.consume([job for job in journal.payloads() if job not in self.arrivals], self.up.size)
        self.drop_packets()
        effects = [Effect("order", *order) for order in self.pending.values()]
        effects += [Effect("wake", time=at, tag=tag) for tag, at in self.alarms.items()]
        try:
            self.ended = self.ended or self.log.reached()
            self.log.require_finite(self.log.metrics[-1])
        except BadNumbers as error:
            self.stop(error)
        self.note_end()
        return effects

    @property
    def commits(self) -> int:
        return self.log.account.commits

    def place(self, client: int) -> tuple[int, int, int]:
        """Where a client stands: its last finished job, the number of its next one, and the steps before that."""
        return self.finished.get(client, -1), self.guard.numbers[client], self.guard.steps[client]

    # ---- what happens ---------------------------------------------------------------------------
    def tell(self, record: Record) -> list[Effect]:
        """An event of now; after the end it changes nothing."""
        return [] if self.over() else self.hear(record)

    def hear(self, record: Record) -> list[Effect]:
        """An event that the guard lets through; one that it refuses changes nothing but its counts."""
        now = min(self.now(), self.limit)  # the clock went on since `over` looked at it
        before = sum(self.guard.refused.values())
        commands = self.guard.hear(now, record)
        if sum(self.guard.refused.values()) != before:
            return []
        self.row(now, record)
        self.absorb(record)
        return self.obey(now, commands)

    def leave(self, client: int) -> list[Effect]:
        """A client is gone, with whatever it was doing."""
        if client in self.guard.away or self.ended is not None:
            return []
        for job in sorted(self.open.get(client, {})):
            self.tell(Overwritten(client, job))
        return self.tell(Left(client))

    def arrive(self, event: Arrived, update: Update) -> list[Effect]:
        """An update whose payload is on the disk, and that came before the run was `over`."""
        job = (event.client, event.job)
        size = sum(t.nbytes for t in update.values())
        if sum(t.nbytes for held in self.held.values() for t in held.values()) + size <= self.memory:
            self.held[job] = update
        self.journal.put(PAYLOAD, *job, self.up.size)
        return self.hear(event)

    def row(self, now: float, record: Record) -> None:
        self.gathered.append((now, record))
        epoch = self.epochs.setdefault(record[:2], self.epoch) if isinstance(record, Begun) else self.epoch
        self.journal.row((now, record), epoch)

    def absorb(self, record: Record) -> None:
        """Keep the books on one row, of now or of the journal; commits are made elsewhere."""
        if isinstance(record, Begun):
            self.open.setdefault(record.client, {})[record.job] = record
            order = self.pending.get(record.client)
            if order is not None and order.version <= record.version:
                del self.pending[record.client]
        elif isinstance(record, Finished):
            self.finished[record.client] = record.job
        elif isinstance(record, Overwritten):
            self.open.get(record.client, {}).pop(record.job, None)
            self.epochs.pop((record.client, record.job), None)
        elif isinstance(record, Arrived):
            self.arrivals[record.client, record.job] = self.open[record.client].pop(record.job)
            self.asked.discard(record.client)
        elif isinstance(record, Left | Drop):
            self.pending.pop(record.client, None)
            self.asked.discard(record.client)
        elif isinstance(record, Start):
            self.pending[record.client] = record
        elif isinstance(record, Offer):
            self.offer = record
        elif isinstance(record, Fetch):
            self.asked.add(record.client)
        elif isinstance(record, WakeAt):
            self.alarms[record.tag] = record.time
        elif isinstance(record, Woke):
            self.alarms.pop(record.tag, None)

    def obey(self, now: float, commands: Sequence[Command]) -> list[Effect]:
        effects: list[Effect] = []
        for command in commands:
            self.row(now, command)
            if isinstance(command, Commit):
                self.commit(now, command)
                if self.ended is not None:
                    return [*effects, Effect("over")]
                continue
            self.absorb(command)
            if isinstance(command, Start):
                effects.append(Effect("order", *command))
            elif isinstance(command, Offer):
                effects.append(Effect("offer", -1, *command))
            elif isinstance(command, Fetch):
                effects.append(Effect("fetch", command.client))
            elif isinstance(command, Drop):
                for job in sorted(self.open.get(command.client, {})):
                    self.row(now, lost := Overwritten(command.client, job))
                    self.absorb(lost)
                effects.append(Effect("drop", command.client))
            elif isinstance(command, WakeAt):
                effects.append(Effect("wake", time=command.time, tag=command.tag))
        self.drop_packets()
        return effects

    # ---- commits --------------------------------------------------------------------------------
    def commit(self, now: float, command: Commit, again: bool = False) -> None:
        """Make a commit; `again`: the state that was read has it already."""
        distinct = dict.fromkeys(command.jobs)
        begun = {job: self.arrivals.pop(job) for job in distinct}
        if again:
            staleness = [self.commits - begun[job].version for job in command.jobs]
        else:
            rows = [self.update(job) for job in command.jobs]
            updates = {name: torch.stack([row[name] for row in rows]) for name in (*self.up.vectors, *self.up.numbers)}
            try:
                with self.engine.settings, torch.no_grad():
                    staleness = self.server.commit([begun[job] for job in command.jobs], updates)
            except BadNumbers as error:
                self.stop(error)
                return
            self.server.forget(lambda version: False)  # what is under way is in packets
            self.packets[self.server.version] = self.packet()
            self.engine.updates += len(rows)
            self.states.consume(distinct, self.up.size)
        for job in distinct:
            self.held.pop(job, None)
            self.epochs.pop(job, None)
        step, self.gathered = Step(now, command, self.gathered), []
        known = len(self.log.metrics)
        if self.commits + 1 <= (self.log.metrics[-1]["commit"] if known else -1):  # it was looked at before
            self.log.note(step.rows, command.jobs, staleness)
            return
        try:
            self.log.commit(Done(self.commits + 1, step, staleness))
            self.log.tell("committed")
            self.ended = self.log.end()
        except BadNumbers as error:
            self.stop(error)
        if len(self.log.metrics) > known:
            self.note_metrics()
        self.note_end()

    def stop(self, error: BadNumbers) -> None:
        """The run ends here, and says why; it is kept."""
        self.ended, self.failure = f"stopped: {error}", error

    def durable(self) -> Future[None]:
        """Done when all that happened so far is on the disk. Now and then the state follows."""
        barrier = self.journal.durable()
        if self.states.due:
            self.states.write(self.packets)  # behind the rows of its commits
        return barrier

    def make_room(self) -> None:
        """Write the state now: the payloads that went into it go."""
        if self.states.consumed:
            self.states.write(self.packets)

    def note_end(self) -> None:
        until = self.built.experiment.until
        if self.ended is None and self.commits >= until.get("commits", math.inf):
            self.ended = f"commits {self.commits} >= {until['commits']}"

    def over(self) -> bool:
        """Whether the run has ended; no commit comes after the limit on seconds."""
        if self.ended is None and self.begun and self.now() > self.limit:
            self.ended = f"virtual_seconds: the next commit comes after {self.limit} s"
        return self.ended is not None

    def update(self, job: JobName) -> Update:
        if job not in self.held:
            try:
                raw = np.fromfile(file := self.journal.payload(*job), dtype=np.uint8)
            except OSError as error:
                raise StorageError(f"{file} cannot be read, and a commit needs it: {reason(error)}") from None
            self.held[job] = self.up.unpack(raw, self.engine.device)
        return self.held[job]

    def packet(self) -> bytearray:
        """What the newest version is on the wire; encoded once."""
        server = self.server
        key = keys.key(server.seed, "broadcast", server.version)
        return self.down.pack(server.state, lambda place: keys.fold(key, place))

    def drop_packets(self) -> None:
        """Let go of versions that nobody has to start from any more."""
        needed = {self.server.version, *(order.version for order in self.pending.values())}
        if self.offer is not None:
            needed.add(self.offer.version)
        for version in [v for v in self.packets if v not in needed]:
            del self.packets[version]

    def note_metrics(self) -> None:
        number = len(self.log.metrics) - 1
        self.journal.put("INSERT OR REPLACE INTO metrics VALUES (?, ?)", number, json.dumps(self.log.metrics[-1]))

    # ---- a sample of jobs, for replay -----------------------------------------------------------
    def sample(self, begun: Begun) -> None:
        """Keep the start of one job of many. A sampled job that is begun once more, under another server, may start
        from another version."""
        self.starts += 1
        name, packet = begun[:2], self.packets.get(begun.version)
        few = len(self.sampled) < SAMPLED and not self.built.method.what.local.remembers and self.built.hybrid is None
        if name not in self.sampled and not (few and self.starts % EVERY == 1):
            return
        file = self.journal.sample(*name, "start")
        self.sampled.discard(name)
        file.unlink(missing_ok=True)
        if packet is not None:
            with suppress(StorageError):  # a full disk is a matter for updates
                write_payload(file, packet)
                self.sampled.add(name)
