"""Sessions with devices of clusters: a cluster is ordered, begins, finishes and reports as one.

The policy speaks of clusters; a session is a device's. Devices gossip with each other (`gossip.py`), the server hears
those that report, and the update of a cluster is their mean. A device that leaves, or that misses a neighbour, gives
the job of its whole cluster back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, NamedTuple

import numpy as np
import torch

from offbeat.errors import ConfigError, StorageError
from offbeat.experiments.assemble import Built
from offbeat.live import transport
from offbeat.live.arriving import Arriving
from offbeat.live.conduct import Effect, Run
from offbeat.live.door import Options
from offbeat.live.intake import FOREIGN, Intake
from offbeat.live.journal import write_payload
from offbeat.live.live_server import LiveServer, jobs_in_hand
from offbeat.live.sessions import Session
from offbeat.live.wire import (
    Accepted,
    Began,
    Drop,
    Gossip,
    Order,
    Ping,
    Ready,
    Refused,
    Rejected,
    Update,
    Void,
    Welcome,
)
from offbeat.method import Update as Vectors
from offbeat.numerics.mixing import exact_products
from offbeat.records import Arrived, Begun, Finished, Joined

log = logging.getLogger("offbeat.serve")


class Block:
    """The job that a cluster has in hand."""

    def __init__(self, job: Begun, packet: bytearray, mark: str, reporters: list[int]) -> None:
        self.job, self.packet, self.mark, self.reporters = job, packet, mark, reporters
        self.begun: set[int] = set()  # places
        self.done: set[int] = set()
        self.reports: dict[int, Vectors] = {}
        self.told = False  # the run knows that it has begun

    def whole(self, devices: int) -> bool:
        return len(self.done) == devices and len(self.reports) == len(self.reporters)


class Place(NamedTuple):
    """Where a device stands."""

    cluster: int
    place: int


class ClusterServer(LiveServer):
    def __init__(self, built: Built, run: Run, options: Options, run_id: str) -> None:
        super().__init__(built, run, options, run_id)
        assert built.hybrid is not None
        assert built.fleet.clusters is not None
        self.policy, self.each = built.hybrid, built.fleet.clusters.each
        self.home = {device: Place(number, place) for number, cluster in enumerate(self.each)
                     for place, device in enumerate(cluster.members)}  # fmt: skip
        self.blocks: dict[int, Block] = {}
        self.addresses: dict[int, str] = {}
        self.intake = ClusterIntake(self)
        self.called = {number: name for name, number in self.door.names.items()}

    def there(self, cluster: int) -> bool:
        """Whether all devices of a cluster are connected and ready."""
        sessions = [self.sessions.get(device) for device in self.each[cluster].members]
        return all(session is not None and session.ready for session in sessions)

    def expected(self) -> set[int]:
        away = self.run.guard.away
        return {device for device, home in self.home.items() if home.cluster not in away}

    def welcome(self, client: int) -> Welcome:
        cluster, run = self.home[client].cluster, self.run
        told = super().welcome(client)
        block = self.blocks.get(cluster)
        finished, number, steps_before = run.place(cluster)
        held = [] if block is None else [block.job.job]
        return told._replace(finished=finished, number=number, steps_before=steps_before, held=held)

    # ---- coming and going -----------------------------------------------------------------------
    def come(self, session: Session, ready: Ready) -> None:
        device, run = session.client, self.run
        cluster, place = self.home[device]
        if (refusal := self.address_problem(ready.address)) is not None:
            session.ready = False
            self.end(session, Refused(refusal, True))
            return
        moved = self.addresses.get(device) not in (None, ready.address)
        self.addresses[device] = ready.address
        if not run.begun:
            self.gather(session)
            return
        block = self.blocks.get(cluster)
        held = set()
        for job, version, steps, before, _ in jobs_in_hand(ready):
            held.add(job)
            if block is None or block.job[1:] != (job, version, steps, before):
                session.outlet.say(Void(job, version, *run.place(cluster)))
        if cluster in run.guard.away:
            if self.there(cluster):
                self.submit(run.tell(Joined(cluster)))
        elif block is None:
            if cluster in run.pending:
                self.submit([Effect("order", cluster)])
            elif run.open.get(cluster):  # begun under a server before this one, whose books on devices are gone
                self.give_back(cluster)
        elif block.job.job in held:
            self.note_begun(cluster, place)
        elif moved or place in block.begun:
            self.give_back(cluster)
        else:
            self.send_order(session, cluster, block)

    def address_problem(self, address: str) -> str | None:
        """Why neighbours could not dial a device."""
        if not address:
            return "devices of a cluster exchange models: give --listen host:port, for neighbours"
        try:
            transport.require_address(address, self.options.keys)
        except ConfigError as error:
            return str(error)
        return None

    def gather(self, session: Session) -> None:
        there = [cluster for cluster in range(len(self.each)) if self.there(cluster)]
        if len(there) == len(self.each) or (
            self.options.start_with is not None and self.ready() >= self.options.start_with
        ):
            self.begin(there)

    def ready(self) -> int:
        return sum(session.ready for session in self.sessions.values())

    def begin(self, there: Any) -> None:
        if there:
            super().begin(there)

    def depart(self, client: int) -> None:
        cluster = self.home[client].cluster
        if self.run.begun:
            self.blocks.pop(cluster, None)
            self.submit(self.run.leave(cluster))
            self.drop(cluster)

    def give_back(self, cluster: int) -> None:
        """The job of a cluster is lost; it gets another one if its devices are all there."""
        log.warning("given back", extra={"facts": {"cluster": cluster}})
        self.counts["given_back"] += 1
        self.blocks.pop(cluster, None)
        self.drop(cluster)
        effects = self.run.leave(cluster)
        if self.there(cluster):
            effects += self.run.tell(Joined(cluster))
        self.submit(effects)

    def drop(self, client: int) -> None:
        """Tell all devices of a cluster to give up."""
        self.blocks.pop(client, None)
        for device in self.each[client].members:
            session = self.sessions.get(device)
            if session is not None and session.ready:
                session.outlet.abort()
                session.outlet.say(Drop(*self.run.place(client)))

    # ---- orders ---------------------------------------------------------------------------------
    def order(self, client: int) -> None:
        order = self.run.pending.get(client)
        if order is None or not self.there(client):  # the last device to come has it sent
            return
        _, number, before = self.run.place(client)
        job, cluster = Begun(client, number, order.version, order.steps, before), self.each[client]
        block = self.blocks.get(client)
        if block is None or block.job != job:
            reporters = self.policy.reporters(self.run.server.seed, client, number, cluster.size)
            block = Block(job, self.run.packets[order.version], self.mark(order.version), reporters)
            self.blocks[client] = block
        for place, device in enumerate(cluster.members):
            session = self.sessions.get(device)
            if session is not None and session.ready and place not in block.begun:
                self.send_order(session, client, block)

    def send_order(self, session: Session, cluster: int, block: Block) -> None:
        place, policy, one = self.home[session.client].place, self.policy, self.each[cluster]
        turns, linked = [], set()
        for matrix in one.mixing if policy.rounds else ():
            w = np.asarray(matrix)
            near = [j for j in range(one.size) if j != place and (w[place, j] or w[j, place])]
            linked.update(near)
            turns.append([[j, float(w[place, j]), bool(w[j, place])] for j in (place, *near)])
        neighbours = [[j, self.called[one.members[j]], self.addresses[one.members[j]]] for j in sorted(linked)]
        gossip = Gossip(
            cluster, block.job.job, block.job.steps_before, place, policy.every, policy.rounds,
            place in block.reporters, neighbours, turns,
        )  # fmt: skip
        session.outlet.say(gossip)
        opening = Order(block.job.version, block.job.steps, len(block.packet))
        session.outlet.offer(opening, block.packet, block.mark)

    # ---- what devices say -----------------------------------------------------------------------
    def begun(self, session: Session, record: Began) -> None:
        cluster, place = self.home[session.client]
        block, run = self.blocks.get(cluster), self.run
        if block is None or block.job[1:] != (record.job, record.version, record.steps, record.steps_before):
            session.outlet.say(Void(record.job, record.version, *run.place(cluster)))
            return
        self.note_begun(cluster, place)

    def note_begun(self, cluster: int, place: int) -> None:
        block = self.blocks[cluster]
        block.begun.add(place)
        if len(block.begun) == self.each[cluster].size and not block.told:
            block.told = True
            self.run.tell(block.job)

    def done(self, session: Session, job: int) -> None:
        cluster, place = self.home[session.client]
        block = self.blocks.get(cluster)
        if block is None or block.job.job != job or not block.told:
            return
        block.done.add(place)
        if len(block.done) == self.each[cluster].size and job > self.run.finished.get(cluster, -1):
            self.run.tell(Finished(cluster, job))
            self.complete(cluster)

    def replaced(self, session: Session, job: int) -> None:
        cluster = self.home[session.client].cluster
        block = self.blocks.get(cluster)
        if block is not None and block.job.job == job:
            self.give_back(cluster)

    def miss(self, session: Session, ping: Ping) -> None:
        cluster, place = self.home[session.client]
        block = self.blocks.get(cluster)
        late = block is not None and place in block.begun and place not in block.done
        missing = {block.job.job} - set(ping.held) if block is not None and late else set()
        lost, session.missing = missing & session.missing, missing
        if lost:
            self.give_back(cluster)

    # ---- reports --------------------------------------------------------------------------------
    def complete(self, cluster: int) -> None:
        """All have finished, and all reports are in: the cluster's update is their mean."""
        block, run = self.blocks[cluster], self.run
        if not block.whole(self.each[cluster].size):
            return
        rows = [block.reports[place] for place in block.reporters]
        with exact_products():
            share = torch.full((len(rows),), 1 / len(rows), dtype=run.up.dtype, device=run.engine.device)
            mean = {name: share @ torch.stack([row[name] for row in rows]) for name in run.up.vectors}
        mean |= {name: torch.stack([row[name] for row in rows]).mean() for name in run.up.numbers}
        del self.blocks[cluster]
        self.start(self.land(cluster, block, mean))

    async def land(self, cluster: int, block: Block, mean: Vectors) -> None:
        run, event = self.run, Arrived(*block.job[:4])
        buffer = run.up.pack(mean, lambda _: 0)
        part = run.journal.part()
        try:
            await asyncio.to_thread(write_payload, part, buffer)
        except StorageError as error:
            self.intake.unwritten(event.job, str(error))
            self.give_back(cluster)
            return
        if (reason := "late" if run.over() else run.guard.problem(event)) is not None:
            run.guard.refuse(reason)
            part.unlink()
            return
        os.replace(part, run.journal.payload(*event[:2]))
        self.counts["accepted"] += len(block.reporters)
        sessions = [self.sessions.get(self.each[cluster].members[place]) for place in block.reporters]
        answers = [(session, Accepted(event.job)) for session in sessions if session is not None]
        self.submit(run.arrive(event, mean), *answers)


class ClusterIntake(Intake):
    """Takes the reports of devices; the update of a cluster is on the disk when its last report is in."""

    def __init__(self, server: ClusterServer) -> None:
        super().__init__(server)
        self.home, self.cluster_server = server.home, server

    def problem(self, session: Session, record: Update) -> Rejected | None:
        cluster, place = self.home[session.client]
        block, run = self.cluster_server.blocks.get(cluster), self.run
        if record.run != self.server.run_id or record.epoch > run.epoch:
            return self.rejected(session, record.job, "foreign", FOREIGN)
        known = block is not None and block.job[1:4] == (record.job, record.version, record.steps)
        if not known or block is None or place not in block.reporters or place in block.reports:
            reason = run.guard.problem(Arrived(cluster, record.job, record.version, record.steps)) or "unknown"
            run.guard.refuse(reason)
            self.counts[reason] += 1
            return Rejected(record.job, reason, False)
        return self.content_problem(session, record)

    def answer(self, session: Session, refusal: Rejected) -> None:
        if refusal.reason == "repeated":
            self.server.submit([], (session, Accepted(refusal.job)))
            return
        session.outlet.say(refusal)
        cluster = self.home[session.client].cluster
        block = self.cluster_server.blocks.get(cluster)
        late = refusal.again or refusal.reason in (FOREIGN, "late", "unknown")
        if not late and block is not None and block.job.job == refusal.job:
            self.cluster_server.give_back(cluster)

    async def take(self, session: Session, arriving: Arriving) -> None:
        cluster, place = self.home[session.client]
        record, run = arriving.opening, self.run
        update = run.sent.unpack(arriving.buffer, run.engine.device)
        if (wrong := self.server.checks.problem(update, run.server.model)) is not None:
            self.answer(session, self.rejected(session, record.job, *wrong))
            return
        block = self.cluster_server.blocks.get(cluster)
        if block is not None and block.job.job == record.job and block.told:
            block.reports[place] = update
            self.cluster_server.complete(cluster)
