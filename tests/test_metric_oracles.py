"""Losses and metrics of sets and of single clients against plain float64 loops over ragged sets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional

from offbeat import METRICS, Task
from offbeat.tasks.looks import Looks, Watch

NEAR = 1e-9


def looked_at(task: Task, **watch: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures of the task's own model, and what is marked."""
    model, samples = task.flat_model(torch.float64), task.samples(torch.float64)
    looks = Looks(task, Watch(**watch), model, samples)
    with torch.no_grad():
        return looks(model.initial()), looks.faults.first


@contextmanager
def parts_of(batch: int, kept: int) -> Iterator[None]:
    """Sets are computed in batches of so many samples, and so many outputs are kept."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("offbeat.numerics.evaluation.BATCH", batch)
        patch.setattr("offbeat.numerics.set_loss.KEPT", kept)
        yield


# ---- losses -------------------------------------------------------------------------------------
CLASSES = 4
WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.05], dtype=torch.float64)


def by_mask(z: Tensor, y: Tensor) -> Tensor:
    mask = (y != 1).double()
    return (functional.cross_entropy(z, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1.0)


def centred(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z - z.mean(0), y)


def with_numbers(z: Tensor, y: Tensor) -> Tensor:
    """It takes a number out of a tensor, which vmap does not allow."""
    return functional.cross_entropy(z, y) * (2.0 if int(y.max()) == 3 else 1.0)


def of_tokens(z: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(z.flatten(0, -2), y.flatten())


LOSSES: dict[str, Any] = {
    "plain": functional.cross_entropy,
    "weights": nn.CrossEntropyLoss(WEIGHTS),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "weights, ignored, smoothed": nn.CrossEntropyLoss(WEIGHTS, ignore_index=2, label_smoothing=0.1),
    "nll": lambda z, y: functional.nll_loss(z.log_softmax(1), y, WEIGHTS),
    "by hand": by_mask,
    "centred": centred,
    "numbers": with_numbers,
    "penalty": lambda z, y: functional.cross_entropy(z, y) + z.square().mean(),
}
TOKENS: dict[str, tuple[Any, bool]] = {  # and whether classes are on axis 1
    "last": (of_tokens, False),
    "axis 1": (nn.CrossEntropyLoss(), True),
    "axis 1, weights": (nn.CrossEntropyLoss(WEIGHTS), True),
    "last, weights": (lambda z, y: functional.cross_entropy(z.transpose(1, 2), y, WEIGHTS), False),
}
EXACT = {"plain", "weights", "ignored", "weights, ignored, smoothed", "nll"}  # parts of these add up by themselves


class Shaped(nn.Module):
    """A linear model, whose outputs are `[n, *shape]`."""

    def __init__(self, inputs: int, *shape: int) -> None:
        super().__init__()
        self.shape, self.linear = shape, nn.Linear(inputs, math.prod(shape), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(1, self.shape)


def task_of(sizes: list[int], seed: int, loss: Any, shape: tuple[int, ...], labels: Any, **options: Any) -> Task:
    """Clients of these sizes in the training and in the test data; `labels(generator, n)` draws targets."""
    generator = torch.manual_seed(seed)
    many = sum(sizes)
    x = torch.randn(2 * many, 3, dtype=torch.float64, generator=generator)
    y = labels(generator, 2 * many)
    ends = np.cumsum([0, *sizes])
    rows = [list(range(begin, end)) for begin, end in pairwise(ends)]
    model = options.pop("model", None) or Shaped(3, *shape)
    return Task(model, loss, (x[:many], y[:many]), rows, (x[many:], y[many:]), client_tests=rows, **options)


def drawn_classes(generator: torch.Generator, many: int) -> Tensor:
    return torch.randint(0, CLASSES, (many,), generator=generator)


def by_hand(task: Task, rows: Any, test: bool = True) -> float:
    x, y = task.test if test else task.data
    with torch.no_grad():
        return float(task.loss(task.model.eval()(x[rows]), y[rows]))


def compared(found: dict[str, Any], head: str, name: str, want: list[float]) -> None:
    there = [value for value in want if math.isfinite(value)]
    if there:
        assert found[f"{head}_{name}_mean"] == pytest.approx(np.mean(there), rel=NEAR, abs=NEAR)
        assert found[f"{head}_{name}_p90"] == pytest.approx(np.percentile(there, 90), rel=NEAR, abs=NEAR)
    else:
        assert found[f"{head}_{name}_mean"] is None


sizes_of_clients = st.lists(st.integers(1, 9), min_size=2, max_size=8) | st.lists(
    st.integers(2, 3), min_size=20, max_size=24
)


@given(sizes_of_clients, st.sampled_from(sorted(LOSSES)), st.integers(3, 30), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_loss_is_that_of_all_samples_of_its_set(
    sizes: list[int], name: str, batch: int, kept: bool, seed: int
) -> None:
    task = task_of(sizes, seed, LOSSES[name], (CLASSES,), drawn_classes)
    with parts_of(batch, 1 << 26 if kept else 1):
        found, faults = looked_at(task, training_loss=True)
    want = by_hand(task, slice(None))
    if kept or name in EXACT or sum(sizes) <= batch:
        assert "loss" not in faults
        assert found["loss"] == pytest.approx(want, rel=NEAR, nan_ok=True)
    elif "loss" not in faults:
        assert found["loss"] == pytest.approx(want, rel=NEAR)
    own = [by_hand(task, rows) for rows in task.client_tests or ()]
    if "is the mean over" not in faults.get("own_loss", ""):
        compared(found, "own", "loss", own)
        assert ("own_loss" in faults) == (not np.isfinite(own).all())
    losses = [by_hand(task, rows, False) for rows in task.shards]
    if "is the mean over" in faults.get("training_loss", ""):
        assert not kept
    elif np.isfinite(losses).all():
        assert found["training_loss"] == pytest.approx(np.mean(losses), rel=NEAR)
    else:
        assert "training_loss" in faults


@given(
    sizes_of_clients, st.sampled_from(sorted(TOKENS)), st.integers(2, 6), st.integers(3, 30), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_tokens_with_ignored_ones_and_classes_on_either_axis(
    sizes: list[int], name: str, length: int, batch: int, kept: bool, seed: int
) -> None:
    loss, first = TOKENS[name]

    def labels(generator: torch.Generator, many: int) -> Tensor:
        tokens = torch.randint(0, CLASSES, (many, length), generator=generator)
        gone = torch.rand(many, length, generator=generator) < 0.5
        return tokens.masked_fill(gone, -100)  # of some samples all

    shape = (CLASSES, length) if first else (length, CLASSES)
    metrics = {each: each for each in ("top-5", "perplexity", "f1", "auc")}
    task = task_of(sizes, seed, loss, shape, labels, metrics=metrics)
    with parts_of(batch, 1 << 26 if kept else 1):
        found, _ = looked_at(task)
    assert found["loss"] == pytest.approx(by_hand(task, slice(None)), rel=NEAR)
    compared(found, "own", "loss", [by_hand(task, rows) for rows in task.client_tests or ()])
    if "weights" not in name:
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=NEAR)
    x, y = task.test
    with torch.no_grad():
        scores = task.model(x).movedim(1, -1) if first else task.model(x)
    guess, truth = scores.argmax(-1)[y >= 0].numpy(), y[y >= 0].numpy()
    assert found["accuracy"] == pytest.approx((guess == truth).mean())
    assert found["f1"] == pytest.approx(f1_score(truth, guess, average="macro"))
    assert found["top-5"] == 1.0
    own = [(scores[rows], y[rows]) for rows in task.client_tests or ()]
    compared(found, "own", "accuracy", [float((z.argmax(-1) == t)[t >= 0].double().mean()) for z, t in own])
    compared(found, "own", "perplexity", [math.exp(of_tokens(z, t)) for z, t in own])


@pytest.mark.parametrize("first", [True, False])
def test_metrics_leave_out_the_label_that_the_loss_ignores(first: bool) -> None:
    """Tokens 0 are padding."""

    def labels(generator: torch.Generator, many: int) -> Tensor:
        return torch.randint(0, CLASSES, (many, 5), generator=generator)

    def classes_last(z: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(z.flatten(0, -2), y.flatten(), ignore_index=0)

    loss, shape = (nn.CrossEntropyLoss(ignore_index=0), (CLASSES, 5)) if first else (classes_last, (5, CLASSES))
    metrics = {"perplexity": "perplexity", "f1": "f1"}
    task = task_of([5, 9, 4], 1, loss, shape, labels, metrics=metrics)
    found, faults = looked_at(task)
    scores, truth = task.model(task.test[0]), task.test[1]
    guess, there = scores.argmax(1 if first else 2), truth != 0
    assert not faults
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=NEAR)
    assert found["accuracy"] == pytest.approx(float((guess == truth)[there].double().mean()))
    assert found["f1"] == pytest.approx(f1_score(truth[there], guess[there], average="macro"))
    own = [float((guess[r] == truth[r])[there[r]].double().mean()) for r in task.client_tests or ()]
    compared(found, "own", "accuracy", own)


def spread_over_axes(z: Tensor, y: Tensor) -> Tensor:
    """A loss that is the same whichever axis has the classes."""
    return z.square().mean()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("sides", [(3,), (3, 3)])
def test_scores_with_as_many_places_as_classes(first: bool, sides: tuple[int, ...]) -> None:
    """`[n, 3, 3]` for `[n, 3]`, and `[n, 3, 3, 3]` for `[n, 3, 3]`: the loss shows where the classes are."""

    def labels(generator: torch.Generator, many: int) -> Tensor:
        return torch.randint(0, 3, (many, *sides), generator=generator)

    def classes_last(z: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(z.flatten(0, -2), y.flatten())

    loss = nn.CrossEntropyLoss() if first else classes_last
    task = task_of([5, 9, 4], 1, loss, (3, *sides), labels, metrics={"f1": "f1", "perplexity": "perplexity"})
    found, faults = looked_at(task)
    scores = task.model(task.test[0])
    scores = scores.movedim(1, -1) if first else scores
    assert not faults
    assert found["accuracy"] == pytest.approx(float((scores.argmax(-1) == task.test[1]).double().mean()))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=NEAR)
    want = f1_score(task.test[1].flatten(), scores.argmax(-1).flatten(), average="macro")
    assert found["f1"] == pytest.approx(want)


def test_a_loss_that_does_not_show_the_axis_of_the_classes_is_asked_about() -> None:
    def labels(generator: torch.Generator, many: int) -> Tensor:
        return torch.randint(0, 3, (many, 3), generator=generator)

    with pytest.warns(UserWarning, match="left out"):
        found, faults = looked_at(task_of([5, 9], 1, spread_over_axes, (3, 3), labels))
    assert found["accuracy"] is None
    assert "classes_on(1)" in faults["accuracy"]
    metrics = {"accuracy": METRICS["accuracy"].classes_on(1), "last": METRICS["accuracy"].classes_on(-1)}
    task = task_of([5, 9], 1, spread_over_axes, (3, 3), labels, metrics=metrics)
    found, faults = looked_at(task)
    scores, truth = task.model(task.test[0]), task.test[1]
    assert not faults
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == truth).double().mean()))
    assert found["last"] == pytest.approx(float((scores.argmax(2) == truth).double().mean()))


# ---- batch statistics ---------------------------------------------------------------------------
class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8), st.sampled_from(["batch", "local", "own"]),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_the_loss_of_a_client_does_not_depend_on_other_clients(sizes: list[int], rule: str, seed: int) -> None:
    """Where a batch is normalised by its own statistics, a batch has samples of one client only."""
    norm = Centred() if rule == "own" else nn.BatchNorm1d(5, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 5, dtype=torch.float64), norm, nn.Linear(5, CLASSES, dtype=torch.float64))
    options = {} if rule == "own" else {"batch_norm": rule}
    task = task_of(
        sizes, seed, functional.cross_entropy, (), drawn_classes, model=model, metrics={"f1": "f1"}, **options
    )

    def normalised(rows: Any) -> Tensor:
        """By the batch's own mean and variance."""
        h = model[0](task.test[0][rows])
        h = h - h.mean(0)
        return model[2](h if rule == "own" else h / (h.square().mean(0) + 1e-5).sqrt())

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        found, faults = looked_at(task)
    taken = [rows for rows in task.client_tests or () if len(rows) > 1 or rule == "own"]
    with torch.no_grad():
        own = [(normalised(rows), task.test[1][rows]) for rows in taken]
        whole = normalised(slice(None))
    compared(found, "own", "loss", [float(functional.cross_entropy(z, t)) for z, t in own])
    compared(found, "own", "accuracy", [float((z.argmax(1) == t).double().mean()) for z, t in own])
    compared(found, "own", "f1", [f1_score(t, z.argmax(1), average="macro") for z, t in own])
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(whole, task.test[1])), rel=NEAR)
    assert ("own_loss" in faults) == (len(taken) < len(sizes))
    assert "one sample" in faults.get("own_loss", "one sample")


def test_a_model_without_statistics_of_batches_computes_clients_together() -> None:
    """A thousand clients of ragged sizes are few calls of the model."""
    calls = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    model = Counting(3, CLASSES, dtype=torch.float64)
    task = task_of([1 + n % 7 for n in range(1000)], 0, functional.cross_entropy, (), drawn_classes, model=model)
    found, _ = looked_at(task)
    assert len(calls) < 10
    compared(found, "own", "loss", [by_hand(task, rows) for rows in task.client_tests or ()])


# ---- metrics ------------------------------------------------------------------------------------
def pairs_won(score: np.ndarray, positive: np.ndarray) -> float:
    """The area under the ROC curve, pair by pair."""
    won = [1.0 if p > n else 0.5 if p == n else 0.0 for p in score[positive] for n in score[~positive]]
    return float(np.mean(won))


@given(st.integers(2, 40), st.integers(2, 9), st.floats(0.1, 30.0), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_scores_of_classes_against_scikit_learn(many: int, classes: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, truth = rng.standard_normal((many, classes)) * spread, rng.integers(0, classes, many)
    z, y = torch.from_numpy(scores), torch.from_numpy(truth)
    ranks = (-scores).argsort(1)
    logs = (
        scores
        - np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1, keepdims=True))
        - scores.max(1, keepdims=True)
    )
    assert METRICS["accuracy"](z, y) == pytest.approx((ranks[:, 0] == truth).mean())
    assert METRICS["top-5"](z, y) == pytest.approx((ranks[:, :5] == truth[:, None]).any(1).mean())
    assert METRICS["perplexity"](z, y) == pytest.approx(math.exp(-logs[np.arange(many), truth].mean()), rel=1e-10)
    assert METRICS["f1"](z, y) == pytest.approx(f1_score(truth, ranks[:, 0], average="macro"))
    areas = []
    for k in np.unique(truth):
        others = np.delete(scores, k, axis=1)
        top = others.max(1, keepdims=True)
        odds = scores[:, k] - top[:, 0] - np.log(np.exp(others - top).sum(1))  # log p / (1 - p)
        if 0 < (truth == k).sum() < many:
            areas.append(pairs_won(odds, truth == k))
    if classes == 2 and areas:
        assert METRICS["auc"](z, y) == pytest.approx(roc_auc_score(truth, scores[:, 1] - scores[:, 0]))
    assert METRICS["auc"](z, y) == (pytest.approx(np.mean(areas)) if areas else None)


def test_the_area_of_two_logits_that_are_far_apart() -> None:
    """Softmax rounds to 1 from a difference of 37 on."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 200)
    odds = 60 + truth + rng.standard_normal(200)
    want = roc_auc_score(truth, odds)
    for shift in (0.0, -1e3):
        z = torch.from_numpy(np.stack([np.zeros(200), odds], axis=1) + shift)
        assert METRICS["auc"](z, torch.from_numpy(truth)) == pytest.approx(want)
    three = torch.from_numpy(np.stack([np.full(200, -900.0), np.zeros(200), odds], axis=1))
    assert METRICS["auc"](three, torch.from_numpy(truth) + 1) == pytest.approx(want)


@given(st.integers(1, 20), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_mean_absolute_errors_take_targets_of_the_shape_of_the_outputs(many: int, sides: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    out, real = (rng.standard_normal((many, *sides)) for _ in range(2))
    want = mean_absolute_error(real.reshape(many, -1), out.reshape(many, -1))
    assert METRICS["mae"](torch.from_numpy(out), torch.from_numpy(real)) == pytest.approx(want)
    assert METRICS["mae"](torch.from_numpy(out)[:, None], torch.from_numpy(real)) == pytest.approx(want)
    for other in (out.reshape(1, many, *sides), out.reshape(-1), out.swapaxes(-1, 0), out[..., None, :1].repeat(2, -1)):
        if [other.shape[0], *(n for n in other.shape[1:] if n > 1)] != [many, *(n for n in sides if n > 1)]:
            with pytest.raises(ValueError, match="mae takes outputs and targets of one shape"):
                METRICS["mae"](torch.from_numpy(other.copy()), torch.from_numpy(real))


def test_a_metric_that_refuses_shapes_is_left_out_and_marked() -> None:
    def labels(generator: torch.Generator, many: int) -> Tensor:
        return torch.randn(many, 3, 2, dtype=torch.float64, generator=generator)

    def turned(z: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(z.movedim(1, 2), y)

    with pytest.warns(UserWarning, match="outputs of shape"):
        found, faults = looked_at(task_of([5, 9], 1, turned, (2, 3), labels, metrics={"mae": "mae"}))
    assert found["mae"] is None
    assert found["own_mae_mean"] is None
    assert found["own_loss_mean"] is not None
    assert "mae takes outputs and targets of one shape" in faults["mae"]


@pytest.mark.parametrize("name", ["own_loss_mean", "shard_loss_mean", "held_out_accuracy_p10", "unseen_mine_worst"])
def test_a_metric_has_no_name_of_a_column_of_single_clients(name: str) -> None:
    metrics = {name: "f1", "mine": "auc"}
    task = task_of([5, 9], 1, functional.cross_entropy, (CLASSES,), drawn_classes, metrics=metrics)
    assert any(f"the name '{name}' is taken" in problem for problem in task.problems())


# ---- records ------------------------------------------------------------------------------------
class Recording(nn.Module):
    """Gives logits and its own loss, as models of Hugging Face do."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.linear, self.spread = nn.Linear(3, CLASSES, dtype=torch.float64), spread

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.linear(x)
        loss = functional.cross_entropy(logits, labels, ignore_index=1)
        return {"logits": logits, "loss": loss + self.spread * logits.mean(0).square().sum() if self.spread else loss}


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_loss_of_a_record_is_that_of_the_set_or_is_marked(spread: float) -> None:
    generator = torch.manual_seed(0)
    x, y = torch.randn(40, 3, dtype=torch.float64, generator=generator), drawn_classes(generator, 40)
    rows = [range(5), range(5, 7), range(7, 17)]  # each in one batch
    task = Task(
        Recording(spread), lambda out, t: out["loss"], ((x, y), y), rows, ((x, y), y), client_tests=rows,
    )  # fmt: skip
    with parts_of(10, 1 << 26):
        found, faults = looked_at(task)
    with torch.no_grad():
        want, *own = (float(task.model(x[list(r)], y[list(r)])["loss"]) for r in (range(40), *rows))
    compared(found, "own", "loss", own)
    if spread:
        assert list(faults) == ["loss"]
        assert "is the mean over 4 batches" in faults["loss"]
    else:
        assert not faults
        assert found["loss"] == pytest.approx(want, rel=NEAR)
