"""One process, one device: pulls the schedule, computes jobs in lazy waves, makes the commits.

A job is computed when a commit needs it, and then every other job goes along that will be consumed and whose start
version is ready. Updates that no commit consumes are never computed, unless they move a client's memory. Commits are
the only barrier.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from offbeat import keys
from offbeat.engines.graphs import GraphAdvance, fitting
from offbeat.engines.memory import Choice, Memory
from offbeat.engines.settings import Settings, cores
from offbeat.engines.tiles import TiledAdvance
from offbeat.errors import ConfigError, OffbeatError
from offbeat.method import Cohort, Method, State, Update
from offbeat.numerics import wave as numerics
from offbeat.numerics.blocks import Blocks, block_twin, block_wave
from offbeat.numerics.wave import Outcome, Problem
from offbeat.records import Begun, JobName
from offbeat.schedule.horizon import Horizon, Step
from offbeat.stages import received
from offbeat.tasks.task import Task

FORMAT = 3  # of a checkpoint's facts
Mode = Literal["wave", "twin"]
Precision = Literal["float32", "tf32", "bf16", "float64"]


class BadNumbers(OffbeatError):
    """A loss or an update that is not finite was about to be committed. Nothing of it was."""


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
    begun: Begun
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


@dataclass
class LocalEngine:
    """The numerics of one run. `commits(horizon)` yields as they are made; `server` is the state after the last."""

    method: Method
    task: Task
    seed: int
    device: torch.device
    precision: Precision = "float32"
    mode: Mode = "wave"
    memory_gib: float | None = None
    graphs: bool = True
    client_memory: Choice = "auto"
    blocks: Blocks | None = None  # jobs are those of clusters, whose devices step together and mix
    version: int = 0
    waves: int = 0
    jobs_computed: int = 0
    notes: list[str] = field(default_factory=list)
    threads: int = field(default_factory=cores)  # what the rules of rounding go by on a processor
    # What no rule foresees and rounding rests on all the same, with the number of the wave before which it happened: a
    # limit on the size of waves, a mode. A resumed run and a replay follow it.
    record: list[tuple[int, str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = Settings(self.precision, self.device, self.threads)
        with self.settings:
            self.set_up()

    def set_up(self) -> None:
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        model = self.task.flat_model(dtype, self.precision == "bf16").to(self.device)
        samples = self.task.samples(dtype).to(self.device)
        self.problem = Problem(model, samples, self.method.what.local, self.seed)
        rule = self.method.what
        self.server: State = rule.init(model.initial())
        self.results: dict[JobName, Result] = {}
        self.limit = self.wave_limit()
        self.memory: Memory | None = None
        if rule.personal:
            where = (rule.personal, samples.clients, model.dimension, dtype, self.device, self.client_memory)
            self.memory = Memory(*where)
        self.last = torch.full((samples.clients if rule.local.remembers else 0,), -1)  # job whose memory a client has
        if rule.prime is not None:
            self.server = rule.prime(self.server, self.prime())
        self.versions: dict[int, State] = {0: self.broadcast()}
        self.batched = False  # a wave has worked, so the model can be batched
        self.test = tuple(t.to(self.device) for t in self.task.evaluation(dtype))
        self.advance: Any = numerics.advance
        if self.graphs:
            few = (self.problem, self.threads, self.settings.side_by_side)
            self.advance = GraphAdvance() if self.device.type == "cuda" else TiledAdvance(*few)

    @property
    def units(self) -> int:
        """Who does a job: clients, or clusters."""
        return len(self.blocks.members) if self.blocks else self.problem.samples.clients

    def broadcast(self) -> State:
        return self.method.what.broadcast(self.server, keys.key(self.seed, "broadcast", self.version))

    @torch.no_grad()
    def prime(self) -> Tensor:
        """Every client's gradient over its shard at version 0: where what there is of each starts, and their mean."""
        rule, samples, model = self.method.what, self.problem.samples, self.broadcast()["model"]
        everyone = torch.arange(samples.clients, device=self.device)
        assert rule.share is not None
        share = rule.share(self.cohort(everyone.tolist(), [0] * samples.clients, [1] * samples.clients))
        mean = torch.zeros_like(model)
        for clients in torch.split(everyone, self.limit):
            gradients = numerics.full_gradients(self.problem, model.expand(len(clients), -1), clients)
            arrived = received(rule.up, gradients, keys.key(self.seed, "prime", clients))
            mean += share[clients].to(mean.dtype) @ arrived
            if self.memory is not None:
                own = dict.fromkeys(rule.local.remembers, gradients)
                self.memory.write(clients, own | dict.fromkeys(rule.keeps, arrived))
        return mean

    def cohort(self, clients: list[int], staleness: list[int], steps: list[int]) -> Cohort:
        sizes = self.problem.samples.sizes
        behind = [[client] for client in clients] if self.blocks is None else [self.blocks.members[c] for c in clients]
        numbers = [staleness, steps, [sum(sizes[i] for i in each) for each in behind], [len(each) for each in behind]]
        columns = torch.tensor(numbers, dtype=self.problem.model.dtype).to(self.device, non_blocking=True)
        numbered = torch.tensor(clients).to(self.device, non_blocking=True)
        stale, taken, samples, devices = columns
        whole, key = (len(sizes), sum(sizes), self.units), keys.key(self.seed, "commit", self.version)
        return Cohort(stale, taken, samples, numbered, devices, self.version, *whole, key, {})

    def wave_limit(self) -> int:
        """How many jobs fit into the memory limit at once; at least one."""
        if self.memory_gib is not None:
            budget = self.memory_gib * 2**30
        elif self.device.type == "cuda":
            budget = 0.5 * torch.cuda.get_device_properties(self.device).total_memory  # what is free changes
        else:
            budget = 4 * 2**30
        largest = max(map(len, self.blocks.members)) if self.blocks else 1
        return max(1, int(budget / numerics.bytes_per_job(self.problem) / largest))

    # ---- the loop -------------------------------------------------------------------------------
    def commits(self, horizon: Horizon) -> Iterator[Done]:
        for step in horizon:
            distinct = dict.fromkeys(step.commit.jobs)
            while urgent := sum(job not in self.results for job in distinct):
                ready = horizon.ready(self.version)[: self.limit]
                self.compute(horizon, ready[: self.fitting(len(ready), urgent)])
            yield self.commit(step, horizon)

    def fitting(self, ready: int, urgent: int) -> int:
        """How many of the ready jobs make the next wave."""
        return fitting(ready, urgent) if isinstance(self.advance, GraphAdvance) and not self.blocks else ready

    def compute(self, horizon: Horizon, jobs: list[Begun]) -> None:
        """One wave. When the device's memory runs out the wave is halved, now and for good."""
        jobs, outcome = self.fit(jobs)
        self.waves += 1
        self.jobs_computed += len(jobs)
        rows = self.rows(jobs)
        if self.memory is not None:
            self.remember(rows, outcome.updates)
        updates = outcome.updates if self.blocks is None else self.blocks.reported(outcome.updates, jobs)
        made = [Result(updates, row, job, -1, job.client) for row, job in enumerate(jobs)]  # it is still computing
        for job in jobs:
            horizon.computed(job[:2])
        horizon.fill()
        wrong = iter(zip(outcome.bad.tolist(), rows, strict=True))
        for result in made:
            devices = islice(wrong, self.blocks.size(result.begun) if self.blocks else 1)
            faults = [(step, row.client) for step, row in devices if step >= 0]
            result.bad, result.client = min(faults, default=(-1, result.begun.client))
            if horizon.consumed(result.begun[:2]):
                self.results[result.begun[:2]] = result
        while horizon.lost:
            self.results.pop(horizon.lost.pop(), None)

    def fit(self, jobs: list[Begun]) -> tuple[list[Begun], Outcome]:
        """As many of the jobs as the memory takes, and what they come to."""
        while True:
            for _, what, value in [entry for entry in self.record if entry[0] == self.waves]:
                setattr(self, what, value)
            jobs = jobs[: self.limit]
            try:
                return jobs, self.solve(jobs)
            except torch.OutOfMemoryError:
                if len(jobs) == 1:
                    raise OffbeatError(
                        f"one job alone does not fit into the memory of {self.device}; use a smaller batch or model"
                    ) from None
                torch.cuda.empty_cache()
                half = len(jobs) // 2
                self.record.append((self.waves, "limit", half))
                self.note(f"out of memory on {self.device} with {len(jobs)} jobs: waves are cut to {half} from now on")

    def remember(self, jobs: list[Begun], updates: Update) -> None:
        """Take what clients remember out of their updates, into their memory."""
        names = self.method.what.local.remembers
        if self.memory is None or not names:
            return
        clients = torch.tensor([job.client for job in jobs])
        self.memory.write(clients, {name: updates.pop(name) for name in names})
        self.last[clients] = torch.tensor([job.job for job in jobs])

    def has_moved(self, client: int, number: int) -> bool:
        """Whether this job has moved the memory of its client, or of its cluster's."""
        row = client if self.blocks is None else self.blocks.members[client][0]
        return number <= int(self.last[row])

    def rows(self, jobs: list[Begun]) -> list[Begun]:
        """The jobs that clients do: these, or those of the devices of these clusters."""
        return jobs if self.blocks is None else self.blocks.rows(jobs)

    def solve(self, jobs: list[Begun]) -> Outcome:
        """What each of the `rows` of these jobs comes to."""
        with self.settings:
            return self.solved(jobs, self.rows(jobs))

    def solved(self, jobs: list[Begun], rows: list[Begun]) -> Outcome:
        used = {job.version: None for job in rows}
        place = {version: i for i, version in enumerate(used)}
        index = torch.tensor([place[job.version] for job in rows]).to(self.device, non_blocking=True)
        starts = {
            name: torch.stack([self.versions[v][name] for v in used]).index_select(0, index)
            for name in self.method.what.broadcasts
        }
        if self.memory is not None:
            clients = torch.tensor([job.client for job in rows])
            starts |= self.memory.read(self.method.what.local.remembers, clients)
        if self.mode == "twin":
            return self.one_by_one(starts, jobs)
        try:
            if self.blocks is None:
                outcome = numerics.wave(self.problem, starts, jobs, self.advance)
            else:
                outcome = block_wave(self.problem, self.blocks, starts, jobs, self.advance)
            self.batched = True
            return outcome
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or self.batched:
                raise
            reason = str(error).strip().splitlines()[0]
            self.note(f"this model cannot be batched over clients, so jobs run one after another: {reason}")
            self.mode = "twin"
            self.record.append((self.waves, "mode", "twin"))
            return self.one_by_one(starts, jobs)

    def one_by_one(self, starts: State, jobs: list[Begun]) -> Outcome:
        if self.blocks is None:
            return numerics.twin(self.problem, starts, jobs)
        return block_twin(self.problem, self.blocks, starts, jobs)

    def note(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(text, stacklevel=2)

    def commit(self, step: Step, horizon: Horizon) -> Done:
        with self.settings, torch.no_grad():
            return self.committed(step, horizon)

    def committed(self, step: Step, horizon: Horizon) -> Done:
        results = [self.results[job] for job in step.commit.jobs]
        for result in results:
            if result.bad >= 0:
                raise BadNumbers(self.complaint(result))
        rule = self.method.what
        staleness = [self.version - r.begun.version for r in results]
        cohort = self.cohort([r.begun.client for r in results], staleness, [r.begun.steps for r in results])
        updates = {name: self.gathered(results, name) for name in rule.local.sends}
        cohort = cohort._replace(numbers={name: self.gathered(results, name) for name in rule.local.numbers})
        if self.memory is not None:
            updates |= self.memory.read(rule.keeps, cohort.client)
        made = rule.renew(self.server, updates, cohort)
        if self.memory is not None and rule.keeps:
            self.memory.write(cohort.client, {name: made.pop(name) for name in rule.keeps})
        self.server = self.checked(made)
        self.version += 1
        self.versions[self.version] = self.broadcast()
        for job in set(step.commit.jobs):
            del self.results[job]
        self.forget(horizon)
        return Done(self.version, step, staleness)

    def gathered(self, results: list[Result], name: str) -> Tensor:
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
        taken, home = torch.tensor([rows, back]).to(self.device, non_blocking=True)
        parts = zip(vectors, taken.split([len(places) for places in waves.values()]), strict=True)
        together = [wave.index_select(0, mine) for wave, mine in parts]
        return together[0] if len(together) == 1 else torch.cat(together).index_select(0, home)

    def checked(self, state: Any) -> State:
        """What a commit made, if it is a state of the same vectors."""
        want = {name: tuple(t.shape) for name, t in self.server.items()}
        made = {name: tuple(t.shape) for name, t in state.items()} if isinstance(state, dict) else type(state).__name__
        if made != want:
            raise OffbeatError(f"method '{self.method.name}': its commit must give the vectors {want}; it gave {made}")
        return state  # type: ignore[no-any-return]

    def complaint(self, result: Result) -> str:
        job = result.begun
        what = "its update" if result.bad >= job.steps else f"the loss at local step {result.bad}"
        whose = f"client {result.client}" + (f" (cluster {job.client})" if self.blocks else "")
        return (
            f"{whose}, version {job.version}: {what} is not finite (job {job.job}, {job.steps} steps). "
            f"The run stopped at commit {self.version}; all that was committed before is kept. "
            "A lower client rate or clipping usually helps; NaN in the data is another cause."
        )

    def forget(self, horizon: Horizon) -> None:
        """Let go of versions that no job can start from any more."""
        if len(self.versions) < 4:
            return
        floor, held = horizon.driver.floor, horizon.held
        for version in [v for v in self.versions if v != self.version and v < floor and v not in held]:
            del self.versions[version]

    # ---- evaluation -----------------------------------------------------------------------------
    def evaluate(self, batch: int = 2048) -> tuple[float, float | None]:
        """Loss and accuracy of the newest version on the test set."""
        with self.settings, torch.no_grad():
            return self.evaluated(batch)

    def evaluated(self, batch: int) -> tuple[float, float | None]:
        x, y = self.test
        flat = self.server["model"]
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right: Tensor | None = None
        for part in range(0, len(x), batch):
            target = y[part : part + batch]
            out = self.problem.model.outputs(flat, x[part : part + batch])
            loss += self.problem.model.mean_loss(out, target).double() * len(target)
            if out.dim() == 2 and out.shape[1] > 1 and not target.is_floating_point():
                hits = (out.argmax(dim=1) == target).sum()
                right = hits if right is None else right + hits
        return float(loss) / len(x), None if right is None else float(right) / len(x)

    @torch.no_grad()
    def evaluate_training(self, flat: Tensor, batch: int = 2048) -> float:
        """f at a point: the mean over clients of their mean losses."""
        samples, model = self.problem.samples, self.problem.model
        total = 0.0
        for client, size in enumerate(samples.sizes):
            rows = samples.order[int(samples.first[client]) : int(samples.first[client]) + size]
            for part in torch.split(rows, batch):
                out = model.outputs(flat, samples.x[part])
                total += float(model.mean_loss(out, samples.y[part])) * len(part) / size
        return total / samples.clients

    # ---- checkpoints ----------------------------------------------------------------------------
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and the plain facts: with them a resumed run goes on with the same bits."""
        held = {f"server/{name}": t for name, t in self.server.items()}
        for version, state in self.versions.items():
            held |= {f"version/{version}/{name}": t for name, t in state.items()}
        for (client, job), result in self.results.items():
            held |= {f"result/{client}/{job}/{name}": u[result.row] for name, u in result.updates.items()}
        facts = {
            "format": FORMAT,
            "version": self.version,
            "waves": self.waves,
            "jobs_computed": self.jobs_computed,
            "mode": self.mode,
            "limit": self.limit,
            "notes": self.notes,
            "results": [[*r.begun, r.bad, r.client] for r in self.results.values()],
            "threads": self.threads,
            "record": self.record,
            "sizes": [[*size, times] for size, times in getattr(self.advance, "seen", {}).items()],
            "taken": [[*size, steps] for size, steps in getattr(self.advance, "taken", {}).items()],
        }
        if self.memory is not None:
            held |= {f"memory/{name}": t for name, t in self.memory.held.items()} | {"last": self.last}
        return {name: t.detach().cpu().contiguous().clone() for name, t in held.items()}, facts

    def follow(self, facts: dict[str, Any]) -> None:
        """Round as the run did that left these facts."""
        self.record = [(wave, what, value) for wave, what, value in facts["record"]]
        self.threads = self.settings.threads = facts["threads"]
        if isinstance(self.advance, TiledAdvance):
            self.advance.threads = self.threads

    def restore(self, held: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if facts.get("format") != FORMAT:
            raise OffbeatError("the checkpoint was written by another version of Offbeat; start the run anew")
        moved = {name: t.to(self.device) for name, t in held.items() if not name.startswith(("memory/", "last"))}
        server = {name.split("/", 1)[1]: t for name, t in moved.items() if name.startswith("server/")}
        shapes = [{name: t.shape for name, t in state.items()} for state in (server, self.server)]
        if shapes[0] != shapes[1]:
            raise OffbeatError(f"the checkpoint holds {shapes[0]}, this method and model need {shapes[1]}")
        self.server = server
        if self.memory is not None:
            for name, t in self.memory.held.items():
                t.copy_(held[f"memory/{name}"])
            self.last = held["last"]
        self.version, self.waves, self.jobs_computed = facts["version"], facts["waves"], facts["jobs_computed"]
        self.mode, self.notes = facts["mode"], facts["notes"]
        self.follow(facts)
        self.limit = facts["limit"]
        if self.graphs:
            self.advance.seen.update({(clients, width): times for clients, width, times in facts["sizes"]})
            self.advance.taken.update({(clients, width): steps for clients, width, steps in facts["taken"]})
        self.versions, self.results = {}, {}
        for name, t in moved.items():
            kind, *where = name.split("/")
            if kind == "version":
                self.versions.setdefault(int(where[0]), {})[where[1]] = t
        for *begun, bad, client in facts["results"]:
            job = Begun(*begun)
            names = (*self.method.what.local.sends, *self.method.what.local.numbers)
            rows = {name: moved[f"result/{job.client}/{job.job}/{name}"][None] for name in names}
            self.results[job[:2]] = Result(rows, 0, job, bad, client)
