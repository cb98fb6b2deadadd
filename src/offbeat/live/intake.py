"""Updates on their way into the run: refused before their bytes come, or on the disk before the run has them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from offbeat.errors import StorageError
from offbeat.live.arriving import Arriving
from offbeat.live.conduct import Effect
from offbeat.live.journal import write_payload
from offbeat.live.sessions import Session
from offbeat.live.wire import Accepted, Chunk, End, Primed, Refused, Rejected, Update, WireError
from offbeat.records import Arrived, Finished, Joined, Overwritten

if TYPE_CHECKING:
    from offbeat.live.live_server import LiveServer

log = logging.getLogger("offbeat.serve")
FOREIGN = "it belongs to another run"


class Intake:
    """Takes the updates of clients that report each for itself."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self.run, self.counts = server, server.run, server.counts
        self.limits = server.options.limits

    # ---- a buffer -------------------------------------------------------------------------------
    def open(self, session: Session, record: Update) -> None:
        """An update announces itself: what can be seen to be wrong with it is refused before its bytes come."""
        session.discard()
        if (refusal := self.problem(session, record)) is not None:
            session.skipping = refusal
            return
        try:
            session.arriving = Arriving(record, self.run.sent.size, self.run.journal.part())
        except StorageError as error:
            session.skipping = self.unwritten(record.job, str(error))

    def open_gradient(self, session: Session, record: Primed) -> None:
        session.discard()
        if not self.server.priming or record.run != self.server.run_id:
            raise WireError("a gradient that nobody asked for")
        session.arriving = Arriving(record, self.run.priming.size)

    def add(self, session: Session, chunk: Chunk) -> None:
        if session.arriving is None:
            if session.skipping is None:
                raise WireError("bytes of no buffer")
            return
        try:
            session.arriving.add(chunk)
        except StorageError as error:
            refusal = self.unwritten(session.arriving.opening.job, str(error))
            session.discard()
            session.skipping = refusal

    async def end(self, session: Session, end: End) -> None:
        arriving, refusal = session.arriving, session.skipping
        session.arriving = session.skipping = None
        if arriving is None:
            if refusal is None:
                raise WireError("the end of no buffer")
            self.answer(session, refusal)
            return
        problem = arriving.problem(end)
        if isinstance(arriving.opening, Primed):
            if problem is not None:
                raise WireError(f"a gradient: {problem}")
            self.take_gradient(session, arriving)
        elif problem is not None:
            arriving.discard()
            self.answer(session, self.rejected(session, arriving.opening.job, "digest", problem, again=True))
        else:
            await asyncio.shield(self.server.start(self.settle(session, arriving)))

    async def settle(self, session: Session, arriving: Arriving) -> None:
        """Take an update that is here, whatever happens to the connection."""
        try:
            await self.take(session, arriving)
        finally:
            arriving.discard()

    # ---- what is wrong --------------------------------------------------------------------------
    def problem(self, session: Session, record: Update) -> Rejected | None:
        run, client, job = self.run, session.client, record.job
        event = Arrived(client, job, record.version, record.steps)
        if record.run != self.server.run_id or record.epoch > run.epoch:
            return self.rejected(session, job, "foreign", FOREIGN)
        reason = run.guard.problem(event)
        if reason is not None:
            run.guard.refuse(reason)
            self.counts[reason] += 1
            return Rejected(job, reason, False)
        if record.epoch != run.epochs.get((client, job)):
            return self.rejected(session, job, "foreign", "its job began under another epoch")
        return self.content_problem(session, record)

    def content_problem(self, session: Session, record: Update) -> Rejected | None:
        """What does not hang on whose job it is."""
        run, client, job = self.run, session.client, record.job
        if record.size != run.sent.size:
            return self.rejected(session, job, "size", f"it has {record.size:,} bytes instead of {run.sent.size:,}")
        if run.server.version - record.version > self.limits.window:
            return self.rejected(session, job, "stale", f"it is more than {self.limits.window} versions behind")
        if not self.server.checks.within_rate(client):
            return self.rejected(session, job, "rate", "too many updates in too short a time", again=True)
        free = shutil.disk_usage(run.journal.folder).free
        if free < self.limits.reserve_mib * 2**20 + record.size:
            return self.unwritten(job, f"{free:,} bytes are free")
        return None

    def unwritten(self, job: int, reason: str) -> Rejected:
        """No room for an update: it is not taken, and its client keeps it. What can go from the disk, goes."""
        self.run.make_room()
        self.counts["disk_full"] += 1
        log.error("the disk is full", extra={"facts": {"why": reason}})
        return Rejected(job, "the server's disk is full; it takes no updates until there is room", True)

    def rejected(self, session: Session, job: int, kind: str, reason: str, again: bool = False) -> Rejected:
        self.counts["refused"] += 1
        log.warning("refused", extra={"facts": {"client": session.client, "job": job, "kind": kind, "why": reason}})
        self.server.offence(session, kind)
        return Rejected(job, reason, again)

    def answer(self, session: Session, refusal: Rejected) -> None:
        """A repeated update was taken before, and its client is told so; one that is refused gives its job back."""
        client, run = session.client, self.run
        if refusal.reason == "repeated":
            self.server.submit([], (session, Accepted(refusal.job)))
            return
        session.outlet.say(refusal)
        if not refusal.again and refusal.reason != FOREIGN and refusal.job in run.open.get(client, {}):
            run.tell(Overwritten(client, refusal.job))
            if session.ready:
                self.server.submit([*run.leave(client), *run.tell(Joined(client)), Effect("show", client)])

    # ---- taking ---------------------------------------------------------------------------------
    async def take(self, session: Session, arriving: Arriving) -> None:
        """Look at the numbers, put them on the disk, then let the run have them."""
        run, record = self.run, arriving.opening
        event = Arrived(session.client, record.job, record.version, record.steps)
        name = event[:2]
        buffer = arriving.buffer
        update = run.sent.unpack(buffer, run.engine.device)
        if (wrong := self.server.checks.problem(update, run.server.model)) is not None:
            self.answer(session, self.rejected(session, record.job, *wrong))
            return
        try:
            part = await asyncio.to_thread(arriving.store)
        except StorageError as error:
            self.answer(session, self.unwritten(record.job, str(error)))
            return
        if (reason := "late" if run.over() else run.guard.problem(event)) is not None:  # while it was written
            run.guard.refuse(reason)
            self.counts[reason] += 1
            self.answer(session, Rejected(record.job, reason, False))
            return
        os.replace(part, run.journal.payload(*name))  # nothing is written there but what the run takes
        if record.job > run.finished.get(session.client, -1):
            run.tell(Finished(*name))
        if name in run.sampled:
            with suppress(StorageError):
                write_payload(run.journal.sample(*name, "update"), bytes(buffer))
        self.counts["accepted"] += 1
        self.server.submit(run.arrive(event, update), (session, Accepted(record.job)))

    def take_gradient(self, session: Session, arriving: Arriving) -> None:
        run, server = self.run, self.server
        gradient = run.priming.unpack(arriving.buffer, run.engine.device)
        if (wrong := server.checks.problem(gradient, run.server.model)) is not None:
            self.rejected(session, -1, *wrong)
            server.end(session, Refused(f"its gradient: {wrong[1]}", True))
            return
        for client, facts in server.known.items():
            run.server.set_size(client, facts["samples"])
        if run.prime(session.client, gradient["gradient"]):
            server.priming = False
            server.begin([client for client, each in server.sessions.items() if each.ready])
