"""Killed, interrupted, refused or given a further limit: a run goes on and ends as the straight one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from digits_runs import FEDBUFF, experiment
from offbeat import OffbeatError, Task, resume, run
from offbeat.engines.engine import Engine
from offbeat.engines.server import Server
from offbeat.methods import METHODS
from offbeat.runs import store
from offbeat.runs.logbook import Logbook
from offbeat.runs.loop import Interrupted
from stopped_runs import KillAt, figures, interrupted, killed, same_bits

# ---- kills and interrupts -----------------------------------------------------------------------
OFTEN = experiment(until={"commits": 30}, checkpoint_seconds=1e-6)


def test_a_resumed_run_that_is_killed_at_once_can_be_resumed(tmp_path: Path) -> None:
    killed(lambda: run(OFTEN, tmp_path, KillAt(8)))
    written = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(written.replace("checkpoint_seconds = 1e-06", "checkpoint_seconds = 60.0"))
    with pytest.warns(UserWarning, match=r"config\.toml was changed: checkpoint_seconds"):
        killed(lambda: resume(tmp_path, None, KillAt(10)))
    with pytest.warns(UserWarning, match=r"config\.toml was changed: checkpoint_seconds"):
        resumed = resume(tmp_path)
    assert resumed.metrics == run(OFTEN).metrics


def test_a_refused_resume_leaves_a_killed_run_as_it_was(tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        return {
            p.name: p.read_bytes()
            for p in tmp_path.rglob("*")
            if p.is_file() and p.name not in ("config.toml", "offbeat.lock")
        }

    killed(lambda: run(OFTEN, tmp_path, KillAt(8)))
    before, written = files(), (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(written.replace("seed = 0", "seed = 1"))
    with pytest.raises(OffbeatError, match=r"was changed since the run began \(seed\)"):
        resume(tmp_path)
    assert files() == before


def test_interrupted_then_resumed_then_killed_keeps_all_metrics(tmp_path: Path) -> None:
    interrupted(OFTEN, tmp_path, 8)
    killed(lambda: resume(tmp_path, None, KillAt(20)))
    assert resume(tmp_path).metrics == run(OFTEN).metrics


def test_a_new_run_in_an_old_directory_does_not_resume_the_old_one(tmp_path: Path) -> None:
    run(experiment(method=FEDBUFF | {"client_lr": 0.5}), tmp_path)
    chosen = experiment(until={"commits": 30})
    killed(lambda: run(chosen, tmp_path, KillAt(4), overwrite=True))
    assert same_bits(resume(tmp_path).model, run(chosen).model)


def raising_at(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    calls = []

    def instead(*given: Any, **named: Any) -> Any:
        calls.append(0)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*given, **named)

    return instead


@pytest.mark.parametrize(("name", "number"), [("evaluate", 4), ("broadcast", 5), ("commit", 1)])
def test_an_interrupt_at_any_moment_leaves_a_run_that_resumes(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    straight = run(experiment())
    with monkeypatch.context() as patch:
        owner = Server if name == "broadcast" else Engine
        patch.setattr(owner, name, raising_at(getattr(owner, name), number))
        with pytest.raises(Interrupted):
            run(experiment(), tmp_path)
    resumed = resume(tmp_path)
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics
    assert figures(resumed) == figures(straight)


def test_an_interrupt_while_resuming_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    straight = run(experiment())
    interrupted(experiment(), tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Logbook, "note", raising_at(Logbook.note, 3))
        with pytest.raises(Interrupted):
            resume(tmp_path)
    assert resume(tmp_path).metrics == straight.metrics


def test_an_interrupt_while_a_part_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = experiment(checkpoint_seconds=1e-6)
    real, calls = store.pq.write_table, []

    def half(table: Any, at: Any) -> None:
        calls.append(0)
        if len(calls) == 6:
            Path(at).write_bytes(b"PAR1")
            raise KeyboardInterrupt
        real(table, at)

    with monkeypatch.context() as patch:
        patch.setattr(store.pq, "write_table", half)
        with pytest.raises(Interrupted):
            run(chosen, tmp_path)
    assert resume(tmp_path).metrics == run(chosen).metrics


# ---- limits and resuming ------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [{"commits": 5}, {"virtual_seconds": 1e-3}], ids=str)
def test_a_limit_already_passed_is_refused_and_leaves_the_run(limit: dict[str, float], tmp_path: Path) -> None:
    made = run(experiment(), tmp_path)
    with pytest.raises(OffbeatError, match="beyond the limit given; give a further one"):
        resume(tmp_path, limit)
    (tmp_path / "config.toml").write_text(experiment().toml())
    assert figures(resume(tmp_path)) == figures(made)


def test_resuming_a_run_that_ended_by_samples_changes_nothing(tmp_path: Path) -> None:
    made = run(experiment(until={"samples": 500}), tmp_path)
    assert figures(resume(tmp_path)) == figures(made)


def test_a_further_limit_leaves_no_row_of_the_first_end(tmp_path: Path) -> None:
    longer = run(experiment(until={"commits": 20}, evaluate={"every_commits": 4}))
    run(experiment(evaluate={"every_commits": 4}), tmp_path)
    assert [r["commit"] for r in resume(tmp_path, {"commits": 20}).metrics] == [r["commit"] for r in longer.metrics]


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(self.weight.detach().sum()) > -1e9 else x


def odd() -> Task:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    return Task(Odd(4, 3), functional.cross_entropy, (x, y), [range(8 * i, 8 * i + 8) for i in range(5)], batch_size=4)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_batched_resumes(tmp_path: Path) -> None:
    chosen = experiment(task=odd(), until={"commits": 20})
    straight = run(chosen)
    interrupted(chosen, tmp_path, 5)
    assert same_bits(resume(tmp_path, task=odd()).model, straight.model)


def test_a_changed_server_state_is_refused(tmp_path: Path) -> None:
    def method(optimiser: str) -> Any:
        return METHODS["fedbuff"](buffer_size=3, local_steps=2, server_optimiser=optimiser)

    interrupted(experiment(method=method("sgd")), tmp_path, 5)
    with pytest.raises(OffbeatError, match="this method and model need"):
        resume(tmp_path, method=method("adam"))
