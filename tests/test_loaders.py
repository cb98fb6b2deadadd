"""Loaders with samplers: a client has the samples that one pass over its loader reads, or the loader is refused."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from offbeat import ConfigError, Experiment, Task, build, run

ROWS = 24
DATA = TensorDataset(torch.arange(float(ROWS))[:, None], torch.arange(ROWS) % 3)


def task(data: Any, shards: Any = None, **options: Any) -> Task:
    return Task(nn.Linear(1, 3), functional.cross_entropy, data, shards, batch_size=2, **options)


def samples_of(given: Task) -> list[list[int]]:
    """The samples of each client, by the number that they hold."""
    inputs = given.training[0][:, 0].long()
    return [inputs[torch.as_tensor(shard)].tolist() for shard in given.shards]


class Listed(Sampler[int]):
    """Rows in an order of its own."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Shuffled(Listed):
    def __iter__(self) -> Any:
        return iter([self.rows[i] for i in torch.randperm(len(self.rows)).tolist()])


class Batches(Listed):
    """Batches of rows; it has no length."""

    def __iter__(self) -> Any:
        rows = [self.rows[i] for i in np.random.permutation(len(self.rows))]  # noqa: NPY002
        return (rows[i : i + 3] for i in range(0, len(rows), 3))


def every_third(i: int) -> range:
    return range(i, ROWS, 3)


SAMPLERS = {
    "subset": lambda i: DataLoader(DATA, 5, sampler=SubsetRandomSampler(every_third(i))),
    "subset, drop_last": lambda i: DataLoader(DATA, 5, sampler=SubsetRandomSampler(every_third(i)), drop_last=True),
    "its numbers are tensors": lambda i: DataLoader(DATA, sampler=SubsetRandomSampler(torch.tensor(every_third(i)))),
    "Subset": lambda i: DataLoader(Subset(DATA, every_third(i)), 4, shuffle=True),
    "Subset of a Subset": lambda i: Subset(Subset(DATA, range(ROWS)), every_third(i)),
    "Subset in order": lambda i: DataLoader(Subset(DATA, every_third(i)), sampler=SequentialSampler(every_third(i))),
    "distributed": lambda i: DataLoader(DATA, sampler=DistributedSampler(DATA, 3, i, shuffle=False)),
    "a sampler of its own": lambda i: DataLoader(DATA, 4, sampler=Listed(list(every_third(i)))),
    "a random one": lambda i: DataLoader(DATA, 4, sampler=Shuffled(np.arange(i, ROWS, 3))),
    "a random one, drop_last": lambda i: DataLoader(DATA, 3, sampler=Shuffled(every_third(i)), drop_last=True),
    "batches": lambda i: DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(every_third(i)), 3, False)),
    "batches of its own": lambda i: DataLoader(DATA, batch_sampler=Batches(every_third(i))),
    "no batches": lambda i: DataLoader(DATA, None, sampler=SubsetRandomSampler(every_third(i))),
    "weighted, without replacement": lambda i: DataLoader(
        Subset(DATA, every_third(i)), sampler=WeightedRandomSampler([1.0, 2.0] * 4, 8, replacement=False)
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_client_has_the_samples_that_its_loader_reads(name: str) -> None:
    given = task([SAMPLERS[name](i) for i in range(3)])
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    assert [sorted(each) for each in samples_of(given)] == [list(every_third(i)) for i in range(3)]
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    read = [sorted(int(row) for x, *_ in SAMPLERS[name](i) for row in x.reshape(-1, 1)) for i in range(3)]
    for one, other in zip(read, samples_of(given), strict=True):
        assert set(one) <= set(other) if "drop_last" in name else one == sorted(other)
    assert given.problems() == []


def test_the_model_trains_as_with_subsets() -> None:
    def model(data: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        method = {"name": "local-sgd", "n": 3, "client_lr": 0.001}
        return run(Experiment(method=method, task=task(data), until={"commits": 3}, device="cpu")).model

    one = model([SAMPLERS["subset"](i) for i in range(3)])
    other = model([Subset(DATA, every_third(i)) for i in range(3)])
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_row_that_is_named_twice_counts_twice_and_the_last_batch_of_a_fixed_order_is_dropped() -> None:
    twice = task([DataLoader(DATA, sampler=SubsetRandomSampler([7, 7, 2])), Subset(DATA, [5, 5])])
    assert samples_of(twice) == [[7, 7, 2], [5, 5]]
    fixed = [DataLoader(DATA, 5, drop_last=True), DataLoader(DATA, 4, sampler=Listed([9, 3, 6, 1, 2]), drop_last=True)]
    assert samples_of(task(fixed)) == [list(range(20)), [9, 3, 6, 1]]
    shuffled = task([DataLoader(DATA, 5, shuffle=True, drop_last=True)])
    assert samples_of(shuffled) == [list(range(ROWS))]


def test_datasets_of_datasets() -> None:
    parts = random_split(DATA, [10, 14], torch.Generator().manual_seed(1))
    assert Counter(chain(*samples_of(task(list(parts))))) == Counter(range(ROWS))
    assert samples_of(task([ConcatDataset([Subset(DATA, [3, 1]), Subset(DATA, [2])]), DATA]))[0] == [3, 1, 2]


def test_a_test_set_of_a_loader_with_a_sampler() -> None:
    clients = [Subset(DATA, every_third(i)) for i in range(3)]
    few = DataLoader(DATA, sampler=SubsetRandomSampler([4, 8]))
    assert task(clients, test=few).testing[0][:, 0].tolist() == [4.0, 8.0]
    assert task(clients, test=[few, few]).testing[0][:, 0].tolist() == [4.0, 8.0, 4.0, 8.0]
    said = task(clients, test=few, client_tests=[[0], [1], [0, 1]]).problems()
    assert len(said) == 1
    assert "the test data is a loader whose sampler selects or orders samples, and client_tests are row" in said[0]


def test_a_generator_of_a_sampler_stays_as_it_is() -> None:
    class Own(Shuffled):
        generator = torch.Generator().manual_seed(3)

        def __iter__(self) -> Any:
            return iter(torch.randperm(ROWS, generator=self.generator).tolist())

    before = Own.generator.get_state()
    assert samples_of(task([DataLoader(DATA, sampler=Own([]))])) == [list(range(ROWS))]
    assert torch.equal(before, Own.generator.get_state())

    class Drawing(Own):
        def __iter__(self) -> Any:
            return iter(torch.randint(ROWS, (ROWS,), generator=self.generator).tolist())

    assert "Drawing names other samples in each pass" in task([DataLoader(DATA, sampler=Drawing([]))]).problems()[0]


# ---- what is refused ----------------------------------------------------------------------------
class Endless(Listed):
    def __iter__(self) -> Any:
        while True:
            yield 0


class Growing(Listed):
    """A curriculum: every pass has one sample more."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(range(self.passes))


class Prefetching(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Named(Dataset[Any]):
    def __getitem__(self, name: str) -> Any:
        return DATA[0]

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
            "WeightedRandomSampler draws with",
        ),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
            "RandomSampler draws with replacement",
        ),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "RandomSampler names other samples"),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 3, 0)), "DistributedSampler names other samples"),
        (lambda: DataLoader(DATA, sampler=Growing([])), "Growing names other samples in each pass"),
        (lambda: DataLoader(DATA, batch_sampler=[[0, "a"]]), "a sampler names 'a' (str)"),
        (lambda: DataLoader(Named(), sampler=["a", "b"]), "it must name rows of the dataset by their numbers"),
        (lambda: DataLoader(DATA, 30, drop_last=True), "drop_last drops all of 24 samples"),
        (lambda: DataLoader(DATA, 30, shuffle=True, drop_last=True), "drop_last drops all of 24 samples"),
        (lambda: DataLoader(DATA, sampler=SubsetRandomSampler([])), "its sampler names none"),
        (lambda: DataLoader(DATA, None, collate_fn=lambda one: one), "with batch_size=None and a collate_fn"),
        (lambda: Prefetching(DATA), "Prefetching has an __iter__ of its own"),
        (lambda: DataLoader(Lines()), "Lines can only be read from its start"),
    ],
)
def test_a_loader_that_reads_other_samples_in_each_pass_is_refused(loader: Any, said: str) -> None:
    problems = task([Subset(DATA, [1, 2]), loader()]).problems()
    assert len(problems) == 1
    assert problems[0].startswith("the training data: client 1: ")
    assert said in problems[0]
    if "draws" in said or "other samples" in said:
        assert "give Subset(dataset, rows) or sampler=SubsetRandomSampler(rows)" in problems[0]


def test_a_sampler_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.tasks.loaders.MOST", 1000)
    problems = task([DataLoader(DATA, sampler=Endless([]))]).problems()
    assert "Endless names more than 1,000 samples in one pass" in problems[0]


def test_a_sampler_beside_shards_that_are_row_numbers() -> None:
    shards = [range(4), range(4, 8)]
    with pytest.raises(ConfigError, match="the training data is a loader whose sampler selects or orders samples"):
        build(Experiment(method="fedbuff", task=task(SAMPLERS["subset"](0), shards), until={"commits": 1}))
    assert samples_of(task(DataLoader(DATA, 7, shuffle=True), shards)) == [list(shard) for shard in shards]


# ---- collate functions --------------------------------------------------------------------------
Samples = list[tuple[torch.Tensor, torch.Tensor]]


def stacked(samples: Samples, times: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples]) * times, torch.stack([y for _, y in samples])


def longest_first(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    return stacked(sorted(samples, key=lambda sample: -float(sample[0][0])))


def noisy(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = stacked(samples)
    return x + torch.randn(x.shape), y


def centred(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = stacked(samples)
    return x - x.mean(0), y


def mixed(samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = stacked(samples)
    return (x + x.roll(1, 0)) / 2, y


@pytest.mark.parametrize("collate", [longest_first, noisy, centred, mixed])
def test_a_collate_function_that_moves_draws_or_mixes_samples_is_refused(collate: Any) -> None:
    loaders = [DataLoader(Subset(DATA, every_third(i)), collate_fn=collate) for i in range(3)]
    problems = task(loaders).problems()
    assert len(problems) == 1
    assert "it sorts, draws at random, or computes with several samples" in problems[0]


def test_each_loader_has_its_own_collate_function() -> None:
    loaders = [DataLoader(Subset(DATA, every_third(i)), collate_fn=partial(stacked, times=10.0**i)) for i in range(3)]
    given = task(loaders)
    assert given.problems() == []
    assert samples_of(given) == [[row * 10**i for row in every_third(i)] for i in range(3)]
    assert samples_of(task(loaders, collate=stacked)) == [list(every_third(i)) for i in range(3)]
    unlike = DataLoader(DATA, collate_fn=lambda samples: (stacked(samples)[0].repeat(1, 2), stacked(samples)[1]))
    problems = task([loaders[0], unlike]).problems()
    assert "or give one collate function for all: Task(..., collate=...)" in problems[0]
