"""What comes in is bounded before work, and a task of one's own is tried before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from digits_runs import FEDBUFF, TASK, experiment
from offbeat import Buffer, ConfigError, Experiment, Fleet, Method, OffbeatError, Task, build, run
from offbeat.cli import merge
from offbeat.config import room, toml
from offbeat.fleets.make import build as build_fleet
from offbeat.methods import METHODS
from offbeat.tasks.quadratic import quadratic


def refused(given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(given)
    return str(caught.value)


# ---- bounds -------------------------------------------------------------------------------------
HUGE = (2**31, 2**63, 10**30, 10**5000)
QUADRATIC = {"name": "quadratic", "clients": 10, "dimension": 3}


@pytest.mark.parametrize("size", HUGE, ids=["2^31", "2^63", "1e30", "1e5000"])
@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("batch_size", lambda n: {"task": TASK | {"batch_size": n}}),
        ("clients", lambda n: {"task": TASK | {"clients": n}}),
        ("dimension", lambda n: {"task": QUADRATIC | {"dimension": n}}),
        ("samples", lambda n: {"task": QUADRATIC | {"samples": n}}),
        ("hidden", lambda n: {"task": TASK | {"model": {"name": "mlp", "hidden": n}}}),
        ("local_steps", lambda n: {"method": FEDBUFF | {"local_steps": n}}),
        ("local_steps", lambda n: {"fleet": {"name": "equal", "local_steps": n}, "method": "fedbuff"}),
        ("buffer_size", lambda n: {"method": FEDBUFF | {"buffer_size": n}}),
        ("n", lambda n: {"method": {"name": "dlsgd-hetero", "n": n}}),
        ("count", lambda n: {"fleet": {"name": "hlsgd", "clusters": {"count": n}}, "method": "hl-sgd"}),
        ("every_commits", lambda n: {"evaluate": {"every_commits": n}}),
    ],
)
def test_whole_numbers_of_any_size(key: str, changed: Any, size: int) -> None:
    said = refused(experiment(**changed(size)))
    assert key in said
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"task": QUADRATIC | {"dimension": 10**6}}, "dimension = 1,000,000 takes about"),
        ({"task": QUADRATIC | {"clients": 10**9}}, "clients = 1,000,000,000, samples = 1"),
        (
            {"task": TASK | {"model": {"name": "mlp", "hidden": 10**9}}},
            "has 75,000,000,010 parameters; a run of it takes",
        ),
        ({"task": TASK | {"batch_size": 2**31 - 1}}, "a job of 2,147,483,647 samples in a step (batch_size)"),
        ({"method": {"name": "dlsgd-hetero", "n": 10**7}}, "size = 10000000; give 1,000,000 at most"),
        ({"method": FEDBUFF | {"local_steps": 10**7}}, "local steps = 10000000; give 1,000,000 at most"),
        ({"seed": 2**64}, "seed = 18446744073709551616; whole numbers must be smaller than 2^64"),
        ({"seed": True}, "seed = True; it must be a whole number, 0 or more, and below 2^64"),
        ({"memory_gib": float("inf")}, "memory_gib = inf; it must be a number or none, positive and finite"),
        ({"evaluate": {"every_seconds": 1e-300}}, "evaluate.every_seconds = 1e-300; it must be at least 1e-09"),
        ({"method": FEDBUFF | {"beta": float("inf")}}, "beta = inf; it must be a finite number"),
        ({"fleet": {"name": "equal", "mbit": 1e-30}}, "is the most; give it a faster link"),
        ({"fleet": {"name": "equal", "step_seconds": 1e300}}, "times are finite and >= 0, and 1e+12 s at most"),
        ({"fleet": {"name": "equal", "step_seconds": 0}, "until": {"virtual_seconds": 1.0}}, "is never reached"),
        ({"device": "x" * 5000}, "has 5,000 characters; a text has 4,096 at most"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_too_large_or_too_small(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(experiment(**changed))
    assert said in str(caught.value)


def test_the_largest_seed_runs() -> None:
    assert run(experiment(seed=2**64 - 1, until={"commits": 1})).commits == 1


def test_a_fleet_and_a_cluster_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "host_memory", lambda: 2.0**30)
    with pytest.raises(ConfigError, match="fleet 'equal' of 100000000 clients takes about 18"):
        build_fleet("equal", 10**8)
    with pytest.raises(ConfigError, match="cluster 0: 20,000 devices in one cluster takes about"):
        build_fleet("equal", 20_000, clusters=1)


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 5000 + "]" * 5000, "[" + "a." * 5000 + "a]", "a." * 5000 + "a = 1",
     "a = " + "{a = " * 5000 + "1" + "}" * 5000],
    ids=["lists", "header", "dotted key", "tables"],
)  # fmt: skip
def test_nesting_of_any_depth_in_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match="more than 32 deep in one another; flatten them"):
        toml.read(tmp_path / "c.toml")


def test_nesting_of_any_depth_from_a_flag_or_python() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for given in (lambda: Experiment.of(merge({}, {}, ["a." * 5000 + "a=1"], [])),
                  lambda: merge({}, {}, ["seed=" + "[" * 5000 + "]" * 5000], []),
                  lambda: build(experiment(targets=deep)),
                  lambda: build(experiment(fleet={"name": deep}))):  # fmt: skip
        with pytest.raises(ConfigError, match="more than 32 deep"):
            given()


@pytest.mark.parametrize("text", ["seed = " + "9" * 5000, "seed = 2024-13-45", "x = '''", "a = 1\n" * 3])
def test_values_that_toml_cannot_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.toml"):
        toml.read(tmp_path / "c.toml")


def test_a_config_file_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml, "LARGEST", 1000)
    (tmp_path / "c.toml").write_text("a = 1\n" * 1000)
    with pytest.raises(ConfigError, match="more than 1,000 bytes"):
        toml.read(tmp_path / "c.toml")


# ---- objects of the wrong kind ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"targets": 0.5}, "targets = 0.5; it must be a list of accuracies"),
        ({"targets": "0.5"}, "targets = '0.5'; it must be a list of accuracies"),
        ({"until": None}, "until = None; it must be a table"),
        ({"until": {1: 2}}, "has the key 1; keys are texts"),
        ({"device": None}, "device = None; it is 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"method": METHODS["fedbuff"]}, "it must be a name, or a table with a name"),
        ({"method": Method("own", None, None)}, "`when` = None; it must be a Policy, and a Policy also has kind"),
        ({"method": {"name": "fedbuff", "when": Buffer(size="3")}}, "size = '3'; it must be a whole number"),
        ({"fleet": Fleet}, "it must be a name, or a table with a name"),
        ({"fleet": 3}, "fleet = 3; it must be a name"),
        ({"task": Task}, "task = <class"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_kinds_in_python_get_sentences(changed: dict[str, Any], said: str) -> None:
    assert said in refused(experiment(**changed))


def test_no_experiment_at_all() -> None:
    assert "'fedbuff' is no Experiment" in refused("fedbuff")


@pytest.mark.parametrize(
    ("field", "value"),
    [("clients", "4"), ("step_seconds", [1.0] * 4), ("step_seconds", np.array(["a"] * 4)), ("drop_out", None),
     ("jitter", 2.0), ("presence", 3), ("local_steps", 5), ("clusters", 2)],
)  # fmt: skip
def test_a_fleet_of_the_wrong_kind(field: str, value: Any) -> None:
    fleet = build_fleet("equal", 4)
    given = {name: getattr(fleet, name) for name in fleet.__dataclass_fields__}
    assert f"fleet: {field} = " in refused(experiment(task=own(), fleet=Fleet(**given | {field: value})))


# ---- the loss is tried --------------------------------------------------------------------------
X = torch.linspace(-1.0, 1.0, 80).reshape(20, 4)
ROWS = torch.arange(20)
LABELS = ROWS % 3
REAL = torch.linspace(0.0, 1.0, 20)


def own(**changed: Any) -> Task:
    usual = {"model": nn.Linear(4, 3), "loss": functional.cross_entropy, "data": (X, LABELS), "batch_size": 2}
    return Task(**usual | {"shards": [range(5 * i, 5 * i + 5) for i in range(4)]} | changed)


def real(loss: Any, y: torch.Tensor = REAL, outputs: int = 1, **changed: Any) -> Task:
    return own(model=nn.Linear(4, outputs), loss=loss, data=(X, y), **changed)


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class AllPairs(nn.Module):
    """How like each sample's one input is to all samples' other one: as many outputs as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.one(a) @ self.other(b).T


def own_partner(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, torch.arange(len(outputs)))


def alike(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Labels that say which samples belong together, of more groups than there are outputs."""
    likeness = (outputs @ outputs.T).log_softmax(-1)
    return -(likeness * (targets[:, None] == targets)).mean()


def quantiles(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=outputs.dtype)
    errors = targets[:, None] - outputs
    return torch.maximum(levels * errors, (levels - 1) * errors).mean()


class Positions(nn.Embedding):
    """Rows for the places of a sequence that is embedded already, as in BART."""

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(embedded.shape[1], device=embedded.device))


def placed(tables: Any, tokens: torch.Tensor) -> torch.Tensor:
    embedded = tables[0](tokens)
    return (embedded + tables[1](1000 * embedded)).mean(1)


TOKENS = torch.arange(80).reshape(20, 4) % 11


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (own(data=(X, LABELS.int())), "give y.long()"),
        (own(data=(X, LABELS.float())), "give y.long()"),
        (own(data=(X, LABELS[:, None])), "give y.squeeze(1)"),
        (own(data=(X, LABELS[:, None].float())), "give y.squeeze(1).long()"),
        (own(loss=lambda t, o: functional.cross_entropy(o, t)), "the other way round"),
        (own(loss=nn.CrossEntropyLoss), "CrossEntropyLoss is a class; give one of its objects: CrossEntropyLoss()"),
        (own(loss="cross_entropy"), "loss = 'cross_entropy'; it must be a function"),
        (own(loss=lambda o: o.mean()), "the loss fails on outputs of shape [2, 3]"),
        (own(loss=lambda o, t: 1.0), "the loss gives 1.0 (float); it must give a tensor with one number"),
        (own(loss=lambda o, t: None), "the loss gives nothing (None)"),
        (own(loss=lambda o, t: float(functional.cross_entropy(o, t))), "(float); it must give a tensor"),
        (own(loss=nn.CrossEntropyLoss(reduction="none")), "it gave shape (2,)"),
        (own(loss=lambda o, t: o.argmax().sum()), "a number of type torch.int64"),
        (own(loss=lambda o, t: functional.cross_entropy(o.detach(), t)), "no gradient goes from the loss"),
        (own(loss=lambda o, t: torch.zeros((), requires_grad=True) * 2), "it does not depend on them"),
        (own(model=[nn.Linear(4, 3)]), "it must be an nn.Module"),
        (own(shards=None), "shards = None; it must be a list"),
        (own(shards=[1, 2, 3, 4]), "each client's shard must be a list of row numbers"),
        (own(batch_size=2.5), "batch_size = 2.5; it must be a whole number"),
        (own(batch_size="2"), "batch_size = '2'; it must be a whole number"),
        (own(test=(X, LABELS.int())), "test targets of shape [2] and type torch.int32"),
        (real(functional.mse_loss), "mse_loss takes outputs and targets of one shape"),
        (real(nn.MSELoss()), "outputs of shape [2, 1] and type torch.float32, training targets of shape [2]"),
        (real(nn.L1Loss()), "l1_loss takes"),
        (real(nn.SmoothL1Loss()), "smooth_l1_loss takes"),
        (real(nn.HuberLoss()), "huber_loss takes"),
        (real(nn.BCEWithLogitsLoss()), "It takes targets of the shape of the outputs"),
        (real(squared), "spreads both over all pairs of samples"),
        (real(lambda o, t: ((o.sigmoid() - t.double()) ** 2).mean()), "spreads both over all pairs"),
        (real(functional.mse_loss, REAL[:, None], 3), "outputs of shape [2, 3]"),
        (own(data=(X, LABELS.where(ROWS != 7, 3))), "so they must be 0..2: the loss fails on sample 7"),
        (own(data=(X, LABELS.where(LABELS != 2, -100).where(ROWS != 9, -1))), "sample 9, which has label -1"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_loss_that_cannot_train_is_refused_before_the_run(task: Task, said: str) -> None:
    found = task.problems()
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "task",
    [
        own(), own(loss=nn.CrossEntropyLoss(label_smoothing=0.1)), own(data=(X, LABELS.to(torch.uint8))),
        own(data=(X, functional.one_hot(LABELS).float())), own(batch_size=None), own(batch_size=1),
        own(loss=lambda o, t: functional.nll_loss(o.log_softmax(1), t)),
        own(loss=lambda o, t: (o.log_softmax(1) * (t[:, None] == torch.arange(3))).sum(1).mean().neg()),
        own(loss=lambda o, t: functional.mse_loss(o, functional.one_hot(t, 3).float())),
        real(lambda o, t: squared(o.squeeze(1), t)), real(squared, REAL[:, None]), real(nn.MSELoss(), REAL[:, None]),
        real(lambda o, t: (o - t[:, None]).abs().mean()), real(squared, REAL[:, None], 3),
        real(lambda o, t: (o.reshape(-1)[:, None] - t[None, :]).abs().mean()),  # all pairs, and says so
        real(lambda o, t: o.mean()), real(lambda o, t: (o[:, 0] * t).sum() / len(t)),
        real(nn.BCEWithLogitsLoss(), REAL[:, None].round()),
        own(model=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))), own(model=nn.Linear(4, 3).double()),
        own(model=nn.Linear(4, 2), data=(X, LABELS % 2)), own(test=(X[:1], LABELS[:1])),
        own(loss=alike, data=(X, LABELS * 4)), own(model=AllPairs(), loss=own_partner, data=((X, X + 0.1), LABELS * 4)),
        own(loss=quantiles, data=(X, LABELS * 4)), own(data=(X, LABELS.where(LABELS != 2, -100)), batch_size=5),
    ],
    ids=lambda task: "",
)  # fmt: skip
def test_a_loss_that_trains_is_not_refused(task: Task) -> None:
    before = torch.random.get_rng_state()
    assert task.problems() == []
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in task.model.parameters())


class Call(nn.Module):
    """A linear layer, and a function of it and the inputs."""

    def __init__(self, of: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.of = layer or nn.Linear(4, 3), of

    def forward(self, *x: torch.Tensor) -> Any:
        return self.of(self.layer, *x)


def mixed() -> nn.Module:
    parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3).double()])
    return Call(lambda layers, x: layers[1](layers[0](x.float()).double()), parts)


COMPLEX = Call(lambda layer, x: layer(x.abs()))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (own(model=Call(lambda layer, x: layer(x @ torch.eye(4)))), "The run is in float64, and in float32 it works"),
        (own(loss=lambda z, t: functional.cross_entropy(z, t, torch.ones(3))), "buffers (register_buffer)"),
        (own(model=mixed()), "The model has parts of types float32 and float64"),
        (own(model=COMPLEX, data=(X + 0j, LABELS)), "the training inputs are complex, of type torch.complex64"),
        (own(model=COMPLEX, data=((X + 0j).numpy(), LABELS)), "give torch.view_as_real(x)"),
        (own(data=(X.to_sparse(), LABELS)), "a tensor is sparse (torch.sparse_coo)"),
        (own(data=(np.full((20, 4), 2**63, np.uint64), LABELS)), "must be below 2**63"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_number_types_that_do_not_fit_get_sentences(task: Task, said: str) -> None:
    assert said in refused(experiment(task=task, fleet="equal", precision="float64"))


def hooked(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = layer(x)
    out.register_hook(lambda g: g)
    return out


def steered(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The slope of the layer's scores at the inputs."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).logsumexp(1).sum(), x, create_graph=True)
    return layer(slope)


def beside(layer: nn.Module, x: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
    return layer(torch.cat([x, nothing], 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "task",
    [
        own(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))),
        own(model=Call(hooked)),
        own(model=Call(steered)),
        own(model=Call(placed, nn.ModuleList([nn.Embedding(11, 3), Positions(4, 3)])), data=(TOKENS, LABELS)),
        own(loss=alike, data=(X, LABELS * 4)),
        own(data=(X, LABELS.where(LABELS != 2, -100)), batch_size=None),
        own(model=Call(beside), data=((X, torch.zeros(20, 0)), LABELS)),
        *(own(model=nn.Embedding(20, 3), data=(np.arange(20).astype(kind), LABELS))
          for kind in (np.uint16, np.uint32, np.uint64)),
    ],
    ids=["weights", "hook", "gradient inside", "positions", "groups", "ignored", "width 0", "uint16", "uint32",
         "uint64"],
)  # fmt: skip
def test_what_pytorch_trains_trains_in_both_number_types_and_modes(task: Task) -> None:
    for precision in ("float32", "float64"):
        wave, twin = (
            run(experiment(task=task, fleet="equal", until={"commits": 2}, precision=precision, mode=mode)).model
            for mode in ("wave", "reference")
        )
        assert all(torch.allclose(wave[name], twin[name], atol=1e-6) for name in wave)
    if isinstance(task.loss, nn.CrossEntropyLoss):
        assert task.loss.weight is not None
        assert task.loss.weight.dtype == torch.float32  # the caller's own stays as it is


def test_autocasting_inside_a_model_leaves_doubles_alone() -> None:
    def cast(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).to(x.dtype)

    cells = Call(lambda layers, x: layers[1](layers[0](x)), nn.Sequential(nn.GRUCell(4, 4), nn.Linear(4, 3)))
    for model in (Call(cast), Call(cast, cells)):
        task = own(model=model)
        wave, twin = (
            run(experiment(task=task, fleet="equal", until={"commits": 2}, precision="float64", mode=mode)).model
            for mode in ("wave", "reference")
        )
        assert all(torch.allclose(wave[name], twin[name], rtol=0, atol=1e-12) for name in wave)


def test_a_task_that_passes_the_trial_runs() -> None:
    for task in (real(lambda o, t: squared(o.squeeze(1), t)), own(data=(X, functional.one_hot(LABELS).float()))):
        assert run(experiment(task=task, fleet="equal", until={"commits": 1})).commits == 1


def test_a_schedule_that_fails_is_a_sentence_in_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.theory import measure

    def never(*_: Any) -> Any:
        raise OffbeatError("this schedule never commits")

    monkeypatch.setattr(measure.Horizon, "__next__", never)
    built = build(experiment())
    with pytest.raises(OffbeatError, match="never commits"):
        measure.schedule_of(built, 10)


# ---- what a task is made of ---------------------------------------------------------------------
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
