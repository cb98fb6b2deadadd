"""Streams: with sampling = "in-order-continued" each row of a shard is read once, in order, modulo wrap-around.

The expected models come from a plain loop over a run's trace, in NumPy, which counts the steps of each client's
finished jobs itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments import digest
from offbeat import Experiment, Task, replay, resume, run
from offbeat.errors import OffbeatError, StorageError
from offbeat.fleets.make import build
from offbeat.keys import generator
from offbeat.method import Policy
from offbeat.records import Begun, Commit, Finished, Overwritten, Row
from offbeat.runs.disk import mark_of, read_tensors
from offbeat.runs.manifest import READS, read_manifest
from offbeat.runs.stored import read_trace
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.guard import nothing_refused
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.schedule.trace import Replay, difference
from stopped_runs import killed_after

CLIENTS, WIDTH, LR = 6, 4, 0.3
STEP_LAWS: list[Any] = [3, [2, 5, 1, 4, 3, 2], {"law": "uniform", "low": 1, "high": 7, "mode": "random"}]
CHANCE: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None}


# ---- the plain loop -----------------------------------------------------------------------------
def positions(rows: Iterable[Row]) -> dict[tuple[int, int], int]:
    """Where each job begins in its client's stream: behind the steps of the jobs that the client has finished."""
    done: Counter[int] = Counter()
    begun: dict[tuple[int, int], Begun] = {}
    found = {}
    for _, record in rows:
        if isinstance(record, Begun):
            begun[record[:2]] = record
            found[record[:2]] = done[record.client]
        elif isinstance(record, Finished):
            done[record.client] += begun[record[:2]].steps
    return found


@dataclass
class Streams:
    """Clients with samples x, whose loss on a sample is |w - x|^2 / 2."""

    x: np.ndarray
    shards: list[list[int]]
    batches: list[int]
    members: Sequence[Sequence[int]]  # clients of each cluster, or of each client itself

    @staticmethod
    def of(seed: int, members: Sequence[Sequence[int]] | None = None) -> Streams:
        rng = np.random.default_rng(seed)
        sizes, batches = rng.integers(1, 14, CLIENTS).tolist(), rng.integers(1, 4, CLIENTS).tolist()
        x, at = rng.standard_normal((sum(sizes), WIDTH)), rng.permutation(sum(sizes)).tolist()
        ends = [0, *np.cumsum(sizes).tolist()]
        shards = [at[begin:end] for begin, end in pairwise(ends)]
        batches = [min(pair) for pair in zip(batches, sizes, strict=True)]
        return Streams(x, shards, batches, members or [[client] for client in range(CLIENTS)])

    def task(self) -> Task:
        return Task(
            Away(), half_square, (torch.from_numpy(self.x), torch.zeros(len(self.x))), self.shards,
            batch_size=self.batches, sampling="in-order-continued",
        )  # fmt: skip

    def gradients(self, client: int, at: int) -> Any:
        """The part of the gradient that depends on the samples of the step that is the client's `at`-th."""
        shard, batch = self.shards[client], self.batches[client]
        rows = [shard[place % len(shard)] for place in range(at * batch, (at + 1) * batch)]
        return self.x[rows].mean(0)

    def sgd(self, client: int, w: Any, at: int, steps: int) -> Any:
        """What a client sends after so many steps."""
        y = w.copy()
        for k in range(at, at + steps):
            y = y - LR * (y - self.gradients(client, k))
        return w - y

    def average(self, rows: list[Row]) -> Any:
        """Local SGD from any schedule: each commit takes the mean of its updates from the model."""
        at, begun, models = positions(rows), jobs_of(rows), [np.zeros(WIDTH)]
        for _, record in rows:
            if isinstance(record, Commit):
                updates = [
                    self.sgd(client, models[begun[name].version], at[name], begun[name].steps)
                    for name in record.jobs for client in self.members[name[0]]
                ]  # fmt: skip
                models.append(models[-1] - np.mean(updates, axis=0))
        return models[-1]

    def fedlin(self, rows: list[Row]) -> Any:
        """Commits of gradients g_i and of models take turns."""
        at, begun, w, g = positions(rows), jobs_of(rows), np.zeros(WIDTH), np.zeros(WIDTH)
        own: dict[int, Any] = {}
        commits = [record for _, record in rows if isinstance(record, Commit)]
        for number, commit in enumerate(commits):
            updates = []
            for name in commit.jobs:
                (client, _), steps = name, begun[name].steps
                if number % 2 == 0:
                    own[client] = w - np.mean([self.gradients(client, at[name] + k) for k in range(steps)], axis=0)
                    updates.append(own[client])
                    continue
                y = w.copy()
                for k in range(steps):
                    y = y - LR / steps * (y - self.gradients(client, at[name] + k) - own[client] + g)
                updates.append(w - y)
            mean = np.mean(updates, axis=0)
            g, w = (mean, w) if number % 2 == 0 else (g, w - mean)
        return w


def jobs_of(rows: Iterable[Row]) -> dict[tuple[int, int], Begun]:
    return {record[:2]: record for _, record in rows if isinstance(record, Begun)}


class Away(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def half_square(z: Tensor, _: Tensor) -> Tensor:
    return z.square().sum(1).mean() / 2


# ---- experiments by chance ----------------------------------------------------------------------
def fleet(seed: int, **options: Any) -> dict[str, Any]:
    """Clients that are lost while they compute, and that come and go."""
    return {
        "name": "custom", "step_seconds": {"law": "uniform", "low": 0.05, "high": 0.4}, "latency": 0.05,
        "jitter": {"law": "lognormal", "median": 1.0, "sigma": 0.4}, "drop_out": 0.15, "mean_on": 6.0, "mean_off": 1.0,
        "local_steps": STEP_LAWS[seed % 3], **options,
    }  # fmt: skip


POLICIES: list[Policy] = [
    Rounds(size=3),
    Rounds(size=2, over_selection=2.0, deadline=0.8),
    Rounds(size=3, replacement=True),
    Buffer(size=2),
    Buffer(size=3, restart="fresh", overlap=True),
    Sampled(size=2),
    Sampled(size=3, overlap=False),
]


def experiment(streams: Streams, method: Any, seed: int, **options: Any) -> Experiment:
    table = {"fleet": fleet(seed), "until": {"commits": 8}, **options}
    return Experiment(method=method, task=streams.task(), seed=seed, precision="float64", device="cpu", **table)


def local_sgd(policy: Policy) -> dict[str, Any]:
    return {"name": "local-sgd", "client_lr": LR, "when": policy, "experimental": True}


def trained(chosen: Experiment, out: Path) -> tuple[Any, list[Row]]:
    model = run(chosen, out, overwrite=True).model["w"].numpy()
    return model, list(read_trace(out))


# ---- the schedule plane -------------------------------------------------------------------------
@settings(max_examples=40, **CHANCE)
@given(st.sampled_from([*POLICIES, Rounds(size=3, probes=2), Hybrid(Buffer(size=2, steps=4))]), st.integers(0, 999))
def test_a_job_begins_behind_the_finished_ones(policy: Policy, seed: int) -> None:
    """On the clock, and told to the policy again."""
    options = fleet(seed)
    if policy.orders is not None:
        del options["local_steps"]
    durations = build(options.pop("name"), CLIENTS, seed, **options).durations(seed, 0, 0)
    rows = list(islice(VirtualClock(policy, durations, generator(seed, "policy")), 600))
    assert {name: job.steps_before for name, job in jobs_of(rows).items()} == positions(rows)
    again = Replay(rows, policy, CLIENTS, generator(seed, "policy"))
    assert list(again) == rows
    assert again.refused == nothing_refused()
    lost = [record[:2] for _, record in rows if isinstance(record, Overwritten)]
    ends = {record[:2] for _, record in rows if isinstance(record, Finished)}
    assert any(name not in ends for name in lost), "no job was lost before its end"
    wrong = [(time, job._replace(steps_before=job.steps_before + 1) if type(job) is Begun else job)
             for time, job in rows]  # fmt: skip
    with pytest.raises(OffbeatError, match=r"the trace has Begun\(.*\), which cannot be"):
        list(Replay(wrong, policy, CLIENTS, generator(seed, "policy")))


# ---- models -------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{"mode": "reference"}, {}, {"engine": "tiles"}], ids=["reference", "waves", "tiles"])
@settings(max_examples=12, **CHANCE)
@given(st.sampled_from(POLICIES), st.integers(0, 999))
def test_each_row_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, how: dict[str, Any], policy: Policy, seed: int
) -> None:
    streams = Streams.of(seed)
    model, rows = trained(experiment(streams, local_sgd(policy), seed, **how), tmp_path_factory.mktemp("run"))
    assert np.allclose(model, streams.average(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [{"mode": "reference"}, {}, {"engine": "tiles"}], ids=["reference", "waves", "tiles"])
@pytest.mark.parametrize("seed", range(3))
def test_fedlin_reads_probes_and_steps_from_one_stream(how: dict[str, Any], seed: int, tmp_path: Path) -> None:
    streams = Streams.of(seed)
    steady = {"name": "uniform", "local_steps": STEP_LAWS[seed]}  # everyone is there: nu is of the same clients
    method = {"name": "fedlin", "client_lr": LR, "n": 4, "probes": 1 + seed}
    model, rows = trained(experiment(streams, method, seed, fleet=steady, **how), tmp_path)
    assert np.allclose(model, streams.fedlin(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [{"mode": "reference"}, {}, {"engine": "tiles"}], ids=["reference", "waves", "tiles"])
def test_devices_of_a_cluster_read_their_streams(how: dict[str, Any], tmp_path: Path) -> None:
    """Blocks, some of whose jobs are dropped: without gossip, each device does what it would do alone."""
    streams = Streams.of(5, [[0, 1, 2], [3, 4, 5]])
    method = {"name": "hl-sgd", "n": 1, "over_selection": 2.0, "local_steps": 3, "gossip_rounds": 0, "client_lr": LR}
    steady = fleet(5, drop_out=0.0, clusters={"sizes": [3, 3]})
    for name in ("mean_on", "mean_off", "local_steps"):
        del steady[name]
    model, rows = trained(experiment(streams, method, 5, fleet=steady, until={"commits": 16}, **how), tmp_path)
    assert np.allclose(model, streams.average(rows), rtol=1e-12, atol=1e-12)
    assert any(job.steps_before < 3 * job.job for job in jobs_of(rows).values())


# ---- the same run, taken up or told again -------------------------------------------------------
@pytest.mark.parametrize("engine", ["local", "tiles"])
def test_a_killed_run_and_a_replay_read_the_same_rows(engine: str, tmp_path: Path) -> None:
    streams = Streams.of(2)
    chosen = experiment(streams, local_sgd(POLICIES[1]), 2, engine=engine, checkpoint_seconds=1e-6)
    straight = run(chosen, tmp_path / "straight")
    killed_after(4, chosen, tmp_path / "killed")
    own: dict[str, Any] = {"task": chosen.task, "method": chosen.method}
    assert digest(resume(tmp_path / "killed", **own).model) == digest(straight.model)
    assert (tmp_path / "killed/trace.parquet").read_bytes() == (tmp_path / "straight/trace.parquet").read_bytes()
    assert digest(replay(tmp_path / "killed", **own).model) == digest(straight.model)


# ---- directories of format 3 --------------------------------------------------------------------
def as_of_format_3(out: Path) -> None:
    """What an older Offbeat left: a trace without the column, and checkpoints whose jobs do not have it."""
    manifest = read_manifest(out)
    assert manifest is not None
    table = pq.read_table(out / "trace.parquet").drop_columns(["steps_before"])
    pq.write_table(table, out / "trace.parquet")
    for name in manifest.checkpoints:
        tensors, facts = read_tensors(out / name)
        save_file(tensors, out / name, metadata={"facts": json.dumps(facts | {"format": 4})})
    manifest.format = READS[0]
    manifest.files |= {name: mark_of(out / name) for name in ("trace.parquet", *manifest.checkpoints)}
    manifest.write(out)


def test_what_an_older_version_left_is_read_or_refused(tmp_path: Path) -> None:
    streams, safe = Streams.of(1), {"name": "uniform", "local_steps": 3}
    own: dict[str, Any] = {}
    for name, chosen in (
        ("constant", experiment(streams, local_sgd(POLICIES[3]), 1, fleet=safe)),
        ("random", experiment(streams, local_sgd(POLICIES[3]), 1, fleet=safe | {"local_steps": STEP_LAWS[2]})),
    ):
        outcome, rows = run(chosen, tmp_path / name), list(read_trace(tmp_path / name))
        as_of_format_3(tmp_path / name)
        assert difference(read_trace(tmp_path / name), rows) is None
        own = {"task": chosen.task, "method": chosen.method}
        with pytest.raises(OffbeatError, match="written by another version of Offbeat"):
            resume(tmp_path / name, until={"commits": 9}, **own)
        if name == "constant":
            assert digest(replay(tmp_path / name, **own).model) == digest(outcome.model)
    with pytest.raises(OffbeatError, match=r"skipped or repeated rows: job \d+ of client \d+ began at step \d+"):
        replay(tmp_path / "random", **own)
    shuffled = replace(own["task"], sampling="shuffle")
    run(replace(chosen, task=shuffled), tmp_path / "shuffle")
    as_of_format_3(tmp_path / "shuffle")
    replay(tmp_path / "shuffle", **own | {"task": shuffled})  # which reads by key
    pq.write_table(pq.read_table(tmp_path / "random/trace.parquet").drop_columns(["steps"]), tmp_path / "other.parquet")
    with pytest.raises(StorageError, match="its columns are others"):
        read_trace(tmp_path / "other.parquet")
