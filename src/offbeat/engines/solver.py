"""Solvers: who computes jobs. They are asked (`submit`) and answer (`collect`), in any order.

The local solver computes a wave on one device, in one of three step modes: steps that are captured (CUDA graphs,
traced operations), the plain wave, the reference loop. A step mode that fails is left for the next one, once and for
good, with a message. A model whose first step as a wave gives other numbers than the reference loop begins there. Where
the memory runs out, waves are halved. Both are put into the record of the run, with the number of the wave, because
rounding rests on them; a resumed run and a replay follow it. The opening of a run, which asks for every client's
gradient, falls back in the same order, before the first wave.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils import _pytree as pytree

from offbeat.config.choices import Choice, Mode
from offbeat.engines.captured import GraphAdvance
from offbeat.engines.memory import Memory
from offbeat.engines.stepping import LADDER, PlainSteps, Rung, Stepping
from offbeat.engines.tiles import LIGHT, TiledAdvance
from offbeat.engines.updates import Answer, Plan, Result, gathered
from offbeat.errors import OffbeatError
from offbeat.method import State, Update
from offbeat.numerics import wave as numerics
from offbeat.numerics.blame import why_not_batched
from offbeat.numerics.buffers import OWN, memory_shapes
from offbeat.numerics.first_step import why_reference
from offbeat.numerics.mixing import Blocks, block_wave
from offbeat.numerics.reference_loop import full_gradient, reference
from offbeat.numerics.threads import threads
from offbeat.numerics.wave import Outcome, Problem
from offbeat.records import TRIAL, Begun

T = TypeVar("T")
PLAIN = PlainSteps()
OPENING = -1  # in a record, in the place of a wave: the first clients of the opening; -2 are the next, and so on
FAILED = {
    "plain": "steps of this model cannot be captured, so they run plainly",
    "reference": "this model cannot be batched over clients, so jobs run one after another",
}
FALLBACK = re.compile(r"have not yet implemented the batching rule for (aten::\w+)")
FEW = 32  # samples of the first step that is compared
PROCESSOR = 4 << 30  # bytes that a wave may take on a processor ...
DEVICE = 0.5  # ... and the share of a device's whole memory: what is free changes, and waves must not


@contextmanager
def unwarned() -> Iterator[None]:
    """PyTorch says no more of what it cannot batch."""
    say: Any = functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    say(False)
    try:
        yield
    finally:
        say(True)


class Solver(Protocol):
    """What an engine asks of whoever computes."""

    waves: int  # that it was asked for
    notes: list[str]
    adds: bool  # it makes weighted sums where the updates are (`sums`)

    @property
    def problem(self) -> Problem: ...
    @property
    def limit(self) -> int:
        """Jobs that it takes at once."""

    @property
    def rung(self) -> str: ...
    @property
    def mode(self) -> Mode: ...

    def submit(self, versions: Mapping[int, State], jobs: Sequence[Begun], plans: Sequence[Plan] = ()) -> None:
        """Have these jobs computed, those of a client in the order in which they are asked for."""

    def collect(self) -> Answer | None:
        """The next answer, whichever it is; None: there will be none."""

    def solve(self, versions: Mapping[int, State], jobs: Sequence[Begun]) -> Outcome:
        """All of a wave at once, with its updates as rows: for those who look at single waves."""

    def vectors(self, results: Sequence[Result], names: Sequence[str]) -> Update:
        """Of each result a row, by name."""

    def sums(self, version: int, results: Sequence[Result], weights: Mapping[str, Tensor]) -> Update:
        """The weighted sums for the commit that replaces this version."""

    def committed(self, results: Sequence[Result]) -> None:
        """A commit took these: nobody will ask for them any more."""

    def release(self, results: Sequence[Result]) -> None:
        """No commit takes these: nobody will ask for them any more."""

    def fitting(self, ready: int, urgent: int) -> int:
        """How many of the ready jobs to ask for at once, the first `urgent` of which are needed now."""

    def has_moved(self, client: int, number: int) -> bool:
        """Whether this job has moved the memory of its client."""

    def opening(self, model: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every client's gradient over its shard, some clients at a time; what they remember starts there."""

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None: ...
    def places(self, results: Sequence[Result]) -> list[list[int]] | None:
        """Where results lie, as far as rounding rests on it."""

    def adopt(self, results: Sequence[Result], places: list[list[int]] | None) -> None:
        """Take over results that another solver computed, or this one before a checkpoint."""

    def follow(self, record: Sequence[Sequence[Any]], threads: int) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def captured_steps(problem: Problem, threads: int, side_by_side: int, counts: bool = True) -> Stepping:
    """The quickest way to take steps on the device that the problem is on."""
    if problem.samples.x.device.type == "cuda":
        return GraphAdvance(counts)
    return TiledAdvance(problem, threads, side_by_side, counts)


def first_rung(problem: Problem, mode: Mode, best: Rung) -> tuple[Rung, str]:
    """The rung that a run begins on, and a sentence where the model asks for the last one."""
    if mode == "reference":
        return "reference", ""
    samples = problem.samples
    rows = samples.first_rows(min(samples.per_step(0), FEW))
    with unwarned():
        reason = why_reference(problem.model, samples.x[rows], samples.y[rows])
    return (best, "") if reason is None else ("reference", f"{FAILED['reference']}: {reason}")


def primed(problem: Problem) -> list[str]:
    """The vectors that clients remember and that begin with a gradient."""
    return [name for name in problem.local.remembers if name not in OWN.values()]


class LocalSolver:
    """Waves on one device. Whoever asks has the answer at once."""

    adds = False  # rows are here already

    def __init__(
        self, problem: Problem, blocks: Blocks | None, mode: Mode, advance: Stepping,
        memory_gib: float | None = None, choice: Choice = "auto", memory: Any = None,
    ) -> None:  # fmt: skip
        self.problem, self.blocks, self.advance = problem, blocks, advance
        self.device = problem.samples.x.device
        work = numerics.bytes_per_job(problem)
        self.limit = self.wave_limit(memory_gib, work)
        self.light = self.device.type == "cpu" and work < LIGHT
        self.waves = 0
        self.notes: list[str] = []
        self.record: list[tuple[int, str, Any]] = []  # wave, what changed in it, to what
        self.current = OPENING  # the wave in hand
        self.rung, reason = first_rung(problem, mode, advance.rung)
        self.answers: deque[Answer] = deque()
        self.choice, self.trials, self.memory = choice, 1, memory
        if memory is None:
            self.remember(1)
        clients = problem.samples.clients if problem.local.remembers else 0
        self.last = torch.full((clients,), -1)  # job whose memory it has
        if reason:
            self.note(reason)

    @property
    def mode(self) -> Mode:
        return "reference" if self.rung == "reference" else "wave"

    @property
    def steps(self) -> Stepping:
        """How steps are taken on this rung of the ladder."""
        return self.advance if self.rung == self.advance.rung else PLAIN

    def wave_limit(self, memory_gib: float | None, work: int) -> int:
        """How many jobs fit into the memory limit at once; at least one."""
        budget = float(PROCESSOR) if memory_gib is None else memory_gib * 2**30
        if memory_gib is None and self.device.type == "cuda":
            budget = DEVICE * torch.cuda.get_device_properties(self.device).total_memory
        largest = max(map(len, self.blocks.members)) if self.blocks else 1
        return max(1, int(budget / work / largest))

    def fitting(self, ready: int, urgent: int) -> int:
        return ready if self.blocks else self.steps.fitting(ready, urgent)

    # ---- solving --------------------------------------------------------------------------------
    def submit(self, versions: Mapping[int, State], jobs: Sequence[Begun], plans: Sequence[Plan] = ()) -> None:
        outcome = self.solve(versions, jobs)
        updates = outcome.updates if self.blocks is None else self.blocks.reported(outcome.updates, jobs)
        self.answers.append(Answer(jobs, updates, outcome.bad))

    def collect(self) -> Answer | None:
        return self.answers.popleft() if self.answers else None

    def vectors(self, results: Sequence[Result], names: Sequence[str]) -> Update:
        return {name: gathered(results, name) for name in names}

    def sums(self, version: int, results: Sequence[Result], weights: Mapping[str, Tensor]) -> Update:
        return {name: each @ gathered(results, name) for name, each in weights.items()}

    def committed(self, results: Sequence[Result]) -> None:
        """They go with whoever held them."""

    def release(self, results: Sequence[Result]) -> None:
        """They go with whoever held them."""

    def places(self, results: Sequence[Result]) -> None:
        """Rows are summed together, wherever they lie."""

    def adopt(self, results: Sequence[Result], places: list[list[int]] | None) -> None:
        """Rows are rows."""

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nobody is far."""

    def solve(self, versions: Mapping[int, State], jobs: Sequence[Begun]) -> Outcome:
        self.take_up(self.waves)
        with self.watched():
            parts = self.parts(versions, list(jobs))
        self.waves += 1
        outcome: Outcome = parts[0] if len(parts) == 1 else Outcome(
            *pytree.tree_map(lambda *tensors: torch.cat(tensors), *map(tuple, parts))
        )  # fmt: skip
        return outcome

    def take_up(self, wave: int) -> None:
        """Begin with a wave: change what the record says was changed in it."""
        self.current = wave
        for at, what, value in self.record:
            if at == wave:
                setattr(self, what, value)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the first wave, operations that PyTorch itself cannot batch are named: it takes them client by client."""
        if self.waves:
            with unwarned():
                yield
            return
        said: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield
        finally:
            operations = {each: FALLBACK.search(str(each.message)) for each in said}
            for each, operation in operations.items():
                if operation is None:
                    warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            for name in dict.fromkeys(operation[1] for operation in operations.values() if operation is not None):
                self.note(f"PyTorch cannot batch {name}: inside waves it is computed client after client")

    def parts(self, versions: Mapping[int, State], jobs: list[Begun]) -> list[Outcome]:
        """The jobs in as many parts as the memory asks for, each remembered by its clients."""
        outcomes: list[Outcome] = []
        while jobs:
            now = jobs[: self.limit]
            outcome = self.within_memory(partial(self.computed, versions, now))
            if outcome is None:  # by now the failure has let go of what it held
                self.halve(len(now))
                continue
            outcomes.append(self.remembered(now, outcome))
            jobs = jobs[len(now) :]
        return outcomes

    def computed(self, versions: Mapping[int, State], jobs: list[Begun]) -> Outcome:
        starts = self.starts(versions, jobs)
        return self.on_a_rung(lambda: self.way(starts, jobs))

    def within_memory(self, compute: Callable[[], T]) -> T | None:
        """What it computes, or None: the memory ran out."""
        try:
            return compute()
        except torch.OutOfMemoryError:
            return None

    def halve(self, jobs: int) -> None:
        if jobs == 1:
            raise OffbeatError(
                f"one job alone does not fit into the memory of {self.device}; use a smaller batch or model"
            )
        self.advance.release()
        gc.collect()  # graphs of earlier runs, too, hold memory until Python lets go of them
        torch.cuda.empty_cache()
        self.change("limit", jobs // 2)
        self.note(f"out of memory on {self.device} with {jobs} jobs: waves are cut to {jobs // 2} from now on")

    def on_a_rung(self, compute: Callable[[], T]) -> T:
        """What it computes, which goes by `rung`, on the first rung down the ladder where it can."""
        reason = ""
        one_thread = self.light or self.problem.model.one_thread  # several would wait for each other
        while True:
            try:
                with threads(1 if one_thread else None):
                    value = compute()
            except Exception as error:  # PyTorch's, the model's, or that of a kernel which this device cannot take
                if isinstance(error, torch.OutOfMemoryError | OffbeatError) or self.rung == LADDER[-1]:
                    raise
                reason = why_not_batched(error)
                self.change("rung", LADDER[LADDER.index(self.rung) + 1])
                continue
            if reason:
                self.note(f"{FAILED[self.rung]}: {reason}")
            return value

    def way(self, starts: State, jobs: list[Begun]) -> Outcome:
        blocks, steps = self.blocks, self.steps
        if self.rung == "reference":
            return reference(self.problem, starts, jobs, blocks)
        if blocks is not None:
            return block_wave(self.problem, blocks, starts, jobs, steps)
        with nullcontext() if self.problem.local.full_gradient else steps.around():
            return numerics.wave(self.problem, starts, jobs, steps)

    def full_gradients(self, problem: Problem, flat: Tensor, clients: Tensor) -> Tensor:
        """Of clients of a problem with this model, each over its whole shard, at `flat [n, d]`."""

        def compute() -> Tensor:
            if self.rung != "reference":
                return numerics.full_gradients(problem, flat, clients)
            each = zip(flat, clients[:, None], strict=True)
            return torch.stack([full_gradient(problem, one, client) for one, client in each])

        return self.on_a_rung(compute)

    def change(self, what: str, value: Any) -> None:
        self.record.append((self.current, what, value))
        setattr(self, what, value)

    def note(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(text, stacklevel=2)

    # ---- starts and memory ----------------------------------------------------------------------
    def remember(self, trials: int) -> None:
        """Room for what the clients of so many trials remember."""
        model, names, clients = self.problem.model, self.problem.local.remembers, self.problem.samples.clients
        self.trials = trials
        if names:
            shapes = memory_shapes(names, model.dimension, model.dtype, model.layout)
            self.memory = Memory(shapes, trials * clients, self.device, self.choice)

    def seats(self, rows: Sequence[Begun]) -> Tensor:
        """Where the memory has the clients of these jobs, those of a trial behind those of the one before it."""
        clients = self.problem.samples.clients
        return torch.tensor([(job.version >> TRIAL) * clients + job.client for job in rows])

    def rows(self, jobs: list[Begun]) -> list[Begun]:
        """The jobs that clients do: these, or those of the devices of these clusters."""
        return jobs if self.blocks is None else self.blocks.rows(jobs)

    def starts(self, versions: Mapping[int, State], jobs: list[Begun]) -> State:
        """What each row starts from: its version's broadcast, and what its client remembers."""
        rows = self.rows(jobs)
        used = list(dict.fromkeys(job.version for job in rows))
        place = {version: i for i, version in enumerate(used)}
        index = torch.tensor([place[job.version] for job in rows]).to(self.device, non_blocking=True)
        with threads(1 if self.device.type == "cpu" else None):  # copies: several threads would wait for each other
            starts = {
                name: torch.stack([versions[v][name] for v in used]).index_select(0, index)
                for name in versions[used[0]]
            }
        if self.memory is not None:
            starts |= self.memory.read(self.problem.local.remembers, self.seats(rows))
        return starts

    def remembered(self, jobs: list[Begun], outcome: Outcome) -> Outcome:
        """Take what clients remember out of their updates, into their memory."""
        if self.memory is None:
            return outcome
        rows = self.rows(jobs)
        names = self.problem.local.remembers
        self.memory.write(self.seats(rows), {name: outcome.updates.pop(name) for name in names})
        self.last[[job.client for job in rows]] = torch.tensor([job.job for job in rows])
        return outcome

    def has_moved(self, client: int, number: int) -> bool:
        row = client if self.blocks is None else self.blocks.members[client][0]
        return bool(len(self.last)) and number <= int(self.last[row])

    def opening(self, model: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every client's gradient over its shard, some clients at a time; what they remember starts there."""
        many = self.problem.samples.clients
        left, group = torch.arange(many, device=self.device), OPENING
        while len(left):
            self.take_up(group)
            clients = left[: self.limit]
            at = model.expand(len(clients), -1)
            gradients = self.within_memory(partial(self.full_gradients, self.problem, at, clients))
            if gradients is None:
                self.halve(len(clients))
                continue
            for trial in range(self.trials if self.memory is not None else 0):
                self.memory.write(trial * many + clients, dict.fromkeys(primed(self.problem), gradients))
            yield clients, gradients
            left, group = left[len(clients) :], group - 1

    # ---- checkpoints ----------------------------------------------------------------------------
    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {} if self.memory is None else self.memory.save() | {"last": self.last}
        return tensors, {
            "waves": self.waves,
            "limit": self.limit,
            "rung": self.rung,
            "notes": self.notes,
            "record": self.record,
            "sizes": self.advance.save(),
        }

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.follow(facts["record"], facts["threads"])
        self.waves, self.limit, self.rung, self.notes = (facts[name] for name in ("waves", "limit", "rung", "notes"))
        self.advance.restore(facts["sizes"])
        if self.memory is not None:
            self.memory.restore(tensors)
            self.last = tensors["last"]

    def follow(self, record: Sequence[Sequence[Any]], threads: int) -> None:
        """Change what a run changed that left this record, before the same waves; cut tiles for so many threads."""
        self.record = [(wave, what, value) for wave, what, value in record]
        self.advance.follow(threads)
