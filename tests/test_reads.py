"""Every kind of data against a count of which sample each client read, by an independent implementation.

The loss is linear, `mean(w[sample] * y)`, so a client with rate 1 moves `w[sample]` by `y` times the share of its batch
that the sample had: the final model counts the reads of each sample, whatever the schedule was. The expected counts
follow from the trace (which jobs were committed, and their steps) and from keyed draws that are written here again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, SubsetRandomSampler, TensorDataset

from offbeat import Experiment, Task, run, windows

Shards = Sequence[Sequence[int]]
SAMPLES, LENGTH = 30, 4
IDS = torch.arange(SAMPLES)
Y = 1 + IDS.double() / 8  # exact in every float type


# ---- the draws, written again -------------------------------------------------------------------
WORDS = 1 << 64


def scattered(key: int, word: int) -> int:
    """SplitMix64's number `word` below `key`, before its last step."""
    x = (key + (word + 1) * 0x9E3779B97F4A7C15) % WORDS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORDS
    return (x ^ (x >> 27)) * 0x94D049BB133111EB % WORDS


def fold(key: int, *words: int) -> int:
    for word in words:
        x = scattered(key, word)
        key = x ^ (x >> 31)
    return key


def word(key: int, slot: int) -> int:
    return scattered(key, slot) >> 32


def job_key(seed: int, client: int, job: int) -> int:
    purpose = b"batch"
    return fold(seed, 0, *purpose, -1 - len(purpose), client, job)


def permuted(key: int, place: int, size: int) -> int:
    """The swap-or-not shuffle of Hoang, Morris and Rogaway (2012), 24 rounds."""
    for number in range(24):
        once = fold(key, number)
        partner = (((once >> 32) * size >> 32) - place) % size
        if word(once, max(place, partner)) % 2:
            place = partner
    return place


def reads(sampling: str, key: int, shard: Sequence[int], batch: int | None, steps: int) -> Iterator[int]:
    """The samples that a job reads, in order."""
    size = len(shard)
    for slot in range(steps * (batch or size)):
        if batch is None or sampling == "in-order":
            yield shard[slot % size]
        elif sampling == "replacement":
            yield shard[word(key, slot) * size >> 32]
        else:
            yield shard[permuted(fold(key, slot // size), slot % size, size)]


# ---- the data, in every form --------------------------------------------------------------------
class Count(nn.Module):
    """A weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, ids: Tensor, scale: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if ids.is_floating_point():  # one-hot
            return ids @ self.weight
        if mask is not None:
            return (self.weight[ids] * mask).sum(1) / mask.sum(1)
        own = self.weight[ids if ids.dim() == 1 else ids[:, 0]]
        return own if scale is None else own * scale


def linear(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs * y).mean()


def of_next_token(outputs: Tensor, tokens: Tensor) -> Tensor:
    """The tokens that follow sample r begin with r + 1; the one behind it is r + LENGTH."""
    first = tokens[:, 0] - 1 if tokens.dim() == 2 else tokens - LENGTH
    return (outputs * (1 + first.to(outputs.dtype) / 8)).mean()


class Rows(Dataset[Any]):
    def __init__(self, ids: Sequence[int], sample: Callable[[int], Any]) -> None:
        self.ids, self.sample = list(ids), sample

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> Any:
        return self.sample(self.ids[place])


class Shuffled(Sampler[int]):
    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter([self.rows[i] for i in torch.randperm(len(self.rows)).tolist()])


def ragged(i: int) -> Any:
    return {"tokens": torch.full((i % 3 + 1,), i), "labels": Y[i]}


def padded(samples: list[Any]) -> Any:
    tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).double()
    return {"ids": tokens, "mask": mask, "labels": torch.stack([sample["labels"] for sample in samples])}


def pair_of(rows: Sequence[int]) -> Any:
    return IDS[list(rows)], Y[list(rows)]


ALL = range(SAMPLES)
WHOLE = TensorDataset(IDS, Y)
MIXED = np.random.default_rng(5).permutation(SAMPLES)  # sample r of the whole data is not row r


class Given(NamedTuple):
    """Arguments of a task, and the samples of each client in the order that "in-order" reads."""

    data: Any
    shards: Shards | None
    samples: Shards
    loss: Any = linear
    collate: Any = None


def tensors(data: Any) -> Callable[[Shards], Given]:
    return lambda shards: Given(data, shards, shards)


def mixed(shards: Shards) -> Given:
    return Given(pair_of(MIXED), shards, [[int(MIXED[row]) for row in shard] for shard in shards])


def stream(tokens: Any, **options: Any) -> Callable[[Shards], Given]:
    data = windows(tokens, LENGTH, starts=MIXED, **options)
    return lambda shards: Given(data, shards, mixed(shards).samples, of_next_token)


def each(make: Callable[[Sequence[int]], Any], order: Any = list, collate: Any = None) -> Callable[[Shards], Given]:
    return lambda shards: Given([make(list(s)) for s in shards], None, [order(s) for s in shards], linear, collate)


TOKENS = np.arange(SAMPLES + LENGTH + 1)
KINDS: dict[str, Callable[[Shards], Given]] = {
    "tensors": tensors((IDS, Y)),
    "tensors in another order": mixed,
    "real numbers": tensors((torch.eye(SAMPLES), Y)),
    "arrays": tensors((IDS.numpy(), Y.numpy())),
    "dictionary": tensors({"ids": IDS, "scale": torch.ones(SAMPLES), "labels": Y}),
    "tuple": tensors(((IDS, torch.ones(SAMPLES)), Y)),
    "dataset": tensors(WHOLE),
    "dataset of dictionaries": tensors(Rows(ALL, lambda i: {"ids": IDS[i], "labels": Y[i]})),
    "loader": tensors(DataLoader(WHOLE, 7, shuffle=True)),
    "different lengths": lambda shards: Given(Rows(ALL, ragged), shards, shards, collate=padded),
    "windows": stream(TOKENS),
    "windows of bytes": stream(TOKENS.astype(np.uint8)),
    "windows, the next token alone": stream(TOKENS, predict="last"),
    "windows by name": lambda shards: stream(TOKENS)(shards)._replace(
        data=dict(zip(("ids", "labels"), windows(TOKENS, LENGTH, starts=MIXED), strict=True))
    ),
    "a pair for each client": each(pair_of),
    "a dictionary for each client": each(lambda rows: dict(zip(("ids", "labels"), pair_of(rows), strict=True))),
    "a dataset for each client": each(lambda rows: Rows(rows, lambda i: (IDS[i], Y[i]))),
    "subsets": each(lambda rows: Subset(WHOLE, rows)),
    "loaders of subsets": each(lambda rows: DataLoader(Subset(WHOLE, rows), 3, shuffle=True)),
    "loaders with SubsetRandomSampler": each(lambda rows: DataLoader(WHOLE, 3, sampler=SubsetRandomSampler(rows))),
    "loaders with samplers of their own": each(lambda rows: DataLoader(WHOLE, sampler=Shuffled(rows)), sorted),
    "loaders with batch samplers": each(lambda rows: DataLoader(WHOLE, batch_sampler=[rows[:1], rows[1:]])),
    "loaders that collate": each(lambda rows: DataLoader(Subset(Rows(ALL, ragged), rows), 2, collate_fn=padded)),
    "different lengths of each client": each(lambda rows: Rows(rows, ragged), collate=padded),
}


# ---- the counts ---------------------------------------------------------------------------------
class Job(NamedTuple):
    client: int
    number: int
    steps: int


def commits(folder: Path) -> list[list[Job]]:
    """The jobs of each commit, as the trace has them."""
    rows = pq.read_table(folder / "trace.parquet").to_pylist()
    steps = {(row["client"], row["job"]): row["steps"] for row in rows if row["kind"] == "begun"}
    jobs = [row["jobs"] for row in rows if row["kind"] == "commit"]
    return [[Job(*name, steps[name]) for name in zip(flat[::2], flat[1::2], strict=True)] for flat in jobs]


def batch_of(batch: int | Sequence[int] | None, client: int) -> int | None:
    return batch[client] if isinstance(batch, list) else batch


def read_shares(given: Given, batch: Any, sampling: str, seed: int, made: list[list[Job]]) -> np.ndarray:
    """By how much each sample moved the model: the mean over a commit's jobs of reads / batch."""
    total = np.zeros(SAMPLES)
    for jobs in made:
        for job in jobs:
            samples, own = given.samples[job.client], batch_of(batch, job.client)
            key = job_key(seed, job.client, job.number)
            for sample, many in Counter(reads(sampling, key, samples, own, job.steps)).items():
                total[sample] += many / (own or len(samples)) / len(jobs)
    return total


@st.composite
def divisions(draw: Any) -> Shards:
    """Up to five clients with 1 to 9 samples, not all, some of several clients, perhaps one twice of one."""
    disjoint = draw(st.booleans())
    clients = draw(st.integers(2, 5))
    rows = draw(st.permutations(range(SAMPLES)))
    sizes = draw(st.lists(st.integers(1, 6), min_size=clients, max_size=clients))
    if disjoint:
        ends = np.cumsum(sizes).tolist()
        return [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [draw(st.lists(st.integers(0, SAMPLES - 1), min_size=size, max_size=size + 3)) for size in sizes]


@st.composite
def options(draw: Any) -> dict[str, Any]:
    shards = draw(divisions())
    clients = len(shards)
    batch = st.none() | st.integers(1, 7) | st.lists(st.integers(1, 7), min_size=clients, max_size=clients)
    law = {"law": "uniform", "low": 1, "high": 7, "mode": draw(st.sampled_from(["fixed", "random"]))}
    law = draw(st.sampled_from([law, None]))
    steps = None if law else draw(st.integers(1, 9))
    size = draw(st.integers(1, clients))
    method = draw(st.sampled_from(["local-sgd", "fedbuff"]))
    own = {"n": size} if method == "local-sgd" else {"buffer_size": size}
    fleet = {"name": "uniform", "drop_out": draw(st.sampled_from([0.0, 0.3]))}
    return {
        "shards": shards,
        "batch": draw(batch),
        "sampling": draw(st.sampled_from(["replacement", "shuffle", "in-order"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "mode": draw(st.sampled_from(["wave", "reference"])),
        "fleet": fleet | ({"local_steps": law} if law else {}),
        "method": {"name": method, "client_lr": 1.0} | own | ({"local_steps": steps} if steps else {}),
        "commits": draw(st.integers(1, 5)),
    }


def counted(given: Given, drawn: dict[str, Any]) -> tuple[np.ndarray, list[list[Job]], dict[str, Any]]:
    """The shares that a run's model counts, the jobs of its commits, and its losses of single clients."""
    task = Task(Count(), given.loss, given.data, given.shards, None, drawn["batch"], drawn["sampling"],
                collate=given.collate)  # fmt: skip
    experiment = Experiment(
        drawn["method"], task, drawn["fleet"], seed=drawn["seed"], until={"commits": drawn["commits"]}, device="cpu",
        precision="float64", mode=drawn["mode"], evaluate={"every_commits": drawn["commits"], "clients": True},
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        model = run(experiment, path).model["weight"].double()
        losses = pq.read_table(path / "clients.parquet").column("shard_loss").to_pylist()
        metrics = json.loads((path / "result.json").read_text())["metrics"]
        assert metrics["loss"]["data"] == "the training data"
        assert all(client is not None for client in losses)
        return -(model / Y).numpy(), commits(path), {"losses": losses, "loss": metrics["loss"]["final"]}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, deadline=None)
@given(drawn=options())
def test_every_kind_of_data(kind: str, drawn: dict[str, Any]) -> None:
    check(kind, drawn)


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), drawn=options())
def test_each_client_reads_the_samples_that_it_should(kind: str, drawn: dict[str, Any]) -> None:
    check(kind, drawn)


def check(kind: str, drawn: dict[str, Any]) -> None:
    given = KINDS[kind](drawn["shards"])
    shares, made, looks = counted(given, drawn)
    expected = read_shares(given, drawn["batch"], drawn["sampling"], drawn["seed"], made)
    np.testing.assert_allclose(shares, expected, rtol=1e-5, atol=1e-9)
    held = [-expected[list(own)] * Y.numpy()[list(own)] ** 2 for own in given.samples]
    np.testing.assert_allclose(looks["losses"], [loss.mean() for loss in held], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["tensors in another order", "windows", "loaders with SubsetRandomSampler"])
@settings(max_examples=3, deadline=None)
@given(drawn=options(), count=st.integers(2, 5), steps=st.integers(1, 12), batch=st.integers(1, 7))
def test_laws_of_samplings(kind: str, drawn: dict[str, Any], count: int, steps: int, batch: int) -> None:
    """Laws that hold whatever the draws are, for clients without common samples: one job of each."""
    rows = [int(row) for row in np.random.default_rng(drawn["seed"]).permutation(SAMPLES)]
    shards = [rows[i : 6 * i + 6] if i == 0 else rows[6 * i : 6 * i + i + 1] for i in range(count)]
    method = {"name": "local-sgd", "n": count, "client_lr": 1.0, "local_steps": steps}
    drawn = drawn | {"method": method, "batch": batch, "commits": 1, "fleet": {"name": "equal"}}
    given = KINDS[kind](shards)
    for sampling in ("replacement", "shuffle", "in-order"):
        shares, made, _ = counted(given, drawn | {"sampling": sampling})
        assert sorted(made[0]) == [Job(client, 0, steps) for client in range(count)]
        many = shares * batch * count
        np.testing.assert_allclose(many, np.rint(many), atol=1e-4)
        for own in given.samples:
            mine, reads_of_job = np.rint(many[list(own)]), steps * batch
            assert mine.sum() == reads_of_job  # every client reads its own samples alone
            if sampling != "replacement":
                assert mine.max() - mine.min() <= 1  # an epoch reads every sample once, before any comes again
            if sampling == "in-order":
                assert (np.diff(mine) <= 0).all()  # from the start
        others = sorted(set(range(SAMPLES)) - {sample for own in given.samples for sample in own})
        assert (many[others] == 0).all()


def test_draws_with_replacement_are_uniform_and_epochs_differ() -> None:
    """A chi-square test with 5 degrees of freedom: 25.7 is passed with a probability of 1e-4."""
    shards, drawn = [range(6)], {"batch": 5, "seed": 11, "mode": "wave", "fleet": {"name": "equal"}, "commits": 1}
    made: dict[str, np.ndarray] = {}
    for sampling in ("replacement", "shuffle"):
        method = {"name": "local-sgd", "n": 1, "client_lr": 1.0, "local_steps": 960}
        shares, *_ = counted(KINDS["tensors"](shards), drawn | {"sampling": sampling, "method": method})
        made[sampling] = shares[:6] * 5
    assert 0 < ((made["replacement"] - 800) ** 2 / 800).sum() < 25.7
    np.testing.assert_allclose(made["shuffle"], 800)
    orders = {tuple(reads("shuffle", job_key(11, 0, job), range(6), 6, 1)) for job in range(20)}
    assert len(orders) > 15
    assert all(sorted(order) == list(range(6)) for order in orders)
