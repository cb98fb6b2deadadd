"""Inputs as people have them: several, dictionaries, different lengths, datasets and loaders, one for each client."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from offbeat import ConfigError, Experiment, Task, run
from offbeat.engines import tiles
from offbeat.numerics import local
from offbeat.numerics.forms import Form
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.wave import Problem, wave
from offbeat.records import Begun

CLIENTS = 4
SHARDS = [range(i, 20, CLIENTS) for i in range(CLIENTS)]
JOBS = [Begun(client, 0, 0, 3) for client in range(CLIENTS)]


class Masked(nn.Module):
    """The mean of the tokens that a mask lets through, and a number beside them; by the names of Hugging Face."""

    def __init__(self, record: bool = False) -> None:
        super().__init__()
        self.table, self.out, self.record = nn.Embedding(11, 4), nn.Linear(5, 3), record

    def forward(self, input_ids: Tensor, attention_mask: Tensor, weight: Tensor) -> Any:
        kept = attention_mask[..., None].to(weight.dtype)
        mean = (self.table(input_ids) * kept).sum(1) / kept.sum(1)
        scores = self.out(torch.cat([mean, weight[:, None]], 1))
        return SimpleNamespace(logits=scores, loss=None) if self.record else scores


def columns(rows: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 7, (rows,), generator=generator)
    return {
        "input_ids": torch.randint(11, (rows, 6), generator=generator),
        "attention_mask": torch.arange(6)[None] < lengths[:, None],
        "weight": torch.randn(rows, generator=generator),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def ragged(rows: int = 20) -> list[dict[str, Any]]:
    """The same samples, each as long as it is."""
    whole = columns(rows)
    long = whole["attention_mask"].sum(1)
    return [
        {
            "input_ids": whole["input_ids"][i, : long[i]],
            "weight": float(whole["weight"][i]),
            "labels": whole["labels"][i],
        }
        for i in range(rows)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": torch.arange(ids.shape[1])[None] < lengths[:, None],
        "weight": torch.tensor([sample["weight"] for sample in samples]),
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


class Rows(Dataset):
    def __init__(self, rows: Any, change: Any = None) -> None:
        self.rows, self.change = rows, change
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.rows[i] if self.change is None else self.change(self.rows[i])


def model(record: bool = False) -> Masked:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Masked(record)


def task(data: Any, shards: Any = SHARDS, **more: Any) -> Task:
    return Task(more.pop("model", model()), functional.cross_entropy, data, shards, batch_size=3, **more)


def problem(of: Task, dtype: torch.dtype = torch.float64) -> Problem:
    return Problem(of.flat_model(dtype), of.samples(dtype), local.sgd(0.5, {"momentum": 0.5}), 7)


def deltas(p: Problem, how: Any = reference) -> Tensor:
    return how(p, {"model": p.model.initial().repeat(len(JOBS), 1)}, JOBS).updates["delta"]


# ---- the same samples, however they come --------------------------------------------------------
def test_bytes_are_the_parts_again() -> None:
    tree = {"a": torch.randn(5, 2, 3), "b": (torch.arange(5), torch.arange(10).reshape(5, 2) > 3)}
    form = Form.of(tree, torch.float64)
    assert form is not None
    held = form.pack(tree)
    assert held.shape == (5, 6 * 8 + 8 + 2)
    back = form.unpack(held[torch.tensor([[4, 0], [1, 1]])])
    assert torch.equal(back["a"][0, 0], tree["a"][4].double())
    assert torch.equal(back["b"][0], torch.tensor([[4, 0], [1, 1]]))
    assert torch.equal(back["b"][1][0, 1], tree["b"][1][0])


def test_a_wave_of_several_inputs_is_the_twin_and_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "WORTH", 1)
    p = problem(task(columns()))
    want = deltas(p)
    advance = tiles.TiledAdvance(p, 2, 2)
    for how in (wave, *[lambda *given: wave(*given, advance)] * 3):
        assert float((deltas(p, how) - want).norm() / want.norm()) < 1e-10
    assert advance.steps  # also when traced
    plain, whole = model().double(), columns()
    labels = whole.pop("labels")
    optimiser = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.5)
    from offbeat.numerics.wave import columns as jobs_columns
    from offbeat.numerics.wave import draw

    rows, _ = draw(p, jobs_columns(p, JOBS[:1], torch.device("cpu")), 0, 3, 3)
    for batch in rows[0]:
        optimiser.zero_grad()
        given = {name: (t.double() if t.is_floating_point() else t)[batch] for name, t in whole.items()}
        functional.cross_entropy(plain(**given), labels[batch]).backward()
        optimiser.step()
    moved = p.model.initial() - nn.utils.parameters_to_vector(plain.parameters()).detach()
    assert float((want[0] - moved).norm() / moved.norm()) < 1e-10


class Batch(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    weight: Tensor


def kinds() -> dict[str, Any]:
    whole = columns()
    inputs = {name: whole[name] for name in ("input_ids", "attention_mask", "weight")}
    line = tuple(inputs.values())
    rows = [{name: t[i] for name, t in whole.items()} for i in range(20)]
    lists = [{**row, "input_ids": row["input_ids"].tolist(), "labels": int(row["labels"])} for row in rows]
    client = [[rows[i] for i in shard] for shard in SHARDS]
    own = [{name: t[list(shard)] for name, t in whole.items()} for shard in SHARDS]
    return {
        "dictionary and labels": task((inputs, whole["labels"])),
        "named by keys": task({name: t.numpy() for name, t in whole.items()}),
        "tuple": task((line, whole["labels"])),
        "several columns": task(TensorDataset(*whole.values())),
        "dataset of dictionaries": task(Rows(rows)),
        "dataset of lists": task(Rows(lists)),
        "loader": task(DataLoader(Rows(rows), batch_size=7)),
        "different lengths": task(Rows(ragged()), collate=padded),
        "loader that collates": task(DataLoader(Rows(ragged()), batch_size=2, collate_fn=padded)),
        "a dataset for each client": task([Rows(rows) for rows in client], None),
        "a pair for each client": task(
            [({n: t for n, t in each.items() if n != "labels"}, each["labels"]) for each in own], None
        ),
        "a loader for each client": task(
            [DataLoader(Rows([ragged()[i] for i in shard]), collate_fn=padded) for shard in SHARDS], None
        ),
        "a record with logits": task(whole, model=model(record=True)),
    }


KINDS = list(kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_trains_the_same(kind: str) -> None:
    given = kinds()[kind]
    assert given.problems() == []
    want = deltas(problem(task(columns())))
    for how in (reference, wave):
        assert float((deltas(problem(given), how) - want).norm() / want.norm()) < (1e-6 if "column" in kind else 1e-10)


@pytest.mark.parametrize("mode", ["wave", "reference"])
def test_a_run_on_datasets_of_clients_repeats_and_has_an_accuracy(mode: Any) -> None:
    def outcome() -> Any:
        own = [Rows([ragged()[i] for i in shard]) for shard in SHARDS]
        test = [Rows(ragged(9)[:4]), Rows(ragged(9)[4:])]
        given = Task(model(), functional.cross_entropy, own, test=test, batch_size=2, collate=padded)
        method = {"name": "fedbuff", "buffer_size": 2, "local_steps": 3}
        return run(Experiment(method=method, task=given, until={"commits": 5}, device="cpu", mode=mode))

    one, two = outcome(), outcome()
    assert one.accuracy_final == two.accuracy_final is not None
    assert all(torch.equal(one.model[name], two.model[name]) for name in one.model)


def test_a_dataset_is_read_once() -> None:
    rows = Rows([(torch.randn(3), 1.0) for _ in range(40)])
    given = Task(nn.Linear(3, 1), lambda out, y: functional.mse_loss(out[:, 0], y), rows, [range(20), range(20, 40)])
    run(Experiment(method={"name": "local-sgd", "n": 2}, task=given, until={"commits": 1}, device="cpu"))
    assert rows.reads <= 2 * 40  # once, and some again to see that they are the same


# ---- what cannot be -----------------------------------------------------------------------------
def pairs(rows: int = 20) -> list[tuple[Tensor, int]]:
    return [(torch.ones(3), i % 3) for i in range(rows)]


def own_generator() -> Any:
    rng = np.random.default_rng(0)
    return lambda row: (row[0] + rng.standard_normal(), row[1])


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(pairs())


def wrong(name: str, value: Any) -> dict[str, Tensor]:
    whole = columns()
    whole[name][5] = value
    return whole


TOKENS = torch.arange(40).reshape(20, 2) % 7
TOKENS[5] = 11


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: task(Rows(ragged())), "does not collate: sample 1 has 'input_ids' of shape"),
        (lambda: task(Rows(ragged()), collate=lambda rows: 1 / 0), "collate stops at sample 0 with ZeroDivisionError"),
        (
            lambda: task(Rows([*ragged(19), {"weight": 1.0}]), collate=padded),
            "collate stops at sample 19 with KeyError",
        ),
        (lambda: task(Rows(ragged()), collate=lambda rows: padded(rows[:7])), "with 7 rows for 20 samples"),
        (lambda: task(Rows([*pairs(19), (torch.ones(2), 1)])), "sample 19 has 0 of shape [2], sample 0 of shape [3]"),
        (lambda: task(Rows([*pairs(19), (torch.ones(3),)])), "sample 19 has 0, sample 0 0 and 1"),
        (lambda: task(Rows([(torch.ones(3), "cat")] * 20)), "a sample has 'cat' (str), which is no number or array"),
        (lambda: task(Rows([torch.ones(3)] * 20)), "a sample must be (inputs, targets) or a dictionary with 'labels'"),
        (lambda: task(Rows([{"a": 1, "b": 2}] * 20)), "dictionaries with a, b, and none is 'labels'"),
        (lambda: task(Rows([{"labels": 1}] * 20)), "there are no inputs"),
        (lambda: task(Endless()), "Endless can only be read from its start"),
        (lambda: task(Rows(pairs(), lambda row: (row[0] + torch.randn(3), 1))), "a transform draws at random"),
        (lambda: task(Rows(pairs(), lambda row: (row[0] + random.random(), 1))), "a transform draws at random"),
        (lambda: task(Rows(pairs(), own_generator())), "sample 0 is another one when it is read again"),
        (lambda: task(Rows([*ragged(19), {**ragged()[0], "input_ids": torch.zeros(0)}]), collate=padded),
         "sample 19 is a sequence of length 0 ('input_ids')"),
        (lambda: task(wrong("attention_mask", False)), "training sample 5 is a sequence of length 0, by inputs 'at"),
        (lambda: task(wrong("input_ids", 11)), "sample 5 has token 11 in its inputs 'input_ids', but the table "
         "of Embedding ('table') has rows 0..10"),
        (lambda: task(wrong("input_ids", -1)), "training sample 5 has token -1"),
        (lambda: Task(nn.EmbeddingBag(11, 3), functional.cross_entropy, (TOKENS, TOKENS[:, 0] % 3), SHARDS),
         "sample 5 has token 11 in its inputs, but the table of EmbeddingBag ('') has rows 0..10"),
        (lambda: task(columns(), test=wrong("input_ids", 99)), "test sample 5 has token 99"),
        (lambda: task(wrong("weight", float("nan"))), "the training inputs 'weight' hold NaN or infinity, first in"),
        (lambda: task({**columns(), "weight": torch.ones(7)}), "20 inputs 'input_ids' and 7 inputs 'weight'"),
        (lambda: task({**columns(), "more": torch.ones(20)}), "the model does not take the training inputs, of"),
        (lambda: task(((torch.ones(20, 3), None), torch.ones(20))), "the training data: a part of it is None"),
        (lambda: task(columns(), None), "leave it out, and give a list with a data set for each client"),
        (lambda: task([columns(), {**columns(), "weight": torch.ones(20, 2)}], None), "client 1 has 'weight' of"),
    ],
)  # fmt: skip
def test_sentences(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(Experiment(method="fedbuff", task=given(), until={"commits": 1}, device="cpu"))
    assert sentence in str(caught.value)


class Forgetful(nn.Linear):
    """Changes its own weight whenever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Counting(nn.Linear):
    """Gives another output at every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(Forgetful, "changes '0.weight' while it trains"), (Counting, "the model keeps 'calls' from call to call")],
)
def test_models_that_change_are_refused(kind: Any, sentence: str) -> None:
    data = TensorDataset(torch.randn(20, 3), torch.arange(20) % 3)
    given = Task(nn.Sequential(kind(3, 3)), functional.cross_entropy, data, SHARDS)
    with pytest.raises(ConfigError) as caught:
        run(Experiment(method="fedbuff", task=given, until={"commits": 1}, device="cpu"))
    assert sentence in str(caught.value)
