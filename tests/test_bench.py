"""The benchmark: what it counts, what it refuses, and that its figures agree with each other."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offbeat import __version__, cli
from offbeat.bench import arrivals, items, work
from offbeat.bench.items import ITEMS, Settings, bench
from offbeat.errors import ConfigError

CPU = torch.device("cpu")
QUICK = Settings(device="cpu", quick=True)
Call = Callable[..., tuple[Any, str, str]]


def python(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logistic regression on images of four pixels, whatever model is asked for; one go warms it up."""
    small_task = work.small_task
    monkeypatch.setattr(work, "SHAPE", (1, 2, 2))
    monkeypatch.setattr(work, "MODELS", {"logistic": "LR"})
    monkeypatch.setattr(items, "FAMILIES", items.FAMILIES[:1])
    monkeypatch.setattr(work, "small_task", lambda _, clients: small_task("logistic", clients))
    monkeypatch.setattr(work, "warm_up", lambda job, *_: job())


# ---- the work -----------------------------------------------------------------------------------
def test_unequal_shares_are_all_the_images_and_nobody_has_fewer_than_ten() -> None:
    shares = work.shares(True)
    assert len(shares) == 1000
    assert sum(shares) == 50_000
    assert min(shares) >= 10
    assert max(shares) > 100  # a log-normal law has a tail


def test_equal_shares_are_fifty_images_each() -> None:
    assert work.shares(False) == [50] * 1000


def test_the_protocol_gives_every_image_to_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "USERS", 20)
    task = work.protocol_task(True)
    assert [len(shard) for shard in task.shards] == work.shares(True)
    assert np.concatenate(task.shards).tolist() == list(range(20 * 50))
    assert len(task.data[0]) == 20 * 50


def test_operations_are_those_of_a_hand_count() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 3))
    products, outputs = work.operations(model, torch.zeros(5, 1, 4, 4))
    convolved, mapped = 5 * 2 * 2 * 2, 5 * 2 * 2 * 3  # numbers that the two layers put out
    assert products == 2 * (2 * 9 * convolved + 3 * 2 * mapped)  # nobody needs the gradient of the images
    assert outputs == 2 * convolved + mapped
    assert work.operations(model, torch.zeros(10, 1, 4, 4)) == (2 * products, 2 * outputs)  # no hook was left


def test_the_plain_loop_trains_and_leaves_the_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    task = work.small_task("logistic", 3)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    taken: list[bool] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD) -> None:
        step(self)
        taken.append(any(not torch.equal(value, before[name]) for name, value in task.model.state_dict().items()))

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    work.plain_loop(task, (0, 2), lambda client: client + 1, CPU)
    assert taken == [True] * 4
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())


# ---- other simulators ---------------------------------------------------------------------------
def test_another_simulator_says_its_figure_in_its_last_line() -> None:
    command = python('print(\'round 1\'); print(\'{"seconds_per_round": 0.5, "simulator": "x"}\')')
    assert items.elsewhere(command) == {
        "seconds per round": 0.5,
        "command": command,
        "said": {"seconds_per_round": 0.5, "simulator": "x"},
    }


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", "exit code 0 and said: nothing"),
        ("print('done')", "exit code 0 and said: nothing"),
        ("print(3)", "exit code 0 and said: nothing"),
        ("print('{}')", "exit code 0 and said: nothing"),
        ("print('{\"seconds_per_round\": null}')", "exit code 0 and said: nothing"),
        ("import sys; sys.exit('no such data')", "exit code 1 and said: no such data"),
    ],
)
def test_a_simulator_without_a_figure_is_a_sentence(code: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        items.elsewhere(python(code))
    (sentence,) = caught.value.problems
    assert sentence.startswith("--with: ")
    assert "must print a JSON object with 'seconds_per_round' as its last line" in sentence
    assert sentence.endswith(said)


# ---- facts --------------------------------------------------------------------------------------
def test_facts_name_device_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "commit", lambda: "abc1234")
    facts = items.facts(QUICK)
    assert facts["device"] == items.processor() != ""
    assert (facts["precision"], facts["quick"], facts["commit"]) == ("float32", True, "abc1234")
    assert (facts["offbeat"], facts["numpy"]) == (__version__, np.__version__)
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(facts)) == facts


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert items.version_of("no-such-package-as-this") is None


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_is_that_of_the_checkout_and_says_when_it_was_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "measure.py"
    monkeypatch.setattr(items, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source.write_text("one\n")
    assert items.commit() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short", "HEAD")
    assert items.commit() == head != ""
    source.write_text("two\n")
    assert items.commit() == f"{head}+changes"


# ---- items --------------------------------------------------------------------------------------
def test_an_unknown_item_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown item of the benchmark 'nonsense'") as caught:
        bench(("nonsense", "wave"), Settings())
    assert len(caught.value.problems) == 2
    assert all(name in sentence for sentence in caught.value.problems for name in ITEMS)


def test_only_the_items_named_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ITEMS:
        monkeypatch.setitem(ITEMS, name, lambda settings, name=name: [{"item": name, "quick": settings.quick}])
    said: list[str] = []
    results = bench(("protocol", "waves"), QUICK, said.append)
    assert said == ["waves", "protocol"]
    assert set(results) == {"facts", "waves", "protocol"}
    assert results["waves"] == [{"item": "waves", "quick": True}]
    assert set(bench((), QUICK)) == {"facts", *ITEMS}


@pytest.mark.usefixtures("small")
def test_waves_and_the_plain_loop_are_rates_and_their_ratio() -> None:
    rows = items.waves(QUICK)
    assert [row["clients"] for row in rows] == [1, 10, 50]
    for row in rows:
        assert set(row) == {"model", "clients", "plain", "plain, slowest", "wave", "wave, slowest", "ratio"}
        assert row["model"] == "LR"
        assert min(row["plain"], row["wave"]) > 0
        assert row["wave"] / row["plain"] == pytest.approx(row["ratio"])


@pytest.mark.usefixtures("small")
def test_waves_and_the_plain_loop_count_every_client_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which every go takes two seconds, the rates are half the client-steps."""
    monkeypatch.setattr(work, "seconds", lambda job, _: job() or 2.0)
    monkeypatch.setattr(work, "plain_loop", lambda *_: None)
    monkeypatch.setattr(items, "repeat", lambda *_: None)
    rows = items.waves(QUICK)
    assert [row["plain"] for row in rows] == [10, 100, 100]  # ten clients stand for fifty
    assert [row["wave"] for row in rows] == [10, 100, 500]


@pytest.mark.usefixtures("small")
def test_unequal_steps_are_compared_at_equal_sums() -> None:
    rows = items.unequal(QUICK)
    assert len(rows) == 3 * len(work.MODELS)
    assert all(row["cost over equal"] > 0 and row["largest / mean"] >= 1 for row in rows)
    assert [row["cost over equal"] for row in rows[::3]] == [1.0] * len(work.MODELS)
    assert {round(row["largest / mean"], 1) for row in rows} == {1.0, 1.9, 10.3}


@pytest.mark.usefixtures("small")
def test_asynchronous_costs_are_relative_to_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MODELS", {"mlp": "LR"})
    rows = items.asynchronous(QUICK)
    rounds, fedbuff, hetero = rows
    assert [row["run"] for row in rows] == ["rounds of 100", "FedBuff, buffer 10", "DLSGD-hetero, n = 10"]
    for row in rows:
        assert set(row) == {"run", "model", "client-steps/s", "cost over rounds", "mean wave", "never computed"}
        assert row["client-steps/s"] > 0
        assert rounds["client-steps/s"] / row["client-steps/s"] == pytest.approx(row["cost over rounds"])
    assert (rounds["mean wave"], rounds["never computed"]) == (100, 0)
    assert fedbuff["mean wave"] > 10  # commits take ten
    assert 0 < hetero["never computed"] < 1


@pytest.mark.usefixtures("small")
def test_the_share_of_the_attainable_is_of_the_rate_that_binds() -> None:
    (row,) = items.attainable(QUICK)
    assert min(row.values()) > 0
    shares = row["reached TFLOP/s"] / row["products TFLOP/s"], row["reached GB/s"] / row["copies GB/s"]
    assert row["share of the attainable"] == pytest.approx(max(shares))
    operations = row["reached TFLOP/s"] * 1e12 * row["step ms"] / 1e3
    assert operations == pytest.approx(row["clients"] * 2 * 2 * 4 * 10 * work.BATCH)  # four pixels, ten classes


def test_the_protocol_sets_others_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight users with a linear model; the other simulator takes two seconds for the unequal shards."""
    for name, value in {"USERS": 8, "IMAGES": 20, "COHORT": 4}.items():
        monkeypatch.setattr(work, name, value)
    build = work.build
    monkeypatch.setattr(work, "build", lambda _, *rest: build("logistic", *rest))
    other = python("import sys; print('{\"seconds_per_round\": %d}' % len(sys.argv))")
    rows = items.protocol(Settings(device="cpu", quick=True, others=(("other", other),)))
    assert [(row["shards"], row["simulator"]) for row in rows] == [
        (f"{kind} shards", name) for kind in ("equal", "unequal") for name in ("offbeat", "plain loop", "other")
    ]
    assert [rows[2]["seconds per round"], rows[5]["seconds per round"]] == [1, 2]
    for at, row in enumerate(rows):
        ours = rows[at // 3 * 3]["seconds per round"]
        assert row["seconds per round"] / ours == pytest.approx(row["over ours"])


@pytest.mark.parametrize("policy", ["FedBuff", "rounds", "DLSGD-hetero"])
def test_the_clock_counts_arrivals(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SECONDS", 0.05)
    monkeypatch.setattr(arrivals, "STRETCH", 8000)  # longer than a round, so that each has arrivals
    row = arrivals.measure(policy, 2000)
    assert (row["policy"], row["clients"], row["at once"]) == (policy, 2000, 1000)
    assert 0 < row["arrivals/s"] <= row["at best"]
    assert row["arrivals/s"] < row["rows/s"]
    assert min(row["start s"], row["peak GB"]) > 0
    assert json.loads(json.dumps(row)) == row


# ---- the command --------------------------------------------------------------------------------
@pytest.fixture
def offbeat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Call]:
    """`offbeat bench ARGUMENTS` through its entry point, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code, *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("nonsense",),
            "unknown item of the benchmark 'nonsense': Known: asynchronous, attainable, models, protocol, schedule, "
            "unequal, waves",
        ),
        (
            ("waves", "--precision", "float16"),
            "bench: precision = 'float16'; it must be one of 'float32', 'tf32', ",
        ),
        (("waves", "--with", "nonsense"), "--with nonsense: write it as NAME=COMMAND, e.g. --with 'pfl=python "),
        (("waves", "--with", "=python"), "--with =python: write it as NAME=COMMAND"),
        (("waves", "--device", "nonsense"), "device = 'nonsense'; it is 'auto', 'cpu', 'cuda'"),
    ],
)
def test_a_wrong_command_is_refused_in_one_sentence(offbeat: Call, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = offbeat(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"offbeat: {sentence}")


def test_help_lists_the_items(offbeat: Call) -> None:
    code, out, _ = offbeat("--help")
    assert code == 0
    assert f"Only these items: {', '.join(ITEMS)}." in " ".join(out.split())


def test_figures_are_printed_as_a_table_and_as_json_and_are_written(
    offbeat: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(ITEMS, "waves", lambda _: [{"model": "LR", "ratio": 2.5}])
    code, out, err = offbeat("waves", "--device", "cpu", "--with", "x=a b=c", "--out", "made/bench.json", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "made/bench.json").read_text())
    assert json.loads(out)["waves"] == [{"model": "LR", "ratio": 2.5}]
    code, out, _ = offbeat("waves", "--device", "cpu", "--out", "bench.json")
    assert code == 0
    assert all(word in out for word in ("waves: ", "ratio", "LR", "2.5", "wrote bench.json"))


def test_flags_reach_the_items(offbeat: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Settings] = []
    monkeypatch.setitem(ITEMS, "waves", lambda settings: got.append(settings) or [])
    offbeat("waves", "--device", "cpu", "--precision", "float64", "--quick", "--with", "x=a b=c", "--json")
    assert got == [Settings("cpu", "float64", True, (("x", "a b=c"),))]


@pytest.mark.parametrize("command", ["no-such-program-as-this", "python 'unclosed", ""])
def test_a_simulator_that_cannot_be_run_is_a_sentence(command: str) -> None:
    with pytest.raises(ConfigError, match=r"--with: .* cannot be run"):
        items.elsewhere(command)
