"""Data as people have it, read once into tensors: pairs, several inputs, dictionaries, datasets, loaders, one for each
client; samples of different lengths by a collate function.

A pair is `(inputs, targets)`. Of a dictionary `labels` (or `label`) are the targets; of more than two columns the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from offbeat.errors import ConfigError
from offbeat.numerics.forms import Tree
from offbeat.numerics.trial import same, seeded
from offbeat.numerics.windows import Windows, signed
from offbeat.tasks.loaders import Collate, Part, part_of
from offbeat.tasks.losses import reason

LABELS = ("labels", "label")
AGAIN = 16  # samples that are read or collated twice, to find what draws
CLOSE = 1e-5  # relative: sums of another order
LENGTHS = ("length", "lengths")


@dataclass(frozen=True, eq=False)
class Joined:
    """A data set for each client."""

    parts: Sequence[Any]


def of_clients(data: Any) -> tuple[Joined, list[range]] | None:
    """A list of data sets and the rows that each client has; None if it is no such list."""
    if not isinstance(data, list | tuple) or not data or isinstance(data[0], Tensor | Windows):
        return None
    try:
        ends = [0]
        for part in data:
            ends.append(ends[-1] + many(part))
    except (TypeError, ValueError, IndexError, AttributeError):
        return None
    return Joined(data), [range(*both) for both in pairwise(ends)]


def many(data: Any) -> int:
    """The samples of one data set, counted without reading it; 1 of one that `read` refuses."""
    if isinstance(data, Dataset | DataLoader):
        try:
            return len(part_of(data).rows)
        except ConfigError:
            return 1
    first = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
    while isinstance(first, tuple | Mapping):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return len(first)


# ---- reading ------------------------------------------------------------------------------------
def read(data: Any, collate: Collate | None = None) -> tuple[Tree, Tree]:
    """`(inputs, targets)`, each a tensor, windows, or a tree of tensors with a row per sample."""
    parts = list(data.parts) if isinstance(data, Joined) else [data]
    if any(isinstance(part, Dataset | DataLoader) for part in parts):
        found = [of_client(client, part, len(parts)) for client, part in enumerate(parts)]
        functions = [collate or part.collate for part in found]
        if all(function == functions[0] for function in functions):
            return collated(found, functions[0])
        pairs = [collated([part], function) for part, function in zip(found, functions, strict=True)]
        remedy = "; or give one collate function for all: Task(..., collate=...)"
    else:
        pairs, remedy = [pair(part) for part in parts], ""
    if len(pairs) == 1:
        return pairs[0]
    x, y = (joined([one[side] for one in pairs], remedy) for side in (0, 1))
    return x, y


def of_client(client: int, given: Any, clients: int) -> Part:
    """The samples of one client's data set."""
    try:
        return part_of(given)
    except ConfigError as error:
        where = f"client {client}: " if clients > 1 else ""
        raise ConfigError([where + problem for problem in error.problems]) from None


def joined(trees: list[Tree], remedy: str = "") -> Tree:
    """The rows of all clients one behind the other."""
    for client, tree in enumerate(trees):
        if any(isinstance(leaf, Windows) for leaf in pytree.tree_leaves(tree)):
            raise ConfigError(
                [f"client {client} has windows of a stream of its own; join the streams of all clients to one array, "
                 "and give windows of it with shards=[...]: starts=[...] says where windows begin"]
            )  # fmt: skip
        if said := unlike(trees[0], tree, 1):
            raise ConfigError([f"client {client} has {said[0]}, client 0 {said[1]}; they must be alike{remedy}"])
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *trees)


def pair(data: Any) -> tuple[Tree, Tree]:
    """Columns that are there at once."""
    if isinstance(data, Mapping):
        x, y = divided({name: tree(value) for name, value in data.items()})
    else:
        x, y = map(tree, data)
    return side_by_side(x), side_by_side(y)


def side_by_side(values: Tree) -> Tree:
    """Windows alone stay places in their stream; beside other parts they are copied out of it."""
    if isinstance(values, Tensor | Windows):
        return values
    return pytree.tree_map(lambda leaf: leaf[:] if isinstance(leaf, Windows) else leaf, values)


def text_of(data: Any) -> Windows | None:
    """The windows among the inputs of a task's data."""
    inputs = data if isinstance(data, Mapping) else data[0] if isinstance(data, tuple) else None
    return next((leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Windows)), None)


def tree(values: Any) -> Tree:
    """Tuples and dictionaries of tensors; everything else must be one tensor."""
    if values is None:
        raise ConfigError(
            ["a part of it is None, and samples are rows of tensors; leave the part out, or give the others by the "
             "names of forward's arguments: ({'x': x}, y)"]
        )  # fmt: skip
    if isinstance(values, Windows):
        return values
    if isinstance(values, Mapping):
        return {str(name): tree(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(tree(value) for value in values)
    return column(values)


def column(values: Any) -> Tensor:
    """One dense tensor of a type that PyTorch computes with."""
    made = torch.as_tensor(values)
    if made.layout != torch.strided or made.is_nested:
        kind = "nested" if made.is_nested else "sparse"
        raise ConfigError(
            [f"a tensor is {kind} ({made.layout}), and samples are rows of dense ones; give x.to_dense(), or padded "
             "rows and their lengths"]
        )  # fmt: skip
    return signed(made)


def divided(columns: Any) -> tuple[Tree, Tree]:
    """Inputs and targets of columns: by name, or the last."""
    if isinstance(columns, Mapping):
        name = next((name for name in LABELS if name in columns), None)
        if name is None:
            known = ", ".join(map(str, columns))
            raise ConfigError([f"samples are dictionaries with {known}, and none is 'labels'; name the targets so"])
        rest = {key: value for key, value in columns.items() if key != name}
        if not rest:
            raise ConfigError([f"samples are dictionaries with '{name}' alone; there are no inputs"])
        return rest, columns[name]
    if not isinstance(columns, list | tuple) or len(columns) < 2:
        raise ConfigError([f"a sample must be (inputs, targets) or a dictionary with 'labels', not {kind(columns)}"])
    *inputs, targets = columns
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


# ---- samples one by one -------------------------------------------------------------------------
def collated(parts: Sequence[Part], collate: Collate | None) -> tuple[Tree, Tree]:
    """All samples of these parts as one batch."""
    places = [(part.data, i) for part in parts for i in part.rows]
    if not places:
        raise ConfigError(["the dataset is empty"])
    with seeded(1, torch.device("cpu")):
        samples = [part[i] for part, i in places]
    refuse_draws(places, samples)
    for number, sample in enumerate(samples):
        if empty := next((name for name, leaf in leaves_of(sample) if 0 in shape_of(leaf)), None):
            raise ConfigError([f"sample {number} is a sequence of length 0 ({empty}); leave it out"])
    if collate is None:
        return divided(stacked(samples))
    x, y = batch_of(collate, samples)
    for name, leaf in named_leaves((x, y), ("inputs", "targets")):
        if not leaf.dim() or len(leaf) != len(samples):
            rows = len(leaf) if leaf.dim() else "no"
            raise ConfigError(
                [f"collate gives {name} with {rows} rows for {len(samples)} samples; one for each it must be"]
            )
    refuse_mixing(collate, samples, (x, y))
    return x, y


def batch_of(collate: Collate, samples: list[Any]) -> tuple[Tree, Tree]:
    """What a function of the user's own makes of these samples."""
    try:
        batch = collate(samples)
    except Exception as error:  # whatever it raises
        raise ConfigError([f"the data does not collate: {at_fault(collate, samples, error)}"]) from error
    return divided(pytree.tree_map(tree, batch, is_leaf=lambda part: not isinstance(part, Mapping | list | tuple)))


def refuse_mixing(collate: Collate, samples: list[Any], whole: tuple[Tree, Tree]) -> None:
    """Refuse a collate function whose rows are not those of the samples, in their order: tried with some of them,
    from the shortest to the longest, so that all are padded alike."""
    sizes = [sum(size_of(leaf) for _, leaf in leaves_of(sample)) for sample in samples]
    order = sorted(range(len(samples)), key=sizes.__getitem__)
    few = [order[i] for i in sorted({i * (len(order) - 1) // (AGAIN - 1) for i in range(AGAIN)})]
    leaves = []
    for seed, numbers in ((1, few), (2, few[::-1])):
        with seeded(seed, torch.device("cpu")):
            leaves.append(pytree.tree_leaves(batch_of(collate, [samples[i] for i in numbers])))
    rows = torch.tensor(few)
    for one, other, all_rows in zip(*leaves, pytree.tree_leaves(whole), strict=True):
        padded_alike = one.shape[1:] == all_rows.shape[1:]
        if not same([other.flip(0)], [one], CLOSE) or (padded_alike and not same([all_rows[rows]], [one], CLOSE)):
            raise ConfigError(
                ["collate gives a sample other values, or another place, beside other samples: it sorts, draws at "
                 "random, or computes with several samples (their mean, mixtures). It is called once, with the "
                 "samples of all clients; keep their order, and do such things in the model, where draws are keyed"]
            )  # fmt: skip


def refuse_draws(places: Sequence[tuple[Any, int]], samples: Sequence[Any]) -> None:
    """A transform that draws: a sample must be the same whenever it is read."""
    step = max(1, len(places) // AGAIN)
    for number in range(0, len(places), step):
        part, i = places[number]
        with seeded(2, torch.device("cpu")):
            again = part[i]
        if not alike(samples[number], again):
            raise ConfigError(
                [f"sample {number} is another one when it is read again: a transform draws at random. Samples are read "
                 "once; draw in the model instead, where draws are keyed (CropFlip of offbeat.tasks.models is such a "
                 "layer), or not at all"]
            )  # fmt: skip


def alike(one: Any, other: Any) -> bool:
    pairs = zip(leaves_of(one), leaves_of(other), strict=False)
    try:
        return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for (_, a), (_, b) in pairs)
    except (TypeError, ValueError, RuntimeError):
        return True  # texts, and what else has no numbers


def stacked(samples: Sequence[Any]) -> Any:
    """Samples of one form, side by side."""
    rows = [row(sample) for sample in samples]
    for number, sample in enumerate(rows):
        if said := unlike(rows[0], sample):
            raise ConfigError(
                [f"the data does not collate: sample {number} has {said[0]}, sample 0 {said[1]}; give "
                 "Task(..., collate=...), a function that makes one batch of a list of samples and pads them"]
            )  # fmt: skip
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows)


def row(sample: Any) -> Any:
    """A sample with its lists of numbers as tensors."""
    if isinstance(sample, Mapping):
        return {str(name): row(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(row(value) for value in sample)
    if isinstance(sample, list) and any(isinstance(value, Tensor | list | tuple | Mapping) for value in sample):
        return tuple(row(value) for value in sample)
    try:
        return column(sample)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            [f"a sample has {kind(sample)}, which is no number or array; take it out, or make it one by collate"]
        ) from None


def at_fault(collate: Collate, samples: list[Any], error: Exception) -> str:
    """Which sample a collate function cannot put beside the first one."""
    for number, sample in enumerate(samples):
        try:
            collate([samples[0], sample])
        except Exception as own:  # whatever it raises
            return f"collate stops at sample {number} with {type(own).__name__}: {reason(own)}"
    return f"collate stops with {type(error).__name__}: {reason(error)}"


# ---- trees --------------------------------------------------------------------------------------
def leaves_of(values: Any) -> list[tuple[str, Any]]:
    """The parts of a sample with their names; a list of numbers is one part."""
    flat = pytree.tree_flatten_with_path(values, is_leaf=lambda part: isinstance(part, list))[0]
    return [(pytree.keystr(path).strip("[]") or "the sample", leaf) for path, leaf in flat]


def named_leaves(trees: Sequence[Tree], names: Sequence[str]) -> list[tuple[str, Any]]:
    """The tensors of inputs and targets: "inputs", or "inputs 'mask'" where there are several."""
    return [
        (f"{name} {place}" if not isinstance(each, Tensor | Windows) else name, leaf)
        for name, each in zip(names, trees, strict=True)
        for place, leaf in leaves_of(each)
    ]


def shape_of(leaf: Any) -> tuple[int, ...]:
    return (len(leaf),) if isinstance(leaf, list) else tuple(getattr(leaf, "shape", ()))


def size_of(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, str | bytes) else math.prod(shape_of(leaf))


def unlike(first: Tree, other: Tree, side: int = 0) -> tuple[str, str] | None:
    """What differs between two trees, of each one; shapes from `side` on."""
    one, two = leaves_of(first), leaves_of(other)
    if [name for name, _ in one] != [name for name, _ in two]:
        said = [" and ".join(name for name, _ in leaves) for leaves in (two, one)]
        return said[0], said[1]
    for (name, a), (_, b) in zip(one, two, strict=True):
        if a.shape[side:] != b.shape[side:]:
            return f"{name} of shape {list(b.shape[side:])}", f"of shape {list(a.shape[side:])}"
    return None


def kind(value: Any) -> str:
    return f"{value!r:.40} ({type(value).__name__})"


def shapes(values: Tree) -> str:
    """The shape and type of a sample, in words."""
    if isinstance(values, Tensor | Windows):
        return f"shape {tuple(values.shape[1:])} and type {values.dtype}"
    return ", ".join(f"{name} {tuple(leaf.shape[1:])} {leaf.dtype}" for name, leaf in leaves_of(values))
