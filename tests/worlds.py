"""Small worlds that tests share: fleets with given times, tasks with known answers, and a plain way to run a method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offbeat.engines.engine import Done, Engine
from offbeat.experiments import cluster_views
from offbeat.experiments.assemble import build_method
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.method import Method
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.device import OWN_STEPS, Durations
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.hybrid import Hybrid
from offbeat.tasks.quadratic import quadratic, random_quadratic
from offbeat.tasks.task import Task


@dataclass(frozen=True)
class Times(Durations):
    """Constant durations per client."""

    down: Sequence[float]
    step: Sequence[float]
    up: Sequence[float]
    steps: Sequence[int] = ()  # of clients that may choose; empty: the usual number

    def own_steps(self, client: int, job: int) -> int:
        return self.steps[client] if self.steps else OWN_STEPS

    @property
    def clients(self) -> int:
        return len(self.step)

    @property
    def download_bound(self) -> float:
        return max(self.down)

    def download(self, client: int, job: int) -> float:
        return self.down[client]

    def compute(self, client: int, job: int, steps: int) -> float:
        return steps * self.step[client]

    def upload(self, client: int, job: int) -> float:
        return self.up[client]

    def fails(self, client: int, job: int) -> float | None:
        return None

    def presence(self, client: int) -> Iterator[tuple[float, bool]] | None:
        return None


def times(clients: int, slowest: float = 5.0, transfer: float = 0.3, seed: int = 0, steps: Sequence[int] = ()) -> Times:
    rng = np.random.default_rng(seed)
    return Times(
        list(transfer * rng.uniform(0.5, 1, clients)),
        list(rng.uniform(1, slowest, clients) / 10),
        list(transfer * rng.uniform(0.5, 1, clients)),
        steps,
    )


def quadratic_world(clients: int = 8, dimension: int = 4, noise: float = 0.5, samples: int = 6) -> Task:
    matrices, linear = random_quadratic(clients, dimension, seed=3)
    return quadratic(matrices, linear, np.ones(dimension), noise, samples, seed=1)


def engine_of(
    made: Method, task: Task, durations: Any, mode: Any = "wave", seed: int = 0, clusters: Any = None
) -> Engine:
    """An engine in float64 on the CPU. Under a hybrid policy those whose times are given are clusters: rings of the
    task's clients, of unequal sizes where the clients allow it, or as `clusters` says."""
    blocks = None
    if isinstance(made.when, Hybrid):
        ends = np.sort(np.random.default_rng(5).permutation(np.arange(1, task.clients))[: durations.clients - 1])
        sizes = np.diff([0, *ends, task.clients]).tolist()
        fleet = build("equal", task.clients, clusters=clusters or {"sizes": sizes})
        blocks = cluster_views.blocks(fleet, made.when, seed)
    return Engine(made, task, seed, torch.device("cpu"), "float64", mode, blocks=blocks)


def play(
    method: Method | dict[str, Any], task: Task, durations: Any, commits: int = 30, mode: Any = "wave", seed: int = 0,
    clusters: Any = None,
) -> tuple[Engine, list[Done]]:  # fmt: skip
    """Run a method in float64 on the CPU and give back the engine and its commits."""
    made = method if isinstance(method, Method) else build_method(method)
    engine = engine_of(made, task, durations, mode, seed, clusters)
    clock = VirtualClock(made.when, durations, generator(seed, "policy"))
    return engine, list(engine.commits(Horizon(clock, 256, commits, memory=bool(made.what.local.remembers))))


def final(
    method: Method | dict[str, Any], task: Task, durations: Any, commits: int = 30, **options: Any
) -> torch.Tensor:
    return play(method, task, durations, commits, **options)[0].server.state["model"]
