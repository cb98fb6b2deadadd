"""What more devices would bring: seconds of a wave on 1, 2, 4, ... workers, from rates that were measured on this one.

A wave is cut as `engines/tiling.py` cuts it; tiles go to whoever is free. A tile takes its steps at the measured
rate of its size. Every message costs the driver some time, one after the other; versions and sums share the driver's
link. Transfers go on behind the computing, but for the first version and the last sum.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offbeat.engines.crew import InProcess
from offbeat.engines.engine import Engine
from offbeat.engines.tiling import pieces, share, tile_size
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.records import Begun
from offbeat.schedule.device import OWN_STEPS

CALL = 1.1e-3  # seconds of the driver for a message and its answer; measured by `offbeat bench ray` on two cores
GBIT = 1.25e8  # bytes


@dataclass(frozen=True)
class Rates:
    """Client-steps a second of one device, by the jobs in a tile; between sizes in proportion."""

    sizes: tuple[int, ...]
    rates: tuple[float, ...]

    def seconds(self, jobs: int, steps: int) -> float:
        return jobs * steps / self.of(jobs)

    def of(self, jobs: int) -> float:
        """
        >>> Rates((1, 10), (100.0, 1000.0)).of(4), Rates((1, 10), (100.0, 1000.0)).of(64)
        (400.0, 1000.0)
        """
        place = bisect_left(self.sizes, jobs)
        if place == 0 or place == len(self.sizes):
            return self.rates[min(place, len(self.sizes) - 1)]
        low, high = self.sizes[place - 1], self.sizes[place]
        share = (jobs - low) / (high - low)
        return self.rates[place - 1] + share * (self.rates[place] - self.rates[place - 1])


@dataclass(frozen=True)
class Work:
    """One wave of a run: so many jobs of so many steps, vectors of so many bytes, commits that it serves."""

    jobs: int
    steps: int
    vector: float
    commits: int = 1
    rows: bool = False  # the rule needs every update as a row
    tiling: Mapping[str, int] | None = None

    @property
    def tiles(self) -> list[int]:
        assert self.tiling is not None
        return [len(piece) for piece in pieces(range(self.jobs), tile_size(self.jobs, self.tiling))]


def wave_seconds(work: Work, rates: Rates, workers: int, gbit: float, call: float = CALL) -> dict[str, float]:
    """Of a wave in tiles: its wall time, and what it would be by computing, by the driver and by its link alone."""
    tiles, free = work.tiles, [0.0] * workers
    queue, messages = list(tiles), 0
    while queue:  # about as `TileSolver.dispatch` hands them out
        many = share(len(queue), workers)
        for worker in sorted(range(workers), key=free.__getitem__):
            batch, queue = queue[:many], queue[many:]
            if batch:
                messages += 1
                busy = sum(rates.seconds(jobs, work.steps) for jobs in batch)
                free[worker] = max(free[worker], messages * call / 2) + busy
    back = (work.jobs if work.rows else len(tiles) + work.commits - 1) * work.vector
    out = work.commits * workers * work.vector
    link = (back + out) / (gbit * GBIT)
    edges = 2 * work.vector / (gbit * GBIT) + call / 2
    computing, driver = max(free) + edges, messages * call
    return {"seconds": max(computing, driver, link), "computing": computing, "driver": driver, "link": link}


def table(work: Work, rates: Rates, most: int, gbit: float, call: float = CALL) -> list[dict[str, Any]]:
    """A row for 1, 2, 4, ... workers, against whole waves on one device without any of this."""
    whole, rows = rates.seconds(work.jobs, work.steps), []
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    for workers in dict.fromkeys([*counts, most]):
        wave = wave_seconds(work, rates, workers, gbit, call)
        bound = max(("computing", "driver", "link"), key=wave.__getitem__)
        rows.append({
            "workers": workers, "ms per wave": 1e3 * wave["seconds"], "against one alone": whole / wave["seconds"],
            "efficiency": whole / wave["seconds"] / workers, "bound by": bound,
            "driver ms": 1e3 * wave["driver"], "link ms": 1e3 * wave["link"],
        })  # fmt: skip
    return rows


def measured(engine: Engine, sizes: Sequence[int], steps: int, least: float, say: Callable[[str], None]) -> Rates:
    """The rates of this device for tiles of these sizes."""
    rates = []
    clients = len(engine.server.sizes)
    for size in sizes:
        say(f"measuring tiles of {size}")
        jobs = [Begun(row % clients, row // clients, 0, steps, row // clients * steps) for row in range(size)]
        best, began, goes = float("inf"), time.perf_counter(), 0
        while goes < 6 or time.perf_counter() - began < least:
            best = min(best, seconds_of(engine, jobs))
            goes += 1
        rates.append(size * steps / best)
    return Rates(tuple(sizes), tuple(rates))


def seconds_of(engine: Engine, jobs: Sequence[Begun]) -> float:
    finish(engine.device)
    began = time.perf_counter()
    engine.solve(jobs)
    finish(engine.device)
    return time.perf_counter() - began


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan(
    experiment: Experiment, most: int, gbit: float, jobs: int | None = None, seconds: float = 2.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """What up to `most` devices like this one would bring for the waves of an experiment."""
    built = build(replace(experiment, engine="local"))
    engine = built.engine()
    steps = built.method.when.orders or OWN_STEPS
    many = jobs or built.method.when.cohort or built.units
    tiling = {"parts": 16, **InProcess(engine.spec).sizes}
    size = tile_size(many, tiling)
    sizes = sorted({1, max(1, size // 2), size, min(many, tiling["limit"])})
    rates = measured(engine, sizes, min(steps, 50), seconds, say)
    rows = built.method.what.commit is not None
    vector = float(engine.solver.problem.model.dimension * engine.solver.problem.model.dtype.itemsize)
    sent = vector * len(built.method.what.local.sends)
    work = Work(many, steps, sent, max(1, many // (built.method.when.cohort or many)), rows, tiling)
    return {
        "jobs in a wave": many, "steps": steps, "tiles": len(work.tiles), "jobs in a tile": size,
        "bytes of a version": vector, "travels back": "rows" if rows else "sums", "link Gbit/s": gbit,
        "rates": dict(zip(map(str, rates.sizes), rates.rates, strict=True)),
        "table": table(work, rates, most, gbit),
    }  # fmt: skip
