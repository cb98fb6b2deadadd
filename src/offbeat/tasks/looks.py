"""What a run looks at: the test set, and sets of single clients that nobody trains on.

A share of every shard, or whole clients, can be held out of any task; draws are keyed, so the same seed holds out the
same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from offbeat import keys
from offbeat.config import registry
from offbeat.config.options import LARGEST
from offbeat.errors import ConfigError, in_words
from offbeat.numerics.evaluation import ClientEvaluation, Evaluation, Faults, Figure, Set
from offbeat.numerics.metrics import as_metric
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.windows import Windows
from offbeat.tasks.inputs import text_of
from offbeat.tasks.task import Task
from offbeat.tasks.task_problems import metric_problems, shard_problems

TEST = "the test set"
Kind = Literal["test", "train", "held-out"]


@dataclass(frozen=True)
class Watch:
    """Which figures an evaluation gives. `clients` None looks at single clients where the task has sets of them."""

    on: Kind | None = None  # where loss and metrics come from; None: the test set, or the training data without one
    clients: bool | None = None
    training_loss: bool = False
    samples: int | None = None  # of the set of loss and metrics at most so many, at even distances
    speed: Sequence[int] | None = None  # of each client: 0 the fast third, 1 the middle, 2 the slow


class Looks:
    """All evaluations of a run. `figures` says of each column where it comes from and whether more is better."""

    def __init__(self, task: Task, watch: Watch, model: FlatModel, samples: Samples) -> None:
        self.faults = Faults()
        self.figures: dict[str, Figure] = {}
        metrics = task.all_metrics
        data, x, y = main_set(task, watch.on, model, samples)
        tested = model.reading(task.forms(model.dtype, task.testing))
        mine = tested if data == TEST else model
        if watch.samples is not None and len(x) > watch.samples:
            few = torch.arange(watch.samples, device=samples.x.device) * len(x) // watch.samples
            data, x, y = f"{data} ({watch.samples:,} of {len(x):,} samples)", x[few], y[few]
        main = Evaluation(mine, x, y, metrics, data, self.faults)
        self.evaluations: list[Evaluation | ClientEvaluation] = [main]
        for name, data, x, y, rows in client_sets(task, watch, model, samples):
            speed = None if name == "unseen" else watch.speed
            mine = tested if name == "own" else model
            self.evaluations.append(ClientEvaluation(name, data, mine, x, y, rows, metrics, speed, self.faults))
        for evaluation in self.evaluations:
            self.figures |= evaluation.figures()
        self.shards = None
        if watch.training_loss:
            data = "the training data, the mean over clients"
            self.shards = ClientEvaluation(
                "training", data, model, samples.x, samples.y, task.shards, {}, None, self.faults
            )
            self.figures["training_loss"] = Figure(data, False)

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for evaluation in self.evaluations:
            values |= evaluation(flat)
        if self.shards is not None:
            values["training_loss"] = self.shards(flat)["training_loss_mean"]
        return values

    def of_clients(self, clients: int) -> dict[str, list[float | None]]:
        """What the last look found of each client that trains."""
        figures: dict[str, list[float | None]] = {}
        for evaluation in self.evaluations:
            if isinstance(evaluation, ClientEvaluation) and evaluation.name != "unseen":
                for name, values in evaluation.last.items():
                    column: list[float | None] = [None] * clients
                    for client, value in zip(evaluation.clients, values, strict=True):
                        column[client] = value
                    figures[f"{evaluation.name}_{name}"] = column
        return figures


def main_set(task: Task, on: Kind | None, model: FlatModel, samples: Samples) -> tuple[str, Set, Set]:
    """The set of the loss and the metrics, in words first."""
    if task.held_out is not None and (on == "held-out" or (on is None and task.test is None)):
        rows = np.unique(np.concatenate([np.asarray(each, dtype=np.int64) for each in task.held_out]))
        where = torch.from_numpy(rows).to(samples.x.device)
        return "the held-out parts of shards", rows_of(samples.x, where), rows_of(samples.y, where)
    if on == "train" or task.test is None:
        if task.held_out is None and task.unseen is None:
            return "the training data", samples.x, samples.y
        where = torch.unique(samples.order)
        return "the training data", rows_of(samples.x, where), rows_of(samples.y, where)
    x, y = (t.to(samples.x.device) for t in task.evaluation(model.dtype))
    return TEST, x, y


def rows_of(data: Set, rows: Tensor) -> Set:
    """These rows; those of windows are not copied."""
    return replace(data, start=data.start[rows]) if isinstance(data, Windows) else data[rows]


def client_sets(
    task: Task, watch: Watch, model: FlatModel, samples: Samples
) -> list[tuple[str, str, Set, Set, Sequence[Any]]]:
    """The sets of single clients: the head of their columns, in words, the data, and whose rows are which."""
    x, y = samples.x, samples.y
    sets: list[tuple[str, str, Set, Set, Sequence[Any]]] = []
    if watch.clients is False:
        return sets
    if task.client_tests is not None:
        test = [t.to(x.device) for t in task.evaluation(model.dtype)]
        sets.append(("own", "each client's own test set", test[0], test[1], task.client_tests))
    if task.held_out is not None:
        sets.append(("held_out", "the held-out part of each client's shard", x, y, task.held_out))
    if task.unseen is not None:
        sets.append(("unseen", "clients that never train", x, y, task.unseen))
    if watch.clients and not sets:
        sets.append(("shard", "each client's own training data", x, y, task.shards))
    return sets


# ---- what is held out ---------------------------------------------------------------------------
def holding_out(task: Task, share: float, seed: int) -> Task:
    """The task without this share of every shard, which becomes the client's held-out part: drawn by key, or, of
    windows of a text, the last ones. What is held out is trained on by nobody: neither a row that several clients have,
    nor a window that has tokens in common with such a one."""
    text = text_of(task.data)
    if problems := shard_problems(task.shards, LARGEST if text is None else len(text)):
        raise ConfigError(problems)
    root = keys.key(seed, "hold-out")
    shards = [np.asarray(shard, dtype=np.int64) for shard in task.shards]
    out = np.zeros(1 + max(int(shard.max()) for shard in shards), bool)
    for shard in shards:
        places = keys.uniform(keys.fold(root, shard)) if text is None else -text.start[shard].numpy()
        many = min(len(shard) - 1, max(1, round(share * len(shard)))) if len(shard) > 1 else 0
        out[shard[np.argsort(places, kind="stable")[:many]]] = True
    kept = [shard[~out[shard]] for shard in shards]
    if text is not None and out.any():
        clear = text.clear_of(np.flatnonzero(out))
        kept = [shard[clear[shard]] for shard in kept]
    if not out.any():
        raise ConfigError(
            [f"evaluate.hold_out = {share}: no client has two samples, so no part of a shard can be held out; give "
             "clients more samples (a task with fewer clients)"]
        )  # fmt: skip
    if not all(len(shard) for shard in kept):
        raise ConfigError(
            [f"evaluate.hold_out = {share}: a client would be left without samples to train on; hold out less"]
        )
    return replace(task, shards=kept, held_out=[shard[out[shard]] for shard in shards])


def leaving_out(task: Task, clients: int, seed: int) -> Task:
    """The task without so many clients, drawn by key, who never train; those that are left keep their order. Of the
    clients left out, rows that others train on are no part of the set, nor are windows that share a token with one of
    theirs."""
    if clients >= task.clients:
        raise ConfigError([f"evaluate.unseen = {clients} of {task.clients} clients; leave at least one to train"])
    if task.unseen is not None:
        raise ConfigError([f"evaluate.unseen = {clients}, but the task has unseen clients; give one of the two"])
    text = text_of(task.data)
    if problems := shard_problems(task.shards, LARGEST if text is None else len(text)):
        raise ConfigError(problems)
    gone = drawn_clients(clients, task.clients, seed)
    stay = [client for client in range(task.clients) if client not in set(gone)]
    unseen = [np.asarray(task.shards[client], dtype=np.int64) for client in gone]
    trained = np.unique(np.concatenate([np.asarray(task.shards[client], dtype=np.int64) for client in stay]))
    clear = None if text is None else text.clear_of(trained)
    unseen = [shard[~np.isin(shard, trained) if clear is None else clear[shard]] for shard in unseen]
    if not any(len(shard) for shard in unseen):
        shared = "every sample" if text is None else "every window, or a token of it,"
        raise ConfigError(
            [f"evaluate.unseen: {shared} of those clients is another one's too; take another split, such as one by "
             "owner" + ("" if text is None else ", or windows that do not overlap")]
        )  # fmt: skip
    fields = {"shards": [task.shards[client] for client in stay], "unseen": unseen, "left_out": gone}
    for name in ("client_tests", "held_out"):
        sets = getattr(task, name)
        fields |= {} if sets is None else {name: [sets[client] for client in stay]}
    if isinstance(task.batch_size, Sequence):
        fields["batch_size"] = [task.batch_size[client] for client in stay]
    return replace(task, **fields)  # type: ignore[arg-type]


def drawn_clients(count: int, clients: int, seed: int) -> list[int]:
    """Return so many of the clients, drawn by key."""
    order = np.argsort(keys.uniform(keys.fold(keys.key(seed, "unseen"), np.arange(clients))), kind="stable")
    drawn: list[int] = np.sort(order[:count]).tolist()
    return drawn


def with_metrics(task: Task, asked: Sequence[Any]) -> Task:
    """The task with metrics by name: one that ships, module:function, or a table with name, as and more_is_better."""
    metrics: dict[str, Any] = {}
    problems: list[str] = []
    for given in asked:
        table = {"name": given} if isinstance(given, str) else given
        known = {"name", "as", "more_is_better"}
        if not isinstance(table, Mapping) or "name" not in table or set(table) - known:
            problems.append(
                f"evaluate.metrics has {in_words(given)}; give a name (`offbeat list metrics`), module:function, or a "
                "table with name, as (its column) and more_is_better"
            )
            continue
        name = str(table["name"])
        column = str(table.get("as", name.rpartition(":")[2].rpartition(".")[2]))
        try:
            metric = as_metric(registry.find("metric", name))
        except ConfigError as error:
            problems += error.problems
            continue
        more: Any = table.get("more_is_better", metric.more_is_better)
        if more is not None and not isinstance(more, bool):
            problems.append(f"evaluate.metrics: more_is_better = {in_words(more)}; it is true or false")
        elif column in metrics:
            problems.append(f"evaluate.metrics has two columns '{column}'; name one of them with as")
        metrics[column] = replace(metric, more_is_better=more)
    if problems := problems or metric_problems(metrics):
        raise ConfigError(problems)
    return replace(task, metrics={**task.metrics, **metrics})


def speed_thirds(step_seconds: Any) -> list[int] | None:
    """0, 1 or 2 for the fast, the middle and the slow third of clients; None where all are equally fast.

    >>> speed_thirds([1.0, 5.0, 3.0])
    [0, 2, 1]
    """
    times = np.asarray(step_seconds, dtype=np.float64)
    if len(times) < 3 or times.max() == times.min():
        return None
    rank = np.argsort(np.argsort(times, kind="stable"), kind="stable")
    thirds: list[int] = (3 * rank // len(times)).tolist()
    return thirds
