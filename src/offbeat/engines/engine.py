"""An engine makes the commits of a run: it pulls the schedule, has jobs computed in lazy waves, and tells the server.

A job is computed when a commit needs it, and then every other job goes along that will be consumed and whose start
version is ready. Updates that no commit consumes are never computed, unless they move a client's memory. Commits are
the only barrier. A solver may be far away: it answers in any order, and a commit waits for its own jobs alone. Which
jobs make a wave never depends on when answers come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import keys
from offbeat.config.choices import Choice, Mode, Precision
from offbeat.engines.crew import CrewMaker, in_process
from offbeat.engines.newest import Newest
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings, cores
from offbeat.engines.solver import LocalSolver, Solver, captured_steps
from offbeat.engines.stepping import PlainSteps
from offbeat.engines.tile_solver import TileSolver
from offbeat.engines.tile_worker import Spec
from offbeat.engines.updates import Answer, Plan, Result
from offbeat.errors import BadNumbers, ConfigError, OffbeatError
from offbeat.method import Method
from offbeat.numerics.batch_norm import normalised
from offbeat.numerics.evaluation import training_loss
from offbeat.numerics.mixing import Blocks
from offbeat.numerics.wave import Outcome, Problem
from offbeat.records import Begun, JobName
from offbeat.schedule.horizon import Horizon, Step
from offbeat.stages import received
from offbeat.tasks.looks import Looks, Watch
from offbeat.tasks.task import Task

FORMAT = 5  # of a checkpoint's facts


class Done(NamedTuple):
    """One commit made."""

    version: int  # the new one
    step: Step
    staleness: list[int]


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


@torch.no_grad()
def prime(servers: Sequence[Server], solver: Solver) -> None:
    """Where a rule asks for it, begin with every client's gradient over its shard at version 0; `servers` have it in
    common."""
    first, rule = servers[0], servers[0].method.what
    if rule.prime is None:
        return
    assert rule.share is not None
    many, model = len(first.sizes), first.broadcast()["model"]
    share = rule.share(first.cohort(range(many), [0] * many, [1] * many))
    mean = torch.zeros_like(model)
    for clients, gradients in solver.opening(model):
        arrived = received(rule.up, gradients, keys.key(first.seed, "prime", clients))
        mean += share[clients].to(mean.dtype) @ arrived
        for server in servers:
            server.keep(clients, arrived)
    for server in servers:
        server.prime(mean)


class Engine(Newest):
    """A server, a solver, and the updates between them. `commits(horizon)` yields as commits are made."""

    def __init__(
        self, method: Method, task: Task, seed: int, device: torch.device, precision: Precision = "float32",
        mode: Mode = "wave", memory_gib: float | None = None, capture: bool = True, client_memory: Choice = "auto",
        blocks: Blocks | None = None, threads: int | None = None, crew: CrewMaker = in_process,
        tiling: Mapping[str, int] | None = None, watch: Watch | None = None, facts: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Waves are whole, or, from wave number `tiling["since"]` on, cut into tiles that a crew computes. It rounds as
        the run did that left these `facts`."""
        self.method, self.device, self.precision, self.blocks = method, device, precision, blocks
        self.settings = Settings(precision, device, facts["threads"] if facts else threads or cores())
        self.jobs_computed = 0
        self.results: dict[JobName, Result] = {}
        self.awaited: dict[JobName, Begun] = {}  # asked for, and not answered yet
        self.unwanted: set[JobName] = set()  # of these: no commit takes them
        self.refused = 0  # answers to what was not asked, or was answered before
        self.crew, self.tiling = crew, tiling  # how waves are to be cut; None where they are, or never will be
        with self.settings:
            dtype = torch.float64 if precision == "float64" else torch.float32
            model = self.flat = task.flat_model(dtype, precision == "bf16").to(device)
            method = self.method = normalised(method, model.statistics, model.rule)
            samples = task.samples(dtype).to(device)
            problem = Problem(model, samples, method.what.local, seed)
            rows = method.what.commit is not None
            self.spec = Spec(problem, blocks, precision, mode, memory_gib, client_memory, rows)
            members = None if blocks is None else blocks.members
            self.server = Server(method, model.initial(), seed, samples.sizes, members, client_memory)
            self.solver: Solver
            if tiling is not None and not tiling["since"]:
                self.solver, self.tiling = TileSolver(problem, self.spec, crew, tiling), None
            else:
                steps = captured_steps(problem, self.threads, self.settings.side_by_side) if capture else PlainSteps()
                self.solver = LocalSolver(problem, blocks, mode, steps, memory_gib, client_memory)
            if facts is not None:
                self.follow(facts)
            prime([self.server], self.solver)
            self.looks = Looks(task, watch or Watch(), model, samples)

    @property
    def threads(self) -> int:
        """What the rules of rounding go by on a processor."""
        return self.settings.threads

    # ---- the loop -------------------------------------------------------------------------------
    def commits(self, horizon: Horizon) -> Iterator[Done]:
        for step in horizon:
            distinct = dict.fromkeys(step.commit.jobs)
            while urgent := sum(job not in self.results and job not in self.awaited for job in distinct):
                if self.tiling is not None and self.tiling["since"] == self.solver.waves:
                    self.cut_tiles()
                ready = horizon.ready(self.version)[: self.solver.limit]
                self.compute(horizon, ready[: self.solver.fitting(len(ready), urgent)], step)
            while any(job in self.awaited for job in distinct):
                self.take(self.answer())
            yield self.commit(step, horizon)

    def solve(self, jobs: Sequence[Begun]) -> Outcome:
        """What these jobs come to, from the versions that the server has."""
        with self.settings:
            return self.solver.solve(self.server.versions, jobs)

    def compute(self, horizon: Horizon, jobs: list[Begun], step: Step) -> None:
        """Ask for a wave; while it is computed, the schedule goes on."""
        with self.settings:
            self.solver.submit(self.server.versions, jobs, self.plans(horizon, jobs, step))
        self.jobs_computed += len(jobs)
        for job in jobs:
            self.awaited[job[:2]] = job
            horizon.computed(job[:2])
        horizon.fill()
        self.unwanted |= {job[:2] for job in jobs if not horizon.consumed(job[:2])}
        for lost in horizon.take_lost():
            if lost in self.awaited:
                self.unwanted.add(lost)
            elif lost in self.results:
                self.solver.release([self.results.pop(lost)])

    def plans(self, horizon: Horizon, jobs: list[Begun], step: Step) -> list[Plan]:
        """The weights of those commits of the window that take some of these jobs, where that much is known of them:
        so whoever computes can add up at once."""
        rule, version = self.method.what, self.version
        if not self.solver.adds or rule.weigh is None or rule.local.numbers:
            return []
        begun = {job[:2]: job for job in jobs} | self.awaited | {name: r.job for name, r in self.results.items()}
        plans = []
        for ahead, planned in enumerate((step, *horizon.steps)):
            names = planned.commit.jobs
            known = [job for name in names if (job := begun.get(name) or horizon.job(name)) is not None]
            if len(known) < len(names) or not any(job in known for job in jobs):
                continue
            staleness = [version + ahead - job.version for job in known]
            cohort = self.server.cohort([j.client for j in known], staleness, [j.steps for j in known], version + ahead)
            plans.append(Plan(version + ahead, names, rule.weights(cohort)))
        return plans

    def answer(self) -> Answer:
        """The next answer, whichever it is."""
        with self.settings:
            answer = self.solver.collect()
        if answer is None:
            first = next(iter(self.awaited.values()))
            raise OffbeatError(
                f"{len(self.awaited)} jobs were never answered, such as job {first.job} of client {first.client}, "
                f"version {first.version}; commit {self.version} cannot be made. What was committed is kept: see to "
                "whoever computes, and `offbeat resume` goes on"
            )
        return answer

    def take(self, answer: Answer) -> None:
        """Updates wait for their commits. What nobody waits for, because it came before or was never asked, is left."""
        rows = answer.jobs if self.blocks is None else self.blocks.rows(answer.jobs)
        bad = answer.bad.tolist() if isinstance(answer.bad, Tensor) else answer.bad
        wrong = iter(zip(bad, rows, strict=True))
        for row, job in enumerate(answer.jobs):
            devices = islice(wrong, self.blocks.size(job) if self.blocks else 1)
            faults = [(step, device.client) for step, device in devices if step >= 0]
            if faults and not self.server.made_finite(job.version):
                raise BadNumbers(self.server.complaint(job.version))
            if self.awaited.get(job[:2]) != job:
                self.refused += 1
                continue
            del self.awaited[job[:2]]
            result = Result(answer.updates, row, job, *min(faults, default=(-1, job.client)))
            if job[:2] in self.unwanted:
                self.unwanted.discard(job[:2])
                self.solver.release([result])
            else:
                self.results[job[:2]] = result

    def commit(self, step: Step, horizon: Horizon) -> Done:
        results = [self.results[job] for job in step.commit.jobs]
        for result in results:
            if result.bad >= 0:
                raise BadNumbers(self.complaint(result))
        rule, jobs = self.method.what, [result.job for result in results]
        with self.settings, torch.no_grad():
            sums = partial(self.solver.sums, self.version, results) if self.solver.adds and rule.apply else None
            names = rule.local.numbers if sums else (*rule.local.sends, *rule.local.numbers)
            staleness = self.server.commit(jobs, self.solver.vectors(results, names), sums)
        self.solver.committed([self.results.pop(job) for job in dict.fromkeys(step.commit.jobs)])
        self.server.forget(horizon.needs)
        return Done(self.version, step, staleness)

    def cut_tiles(self) -> None:
        """From now on waves are cut into tiles; what the solver knew until now goes on with the next."""
        assert self.tiling is not None
        whole, tiling, self.tiling = self.solver, self.tiling, None
        with self.settings:
            self.solver = TileSolver(whole.problem, self.spec, self.crew, tiling)
            tensors, facts = whole.save()
            self.solver.restore(tensors, facts | {"threads": self.threads})
            self.solver.adopt(self.waiting(), None)

    def waiting(self) -> list[Result]:
        """The updates that wait for their commits, in an order that does not depend on when they came."""
        return [self.results[name] for name in sorted(self.results)]

    def settle(self, horizon: Horizon) -> None:
        """Strike off the jobs of a horizon that were computed before a checkpoint."""
        for job in self.results:
            horizon.computed(job)
        horizon.strike_off(self.solver.has_moved)

    def complaint(self, result: Result) -> str:
        job = result.job
        what = "its update" if result.bad >= job.steps else f"the loss at local step {result.bad}"
        whose = f"client {result.client}" + (f" (cluster {job.client})" if self.blocks else "")
        helps = "A lower client rate or clipping usually helps; NaN in the data is another cause."
        if not job.version and not result.bad:
            helps = "No step had been taken, so look at its samples: empty sequences, targets that are all left out."
        return (
            f"{whose}, version {job.version}: {what} is not finite (job {job.job}, {job.steps} steps). "
            f"The run stopped at commit {self.version}; all that was committed before is kept. {helps}"
        )

    # ---- what a run shows -----------------------------------------------------------------------
    def training_loss(self) -> float:
        """f at the newest version: the mean over clients of their mean losses."""
        with self.settings, torch.no_grad():
            return training_loss(self.flat, self.solver.problem.samples, self.server.model)

    def report(self) -> dict[str, Any]:
        """What a result says of how it was computed."""
        return {
            **self.machine(),
            "jobs_computed": self.jobs_computed,
            "waves": self.solver.waves,
            "mode": self.solver.mode,
            "rung": self.solver.rung,
            "notes": self.solver.notes,
            "answers_refused": self.refused,
            **self.solver.report(),
        }

    def close(self) -> None:
        """Let go of whoever computes."""
        self.solver.close()

    # ---- checkpoints ----------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the plain facts: with them a resumed run goes on with the same bits."""
        while self.awaited:
            self.take(self.answer())
        own, facts = self.solver.save()
        tensors, waiting = self.server.save() | own, self.waiting()
        names = (*self.method.what.local.sends, *self.method.what.local.numbers)
        rows = self.solver.vectors(waiting, names) if waiting else {}
        for place, (client, job, *_) in enumerate(result.job for result in waiting):
            tensors |= {f"result/{client}/{job}/{name}": rows[name][place] for name in names}
        facts |= {
            "format": FORMAT,
            "version": self.version,
            "threads": self.threads,
            "jobs_computed": self.jobs_computed,
            "answers_refused": self.refused,
            "results": [[*r.job, r.bad, r.client] for r in waiting],
            "places": self.solver.places(waiting),
        }
        return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, facts

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if facts.get("format") != FORMAT:
            raise OffbeatError("the checkpoint was written by another version of Offbeat; start the run anew")
        if facts.get("tiling") and self.tiling is not None:
            self.solver, self.tiling = TileSolver(self.solver.problem, self.spec, self.crew, self.tiling), None
        self.follow(facts)
        self.server.restore(tensors, facts["version"])
        self.solver.restore(tensors, facts)
        self.jobs_computed, self.refused, self.results = facts["jobs_computed"], facts.get("answers_refused", 0), {}
        names = (*self.method.what.local.sends, *self.method.what.local.numbers)
        for *begun, bad, client in facts["results"]:
            job = Begun(*begun)
            rows = {name: tensors[f"result/{job.client}/{job.job}/{name}"].to(self.device)[None] for name in names}
            self.results[job[:2]] = Result(rows, 0, job, bad, client)
        self.solver.adopt(self.waiting(), facts.get("places"))

    def follow(self, facts: dict[str, Any]) -> None:
        """Round as the run did that left these facts."""
        self.settings.threads = facts["threads"]
        self.solver.follow(facts["record"], facts["threads"])
