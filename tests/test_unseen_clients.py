"""Clients that never train: nothing of theirs is trained on, and the others keep their devices and numbers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat import ConfigError, Experiment, Task, build, replay, run, windows
from offbeat.fleets.fleet import without
from offbeat.fleets.make import build as build_fleet
from offbeat.studies.webpage import fleet_of, read_run
from offbeat.tasks.losses import sequence_cross_entropy

CLIENTS, LENGTH = 6, 5
LOCAL = {"name": "local-sgd", "n": 2}
X, Y = torch.arange(60.0)[:, None] / 60, torch.arange(60) % 3


def pairs(**changed: Any) -> Task:
    usual = {"shards": [range(10 * i, 10 * i + 10) for i in range(CLIENTS)], "test": (X, Y)}
    return Task(nn.Linear(1, 3), functional.cross_entropy, (X, Y), **usual | changed)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def text(stride: int, split: str, form: str = "pair", predict: str = "all") -> Task:
    ids, labels = windows(np.arange(200) * 3 % 7, LENGTH, stride=stride, predict=predict)
    rows = np.arange(len(ids))
    if split == "mixed":
        rows = np.random.default_rng(0).permutation(rows)
    data = {"pair": (ids, labels), "names": {"ids": ids, "labels": labels}, "one of a tuple": ((ids,), labels)}[form]
    return Task(Tokens(), sequence_cross_entropy, data, np.array_split(rows, CLIENTS))


def experiment(task: Task, unseen: int = 2, **changed: Any) -> Experiment:
    usual = {"method": LOCAL, "until": {"commits": 4}, "device": "cpu"}
    evaluate = {"every_commits": 2, "unseen": unseen, **changed.pop("evaluate", {})}
    return Experiment(**usual | {"task": task, "evaluate": evaluate} | changed)


# ---- windows ------------------------------------------------------------------------------------
def places(task: Task, rows: Any) -> set[int]:
    """The places of a stream that windows read: `[start, start + LENGTH)`."""
    data = task.data["ids"] if isinstance(task.data, dict) else task.data[0]
    start = (data[0] if isinstance(data, tuple) else data).start[torch.as_tensor(np.asarray(rows))].tolist()
    return {place for first in start for place in range(first, first + LENGTH)}


@pytest.mark.parametrize("form", ["pair", "names", "one of a tuple"])
@pytest.mark.parametrize("hold_out", [None, 0.2])
def test_no_token_of_a_client_that_never_trains_is_trained_on(form: str, hold_out: float | None) -> None:
    given = text(2, "in order", form)
    built = build(experiment(given, evaluate={"hold_out": hold_out} if hold_out else {}))
    trained = places(built.task, np.concatenate(built.task.shards))
    unseen = np.concatenate(built.task.unseen)
    assert not trained & places(built.task, unseen)
    assert hold_out is None or not trained & places(built.task, np.concatenate(built.task.held_out))
    whole = sum(len(given.shards[client]) for client in built.task.left_out)
    assert whole - 4 * 2 <= len(unseen) < whole  # at most two windows at each end of a shard are shared


def test_windows_side_by_side_lose_nothing_and_mixed_ones_that_overlap_are_refused() -> None:
    for split in ("in order", "mixed"):
        given = text(LENGTH, split)
        task = build(experiment(given)).task
        assert [list(part) for part in task.unseen] == [list(given.shards[client]) for client in task.left_out]
    with pytest.raises(ConfigError, match="every window, or a token of it, of those clients is another one's too"):
        build(experiment(text(1, "mixed")))


def test_sets_of_a_task_that_share_tokens_with_training_are_refused() -> None:
    ids = text(1, "in order")
    for name, sets in (("unseen", [[30, 34]]), ("held_out", [[34], [30]])):
        task = Task(ids.model, ids.loss, ids.data, [range(30), range(39, 60)], **{name: sets})
        assert task.problems() == [
            f"{name} has window 30, and 0 more, with tokens of windows that clients train on; leave such windows out"
        ]
        clear = Task(ids.model, ids.loss, ids.data, [range(26), range(39, 60)], **{name: sets})
        assert clear.problems() == []


@pytest.mark.parametrize("form", ["names", "one of a tuple"])
def test_windows_beside_other_inputs_train_as_windows_alone(form: str) -> None:
    def model(given: Task) -> Any:
        torch.manual_seed(0)
        task = Task(Tokens(), given.loss, given.data, given.shards)
        return run(Experiment(method=LOCAL, task=task, until={"commits": 3}, device="cpu")).model["table.weight"]

    assert torch.equal(model(text(2, "mixed", form)), model(text(2, "mixed")))


def test_windows_of_several_streams_are_refused() -> None:
    given = [windows(np.arange(40) % 7, LENGTH), windows(np.arange(50) % 7, LENGTH)]
    said = Task(Tokens(), sequence_cross_entropy, given).problems()
    assert len(said) == 1
    assert "join the streams of all clients to one array" in said[0]


# ---- devices ------------------------------------------------------------------------------------
MEASURED = {
    "name": "measured", "step_seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "up_mbit": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "mean_on": [50.0, 60.0, 70.0, 80.0, 90.0, 100.0], "mean_off": [1.0] * 6,
}  # fmt: skip


@pytest.mark.parametrize("law", [None, [1, 2, 3, 4, 5, 6], {"law": "uniform", "low": 1, "high": 9, "mode": "random"}])
def test_clients_keep_their_devices(law: Any) -> None:
    fleet = MEASURED | ({} if law is None else {"local_steps": law})
    built = build(experiment(pairs(), fleet=fleet))
    ids = built.task.client_ids
    assert len(ids) == 4
    assert sorted([*ids, *built.task.left_out]) == list(range(CLIENTS))
    assert [list(shard) for shard in built.task.shards] == [list(range(10 * i, 10 * i + 10)) for i in ids]
    assert built.fleet.step_seconds.tolist() == [i + 1.0 for i in ids]
    assert built.fleet.up_bandwidth.tolist() == [(i + 1) * 125_000.0 for i in ids]
    whole = build_fleet(**fleet, clients=CLIENTS)
    changes = [[list(islice(f.presence(c), 5)) for c in range(f.clients)] for f in (built.fleet, whole)]
    assert changes[0] == [changes[1][i] for i in ids]
    there, until = built.fleet.presence.opening(4)
    assert [(there[c], until[c]) for c in range(4)] == [(each[0][1], each[1][0]) for each in changes[0]]
    if law is not None:
        steps = [[f.local_steps(c, job) for job in range(3)] for f in (built.fleet, whole) for c in range(f.clients)]
        assert steps[:4] == [steps[4 + i] for i in ids]


def test_a_fleet_of_all_clients_or_of_those_that_train() -> None:
    whole = build_fleet("lognormal", CLIENTS, 3)
    task = build(experiment(pairs())).task
    few = without(whole, task.left_out)
    for fleet in (whole, few):
        assert (build(experiment(pairs(), fleet=fleet)).fleet.step_seconds == few.step_seconds).all()
    with pytest.raises(ConfigError, match="the fleet has 5 clients, the task 6"):
        build(experiment(pairs(), fleet=build_fleet("equal", 5)))


def test_clusters_need_all_their_devices() -> None:
    with pytest.raises(ConfigError, match="takes 2 of 6 clients away, but fleet 'hlsgd' has clusters"):
        build(experiment(pairs(), method="hl-sgd", fleet={"name": "hlsgd", "clusters": 2}))


def test_unseen_clients_are_said_once() -> None:
    shards = [range(10), range(10, 20)]
    task = pairs(shards=shards, unseen=[range(20, 30)])
    with pytest.raises(ConfigError, match="but the task has unseen clients; give one of the two"):
        build(experiment(task, unseen=1))


def test_files_and_pages_name_clients_by_their_numbers_in_the_task(tmp_path: Path) -> None:
    looks = {"clients": True, "hold_out": 0.2}
    task = pairs()
    given = experiment(task, fleet=MEASURED, evaluate=looks)
    outcome = run(given, tmp_path / "run")
    built = build(given)
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pylist()
    assert [row["client"] for row in table] == built.task.client_ids != list(range(4))
    assert [row["run_client"] for row in table] == list(range(4))
    arrived = pq.read_table(tmp_path / "run" / "trace.parquet").to_pylist()
    jobs = [row["jobs"][::2] for row in arrived if row["kind"] == "commit"]
    assert [row["updates"] for row in table] == [sum(commit.count(i) for commit in jobs) for i in range(4)]
    model = nn.Linear(1, 3)
    model.load_state_dict(outcome.model)
    for row, part in zip(table, built.task.held_out, strict=True):
        rows = torch.as_tensor(np.asarray(part))
        assert all(r // 10 == row["client"] for r in rows.tolist())
        loss = functional.cross_entropy(model(X[rows]).detach(), Y[rows])
        assert row["held_out_loss"] == pytest.approx(float(loss), rel=1e-4)
    assert fleet_of(read_run(tmp_path / "run", "")).step_seconds.tolist() == built.fleet.step_seconds.tolist()
    assert replay(tmp_path / "run", task=task).metrics == outcome.metrics
    whole = run(experiment(pairs(), evaluate={"unseen": None}), tmp_path / "whole")
    columns = pq.read_table(tmp_path / "whole" / "clients.parquet").column_names
    assert whole.commits == 4
    assert columns == ["client", "updates"]
