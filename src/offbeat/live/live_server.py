"""The live server: what clients say, and what they are told, around a `Run` that decides.

What a client is told of (an order, an answer to its update) leaves only when the journal has it on the disk.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from offbeat.experiments.assemble import Built
from offbeat.live.conduct import Effect, Run
from offbeat.live.door import Options
from offbeat.live.intake import Intake
from offbeat.live.jobs import model_digest, task_facts
from offbeat.live.sessions import Session, Sessions
from offbeat.live.wire import (
    Began,
    Chunk,
    Done,
    Drop,
    End,
    Fetch,
    Leave,
    Offer,
    Order,
    Ping,
    Pong,
    Prime,
    Primed,
    Ready,
    Refused,
    Replaced,
    Update,
    Void,
    Welcome,
    WireError,
    digest,
    fits,
)
from offbeat.records import Begun, Finished, Joined, Overwritten, Woke

log = logging.getLogger("offbeat.serve")
HELD = 256  # jobs that a client may say it has in hand


class LiveServer(Sessions):
    """Answers clients that report each for itself."""

    def __init__(self, built: Built, run: Run, options: Options, run_id: str) -> None:
        super().__init__(built.task.clients, run, options, run_id)
        self.built = built
        table = built.experiment.table()
        self.config = {name: table[name] for name in ("method", "task", "fleet", "seed", "precision", "mode")}
        self.facts = task_facts(built.task, table)
        self.model = model_digest(run.engine.flat)
        self.intake = Intake(self)
        self.digests: dict[int, str] = {}
        self.outgoing: asyncio.Queue[tuple[Future[None], list[Effect], list[tuple[Session, Any]]]] = asyncio.Queue()
        self.priming = built.method.what.prime is not None and not run.begun and run.journal.fact("state") is None

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
            session.outlet.say(Drop(*self.run.place(client)))

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

    # ---- what clients say -----------------------------------------------------------------------
    def welcome(self, client: int) -> Welcome:
        run = self.run
        return Welcome(
            self.run_id, run.epoch, client, self.clients, self.config, self.facts, self.model,
            *run.place(client), sorted(run.open.get(client, {})),
            self.options.heartbeat, self.options.lease,
        )  # fmt: skip

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
            self.intake.open(session, record)
        elif isinstance(record, Primed):
            self.intake.open_gradient(session, record)
        elif isinstance(record, Chunk):
            self.intake.add(session, record)
        elif isinstance(record, End):
            await self.intake.end(session, record)
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

    # ---- who comes ------------------------------------------------------------------------------
    def enter(self, session: Session, ready: Ready) -> None:
        """A client can run the experiment: it is there, with what it has in hand."""
        client, run = session.client, self.run
        jobs_in_hand(ready)  # whoever says nonsense has not joined
        if ready.model != self.model:
            self.end(session, Refused("the model there differs from the server's in names, shapes or types", True))
            return
        facts = self.known.get(client, {})
        if (changed := shard_problem(ready, facts)) is not None:
            self.end(session, Refused(f"{changed}; begin a new run for other data", True))
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
            run.server.set_size(client, ready.samples)
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
        for job, version, steps, before, done in jobs_in_hand(ready):
            if not self.accepts(Begun(client, job, version, steps, before)):
                session.outlet.say(Void(job, version, *run.place(client)))
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
        previous = run.open.get(begun.client, {}).get(begun.job - 1)
        if previous is not None and begun.steps_before == previous.steps_before + previous.steps:
            self.finish(begun.client, previous.job)  # while the client was cut off
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
            self.run.server.set_size(client, facts["samples"])
        self.run.journal.set_fact("sizes", list(self.run.server.sizes))
        log.info("the run begins", extra={"facts": {"clients": len(there)}})
        self.submit(self.run.begin(there))

    # ---- jobs -----------------------------------------------------------------------------------
    def begun(self, session: Session, record: Began) -> None:
        client, run = session.client, self.run
        if not self.accepts(Begun(client, record.job, record.version, record.steps, record.steps_before)):
            session.outlet.say(Void(record.job, record.version, *run.place(client)))
            self.submit([Effect("order", client), Effect("show", client)])  # what it may begin on, once more
            return
        waited = "INSERT OR REPLACE INTO waits VALUES (?, ?, ?)"
        self.run.journal.put(waited, session.client, record.job, max(0.0, record.waited))

    def replaced(self, session: Session, job: int) -> None:
        if job in self.run.open.get(session.client, {}):
            self.submit(self.run.tell(Overwritten(session.client, job)))

    def done(self, session: Session, job: int) -> None:
        self.finish(session.client, job)

    def finish(self, client: int, job: int) -> None:
        """A client has computed a job to its end; told again, it changes nothing."""
        if job in self.run.open.get(client, {}) and job > self.run.finished.get(client, -1):
            self.run.tell(Finished(client, job))

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
            "metrics": run.log.metrics[-1] if run.log.metrics else None,
        }  # fmt: skip


def jobs_in_hand(ready: Ready) -> list[tuple[int, int, int, int, bool]]:
    """Job, version, steps and earlier steps of what a client has in hand, and whether it is finished."""
    if len(ready.held) > HELD:
        raise WireError(f"{len(ready.held)} jobs in hand; {HELD} is the most")
    for item in ready.held:
        if not (isinstance(item, list) and len(item) == 5 and all(fits(int, n) for n in item[:4])):
            raise WireError("held of a Ready is not what it should be")
    return [(job, version, steps, before, bool(done)) for job, version, steps, before, done in ready.held]


def shard_problem(ready: Ready, before: dict[str, Any]) -> str | None:
    """Why a client's data are not those that it came with at first, or None."""
    if ready.samples < 1:
        return "the shard is empty"
    if before.get("samples", ready.samples) != ready.samples:
        return f"the shard has changed: {ready.samples} samples there, {before['samples']} before"
    if before.get("shard", ready.shard) != ready.shard:
        return f"the shard has changed: {ready.samples} samples as before, and their digest is another one"
    return None
