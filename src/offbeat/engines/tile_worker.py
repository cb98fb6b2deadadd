"""One of those who compute tiles: a wave solver that keeps the updates it made, and what its clients remember.

Nothing that it computes may depend on what it computed before, or on how many others there are: on a processor a tile
is computed on one thread, how steps are cut inside follows from the tile alone, a tile says on which rung of the ladder
to begin, and one that does not fit into the memory is an error and no reason to halve it. So any number of workers of
one kind gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat.config.choices import Choice, Mode, Precision
from offbeat.engines.solver import LocalSolver, captured_steps, primed
from offbeat.engines.stepping import Rung
from offbeat.engines.tiles import CACHED, MOST
from offbeat.engines.tiling import Arrays, Span, joined
from offbeat.errors import OffbeatError
from offbeat.method import State, Update
from offbeat.numerics import wave as numerics
from offbeat.numerics.buffers import memory_shapes
from offbeat.numerics.mixing import Blocks
from offbeat.numerics.threads import threads
from offbeat.numerics.wave import Problem
from offbeat.records import Begun

Key: TypeAlias = tuple[int, int]  # the number of a wave, and of a tile in it
MESSAGE = 1 << 20  # bytes of work that are worth a message to a processor
LEAST, GREATEST = 16, 256  # jobs in a tile on a device: fewer leave it idle, more gain little (results/speed-h200.json)


class Spec(NamedTuple):
    """What a worker needs to know of a run."""

    problem: Problem
    blocks: Blocks | None
    precision: Precision
    mode: Mode
    memory_gib: float | None
    choice: Choice
    rows: bool  # the rule commits updates one by one, so they go back as rows


class Tile(NamedTuple):
    """Some jobs of a wave, and for each commit that is known to take some of them: their places and weights."""

    key: Key
    jobs: list[Begun]
    plans: list[tuple[int, list[int], Arrays]]
    rung: Rung  # of the ladder, on which its worker begins


class Solved(NamedTuple):
    """What a tile came to: vectors stay with the worker, unless rows were asked for."""

    key: Key
    bad: list[int]
    numbers: Arrays
    rows: Arrays | None
    rung: Rung  # on which it was computed


class Sum(NamedTuple):
    """A weighted sum over neighbouring tiles of a wave, for the commit that replaces a version."""

    wave: int
    version: int
    span: Span
    vectors: Arrays


class TileAnswer(NamedTuple):
    """What some tiles came to together."""

    tiles: list[Solved]
    sums: list[Sum]
    notes: list[str]
    received: int  # bytes of versions, so far


class Opened(NamedTuple):
    """The gradients of some clients over their shards."""

    gradients: np.ndarray
    notes: list[str]
    rung: Rung  # on which they were computed


class TileWorker:
    """Computes tiles on the device that the problem is on."""

    def __init__(self, spec: Spec) -> None:
        self.spec, problem = spec, spec.problem
        self.device = problem.samples.x.device
        self.threads = 1 if self.device.type == "cpu" else None
        self.memory = Shard(problem, self.device if spec.choice in ("auto", "device") else torch.device("cpu"))
        self.solver = WholeTiles(
            problem, spec.blocks, spec.mode, captured_steps(problem, 1, 1, counts=False), spec.memory_gib, spec.choice,
            self.memory if problem.local.remembers else None,
        )  # fmt: skip
        self.versions: dict[int, State] = {}
        self.updates: dict[Key, Update] = {}
        self.received = 0  # bytes of versions

    # ---- what a run asks first ------------------------------------------------------------------
    def sizes(self) -> dict[str, int]:
        """The least and the greatest number of jobs in a tile, and in a wave: by rule, from model, batch and device."""
        work, model = numerics.bytes_per_job(self.spec.problem), self.spec.problem.model
        largest = max(map(len, self.spec.blocks.members)) if self.spec.blocks else 1
        least, most = LEAST, GREATEST
        if self.device.type == "cpu":
            least, most = MESSAGE // work, min(MOST // work, CACHED // (model.dimension * model.dtype.itemsize))
        limit = self.solver.limit
        most = max(1, min(most // largest, limit))
        return {"least": max(1, min(least // largest, most)), "most": most, "limit": limit}

    def fetch(self, handle: Any) -> Mapping[str, Any]:
        """A version from what stands for it."""
        return handle  # type: ignore[no-any-return]

    # ---- tiles ----------------------------------------------------------------------------------
    def solve(
        self, tiles: Sequence[Tile], versions: Mapping[int, Any], gone: Sequence[int], dropped: Sequence[Key]
    ) -> TileAnswer:
        """`versions` are those that were not sent before; the `gone` and the `dropped` will not be asked for again."""
        for version in gone:
            self.versions.pop(version, None)
        for key in dropped:
            self.updates.pop(key, None)
        for version, handle in versions.items():
            state = {name: tensor(value).to(self.device) for name, value in self.fetch(handle).items()}
            self.received += sum(t.nbytes for t in state.values())
            self.versions[version] = state
        with threads(self.threads), torch.no_grad():
            solved = [self.solve_one(tile) for tile in tiles]
            sums = self.planned(tiles)
        return TileAnswer(solved, sums, self.solver.notes, self.received)

    def solve_one(self, tile: Tile) -> Solved:
        local, blocks = self.spec.problem.local, self.spec.blocks
        self.solver.rung = tile.rung
        outcome = self.solver.solve(self.versions, tile.jobs)
        updates = outcome.updates if blocks is None else blocks.reported(outcome.updates, tile.jobs)
        self.updates[tile.key] = {name: updates[name] for name in (*local.sends, *local.numbers)}
        rows = {name: array(updates[name]) for name in local.sends} if self.spec.rows else None
        numbers = {name: array(updates[name]) for name in local.numbers}
        return Solved(tile.key, outcome.bad.tolist(), numbers, rows, self.solver.rung)

    def planned(self, tiles: Sequence[Tile]) -> list[Sum]:
        """The sums of these tiles for commits that are known, those of neighbours added up."""
        mine: dict[int, set[int]] = {}
        sums: dict[tuple[int, int], dict[Span, Update]] = {}
        for tile in tiles:
            wave, number = tile.key
            mine.setdefault(wave, set()).add(number)
            for version, rows, weights in tile.plans:
                sums.setdefault((wave, version), {})[number, 1] = self.sum(tile.key, rows, weights)
        return [
            Sum(wave, version, span, {name: array(value) for name, value in vectors.items()})
            for (wave, version), each in sums.items()
            for span, vectors in joined(each, mine[wave]).items()
        ]

    def sum(self, key: Key, rows: Sequence[int], weights: Arrays) -> dict[str, Tensor]:
        updates, index = self.updates[key], torch.tensor(rows, device=self.device)
        return {
            name: tensor(each).to(self.device) @ updates[name].index_select(0, index) for name, each in weights.items()
        }

    def sums(self, wanted: Sequence[tuple[Key, Sequence[int], Arrays]]) -> list[Arrays]:
        """Of each of these tiles the weighted sum of some rows."""
        with threads(self.threads), torch.no_grad():
            return [{name: array(t) for name, t in self.sum(*each).items()} for each in wanted]

    def rows(self, wanted: Sequence[Key]) -> list[Arrays]:
        """All rows of these tiles."""
        return [{name: array(t) for name, t in self.updates[key].items()} for key in wanted]

    def hold(self, key: Key, rows: Arrays) -> None:
        """Updates that were computed before."""
        self.updates[key] = {name: tensor(value).to(self.device) for name, value in rows.items()}

    # ---- what clients remember ------------------------------------------------------------------
    def remembered(self, clients: Sequence[int]) -> Arrays:
        names = self.spec.problem.local.remembers
        return {name: array(t) for name, t in self.memory.read(names, torch.tensor(clients)).items()}

    def remember(self, clients: Sequence[int], rows: Arrays) -> None:
        self.memory.write(torch.tensor(clients), {name: tensor(value) for name, value in rows.items()})

    def opening(self, model: Any, clients: Sequence[int], rung: Rung) -> Opened:
        """The gradients of these clients over their shards; what they remember starts there."""
        problem, solver = self.spec.problem, self.solver
        flat = tensor(self.fetch(model)["model"]).to(self.device)
        who = torch.tensor(clients, device=self.device)
        solver.rung = rung
        with threads(self.threads), torch.no_grad():
            at = flat.expand(len(who), -1)
            gradients = solver.within_memory(partial(solver.full_gradients, problem, at, who))
        if gradients is None:
            solver.halve(len(who))
        self.memory.write(who.cpu(), dict.fromkeys(primed(problem), gradients))
        return Opened(array(gradients), solver.notes, solver.rung)


class WholeTiles(LocalSolver):
    """A solver that never cuts a tile because the memory ran out. It is told the rung of each tile, and the driver says
    what it notes."""

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def halve(self, jobs: int) -> NoReturn:
        raise OffbeatError(
            f"a tile of {jobs} jobs does not fit into the memory of {self.device}; begin the run with a lower "
            "memory_gib, which makes smaller tiles"
        )


class Shard:
    """What some clients remember, a row each, as far as it was ever written; else zeros."""

    def __init__(self, problem: Problem, place: torch.device) -> None:
        self.device, self.place = problem.samples.x.device, place
        model, names = problem.model, problem.local.remembers
        shapes = memory_shapes(names, model.dimension, model.dtype, model.layout)
        self.zeros = {name: torch.zeros(n, dtype=dtype, device=place) for name, (n, dtype) in shapes.items()}
        self.held: dict[str, dict[int, Tensor]] = {name: {} for name in problem.local.remembers}

    def read(self, names: Sequence[str], clients: Tensor) -> State:
        who: list[int] = clients.tolist()
        return {
            name: torch.stack([self.held[name].get(client, self.zeros[name]) for client in who]).to(self.device)
            for name in names
        }

    def write(self, clients: Tensor, rows: State) -> None:
        for name, new in rows.items():
            kept = new.to(self.place)
            for client, row in zip(clients.tolist(), kept.unbind(), strict=True):
                self.held[name][client] = row.clone()


def array(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy()


def tensor(value: Any) -> Tensor:
    """A tensor that may be written; arrays that came from elsewhere may not."""
    return value if isinstance(value, Tensor) else torch.from_numpy(np.require(value, requirements="W"))
