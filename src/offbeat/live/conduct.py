"""The run as the live server sees it, without a network: told what happened, it says what to send to whom.

The same guard, conductor and commits as in a simulation, on real times. Every event and command is a row of the
journal; restarting is passing these rows again. What leaves (`Effect`) is handed out when the rows are on the disk.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat import keys
from offbeat.assemble import Built
from offbeat.engines.engine import Done, pick_device
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings, cores
from offbeat.errors import OffbeatError
from offbeat.live.journal import FACT, FORGET, PAYLOAD, Journal, write_payload
from offbeat.live.packets import broadcast_layout, mean_layout, prime_layout, update_layout
from offbeat.method import State, Update
from offbeat.numerics.batch_norm import tracking
from offbeat.numerics.evaluation import Figure
from offbeat.numerics.windows import Windows
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
from offbeat.runs.disk import read_tensors, sync, write_file
from offbeat.runs.loop import Loop, view_of
from offbeat.runs.progress import Progress
from offbeat.schedule.guard import Guard, feed
from offbeat.schedule.horizon import Step
from offbeat.schedule.ticks import PER_SECOND, ticks
from offbeat.tasks.looks import Looks

SAMPLED = 16  # jobs whose start and update are kept for replay ...
EVERY = 25  # ... one of so many
CONSUMED = 8 << 20  # bytes of payloads that may wait, besides four times the state, before the state is written


class Effect(NamedTuple):
    """Something to send: an order, fetch or drop to a client; an offer to all, or the newest one shown to a client; an
    alarm to set; or the end."""

    kind: str
    client: int = -1
    version: int = -1
    steps: int = 0
    time: float = 0.0
    tag: int = -1


class LiveEngine:
    """What a run's loop asks of whoever makes the commits."""

    def __init__(self, built: Built) -> None:
        experiment = built.experiment
        self.built, self.precision = built, experiment.precision
        self.device = pick_device(experiment.device)
        self.settings = Settings(experiment.precision, self.device, cores())
        dtype = torch.float64 if experiment.precision == "float64" else torch.float32
        self.flat = built.task.flat_model(dtype, experiment.precision == "bf16").to(self.device)
        sizes = [len(shard) for shard in built.task.shards]
        members = None
        if built.hybrid is not None and built.fleet.clusters is not None:
            members = [cluster.members for cluster in built.fleet.clusters.each]
        self.server = Server(built.method, self.flat.initial(), experiment.seed, sizes, members, "host")
        self.looks = Looks(built.task, built.watch, self.flat, built.task.samples(dtype).to(self.device))
        self.updates = 0

    @property
    def version(self) -> int:
        return self.server.version

    def evaluate(self) -> dict[str, Any]:
        with self.settings, torch.no_grad():
            return self.looks(self.server.state["model"])

    @property
    def figures(self) -> dict[str, Figure]:
        return self.looks.figures

    def faults(self) -> dict[str, str]:
        return dict(self.looks.faults.first)

    def client_figures(self) -> dict[str, list[float | None]]:
        return self.looks.of_clients(len(self.server.sizes))

    def finite(self) -> bool:
        return bool(self.server.state["model"].isfinite().all())

    def model(self) -> dict[str, Tensor]:
        named = dict(self.flat.module.named_parameters()) | self.flat.views(self.server.state["model"])
        return {name: value.detach().contiguous().clone().cpu() for name, value in named.items()}

    def report(self) -> dict[str, Any]:
        return {
            "device": "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "precision": self.precision, "jobs_computed": self.updates, "waves": 0, "mode": "live", "rung": "clients",
            "notes": [],
        }  # fmt: skip


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
        self.loop = Loop(built.experiment, self.engine, built.account(), None, watching)  # type: ignore[arg-type]
        self.loop.view = view_of(built.experiment, built, self.loop)
        self.guard = Guard(built.method.when, built.units, keys.generator(built.experiment.seed, "policy"))
        self.clients = built.units
        self.limit = built.experiment.until.get("virtual_seconds", math.inf)
        self.epoch: int = journal.fact("epoch", 0) + 1
        self.begun = False
        self.ended: str | None = None
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
        self.consumed: list[JobName] = []  # payloads that the next written state makes superfluous
        self.consumed_bytes = 0
        self.saving: Future[Any] | None = None
        self.disk = ThreadPoolExecutor(1, "state")
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
        self.loop.look()
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
        share = rule.share(server.cohort(range(many), [0] * many, [1] * many))
        gradients = torch.stack([self.primed[client] for client in range(many)])
        if server.kept is not None:
            server.kept.write(torch.arange(many), dict.fromkeys(rule.keeps, gradients))
        with self.engine.settings:
            server.prime(share.to(gradients.dtype) @ gradients)
        self.primed.clear()
        self.write_state(wait=True)
        return True

    # ---- restarting -----------------------------------------------------------------------------
    def restore(self) -> list[Effect]:
        """Be where the journal ends. The orders that were under way are effects again."""
        journal = self.journal
        self.begun = True
        self.loop.metrics = journal.metrics()
        self.loop.seen = list(self.loop.metrics)
        self.epochs = journal.epochs()
        done = 0
        if (name := journal.fact("state")) is not None:
            done = self.read_state(name)
        self.packets.setdefault(self.server.version, self.packet())
        for _, (now, record) in feed(self.guard, journal.rows()):
            self.latest = now
            self.gathered.append((now, record))
            if isinstance(record, Commit):
                self.commit(now, record, again=self.commits < done)
            else:
                self.absorb(record)
        self.base, self.since = max(self.latest, time.time() - journal.fact("began")), time.monotonic()
        self.consumed = [job for job in journal.payloads() if job not in self.arrivals]
        self.drop_packets()
        effects = [Effect("order", *order) for order in self.pending.values()]
        effects += [Effect("wake", time=at, tag=tag) for tag, at in self.alarms.items()]
        self.note_end()
        return effects

    @property
    def commits(self) -> int:
        return self.loop.account.commits

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
            with self.engine.settings, torch.no_grad():
                staleness = self.server.commit([begun[job] for job in command.jobs], updates)
            self.server.forget(self.server.version, ())
            self.packets[self.server.version] = self.packet()
            self.engine.updates += len(rows)
            self.consumed += distinct
            self.consumed_bytes += len(distinct) * self.up.size
        for job in distinct:
            self.held.pop(job, None)
            self.epochs.pop(job, None)
        step, self.gathered = Step(now, command, self.gathered), []
        known = len(self.loop.metrics)
        if self.commits + 1 <= (self.loop.metrics[-1]["commit"] if known else -1):  # it was looked at before
            self.loop.note(step.rows, command.jobs, staleness)
            self.ended = self.loop.reached()
            return
        reason = self.loop.take(Done(self.commits + 1, step, staleness), None)  # type: ignore[arg-type]
        if len(self.loop.metrics) > known:
            self.note_metrics()
        self.ended = self.ended or reason
        self.note_end()

    def durable(self) -> Future[None]:
        """Done when all that happened so far is on the disk. Now and then the state follows."""
        barrier = self.journal.durable()
        if self.consumed_bytes > 4 * self.state_bytes() + CONSUMED:
            self.write_state()  # behind the rows of its commits
        return barrier

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
            raw = np.fromfile(self.journal.payload(*job), dtype=np.uint8)
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
        number = len(self.loop.metrics) - 1
        self.journal.put("INSERT OR REPLACE INTO metrics VALUES (?, ?)", number, json.dumps(self.loop.metrics[-1]))

    # ---- the state on the disk ------------------------------------------------------------------
    def state_bytes(self) -> int:
        return sum(t.nbytes for t in self.server.state.values())

    def write_state(self, wait: bool = False) -> None:
        """Write the state beside the journal; when it is durable, the payloads that went into it are dropped."""
        if self.saving is not None and not self.saving.done() and not wait:
            return
        tensors = {name: t for name, t in self.server.save().items() if not name.startswith("version/")}
        tensors = {
            name: t.detach().to("cpu", copy=name.startswith("memory/")).contiguous() for name, t in tensors.items()
        }
        tensors |= {f"packet/{v}": torch.frombuffer(packet, dtype=torch.uint8) for v, packet in self.packets.items()}
        facts = {"version": self.server.version, "updates": self.engine.updates}
        jobs, self.consumed, self.consumed_bytes = self.consumed, [], 0
        self.saving = self.disk.submit(self.save, f"state-{self.server.version}.safetensors", tensors, facts, jobs)
        if wait:
            self.saving.result()

    def save(self, name: str, tensors: State, facts: dict[str, Any], jobs: list[JobName]) -> None:
        folder = self.journal.folder
        write = partial(save_file, tensors, metadata={"facts": json.dumps(facts)})
        write_file(folder / name, lambda at: write(filename=at))
        sync(folder)
        self.journal.apply([(FACT, ("state", json.dumps(name))), *((FORGET, job) for job in jobs)])
        for job in jobs:
            self.journal.payload(*job).unlink(missing_ok=True)
        for file in folder.glob("state-*.safetensors"):
            if file.name != name:
                file.unlink()

    def read_state(self, name: str) -> int:
        """The server as that file has it; how many commits are in it."""
        tensors, facts = read_tensors(self.journal.folder / name)
        packets = {n: t for n, t in tensors.items() if n.startswith("packet/")}
        self.server.restore({n: t for n, t in tensors.items() if n not in packets}, facts["version"])
        self.server.versions = {self.server.version: self.server.broadcast()}
        self.packets = {int(n.split("/")[1]): bytearray(t.numpy().tobytes()) for n, t in packets.items()}
        self.engine.updates = facts["updates"]
        return int(facts["version"])

    # ---- a sample of jobs, for replay -----------------------------------------------------------
    def sample(self, begun: Begun) -> None:
        """Keep the start of one job of many."""
        self.starts += 1
        few = len(self.sampled) < SAMPLED and not self.built.method.what.local.remembers and self.built.hybrid is None
        if few and self.starts % EVERY == 1 and begun.version in self.packets:
            write_payload(self.journal.sample(begun.client, begun.job, "start"), self.packets[begun.version])
            self.sampled.add((begun.client, begun.job))


def require_live(built: Built) -> None:
    """Refuses an experiment that cannot run live: which part, and why."""
    found = []
    experiment, when = built.experiment, built.method.when
    if built.method.what.lossless:
        found.append(
            f"{built.method.name}: saving needs every finished update exactly, and live clients may lose theirs; leave "
            "out saving"
        )
    if built.hybrid is not None and (built.hybrid.edge or not built.hybrid.server):
        what = "an edge server inside each cluster" if built.hybrid.edge else "no server at all"
        found.append(f"{built.method.name} has {what}, which does not run live; hl-sgd does")
    if not hasattr(when, "conductor"):
        found.append(f"{built.method.name}: its policy cannot be conducted")
    if not isinstance(experiment.method, str | dict):
        found.append(
            f"method '{built.method.name}' was given as an object, and clients are told names, options and numbers; "
            "name it: a table with a name, or module:function"
        )
    if tracking(built.task.model):
        found.append("the model has running statistics, which live clients do not exchange; use GroupNorm or LayerNorm")
    if not all(isinstance(side, Tensor | Windows) for side in built.task.training):
        found.append("samples have several parts, and live clients hold one tensor of inputs and one of targets")
    if found:
        raise OffbeatError("; ".join(f"this experiment cannot run live: {problem}" for problem in found))
