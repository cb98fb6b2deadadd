"""Waves in tiles: the driver's side of one or many workers.

A wave is cut by rule, whoever computes: into 16 tiles, unless these would be too small or too large. Where clients
remember something, a tile has clients of one home alone, and there are always 16 homes; a home is with one worker.
Commits take sums of each tile, and these are added two and two, in an order that follows from the tiles' numbers
(`joined`). So the number of workers, and when each answers, changes no bit.

Workers keep the updates they made; what travels are versions (once to each worker), and back sums, or rows where a rule
needs them. A worker that is lost takes updates and memories with it. What is still needed is computed again elsewhere,
from the versions that it was computed from. Homes begin with the last copy of their memory that the driver has (made at
every checkpoint, and after some waves), and all of their tiles since then are computed again, in order.

Every tile says on which rung of the ladder its worker begins. One that fails there goes down alone, which is put into
the record of the run as (wave, "tile", [number, rung]). Later waves follow it when a commit has taken one of its
updates: by then it has answered, whoever computed it, so when answers come changes no rung.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.config.choices import Mode
from offbeat.engines.crew import CrewMaker
from offbeat.engines.memory import Memory
from offbeat.engines.solver import OPENING, first_rung, primed
from offbeat.engines.stepping import Rung, lower
from offbeat.engines.tile_worker import Key, Opened, Solved, Spec, Sum, Tile, TileAnswer, array, tensor
from offbeat.engines.tiling import Arrays, Span, index_of, joined, pieces, plans_of, plus, share, tile_size, tiles_in
from offbeat.engines.updates import Answer, Plan, Result
from offbeat.errors import OffbeatError
from offbeat.method import State, Update
from offbeat.numerics.buffers import memory_shapes
from offbeat.numerics.wave import Outcome, Problem
from offbeat.records import Begun, JobName

PARTS = 16  # tiles of a wave, and homes of clients: more workers than that find nothing to do
LOG = 64  # waves after which the driver takes a new copy of what clients remember
BATCHES = 2  # under way to a worker: one that it computes, and the next, whose transfer is behind the computing
DEATHS = 4  # workers lost one after the other, while no tile came back, after which a run gives up


@dataclass(eq=False)
class Part:
    """One tile, from when it is cut until nobody needs it any more."""

    tile: Tile
    home: int | None
    versions: dict[int, Any]  # what its jobs start from
    needed: set[int]  # rows that no commit has taken yet
    worker: int | None = None  # who has it
    done: bool = False
    answered: bool = False
    given: Arrays | None = None  # rows that were not computed here, but before a checkpoint
    solved: Solved | None = None


class TileSolver:
    """A solver that cuts waves into tiles and has a crew compute them."""

    adds = True

    def __init__(self, problem: Problem, spec: Spec, crew: CrewMaker, tiling: Mapping[str, int]) -> None:
        self.problem, self.spec, self.blocks = problem, spec, spec.blocks
        self.device, self.remembers = problem.samples.x.device, problem.local.remembers
        self.crew = crew(spec)
        self.tiling = {"parts": PARTS, **self.crew.sizes, **tiling}
        self.waves = 0
        self.notes: list[str] = []
        self.record: list[tuple[int, str, Any]] = []  # wave, what changed, to what
        self.rungs: dict[Key, Rung] = {}  # of tiles that went down alone
        self.rung, reason = first_rung(problem, spec.mode, "captured")
        if reason:
            self.note(reason)
        self.bytes = {"rows": 0, "sums": 0, "memory": 0, "held": 0}
        self.parts: dict[Key, Part] = {}
        self.queue: deque[Part] = deque()  # tiles that any worker may take
        self.log: dict[int, list[Part]] = {}  # tiles of each home since the last copy of its memory
        self.answers: deque[Answer] = deque()
        self.tickets: dict[int, tuple[int, Callable[[Any], Any]]] = {}
        self.added: dict[tuple[int, int], dict[Span, Arrays]] = {}  # sums that came, by wave and version
        self.handles: dict[int, Any] = {}  # what stands for a version
        self.sent: dict[int, set[int]] = {}  # versions that a worker has
        self.pulled: dict[int, int] = {}  # bytes of versions that a worker has fetched
        self.dropped: dict[int, list[Key]] = {}  # tiles that a worker may forget
        self.deaths = 0  # in a row
        self.copied = 0  # the wave of the last copy
        units = len(spec.blocks.members) if spec.blocks else problem.samples.clients
        members = spec.blocks.members if spec.blocks else [(client,) for client in range(units)]
        self.where: dict[int, int] = {}  # homes' workers
        self.clients: list[list[int]] = [  # of each home
            [client for unit in range(home, units, self.tiling["parts"]) for client in members[unit]]
            for home in range(min(self.tiling["parts"], units))
        ]
        self.last = torch.full((problem.samples.clients if self.remembers else 0,), -1)
        self.memory: Memory | None = None  # the driver's copy
        if self.remembers:
            model, choice = problem.model, "auto" if spec.choice == "device" else spec.choice
            cpu = torch.device("cpu")
            shapes = memory_shapes(self.remembers, model.dimension, model.dtype, model.layout)
            self.memory = Memory(shapes, problem.samples.clients, cpu, choice)
        self.settle_homes()

    @property
    def limit(self) -> int:
        return self.tiling["limit"]

    @property
    def mode(self) -> Mode:
        return "reference" if self.rung == "reference" else "wave"

    # ---- the rule -------------------------------------------------------------------------------
    def cut(self, jobs: Sequence[Begun]) -> list[tuple[int | None, list[Begun]]]:
        """The tiles of a wave, and whose home each is; the most urgent jobs first."""
        size = tile_size(len(jobs), self.tiling)
        if not self.remembers:
            return [(None, list(piece)) for piece in pieces(jobs, size)]
        homes: dict[int, list[Begun]] = {}
        for job in jobs:
            homes.setdefault(job.client % len(self.clients), []).append(job)
        return [(home, list(piece)) for home, own in homes.items() for piece in pieces(own, size)]

    # ---- asking ---------------------------------------------------------------------------------
    def submit(self, versions: Mapping[int, State], jobs: Sequence[Begun], plans: Sequence[Plan] = ()) -> None:
        if self.memory is not None and self.waves - self.copied >= LOG:
            self.copy_memory()
        self.settle_homes()
        needed = {v for part in self.parts.values() for v in part.versions}
        for version in [v for v in self.handles if v not in versions and v not in needed]:
            del self.handles[version]
        mine: list[Part] = []
        known = [index_of(plan) for plan in plans]
        for number, (home, own) in enumerate(self.cut(jobs)):
            for job in own:
                if job.version not in self.handles:
                    self.handles[job.version] = self.crew.share(versions[job.version])
            key = (self.waves, number)
            tile = Tile(key, own, plans_of(own, known), self.rungs.get(key, self.rung))
            part = Part(tile, home, {job.version: self.handles[job.version] for job in own}, set(range(len(own))))
            self.parts[key] = part
            mine.append(part)
        self.waves += 1
        if self.remembers:
            for job in self.devices(jobs):
                self.last[job.client] = job.job
        self.give(mine)

    def give(self, parts: Sequence[Part]) -> None:
        """Tiles to workers: those of a home to its own, the others to whoever is free."""
        homes: dict[int, list[Part]] = {}
        for part in parts:
            if part.home is None:
                self.queue.append(part)
            else:
                self.log.setdefault(part.home, []).append(part)
                homes.setdefault(self.where[part.home], []).append(part)
        for worker, own in homes.items():
            self.ask_tiles(worker, own)
        self.dispatch()

    def dispatch(self) -> None:
        """Tiles of the queue to workers: most at once, for a message costs time, and the rest to whoever is done."""
        workers = self.crew.workers()
        for level in range(BATCHES):
            if not self.queue:
                return
            under_way = Counter(worker for worker, _ in self.tickets.values())
            many = share(len(self.queue), len(workers))
            for worker in workers:
                if self.queue and under_way[worker] == level:
                    self.ask_tiles(worker, [self.queue.popleft() for _ in range(min(many, len(self.queue)))])

    def ask_tiles(self, worker: int, parts: list[Part]) -> None:
        has = self.sent.setdefault(worker, set())
        gone = [version for version in has if version not in self.handles]
        versions = {v: handle for part in parts for v, handle in part.versions.items() if v not in has}
        has |= versions.keys()
        has -= set(gone)
        for part in parts:
            part.worker, part.done = worker, False
        tiles = [part.tile for part in parts]
        then = partial(self.solved, worker)
        self.send(worker, "solve", then, tiles, versions, gone, self.dropped.pop(worker, []))

    def send(self, worker: int, what: str, then: Callable[[Any], Any], *given: Any) -> int:
        ticket = self.crew.ask(worker, what, *given)
        self.tickets[ticket] = (worker, then)
        return ticket

    # ---- hearing --------------------------------------------------------------------------------
    def collect(self) -> Answer | None:
        while not self.answers:
            if not self.hear():
                return None
        return self.answers.popleft()

    def hear(self) -> bool:
        """Take in one thing that happened; False if nothing will."""
        reply = self.crew.hear()
        if reply is None:
            return False
        if reply.lost:
            self.recover(reply.worker, reply.lost)
        elif reply.ticket in self.tickets:
            _, then = self.tickets.pop(reply.ticket)
            then(reply.value)
        self.dispatch()
        return True

    def hear_more(self) -> None:
        if not self.hear():
            raise OffbeatError("no worker is left that could answer; `offbeat resume` goes on from the checkpoint")

    def solved(self, worker: int, reply: TileAnswer) -> None:
        self.pulled[worker] = reply.received
        self.deaths = 0
        for text in reply.notes:
            self.note(text)
        for each in reply.sums:
            self.keep(each)
        for solved in reply.tiles:
            if (part := self.parts.get(solved.key)) is None:
                continue
            self.count("rows", [solved.rows or {}])
            part.done, part.solved = True, solved
            if solved.rung != part.tile.rung:
                self.step_down(solved.key, solved.rung)
                part.tile = part.tile._replace(rung=solved.rung)
            if not part.answered:
                part.answered = True
                self.answers.append(Answer(part.tile.jobs, part, solved.bad))
            elif not part.needed:
                self.let_go(part)

    def step_down(self, key: Key, rung: Rung) -> None:
        """A tile was computed on a lower rung than it began on."""
        wave, number = key
        self.rungs[key] = rung
        self.record.append((wave, "tile", [number, rung]))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(text, stacklevel=2)

    def keep(self, each: Sum) -> None:
        """Add a sum to its neighbour's, unless it is there already: a tile that was lost may come again."""
        self.count("sums", [each.vectors])
        spans = self.added.get((each.wave, each.version), {})
        old, new = tiles_in(spans), tiles_in([each.span])
        if not new <= old:
            apart = {span: vectors for span, vectors in spans.items() if not new & tiles_in([span])}
            self.added[each.wave, each.version] = joined({**apart, each.span: each.vectors}, old | new)

    # ---- what commits ask -----------------------------------------------------------------------
    def vectors(self, results: Sequence[Result], names: Sequence[str]) -> Update:
        parts = {id(result.updates): result.updates for result in results}
        local = self.problem.local
        rows_of: dict[int, Arrays] = {}
        for place, part in parts.items():
            if part.given is not None:
                rows_of[place] = part.given
            elif part.solved.rows is not None or not set(names) & set(local.sends):
                rows_of[place] = {**(part.solved.rows or {}), **part.solved.numbers}
        for place, rows in zip(
            [place for place in parts if place not in rows_of],
            self.ask_held("rows", [(part,) for place, part in parts.items() if place not in rows_of]),
            strict=True,
        ):
            rows_of[place] = rows
        return {
            name: tensor(np.stack([rows_of[id(r.updates)][name][r.row] for r in results])).to(self.device)
            for name in names
        }

    def sums(self, version: int, results: Sequence[Result], weights: Mapping[str, Tensor]) -> Update:
        """Tile by tile, where the updates are; then in the order of tiles, and of waves."""
        places: dict[Key, list[int]] = {}
        for place, result in enumerate(results):
            places.setdefault(result.updates.tile.key, []).append(place)
        waves = {wave: dict(self.added.get((wave, version), {})) for wave, _ in sorted(places)}
        came = {(wave, number) for wave, spans in waves.items() for number in tiles_in(spans)}
        lacking = []
        for key, mine in places.items():
            if key not in came:
                rows = [results[place].row for place in mine]
                lacking.append((self.parts[key], rows, {name: array(each[mine]) for name, each in weights.items()}))
        for (part, *_), vectors in zip(lacking, self.ask_held("sums", lacking), strict=True):
            wave, number = part.tile.key
            waves[wave][number, 1] = vectors
        self.added = {key: spans for key, spans in self.added.items() if key[1] > version}
        totals = (next(iter(joined(spans).values())) for spans in waves.values())
        return {name: tensor(value).to(self.device) for name, value in reduce(plus, totals).items()}

    def ask_held(self, what: str, wanted: Sequence[tuple[Any, ...]]) -> list[Arrays]:
        """Ask workers for what they hold: of each tile `rows`, or `sums`. A tile that was lost is waited for."""
        values: dict[int, Arrays] = {}
        tickets: dict[int, int] = {}  # of each

        def take(places: list[int], arrays: list[Arrays]) -> None:
            values.update(zip(places, arrays, strict=True))
            self.count(what, arrays)

        while len(values) < len(wanted):
            due: dict[int, list[int]] = {}
            for place, (part, *_) in enumerate(wanted):
                if place not in values and tickets.get(place) not in self.tickets and part.done:
                    due.setdefault(part.worker, []).append(place)
            for worker, places in due.items():
                keys = [wanted[place][0].tile.key for place in places]
                given = keys if what == "rows" else [(key, *wanted[p][1:]) for key, p in zip(keys, places, strict=True)]
                tickets |= dict.fromkeys(places, self.send(worker, what, partial(take, places), given))
            self.hear_more()
        return [values[place] for place in range(len(wanted))]

    def count(self, what: str, values: Iterable[Arrays]) -> None:
        self.bytes[what] += sum(a.nbytes for value in values for a in value.values())

    def committed(self, results: Sequence[Result]) -> None:
        for result in results:
            self.rung = lower(self.rung, result.updates.tile.rung)
        self.release(results)

    def release(self, results: Sequence[Result]) -> None:
        for result in results:
            part: Part = result.updates
            part.needed.discard(result.row)
            if not part.needed:
                self.let_go(part)

    def let_go(self, part: Part) -> None:
        """Its updates can go; where it moved a memory, it must be known until the memory is copied."""
        if part.worker is not None:
            self.dropped.setdefault(part.worker, []).append(part.tile.key)
        if part.home is None or part not in self.log.get(part.home, ()):
            self.parts.pop(part.tile.key, None)

    def solve(self, versions: Mapping[int, State], jobs: Sequence[Begun]) -> Outcome:
        """All of a wave, with its updates as rows: for those who look at single waves."""
        self.submit(versions, jobs)
        rows: dict[JobName, Result] = {}
        while len(rows) < len(jobs):
            if (answer := self.collect()) is None:
                raise OffbeatError("no worker is left that could answer")
            rows |= {
                job[:2]: Result(answer.updates, i, job, int(answer.bad[i]), -1) for i, job in enumerate(answer.jobs)
            }
        results = [rows[job[:2]] for job in jobs]
        local = self.problem.local
        updates = self.vectors(results, (*local.sends, *local.numbers))
        self.committed(results)
        return Outcome(updates, torch.zeros(len(jobs)), torch.tensor([result.bad for result in results]))

    # ---- workers come and go --------------------------------------------------------------------
    def recover(self, worker: int, reason: str) -> None:
        """Have computed again elsewhere what a worker took with it."""
        self.deaths += 1
        if self.deaths > DEATHS:
            raise OffbeatError(
                f"{self.deaths} workers were lost one after the other without computing anything ({reason}). If they "
                "ran out of memory, begin the run with a lower memory_gib or fewer workers on a node; `offbeat resume` "
                "goes on from the checkpoint"
            )
        self.notes.append(f"a worker was lost in wave {self.waves}; its jobs were computed again elsewhere")
        self.tickets = {ticket: each for ticket, each in self.tickets.items() if each[0] != worker}
        for table in (self.sent, self.dropped):
            table.pop(worker, None)
        while not self.crew.workers():
            self.hear_more()
        again = [
            part
            for part in self.parts.values()
            if part.worker == worker and part.home is None and (part.needed or not part.answered)
        ]
        for part in again:
            part.worker, part.done = None, False
        for part in [part for part in again if part.given is not None]:
            self.hold(part)
        self.queue.extendleft(reversed([part for part in again if part.given is None]))
        homes = [home for home, place in self.where.items() if place == worker]
        workers = self.crew.workers()
        for home in homes:
            self.where[home] = workers[home % len(workers)]
            self.move_in(home)
            if log := self.log.get(home):
                self.ask_tiles(self.where[home], list(log))
            for part in [p for p in self.parts.values() if p.home == home and p.given is not None]:
                self.hold(part)

    def settle_homes(self) -> None:
        """Spread the homes evenly over the workers that are there; what moves takes its memory along."""
        if not self.remembers:
            return
        workers = self.crew.workers()
        if self.where and not set(workers) - set(self.where.values()):
            return
        if self.where:
            self.copy_memory()
            workers = self.crew.workers()
        most, load = -(-len(self.clients) // len(workers)), Counter[int]()
        for home in range(len(self.clients)):
            place = self.where.get(home)
            if place not in workers or load[place] >= most:
                self.where[home] = min(workers, key=lambda worker: load[worker])
                self.move_in(home)
            load[self.where[home]] += 1

    def move_in(self, home: int) -> None:
        assert self.memory is not None
        clients = self.clients[home]
        rows = {name: array(t) for name, t in self.memory.read(self.remembers, torch.tensor(clients)).items()}
        if any(value.any() for value in rows.values()):
            self.count("memory", [rows])
            self.send(self.where[home], "remember", lambda _: None, clients, rows)

    def copy_memory(self) -> None:
        """The driver's copy of what clients remember: that of all whose jobs were computed since the last one."""
        if self.memory is None:
            return
        while self.tickets:
            self.hear_more()
        for home, log in list(self.log.items()):
            clients = sorted({job.client for part in log for job in self.devices(part.tile.jobs)})
            memories: list[Arrays] = []
            ticket = None
            while not memories:
                if ticket not in self.tickets:
                    ticket = self.send(self.where[home], "remembered", memories.append, clients)
                self.hear_more()
            self.count("memory", memories)
            self.memory.write(torch.tensor(clients), {name: tensor(value) for name, value in memories[0].items()})
        # A tile whose updates are needed yet cannot be computed again from the new copy: the driver takes them too.
        open_parts = [part for log in self.log.values() for part in log if part.needed]
        for part, rows in zip(open_parts, self.ask_held("rows", [(part,) for part in open_parts]), strict=True):
            part.given = rows
        for part in [part for log in self.log.values() for part in log if not part.needed]:
            self.parts.pop(part.tile.key, None)
        self.log.clear()
        self.copied = self.waves

    def devices(self, jobs: Sequence[Begun]) -> Sequence[Begun]:
        return jobs if self.blocks is None else self.blocks.rows(jobs)

    # ---- the rest of a solver -------------------------------------------------------------------
    def fitting(self, ready: int, urgent: int) -> int:
        return ready

    def has_moved(self, client: int, number: int) -> bool:
        row = client if self.blocks is None else self.blocks.members[client][0]
        return bool(len(self.last)) and number <= int(self.last[row])

    def opening(self, model: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        handle = self.crew.share({"model": model})
        groups = self.clients if self.remembers else [list(range(self.problem.samples.clients))]
        chunks = [(home, list(own)) for home, all_ in enumerate(groups) for own in pieces(all_, self.tiling["most"])]
        means: dict[int, np.ndarray] = {}
        tickets: dict[int, int] = {}

        def take(place: int, rung: Rung, opened: Opened) -> None:
            means[place] = opened.gradients
            for text in opened.notes:
                self.note(text)
            if opened.rung != rung:
                self.step_down((OPENING, place), opened.rung)

        for turn, (_, clients) in enumerate(chunks):
            while turn not in means:
                workers = self.crew.workers()
                for place in range(turn, min(len(chunks), turn + BATCHES * len(workers))):
                    if place not in means and tickets.get(place) not in self.tickets:
                        home, own = chunks[place]
                        worker = self.where[home] if self.remembers else workers[place % len(workers)]
                        rung = self.rungs.get((OPENING, place), self.rung)
                        then = partial(take, place, rung)
                        tickets[place] = self.send(worker, "opening", then, handle, own, rung)
                self.hear_more()
            gradients = tensor(means.pop(turn))
            self.bytes["rows"] += gradients.nbytes
            if self.memory is not None:
                self.memory.write(torch.tensor(clients), dict.fromkeys(primed(self.problem), gradients))
            yield torch.tensor(clients, device=self.device), gradients.to(self.device)
        self.rung = reduce(lower, (rung for (wave, _), rung in self.rungs.items() if wave == OPENING), self.rung)

    # ---- checkpoints ----------------------------------------------------------------------------
    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.copy_memory()
        tensors = {} if self.memory is None else self.memory.save() | {"last": self.last}
        facts = {"waves": self.waves, "limit": self.limit, "rung": self.rung, "notes": self.notes}
        return tensors, facts | {"record": self.record, "sizes": {}, "tiling": dict(self.tiling)}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.follow(facts["record"], facts["threads"])
        self.waves, self.rung, self.notes = facts["waves"], facts["rung"], list(facts["notes"])
        self.copied = self.waves
        if self.memory is not None:
            self.memory.restore(tensors)
            self.last = tensors["last"]
            for home in self.where:
                self.move_in(home)

    def places(self, results: Sequence[Result]) -> list[list[int]]:
        return [[*result.updates.tile.key, result.row] for result in results]

    def adopt(self, results: Sequence[Result], places: list[list[int]] | None) -> None:
        """Results of before a checkpoint, or of another solver, as tiles that a worker holds."""
        groups: dict[Key, list[tuple[int, Result]]] = {}
        for number, result in enumerate(results):
            wave, tile, row = places[number] if places else (-1, number, 0)
            groups.setdefault((wave, tile), []).append((row, result))
        for key, own in groups.items():
            ordered = [result for _, result in sorted(own, key=lambda pair: pair[0])]
            names = ordered[0].updates.keys()
            given = {
                name: np.concatenate([array(r.updates[name][r.row : r.row + 1]) for r in ordered]) for name in names
            }
            jobs = [result.job for result in ordered]
            home = jobs[0].client % len(self.clients) if self.remembers else None
            rung = self.rungs.get(key, self.rung)
            part = Part(Tile(key, jobs, [], rung), home, {}, set(range(len(jobs))), answered=True, given=given)
            self.parts[key] = part
            self.hold(part)
            for row, result in enumerate(ordered):
                result.updates, result.row = part, row

    def hold(self, part: Part) -> None:
        workers = self.crew.workers()
        part.worker = workers[part.tile.key[1] % len(workers)] if part.home is None else self.where[part.home]
        part.done = True
        assert part.given is not None
        self.count("held", [part.given])
        self.send(part.worker, "hold", lambda _: None, part.tile.key, part.given)

    def follow(self, record: Sequence[Sequence[Any]], threads: int) -> None:
        """Compute tiles on the rungs where the run computed them that left this record."""
        self.record = [(wave, what, value) for wave, what, value in record]
        self.rungs = {(wave, value[0]): value[1] for wave, what, value in self.record if what == "tile"}

    def report(self) -> dict[str, Any]:
        return {
            "engine": self.crew.name,
            "workers": len(self.crew.workers()),
            "bytes_moved": self.bytes | {"versions": sum(self.pulled.values())},
        }

    def close(self) -> None:
        self.crew.close()
