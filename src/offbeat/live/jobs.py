"""What a client does with a model: the experiment from names, options and numbers, its own shard, its memory.

A job is computed by the same solver, local rule and keys as in a simulation, so its result is the one that the
simulator would compute from the same start.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from offbeat import keys
from offbeat.config import registry
from offbeat.engines.engine import pick_device
from offbeat.engines.settings import Settings, cores
from offbeat.engines.solver import LocalSolver, captured_steps
from offbeat.errors import ConfigError, OffbeatError
from offbeat.experiments.assemble import build_method, make_fleet
from offbeat.experiments.experiment import Experiment
from offbeat.live.packets import broadcast_layout, prime_layout, update_layout
from offbeat.method import Local, Method, State
from offbeat.numerics import wave as numerics
from offbeat.numerics.reference_loop import ClientJob
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel, Loss
from offbeat.numerics.wave import Problem
from offbeat.records import Begun
from offbeat.runs.disk import read_tensors, write_file
from offbeat.schedule.device import OWN_STEPS
from offbeat.stages.staged import Encoded
from offbeat.tasks.data import DATA
from offbeat.tasks.inputs import read
from offbeat.tasks.make import build_task, named
from offbeat.tasks.models import build as build_model
from offbeat.tasks.task import Task
from offbeat.tasks.task_problems import data_problems

MEMORY = "memory.safetensors"
OWN_PART = "task"  # as data: this client's part of the named task


@dataclass(frozen=True)
class Shard:
    """A client's samples, and the model and loss that they are for, where those are the client's own."""

    x: Tensor
    y: Tensor
    model: nn.Module | None = None
    loss: Loss | None = None

    @property
    def digest(self) -> str:
        whole = hashlib.sha256()
        for values in map(whole_numbers, (self.x, self.y)):
            whole.update(f"{values.dtype} {tuple(values.shape)};".encode())
            whole.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()


def model_digest(flat: FlatModel) -> str:
    """Of names, shapes and type of what is trained, and of the frozen parameters themselves."""
    whole = hashlib.sha256(json.dumps([flat.names, flat.shapes, str(flat.dtype)]).encode())
    for name, p in flat.module.named_parameters():
        if not p.requires_grad:
            whole.update(name.encode() + p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def task_facts(task: Task, table: Mapping[str, Any]) -> dict[str, Any]:
    """What a client has to know of a task beside its config: shapes and numbers."""
    x, y = task.training
    batch = list(task.batch_size) if isinstance(task.batch_size, list | tuple) else task.batch_size
    outputs = 0
    name = table["task"]["name"]
    if name in DATA or name == "leaf":
        with torch.no_grad():
            outputs = int(task.model(x[:2].to(next(task.model.parameters()).dtype)).shape[1])
    return {
        "input": list(x.shape[1:]), "floating": x.is_floating_point(), "outputs": outputs, "batch": batch,
        "sampling": task.sampling, "target": list(y.shape[1:]), "labels": not y.is_floating_point(),
    }  # fmt: skip


# ---- a shard ------------------------------------------------------------------------------------
def read_shard(data: str) -> Shard | None:
    """The samples that `--data` names: an npz with x and y, module:function, or None for one's part of the task."""
    if data == OWN_PART:
        return None
    if ":" in data and not Path(data).exists():
        _, function = registry.load("shard", data, data)
        return shard_of(data, function())
    try:
        with Path(data).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if not {"x", "y"} <= set(file.files):
                raise ConfigError([f"--data {data} has {', '.join(file.files)}; it must have the arrays x and y"])
            return Shard(torch.from_numpy(file["x"].copy()), torch.from_numpy(file["y"].copy()))
    except FileNotFoundError:
        raise ConfigError(
            [f"--data {data}: there is no such file; give an npz with x and y, or module:function"]
        ) from None
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        why = "it holds Python objects, which are never loaded; save plain arrays" if "pickle" in str(error) else error
        raise ConfigError([f"--data {data} is no npz with x and y: {why}"]) from None


def shard_of(where: str, given: Any) -> Shard:
    """What a function of one's own gave: (x, y), a `Task` of one shard, or a `Shard`."""
    if isinstance(given, Shard):
        return given
    if isinstance(given, Task):
        x, y = given.training
        rows = torch.as_tensor(np.asarray(given.shards[0], dtype=np.int64))
        return Shard(x[rows], y[rows], given.model, given.loss)
    try:
        return Shard(*read(given))
    except Exception as error:
        raise ConfigError([f"{where} gives {type(given).__name__}; it must give (x, y) or a Task: {error}"]) from None


def whole_numbers(values: Tensor) -> Tensor:
    """Labels and tokens are int64, whatever kind of whole number they were stored as."""
    return values if values.is_floating_point() or values.is_complex() else values.to(torch.int64)


# ---- an experiment ------------------------------------------------------------------------------
def foreign_code(config: Any, allowed: frozenset[str]) -> list[str]:
    """Functions that a config names as module:function and that were not named here."""
    if isinstance(config, Mapping):
        return [name for value in config.values() for name in foreign_code(value, allowed)]
    if isinstance(config, list | tuple):
        return [name for value in config for name in foreign_code(value, allowed)]
    return [config] if isinstance(config, str) and registry.PATH.fullmatch(config) and config not in allowed else []


class Worker:
    """One client's part of an experiment."""

    def __init__(
        self, client: int, clients: int, config: Mapping[str, Any], facts: Mapping[str, Any], shard: Shard | None,
        device: str = "auto", allowed: frozenset[str] = frozenset(), local_steps: int | None = None,
        state: Path | None = None,
    ) -> None:  # fmt: skip
        if names := foreign_code(config, allowed):
            raise OffbeatError(
                f"the experiment names {', '.join(names)}, which was not named here, and nothing that a server names "
                "is executed by itself; if you have it and trust it, give --code " + " --code ".join(names)
            )
        wanted = {
            name: config[name] for name in ("method", "task", "fleet", "seed", "precision", "mode") if name in config
        }
        self.client, self.clients, self.state = client, clients, state
        self.experiment = Experiment.of(wanted)
        self.method: Method = build_method(self.experiment.method)
        own = shard or self.own_part()
        x, y = (whole_numbers(values) for values in read((own.x, own.y)))
        self.shard = Shard(x, y, *self.model_and_loss(own, facts))
        self.check(facts)
        self.device = pick_device(device)
        self.settings = Settings(self.experiment.precision, self.device, cores())
        dtype = torch.float64 if self.experiment.precision == "float64" else torch.float32
        self.steps = self.step_law(local_steps)
        with self.settings:
            assert self.shard.model is not None
            assert self.shard.loss is not None
            task = Task(self.shard.model, self.shard.loss, (x, y), [range(len(x))])
            if changing := ", ".join(sorted(task.changing.state)):
                raise OffbeatError(
                    f"the model changes {changing} while it trains, which live clients do not exchange; keep such "
                    "buffers out of it, or put those parts in eval mode"
                )
            flat = task.flat_model(dtype, self.experiment.precision == "bf16").to(self.device)
            self.problem = Problem(flat, self.samples(facts, dtype), self.local(), self.experiment.seed)
            mode = self.experiment.mode
            steps = captured_steps(self.problem, self.settings.threads, self.settings.side_by_side)
            self.solver = LocalSolver(self.problem, None, mode, steps)
        rule = self.method.what
        self.down, self.up, self.priming = (
            layout(rule, flat) for layout in (broadcast_layout, update_layout, prime_layout)
        )
        self.memory: State = {name: torch.zeros(flat.dimension, dtype=dtype) for name in rule.local.remembers}
        self.before: State = dict(self.memory)  # what it was before `last`
        self.last = -1  # the job that the memory has seen
        self.kept: tuple[Begun, bytes] | None = None  # the update of that job, as long as it may be wanted

    # ---- making ---------------------------------------------------------------------------------
    def own_part(self) -> Shard:
        task = self.named_task()
        x, y = task.training
        if task.clients != self.clients:
            raise OffbeatError(f"the task has {task.clients} shards here and {self.clients} clients at the server")
        rows = torch.as_tensor(np.asarray(task.shards[self.client], dtype=np.int64))
        return Shard(x[rows], y[rows], task.model, task.loss)

    def named_task(self) -> Task:
        table = dict(self.experiment.task)
        if table.pop("custom", False):
            raise OffbeatError(
                f"the server's task '{table['name']}' is an object of its own; give this client its model and loss, "
                "with a function of yours that gives a Task (--data module:function)"
            )
        return build_task(str(table.pop("name")), table, self.experiment.seed)

    def model_and_loss(self, own: Shard, facts: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
        if own.model is not None and own.loss is not None:
            return own.model, own.loss
        table = self.experiment.task
        if table.get("custom") or not (table["name"] in DATA or table["name"] == "leaf"):
            raise OffbeatError(
                f"samples alone do not say which model task '{table['name']}' trains; give --data module:function with "
                "a function that gives a Task"
            )
        name, options = named("model", table["model"])
        shape = tuple(int(side) for side in facts["input"])
        return build_model(
            name, shape, int(facts["outputs"]), self.experiment.seed, **options
        ), functional.cross_entropy

    def check(self, facts: Mapping[str, Any]) -> None:
        """A shard of another shape than the server's task has."""
        x, y, model, loss = self.shard.x, self.shard.y, self.shard.model, self.shard.loss
        assert model is not None
        assert loss is not None
        problems = []
        for name, values, wanted in (("x", x, facts["input"]), ("y", y, facts["target"])):
            if list(values.shape[1:]) != list(wanted):
                problems.append(
                    f"the shard's {name} has samples of shape {list(values.shape[1:])}; the task has {wanted}"
                )
        for name, values, floats in (("x", x, facts["floating"]), ("y", y, not facts["labels"])):
            if values.is_floating_point() != floats:
                kinds = ["whole numbers", "floats"]
                advice = "; scale them as the server's task does, and give float32" if floats else ""
                problems.append(
                    f"the shard's {name} has {kinds[not floats]}; the task has {kinds[floats]} there{advice}"
                )
        if problems := problems or data_problems("shard", x, y, model, loss):
            raise ConfigError(problems)

    def samples(self, facts: Mapping[str, Any], dtype: torch.dtype) -> Samples:
        """All clients have this shard, as far as this one knows: only its own keys are ever drawn from."""
        many, batch = len(self.shard.x), facts["batch"]
        size = torch.full((self.clients,), many)
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (self.shard.x, self.shard.y))
        width = tuple(batch) if isinstance(batch, list) else batch
        samples = Samples(x, y, torch.arange(many), torch.zeros_like(size), size, width, facts["sampling"])
        return samples.to(self.device)

    def local(self) -> Local:
        """The local rule with all that a client sees: updates before they are encoded, and what it remembers."""
        local = self.method.what.local
        finish = local.finish.finish if isinstance(local.finish, Encoded) else local.finish
        return replace(local, finish=finish, remembers=())

    def step_law(self, local_steps: int | None) -> Any:
        """The steps of a job whose order leaves them to the client."""
        if local_steps is not None or self.method.when.orders is not None:
            return lambda job: local_steps or OWN_STEPS
        given = self.experiment.fleet
        if isinstance(given, Mapping) and given.get("custom"):
            return lambda job: OWN_STEPS
        plan = make_fleet(self.experiment, self.clients).local_steps
        return lambda job: OWN_STEPS if plan is None else plan(self.client, job)

    @property
    def digest(self) -> str:
        return model_digest(self.problem.model)

    def rehearse(self) -> None:
        """One step that leaves no trace: what is slow the first time is over before the run begins."""
        with self.settings, torch.no_grad():
            zeros = torch.zeros(1, self.problem.model.dimension, dtype=self.problem.model.dtype, device=self.device)
            rule = self.method.what
            start = dict.fromkeys((*rule.broadcasts, *rule.local.remembers), zeros)
            numerics.wave(self.problem, start, [Begun(self.client, 0, 0, 1)])

    # ---- computing ------------------------------------------------------------------------------
    def compute(self, begun: Begun, packet: bytes | bytearray) -> bytes:
        """The update of a job from a broadcast, as it travels; what the client remembers is on the disk by then."""
        with self.settings, torch.no_grad():
            start = self.down.unpack(packet, self.device)
            given = start | {name: t.to(self.device) for name, t in self.memory.items()}
            outcome = self.solver.solve({begun.version: given}, [begun])
            row = {name: t[0] for name, t in outcome.updates.items()}
            update = self.packed(row, begun)
        if self.memory:
            self.before, self.memory = self.memory, {name: row[name].cpu().clone() for name in self.memory}
            self.last, self.kept = begun.job, (begun, update)
            self.save()
        return update

    def packed(self, row: State, begun: Begun) -> bytes:
        key = keys.fold(keys.key(self.experiment.seed, "rule", self.client, begun.job), -1)
        return bytes(self.up.pack(row, lambda place: keys.fold(key, place)))

    # A job in parts, between which neighbours exchange models.
    def walk(self, begun: Begun, packet: bytes | bytearray) -> ClientJob:
        with self.settings, torch.no_grad():
            return ClientJob(self.problem, self.down.unpack(packet, self.device), begun)

    def steps_of(self, walk: ClientJob, first: int, many: int) -> None:
        with self.settings, torch.no_grad():
            for step in range(first, first + many):
                walk.step(step)

    def end_walk(self, walk: ClientJob, begun: Begun) -> bytes:
        with self.settings, torch.no_grad():
            return self.packed({name: t[0] for name, t in walk.finish().updates.items()}, begun)

    def prime(self, packet: bytes | bytearray) -> bytes:
        """The gradient over the whole shard, where everything that is remembered begins."""
        with self.settings, torch.no_grad():
            model = self.down.unpack(packet, self.device)["model"]
            client = torch.tensor([self.client], device=self.device)
            gradient = self.solver.full_gradients(self.problem, model[None], client)[0]
            self.memory = dict.fromkeys(self.memory, gradient.cpu().clone())
            self.before = dict(self.memory)
            self.last, self.kept = -1, None
            self.save()
            key = keys.key(self.experiment.seed, "prime", self.client)
            return bytes(self.priming.pack({"gradient": gradient}, lambda _: key))

    # ---- what is remembered ---------------------------------------------------------------------
    def settle(self, finished: int) -> None:
        """The server has this as the last finished job: what a later one remembered is taken back."""
        if self.memory and self.last > finished:
            self.memory, self.last, self.kept = dict(self.before), finished, None
            self.save()

    def save(self) -> None:
        if self.state is None or not self.memory:
            return
        self.state.mkdir(parents=True, exist_ok=True)
        tensors = {f"now/{name}": t for name, t in self.memory.items()}
        tensors |= {f"before/{name}": t.clone() for name, t in self.before.items()}
        facts: dict[str, Any] = {"run": self.run, "client": self.client, "last": self.last}
        if self.kept is not None:
            tensors["update"] = torch.frombuffer(bytearray(self.kept[1]), dtype=torch.uint8)
            facts["begun"] = list(self.kept[0])
        metadata = {"facts": json.dumps(facts)}
        write_file(self.state / MEMORY, lambda at: save_file(tensors, at, metadata=metadata))

    run = ""  # whose memory it is

    def recall(self, run: str) -> bool:
        """Read what an earlier process of this client left for this run; whether there was something."""
        self.run = run
        if self.state is None or not self.memory or not (self.state / MEMORY).exists():
            return False
        tensors, facts = read_tensors(self.state / MEMORY)
        if (facts.get("run"), facts.get("client")) != (run, self.client):
            return False
        self.memory = {name: tensors[f"now/{name}"] for name in self.memory}
        self.before = {name: tensors[f"before/{name}"] for name in self.memory}
        self.last = facts["last"]
        if "begun" in facts:
            self.kept = (Begun(*facts["begun"]), tensors["update"].numpy().tobytes())
        return True
