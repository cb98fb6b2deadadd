"""A task: the learning problem. Model, loss, data and who has which samples; yours takes five lines."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.config.options import LARGEST
from offbeat.errors import ConfigError, in_words
from offbeat.numerics import trial, unseen
from offbeat.numerics.blame import failing, first_line
from offbeat.numerics.buffers import BatchNorm, BufferKinds
from offbeat.numerics.forms import Form, Forms, Tree, handing_over, packed, rows_of, scores_in, unpacked
from offbeat.numerics.metrics import METRICS, Metric, as_metric
from offbeat.numerics.samples import Samples, Sampling
from offbeat.numerics.snapshot import Snapshot
from offbeat.numerics.vector import FlatModel, Loss, copied, lazy, module_problems, of_type
from offbeat.numerics.windows import Windows
from offbeat.tasks.inputs import named_leaves, of_clients, read, text_of
from offbeat.tasks.loaders import Collate, selects
from offbeat.tasks.losses import loss_problems, mixed_types, record_taken, sum_note
from offbeat.tasks.task_problems import (
    data_problems,
    listed,
    metric_problems,
    part_problems,
    scores,
    shard_problems,
    tried,
    unwrapped,
)

NUMBERS = (torch.float32, torch.float64)  # types that a run may be in
TRIED = 1024  # samples of a batch that a step is tried with, where it is larger than the shard


@dataclass(frozen=True, eq=False)
class Task:
    """`data` is `(x, y)` tensors or a `Dataset` of such pairs; `shards[i]` are the rows of client i.

    x and y may be tuples or dictionaries of tensors: the model is called with x as its arguments, or as arguments by
    name. Without `shards`, `data` is a list with a data set for each client. A `Dataset` or `DataLoader` is read once;
    `collate` makes one batch of the list of all its samples, where they are not of one form.

    The model's parameters as given are version 0. `loss(outputs, targets)` is the mean over a batch. `batch_size` may
    be a number for each client; None means the whole shard, exactly. Outputs with one score per class and targets that
    are classes, tokens or shares of classes give an accuracy.

    `metrics` are further figures by name: one that ships (`offbeat list metrics`), or a function of (outputs, targets)
    of a whole set that gives a number; `metric(more_is_better=...)` lets it be a target. Clients are looked at one by
    one where they have sets of their own: `client_tests[i]` are rows of the test set for client i, `held_out[i]` rows
    of the data that nobody trains on, `unseen` the shards of clients that never train. `left_out` are the numbers of
    clients that `evaluate.unseen` took away: the others are numbered anew, in their order.

    Of a model that torch.compile or nn.DataParallel made, the one inside is taken.

    `batch_norm` says what becomes of running statistics (`offbeat.numerics.batch_norm`).
    """

    model: nn.Module
    loss: Loss
    data: Any
    shards: Sequence[Any] = None  # type: ignore[assignment]
    test: Any = None
    batch_size: int | Sequence[int] | None = 10
    sampling: Sampling = "replacement"
    name: str = "custom"
    collate: Collate | None = None
    batch_norm: BatchNorm | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    client_tests: Sequence[Any] | None = None
    held_out: Sequence[Any] | None = None
    unseen: Sequence[Any] | None = None
    left_out: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", unwrapped(self.model))
        given: Any = self.shards
        if given is None and (own := of_clients(self.data)) is not None:
            object.__setattr__(self, "data", own[0])
            object.__setattr__(self, "shards", own[1])
            if isinstance(self.test, list) and (test := of_clients(self.test)) is not None:
                object.__setattr__(self, "test", test[0])

    @cached_property
    def training(self) -> tuple[Tree, Tree]:
        """Inputs and targets, read once."""
        return read(self.data, self.collate)

    @cached_property
    def testing(self) -> tuple[Tree, Tree]:
        """Those of the test set, or of the training set where there is none."""
        return self.training if self.test is None else read(self.test, self.collate)

    def problems(self, dtype: torch.dtype | None = None) -> list[str]:
        """Everything that would stop a run in this number type (None: in any), found without training."""
        snapshot = Snapshot(self.model, self.loss)  # the calls below may move a counter of the loss, or of a class
        try:
            return self._problems(dtype, snapshot)
        finally:
            snapshot.restore()

    def _problems(self, dtype: torch.dtype | None, snapshot: Snapshot) -> list[str]:
        problems = self.kind_problems()
        if problems:
            return problems
        problems = part_problems(self.model) or self.materialised() or module_problems(self.model, self.batch_norm)
        if isinstance(self.batch_size, Sequence) and len(self.batch_size) != self.clients:
            problems.append(
                f"batch_size has {len(self.batch_size)} numbers for {self.clients} clients; give one for each"
            )
        if self.least_batch is not None and not 1 <= self.least_batch <= LARGEST:
            problems.append(
                f"batch_size = {in_words(self.batch_size)}; give at least 1 and at most {LARGEST:,}, or None for the "
                "whole shard"
            )
        if self.sampling not in get_args(Sampling):
            known = ", ".join(f"'{name}'" for name in get_args(Sampling))
            problems.append(f"sampling = {in_words(self.sampling)}; it is one of {known}")
        trainable = not problems
        for kind, data in (("training", self.data), ("test", self.test)):
            if kind == "test" and data is None:
                continue
            try:
                x, y = self.training if kind == "training" else self.testing
                parts = named_leaves((x, y), ("inputs", "targets"))
            except ConfigError as error:
                problems += [f"the {kind} data: {problem}" for problem in error.problems]
                continue
            except Exception as error:  # whatever a Dataset of one's own raises
                problems.append(
                    f"the {kind} data must be a pair (x, y) of tensors or a Dataset of such pairs ({error})"
                )
                continue
            if not all(leaf.dim() for _, leaf in parts):
                problems.append(f"the {kind} data has inputs or targets without rows; give one row per sample")
                continue
            before, rows = len(problems), len(parts[0][1])
            problems += shard_problems(self.shards, rows) if kind == "training" else []
            problems += data_problems(kind, x, y, self.looked_at, self.loss) if trainable else []
            if trainable and len(problems) == before:
                most = self.least_batch or (min(map(len, self.shards)) if kind == "training" else rows)
                problems += loss_problems(kind, self.model, self.loss, x, y, most, self.record is not None)
            if (kind == "training" or self.client_tests is not None) and selects(data):
                rows_of = "shards are" if kind == "training" else "client_tests are"
                problems.append(
                    f"the {kind} data is a loader whose sampler selects or orders samples, and {rows_of} row numbers; "
                    "give the dataset itself, or a list with a loader for each client and no row numbers"
                )
            problems += self.look_problems(kind, rows) if len(problems) == before else []
        return problems or self.step_problems(dtype, snapshot)

    def warn(self) -> None:
        """Warn of what a run would take and a user may not want; called where there are no problems."""
        if note := sum_note(self.model, self.loss, *self.training, self.record is not None):
            warnings.warn(f"task '{self.name}': {note}", stacklevel=2)

    def look_problems(self, kind: str, rows: int) -> list[str]:
        """What is wrong with the sets of single clients that lie in the training or in the test data."""
        problems = []
        if self.client_tests is not None and self.test is None:
            problems.append("client_tests are rows of the test set, but there is none; give test")
        for name in ("client_tests",) if kind == "test" else ("held_out", "unseen"):
            sets = getattr(self, name)
            if sets is None:
                continue
            if name != "unseen" and len(sets) != self.clients:
                problems.append(f"{name} has {len(sets)} sets for {self.clients} clients; give one for each")
            there = [each for each in sets if len(each)]
            if not there:
                problems.append(f"{name} has no rows at all; give rows for one client at least, or leave it out")
            problems += [f"{name}: {problem}" for problem in shard_problems(there, rows)] if there else []
            if not problems and kind == "training":
                trained, looked_at = np.zeros(rows, bool), np.zeros(rows, bool)
                for mask, parts in ((trained, self.shards), (looked_at, there)):
                    for part in parts:
                        mask[np.asarray(part, dtype=np.int64)] = True
                if len(both := np.flatnonzero(trained & looked_at)):
                    problems.append(f"{name} has row {both[0]}, and {len(both) - 1} more, that clients train on")
                elif (text := text_of(self.data)) is not None:
                    clear = text.clear_of(np.flatnonzero(trained))
                    if len(both := np.flatnonzero(looked_at & ~clear)):
                        problems.append(
                            f"{name} has window {both[0]}, and {len(both) - 1} more, with tokens of windows that "
                            "clients train on; leave such windows out"
                        )
        return problems

    def materialised(self) -> list[str]:
        """Give lazy layers their shapes by one call, as PyTorch does."""
        if any(lazy(p) for p in self.model.parameters()):
            try:
                scores(self.model, self.training[0])
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                return [f"the model has layers without a shape yet, and does not take the inputs: {error}"]
        return []

    def step_problems(self, dtype: torch.dtype | None, snapshot: Snapshot) -> list[str]:
        """What one training step on the first client's batch shows, in the number type of the run, or (None) in one of
        those that a run may use."""
        reason: Exception | None = None
        for kind in NUMBERS if dtype is None else (dtype,):
            try:
                return self.tried_step(kind, snapshot)
            except ConfigError as error:
                return list(error.problems)
            except Exception as error:  # whatever a user's model or loss may raise
                reason = reason or error
        assert reason is not None
        said = f"a training step on the first client's batch fails: {first_line(reason)}"
        return [said + self.type_remedy(dtype, snapshot) + self.sample_at_fault(dtype, reason)]

    def sample_at_fault(self, dtype: torch.dtype | None, error: Exception) -> str:
        """Which of the first client's samples a step fails on."""
        row = failing(np.asarray(self.shards[0])[:TRIED].tolist(), partial(self.slope, dtype or NUMBERS[0]), error)
        return "" if row is None else f". It is training sample {row}"

    def slope(self, dtype: torch.dtype, rows: Tensor) -> Any:
        """Loss and gradient of the first model on these rows."""
        model, x, y = self.batch(dtype, rows)
        return model.slope(model.initial(), x, y, trial.trial_key(x.device))

    def type_remedy(self, dtype: torch.dtype | None, snapshot: Snapshot) -> str:
        """What number types have to do with a step that fails in one of them."""
        if said := mixed_types(self.model):
            return said
        for other in [kind for kind in NUMBERS if dtype not in (None, kind)]:
            try:
                self.tried_step(other, snapshot)
            except Exception:  # it is something else, then
                continue
            failed, works = (str(kind).removeprefix("torch.") for kind in (dtype, other))
            return (
                f". The run is in {failed}, and in {works} it works: make constants of the model and of the loss "
                "buffers (register_buffer), or make them with x.dtype"
            )
        return ""

    def tried_step(self, dtype: torch.dtype, snapshot: Snapshot) -> list[str]:
        shard = np.asarray(self.shards[0], dtype=np.int64)
        rows = torch.as_tensor(np.resize(shard, min(self.per_step(0), max(len(shard), TRIED))))
        if problems := trial.shared_memory(self.model, self.changing.state):
            return problems
        if self.batch_norm is None and self.changing.state:
            return [trial.changing_buffer(name) for name in sorted(self.changing.state)]
        model, x, y = self.batch(dtype, rows)
        problems = trial.problems(model, x, y)
        snapshot.restore()
        last = np.asarray(self.shards[-1], dtype=np.int64)
        _, *others = self.batch(dtype, torch.as_tensor(np.resize(last, len(rows))))
        return problems or unseen.problems(*self.batch(dtype, rows), self.model, (others[0], others[1]))

    def batch(self, dtype: torch.dtype, rows: Tensor) -> tuple[FlatModel, Any, Any]:
        """The model, and these rows as it is given them."""
        device, forms = next(self.model.parameters()).device, self.forms(dtype, self.training)
        x, y = (packed(f, rows_of(t, rows), dtype).to(device) for f, t in zip(forms, self.training, strict=True))
        return self.flat_model(dtype).to(device), x, y

    def kind_problems(self) -> list[str]:
        """What is not of the kind that a field of a task is."""
        model: Any = self.model
        loss: Any = self.loss
        shards: Any = self.shards
        batch: Any = self.batch_size
        name: Any = self.name
        problems = []
        if not isinstance(model, nn.Module):
            problems.append(f"model = {in_words(model)}; it must be an nn.Module, such as nn.Linear(4, 3)")
        if not callable(loss):
            problems.append(f"loss = {in_words(loss)}; it must be a function of (outputs, targets)")
        elif isinstance(loss, type):
            problems.append(f"loss = {loss.__name__} is a class; give one of its objects: {loss.__name__}()")
        if not listed(shards):
            each = "; or leave it out, and give a list with a data set for each client" if shards is None else ""
            problems.append(f"shards = {in_words(shards)}; it must be a list with the row numbers of each client{each}")
        elif not all(listed(shard) for shard in shards):
            problems.append(f"shards = {in_words(shards)}; each client's shard must be a list of row numbers")
        sizes = batch if listed(batch) else [batch]
        whole = all(isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in sizes)
        if batch is not None and not whole:
            problems.append(
                f"batch_size = {in_words(batch)}; it must be a whole number, or one for each client, or None: all of a "
                "shard"
            )
        if not isinstance(name, str):
            problems.append(f"name = {in_words(name)}; it must be a text")
        for field_name in ("client_tests", "held_out", "unseen"):
            sets = getattr(self, field_name)
            if sets is not None and not (listed(sets) and all(listed(each) for each in sets)):
                problems.append(f"{field_name} = {in_words(sets)}; it must be a list with lists of row numbers")
        return problems + metric_problems(self.metrics)

    @property
    def has_accuracy(self) -> bool:
        """Whether outputs are scores of classes and targets say which is right."""
        x, y = self.training
        outputs = scores_in(tried(self.looked_at, x))
        if not isinstance(y, Tensor | Windows) or not isinstance(outputs, Tensor):
            return False
        return METRICS["accuracy"](outputs, y[:2].to(outputs.device)) is not None

    @property
    def clients(self) -> int:
        return len(self.shards) if listed(self.shards) else 1

    @property
    def client_ids(self) -> list[int] | None:
        """The number that each client had before others were left out; None where all are there."""
        if not len(self.left_out):
            return None
        ids: list[int] = np.delete(np.arange(self.clients + len(self.left_out)), self.left_out).tolist()
        return ids

    @property
    def batches(self) -> tuple[int, ...] | None:
        """The batch size of each client, where they differ."""
        return tuple(self.batch_size) if isinstance(self.batch_size, Sequence) else None

    @property
    def least_batch(self) -> int | None:
        """The smallest batch of any client; None where shards are used whole."""
        return min(self.batch_size, default=1) if isinstance(self.batch_size, Sequence) else self.batch_size

    def per_step(self, client: int) -> int:
        """Samples that one step of a client uses."""
        if isinstance(self.batch_size, Sequence):
            return int(self.batch_size[client])
        return self.batch_size or len(self.shards[client])

    def samples(self, dtype: torch.dtype) -> Samples:
        shards = [np.asarray(shard, dtype=np.int64) for shard in self.shards]
        batch = self.batch_size if isinstance(self.batch_size, int) else self.batches
        return Samples.of(*self.columns(dtype, self.training), shards, batch, self.sampling)

    def evaluation(self, dtype: torch.dtype) -> tuple[Tensor | Windows, Tensor | Windows]:
        """The test set, or the training set where there is none."""
        return self.columns(dtype, self.testing)

    def forms(self, dtype: torch.dtype, data: tuple[Tree, Tree]) -> Forms:
        """What samples of several parts look like."""
        return Forms(*(Form.of(tree, dtype) for tree in data))

    def columns(self, dtype: torch.dtype, data: tuple[Tree, Tree]) -> tuple[Tensor | Windows, Tensor | Windows]:
        """Inputs and targets as an engine holds them."""
        x, y = (packed(form, tree, dtype) for form, tree in zip(self.forms(dtype, data), data, strict=True))
        return x, y

    @property
    def all_metrics(self) -> dict[str, Metric]:
        """Accuracy, and those that were asked for."""
        given = {name: METRICS[m] if isinstance(m, str) else as_metric(m) for name, m in self.metrics.items()}
        return {"accuracy": METRICS["accuracy"]} | given

    def flat_model(self, dtype: torch.dtype, rounded: bool = False, reference: bool = False) -> FlatModel:
        """Return the model as a function of flat vectors. For the `reference` loop every buffer may change."""
        kinds = self.changing
        if reference and self.batch_norm is not None:
            kinds = kinds.with_state(self._constants(kinds))
        forms = self.forms(dtype, self.training)
        model = FlatModel(self.model, self.loss, dtype, rounded, forms, self.batch_norm, kinds)
        if self.record is not None:
            handing_over(model.module)
        return model

    @cached_property
    def looked_at(self) -> nn.Module:
        """The model to call before a run, which leaves nothing in the caller's own."""
        model = copied(self.model)
        return model if self.record is None else handing_over(model)

    @cached_property
    def record(self) -> Any | None:
        """What the model gives for two samples, where it is a record that the loss takes as a whole."""
        try:
            return record_taken(copied(self.model), self.loss, *self.training)
        except Exception:  # what fails is said where it is tried for itself
            return None

    @property
    def numbers(self) -> int:
        """In a vector: what is trained, and real buffers that travel with it."""
        numbers = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        if self.batch_norm != "averaged":
            return numbers
        state = self.changing.state
        return numbers + sum(
            b.numel() * (2 if b.is_complex() else 1)
            for name, b in self.model.named_buffers()
            if name in state and (b.is_floating_point() or b.is_complex())
        )

    @cached_property
    def changing(self) -> BufferKinds:
        """Which buffers of the model change in training, as a few calls of a copy show."""
        names = {name for name, _ in self.model.named_buffers()}
        if not names:
            return BufferKinds()
        rows = torch.as_tensor(np.asarray(self.shards[0], dtype=np.int64))[: min(self.per_step(0), TRIED)]
        for dtype in NUMBERS:
            module = of_type(copied(self.model), dtype)
            module = module if self.record is None else handing_over(module)
            form, data = self.forms(dtype, self.training).inputs, self.training[0]
            device = next(module.parameters()).device
            batches: list[Any] = [
                packed(form, rows_of(data, at), dtype).to(device) for at in (rows, rows[:1].expand(len(rows)))
            ]
            fixed = self.batch_norm is not None
            kinds = trial.changing_buffers(module, [unpacked(form, batch) for batch in batches], fixed)
            if kinds is not None:
                break
        else:
            kinds = trial.norm_kinds(self.model)
        constant = self._constants(kinds)
        if self.batch_norm is not None and constant and not self._can_be_batched(kinds, rows):
            return kinds.with_state(constant)  # it decides by values, so any may change later
        return kinds

    def _constants(self, kinds: BufferKinds) -> set[str]:
        """The buffers that have not changed, and could; those that are not finite cannot be averaged."""
        others = {name: b for name, b in self.model.named_buffers() if name not in kinds.state | kinds.cache}
        return {name for name, b in others.items() if b.layout is torch.strided and bool(b.isfinite().all())}

    def _can_be_batched(self, kinds: BufferKinds, rows: Tensor) -> bool:
        """Whether a step of this model runs in the form of a wave."""
        dtype, device = NUMBERS[0], next(self.model.parameters()).device
        forms = self.forms(dtype, self.training)
        x, y = (packed(f, rows_of(t, rows), dtype).to(device) for f, t in zip(forms, self.training, strict=True))
        try:
            model = FlatModel(self.model, self.loss, dtype, False, forms, self.batch_norm, kinds).to(device)
            model.gradient(model.initial()[None], x[None], y[None], trial.trial_key(device)[None])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model of one's own raises
            return False
        return True


def require(task: Task) -> Task:
    problems = task.problems()
    if problems:
        raise ConfigError(problems)
    return task
