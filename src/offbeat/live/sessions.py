"""Sessions of a live server with its clients, around a `Run` that decides.

One thread decides; clients come and go on streams of frames. What a client is told of (an order, an answer to its
update) leaves only when the journal has it on the disk. A client that is cut off keeps its place for a lease; then it
has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from mmap import mmap
from typing import Any

from offbeat.assemble import Built
from offbeat.errors import OffbeatError, StorageError
from offbeat.live import transport
from offbeat.live.checks import Checks
from offbeat.live.conduct import Effect, Run
from offbeat.live.door import Door, Options
from offbeat.live.jobs import model_digest, task_facts
from offbeat.live.journal import write_payload
from offbeat.live.outlet import Arriving, Outlet
from offbeat.live.wire import (
    Accepted,
    Began,
    Chunk,
    Done,
    Drop,
    End,
    Fetch,
    Leave,
    Offer,
    Order,
    Over,
    Ping,
    Pong,
    Prime,
    Primed,
    Ready,
    Refused,
    Rejected,
    Replaced,
    Update,
    Void,
    Welcome,
    WireError,
    decode,
    digest,
    encode,
)
from offbeat.records import Arrived, Begun, Finished, Joined, Overwritten, Woke

log = logging.getLogger("offbeat.serve")
FIRST_WORD = 10.0  # seconds that a client has for its first word ...
LAST_WORD = 2.0  # ... and to hear the last one
TICK = 0.1  # seconds between two looks at leases and limits
FOREIGN = "it belongs to another run"
FAREWELL = 5.0  # seconds that clients have to hear of the end


class Session:
    """One connection of a client."""

    def __init__(self, client: int, peer: transport.Peer, outlet: Outlet) -> None:
        self.client, self.peer, self.outlet = client, peer, outlet
        self.ready = False
        self.heard = time.monotonic()
        self.arriving: Arriving | None = None
        self.skipping: Rejected | None = None  # an update that is refused already, while its bytes still come
        self.missing: set[int] = set()  # open jobs that the last heartbeat did not name
        self.closed = asyncio.Event()


class LiveServer:
    """Everything between the sockets and the run."""

    def __init__(self, built: Built, run: Run, options: Options, run_id: str) -> None:
        self.built, self.run, self.options, self.run_id = built, run, options, run_id
        self.clients = built.task.clients
        self.checks = Checks(options.limits)
        self.door = Door(options, self.clients, self.checks)
        table = built.experiment.table()
        self.config = {name: table[name] for name in ("method", "task", "fleet", "seed", "precision", "mode")}
        self.facts = task_facts(built.task, table)
        self.model = model_digest(run.engine.flat)
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, float] = {}  # when a client that was cut off has left
        self.known: dict[int, dict[str, Any]] = run.journal.clients()
        for client, facts in self.known.items():
            conduct = self.checks.of(client)
            conduct.refused.update(facts.get("refused", {}))
            conduct.shut_out = facts.get("shut_out", "")
        self.counts: Counter[str] = Counter()
        self.digests: dict[int, str] = {}
        self.outgoing: asyncio.Queue[tuple[Future[None], list[Effect], list[tuple[Session, Any]]]] = asyncio.Queue()
        self.finished = asyncio.Event()
        self.stopping = False
        self.failure: OffbeatError | None = None
        self.port = 0
        self.priming = built.method.what.prime is not None and not run.begun and run.journal.fact("state") is None

    # ---- life -----------------------------------------------------------------------------------
    async def serve(self, announce: Callable[[LiveServer], Any] | None = None) -> None:
        """Until the run has ended, or somebody stops the server."""
        options = self.options
        self.door.look()
        methods = {transport.SESSION: self.session}
        server, self.port = await transport.listen(options.address, options.keys, methods, options.limits.connections)
        tasks = [asyncio.create_task(part) for part in (self.dispatch(), self.tick())]
        try:
            if announce is not None:
                announce(self)
            log.info("listening", extra={"facts": {"port": self.port, "epoch": self.run.epoch, "run": self.run_id}})
            waits = [*tasks, asyncio.create_task(self.finished.wait())]
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and isinstance(error := task.exception(), Exception):
                    self.failure = error if isinstance(error, OffbeatError) else None
                    if self.failure is None:
                        raise error
            await self.farewell()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.5)

    def stop(self) -> None:
        self.stopping = True
        self.finished.set()

    async def farewell(self) -> None:
        """Tell everyone: that it is over, or that the server stops for now."""
        last: Refused | Over = Over(self.run.ended or "")
        if self.run.ended is None:
            last = Refused(str(self.failure or "the server stops for now; come again"), False)
        else:  # those that were cut off are given a moment to hear of it
            until = time.monotonic() + FAREWELL
            while any(client in self.leases for client in range(self.clients)) and time.monotonic() < until:
                await asyncio.sleep(TICK)
        for session in list(self.sessions.values()):
            session.outlet.abort()
            self.end(session, last)
        until = time.monotonic() + FAREWELL
        while self.sessions and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def tick(self) -> None:
        """Leases, the limit on time, revoked certificates."""
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            self.run.journal.flush()
            if self.run.journal.failure is not None:
                raise self.run.journal.failure
            if self.run.saving is not None and self.run.saving.done():
                self.run.saving.result()
            for session in list(self.sessions.values()):
                if now - session.heard > self.options.lease:
                    self.end(session, Refused("nothing was heard of you", False))
            for client in [client for client, until in self.leases.items() if until < now]:
                del self.leases[client]
                if self.run.begun:
                    log.info("left", extra={"facts": {"client": client}})
                    self.depart(client)
            self.look_at_certificates()
            if self.run.over():
                self.finished.set()

    def look_at_certificates(self) -> None:
        """End sessions whose certificate was revoked or has expired."""
        self.door.look()
        for session in list(self.sessions.values()):
            if (problem := self.door.problem(session.peer)) is not None:
                self.end(session, Refused(problem, True))

    # ---- what leaves ----------------------------------------------------------------------------
    def submit(self, effects: list[Effect], *answers: tuple[Session, Any]) -> None:
        """Let these leave, in order, when the journal has what they come from."""
        if not effects and not answers:
            return
        self.outgoing.put_nowait((self.run.durable(), effects, list(answers)))

    async def dispatch(self) -> None:
        while True:
            barrier, effects, answers = await self.outgoing.get()
            await asyncio.wrap_future(barrier)
            for session, answer in answers:
                session.outlet.say(answer)
            for effect in effects:
                self.act(effect)

    def act(self, effect: Effect) -> None:
        if effect.kind == "order":
            self.order(effect.client)
        elif effect.kind == "offer":
            for each in self.sessions.values():
                self.offer(each)
        elif effect.kind == "show" and effect.client in self.sessions:
            self.offer(self.sessions[effect.client])
        elif effect.kind == "fetch":
            session = self.sessions.get(effect.client)
            if session is not None and session.ready and effect.client in self.run.asked:
                session.outlet.say(Fetch())
        elif effect.kind == "drop":
            self.drop(effect.client)
        elif effect.kind == "wake":
            delay = max(0.0, effect.time - self.run.now())
            asyncio.get_running_loop().call_later(delay, self.wake, effect.tag)
        elif effect.kind == "over":
            self.finished.set()

    def drop(self, client: int) -> None:
        session = self.sessions.get(client)
        if session is not None and session.ready:
            session.outlet.abort()
            session.outlet.say(Drop(self.run.finished.get(client, -1), self.run.guard.numbers[client]))

    def depart(self, client: int) -> None:
        """A client has left the run."""
        if self.run.begun:
            self.submit(self.run.leave(client))

    def order(self, client: int) -> None:
        """Send the order that a client has not begun on yet."""
        session, order = self.sessions.get(client), self.run.pending.get(client)
        if session is not None and session.ready and order is not None:
            packet = self.run.packets[order.version]
            session.outlet.offer(Order(order.version, order.steps, len(packet)), packet, self.mark(order.version))

    def offer(self, session: Session) -> None:
        offer = self.run.offer
        if offer is not None and session.ready and session.client not in self.run.guard.away:
            packet = self.run.packets[offer.version]
            session.outlet.offer(Offer(offer.version, offer.steps, len(packet)), packet, self.mark(offer.version))

    def mark(self, version: int) -> str:
        """The digest of a version's bytes."""
        if version not in self.digests:
            self.digests = {v: mark for v, mark in self.digests.items() if v in self.run.packets}
            self.digests[version] = digest(self.run.packets[version])
        return self.digests[version]

    def wake(self, tag: int) -> None:
        if tag in self.run.alarms:
            self.submit(self.run.tell(Woke(tag)))

    # ---- sessions -------------------------------------------------------------------------------
    async def session(self, _: Any, context: Any) -> None:
        """One stream, from the first word to its end."""
        peer = transport.peer_of(context)
        outlet = Outlet(context.write)
        session: Session | None = None
        try:
            first = await asyncio.wait_for(self.read(context), FIRST_WORD)
            client, refusal = self.door.admit(peer, first, len(self.sessions))
            if refusal is not None:
                log.warning("turned away", extra={"facts": {"peer": peer.name or peer.address, "why": refusal.reason}})
                await context.write(encode(refusal))
                return
            if self.run.ended is not None:
                await context.write(encode(Over(self.run.ended)))
                return
            if (old := self.sessions.get(client)) is not None:  # it has come back before its old connection ended
                self.end(old, Refused("another connection of this client took its place", False))
            session = self.sessions[client] = Session(client, peer, outlet)
            outlet.say(self.welcome(client))
            await self.converse(session, context)
        except (WireError, asyncio.TimeoutError) as error:  # before there was a session
            self.malformed(None, peer, str(error) or "nothing was said")
            with contextlib.suppress(Exception):
                await context.write(encode(Refused(f"malformed: {error}"[:500], False)))
        finally:
            if session is not None:
                self.gone(session)

    async def converse(self, session: Session, context: Any) -> None:
        """Listen and write until one of both ends, or the server wants it."""
        listening, writing, closed = (
            asyncio.create_task(part)
            for part in (self.listen(session, context), session.outlet.run(), session.closed.wait())
        )
        try:
            await asyncio.wait((listening, writing, closed), return_when=asyncio.FIRST_COMPLETED)
            error = failure(listening)
            if isinstance(error, WireError):
                self.malformed(session, session.peer, str(error))
                session.outlet.say(Refused(f"malformed: {error}"[:500], False))
            session.outlet.end()
            await asyncio.wait((writing,), timeout=LAST_WORD)
        finally:
            for task in (listening, writing, closed):
                task.cancel()
            await asyncio.gather(listening, writing, closed, return_exceptions=True)
        if error is not None and not isinstance(error, WireError):
            raise error

    async def listen(self, session: Session, context: Any) -> None:
        while (record := await self.read(context)) is not None:
            session.heard = time.monotonic()
            await self.hear(session, record)

    async def read(self, context: Any) -> Any:
        frame = await context.read()
        if transport.ended(frame):
            return None
        self.counts["bytes_up"] += len(frame)
        return decode(frame)

    def welcome(self, client: int) -> Welcome:
        run = self.run
        return Welcome(
            self.run_id, run.epoch, client, self.clients, self.config, self.facts, self.model,
            run.finished.get(client, -1), run.guard.numbers[client], sorted(run.open.get(client, {})),
            self.options.heartbeat, self.options.lease,
        )  # fmt: skip

    def end(self, session: Session, last: Refused | Over) -> None:
        session.outlet.say(last)
        session.closed.set()

    def gone(self, session: Session) -> None:
        """A connection has ended. Its client keeps its place for a while."""
        self.counts["bytes_down"] += session.outlet.bytes
        if self.sessions.get(session.client) is session:
            del self.sessions[session.client]
            if session.ready:
                self.leases.setdefault(session.client, time.monotonic() + self.options.lease)

    def malformed(self, session: Session | None, peer: transport.Peer, reason: str) -> None:
        self.counts["malformed"] += 1
        log.warning("malformed", extra={"facts": {"peer": peer.name or peer.address, "why": reason}})
        if session is not None:
            self.offence(session, "malformed")

    def offence(self, session: Session, kind: str) -> None:
        """Count what is held against a client; one that goes too far is shut out."""
        shut = self.checks.refuse(session.client, kind)
        self.keep_facts(session.client)
        if shut:
            reason = self.checks.of(session.client).shut_out
            log.error("shut out", extra={"facts": {"client": session.client, "why": reason}})
            self.end(session, Refused(f"shut out: {reason}", True))
            self.leases.pop(session.client, None)
            session.ready = False
            self.depart(session.client)

    def keep_facts(self, client: int, **facts: Any) -> None:
        conduct = self.checks.of(client)
        books = {"refused": dict(conduct.refused), "shut_out": conduct.shut_out}
        self.known[client] = {**self.known.get(client, {}), **facts, **books}
        self.run.journal.set_client(client, self.known[client])

    # ---- what clients say -----------------------------------------------------------------------
    async def hear(self, session: Session, record: Any) -> None:
        if isinstance(record, Ping):
            session.outlet.say(Pong(record.number))
            self.miss(session, record)
            facts = self.known.get(session.client, {})
            if record.seconds > 0 and record.seconds < facts.get("seconds", 1e9):
                self.keep_facts(session.client, seconds=record.seconds)
        elif isinstance(record, Ready) and not session.ready:
            self.enter(session, record)
        elif not session.ready:
            raise WireError(f"{type(record).__name__} before Ready")
        elif isinstance(record, Began):
            self.begun(session, record)
        elif isinstance(record, Done):
            self.done(session, record.job)
        elif isinstance(record, Replaced):
            self.replaced(session, record.job)
        elif isinstance(record, Update):
            self.begin_update(session, record)
        elif isinstance(record, Primed):
            if not self.priming or record.run != self.run_id:
                raise WireError("a gradient that nobody asked for")
            session.arriving = Arriving(record, self.run.priming.size)
        elif isinstance(record, Chunk):
            if session.arriving is not None:
                session.arriving.add(record)
            elif session.skipping is None:
                raise WireError("bytes of no buffer")
        elif isinstance(record, End):
            await self.end_buffer(session, record)
        elif isinstance(record, Leave):
            session.ready = False
            session.closed.set()
            self.depart(session.client)
        else:
            raise WireError(f"a client does not say {type(record).__name__}")

    def miss(self, session: Session, ping: Ping) -> None:
        """Jobs that a client no longer has in hand, two heartbeats in a row: they are given back."""
        client, run = session.client, self.run
        missing = {job for job in run.open.get(client, {}) if job not in ping.held} if session.ready else set()
        lost, session.missing = missing & session.missing, missing
        if not lost:
            return
        log.warning("jobs lost", extra={"facts": {"client": client, "jobs": sorted(lost)}})
        for job in sorted(lost):
            run.tell(Overwritten(client, job))
        if not run.open.get(client) and client not in run.pending:
            self.counts["given_back"] += 1
            self.submit([*run.leave(client), *run.tell(Joined(client)), Effect("show", client)])

    def enter(self, session: Session, ready: Ready) -> None:
        """A client can run the experiment: it is there, with what it has in hand."""
        client, run = session.client, self.run
        if ready.model != self.model:
            self.end(session, Refused("the model there differs from the server's in names, shapes or types", True))
            return
        facts = self.known.get(client, {})
        if ready.samples < 1 or facts.get("samples", ready.samples) != ready.samples:
            told = f"{ready.samples} samples there, {facts.get('samples', 'at least 1')} before"
            self.end(session, Refused(f"the shard has changed: {told}; begin a new run for other data", True))
            return
        lost = ready.memory < run.finished.get(client, -1) and bool(self.built.method.what.local.remembers)
        if lost:
            self.counts["memory_lost"] += 1
            log.warning("memory lost", extra={"facts": {"client": client, "it begins again from": "zeros"}})
        self.keep_facts(client, samples=ready.samples, shard=ready.shard, name=session.peer.name or "",
                        memory_lost=facts.get("memory_lost", 0) + lost)  # fmt: skip
        session.ready = True
        self.leases.pop(client, None)
        if run.server.sizes[client] != ready.samples and not run.begun:
            run.server.sizes[client] = ready.samples  # type: ignore[index]
        log.info("joined", extra={"facts": {"client": client, "samples": ready.samples, "held": ready.held}})
        self.come(session, ready)

    def come(self, session: Session, ready: Ready) -> None:
        """A client that is ready takes its place, before the run or in it."""
        client, run = session.client, self.run
        if not run.begun:
            self.gather(session)
            return
        effects = run.tell(Joined(client)) if client in run.guard.away else []
        effects += self.reconcile(session, ready)
        if not any(effect.kind == "order" and effect.client == client for effect in effects):
            effects.append(Effect("order", client))
        self.submit([*effects, Effect("show", client), Effect("fetch", client)])

    def reconcile(self, session: Session, ready: Ready) -> list[Effect]:
        """What a client has in hand, against what it was given: the rest is given back."""
        client, run = session.client, self.run
        held = set()
        for job, version, steps, done in jobs_in_hand(ready):
            if not self.accepts(Begun(client, job, version, steps)):
                number = run.guard.numbers[client]
                session.outlet.say(Void(job, version, run.finished.get(client, -1), number))
                continue
            held.add(job)
            if done:
                self.done(session, job)
        lost = [job for job in run.open.get(client, {}) if job not in held]
        for job in lost:
            run.tell(Overwritten(client, job))
        if not lost or held or client in run.pending:
            return []
        self.counts["given_back"] += 1
        return [*run.leave(client), *run.tell(Joined(client))]

    def accepts(self, begun: Begun) -> bool:
        """Whether a job that a client says it has begun is one that it was given; told again, it is the same one."""
        run = self.run
        if run.open.get(begun.client, {}).get(begun.job) == begun:
            return True
        before = len(run.gathered)
        run.tell(begun)
        if len(run.gathered) == before or run.gathered[-1][1] != begun:
            return False
        run.sample(begun)
        return True

    def gather(self, session: Session) -> None:
        """Before the run: wait until enough are there."""
        there = [client for client, each in self.sessions.items() if each.ready]
        if self.priming:
            packet = self.run.packet()
            if session.client not in self.run.primed:
                session.outlet.send(Prime(len(packet)), packet)
            return
        if len(there) >= (self.options.start_with or self.clients):
            self.begin(there)

    def begin(self, there: Sequence[int]) -> None:
        for client, facts in self.known.items():
            self.run.server.sizes[client] = facts["samples"]  # type: ignore[index]
        self.run.journal.set_fact("sizes", list(self.run.server.sizes))
        log.info("the run begins", extra={"facts": {"clients": len(there)}})
        self.submit(self.run.begin(there))

    def begun(self, session: Session, record: Began) -> None:
        client, run = session.client, self.run
        if not self.accepts(Begun(client, record.job, record.version, record.steps)):
            number = run.guard.numbers[client]
            session.outlet.say(Void(record.job, record.version, run.finished.get(client, -1), number))
            self.submit([Effect("order", client)])  # what it should have begun on, once more
            return
        waited = "INSERT INTO waits VALUES (?, ?, ?)"
        self.run.journal.put(waited, session.client, record.job, max(0.0, record.waited))

    def replaced(self, session: Session, job: int) -> None:
        if job in self.run.open.get(session.client, {}):
            self.submit(self.run.tell(Overwritten(session.client, job)))

    def done(self, session: Session, job: int) -> None:
        if job in self.run.open.get(session.client, {}) and job > self.run.finished.get(session.client, -1):
            self.run.tell(Finished(session.client, job))

    # ---- updates --------------------------------------------------------------------------------
    def begin_update(self, session: Session, record: Update) -> None:
        """An update announces itself: what can be seen to be wrong with it is refused before its bytes come."""
        session.arriving = session.skipping = None
        if (refusal := self.update_problem(session, record)) is not None:
            session.skipping = refusal
        else:
            session.arriving = Arriving(record, self.run.sent.size, self.run.journal.spool(session.client))

    def update_problem(self, session: Session, record: Update) -> Rejected | None:
        run, client, job = self.run, session.client, record.job
        event = Arrived(client, job, record.version, record.steps)
        if record.run != self.run_id or record.epoch > run.epoch:
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
        if run.server.version - record.version > self.options.limits.window:
            return self.rejected(session, job, "stale", f"it is more than {self.options.limits.window} versions behind")
        if not self.checks.within_rate(client):
            return self.rejected(session, job, "rate", "too many updates in too short a time", again=True)
        free = shutil.disk_usage(run.journal.folder).free
        if free < self.options.limits.reserve_mib * 2**20 + record.size:
            return self.unwritten(job, f"{free:,} bytes are free")
        return None

    def unwritten(self, job: int, reason: str) -> Rejected:
        """No room for an update: it is not taken, and its client keeps it."""
        self.counts["disk_full"] += 1
        log.error("the disk is full", extra={"facts": {"why": reason}})
        return Rejected(job, "the server's disk is full; it takes no updates until there is room", True)

    def rejected(self, session: Session, job: int, kind: str, reason: str, again: bool = False) -> Rejected:
        self.counts["refused"] += 1
        log.warning("refused", extra={"facts": {"client": session.client, "job": job, "kind": kind, "why": reason}})
        self.offence(session, kind)
        return Rejected(job, reason, again)

    async def end_buffer(self, session: Session, end: End) -> None:
        arriving, session.arriving = session.arriving, None
        if arriving is None:
            if session.skipping is None:
                raise WireError("the end of no buffer")
            refusal, session.skipping = session.skipping, None
            self.answer_refused(session, refusal)
            return
        problem = arriving.incoming.problem(end)
        if isinstance(arriving.opening, Primed):
            if problem is not None:
                raise WireError(f"a gradient: {problem}")
            self.take_gradient(session, arriving.buffer)
            return
        record: Update = arriving.opening
        if problem is not None:
            self.answer_refused(session, self.rejected(session, record.job, "digest", problem, again=True))
            return
        await self.take_update(session, record, arriving.buffer)

    def answer_refused(self, session: Session, refusal: Rejected) -> None:
        """A repeated update was taken before, and its client is told so; one that is refused gives its job back."""
        client, run = session.client, self.run
        if refusal.reason == "repeated":
            self.submit([], (session, Accepted(refusal.job)))
            return
        session.outlet.say(refusal)
        if not refusal.again and refusal.reason != FOREIGN and refusal.job in run.open.get(client, {}):
            run.tell(Overwritten(client, refusal.job))
            if session.ready:
                self.submit([*run.leave(client), *run.tell(Joined(client)), Effect("show", client)])

    async def take_update(self, session: Session, record: Update, buffer: bytearray | mmap) -> None:
        """Look at the numbers, put them on the disk, then let the run have them."""
        run, client, job = self.run, session.client, record.job
        update = run.sent.unpack(buffer, run.engine.device)
        if (wrong := self.checks.problem(update, run.server.state["model"])) is not None:
            self.answer_refused(session, self.rejected(session, job, *wrong))
            return
        payload, spool = run.journal.payload(client, job), run.journal.spool(client)
        try:
            await asyncio.to_thread(write_payload, payload, buffer, spool)
        except StorageError as error:
            self.answer_refused(session, self.unwritten(job, str(error)))
            return
        event = Arrived(client, job, record.version, record.steps)
        if (reason := "late" if run.over() else run.guard.problem(event)) is not None:
            run.guard.refuse(reason)
            self.counts[reason] += 1
            if (client, job) not in run.arrivals:
                run.journal.payload(client, job).unlink(missing_ok=True)
            self.answer_refused(session, Rejected(job, reason, False))
            return
        if job > run.finished.get(client, -1):
            run.tell(Finished(client, job))
        if (client, job) in run.sampled:
            write_payload(run.journal.sample(client, job, "update"), buffer)
        self.counts["accepted"] += 1
        self.submit(run.arrive(event, update), (session, Accepted(job)))

    def take_gradient(self, session: Session, buffer: bytearray | mmap) -> None:
        gradient = self.run.priming.unpack(buffer, self.run.engine.device)
        if (wrong := self.checks.problem(gradient, self.run.server.state["model"])) is not None:
            self.rejected(session, -1, *wrong)
            self.end(session, Refused(f"its gradient: {wrong[1]}", True))
            return
        for client, facts in self.known.items():
            self.run.server.sizes[client] = facts["samples"]  # type: ignore[index]
        if self.run.prime(session.client, gradient["gradient"]):
            self.priming = False
            self.begin([client for client, each in self.sessions.items() if each.ready])

    def expected(self) -> set[int]:
        """Clients that were there when a server before this one ended."""
        return set(range(self.clients)) - self.run.guard.away

    # ---- what others look at --------------------------------------------------------------------
    def health(self) -> dict[str, Any]:
        run = self.run
        stuck = self.counts["disk_full"] > 0 and shutil.disk_usage(run.journal.folder).free < (
            self.options.limits.reserve_mib * 2**20
        )
        state = "ended" if run.ended else "full" if stuck else "running" if run.begun else "waiting"
        return {
            "state": state, "ok": run.journal.failure is None and not stuck, "run": self.run_id, "epoch": run.epoch,
            "version": run.server.version, "commits": run.commits, "seconds": run.now() if run.begun else 0.0,
            "clients": {"connected": sum(s.ready for s in self.sessions.values()), "of": self.clients,
                        "cut_off": len(self.leases)},
            "updates": {"accepted": self.counts["accepted"], "waiting": len(run.arrivals)},
            "refused": {**dict(run.guard.refused), **dict(self.checks.totals())},
            "turned_away": dict(self.door.turned_away), "malformed": self.counts["malformed"],
            "bytes": {"up": self.counts["bytes_up"],
                      "down": self.counts["bytes_down"] + sum(s.outlet.bytes for s in self.sessions.values())},
            "metrics": run.loop.metrics[-1] if run.loop.metrics else None,
        }  # fmt: skip


def jobs_in_hand(ready: Ready) -> list[tuple[int, int, int, bool]]:
    """Job, version and steps of what a client has in hand, and whether it is finished."""
    for item in ready.held:
        if not (isinstance(item, list) and len(item) == 4 and all(isinstance(n, int) for n in item)):
            raise WireError("held of a Ready is not what it should be")
    return [(job, version, steps, bool(done)) for job, version, steps, done in ready.held]


def failure(task: asyncio.Task[Any]) -> BaseException | None:
    """The error that a task ended with, if any."""
    return task.exception() if task.done() and not task.cancelled() else None
