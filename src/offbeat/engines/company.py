"""Trials in company: several methods that differ by their rates alone go through one schedule together.

Time never depends on values, so such trials have one trace: the same jobs with the same batches. Each has a server of
its own; a wave holds every trial's copy of a job. A row's version says whose it is (`trial << 32 | version`), and the
rates of the common local rule are looked up by it. What a trial computes is what it would compute alone; sums may be
rounded in another way, as in any wave of another size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch

from offbeat.engines.engine import Engine, prime
from offbeat.engines.server import Server
from offbeat.engines.solver import LocalSolver
from offbeat.engines.updates import Result, gathered
from offbeat.errors import BadNumbers
from offbeat.method import ClientRate, Local, Method, State, StepRate
from offbeat.records import TRIAL, VERSION, Begun, JobName
from offbeat.schedule.horizon import Horizon, Step


def shareable(method: Method) -> str | None:
    """Why trials of a method cannot share waves, or None."""
    return f"{method.name} steps in clusters" if method.when.speaks_of == "clusters" else None


def share_steps(methods: Sequence[Method]) -> bool:
    """Whether the local rules differ by their `rates` alone. One that takes its rate from elsewhere, such as the option
    that its function was called with, is another rule."""
    first, *others = (method.what.local for method in methods)
    return all(same(first, other) for other in others)


def same(one: Any, other: Any, above: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two things do the same: functions by their code and what they close over, rules but for their rates."""
    if one is other or (id(one), id(other)) in above:
        return True
    if type(one) is not type(other):
        return False
    alike = partial(same, above=above | {(id(one), id(other))})
    if isinstance(one, type):
        return bool((one.__module__, one.__qualname__) == (other.__module__, other.__qualname__))
    if isinstance(one, Local):
        return alike(vars(one) | {"rates": None}, vars(other) | {"rates": None})
    if isinstance(one, FunctionType):
        cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other)]
        ours = (one.__code__, one.__defaults__, one.__kwdefaults__, cells[0])
        return alike(ours, (other.__code__, other.__defaults__, other.__kwdefaults__, cells[1]))
    if isinstance(one, partial):
        return alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    try:
        equal = bool(one == other)
    except Exception:  # arrays, and whatever a type of one's own says
        equal = False
    return equal or (hasattr(one, "__dict__") and alike(vars(one), vars(other)))


def together(rates: Sequence[ClientRate]) -> ClientRate:
    """One rate for all trials, by whose version it is asked."""
    if any(isinstance(rate, StepRate) for rate in rates):
        steps = [rate if isinstance(rate, StepRate) else by_version(rate) for rate in rates]
        return StepRate(lambda version, step, many: steps[version >> TRIAL].at(version & VERSION, step, many))
    plain = [rate for rate in rates if not isinstance(rate, StepRate)]
    return lambda version: plain[version >> TRIAL](version & VERSION)


def by_version(rate: ClientRate) -> StepRate:
    return rate if isinstance(rate, StepRate) else StepRate(lambda version, step, steps: rate(version))


def common(methods: Sequence[Method]) -> Method:
    """A method whose clients follow the rates of all of them."""
    first = methods[0].what
    names = first.local.rates
    rates = {name: together([method.what.local.rates[name] for method in methods]) for name in names}
    return replace(methods[0], what=replace(first, local=replace(first.local, rates=rates)))


class Versions(Mapping[int, State]):
    """What each version of each trial broadcast."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers

    def __getitem__(self, key: int) -> State:
        return self.servers[key >> TRIAL].versions[key & VERSION]

    def __iter__(self) -> Iterator[int]:
        return (trial << TRIAL | version for trial, server in enumerate(self.servers) for version in server.versions)

    def __len__(self) -> int:
        return sum(len(server.versions) for server in self.servers)


class Company:
    """Trials that are computed together. `engine` was made with `common(methods)`: its solver and looks serve all."""

    def __init__(self, engine: Engine, methods: Sequence[Method]) -> None:
        self.engine = engine
        first, model = engine.server, engine.flat
        whole = methods if model.ruled is None else [model.ruled.method(method) for method in methods]
        self.servers = [Server(method, model.initial(), first.seed, first.sizes, None) for method in whole]
        self.results: list[dict[JobName, Result]] = [{} for _ in methods]
        self.live = list(range(len(methods)))
        self.failed: dict[int, str] = {}  # trials that stopped on bad numbers, and why
        self.versions = Versions(self.servers)
        assert isinstance(engine.solver, LocalSolver)
        engine.solver.remember(len(methods))
        prime(self.servers, engine.solver)

    def commits(self, horizon: Horizon) -> Iterator[tuple[Step, list[int]]]:
        """Makes the commits of every trial that lives; ends when none does."""
        for step in horizon:
            distinct = dict.fromkeys(step.commit.jobs)
            while self.live and any(job not in self.results[self.live[0]] for job in distinct):
                most = max(1, self.engine.solver.limit // len(self.live))
                self.compute(horizon, horizon.ready(self.servers[self.live[0]].version)[:most])
            if not self.live:
                return
            staleness = self.commit(step, horizon)
            if not self.live:
                return
            yield step, staleness

    def compute(self, horizon: Horizon, jobs: list[Begun]) -> None:
        rows = [job._replace(version=trial << TRIAL | job.version) for trial in self.live for job in jobs]
        with self.engine.settings:
            outcome = self.engine.solver.solve(self.versions, rows)
        for job in jobs:
            horizon.computed(job[:2])
        horizon.fill()
        bad = outcome.bad.tolist()
        for place, trial in enumerate(self.live):
            for number, job in enumerate(jobs):
                row = place * len(jobs) + number
                if horizon.consumed(job[:2]):
                    self.results[trial][job[:2]] = Result(outcome.updates, row, job, bad[row], job.client)
        for gone in horizon.take_lost():
            for trial in self.live:
                self.results[trial].pop(gone, None)

    def commit(self, step: Step, horizon: Horizon) -> list[int]:
        staleness: list[int] = []
        for trial in list(self.live):
            server, results = self.servers[trial], [self.results[trial][job] for job in step.commit.jobs]
            wrong = next((result for result in results if result.bad >= 0), None)
            if wrong is not None:
                self.drop(trial, f"client {wrong.client}, version {wrong.job.version}: its numbers are not finite")
                continue
            local = server.method.what.local
            with self.engine.settings, torch.no_grad():
                updates = {name: gathered(results, name) for name in (*local.sends, *local.numbers)}
                try:
                    staleness = server.commit([result.job for result in results], updates)
                except BadNumbers as error:
                    self.drop(trial, str(error))
                    continue
                if not bool(server.model.isfinite().all()):
                    self.drop(trial, f"the model after commit {server.version} is not finite")
                    continue
            for job in set(step.commit.jobs):
                del self.results[trial][job]
            server.forget(horizon.needs)
        return staleness

    def drop(self, trial: int, reason: str | None = None) -> None:
        """Leave a trial out from here on."""
        self.live.remove(trial)
        self.results[trial] = {}
        if reason is not None:
            self.failed[trial] = reason

    def evaluate(self, trial: int) -> dict[str, float | None]:
        with self.engine.settings, torch.no_grad():
            self.engine.flat.use_buffers(self.servers[trial].state)
            return self.engine.looks(self.servers[trial].model)
