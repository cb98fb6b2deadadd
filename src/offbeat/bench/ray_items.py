"""The items of `offbeat bench ray`: two actors against one, what travels, a simulated cluster, a sweep. Each figure has
its counterpart in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offbeat.bench import RAY, work
from offbeat.engines.crew import Reply, in_process
from offbeat.engines.engine import Engine
from offbeat.engines.ray_crew import RayCrew, ray_crew
from offbeat.engines.tile_solver import TileSolver
from offbeat.engines.tile_worker import GREATEST, LEAST, Solved, Spec, Sum, Tile, TileAnswer
from offbeat.engines.tiling import Span, joined
from offbeat.engines.updates import Answer, Plan, Result
from offbeat.experiments.assemble import build_method
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.records import Begun
from offbeat.studies.plan import GBIT, Rates
from offbeat.studies.spread import Call, connected, spread

Rows = list[dict[str, Any]]
# Client-steps a second of an H200 (CNN, tf32), by clients in a wave: results/speed-h200.json.
H200 = Rates((1, 10, 50, 100, 200), (6895.0, 43039.0, 80987.0, 90290.0, 96956.0))
NUMBERS = 582_026  # of that CNN


@connected(3)
def actors(quick: bool) -> Rows:
    """Two actors against one, one thread each, and against the same tiles in this process: waves of 32 jobs of 20
    steps, one after the other in turn."""
    rows = []
    jobs_, steps, goes = (16, 5, 2) if quick else (32, 20, 5)
    for model in ("dlsgd-cnn", "mlp"):
        task = work.small_task(model, jobs_)
        method = build_method({"name": "local-sgd", "local_steps": steps})
        engines = {
            name: Engine(method, task, 0, torch.device("cpu"), crew=crew, tiling={"since": 0})
            for name, crew in (("here", in_process), ("1", ray_crew(1, None)), ("2", ray_crew(2, None)))
        }
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for go in range(goes + 1):
            for name, engine in engines.items():
                wave = [Begun(client, go, 0, steps) for client in range(jobs_)]
                began = time.perf_counter()
                answered(engine, wave)
                if go:  # in the first, steps are traced
                    taken[name].append(time.perf_counter() - began)
        best = {name: min(times) for name, times in taken.items()}
        tiles = len(tile_solver(engines["1"]).cut([Begun(c, 0, 0, steps) for c in range(jobs_)]))
        rows.append({
            "model": work.MODELS[model], "jobs": jobs_, "steps": steps, "tiles": tiles,
            "one actor: ms per client-step": 1e3 * best["1"] / (jobs_ * steps),
            "two actors": 1e3 * best["2"] / (jobs_ * steps), "two against one": best["1"] / best["2"],
            "overhead of a wave, ms": 1e3 * (best["1"] - best["here"]),
        })  # fmt: skip
        for engine in engines.values():
            engine.close()
    return rows


def answered(engine: Engine, jobs: Sequence[Begun]) -> None:
    """One wave, asked for and answered; nobody takes its updates."""
    with engine.settings:
        engine.solver.submit(engine.server.versions, jobs)
        left = len(jobs)
        while left:
            answer = engine.solver.collect()
            assert answer is not None
            left -= len(answer.jobs)
            engine.solver.release(results_of(answer))


def results_of(answer: Answer) -> list[Result]:
    return [Result(answer.updates, row, job, -1, job.client) for row, job in enumerate(answer.jobs)]


def tile_solver(engine: Engine) -> TileSolver:
    assert isinstance(engine.solver, TileSolver)
    return engine.solver


@connected(1)
def messages(quick: bool) -> Rows:
    """What the overhead of a wave comes from: an empty message there and back, a version placed and fetched, a sum
    fetched; medians."""
    task = work.small_task("mlp", 4)
    engine = Engine(
        build_method({"name": "local-sgd", "local_steps": 1}), task, 0, torch.device("cpu"), crew=ray_crew(1, None),
        tiling={"since": 0},
    )  # fmt: skip
    crew = tile_solver(engine).crew
    assert isinstance(crew, RayCrew)
    ray, actor = crew.ray, crew.live[1]
    vector = np.zeros(engine.solver.problem.model.dimension, dtype=np.float32)
    ray.get(actor.hold.remote((-9, 0), {"delta": vector[None]}))
    parts: dict[str, Callable[[], Any]] = {
        "an empty message and its answer": lambda: ray.get(actor.solve.remote([], {}, [], [])),
        "a version placed": lambda: ray.put({"model": vector}),
        "a version placed and fetched": lambda: ray.get(
            actor.solve.remote([], {0: [ray.put({"model": vector})]}, [], [])
        ),
        "a sum made and fetched": lambda: ray.get(
            actor.sums.remote([((-9, 0), [0], {"delta": np.ones(1, dtype=np.float32)})])
        ),
    }
    rows = []
    for name, part in parts.items():
        times = []
        for _ in range(20 if quick else 100):
            began = time.perf_counter()
            part()
            times.append(time.perf_counter() - began)
        rows.append({"part": name, "bytes": vector.nbytes, "ms": 1e3 * statistics.median(times)})
    engine.close()
    return rows


@connected(2)
def moved(quick: bool) -> Rows:
    """Sums against rows: bytes that travel in a run, by the same tiles on two workers. A rule that says `weigh` and
    `apply` sends sums; the same rule as `commit` has every row sent."""
    from dataclasses import replace

    rows: Rows = []
    commits = 3 if quick else 10
    task = work.small_task("mlp", 100)
    for name, options in {
        "rounds of 100": {"name": "local-sgd", "n": 100},
        "FedBuff, buffer 10": {"name": "fedbuff", "buffer_size": 10},
        "SCAFFOLD, rounds of 100": {"name": "scaffold", "n": 100},
    }.items():
        method = build_method({**options, "local_steps": 2})
        rule = method.what
        one_by_one = replace(rule, weigh=None, apply=None, commit=rule.renew)
        bytes_moved = {}
        for kind, what in (("sums", rule), ("rows", one_by_one)):
            experiment = Experiment(
                method=replace(method, what=what), task=task, device="cpu", engine="ray", workers=2,
                until={"commits": commits}, evaluate={"every_commits": 10**9},
            )  # fmt: skip
            outcome = run(experiment)
            bytes_moved[kind] = outcome.bytes_moved["sums"] + outcome.bytes_moved["rows"]
            versions = outcome.bytes_moved["versions"]
        rows.append({
            "run": name, "commits": commits, "versions, MB": versions / 1e6, "sums, MB": bytes_moved["sums"] / 1e6,
            "rows, MB": bytes_moved["rows"] / 1e6, "rows against sums": bytes_moved["rows"] / bytes_moved["sums"],
        })  # fmt: skip
    return rows


# ---- a simulated cluster ------------------------------------------------------------------------
def sleeper() -> type:
    """The class of an actor that sleeps as long as an H200 would compute and the link would carry. It is made here, so
    that it travels whole: sixteen processes need not import PyTorch to sleep."""

    class Sleeper:
        def begin(self, given: Any) -> Any:
            self.sizes, self.rates, self.numbers, self.link, least_and_most = given
            return {}, least_and_most

        def solve(self, tiles: list[tuple[int, int]], versions: int, sums: int) -> list[Any]:
            import time

            import numpy as np

            seconds = (versions + sums) * 4 * self.numbers / self.link
            for jobs, steps in tiles:
                seconds += jobs * steps / float(np.interp(jobs, self.sizes, self.rates))
            time.sleep(seconds)
            return [np.zeros(self.numbers, dtype=np.float32) for _ in range(sums)]

    return Sleeper


class SleepingCrew(RayCrew):
    """A real crew of actors of Ray, with real messages and real sums, whose work is asleep."""

    gbit = 100.0
    grace = 300.0

    def prepare(self, spec: Spec) -> tuple[Any, Any, dict[str, float]]:
        self.under_way: dict[int, tuple[list[Tile], list[Span]]] = {}
        sizes = {"least": LEAST, "most": GREATEST, "limit": 4096}
        return sleeper(), (H200.sizes, H200.rates, NUMBERS, self.gbit * GBIT, sizes), {"num_cpus": 0.0}

    def ask(self, worker: int, what: str, *given: Any) -> int:
        tiles, versions = given[0], given[1]
        numbers = {tile.key[1] for tile in tiles}  # of one wave, all of it for one commit
        spans = list(joined({(number, 1): {} for number in numbers}, numbers))
        ticket = super().ask(worker, what, [(len(t.jobs), t.jobs[0].steps) for t in tiles], len(versions), len(spans))
        self.under_way[ticket] = tiles, spans
        return ticket

    def hear(self) -> Reply | None:
        heard = super().hear()
        if heard is None or heard.ticket is None:
            return heard
        tiles, spans = self.under_way.pop(heard.ticket)
        wave, version = tiles[0].key[0], tiles[0].plans[0][0]
        sums = [Sum(wave, version, span, {"delta": value}) for span, value in zip(spans, heard.value, strict=True)]
        solved = [Solved(tile.key, [-1] * len(tile.jobs), {}, None, tile.rung) for tile in tiles]
        return heard._replace(value=TileAnswer(solved, sums, [], 0))


@connected(2)
def simulated(quick: bool) -> Rows:
    """Actors that sleep at an H200's rates on links of 100 Gbit/s, with Ray's real messages and the real driver: how
    much of n times one device is left. `alone` is one device with whole waves and no Ray."""
    rows: Rows = []
    steps, goes = 50, 2 if quick else 10
    task = work.small_task("mlp", 4)
    method = build_method({"name": "local-sgd", "local_steps": steps})
    counts, sizes = ((1, 2), (100,)) if quick else ((1, 2, 4, 8, 16), (100, 300, 1000))
    one: dict[int, float] = {}
    for count in counts:
        engine = Engine(
            method, task, 0, torch.device("cpu"), crew=partial(SleepingCrew, workers=count, address=None),
            tiling={"since": 0},
        )  # fmt: skip
        solver = engine.solver
        for size in sizes:
            times = []
            for go in range(goes + 1):
                jobs = [Begun(client, go, go, steps) for client in range(size)]
                state = {"model": torch.zeros(NUMBERS)}
                weights = {"delta": torch.full((size,), 1 / size)}
                plans = [Plan(go, [job[:2] for job in jobs], weights)]
                began = time.perf_counter()
                solver.submit({go: state}, jobs, plans)
                results: list[Result] = []
                while len(results) < size:
                    answer = solver.collect()
                    assert answer is not None
                    results += results_of(answer)
                solver.sums(go, results, weights)
                solver.release(results)
                times.append(time.perf_counter() - began)
            taken = min(times[1:])
            one.setdefault(size, taken)
            alone = H200.seconds(size, steps)
            rows.append({
                "actors": count, "wave": size, "ms per wave": 1e3 * taken, "against one actor": one[size] / taken,
                "efficiency": one[size] / taken / count, "efficiency against one device alone": alone / taken / count,
            })  # fmt: skip
        engine.close()
    return rows


# ---- a sweep ------------------------------------------------------------------------------------
def one_run(seed: int, commits: int) -> float:
    """A run of a sweep."""
    outcome = run(Experiment(
        method={"name": "fedbuff", "buffer_size": 10}, task={"name": "digits", "clients": 50, "model": "mlp"},
        seed=seed, device="cpu", until={"commits": commits},
    ))  # fmt: skip
    return float(outcome.loss_final)


@connected(2)
def sweep(quick: bool) -> Rows:
    """32 runs on one worker of one thread, and on two; both kinds of worker are warm, and their turns alternate."""
    runs, commits = (4, 20) if quick else (32, 150)
    taken: dict[int, float] = {1: 0.0, 2: 0.0}
    losses: dict[int, list[float]] = {1: [], 2: []}
    dict(spread([Call(f"{i}", one_run, (i, 5)) for i in range(4)], 2))
    for part in range(4):  # a quarter of the runs on one, then the same on two
        for workers in taken:
            seeds = range(part * runs // 4, (part + 1) * runs // 4)
            calls = [Call(f"{seed}", one_run, (seed, commits)) for seed in seeds]
            began = time.perf_counter()
            ended = dict(spread(calls, workers))
            taken[workers] += time.perf_counter() - began
            losses[workers] += [ended[place] for place in range(len(calls))]
    return [{
        "runs": runs, "one worker, s": taken[1], "two workers, s": taken[2], "two against one": taken[1] / taken[2],
        "same results": str(losses[1] == losses[2]),
    }]  # fmt: skip


TABLES: dict[str, Callable[[bool], Rows]] = dict(zip(RAY, (actors, messages, moved, simulated, sweep), strict=True))
