"""The small worlds in which laws are tried, and the runs that several laws look at."""

from __future__ import annotations

import random
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.errors import ConfigError
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import replay, resume, run
from offbeat.method import Method, Policy, conducts_clusters
from offbeat.records import Row
from offbeat.runs.outcome import Outcome
from offbeat.runs.stored import read_trace
from offbeat.tasks.quadratic import quadratic, random_quadratic
from offbeat.tasks.task import Task

CLIENTS = (8, 12, 16, 24, 32, 64, 128, 256)  # the first that the policy can do with
CLUSTERS = (5, 3, 4)  # sizes, again and again
STEPS = (3, 1, 4, 2, 6, 3, 5, 2)  # of clients that choose, again and again
COMMITS, HALF = 12, 5
TOLERANCE = 1e-12  # in float64: what is added up in another order
Make = Callable[[], Method]


@dataclass(frozen=True)
class Alone:
    """A method with options under which one client is plain SGD, of so many steps (None: those of its jobs) at this
    rate (None: the client's)."""

    make: Make
    rate: float | None = None
    steps: int | None = None


class Passed(Exception):
    """A law that does not apply; says why."""


def clients_for(policy: Policy) -> tuple[int, Sequence[int]]:
    """How many clients a policy needs, and the sizes of their clusters if it speaks of those."""
    problems: list[str] = []
    for clients in CLIENTS:
        sizes: tuple[int, ...] = ()
        if conducts_clusters(policy):
            many = clients // len(CLUSTERS)
            sizes = (CLUSTERS * many)[:many] if policy.server else (clients,)
        if not (problems := policy.problems(len(sizes) or clients)):
            return sum(sizes) or clients, sizes
    raise ConfigError([f"its policy cannot run with {' or '.join(map(str, CLIENTS))} clients: {problems[0]}"])


def fleet_for(policy: Policy, clients: int, sizes: Sequence[int], name: str = "straggling") -> dict[str, Any]:
    fleet: dict[str, Any] = {"name": name}
    if sizes:
        fleet["clusters"] = {"sizes": list(sizes)}
    if policy.orders is None:
        fleet["local_steps"] = [STEPS[client % len(STEPS)] for client in range(clients)]
    return fleet


def bowls(clients: int) -> Task:
    """Quadratics with noisy gradients."""
    matrices, linear = random_quadratic(clients, 4, seed=3)
    return quadratic(matrices, linear, np.ones(4), 0.5, 6, seed=1)


def network(clients: int) -> Task:
    """A small network on random samples, a dozen for each client but the last, which has 5."""
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(12 * clients, 5, generator=rng)
    y = torch.randint(0, 3, (12 * clients,), generator=rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    shards = [range(12 * client, 12 * client + (12 if client < clients - 1 else 5)) for client in range(clients)]
    return Task(model, torch.nn.functional.cross_entropy, (x, y), shards, batch_size=4, name="network")


@dataclass
class Trial:
    """A method on its trial. Every run gets the method anew from `make`, as a new process would."""

    make: Make
    alone: Alone | None = None

    @cached_property
    def path(self) -> Path:
        """A directory for its runs, which goes when the trial goes."""
        path = tempfile.mkdtemp(prefix="offbeat-laws-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)

    @cached_property
    def experiment(self) -> Experiment:
        """On quadratics; without its method."""
        method = self.make()
        clients, sizes = clients_for(method.when)
        if method.what.clients is not None and not sizes:
            clients = method.what.clients
        fleet = fleet_for(method.when, clients, sizes)
        return Experiment(
            task=bowls(clients), fleet=fleet, device="cpu", precision="float64", until={"commits": COMMITS},
            evaluate={"every_commits": 6}, checkpoint_seconds=1e-9,
        )  # fmt: skip

    @cached_property
    def straight(self) -> Outcome:
        return self.run("straight")

    @cached_property
    def trace(self) -> list[Row]:
        assert self.straight.commits == COMMITS
        return read_trace(self.path / "straight")

    def run(self, name: str | None = None, **changes: Any) -> Outcome:
        """A run of the method, into a directory of that name if there is one."""
        experiment = replace(self.experiment, **{"method": self.make(), **changes})
        with quiet():
            return run(experiment, None if name is None else self.path / name, overwrite=True)

    def resumed(self) -> Outcome:
        self.run("resumed", until={"commits": HALF})
        with quiet():
            return resume(self.path / "resumed", {"commits": COMMITS}, method=self.make(), task=self.experiment.task)

    def replayed(self) -> Outcome:
        assert self.straight.commits == COMMITS
        with quiet():
            return replay(self.path / "straight", method=self.make(), task=self.experiment.task)


@contextmanager
def quiet() -> Iterator[None]:
    """Notes on speed are not what a law is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def distance(one: Outcome, other: Outcome) -> float:
    """The largest difference between two models, against the larger of 1 and the largest number in them."""
    pairs = [(one.model[name], other.model[name]) for name in one.model]
    size = max(1.0, *(float(a.abs().max()) for a, _ in pairs))
    return max(float((a - b).abs().max()) for a, b in pairs) / size


def same_bits(one: Outcome, other: Outcome) -> bool:
    return all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def generators() -> dict[str, Any]:
    """The states of the generators that nobody keys, by name."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": tuple(torch.get_rng_state().tolist()),
        "numpy.random": (state[0], tuple(state[1].tolist()), *state[2:]),
        "random": random.getstate(),
    }
