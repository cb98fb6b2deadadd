"""Rows of a dataset that a `DataLoader` gives to its client: those that its sampler names in each pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import index
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from offbeat.errors import ConfigError
from offbeat.numerics.trial import seeded

Collate: TypeAlias = Callable[[list[Any]], Any]
MOST = 2**24  # numbers of one pass of a sampler; a longer pass is taken for one without an end
PASSES = 8  # of a sampler that is not known, at most
ENOUGH = 2**16  # numbers after which two passes are enough
REMEDY = (
    "Clients draw their own batches, so a loader must read the same samples in every pass: give Subset(dataset, rows) "
    "or sampler=SubsetRandomSampler(rows), with a row as often as it is to count"
)


class Part(NamedTuple):
    """Rows of a dataset, each as often as it is read in one pass, and the function that collates them."""

    data: Any
    rows: Sequence[int]
    collate: Collate | None


def part_of(given: Any) -> Part:
    """Return the samples that a `Dataset` or a `DataLoader` gives."""
    data = given.dataset if isinstance(given, DataLoader) else given
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ConfigError(
            [f"{type(data).__name__} can only be read from its start, and clients need numbered rows; give a dataset "
             "with __getitem__ and __len__"]
        )  # fmt: skip
    if not isinstance(given, DataLoader):
        return Part(data, range(len(data)), None)
    if type(given).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            [f"{type(given).__name__} has an __iter__ of its own, which is not called: samples are read one by one. "
             "Give its dataset, or Subset(dataset, rows)"]
        )  # fmt: skip
    collate: Any = given.collate_fn
    if given.batch_sampler is None and collate is not default_convert:
        raise ConfigError(
            ["a loader with batch_size=None and a collate_fn converts single samples; convert them in the dataset's "
             "__getitem__, or give a batch_size and a collate_fn of a list of samples"]
        )  # fmt: skip
    rows = rows_of_loader(given)
    if not len(rows):
        raise ConfigError(
            [f"a loader gives no sample: its sampler names none, or drop_last drops all of {len(data)} samples; give "
             "a smaller batch_size, or drop_last=False"]
        )  # fmt: skip
    return Part(data, rows, None if collate in (default_collate, default_convert) else collate)


def selects(given: Any) -> bool:
    """Return whether a loader reads other rows than all of its dataset, in order."""
    return isinstance(given, DataLoader) and list(rows_of_loader(given)) != list(range(len(given.dataset)))  # type: ignore[arg-type]


def rows_of_loader(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the rows that one pass over a loader reads: in the sampler's order, or sorted where that is random."""
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return rows_of_sampler(batches)[0]
    sampler = loader.sampler if batches is None else batches.sampler
    rows, ordered = rows_of_sampler(sampler)
    if batches is None or not batches.drop_last:
        return rows
    whole = len(rows) // batches.batch_size * batches.batch_size
    return rows[:whole] if ordered or not whole else rows  # a random order drops others in each pass


def rows_of_sampler(sampler: Any) -> tuple[Sequence[int], bool]:
    """Return the rows that a sampler names in every pass, and whether it does so in the same order."""
    kind: Any = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler.data_source)), True
    if kind is SubsetRandomSampler:
        return [number(row) for row in sampler.indices], False
    if isinstance(sampler, RandomSampler | WeightedRandomSampler) and sampler.replacement:
        raise ConfigError(
            [f"{kind.__name__} draws with replacement, which is not used. {REMEDY}; Task(sampling='replacement'), the "
             "default, draws batches with replacement"]
        )  # fmt: skip
    if kind is RandomSampler and sampler.num_samples == len(sampler.data_source):
        return range(len(sampler.data_source)), False
    with undrawn(getattr(sampler, "generator", None)):
        first = one_pass(sampler, 0)
        passes = max(2, min(PASSES, ENOUGH // max(1, len(first))))
        others = [one_pass(sampler, again) for again in range(1, passes)]
    least = sorted(first)
    if any(sorted(rows) != least for rows in others):
        raise ConfigError([f"{kind.__name__} names other samples in each pass. {REMEDY}"])
    return (first, True) if all(rows == first for rows in others) else (least, False)


def one_pass(sampler: Any, again: int) -> list[int]:
    """Return the rows of one pass, whose epoch (`set_epoch`) is `again` later than the sampler's."""
    if again and hasattr(sampler, "set_epoch"):
        sampler = copy.copy(sampler)
        epoch: Any = getattr(sampler, "epoch", None)
        sampler.set_epoch((epoch or 0) + again)
    with seeded(again + 1, torch.device("cpu")):
        rows = list(islice(flat(sampler), MOST + 1))
    if len(rows) > MOST:
        raise ConfigError([f"{type(sampler).__name__} names more than {MOST:,} samples in one pass. {REMEDY}"])
    return rows


def flat(names: Iterable[Any]) -> Iterator[int]:
    """Yield the numbers in what a sampler gives: rows, or lists of them."""
    for name in names:
        if isinstance(name, list | tuple) or getattr(name, "ndim", False):
            yield from map(number, name)
        else:
            yield number(name)


def number(row: Any) -> int:
    try:
        return index(row)
    except TypeError:
        raise ConfigError(
            [f"a sampler names {row!r:.40} ({type(row).__name__}); it must name rows of the dataset by their numbers"]
        ) from None


@contextmanager
def undrawn(generator: Any) -> Iterator[None]:
    """Put a generator back into its state."""
    state = generator.get_state() if isinstance(generator, torch.Generator) else None
    try:
        yield
    finally:
        if state is not None:
            generator.set_state(state)
