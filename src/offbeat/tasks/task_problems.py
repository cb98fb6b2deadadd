"""What is wrong with the parts of a task, in sentences that name the sample or the part; found without training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from offbeat.errors import in_words, unknown
from offbeat.numerics.evaluation import PERCENTILES, SPEEDS
from offbeat.numerics.forked import forked
from offbeat.numerics.forms import Tree, called, rows_of, scores_in
from offbeat.numerics.metrics import METRICS
from offbeat.numerics.vector import Loss
from offbeat.numerics.windows import Windows
from offbeat.tasks.inputs import LENGTHS, named_leaves, shapes
from offbeat.tasks.losses import fitting, unfit_label

COLUMNS = (
    "commit", "virtual_seconds", "client_steps", "samples", "bytes_up", "bytes_down", "bytes_d2d", "staleness_mean",
    "commits", "seconds",
)  # fmt: skip

HEADS = ("own", "held_out", "unseen", "shard")  # of columns of single clients


def unwrapped(model: Any) -> Any:
    """The model inside of one that torch.compile or a spreading over GPUs made; everything else as it is."""
    while isinstance(model, nn.Module) and (inner := inside(model)) is not None:
        model = inner
    return model


def inside(part: nn.Module) -> nn.Module | None:
    """What torch.compile or a spreading over GPUs was given; None for other modules."""
    if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return part.module  # type: ignore[no-any-return]
    return dict(part.named_children()).get("_orig_mod")


def part_problems(model: nn.Module) -> list[str]:
    """Parts that cannot be copied, or computed for many clients, as they are."""
    problems = []
    for name, part in model.named_modules():
        if (inner := inside(part)) is not None:
            problems.append(
                f"part '{name}' of the model is a {type(inner).__name__} inside a {type(part).__name__}, as "
                f"torch.compile and nn.DataParallel make it, which waves cannot batch; give the {type(inner).__name__} "
                "itself"
            )
        computed = [own for own, value in vars(part).items() if isinstance(value, Tensor) and not value.is_leaf]
        if computed and prune.is_pruned(part):
            problems.append(
                f"part '{name}' of the model is pruned, and keeps a '{computed[0]}' that was computed from its "
                f"parameters, so that it cannot be copied: prune.remove(part, '{computed[0]}') makes the zeros plain "
                "numbers, which train as others do; a mask that shall last is a buffer, or a parametrization "
                "(torch.nn.utils.parametrize)"
            )
    return problems


def listed(given: Any) -> bool:
    """Whether something has entries in an order: a list, a range, an array."""
    ordered = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    return ordered and not isinstance(given, str | bytes | Mapping) and getattr(given, "ndim", 1) > 0


def shard_problems(shards: Sequence[Any], rows: int) -> list[str]:
    problems = []
    if not len(shards):
        problems.append("shards is empty; a task needs at least one client")
    for client, shard in enumerate(shards):
        try:
            index = np.asarray(shard)
        except (ValueError, TypeError):  # lists of different lengths in it
            index = np.zeros(1)
        if index.ndim != 1:
            index = np.zeros(1)
        if index.size and not np.issubdtype(index.dtype, np.integer):
            problems.append(f"client {client} has samples {shard!r:.60}; samples are row numbers, whole and from 0 on")
        elif index.size == 0:
            problems.append(f"client {client} has an empty shard; give it samples or leave it out")
        elif index.min() < 0 or index.max() >= rows:
            problems.append(
                f"client {client} has sample {index.max()} (or a negative one); the data has rows 0..{rows - 1}"
            )
        if len(problems) >= 5:
            return [*problems, "and more"]
    return problems


def data_problems(kind: str, x: Tree, y: Tree, model: nn.Module, loss: Loss) -> list[str]:
    parts = named_leaves((x, y), ("inputs", "targets"))
    (first, leading), *others = parts
    rows = len(leading)
    for name, leaf in others:
        if len(leaf) != rows:
            return [f"the {kind} data has {rows} {first} and {len(leaf)} {name}; they must be as many"]
    if rows == 0:
        return [f"the {kind} data is empty"]
    for name, leaf in named_leaves((x,), ("inputs",)):
        if leaf.dtype.is_complex:
            return [
                f"the {kind} {name} are complex, of type {leaf.dtype}, and must be real: give torch.view_as_real(x), "
                "and join the parts by torch.view_as_complex in the model's forward"
            ]
    problems = []
    for name, leaf in parts:
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            place = int((~leaf.reshape(rows, -1).isfinite()).any(dim=1).nonzero()[0])
            problems.append(f"the {kind} {name} hold NaN or infinity, first in row {place}; clean the data")
        problems += empty_sequences(kind, name, leaf)
    try:
        classes = scores(model, x)
    except Exception as error:  # whatever a model of one's own raises
        if said := token_problems(kind, x, model):
            return [*problems, *said]
        return [*problems, f"the model does not take the {kind} inputs, of {shapes(x)}: {error}"]
    problems += token_problems(kind, x, model)
    labels = isinstance(y, Tensor | Windows) and y.dim() == 1 and not (y.dtype.is_floating_point or y.dtype.is_complex)
    return problems + label_problems(kind, model, loss, x, y, classes) if labels and classes is not None else problems


def label_problems(kind: str, model: nn.Module, loss: Loss, x: Tree, y: Tensor | Windows, classes: int) -> list[str]:
    """Labels that are no classes of the outputs, where the loss does not take them: they may mean something else, as
    counts, groups and -100 do."""
    least, most = ends(y)
    if least >= 0 and most < classes:
        return []
    row = unfit_label(model, loss, x, y, classes)
    if row is None:
        return []
    return [
        f"the {kind} labels run from {least} to {most}; the model has {classes} outputs, so they must be "
        f"0..{classes - 1}: the loss fails on sample {row}, which has label {int(y[row : row + 1])}"
    ]


def empty_sequences(kind: str, name: str, leaf: Any) -> list[str]:
    """Sequences without a token: masks that hide everything, lengths of 0."""
    word = name.rsplit(" ", 1)[-1].strip("'")
    if "mask" in word and leaf.dim() == 2 and not leaf.is_floating_point():
        none = ~(leaf != 0).any(dim=1)
    elif word in LENGTHS and leaf.dim() == 1:
        none = leaf < 1
    else:
        return []
    if not bool(none.any()):
        return []
    return [f"{kind} sample {int(none.nonzero()[0])} is a sequence of length 0, by {name}; leave it out"]


def token_problems(kind: str, x: Tree, model: nn.Module) -> list[str]:
    """Tokens that a table of the model has no row for, found by what reaches its tables from the samples with the
    smallest and the largest numbers."""
    problems: dict[str, str] = {}
    for name, leaf in named_leaves((x,), ("inputs",)):
        if leaf.is_floating_point() or leaf.dtype == torch.bool:
            continue
        for row in extremes(leaf):
            for part, many, token in tables(model, rows_of(x, [row])):
                problems.setdefault(
                    part,
                    f"{kind} sample {row} has token {token} in its {name}, but the table of {part} has rows "
                    f"0..{many - 1}; make the table larger or the tokens smaller",
                )
    return list(problems.values())


def extremes(values: Tensor | Windows) -> list[int]:
    """Rows that hold the smallest and the largest of whole numbers."""
    if isinstance(values, Windows):
        tokens = values.stream.on(values.device)
        places = (int(tokens.argmin()), int(tokens.argmax()))
        held = [(values.start <= place) & (place < values.start + (values.length or 1)) for place in places]
        return [int(rows.nonzero()[0]) for rows in held if bool(rows.any())]
    flat = values.reshape(len(values), -1)
    return [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())] if flat.numel() else []


def tables(model: nn.Module, x: Tree) -> list[tuple[str, int, int]]:
    """The tables that a sample asks for rows they have not: (part of the model, its rows, the token)."""
    lookups = Lookups(model)
    try:
        if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in model.modules()):
            with lookups:
                scores(model, x)
    except Exception:  # it is said where the model is called for its scores
        pass
    return lookups.wrong


class Lookups(TorchFunctionMode):
    """Notes the tokens that tables have no row for. It looks at what is looked up, not at what a part is called with:
    a part that makes tokens itself, of lengths, masks or embedded tokens, is right."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {
            id(p): f"{type(part).__name__} ('{name}')"
            for name, part in model.named_modules()
            for p in part.parameters(recurse=False)
        }
        self.wrong: list[tuple[str, int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.embedding, functional.embedding_bag):
            given = {**dict(zip(("input", "weight"), args, strict=False)), **(kwargs or {})}
            tokens, weight = given["input"], given["weight"]
            bad = tokens[(tokens < 0) | (tokens >= len(weight))]
            if len(bad):
                self.wrong.append((self.names.get(id(weight), "an embedding"), len(weight), int(bad[0])))
        return func(*args, **(kwargs or {}))


def ends(values: Tensor | Windows) -> tuple[int, int]:
    """The smallest and the largest of whole numbers."""
    if isinstance(values, Windows):
        return values.stream.least, values.stream.most
    return int(values.min()), int(values.max())


def scores(model: nn.Module, x: Tree) -> int | None:
    """How many scores the model gives a sample; None if its outputs are no rows of several."""
    out = scores_in(tried(model, x))
    if not isinstance(out, Tensor):
        return None  # trying the loss says more
    return int(out.shape[1]) if out.dim() == 2 and out.shape[1] > 1 else None


@torch.enable_grad()
def tried(model: nn.Module, x: Tree) -> Any:
    """What the model gives for two samples; it may ask for gradients inside."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    with forked([parameter.device]):  # a model that draws leaves the caller's generator as it was
        return called(model, fitting(rows_of(x, slice(2)), parameter))  # and may change its input


def of_clients(name: str, metrics: Mapping[Any, Any]) -> bool:
    """Return whether a name is that of a column of single clients: HEAD_METRIC_mean and the like."""
    ends = ("mean", "worst", *(f"p{each}" for each in PERCENTILES), *SPEEDS)
    head = next((head for head in HEADS if name.startswith(f"{head}_")), None)
    body, _, end = name.removeprefix(f"{head}_").rpartition("_")
    return head is not None and end in ends and body in ("loss", "accuracy", *metrics)


def metric_problems(metrics: Any) -> list[str]:
    """What is wrong with a table of metrics."""
    if not isinstance(metrics, Mapping):
        return [f"metrics = {in_words(metrics)}; it must be a table, such as {{'mae': 'mae', 'worst': my_function}}"]
    problems = []
    for name, given in metrics.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w-]*", name):
            problems.append(f"metrics has the name {in_words(name)}; a name has letters, digits, - and _")
        elif name in (*COLUMNS, "loss", "training_loss") or name.endswith("_smoothed") or of_clients(name, metrics):
            problems.append(f"metrics: the name '{name}' is taken; choose another")
        elif isinstance(given, str) and given not in METRICS:
            problems.append(f"metrics: {name}: {unknown('metric', given, METRICS)}")
        elif not isinstance(given, str) and not callable(given):
            problems.append(
                f"metrics: {name} = {in_words(given)}; it must be a function of (outputs, targets), or a name"
            )
    return problems
