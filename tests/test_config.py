"""Configs: options by signature, TOML there and back, and that every problem is named before any work starts."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import digits_runs
from offbeat import METHODS, Buffer, ConfigError, Experiment, Rounds, Sampled, Task, build, run
from offbeat.config import toml
from offbeat.config.options import defaults, fits, option_problems, spoken
from offbeat.experiments.assemble import build_method, read_experiment
from offbeat.fleets.make import FLEETS
from offbeat.fleets.make import build as build_fleet
from stopped_runs import same_bits

DIGITS = {"name": "digits", "model": "logistic", "clients": 6, "split": "iid"}
FEDBUFF = {"name": "fedbuff", "buffer_size": 2, "local_steps": 2}


def experiment(**given_here):
    usual = {"method": FEDBUFF, "task": DIGITS, "fleet": "equal", "device": "cpu", "until": {"commits": 3}}
    return Experiment(**usual | given_here)


def problems(chosen):
    with pytest.raises(ConfigError) as caught:
        build(chosen)
    return caught.value.problems


def read_back(text, tmp_path):
    (tmp_path / "config.toml").write_text(text)
    return toml.read(tmp_path / "config.toml")


# ---- options ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -3, 10**30], [1.0, True, "1", None]),
        (float, [0, 1.5, math.inf], [True, "1.5", None, [1.0]]),
        (bool, [True, False], [0, 1, "true", None]),
        (str, ["", "x"], [1, None, ["x"]]),
        (int | None, [3, None], [1.5, False, "none"]),
        (float | None, [3, 1.5, None], ["inf", True]),
        (Literal["wave", "reference"], ["wave", "reference"], ["waves", None, 1]),
        (Mapping[str, float], [{}, {"clip": 1.0}], [[], "clip", 1, None]),
        (str | Mapping[str, Any], ["sgd", {"name": "sgd"}], [1, None, ["sgd"]]),
        (list[int], [[], [1], (1, 2)], [1, "12", {}]),
        (Any, [1, None, "x", object()], []),
    ],
)
def test_values_fit_their_annotation(hint, good, bad):
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or none"),
        (bool, "true or false"),
        (str | Mapping[str, Any], "a text or a table"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (list[int], "a list"),
        (tuple[int, ...], "a list"),
        (Buffer, "Buffer"),
    ],
)
def test_annotations_in_words(hint, words):
    assert spoken(hint) == words


def test_option_problems_name_what_is_unknown_wrong_or_missing():
    def make(y: list[int], size: int, share: float = 0.5, kind: str | None = None) -> None: ...

    found = option_problems("thing", make, {"siz": 1, "share": "half", "kind": None}, fixed=("y",))
    assert found == [
        "unknown option of thing 'siz': did you mean 'size'? Known: kind, share, size",
        "thing: share = 'half'; it must be a number",
        "thing: size is missing; it has no default",
    ]
    assert option_problems("thing", make, {"size": 3}, fixed=("y",)) == []
    assert option_problems("thing", lambda: None, {"x": 1}) == ["thing has no options, but 'x' was given; leave it out"]
    assert defaults(make, ("share",)) == {"kind": None}


# ---- TOML ---------------------------------------------------------------------------------------
TEXT = st.text(st.characters(exclude_categories=("Cs",))).filter(lambda text: text != "none")  # which means None
KEYS = st.text(st.characters(exclude_categories=("Cs",)))
PLAIN = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXT)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=12)


@pytest.mark.parametrize("library", [toml.tomli_w, None])
@settings(deadline=None)
@given(table=st.dictionaries(KEYS, VALUES))
@example(table={"": "\x7f\x00\r\n\u2028\U0001f600", "a b": [math.inf, -math.inf, 1e22, 5e-324], '"\\': {"": {}}})
def test_toml_comes_back_as_it_was_written(tmp_path_factory, library, table):
    path = tmp_path_factory.getbasetemp() / "config.toml"
    with patch.object(toml, "tomli_w", library):
        path.write_text(toml.write(table), encoding="utf-8")
        back = toml.read(path)
        assert toml.write(back) == toml.write(table)
    assert back == table
    assert repr(ordered(back)) == repr(ordered(table))  # 1 stays 1, 1.0 stays 1.0, True stays True


@pytest.mark.parametrize("library", [toml.tomli_w, None])
@settings(deadline=None)
@given(value=VALUES)
def test_a_value_is_one_line_of_toml(library, value):
    with patch.object(toml, "tomli_w", library):
        line = toml.value(value)
    assert "\n" not in line
    assert toml.parse(f"value = {line}") == {"value": value}


def ordered(value):
    """The same with keys in order: TOML writes the plain values of a table before its inner tables."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(each) for each in value] if isinstance(value, list) else value


def test_toml_says_none_and_takes_tuples_and_nan(tmp_path):
    back = read_back(
        toml.write({"a": None, "b": (1, 2.0), "c": {"d": None, "e": {"f": None, "g": math.nan}}}), tmp_path
    )
    assert math.isnan(back["c"]["e"].pop("g"))
    assert back == {"a": None, "b": [1, 2.0], "c": {"d": None, "e": {"f": None}}}


def test_toml_refuses_what_it_cannot_say():
    with pytest.raises(ConfigError, match=r"object.*cannot be written into a config file"):
        toml.write({"method": {"rate": object()}})
    with pytest.raises(ConfigError, match=r"3 is the key of a table; keys in a config file are texts"):
        toml.write({"method": {"steps": [{3: 4}]}})


def test_a_config_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config .*nowhere\.toml: No such file"):
        toml.read(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("seed = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: .*line 1"):
        toml.read(tmp_path / "bad.toml")


@pytest.mark.parametrize("kind", ["method", "fleet"])
def test_every_default_is_spelt_out_in_the_written_config(kind, tmp_path):
    for name in {"method": METHODS, "fleet": FLEETS}[kind]:
        chosen = experiment(**{kind: name})
        back = read_back(chosen.toml(), tmp_path)
        assert back[kind] == chosen.table()[kind]
        assert back[kind]["name"] == name
        assert Experiment.of(back).toml() == chosen.toml()


def test_the_written_config_says_what_was_chosen_and_what_was_not(tmp_path):
    back = read_back(experiment(method={"name": "fedbuff", "client_lr": 0.2}, task="digits").toml(), tmp_path)
    assert back["method"]["client_lr"] == 0.2
    assert back["method"]["buffer_size"] == 10
    assert back["task"]["model"] == "logistic"
    assert back["task"]["clients"] == 100
    assert back["until"] == {"commits": 3}


# ---- experiments --------------------------------------------------------------------------------
def test_unknown_keys_of_an_experiment_are_all_named():
    with pytest.raises(ConfigError) as caught:
        Experiment.of({"methd": "fedbuff", "sed": 1, "device": "cpu"})
    assert len(caught.value.problems) == 2
    assert "unknown key 'methd': did you mean 'method'?" in caught.value.problems[0]
    assert "unknown key 'sed': did you mean 'seed'?" in caught.value.problems[1]


def test_unknown_keys_are_named_with_all_other_problems_of_a_file():
    table = {"methd": "fedbuff", "task": {"name": "digits", "clients": -3}, "seed": -1, "device": "cpu", "targets": 3}
    with pytest.raises(ConfigError) as caught:
        read_experiment(table | {"method": {"name": "fedbuff", "bufer_size": 2}})
    unknown_key, *others = caught.value.problems
    assert "unknown key 'methd': did you mean 'method'?" in unknown_key
    for said in ("seed = -1", "clients = -3", "did you mean 'buffer_size'?", "targets = 3; it must be a list"):
        assert sum(said in problem for problem in others) == 1, said
    with pytest.raises(ConfigError) as caught:
        read_experiment({"sed": 1, "device": "cpu"})
    assert len(caught.value.problems) == 1
    assert read_experiment({"seed": 4}) == Experiment(seed=4)


def test_an_experiment_of_a_table_is_the_experiment_in_python():
    table = {"method": FEDBUFF, "seed": 4, "targets": [0.5, 0.9]}
    assert Experiment.of(table) == Experiment(method=FEDBUFF, seed=4, targets=(0.5, 0.9))
    assert Experiment.of({}) == Experiment()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": FEDBUFF | {"buffer_size": 7}}, "size = 7 is larger than the 6 clients at work at once"),
        ({"method": FEDBUFF | {"buffer_size": 3, "concurrency": 2}}, "size = 3 is larger than the 2 clients at work"),
        ({"method": FEDBUFF | {"concurrency": 9}}, "concurrency = 9; it must be between 1 and the 6 clients"),
        ({"method": FEDBUFF | {"local_steps": 0}}, "local steps = 0; a job needs at least 1"),
        ({"method": FEDBUFF | {"client_lr": -1.0}}, "client_lr = -1.0; a rate must be a positive number"),
        ({"method": FEDBUFF | {"client_options": {"clp": 1}}}, "unknown client option 'clp': did you mean 'clip'?"),
        ({"method": FEDBUFF | {"staleness": "polinomial"}}, "did you mean 'polynomial'?"),
        ({"method": {"name": "local-sgd", "n": 7}}, "7 distinct clients asked for in a round"),
        ({"method": {"name": "local-sgd", "n": 2, "weights": "siz"}}, "weights = 'siz'; it must be one of"),
        ({"method": {"name": "fedasync", "alpha": 1.5}}, "alpha = 1.5; the mixing weight must lie in (0, 1]"),
        ({"method": {"buffer_size": 2}}, 'method has no name; write method = "..."'),
        ({"method": "fedbuf"}, "unknown method 'fedbuf': did you mean 'fedbuff'?"),
        ({"method": {"name": "fedbuff", "when": {"polcy": "buffer"}}}, "names no policy; write when = {policy ="),
        ({"engine": "tile"}, "engine = 'tile'; it must be one of 'local', 'tiles', 'ray'"),
        ({"workers": -1}, "workers = -1; it must be a whole number or none, positive and finite"),
        ({"task": DIGITS | {"clients": 1438}}, "1438 clients cannot share 1437 samples: some shards would be empty"),
        ({"task": DIGITS | {"clients": 0}}, "clients = 0; it must be at least 1"),
        ({"task": DIGITS | {"split": {"name": "classes", "per_client": 11}}}, "per_client is 11, but the data has 10"),
        ({"task": DIGITS | {"split": "natural"}}, "split 'natural' needs data with an owner for each sample"),
        ({"task": DIGITS | {"split": "dirchlet"}}, "unknown split 'dirchlet': did you mean 'dirichlet'?"),
        ({"task": DIGITS | {"model": "logistc"}}, "unknown model 'logistc': did you mean 'logistic'?"),
        ({"task": DIGITS | {"batch_size": 0}}, "batch_size = 0; give at least 1"),
        ({"task": "digit"}, "unknown task 'digit': did you mean 'digits'?"),
        ({"fleet": {"name": "custom", "step_seconds": -0.1}}, "step_seconds = -0.1; it must be a finite number >= 0"),
        ({"fleet": {"name": "custom", "latency": -1}}, "latency = -1.0; it must be a finite number >= 0"),
        ({"fleet": "strugling"}, "unknown fleet 'strugling': did you mean 'straggling'?"),
        ({"targets": (0.5, 1.01)}, "targets: 1.01 is not an accuracy between 0 and 1"),
        ({"targets": (0,)}, "targets: 0 is not an accuracy between 0 and 1"),
        ({"until": {"accuracy": 90}}, "write 0.9 for 90 %"),
        ({"evaluate": {}}, "evaluate is empty; give every_commits or every_seconds"),
        ({"evaluate": {"every_commits": 0}}, "evaluate.every_commits = 0; it must be positive"),
        ({"evaluate": {"every_commits": 1.5}}, "every_commits = 1.5; it must be a whole number or none"),
        ({"evaluate": {"every_comits": 1}}, "did you mean 'every_commits'?"),
        ({"device": "tpu"}, "device = 'tpu'; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"precision": "float16"}, "precision = 'float16'; it must be one of 'float32', 'tf32', 'bf16', 'float64'"),
        ({"mode": "twins"}, "mode = 'twins'; it must be one of 'wave', 'reference'"),
        ({"memory_gib": "all"}, "memory_gib = 'all'; it must be a number or none"),
        ({"seed": -1}, "seed = -1; it must be a whole number, 0 or more"),
    ],
    ids=str,
)
def test_each_mistake_gets_its_sentence(changed, said):
    found = problems(experiment(**changed))
    assert len(found) == 1
    assert said in found[0]


def test_all_mistakes_are_named_at_once():
    wrong = Experiment(
        method={"name": "fedbuff", "bufer_size": 1, "local_steps": "ten"}, task={"name": "digits", "clents": 3},
        fleet={"name": "custom", "step_seconds": -1, "latency": -2}, seed=1.5, device="tpu", precision="half",
        mode="fast", until={"commit": 3, "accuracy": 7}, evaluate={"every": 1}, targets=(2.0,),
    )  # fmt: skip
    found = problems(wrong)
    for said in (
        "unknown option of fedbuff 'bufer_size'", "local_steps = 'ten'", "unknown option of task 'digits' 'clents'",
        "step_seconds = -1", "latency = -2", "seed = 1.5", "device = 'tpu'", "precision = 'half'", "mode = 'fast'",
        "unknown limit 'commit'", "until.accuracy = 7", "unknown option of evaluate 'every'", "targets: 2.0",
    ):  # fmt: skip
        assert any(said in problem for problem in found), said


# ---- objects of your own ------------------------------------------------------------------------
def own(**changed):
    x = torch.linspace(-1.0, 1.0, 80).reshape(20, 4)
    y = torch.arange(20) % 3
    usual = {"model": nn.Linear(4, 3), "loss": functional.cross_entropy, "data": (x, y), "batch_size": 2}
    return Task(**usual | {"shards": [range(5 * i, 5 * i + 5) for i in range(4)]} | changed)


def holed(row):
    x, y = own().data
    x = x.clone()
    x[row, 1] = math.nan
    return x, y


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))}, "BatchNorm1d ('1') with running statistics"),
        ({"model": nn.Flatten()}, "the model has no parameters to train"),
        ({"data": (own().data[0], own().data[1] + 1)}, "labels run from 1 to 3; the model has 3 outputs"),
        ({"data": (own().data[0], own().data[1] - 1)}, "labels run from -1 to 1"),
        ({"data": (own().data[0], own().data[1][:19])}, "the training data has 20 inputs and 19 targets"),
        ({"data": holed(7)}, "the training inputs hold NaN or infinity, first in row 7"),
        ({"test": holed(3)}, "the test inputs hold NaN or infinity, first in row 3"),
        ({"test": (own().data[0], own().data[1] + 5)}, "the test labels run from 5 to 7"),
        ({"shards": [[0], [], [1], [2]]}, "client 1 has an empty shard"),
        ({"shards": [[0], [1], [20], [2]]}, "client 2 has sample 20"),
        ({"batch_size": 0}, "batch_size = 0; give at least 1"),
        (
            {"sampling": "shufle"},
            "sampling = 'shufle'; it is one of 'replacement', 'shuffle', 'in-order', 'in-order-continued'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_task_of_your_own_is_checked_before_it_runs(changed, said):
    found = problems(experiment(task=own(**changed)))
    assert len(found) == 1
    assert said in found[0]


def test_a_sound_task_of_your_own_runs():
    assert run(experiment(task=own(), fleet=build_fleet("uniform", 4))).commits == 3
    layered = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    assert run(experiment(task=own(model=layered, test=own().data))).commits == 3


def test_fleet_and_task_must_have_the_same_clients():
    found = problems(experiment(task=own(), fleet=build_fleet("equal", 5)))
    assert found == ("the fleet has 5 clients, the task 4; they must be the same",)


def test_a_fleet_of_your_own_is_checked_before_it_runs():
    fleet = replace(build_fleet("equal", 4), step_seconds=np.array([1.0, -2.0, math.nan, 1.0]), drop_out=1.0)
    found = problems(experiment(task=own(), fleet=fleet))
    assert len(found) == 2
    assert "step_seconds: client 1 has -2.0, client 2 has nan" in found[0]
    assert "drop_out = 1.0; it is a probability" in found[1]


# ---- compositions -------------------------------------------------------------------------------
POLICIES = {
    "buffer": {"policy": "buffer", "size": 2, "steps": 2},
    "buffer-fresh": {"policy": "buffer", "size": 2, "steps": 2, "restart": "fresh"},
    "buffer-fresh with overlap": {"policy": "buffer", "size": 2, "steps": 2, "restart": "fresh", "overlap": True},
    "rounds": {"policy": "rounds", "size": 2, "steps": 2},
    "sampled": {"policy": "sampled", "size": 2, "steps": 2},
}
compositions = pytest.mark.parametrize("kind", POLICIES)
each_method = pytest.mark.parametrize("name", METHODS)


def test_a_composition_no_paper_covers_is_refused():
    sampled = {"name": "fedbuff", "when": {"policy": "sampled", "size": 2, "steps": 2}}
    found = problems(experiment(method=sampled))
    assert len(found) == 1
    assert "fedbuff is defined for the policy 'buffer', not for 'sampled'" in found[0]
    assert "experimental = true" in found[0]
    built = build(experiment(method=sampled | {"experimental": True}))
    assert built.method.when == Sampled(2, 2)
    assert built.method.name == "fedbuff"


@each_method
@compositions
def test_a_method_keeps_to_its_own_kind_of_policy(name, kind):
    given_policy = {"name": name, "when": POLICIES[kind]}
    if name == "fedlin" and kind == "rounds":  # its rounds have two halves
        given_policy["when"] = {**POLICIES[kind], "probes": 1}
    if METHODS[name]().when.kind == kind.split(" with")[0]:
        assert build_method(given_policy).when.size == 2
        return
    with pytest.raises(ConfigError, match=f"not for '{kind.split(' with')[0]}'"):
        build_method(given_policy)


@each_method
@compositions
def test_every_composition_runs_when_told_experimental(name, kind):
    method = {"name": name, "when": POLICIES[kind], "experimental": True}
    if name == "fedlin":
        with pytest.raises(ConfigError, match="`when` has no probes; set the number of gradients"):
            build_method(method)
        return
    outcome = run(experiment(method=method, fleet="uniform"))
    assert outcome.commits == 3
    assert outcome.updates_consumed == 6
    assert outcome.client_steps >= 2 * outcome.jobs_finished > 0
    assert all(bool(value.isfinite().all()) for value in outcome.model.values())


def test_a_policy_given_as_an_object_is_the_one_from_a_table():
    for made, table in (
        (Buffer(2, 3, restart="fresh"), {"policy": "buffer", "size": 2, "steps": 3, "restart": "fresh"}),
        (Rounds(3, 2, replacement=True), {"policy": "rounds", "steps": 3, "size": 2, "replacement": True}),
        (Sampled(2, 3, overlap=False), {"policy": "sampled", "size": 2, "steps": 3, "overlap": False}),
    ):
        spelt = {"name": "local-sgd", "experimental": True}
        assert build_method(spelt | {"when": table}).when == build_method(spelt | {"when": made}).when == made


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ({"policy": "smpled"}, "unknown policy 'smpled': did you mean 'sampled'?"),
        ({"size": 2}, "names no policy"),
        ({"policy": "rounds", "siz": 2}, "unknown option of policy 'rounds' 'siz': did you mean 'size'?"),
        ({"policy": "rounds", "size": "two"}, "policy 'rounds': size = 'two'; it must be a whole number or none"),
        ({"policy": "sampled", "size": 0}, "sampled: size = 0; a round needs at least 1 draw"),
        ({"policy": "buffer", "size": 9}, "size = 9 is larger than the 6 clients"),
        ({"policy": "rounds", "deadline": -1.0}, "deadline = -1.0; it must be a positive number of seconds"),
    ],
    ids=str,
)
def test_a_bad_policy_gets_its_sentence(when, said):
    found = problems(experiment(method={"name": "local-sgd", "when": when, "experimental": True}))
    assert len(found) == 1
    assert said in found[0]


# ---- what users write ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changed",
    [
        {"method": {"name": "local-sgd", "n": None}},
        {"task": digits_runs.TASK | {"batch_size": None}},
        {"fleet": {"name": "straggling", "mbit": None}},
    ],
    ids=str,
)
def test_a_none_that_is_no_default_survives_the_config(changed, tmp_path):
    made = run(digits_runs.experiment(**changed), tmp_path)
    again = run(Experiment.of(toml.read(tmp_path / "config.toml")))
    assert same_bits(again.model, made.model)
    assert again.virtual_seconds == made.virtual_seconds


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    run(digits_runs.experiment(method=digits_runs.FEDBUFF | {"client_lr": np.float64(0.1)}), tmp_path)
    assert toml.read(tmp_path / "config.toml")["method"]["client_lr"] == 0.1


@pytest.mark.parametrize("table", [{"a": "\U0001f600"}, {"\u00e9": 1}, {"a": "\x7f\x01"}], ids=str)
def test_toml_takes_any_text(table, tmp_path):
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
        {"memory_gib": math.nan},
        {"memory_gib": -1},
        {"until": {"commits": math.inf}},
        {"evaluate": {"every_seconds": math.nan}},
        {"device": "meta"},
        {"task": digits_runs.TASK | {"clients": "x"}},
        {"task": "quadratic", "seed": -1},
        {"task": {"name": "quadratic", "dimension": 0}},
        {"task": "quadratic", "until": {"accuracy": 0.9}},
        {"method": digits_runs.FEDBUFF | {"buffer_size": 0}},
        {"method": digits_runs.FEDBUFF | {"client_lr": "abc"}},
        {"method": digits_runs.FEDBUFF | {"client_lr": True}},
        {"method": {"name": "fedbuff", "when": "sampled"}},
        {"method": digits_runs.FEDBUFF | {"client_lr": {"schedule": "step", "value": "x", "at": [1]}}},
        {"method": digits_runs.FEDBUFF | {"client_options": {"clip": "x"}}},
        {"method": digits_runs.FEDBUFF | {"client_options": {"clip": math.nan}}},
        {"method": digits_runs.FEDBUFF | {"staleness": {"law": "polynomial", "a": "x"}}},
        {"method": digits_runs.FEDBUFF | {"server_optimiser": {"name": "sgd", "momentum": "x"}}},
        {"method": digits_runs.FEDBUFF | {"server_optimiser": {"name": "sgd", "momentum": 2}}},
    ],
    ids=str,
)
def test_config_mistakes_get_sentences(changed):
    usual = {"method": digits_runs.FEDBUFF, "task": digits_runs.TASK, "device": "cpu", "until": {"commits": 2}}
    with pytest.raises(ConfigError):
        build(Experiment.of(usual | changed))


def test_a_negative_loss_may_be_a_limit():
    assert build(digits_runs.experiment(task="quadratic", until={"loss": -0.1})).task.name == "quadratic"


def test_a_bad_seed_is_named_once():
    with pytest.raises(ConfigError) as caught:
        build(digits_runs.experiment(seed="x"))
    assert len(caught.value.problems) == 1


def test_a_beta_of_zero_is_refused_not_replaced():
    with pytest.raises(Exception, match="a rate must be a positive number"):
        build_method({"name": "fedbuff", "beta": 0.0})


def test_options_that_a_given_policy_overrides_are_refused():
    with pytest.raises(Exception, match="local_steps has no effect with when"):
        build_method({"name": "local-sgd", "local_steps": 20, "when": {"policy": "rounds", "size": 5}})
