"""Connections of clients with a live server: opened, listened to, ended.

One thread decides. A client that is cut off keeps its place for a lease; then it has left. What is said is for
`LiveServer` to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.live import transport
from offbeat.live.arriving import Arriving
from offbeat.live.checks import Checks
from offbeat.live.conduct import Run
from offbeat.live.door import Door, Options
from offbeat.live.outlet import Outlet
from offbeat.live.wire import Hello, Over, Refused, Rejected, Welcome, WireError, decode, encode

log = logging.getLogger("offbeat.serve")
FIRST_WORD = 10.0  # seconds that a client has for its first word ...
LAST_WORD = 2.0  # ... and to hear the last one
TICK = 0.1  # seconds between two looks at leases and limits
TWICE = "another process of this client is connected: each client has a certificate of its own; come again when it ends"
FAREWELL = 5.0  # seconds that clients have to hear of the end
UNREAD = 10_000  # records that may wait for a client that does not read


class Session:
    """One connection of a client."""

    def __init__(self, client: int, process: str, peer: transport.Peer, outlet: Outlet) -> None:
        self.client, self.process, self.peer, self.outlet = client, process, peer, outlet
        self.ready = False
        self.heard = time.monotonic()
        self.arriving: Arriving | None = None
        self.skipping: Rejected | None = None  # an update that is refused already, while its bytes still come
        self.missing: set[int] = set()  # open jobs that the last heartbeat did not name
        self.closed = asyncio.Event()

    def discard(self) -> None:
        """Forget a buffer that has not come whole."""
        if self.arriving is not None:
            self.arriving.discard()
        self.arriving = self.skipping = None


class Sessions(ABC):
    """Everything between the sockets and what clients say."""

    def __init__(self, clients: int, run: Run, options: Options, run_id: str) -> None:
        self.clients, self.run, self.options, self.run_id = clients, run, options, run_id
        self.checks = Checks(options.limits)
        self.door = Door(options, clients, self.checks)
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, float] = {}  # when a client that was cut off has left
        self.known: dict[int, dict[str, Any]] = run.journal.clients()
        for client, facts in self.known.items():
            conduct = self.checks.of(client)
            conduct.refused.update(facts.get("refused", {}))
            if conduct.offences >= options.limits.offences:  # a higher limit lets them in again
                conduct.shut_out = facts.get("shut_out", "")
        self.counts: Counter[str] = Counter()
        self.finished = asyncio.Event()
        self.failure: Exception | None = None
        self.works: set[asyncio.Task[None]] = set()
        self.port = 0

    # ---- what an answering server does ----------------------------------------------------------
    @abstractmethod
    def welcome(self, client: int) -> Welcome:
        """The first word to a client that is let in."""

    @abstractmethod
    async def hear(self, session: Session, record: Any) -> None:
        """What a client says."""

    @abstractmethod
    async def dispatch(self) -> None:
        """Lets out what is to leave, for ever."""

    @abstractmethod
    def depart(self, client: int) -> None:
        """A client has left the run."""

    # ---- life -----------------------------------------------------------------------------------
    async def serve(self, announce: Callable[[Any], Any] | None = None) -> None:
        """Until the run has ended, or somebody stops the server."""
        options = self.options
        self.door.look()
        self.require_clients()
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
                if isinstance(error := failure(task), Exception):
                    self.fail(error)
            await self.farewell()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0.5)

    def stop(self) -> None:
        self.finished.set()

    def fail(self, error: Exception) -> None:
        """Something that no client is to blame for: nothing more is decided here, and a new server goes on."""
        self.failure = self.failure or error
        self.finished.set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do what goes on without a connection."""
        task = asyncio.create_task(work)
        self.works.add(task)
        task.add_done_callback(self.done_with)
        return task

    def done_with(self, task: asyncio.Task[None]) -> None:
        self.works.discard(task)
        if isinstance(error := failure(task), Exception):
            self.fail(error)

    async def farewell(self) -> None:
        """Tell everyone: that it is over, or that the server stops for now."""
        last: Refused | Over = Over(self.run.ended or "")
        if self.run.ended is None:
            why = self.failure if isinstance(self.failure, OffbeatError) else "the server stops for now"
            last = Refused(f"{why}; come again", False)
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
            self.run.states.check()
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
            if (old := self.sessions.get(client)) is not None:
                if self.twice(old, first):
                    log.warning("two of one client", extra={"facts": {"client": client, "peer": peer.address}})
                    await context.write(encode(Refused(TWICE, False)))
                    return
                self.end(old, Refused("another connection of this client took its place", False))
            session = self.sessions[client] = Session(client, first.process, peer, outlet)
            outlet.say(self.welcome(client))
            await self.converse(session, context)
        except (WireError, asyncio.TimeoutError) as error:  # before there was a session
            self.malformed(None, peer, str(error) or "nothing was said")
            with contextlib.suppress(Exception):
                await context.write(encode(Refused(f"malformed: {error}"[:500], False)))
        finally:
            if session is not None:
                session.discard()
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

    def twice(self, old: Session, hello: Hello) -> bool:
        """Whether another process has this client's place, and is there: one that was cut off has not been heard of."""
        there = time.monotonic() - old.heard < 2 * self.options.heartbeat
        if there and old.process != hello.process:
            self.door.turned_away["twice"] += 1
            return True
        return False

    async def listen(self, session: Session, context: Any) -> None:
        while (record := await self.read(context)) is not None:
            session.heard = time.monotonic()
            if len(session.outlet.records) > UNREAD:
                raise WireError("it does not read what it is told")
            try:
                await self.hear(session, record)
            except WireError:
                raise
            except Exception as error:
                self.fail(error)
                raise

    async def read(self, context: Any) -> Any:
        frame = await context.read()
        if transport.ended(frame):
            return None
        self.counts["bytes_up"] += len(frame)
        return decode(frame)

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
            self.require_clients()

    def require_clients(self) -> None:
        """A run whose clients are all shut out comes to no end by itself."""
        reasons = [self.checks.of(client).shut_out for client in range(self.clients)]
        if all(reasons):
            raise OffbeatError(
                f"all {self.clients} clients are shut out; of the last, {reasons[-1]}; a lower client rate usually "
                "helps. To go on as it is, start the server again with a higher --limit offences=N"
            )

    def keep_facts(self, client: int, **facts: Any) -> None:
        conduct = self.checks.of(client)
        books = {"refused": dict(conduct.refused), "shut_out": conduct.shut_out}
        self.known[client] = {**self.known.get(client, {}), **facts, **books}
        self.run.journal.set_client(client, self.known[client])


def failure(task: asyncio.Task[Any]) -> BaseException | None:
    """The error that a task ended with, if any."""
    return task.exception() if task.done() and not task.cancelled() else None
