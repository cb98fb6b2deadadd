"""An engine makes the commits of a run: it pulls the schedule, has jobs computed in lazy waves, and tells the server.

A job is computed when a commit needs it, and then every other job goes along that will be consumed and whose start
version is ready. Updates that no commit consumes are never computed, unless they move a client's memory. Commits are
the only barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import keys
from offbeat.choices import Choice, Mode, Precision
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings, cores
from offbeat.engines.solver import LocalSolver
from offbeat.errors import BadNumbers, ConfigError, OffbeatError
from offbeat.method import Method, Update
from offbeat.numerics.evaluation import Figure, training_loss
from offbeat.numerics.mixing import Blocks
from offbeat.numerics.wave import Outcome, Problem
from offbeat.records import Begun, JobName
from offbeat.schedule.horizon import Horizon, Step
from offbeat.stages import received
from offbeat.tasks.looks import Looks, Watch
from offbeat.tasks.task import Task

FORMAT = 4  # of a checkpoint's facts


class Done(NamedTuple):
    """One commit made."""

    version: int  # the new one
    step: Step
    staleness: list[int]


@dataclass
class Result:
    """A computed update that waits for its commit: one row of a wave."""

    updates: Update
    row: int
    job: Begun
    bad: int  # the first local step that went wrong, or -1 ...
    client: int  # ... and on which client


def pick_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError([f"device = '{name}'; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError([f"device = '{name}', but no CUDA device is there; use --device cpu"])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError([f"device = '{name}', but only {torch.cuda.device_count()} CUDA device(s) are there"])
    return device


class Engine:
    """A server, a solver, and the updates between them. `commits(horizon)` yields as commits are made."""

    def __init__(
        self, method: Method, task: Task, seed: int, device: torch.device, precision: Precision = "float32",
        mode: Mode = "wave", memory_gib: float | None = None, capture: bool = True, client_memory: Choice = "auto",
        blocks: Blocks | None = None, threads: int | None = None, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.method, self.device, self.precision, self.blocks = method, device, precision, blocks
        self.settings = Settings(precision, device, threads or cores())
        self.jobs_computed = 0
        self.results: dict[JobName, Result] = {}
        with self.settings:
            dtype = torch.float64 if precision == "float64" else torch.float32
            model = task.flat_model(dtype, precision == "bf16").to(device)
            samples = task.samples(dtype).to(device)
            problem = Problem(model, samples, method.what.local, seed)
            members = None if blocks is None else blocks.members
            self.server = Server(method, model.initial(), seed, samples.sizes, members, client_memory)
            self.solver = LocalSolver(
                problem, blocks, mode, self.threads, self.settings.side_by_side, memory_gib, capture, client_memory
            )
            if method.what.prime is not None:
                self.prime()
            self.looks = Looks(task, watch or Watch(), model, samples)

    @property
    def version(self) -> int:
        return self.server.version

    @property
    def threads(self) -> int:
        """What the rules of rounding go by on a processor."""
        return self.settings.threads

    @torch.no_grad()
    def prime(self) -> None:
        """Begin with every client's gradient over its shard at version 0."""
        rule, server, many = self.method.what, self.server, len(self.server.sizes)
        assert rule.share is not None
        share = rule.share(server.cohort(range(many), [0] * many, [1] * many))
        model = server.broadcast()["model"]
        mean = torch.zeros_like(model)
        for clients, gradients in self.solver.opening(model):
            arrived = received(rule.up, gradients, keys.key(server.seed, "prime", clients))
            mean += share[clients].to(mean.dtype) @ arrived
            if server.kept is not None:
                server.kept.write(clients, dict.fromkeys(rule.keeps, arrived))
        server.prime(mean)

    # ---- the loop -------------------------------------------------------------------------------
    def commits(self, horizon: Horizon) -> Iterator[Done]:
        for step in horizon:
            distinct = dict.fromkeys(step.commit.jobs)
            while urgent := sum(job not in self.results for job in distinct):
                ready = horizon.ready(self.version)[: self.solver.limit]
                self.compute(horizon, ready[: self.solver.fitting(len(ready), urgent)])
            yield self.commit(step, horizon)

    def solve(self, jobs: Sequence[Begun]) -> Outcome:
        """What these jobs come to, from the versions that the server has."""
        with self.settings:
            return self.solver.solve(self.server.versions, jobs)

    def compute(self, horizon: Horizon, jobs: list[Begun]) -> None:
        """One wave: its updates wait for their commits."""
        outcome = self.solve(jobs)
        self.jobs_computed += len(jobs)
        updates = outcome.updates if self.blocks is None else self.blocks.reported(outcome.updates, jobs)
        results = [Result(updates, row, job, -1, job.client) for row, job in enumerate(jobs)]  # it is still computing
        for job in jobs:
            horizon.computed(job[:2])
        horizon.fill()
        rows = jobs if self.blocks is None else self.blocks.rows(jobs)
        wrong = iter(zip(outcome.bad.tolist(), rows, strict=True))
        for result in results:
            devices = islice(wrong, self.blocks.size(result.job) if self.blocks else 1)
            faults = [(step, row.client) for step, row in devices if step >= 0]
            result.bad, result.client = min(faults, default=(-1, result.job.client))
            if horizon.consumed(result.job[:2]):
                self.results[result.job[:2]] = result
        while horizon.lost:
            self.results.pop(horizon.lost.pop(), None)

    def commit(self, step: Step, horizon: Horizon) -> Done:
        results = [self.results[job] for job in step.commit.jobs]
        for result in results:
            if result.bad >= 0:
                raise BadNumbers(self.complaint(result))
        local = self.method.what.local
        with self.settings, torch.no_grad():
            updates = {name: gathered(results, name) for name in (*local.sends, *local.numbers)}
            staleness = self.server.commit([result.job for result in results], updates)
        for job in set(step.commit.jobs):
            del self.results[job]
        self.server.forget(horizon.driver.floor, horizon.held)
        return Done(self.version, step, staleness)

    def settle(self, horizon: Horizon) -> None:
        """Strike off the jobs of a horizon that were computed before a checkpoint."""
        for job in self.results:
            horizon.computed(job)
        for job in [job for job in horizon.wanted if self.solver.has_moved(*job)]:
            horizon.computed(job)

    def complaint(self, result: Result) -> str:
        job = result.job
        what = "its update" if result.bad >= job.steps else f"the loss at local step {result.bad}"
        whose = f"client {result.client}" + (f" (cluster {job.client})" if self.blocks else "")
        return (
            f"{whose}, version {job.version}: {what} is not finite (job {job.job}, {job.steps} steps). "
            f"The run stopped at commit {self.version}; all that was committed before is kept. "
            "A lower client rate or clipping usually helps; NaN in the data is another cause."
        )

    # ---- what a run shows -----------------------------------------------------------------------
    def evaluate(self) -> dict[str, Any]:
        """The metrics of the newest version."""
        with self.settings, torch.no_grad():
            return self.looks(self.server.state["model"])

    @property
    def figures(self) -> dict[str, Figure]:
        """What each metric is."""
        return self.looks.figures

    def faults(self) -> dict[str, str]:
        """What metrics said that failed."""
        return dict(self.looks.faults.first)

    def client_figures(self) -> dict[str, list[float | None]]:
        """What the last evaluation found of each client."""
        return self.looks.of_clients(len(self.server.sizes))

    def training_loss(self) -> float:
        """f at the newest version: the mean over clients of their mean losses."""
        with self.settings, torch.no_grad():
            problem = self.solver.problem
            return training_loss(problem.model, problem.samples, self.server.state["model"])

    def finite(self) -> bool:
        return bool(self.server.state["model"].isfinite().all())

    def model(self) -> dict[str, Tensor]:
        """The newest version by parameter name, as `load_state_dict` takes it; frozen ones too."""
        flat = self.solver.problem.model
        named = dict(flat.module.named_parameters()) | flat.views(self.server.state["model"])
        return {name: value.detach().contiguous().clone().cpu() for name, value in named.items()}

    def report(self) -> dict[str, Any]:
        """What a result says of how it was computed."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "precision": self.precision,
            "jobs_computed": self.jobs_computed,
            "waves": self.solver.waves,
            "mode": self.solver.mode,
            "rung": self.solver.rung,
            "notes": self.solver.notes,
        }

    # ---- checkpoints ----------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the plain facts: with them a resumed run goes on with the same bits."""
        own, facts = self.solver.save()
        tensors = self.server.save() | own
        for (client, job), result in self.results.items():
            tensors |= {f"result/{client}/{job}/{name}": u[result.row] for name, u in result.updates.items()}
        facts |= {
            "format": FORMAT,
            "version": self.version,
            "threads": self.threads,
            "jobs_computed": self.jobs_computed,
            "results": [[*r.job, r.bad, r.client] for r in self.results.values()],
        }
        return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if facts.get("format") != FORMAT:
            raise OffbeatError("the checkpoint was written by another version of Offbeat; start the run anew")
        self.follow(facts)
        self.server.restore(tensors, facts["version"])
        self.solver.restore(tensors, facts)
        self.jobs_computed, self.results = facts["jobs_computed"], {}
        names = (*self.method.what.local.sends, *self.method.what.local.numbers)
        for *begun, bad, client in facts["results"]:
            job = Begun(*begun)
            rows = {name: tensors[f"result/{job.client}/{job.job}/{name}"].to(self.device)[None] for name in names}
            self.results[job[:2]] = Result(rows, 0, job, bad, client)

    def follow(self, facts: dict[str, Any]) -> None:
        """Round as the run did that left these facts."""
        self.settings.threads = facts["threads"]
        self.solver.follow(facts["record"], facts["threads"])


def gathered(results: list[Result], name: str) -> Tensor:
    """One vector of each update, in order; rows of the same wave are taken together."""
    waves: dict[int, list[int]] = {}  # places in `results`, by wave
    for place, result in enumerate(results):
        waves.setdefault(id(result.updates), []).append(place)
    order = [place for places in waves.values() for place in places]
    rows = [results[place].row for place in order]
    vectors = [results[places[0]].updates[name] for places in waves.values()]
    if len(vectors) == 1 and rows == list(range(len(vectors[0]))):
        return vectors[0]
    back = sorted(range(len(order)), key=order.__getitem__)
    which, home = torch.tensor([rows, back]).to(vectors[0].device, non_blocking=True)
    parts = zip(vectors, which.split([len(places) for places in waves.values()]), strict=True)
    together = [wave.index_select(0, mine) for wave, mine in parts]
    return together[0] if len(together) == 1 else torch.cat(together).index_select(0, home)
