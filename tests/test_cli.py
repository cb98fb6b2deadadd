"""The command line as a user meets it: what it prints, what it writes, how it ends."""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import digits_runs
from command_line import exit_code
from offbeat import METHODS, cli
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run as run_experiment
from offbeat.papers import RECIPES as RECIPE_DATA
from offbeat.runs.disk import mark_of
from offbeat.runs.manifest import read_manifest
from offbeat.runs.stored import read_metrics
from stopped_runs import PATIENCE, command_that_stops

SMALL = ("--device", "cpu", "--set", "task.model=logistic", "--set", "task.clients=12", "--set", "task.split=iid")
QUICK = (*SMALL, "--until", "commits=4")
RECIPES = ("dlsgd-fig2", "dlsgd-fig3", "dlsgd-fig6", "dlsgd-table2", "fedbuff-fig1")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def offbeat(monkeypatch, capsys, tmp_path):
    """`offbeat ARGUMENTS` through its entry point, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = exit_code(monkeypatch, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def result(offbeat):
    """The one JSON document that a command with --json prints."""

    def call(*arguments):
        code, out, err = offbeat(*arguments, "--json")
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return call


@pytest.fixture
def refused(offbeat):
    """The sentences with which a command is refused."""

    def call(*arguments):
        code, out, err = offbeat(*arguments)
        assert (code, out) == (2, "")
        lines = err.splitlines()
        assert all(line.startswith("offbeat: ") for line in lines), err
        return [line.removeprefix("offbeat: ") for line in lines]

    return call


def config_of(directory):
    from offbeat.config import toml

    return toml.read(directory / "config.toml")


# ---- run ----------------------------------------------------------------------------------------
def test_flags_choose_the_experiment(result, tmp_path):
    made = result(
        "run", "--method", "dlsgd-homo", "--task", "digits", "--fleet", "uniform", "--seed", 7, *QUICK, "--out", "out"
    )
    assert (made["method"], made["task"], made["fleet"], made["seed"]) == ("dlsgd-homo", "digits", "uniform", 7)
    assert (made["commits"], made["device"]) == (4, "cpu")
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == made
    written = config_of(tmp_path / "out")
    assert (written["method"]["name"], written["fleet"]["name"], written["seed"]) == ("dlsgd-homo", "uniform", 7)


def test_set_reaches_every_depth_of_the_config(result, tmp_path):
    result(
        "run", *QUICK, "--out", "out", "--set", "method.client_lr={schedule = 'cosine', value = 0.1, versions = 9}",
        "--set", "task.split.name=dirichlet", "--set", "task.split.alpha=0.5", "--set", "evaluate.every_commits=3",
        "--set", "targets=[0.5, 0.75]", "--set", "precision=float64", "--set", "method.staleness=polynomial",
    )  # fmt: skip
    written = config_of(tmp_path / "out")
    assert written["method"]["name"] == "fedbuff"
    assert written["method"]["client_lr"] == {"schedule": "cosine", "value": 0.1, "versions": 9}
    assert written["method"]["staleness"] == "polynomial"
    assert written["task"]["name"] == "digits"
    assert written["task"]["split"] == {"name": "dirichlet", "alpha": 0.5}
    assert written["evaluate"]["every_commits"] == 3
    assert (written["targets"], written["precision"]) == ([0.5, 0.75], "float64")
    assert load_file(tmp_path / "out" / "model.safetensors")["1.bias"].dtype == torch.float64


def test_a_file_then_flags_then_sets(result, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'seed = 3\ndevice = "cpu"\n'
        '[method]\nname = "fedbuff"\nbuffer_size = 4\nlocal_steps = 3\n'
        '[task]\nname = "digits"\nmodel = "logistic"\nclients = 12\n'
        "[until]\ncommits = 9\n"
    )
    made = result("run", "mine.toml", "--out", "plain")
    assert (made["seed"], made["commits"], made["updates_consumed"]) == (3, 9, 36)
    changed = ("--seed", 8, "--until", "commits=2", "--until", "accuracy=0.99", "--set", "method.buffer_size=5")
    made = result("run", "mine.toml", *changed, "--out", "changed")
    assert (made["seed"], made["commits"], made["updates_consumed"]) == (8, 2, 10)
    written = config_of(tmp_path / "changed")
    assert written["method"]["local_steps"] == 3
    assert written["until"] == {"commits": 2, "accuracy": 0.99}
    assert (made["reached"], made["reached_smoothed"]) == ({"0.99": None}, {"0.99": None})


def test_a_flag_keeps_the_options_that_the_file_gives(result, tmp_path):
    (tmp_path / "mine.toml").write_text('[method]\nname = "dlsgd-homo"\nn = 3\nlocal_steps = 4\n')
    made = result("run", "mine.toml", "--method", "dlsgd-hetero", *QUICK, "--out", "out")
    assert made["method"] == "dlsgd-hetero"
    written = config_of(tmp_path / "out")["method"]
    assert (written["n"], written["local_steps"]) == (3, 4)


def test_a_run_for_people_says_what_it_came_to(offbeat):
    code, out, err = offbeat("run", *QUICK, "--until", "accuracy=0.99", "--set", "targets=[0.05]", "--out", "here")
    assert (code, err) == (0, "")
    for said in (
        "digits on straggling", "fedbuff", "first reached 0.05: after 0.00 virtual s, commit 0",
        "first reached 0.99: not reached", "ended: commits 4 >= 4", "run directory: here",
    ):  # fmt: skip
        assert said in out


def test_without_out_nothing_is_written(offbeat, tmp_path):
    assert offbeat("run", *QUICK)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_bad_numbers_end_with_3_and_leave_the_directory_readable(offbeat, tmp_path):
    code, out, err = offbeat("run", *QUICK, "--set", "method.client_lr=1e39", "--out", "left", "--json")
    assert (code, out) == (3, "")
    assert re.match(r"offbeat: client \d+, version 0: the loss at local step 1 is not finite", err)
    assert json.loads((tmp_path / "left" / "result.json").read_text())["ended"].startswith("stopped: client")
    assert [row["commit"] for row in read_metrics(tmp_path / "left")] == [0]


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
def test_a_result_that_is_not_finite_ends_with_exit_3(blown, offbeat, tmp_path):
    table = digits_runs.experiment(method=digits_runs.FEDBUFF | blown, evaluate={"every_commits": 5}).toml()
    (tmp_path / "c.toml").write_text(table)
    code, _, err = offbeat("run", "c.toml", "--out", "run")
    assert code == 3
    assert "rate" in err
    assert offbeat("resume", "run")[0] == 3  # it does not become good by being looked at again


def test_broken_files_of_a_run(offbeat, tmp_path):
    assert offbeat("run", *QUICK, "--out", "run")[0] == 0
    (tmp_path / "run/model.safetensors").unlink()
    assert offbeat("replay", "run")[0] == 4
    for checkpoint in (tmp_path / "run").glob("checkpoint-*"):
        checkpoint.write_bytes(b"xx")
    assert offbeat("resume", "run")[0] == 4


# ---- refusals -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--method", "fedbuf"), "unknown method 'fedbuf': did you mean 'fedbuff'?"),
        (("run", "--task", "digit"), "unknown task 'digit': did you mean 'digits'?"),
        (("run", "--fleet", "straglers"), "unknown fleet 'straglers': did you mean 'straggling'?"),
        (("run", "--set", "task.model=mpl"), "unknown model 'mpl': did you mean 'mlp'?"),
        (("run", "--set", "method.bufer_size=3"), "did you mean 'buffer_size'?"),
        (("run", "--set", "methd.n=3"), "unknown key 'methd': did you mean 'method'?"),
        (("run", "--set", "seed"), "--set seed: write it as key=value"),
        (("run", "--set", "seed="), "--set seed=: write it as key=value"),
        (("run", "--until", "commits"), "--until commits: write it as key=value"),
        (("run", "--until", "comits=3"), "unknown limit 'comits': did you mean 'commits'?"),
        (("run", "--until", "accuracy=90"), "write 0.9 for 90 %"),
        (("run", "--device", "tpu"), "device = 'tpu'; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        (("run", "nowhere.toml"), "cannot read the config nowhere.toml: No such file"),
        (("compare",), "nothing to compare; name methods"),
        (("compare", "fedbuf"), "unknown method 'fedbuf': did you mean 'fedbuff'?"),
        (("list", "method"), "unknown list 'method': did you mean 'methods'?"),
        (("paper", "dlsgd-tabel2"), "unknown recipe 'dlsgd-tabel2': did you mean 'dlsgd-table2'?"),
        (("paper", "dlsgd-table2", "--scale", "tiny"), "--scale tiny; it is one of smoke, small, full"),
        (
            ("paper", "dlsgd-fig2", "--scale", "smoke", "--n", "15"),
            "--n 15; Table 1 has rates for n = 5, 10, 20, 40, 80 here",
        ),
        (("paper", "dlsgd-fig2", "--scale", "smoke", "--only", "fedbuff"), "--only fedbuff fits nothing here"),
        (("paper", "dlsgd-table2", "--scale", "smoke", "--only", "mnist"), "--only mnist fits nothing here"),
        (("paper", "dlsgd-fig3", "--scale", "smoke", "--device", "tpu"), "device = 'tpu'"),
        (("resume", "nowhere"), "there is no run in nowhere"),
        (("resume", "nowhere", "--until", "x"), "--until x: write it as key=value"),
        (("replay", "nowhere"), "there is no run in nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_gets_a_sentence_and_exit_code_2(arguments, said, refused, tmp_path):
    sentences = refused(*arguments)
    assert len(sentences) == 1
    assert said in sentences[0]
    assert list(tmp_path.iterdir()) == []


def test_several_problems_are_all_named_and_nothing_is_written(refused, tmp_path):
    sentences = refused(
        "run", "--method", "fedbuf", "--task", "digit", "--fleet", "equl", "--device", "tpu", "--until", "commit=3",
        "--set", "evaluate.every_commit=1", "--set", "targets=[2]", "--out", "out",
    )  # fmt: skip
    for said in ("'fedbuff'", "'digits'", "'equal'", "'tpu'", "'commits'", "'every_commits'", "targets: 2"):
        assert any(said in sentence for sentence in sentences), said
    assert len(sentences) == 7
    assert not (tmp_path / "out").exists()


def test_a_broken_file_and_a_directory_that_cannot_be_made_are_named(refused, tmp_path):
    (tmp_path / "broken.toml").write_text("seed = = 1\n")
    assert "broken.toml is not valid TOML" in refused("run", "broken.toml")[0]
    assert "choose another --out" in refused("run", *QUICK, "--out", "broken.toml")[0]


@pytest.mark.parametrize("arguments", [("run", "--sed", "1"), ("compare", "fedbuff", "--seeds", "0"), ("rnu",)])
def test_flags_that_do_not_exist_or_fit_end_with_usage(arguments, offbeat):
    code, out, err = offbeat(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: " in err
    assert "Error: " in err


# ---- list and help ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("what", "some"),
    [
        ("methods", set(METHODS)),
        ("tasks", {"digits", "quadratic", "fashion-mnist"}),
        ("fleets", {"straggling", "custom", "dlsgd-cifar10"}),
        ("models", {"logistic", "mlp", "dlsgd-cnn"}),
        ("splits", {"iid", "dirichlet", "classes"}),
        ("papers", set(RECIPES)),
    ],
)
def test_lists_name_and_describe(what, some, result, offbeat):
    described = result("list", what)
    assert some <= described.keys()
    assert all(text and "\n" not in text for text in described.values())
    code, out, err = offbeat("list", what)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(described)
    assert all(text in out for text in described.values())


def test_fast_paths_are_listed(result, offbeat):
    rows = result("list", "fast-paths")
    named = {function for row in rows for function in row["functions"]}
    assert {"linear", "conv2d", "lstm", "gru", "scaled_dot_product_attention", "embedding", "layer_norm"} <= named
    assert all(row["when"] and row["means"] and row["tolerance"] <= 1e-10 for row in rows)
    code, out, err = offbeat("list", "fast-paths")
    assert (code, err) == (0, "")
    assert all(name in out for name in named)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "run",
            [
                "--method",
                "--task",
                "--fleet",
                "--seed",
                "--device",
                "--until",
                "--set",
                "--out",
                "--overwrite",
                "--json",
            ],
        ),
        ("resume", ["directory", "--until", "--json"]),
        ("replay", ["directory", "--tolerance", "--json"]),
        ("compare", ["--config", "--task", "--fleet", "--seeds", "--until", "--set", "--out", "--json"]),
        ("list", ["methods, tasks, fleets, models, splits, graphs, policies", "--json"]),
        (
            "paper",
            [
                "--only",
                "--n",
                "--seeds",
                "--device",
                "--scale",
                "--out",
                "--json",
                "--cells",
                "--resume",
                "--minutes",
                "--results",
                "--status",
                "--page",
                "--merge",
            ],
        ),
    ],
)
def test_help_of_every_command_names_its_options(command, options, offbeat):
    code, out, err = offbeat(command, "--help")
    assert (code, err) == (0, "")
    assert [option for option in options if option not in out] == []
    assert command in offbeat("--help")[1]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_an_example_and_json(command, offbeat):
    _, out, _ = offbeat(command, "--help")
    assert re.search(r"Example:\s+offbeat ", out)
    assert "--json" in out


# ---- compare ------------------------------------------------------------------------------------
def test_compare_writes_a_table_and_a_picture(offbeat, tmp_path):
    code, out, err = offbeat("compare", "fedbuff", "local-sgd", *QUICK, "--seeds", 2, "--out", "both")
    assert (code, err) == (0, "")
    both = tmp_path / "both"
    assert (both / "comparison.png").read_bytes().startswith(PNG)
    written = (both / "comparison.md").read_text()
    rows = [line for line in written.splitlines() if re.match(r"\| (fedbuff|local-sgd) \|", line)]
    assert len(rows) == 2
    for label in ("fedbuff", "local-sgd"):
        made = [json.loads((both / f"{label}-seed{seed}" / "result.json").read_text()) for seed in (0, 1)]
        assert [r["seed"] for r in made] == [0, 1]
        mean = sum(r["accuracy_final"] for r in made) / 2
        assert f"| {label} | {mean:.4f} ±" in written
        assert f"{mean:.4f}" in out
    assert "both/comparison.png" in out
    assert "both/comparison.md" in out


def test_compare_takes_labelled_methods_from_a_file(result, tmp_path):
    (tmp_path / "two.toml").write_text(
        'device = "cpu"\ntargets = [0.15]\n[task]\nname = "digits"\nmodel = "logistic"\nclients = 12\n'
        "[until]\ncommits = 6\n[evaluate]\nevery_commits = 1\n"
        '[methods.slow]\nname = "fedbuff"\nbuffer_size = 3\nclient_lr = 1e-6\n'
        '[methods.fast]\nname = "fedbuff"\nbuffer_size = 3\nclient_lr = 0.1\n'
        "[methods.asysg]\nn = 2\n"
    )
    made = result("compare", "--config", "two.toml", "--out", "out")
    assert made.keys() == {"picture", "table", "page", "runs"}
    assert list(made["runs"]) == ["slow", "fast", "asysg"]
    slow, fast, asysg = (made["runs"][label][0] for label in made["runs"])
    assert slow["accuracy_final"] < 0.15 < fast["accuracy_final"]
    assert (slow["method"], asysg["method"], asysg["updates_consumed"]) == ("fedbuff", "asysg", 12)
    table = (tmp_path / made["table"]).read_text()
    assert re.search(r"\| slow \|.*\| not reached \|\n", table)
    assert re.search(r"\| fast \|.*\| [\d.]+ \|\n", table)
    assert (tmp_path / made["picture"]).read_bytes().startswith(PNG)

    made = result("compare", "fast", "--config", "two.toml", "--until", "commits=2", "--out", "one")
    assert list(made["runs"]) == ["fast"]
    assert made["runs"]["fast"][0]["commits"] == 2


def test_compare_checks_all_before_the_first_starts(refused, tmp_path):
    assert any("local-sdg" in line for line in refused("compare", "fedbuff", "local-sdg", *QUICK, "--out", "out"))
    assert not (tmp_path / "out").exists()


FILE = '[task]\nname = "digits"\nmodel = "logistic"\nclients = 12\n[methods.fedbuff]\nbuffer_size = 3\n'


@pytest.fixture
def compared(offbeat, tmp_path):
    """`offbeat compare` by a file, with one thing changed by --set: the exit code and the directory of the run."""

    def call(change):
        (tmp_path / "c.toml").write_text(FILE)
        limit = ("--device", "cpu", "--until", "commits=2")
        code, _, _ = offbeat("compare", "--config", "c.toml", *limit, "--set", change, "--out", "out")
        return code, tmp_path / "out/fedbuff-seed0"

    return call


def test_compare_set_keeps_what_the_file_says(compared):
    task = config_of(compared("task.batch_size=5")[1])["task"]
    assert (task["batch_size"], task["clients"], task["model"]) == (5, 12, "logistic")


def test_compare_sets_options_by_label(compared):
    assert compared("method.client_lr=0.001")[0] == 2
    code, out = compared("methods.fedbuff.client_lr=0.001")
    assert code == 0
    assert config_of(out)["method"]["client_lr"] == 0.001
    assert config_of(out)["method"]["buffer_size"] == 3


def test_compare_names_the_problems_of_all_methods(offbeat):
    _, _, err = offbeat("compare", "fedbuf", "local-sdg", "--out", "out")
    assert "'fedbuf'" in err
    assert "'local-sdg'" in err


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[methods]\nfedbuff = 3\n"])
def test_compare_with_a_bad_file(text, offbeat, tmp_path):
    (tmp_path / "c.toml").write_bytes(text)
    assert offbeat("compare", "--config", "c.toml", "--out", "out")[0] == 2


# ---- resume and replay --------------------------------------------------------------------------
def test_resume_goes_on_and_replay_repeats(result, offbeat, tmp_path):
    straight = result("run", *SMALL, "--until", "commits=8", "--set", "evaluate.every_commits=2", "--out", "straight")
    result("run", *QUICK, "--set", "evaluate.every_commits=2", "--out", "short")
    made = result("resume", "short", "--until", "commits=8")
    assert {name: made[name] for name in made if name not in ("wall_seconds", "loss_final", "waves")} == {
        name: straight[name] for name in straight if name not in ("wall_seconds", "loss_final", "waves")
    }
    assert (tmp_path / "short/trace.parquet").read_bytes() == (tmp_path / "straight/trace.parquet").read_bytes()
    assert config_of(tmp_path / "short")["until"] == {"commits": 8}

    code, out, err = offbeat("replay", "straight")
    assert (code, err) == (0, "")
    assert out == "same commands over 8 commits; model has the same bits\n"
    again = result("replay", "straight")
    assert (again["same_commands"], again["same_bits"], again["commits"]) == (True, True, 8)


def test_replay_fails_when_the_model_is_another(offbeat, result, tmp_path):
    result("run", *QUICK, "--out", "out")
    result("run", *QUICK, "--set", "method.client_lr=0.01", "--out", "other")
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    code, out, err = offbeat("replay", "out")
    assert (code, out) == (4, "")
    assert "model.safetensors has another content than was written" in err
    swapped = read_manifest(tmp_path / "out")
    swapped.files["model.safetensors"] = mark_of(tmp_path / "out" / "model.safetensors")
    swapped.write(tmp_path / "out")  # whoever forges the manifest too is left with another model
    code, out, err = offbeat("replay", "out")
    assert code == 1
    assert "DIFFERS" in out
    assert "the model of the replay differs" in err
    code, out, _ = offbeat("replay", "out", "--json")
    assert (code, json.loads(out)["same_bits"], json.loads(out)["tolerance"]) == (1, False, 0.0)
    code, out, _ = offbeat("replay", "out", "--tolerance", "10")
    assert (code, "model is near: relative distance" in out) == (0, True)


def test_resume_and_replay_refuse_a_changed_config(result, refused, tmp_path):
    result("run", *QUICK, "--out", "out")
    written = (tmp_path / "out" / "config.toml").read_text()
    (tmp_path / "out" / "config.toml").write_text(written.replace("seed = 0", "seed = 1"))
    assert "was changed since the run began (seed)" in refused("resume", "out", "--until", "commits=6")[0]
    (tmp_path / "out" / "config.toml").write_text(written.replace("buffer_size = 10", "buffer_size = 9"))
    assert "was changed since the run began (method.buffer_size)" in refused("replay", "out")[0]


# ---- papers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "chosen", "cells", "files"),
    [
        ("dlsgd-fig2", ("--only", "fashion-mnist", "--n", "5", "--n", "80"),
         {"fashion-mnist iid dlsgd-homo n=5", "fashion-mnist iid dlsgd-homo n=80",
          "fashion-mnist non-iid dlsgd-hetero n=5", "fashion-mnist non-iid dlsgd-hetero n=80"},
         ["fig2.md", "fig2.json", "fig2.png", "fig2-loss.png"]),
        ("dlsgd-table2", ("--only", "fedbuff", "--only", "cifar10", "--n", "10", "--n", "40"),
         {"cifar10 non-iid fedbuff n=10", "cifar10 non-iid fedbuff n=40"}, ["table2.md", "table2.json"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_recipes_run_at_the_smoke_scale(recipe, chosen, cells, files, result, tmp_path):
    made = result("paper", recipe, "--size", "smoke", "--device", "cpu", "--out", "made", *chosen)
    assert {figure["cell"] for figure in made["figures"]} == cells
    assert all((figure["task"], figure["commits"]) == ("digits", 6) for figure in made["figures"])
    assert made["files"] == [f"made/{recipe}/{name}" for name in files]
    for path in made["files"]:
        head = (tmp_path / path).read_bytes()
        assert head.startswith(PNG if path.endswith("png") else b"# DLSGD" if path.endswith("md") else b"[")
    assert "figures mean nothing" in made["notes"][0]


def test_a_recipe_takes_fleet_and_target_from_the_paper_and_averages_seeds(result, tmp_path):
    made = result(
        "paper", "dlsgd-table2", "--scale", "smoke", "--device", "cpu", "--only", "local-sgd", "--only", "iid",
        "--n", "20", "--seeds", "2", "--out", "made",
    )  # fmt: skip
    found = [(figure["fleet"], figure["seed"], figure["target"]) for figure in made["figures"]]
    assert found == [
        (f"dlsgd-{d}", seed, t) for d, t in (("fashion-mnist", "0.9"), ("cifar10", "0.7")) for seed in (0, 1)
    ]
    table = (tmp_path / "made/dlsgd-table2/table2.md").read_text()
    assert re.search(r"\| fashion-mnist \| iid \| local-sgd \| .* \(179.1\) \|", table)
    assert re.search(r"\| cifar10 \| iid \| local-sgd \| .* \(411.6\) \|", table)


def test_missing_cells_are_filled_in_and_told_of(offbeat, result, tmp_path):
    """`--cells`, `--resume`, `--status` and `--page` on the smoke size of a cheap recipe."""
    (tmp_path / "results").mkdir()
    flags = ("paper", "hlsgd-table2", "--size", "smoke", "--device", "cpu", "--only", "ring torus")
    before = result(*flags, "--cells")
    assert [(line["cell"], line["seed"], line["how"]) for line in before] == [
        ("ring", 0, "by rate"),
        ("torus", 0, "by rate"),
    ]
    code, out, err = offbeat(*flags, "--resume", "--minutes", "5")
    assert (code, err.count("s left")) == (0, 2)
    assert "2 cells were run; their records are in results/papers" in out
    (one, two) = json.loads((tmp_path / "results/papers/hlsgd-table2.json").read_text())
    assert (one["cell"], one["seed"], one["size"], two["cell"]) == ("ring", 0, "smoke", "torus")
    assert (
        one["command"]
        == "offbeat paper hlsgd-table2 --only 'ring' --seed 0 --size smoke --device cpu --precision float32"
    )
    assert all(one[key] for key in ("commit", "device", "torch", "wall_seconds"))
    assert result(*flags, "--cells") == []
    assert {line["state"] for line in result("paper", "hlsgd-table2", "--status")} == {
        "missing"
    }  # nothing at full size
    code, out, err = offbeat("paper", "all", "--page")
    assert (code, err) == (0, "")
    text = (tmp_path / "results/README.md").read_text()
    assert all(f"### {recipe.title}" in text for recipe in RECIPE_DATA.values())
    assert (tmp_path / "docs/papers.md").read_text().count("| [") == len(RECIPE_DATA)


def test_a_recipe_for_people_shows_its_table_and_files(offbeat, tmp_path):
    code, out, err = offbeat("paper", "fedbuff-fig1", "--scale", "smoke", "--out", "made")
    assert (code, err) == (0, "")
    assert "fedbuff" in out
    assert "wrote made/fedbuff-fig1/fig1.png" in out
    assert (tmp_path / "made/fedbuff-fig1/fig1.png").read_bytes().startswith(PNG)
    buffered, rounds = json.loads((tmp_path / "made/fedbuff-fig1/fig1.json").read_text())
    assert buffered["values"]["commits"] > rounds["values"]["commits"] > 0  # what the figure shows
    assert buffered["values"]["updates"] // 2 == buffered["values"]["commits"]


def test_paper_refuses_a_file_as_out_and_flags_that_fit_nothing(refused, tmp_path):
    (tmp_path / "f").write_text("")
    refused("paper", "fedbuff-fig1", "--out", "f")
    refused("paper", "fedbuff-fig1", "--only", "zzz", "--out", "out")
    refused("paper", "fedbuff-fig1", "--n", "7", "--out", "out")


# ---- processes ----------------------------------------------------------------------------------
ENDLESS = (*SMALL, "--until", "samples=1000000000", "--set", "checkpoint_seconds=1e-6",
           "--set", "evaluate.every_commits=1000")  # fmt: skip
SAY_SO = "os.write({pipe}, b'.')"  # the run goes on until the signal comes


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Real processes, side by side: name -> (stdout, stderr, exit code), and the directory they ran in."""
    place = tmp_path_factory.mktemp("processes")
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": place}
    good = [sys.executable, "-m", "offbeat", "run", *QUICK, "--json"]
    started, heard = {"good": subprocess.Popen(good, **piped)}, {}
    for name in ("SIGINT", "SIGTERM"):
        heard[name], said = os.pipe()
        command = command_that_stops(3, SAY_SO.format(pipe=said), "run", *ENDLESS, "--out", name)
        started[name] = subprocess.Popen(command, **piped, pass_fds=(said,))
        os.close(said)
    try:
        for name, pipe in heard.items():
            with os.fdopen(pipe, "rb") as commits:
                assert select.select([commits], [], [], PATIENCE)[0], f"{name}: no commit in {PATIENCE} s"
                assert commits.read(1) == b".", started[name].communicate()  # it ended before the commit
            started[name].send_signal(signal.Signals[name])
        return {
            name: (*process.communicate(timeout=PATIENCE), process.returncode) for name, process in started.items()
        }, place
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_in_a_pipe_there_is_the_result_and_nothing_else(processes):
    out, err, code = processes[0]["good"]
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert json.loads(out)["commits"] == 4


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_process_with_130_and_the_run_goes_on(name, processes, result):
    out, err, code = processes[0][name]
    assert (code, out) == (130, "")
    said = r"offbeat: interrupted; (\S+) has all up to commit \d+, and `offbeat resume \1` goes on from there\n"
    assert re.fullmatch(said, err)
    left = processes[1] / name
    halted = json.loads((left / "result.json").read_text())
    assert halted["ended"] == "interrupted"
    assert halted["commits"] >= 1

    limit = halted["samples"] + 2000
    resumed = result("resume", left, "--until", f"samples={limit}")
    assert resumed["commits"] > halted["commits"]
    written = Experiment.of(config_of(left) | {"checkpoint_seconds": 60.0})
    assert written.until == {"samples": limit}
    straight = run_experiment(written)
    assert {k: v for k, v in resumed.items() if k != "wall_seconds"} == {
        k: v for k, v in straight.result.items() if k != "wall_seconds"
    }
    assert read_metrics(left) == straight.metrics
    model = load_file(left / "model.safetensors")
    assert all(torch.equal(model[name], value) for name, value in straight.model.items())


# ---- clusters -----------------------------------------------------------------------------------
RING_OF_8 = 1 / 3 + 2 / 3 * math.cos(math.pi / 4)  # the second eigenvalue with thirds


def test_clusters_shows_the_paper_s_rings(offbeat, tmp_path):
    code, out, err = offbeat("clusters")
    assert (code, err) == (0, "")
    assert f"hlsgd: 4 clusters, rho_max {RING_OF_8:.4f}" in out
    assert [name for name in ("devices", "links", "most of one", "1 - rho", "tau from", "s per step")
            if name not in out] == []  # fmt: skip
    rows = [re.findall(r"[\d.]+", line) for line in out.splitlines() if re.match(r"\d +8 ", line)]
    assert rows == [[str(k), "8", "8", "2", "0.8047", "0.1953", "6", "36", "36"] for k in range(4)]
    assert list(tmp_path.iterdir()) == []


def test_clusters_as_json(result):
    made = result("clusters", "--fleet", "equal", "--clients", "9", "--set",
                  'fleet.clusters={sizes=[4, 5], graphs=["star", "path"], pace=[1.0, 3.0]}')  # fmt: skip
    star, path = made["clusters"]
    assert (star["cluster"], star["devices"], star["links"], star["most_links"]) == (0, 4, 3, 3)
    assert (path["cluster"], path["devices"], path["links"], path["most_links"]) == (1, 5, 4, 2)
    assert star["rho"] == pytest.approx(3 / 4)  # 1 - 1/n
    assert path["rho"] == pytest.approx(1 / 3 + 2 / 3 * math.cos(math.pi / 5))
    assert made["rho_max"] == pytest.approx(path["rho"])
    assert all(one["gap"] == pytest.approx(1 - one["rho"]) for one in (star, path))
    assert path["step_seconds"] == pytest.approx([3 * seconds for seconds in star["step_seconds"]])
    assert star["least_tau"] >= 1


def test_clusters_of_a_file_are_as_many_as_its_task_says(result, tmp_path):
    (tmp_path / "config.toml").write_text(
        'seed = 3\n[task]\nname = "digits"\nclients = 10\n[fleet]\nname = "uniform"\n'
        'clusters = {count = 2, graph = {name = "erdos-renyi", p = 0.6}}\n'
    )
    made = result("clusters", "config.toml")
    assert [one["devices"] for one in made["clusters"]] == [5, 5]
    assert made != result("clusters", "config.toml", "--seed", "4")
    assert made == result("clusters", "config.toml", "--clients", "30")  # the task says how many


def test_clusters_draws_a_picture(offbeat, tmp_path):
    spec = 'fleet.clusters={sizes=[1, 11, 20], graph="one-peer-exponential"}'
    code, out, err = offbeat("clusters", "--set", spec, "--out", "made/clusters.png")
    assert (code, err) == (0, "")
    assert "wrote made/clusters.png" in out
    assert (tmp_path / "made/clusters.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["clusters.png"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fleet", "equal"), ["fleet 'equal' has no clusters; give it some: --set fleet.clusters=4"]),
        (("--fleet", "straggling"), ["fleet 'straggling' has no clusters"]),
        (("--fleet", "hlsg"), ["unknown fleet 'hlsg': did you mean 'hlsgd'?"]),
        (("--set", "fleet.clusters=40"), ["clusters: count = 40; it must be between 1 and the 32 clients"]),
        (("--set", 'fleet.clusters={count=40, graph="rng"}'), ["count = 40", "unknown graph 'rng': did you mean 'ri"]),
        (("--clients", "6", "--set", 'fleet.clusters={count=2, graph={name="edges", edges=[[0, 1]]}}'),
         ["cluster 0: no link in any graph for client 2", "cluster 1: no link in any graph for client 5"]),
        (("--clients", "4", "--set", "fleet.clusters={members=[[0, 1, 2, 3], []]}"), ["cluster 1 has no devices;"]),
        (("nowhere.toml",), ["cannot read the config nowhere.toml: No such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_clusters_that_cannot_be_shown_get_sentences_and_exit_code_2(arguments, said, refused, tmp_path):
    sentences = refused("clusters", *arguments, "--out", "picture.png")
    assert len(sentences) == len(said)
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True)), sentences
    assert list(tmp_path.iterdir()) == []


def test_clusters_help_names_its_options(offbeat):
    code, out, err = offbeat("clusters", "--help")
    assert (code, err) == (0, "")
    assert [name for name in ("--fleet", "--clients", "--seed", "--set", "--out", "--json") if name not in out] == []
    assert "clusters" in offbeat("--help")[1]


def test_clusters_asks_for_the_name_of_a_picture(refused):
    assert "ending in .png" in refused("clusters", "--out", "clusters")[0]


def test_clusters_refuses_a_bad_seed(refused):
    assert "seed = -1" in refused("clusters", "--seed", "-1")[0]


def test_the_graph_without_links_can_be_named(result):
    made = result("clusters", "--set", 'fleet.clusters={count=4, graph="unlinked"}')
    assert [one["links"] for one in made["clusters"]] == [0] * 4
