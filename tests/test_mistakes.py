"""What goes wrong for users, and must end in a sentence or in a run that can be taken up again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat import ConfigError, Experiment, OffbeatError, Task, build, cli, resume, run
from offbeat.config import toml
from offbeat.engines.engine import Engine
from offbeat.engines.server import Server
from offbeat.errors import BadNumbers
from offbeat.methods import METHODS
from offbeat.runs import store
from offbeat.runs.logbook import Logbook
from offbeat.runs.loop import Interrupted
from offbeat.tasks.quadratic import quadratic
from test_runs import FEDBUFF, TASK, InterruptAt, experiment, figures, interrupted, same_bits

NAN, INF = float("nan"), float("inf")


# ---- config files -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changed",
    [
        {"method": {"name": "local-sgd", "n": None}},
        {"task": TASK | {"batch_size": None}},
        {"fleet": {"name": "straggling", "mbit": None}},
    ],
    ids=str,
)
def test_a_none_that_is_no_default_survives_the_config(changed: dict[str, Any], tmp_path: Path) -> None:
    made = run(experiment(**changed), tmp_path)
    again = run(Experiment.of(toml.read(tmp_path / "config.toml")))
    assert same_bits(again.model, made.model)
    assert again.virtual_seconds == made.virtual_seconds


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    run(experiment(method=FEDBUFF | {"client_lr": np.float64(0.1)}), tmp_path)
    assert toml.read(tmp_path / "config.toml")["method"]["client_lr"] == 0.1


@pytest.mark.parametrize("table", [{"a": "\U0001f600"}, {"\u00e9": 1}, {"a": "\x7f\x01"}], ids=str)
def test_toml_takes_any_text(table: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(toml.write(table), encoding="utf-8")
    assert toml.read(tmp_path / "c.toml") == table


@pytest.mark.parametrize(
    "changed",
    [
        {"targets": 0.5},
        {"targets": ["a"]},
        {"evaluate": 5},
        {"until": 5},
        {"method": 5},
        {"task": 5},
        {"fleet": 5},
        {"checkpoint_seconds": "x"},
        {"checkpoint_seconds": -1},
        {"memory_gib": NAN},
        {"memory_gib": -1},
        {"until": {"commits": INF}},
        {"evaluate": {"every_seconds": NAN}},
        {"device": "meta"},
        {"task": TASK | {"clients": "x"}},
        {"task": "quadratic", "seed": -1},
        {"task": {"name": "quadratic", "dimension": 0}},
        {"task": "quadratic", "until": {"accuracy": 0.9}},
        {"method": FEDBUFF | {"buffer_size": 0}},
        {"method": FEDBUFF | {"client_lr": "abc"}},
        {"method": FEDBUFF | {"client_lr": True}},
        {"method": {"name": "fedbuff", "when": "sampled"}},
        {"method": FEDBUFF | {"client_lr": {"schedule": "step", "value": "x", "at": [1]}}},
        {"method": FEDBUFF | {"client_options": {"clip": "x"}}},
        {"method": FEDBUFF | {"client_options": {"clip": NAN}}},
        {"method": FEDBUFF | {"staleness": {"law": "polynomial", "a": "x"}}},
        {"method": FEDBUFF | {"server_optimiser": {"name": "sgd", "momentum": "x"}}},
        {"method": FEDBUFF | {"server_optimiser": {"name": "sgd", "momentum": 2}}},
    ],
    ids=str,
)
def test_config_mistakes_get_sentences(changed: dict[str, Any]) -> None:
    usual = {"method": FEDBUFF, "task": TASK, "device": "cpu", "until": {"commits": 2}}
    with pytest.raises(ConfigError):
        build(Experiment.of(usual | changed))


def test_a_negative_loss_may_be_a_limit() -> None:
    assert build(experiment(task="quadratic", until={"loss": -0.1})).task.name == "quadratic"


def test_a_bad_seed_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(experiment(seed="x"))
    assert len(caught.value.problems) == 1


# ---- kills and interrupts -----------------------------------------------------------------------
class Killed(BaseException):
    """Stands for SIGKILL: nobody cleans up."""


class KillAt(InterruptAt):
    def committed(self, run: Any) -> None:
        if run.commit == self.commits:
            raise Killed


def killed(call: Callable[[], Any]) -> None:
    with pytest.raises(Killed):
        call()


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
    chosen = experiment(task=odd(), until={"commits": 100})
    straight = run(chosen)
    interrupted(chosen, tmp_path, 5)
    assert same_bits(resume(tmp_path, task=odd()).model, straight.model)


def test_a_changed_server_state_is_refused(tmp_path: Path) -> None:
    def method(optimiser: str) -> Any:
        return METHODS["fedbuff"](buffer_size=3, local_steps=2, server_optimiser=optimiser)

    interrupted(experiment(method=method("sgd")), tmp_path, 5)
    with pytest.raises(OffbeatError, match="this method and model need"):
        resume(tmp_path, method=method("adam"))


@pytest.mark.parametrize(
    "blown",
    [
        {"client_lr": 1e36},
        {"client_lr": 1e10, "beta": 1e35},
        {"beta": 3e38, "client_lr": 10.0},
        {"server_optimiser": {"name": "sgd", "momentum": 0.9}, "beta": 1e37, "client_lr": 10.0},
    ],
    ids=str,
)
def test_a_result_that_is_not_finite_ends_with_exit_3(
    blown: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = experiment(method=FEDBUFF | blown, evaluate={"every_commits": 5}).toml()
    (tmp_path / "c.toml").write_text(table)
    assert offbeat(monkeypatch, "run", tmp_path / "c.toml", "--out", tmp_path / "run") == 3
    assert "rate" in capsys.readouterr().err
    assert offbeat(monkeypatch, "resume", tmp_path / "run") == 3  # it does not become good by being looked at again


def test_result_json_is_strict_json(tmp_path: Path) -> None:
    with pytest.raises(BadNumbers, match="after commit 2 is of no use: its loss is inf"):
        run(experiment(method=FEDBUFF | {"client_lr": 1e36}), tmp_path)

    def refuse(name: str) -> None:
        raise ValueError(name)

    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)["loss_final"] is None


# ---- tasks of one's own -------------------------------------------------------------------------
def own(**changed: Any) -> Task:
    x, y = torch.linspace(-1.0, 1.0, 80).reshape(20, 4), torch.arange(20) % 3
    usual = {"model": nn.Linear(4, 3), "loss": functional.cross_entropy, "data": (x, y), "batch_size": 2}
    return Task(**usual | {"shards": [range(5 * i, 5 * i + 5) for i in range(4)]} | changed)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": nn.Linear(5, 3)}, "the model does not take the training inputs"),
        ({"data": (torch.ones(20, 4, dtype=torch.int64), torch.arange(20) % 3)}, "does not take the training inputs"),
        ({"shards": [[0.5], [1], [2], [3]]}, "samples are row numbers"),
        ({"data": None}, "must be a pair"),
    ],
)
def test_mistakes_in_a_task_of_your_own_get_sentences(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(experiment(task=own(**changed), fleet="equal"))
    assert sentence in str(caught.value)


def test_the_remedy_that_the_batchnorm_refusal_names_works() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    outcome = run(experiment(task=own(model=nn.Sequential(nn.Linear(4, 3), norm)), fleet="equal"))
    assert outcome.mode == "wave"


def test_a_run_does_not_change_the_task_it_was_given() -> None:
    task = quadratic([np.eye(2)] * 12, [np.ones(2)] * 12, start=np.array([0.1, 0.3]))
    before = task.model.w.detach().clone()
    run(experiment(task=task))
    assert task.model.w.dtype == before.dtype
    assert torch.equal(task.model.w.detach(), before)


# ---- command line -------------------------------------------------------------------------------
def offbeat(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


FILE = '[task]\nname = "digits"\nmodel = "logistic"\nclients = 12\n[methods.fedbuff]\nbuffer_size = 3\n'


def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> tuple[Any, Path]:
    (tmp_path / "c.toml").write_text(FILE)
    words = ["--device", "cpu", "--until", "commits=2", "--set", change, "--out", tmp_path / "out"]
    code = offbeat(monkeypatch, "compare", "--config", tmp_path / "c.toml", *words)
    return code, tmp_path / "out" / "fedbuff-seed0" / "config.toml"


def test_compare_set_keeps_what_the_file_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = toml.read(compared(monkeypatch, tmp_path, "task.batch_size=5")[1])["task"]
    assert (task["batch_size"], task["clients"], task["model"]) == (5, 12, "logistic")


def test_compare_sets_options_by_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compared(monkeypatch, tmp_path, "method.client_lr=0.001")[0] == 2
    code, written = compared(monkeypatch, tmp_path, "methods.fedbuff.client_lr=0.001")
    assert code == 0
    assert toml.read(written)["method"]["client_lr"] == 0.001
    assert toml.read(written)["method"]["buffer_size"] == 3


def test_compare_names_the_problems_of_all_methods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offbeat(monkeypatch, "compare", "fedbuf", "local-sdg", "--out", tmp_path)
    said = capsys.readouterr().err
    assert "'fedbuf'" in said
    assert "'local-sdg'" in said


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[methods]\nfedbuff = 3\n"])
def test_compare_with_a_bad_file(text: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text)
    assert offbeat(monkeypatch, "compare", "--config", tmp_path / "c.toml", "--out", tmp_path) == 2


def test_broken_files_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(experiment(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert offbeat(monkeypatch, "replay", tmp_path) == 4
    for checkpoint in tmp_path.glob("checkpoint-*"):
        checkpoint.write_bytes(b"xx")
    assert offbeat(monkeypatch, "resume", tmp_path) == 4


def test_paper_refuses_a_file_as_out_and_flags_that_fit_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("")
    assert offbeat(monkeypatch, "paper", "fedbuff-fig1", "--out", tmp_path / "f") == 2
    assert offbeat(monkeypatch, "paper", "fedbuff-fig1", "--only", "zzz", "--out", tmp_path) == 2
    assert offbeat(monkeypatch, "paper", "fedbuff-fig1", "--n", "7", "--out", tmp_path) == 2
