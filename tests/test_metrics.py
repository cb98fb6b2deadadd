"""Metrics: those that ship against scikit-learn, own ones, single clients; each can be a target, a limit, a column."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score, top_k_accuracy_score
from torch.nn import functional

from linear_runs import error, experiment, small
from offbeat import ConfigError, Task, replay, resume, run
from offbeat.experiments.assemble import build
from offbeat.numerics import evaluation
from offbeat.numerics.metrics import METRICS
from offbeat.runs.stored import read_metrics
from offbeat.runs.target import crossing

torch.manual_seed(0)
SCORES, CLASSES = torch.randn(400, 7, dtype=torch.float64), torch.randint(0, 7, (400,))


def plain(outputs, targets):
    return float(outputs.abs().max())


def broken(outputs, targets):
    raise ValueError("no such thing")


# ---- those that ship ----------------------------------------------------------------------------
def test_class_targets_agree_with_scikit_learn():
    chances, labels = SCORES.softmax(1).numpy(), CLASSES.numpy()
    want = {
        "accuracy": (chances.argmax(1) == labels).mean(),
        "top-5": top_k_accuracy_score(labels, chances, k=5),
        "f1": f1_score(labels, chances.argmax(1), average="macro"),
        "auc": roc_auc_score(labels, chances, multi_class="ovr"),
        "perplexity": math.exp(float(functional.cross_entropy(SCORES, CLASSES))),
    }
    for name, value in want.items():
        assert METRICS[name](SCORES, CLASSES) == pytest.approx(value, abs=1e-12), name
    assert METRICS["mae"](SCORES, CLASSES) is None


def test_one_score_per_sample_and_ties():
    score = (torch.randn(300, 1) * 3).round()  # many ties
    truth = (torch.rand(300) < 0.4).float()
    assert METRICS["auc"](score, truth) == pytest.approx(roc_auc_score(truth.numpy(), score[:, 0].numpy()))
    assert METRICS["f1"](score, truth) == pytest.approx(f1_score(truth.numpy(), (score[:, 0] > 0).numpy()))
    assert METRICS["auc"](score, torch.ones(300)) is None  # one class alone says nothing


def test_token_targets_in_both_layouts_and_without_those_left_out():
    scores, tokens = torch.randn(6, 9, 11), torch.randint(0, 11, (6, 9))
    tokens[:, 7:] = -100
    flat, there = scores[:, :7].reshape(-1, 11), tokens[:, :7].reshape(-1)
    for name in ("accuracy", "top-5", "perplexity", "f1"):
        want = METRICS[name](flat, there)
        assert METRICS[name](scores, tokens) == pytest.approx(want), name
        assert METRICS[name](scores.movedim(2, 1), tokens) == pytest.approx(want), name
    assert METRICS["perplexity"](scores, tokens) == pytest.approx(math.exp(functional.cross_entropy(flat, there)))
    assert METRICS["perplexity"](scores, tokens + 100) is None  # these are no classes


def test_soft_and_real_targets():
    soft = torch.randn(50, 4).softmax(1)
    scores = torch.randn(50, 4)
    hits = (scores.argmax(1) == soft.argmax(1)).double().mean()
    assert METRICS["accuracy"](scores, soft) == pytest.approx(float(hits))
    surprise = math.exp(functional.cross_entropy(scores, soft))
    assert METRICS["perplexity"](scores, soft) == pytest.approx(surprise, rel=1e-6)
    real = torch.randn(50, 3)
    assert METRICS["mae"](real + 0.25, real) == pytest.approx(0.25, abs=1e-6)
    assert METRICS["mae"](torch.ones(50, 1), torch.zeros(50)) == 1.0
    assert METRICS["accuracy"](torch.randn(50, 3), real) is None


def test_means_do_not_depend_on_the_batches(monkeypatch):
    names = {"top-5": "top-5", "perplexity": "perplexity", "f1": "f1", "auc": "auc", "error": error}
    engine = build(experiment(small(metrics=names))).engine()
    whole = engine.evaluate()
    monkeypatch.setattr(evaluation, "BATCH", 7)
    parts = engine.evaluate()
    assert parts == pytest.approx(whole, rel=1e-6)
    assert whole["error"] == pytest.approx(1 - whole["accuracy"])


def test_no_sample_of_a_large_set_is_looked_at_alone(monkeypatch):
    """A batch normalisation by the batch takes none of one."""
    monkeypatch.setattr(evaluation, "BATCH", 7)
    task = small(batch_norm="batch")
    model = torch.nn.Sequential(task.model, torch.nn.BatchNorm1d(3))
    task = replace(task, model=model, test=tuple(t[:50] for t in task.test))
    found = build(experiment(task)).engine().evaluate()
    assert math.isfinite(found["loss"])
    for many in range(2, 60):
        sizes = [end - begin for begin, end in evaluation.chunks(many, 3)]
        assert sum(sizes) == many
        assert {min(sizes), max(sizes)} <= {2, 3}


@dataclass(frozen=True)
class Scores:
    logs: torch.Tensor
    more: dict


class Wrapped(torch.nn.Module):
    """A model whose outputs have another form."""

    def __init__(self, model, wrap):
        super().__init__()
        self.model, self.wrap = model, wrap

    def forward(self, x):
        return self.wrap(self.model(x))


FORMS = {
    "dataclass": (lambda z: Scores(z, {"past": None}), lambda out: out.logs),
    "dictionary": (lambda z: {"z": z, "past": None, "scale": z.std() * 0, "name": "z"}, lambda out: out["z"]),
    "list": (lambda z: [z, Scores(z, {"n": 3})], lambda out: out[1].logs),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_any_form_have_metrics_and_single_clients(form, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 17)
    wrap, scores = FORMS[form]
    plain_task = small(client_tests=[range(5 * i, 5 * i + i % 5) for i in range(12)])
    task = replace(
        plain_task, model=Wrapped(plain_task.model, wrap), metrics={"error": lambda z, t: error(scores(z), t)},
        loss=lambda z, t: functional.cross_entropy(scores(z), t),
    )  # fmt: skip
    want = build(experiment(replace(plain_task, metrics={"error": lambda z, t: error(z, t)}))).engine().evaluate()
    found = build(experiment(task)).engine().evaluate()
    assert {name: value for name, value in want.items() if "accuracy" not in name} == pytest.approx(
        {name: value for name, value in found.items() if "accuracy" not in name}
    )
    assert found["own_error_mean"] is not None


def test_outputs_that_cannot_be_taken_apart_are_computed_client_by_client():
    task = small(client_tests=[range(n, n + 3) for n in range(12)])
    want = build(experiment(task)).engine().evaluate()
    task = replace(
        task, model=Wrapped(task.model, lambda z: SimpleNamespace(z=z)),
        loss=lambda out, t: functional.cross_entropy(out.z, t),
    )  # fmt: skip
    found = build(experiment(task)).engine().evaluate()
    assert found["own_loss_worst"] == pytest.approx(want["own_loss_worst"], rel=1e-6)


def test_a_metric_of_a_large_set_needs_outputs_that_can_be_joined(monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 7)
    task = small(metrics={"largest": lambda out, t: out.z.max()})
    task = replace(
        task, model=Wrapped(task.model, lambda z: SimpleNamespace(z=z)),
        loss=lambda out, t: functional.cross_entropy(out.z, t),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"outputs have a SimpleNamespace, whose rows cannot be told"):
        build(experiment(task)).engine().evaluate()


# ---- own metrics --------------------------------------------------------------------------------
def test_an_own_metric_is_column_target_limit_and_figure(tmp_path):
    task = small(metrics={"error": error, "largest": plain, "auc": "auc"})
    outcome = run(experiment(task, targets={"error": [0.3, 0.0], "accuracy": [0.5]}), tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "metrics.parquet")
    assert {"error", "largest", "auc"} <= set(table.column_names)
    assert [row["error"] for row in outcome.metrics] == pytest.approx([1 - row["accuracy"] for row in outcome.metrics])
    assert read_metrics(tmp_path / "run") == outcome.metrics
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"]["error"]["data"] == "the test set"
    assert result["metrics"]["error"]["best"] == min(row["error"] for row in outcome.metrics)
    assert result["metrics"]["largest"]["best"] is None  # nobody said what is better
    at = crossing(outcome.metrics, 0.3, name="error", more=False)
    assert result["reached"]["error 0.3"] == {"commit": at.commit, "virtual_seconds": at.virtual_seconds}
    assert result["reached"]["error 0.0"] is None
    assert list(result["reached"]) == ["0.5", "error 0.0", "error 0.3"]
    stopped = run(experiment(task, until={"error": 0.3, "commits": 12}))
    assert stopped.commits == at.commit
    assert stopped.ended.startswith("error ")
    smooth = run(experiment(task, until={"error_smoothed": 0.3, "commits": 12}, evaluate={"every_commits": 1}))
    want = crossing(run(experiment(task, evaluate={"every_commits": 1})).metrics, 0.3, 5, "error", False)
    assert smooth.commits == want.commit


def test_a_metric_that_fails_is_marked_and_the_run_goes_on(tmp_path):
    bad = {"broken": broken, "text": lambda o, t: "much", "nan": lambda o, t: math.nan, "rows": lambda o, t: o}
    with pytest.warns(UserWarning, match="left out where it fails") as said:
        outcome = run(experiment(small(metrics=bad)), tmp_path / "run")
    assert len(said) == 4  # once each
    assert outcome.commits == 12
    assert all(row[name] is None for row in outcome.metrics for name in bad)
    assert outcome.metric_faults["broken"] == "ValueError: no such thing"
    assert "no finite number" in outcome.metric_faults["text"]
    without = run(experiment(small()))
    assert all(torch.equal(outcome.model[name], without.model[name]) for name in without.model)


def test_metrics_that_spoil_what_they_see_change_nothing():
    def spoils(outputs, targets):
        outputs.zero_()
        targets.zero_()
        torch.rand(7)
        return 0.0

    spoilt, clean = run(experiment(small(metrics={"spoils": spoils}))), run(experiment(small()))
    assert [row["loss"] for row in spoilt.metrics] == [row["loss"] for row in clean.metrics]
    assert all(torch.equal(spoilt.model[name], clean.model[name]) for name in clean.model)


# ---- single clients -----------------------------------------------------------------------------
def by_hand(engine, task, rows, of):
    model, flat = engine.solver.problem.model, engine.server.state["model"]
    x, y = task.data
    return [of(model.outputs(flat, x[list(own)]), y[list(own)]) for own in rows if len(own)]


def test_clients_one_by_one_against_plain_loops(monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 17)
    rows = [range(20 * i, 20 * i + (i % 4) * 2) for i in range(12)]  # some have none
    shards = [range(20 * i + 8, 20 * i + 20) for i in range(12)]
    task = small(metrics={"error": error, "f1": "f1"})
    task = Task(task.model, task.loss, task.data, shards, task.test, metrics=task.metrics, held_out=rows)
    engine = build(experiment(task, fleet="uniform")).engine()
    found = engine.evaluate()
    losses = by_hand(engine, task, rows, lambda o, t: float(functional.cross_entropy(o, t)))
    hits = by_hand(engine, task, rows, lambda o, t: float((o.argmax(1) == t).double().mean()))
    f1 = by_hand(engine, task, rows, lambda o, t: METRICS["f1"](o, t))
    assert found["held_out_loss_mean"] == pytest.approx(np.mean(losses))
    assert found["held_out_loss_worst"] == pytest.approx(max(losses))
    assert found["held_out_accuracy_worst"] == min(hits)
    assert found["held_out_error_worst"] == pytest.approx(1 - min(hits))
    for p in (10, 50, 90):
        assert found[f"held_out_accuracy_p{p}"] == pytest.approx(np.percentile(hits, p))
    assert found["held_out_f1_mean"] == pytest.approx(np.mean(f1))
    speeds = np.array(engine.looks.evaluations[1].speed)
    assert found["held_out_accuracy_slow"] == pytest.approx(np.mean(np.array(hits)[speeds == 2]))
    assert set(found) == set(engine.figures)


def test_held_out_parts_are_never_trained_on_and_clients_left_out_never_train(tmp_path):
    looks = {"every_commits": 4, "hold_out": 0.2, "unseen": 3, "training_loss": True}
    built = build(experiment(small(), evaluate=looks))
    assert built.task.clients == built.fleet.clients == 9
    trained = {row for shard in built.task.shards for row in shard}
    held = {row for part in built.task.held_out for row in part}
    unseen = {row for part in built.task.unseen for row in part}
    assert not trained & held
    assert not trained & unseen
    assert len(held) == 9 * 4
    assert len(unseen) == 60
    until = {"held_out_accuracy_worst": 0.5, "commits": 12}
    outcome = run(experiment(small(), evaluate=looks, until=until), tmp_path / "run")
    last = outcome.metrics[-1]
    assert last["held_out_accuracy_worst"] <= last["held_out_accuracy_mean"]
    assert outcome.result["metrics"]["unseen_loss_mean"]["data"] == "clients that never train"
    per_client = pq.read_table(tmp_path / "run" / "clients.parquet").to_pylist()
    assert np.mean([row["held_out_accuracy"] for row in per_client]) == pytest.approx(last["held_out_accuracy_mean"])
    engine = built.engine()
    assert engine.evaluate()["training_loss"] == pytest.approx(engine.training_loss(), rel=1e-6)


def test_the_set_that_figures_come_from_is_named():
    def data(task, **looks):
        outcome = run(experiment(task, until={"commits": 1}, evaluate={"every_commits": 1, **looks}))
        return outcome.result["metrics"]["accuracy"]["data"]

    assert data(small()) == "the test set"
    assert data(small(test=False)) == "the training data"
    assert data(small(test=False), hold_out=0.2) == "the held-out parts of shards"
    assert data(small(), hold_out=0.2, on="held-out") == "the held-out parts of shards"
    assert data(small(), on="train") == "the training data"
    assert data(small(), samples=60) == "the test set"
    assert data(small(), samples=7) == "the test set (7 of 60 samples)"


def test_of_a_large_set_samples_at_even_distances_are_looked_at():
    task = small()
    few = replace(task, test=tuple(t[[0, 8, 17, 25, 34, 42, 51]] for t in task.test))
    ours = run(experiment(task, evaluate={"every_commits": 4, "samples": 7}))
    assert [row["loss"] for row in ours.metrics] == [row["loss"] for row in run(experiment(few)).metrics]
    with pytest.raises(ConfigError, match="client 1 has sample 7"):
        run(experiment(replace(task, shards=[[0, 1], [-9, 7]]), evaluate={"every_commits": 4, "hold_out": 0.5}))
    with pytest.raises(ConfigError, match=r"evaluate\.samples = 0"):
        run(experiment(task, evaluate={"every_commits": 4, "samples": 0}))


def test_resumed_and_replayed_runs_have_the_same_figures(tmp_path):
    looks = {"every_commits": 2, "hold_out": 0.1, "metrics": ["f1", "auc"], "clients": True}
    whole = run(experiment(small(), evaluate=looks), tmp_path / "whole")
    run(experiment(small(), evaluate=looks, until={"commits": 5}), tmp_path / "part")
    rest = resume(tmp_path / "part", until={"commits": 12}, task=small())
    assert rest.metrics == whole.metrics
    assert (tmp_path / "part" / "metrics.parquet").read_bytes() == (tmp_path / "whole" / "metrics.parquet").read_bytes()
    assert replay(tmp_path / "whole", task=small()).metrics == whole.metrics


# ---- bad input ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"evaluate": {"every_commits": 1, "metrics": ["acuracy"]}}, "did you mean 'accuracy'"),
        ({"evaluate": {"every_commits": 1, "metrics": [{"called": "f1"}]}}, "a table with name"),
        ({"evaluate": {"every_commits": 1, "hold_out": 1.5}}, "a share of every shard"),
        ({"evaluate": {"every_commits": 1, "unseen": 12}}, "leave at least one to train"),
        ({"evaluate": {"every_commits": 1, "on": "held-out"}}, "nothing is held out"),
        ({"evaluate": {"metrics": ["f1"]}}, "give every_commits or every_seconds"),
        ({"until": {"largest": 1.0}}, "nobody said whether more of 'largest' is better"),
        ({"until": {"errror": 1.0}}, "did you mean 'error'"),
        ({"until": {"error": "x"}}, "it must be a number"),
        ({"targets": {"largest": [1.0]}}, "nobody said"),
        ({"targets": {"erro": [1.0]}}, "did you mean 'error'"),
        ({"targets": {"error": 0.1}}, "a list of numbers"),
    ],
)
def test_mistakes_get_a_sentence(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(experiment(small(metrics={"error": error, "largest": plain}), **options))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"metrics": ["f1"]}, "it must be a table"),
        ({"metrics": {"loss": error}}, "is taken"),
        ({"metrics": {"e": 3}}, "a function of"),
        ({"metrics": {"e": "f2"}}, "did you mean 'f1'"),
        ({"held_out": [[0]] * 12}, "clients train on"),
        ({"held_out": [[0]] * 2}, "2 sets for 12 clients"),
        ({"held_out": [[]] * 12, "test": False}, "held_out has no rows at all"),
        ({"client_tests": [[99]] * 12}, "the data has rows 0..59"),
    ],
)
def test_mistakes_of_a_task_get_a_sentence(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(experiment(small(**given)))
