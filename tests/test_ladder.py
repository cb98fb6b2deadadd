"""The ladder of ways, by every engine: what fails is recorded, and followed by resume and replay."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments import digest
from offbeat import Experiment, Task, replay, resume, run
from offbeat.engines import solver
from offbeat.engines.crew import Reply
from offbeat.engines.engine import Engine
from offbeat.engines.solver import OPENING, LocalSolver
from offbeat.engines.stepping import LADDER
from offbeat.engines.tile_worker import Key, Spec, TileWorker
from offbeat.experiments import assemble
from offbeat.experiments.assemble import build, build_method
from offbeat.numerics import wave as numerics
from offbeat.numerics.reference_loop import full_gradient
from offbeat.runs.stored import Stored
from offbeat.theory.measure import gauge_of

pytestmark = pytest.mark.filterwarnings("ignore")
MARK = 1e-3  # what a rung adds to updates here, so that it can be told from others


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engines.tile_solver.PARTS", 3)
    monkeypatch.setattr("offbeat.engines.tile_worker.MESSAGE", 1)


def failing(monkeypatch: pytest.MonkeyPatch, fails: set[Key]) -> None:
    """Have captured steps of these tiles (of whole waves: of their first) fail, once each."""
    way, solve_one = LocalSolver.way, TileWorker.solve_one
    tiles: dict[LocalSolver, Key] = {}  # that each worker has in hand

    def noted(self: TileWorker, tile: Any) -> Any:
        tiles[self.solver] = tile.key
        return solve_one(self, tile)

    def marked(self: LocalSolver, starts: Any, jobs: Any) -> Any:
        key = tiles.get(self, (self.waves, 0))
        if self.rung == "captured" and key in fails:
            fails.remove(key)
            raise RuntimeError("no such kernel")
        outcome = way(self, starts, jobs)
        mark = MARK * LADDER.index(self.rung)
        return outcome._replace(updates={name: rows + mark for name, rows in outcome.updates.items()})

    monkeypatch.setattr(TileWorker, "solve_one", noted)
    monkeypatch.setattr(LocalSolver, "way", marked)


def experiment(method: str, commits: int, **others: Any) -> Experiment:
    size = {"buffer_size": 3} if method == "fedbuff" else {"n": 9}
    return Experiment(
        method={"name": method, "local_steps": 2, **size}, task={"name": "digits", "clients": 12}, fleet="straggling",
        device="cpu", until={"commits": commits}, checkpoint_seconds=60.0, **others,
    )  # fmt: skip


def record(path: Path) -> list[Any]:
    changes: list[Any] = Stored(path).checkpoint().facts["record"]
    return changes


@pytest.mark.parametrize(("engine", "change"), [("local", [4, "rung", "plain"]), ("tiles", [4, "tile", [1, "plain"]])])
@pytest.mark.parametrize("method", ["local-sgd", "scaffold"])
def test_a_way_that_failed_is_followed(
    method: str, engine: Any, change: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight = resumed = replayed, though nothing fails a second time; and the rest of the run takes the next way."""
    fails: set[Key] = set()
    failing(monkeypatch, fails)
    tile = (4, 1 if engine == "tiles" else 0)
    unfailing = run(experiment(method, 8, engine=engine))
    fails.add(tile)
    straight = run(experiment(method, 8, engine=engine), tmp_path / "straight")
    fails.add(tile)
    run(experiment(method, 6, engine=engine), tmp_path / "short")
    assert not fails
    assert record(tmp_path / "straight") == record(tmp_path / "short") == [change]
    extended = resume(tmp_path / "short", until={"commits": 8})
    again = replay(tmp_path / "straight")
    assert straight.rung == extended.rung == again.rung == "plain"
    assert digest(straight.model) == digest(extended.model) == digest(again.model) != digest(unfailing.model)
    assert [note for note in straight.notes if "no such kernel" in note] == extended.notes


def test_a_checkpoint_between_a_failure_and_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of the tile that wait for their commit still bring the run down when it comes."""
    fails: set[Key] = set()
    failing(monkeypatch, fails)
    models = []
    for commits in range(1, 6):
        fails.add((0, 2))
        run(experiment("fedbuff", commits, engine="tiles"), tmp_path / f"{commits}")
        models.append(resume(tmp_path / f"{commits}", until={"commits": 8}, engine="tiles"))
    assert {one.rung for one in models} == {"plain"}
    assert len({digest(one.model) for one in models}) == 1


def test_a_way_that_failed_stays_left_from_engine_to_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails: set[Key] = {(1, 0)}
    failing(monkeypatch, fails)
    run(experiment("local-sgd", 3), tmp_path / "run")
    moved = resume(tmp_path / "run", until={"commits": 6}, engine="tiles")
    assert moved.rung == "plain"
    assert digest(replay(tmp_path / "run").model) == digest(moved.model)


class Several:
    """Workers in this process, heard in any order, or always the first or the last of them; one of them is lost on the
    way, and another comes."""

    name = "several"

    def __init__(self, spec: Spec, many: int, order: str, loses: int | None = None) -> None:
        self.spec, self.order, self.rng, self.loses = spec, order, random.Random(order), loses
        self.live = {number: TileWorker(spec) for number in range(many)}
        self.replies: dict[int, deque[Reply]] = {number: deque() for number in self.live}
        self.sizes = self.live[0].sizes()
        self.asked = self.heard = 0

    def workers(self) -> list[int]:
        return sorted(self.live)

    def share(self, state: Mapping[str, Tensor]) -> Any:
        return state

    def ask(self, worker: int, what: str, *given: Any) -> int:
        self.asked += 1
        self.replies[worker].append(Reply(worker, self.asked, getattr(self.live[worker], what)(*given)))
        return self.asked

    def hear(self) -> Reply | None:
        waiting = [worker for worker, replies in self.replies.items() if replies]
        if not waiting:
            return None
        place = {"first": 0, "last": len(waiting) - 1}.get(self.order, self.rng.randrange(len(waiting)))
        worker, self.heard = waiting[place], self.heard + 1
        if self.heard != self.loses:
            return self.replies[worker].popleft()
        del self.live[worker], self.replies[worker]
        number = max(self.live, default=worker) + 1
        self.live[number], self.replies[number] = TileWorker(self.spec), deque()
        return Reply(worker, lost="it was killed")

    def close(self) -> None:
        self.live.clear()


@pytest.mark.parametrize(("method", "tile"), [("fedbuff", (0, 4)), ("scaffold", (1, 2))])
def test_the_rung_of_a_tile_does_not_depend_on_who_answers_when(
    method: str, tile: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one worker or several, whoever is heard first or dies: a tile that failed once is computed again, by another
    worker, on the rung where it was computed."""
    monkeypatch.setattr("offbeat.engines.tile_solver.PARTS", 6)
    fails: set[Key] = set()
    failing(monkeypatch, fails)
    models = {}
    for crew in ((1, "first"), (3, "first"), (3, "last"), (2, "any"), (3, "first", 7), (3, "last", 7), (3, "last", 8)):
        monkeypatch.setattr(assemble, "in_process", lambda spec, crew=crew: Several(spec, *crew))
        fails.add(tile)
        outcome = run(experiment(method, 10, engine="tiles"))
        assert not fails
        assert len(crew) < 3 or any("a worker was lost" in note for note in outcome.notes)
        models[crew] = (outcome.rung, digest(outcome.model))
    assert len(set(models.values())) == 1, models


# ---- the opening --------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["local", "tiles"])
def test_an_opening_that_failed_is_followed(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight = replayed, where the second group of clients could not be batched, and only the first time."""
    batched, single, fails = numerics.full_gradients, solver.full_gradient, [True]
    monkeypatch.setattr(LocalSolver, "wave_limit", lambda *_: 5)

    def unbatched(problem: Any, flat: Tensor, clients: Tensor) -> Tensor:
        if fails and 7 in clients:
            raise RuntimeError("no batching here")
        return batched(problem, flat, clients)

    monkeypatch.setattr(numerics, "full_gradients", unbatched)
    monkeypatch.setattr(solver, "full_gradient", lambda *given: single(*given) + MARK)
    straight = run(experiment("fedagrac", 4, engine=engine), tmp_path / "straight")
    fails.clear()
    again = replay(tmp_path / "straight")
    assert digest(straight.model) == digest(again.model) != digest(run(experiment("fedagrac", 4, engine=engine)).model)
    assert straight.rung == again.rung == "reference"
    (note,) = straight.notes
    assert "cannot be batched over clients, so jobs run one after another: no batching here" in note
    changes = [[OPENING, "tile", [1, "reference"]]]
    if engine == "local":
        changes = [[OPENING - 1, "rung", "plain"], [OPENING - 1, "rung", "reference"]]
    assert record(tmp_path / "straight") == changes


def test_an_opening_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = numerics.full_gradients
    given = experiment("fedagrac", 4, precision="float64")
    whole = build(given).engine()

    def short_of_memory(problem: Any, flat: Tensor, clients: Tensor) -> Tensor:
        if len(clients) > 4:
            raise torch.OutOfMemoryError("no room")
        return batched(problem, flat, clients)

    monkeypatch.setattr(numerics, "full_gradients", short_of_memory)
    engine = build(given).engine()
    assert engine.solver.record == [(OPENING, "limit", 6), (OPENING, "limit", 3)]
    memories = [each.solver.save()[0] for each in (whole, engine)]
    assert all(torch.allclose(memories[1][name], memories[0][name], atol=1e-12) for name in memories[0])
    monkeypatch.setattr(numerics, "full_gradients", batched)
    follower = build(given).engine(engine.state()[1], again=True)
    assert follower.solver.limit == 3


class Doubling(nn.Module):
    """A hook on a gradient, which waves would not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: 2 * gradient)
        return out


@pytest.mark.parametrize("tiling", [None, {"since": 0}], ids=["local", "tiles"])
@pytest.mark.parametrize("mode", ["wave", "reference"])
def test_an_opening_takes_the_rung_that_the_run_begins_on(mode: Any, tiling: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.standard_normal((12, 3))), torch.from_numpy(rng.integers(0, 2, 12))
    shards = [range(3 * i, 3 * i + 3) for i in range(4)]
    task = Task(Doubling(), functional.cross_entropy, (x, y), shards, batch_size=2)
    engine = Engine(build_method("fedagrac"), task, 0, torch.device("cpu"), "float64", mode, tiling=tiling)
    assert engine.solver.rung == "reference"
    problem, start = engine.solver.problem, engine.flat.initial()
    gradients = torch.stack([full_gradient(problem, start, torch.tensor([client])) for client in range(4)])
    (memory,) = (rows for name, rows in engine.solver.save()[0].items() if name != "last")
    assert torch.equal(memory, gradients)
    if tiling is None:  # and so do gradients that are measured
        assert torch.allclose(gauge_of(engine, 0, None).gradients(start, torch.arange(4)), gradients, atol=1e-12)
    assert not torch.allclose(memory, numerics.full_gradients(problem, start.expand(4, -1), torch.arange(4)))
