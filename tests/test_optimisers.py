"""Local and server optimisers are those of `torch.optim`, in waves and one by one, reset or kept from job to job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import ConfigError
from offbeat.engines import tiles
from offbeat.experiments.assemble import build_method
from offbeat.laws import law_cases
from offbeat.numerics import local, optimisers
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.wave import Problem, columns, draw, wave
from offbeat.records import Begun
from worlds import final, times

JOBS = [Begun(0, 0, 0, 5), Begun(1, 0, 0, 3), Begun(2, 0, 0, 5)]
THEIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.02),
    ),
    "adamw": ({"optimiser": "adamw"}, lambda p: torch.optim.AdamW(p, 0.1)),
    "adamw, own": (
        {"optimiser": "adamw", "beta1": 0.7, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, 0.1, (0.7, 0.95), 1e-4, 0.3),
    ),
    "rmsprop": ({"optimiser": "rmsprop"}, lambda p: torch.optim.RMSprop(p, 0.1)),
    "rmsprop, own": (
        {"optimiser": "rmsprop", "alpha": 0.9, "eps": 1e-3, "momentum": 0.5, "weight_decay": 0.1},
        lambda p: torch.optim.RMSprop(p, 0.1, 0.9, 1e-3, 0.1, 0.5),
    ),
}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def problem(options: dict[str, Any], lr: Any = 0.1) -> Problem:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(18, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (18,), generator=generator)
    samples = Samples.of(x, y, [np.arange(i, 18, 3) for i in range(3)], 2)
    return Problem(FlatModel(net(), functional.cross_entropy, torch.float64), samples, local.sgd(lr, options), 11)


def start(p: Problem) -> dict[str, Tensor]:
    vectors = {"model": p.model.initial().repeat(len(JOBS), 1)}
    return vectors | {name: torch.zeros_like(vectors["model"]) for name in p.local.remembers}


def plainly(p: Problem, model: nn.Module, optimiser: Any, job: Begun) -> Tensor:
    """A job by PyTorch alone, on the batches that its key draws."""
    rows, _ = draw(p, columns(p, [job], torch.device("cpu")), 0, job.steps, 2)
    for batch in rows[0]:
        optimiser.zero_grad()
        functional.cross_entropy(model(p.samples.x[batch]), p.samples.y[batch]).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# ---- clients ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", THEIRS)
def test_a_local_optimiser_is_pytorchs_and_waves_are_the_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "WORTH", 1)
    options, theirs = THEIRS[name]
    p = problem(options)
    one = reference(p, start(p), JOBS).updates["delta"]
    advance = tiles.TiledAdvance(p, 2, 2)
    for how in (wave(p, start(p), JOBS), *(wave(p, start(p), JOBS, advance) for _ in range(3))):
        torch.testing.assert_close(how.updates["delta"], one, rtol=1e-10, atol=1e-12)
    for i, job in enumerate(JOBS):
        model = net()
        moved = plainly(p, model, theirs(model.parameters()), job)
        torch.testing.assert_close(p.model.initial() - one[i], moved, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", THEIRS)
def test_a_state_that_is_kept_goes_on_from_job_to_job(name: str) -> None:
    options, theirs = THEIRS[name]
    p = problem({**options, "state": "kept"})
    state, model = start(p), net()
    optimiser = theirs(model.parameters())
    for number in range(3):
        jobs = [job._replace(job=number) for job in JOBS]
        outcome = wave(p, state, jobs)
        other = reference(p, state, jobs)
        for key, update in outcome.updates.items():
            torch.testing.assert_close(update, other.updates[key], rtol=1e-9, atol=1e-12)
        state = {name: outcome.updates[name] for name in p.local.remembers} | {
            "model": state["model"] - outcome.updates["delta"]
        }
        moved = plainly(p, model, optimiser, jobs[0])
        torch.testing.assert_close(state["model"][0], moved, rtol=1e-9, atol=1e-11)


def test_rates_by_local_step_meet_pytorchs_schedules() -> None:
    p = problem({"optimiser": "adamw"}, {"schedule": "local-cosine", "value": 0.1, "warm_up": 2})
    moved = wave(p, start(p), JOBS[:1] * 3).updates["delta"][0]
    model = net()
    optimiser = torch.optim.AdamW(model.parameters(), 0.1)
    share = [0.5, 1.0, 1.0, 0.75, 0.25]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: share[min(step, 4)])
    rows, _ = draw(p, columns(p, JOBS[:1], torch.device("cpu")), 0, 5, 2)
    for batch in rows[0]:
        optimiser.zero_grad()
        functional.cross_entropy(model(p.samples.x[batch]), p.samples.y[batch]).backward()
        optimiser.step()
        schedule.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(p.model.initial() - moved, after, rtol=1e-10, atol=1e-12)


UNDER_LAW: dict[str, dict[str, Any]] = {
    "local-sgd adamw kept": {"name": "local-sgd", "n": 3, "client_options": {"optimiser": "adamw", "state": "kept"}},
    "fedbuff rmsprop yogi": {
        "name": "fedbuff", "buffer_size": 3, "client_options": {"optimiser": "rmsprop"}, "server_optimiser": "yogi",
    },
    "fedasync nesterov kept": {
        "name": "fedasync", "client_options": {"momentum": 0.5, "nesterov": True, "state": "kept"}, "proximal": 0.1,
    },
    "dlsgd-hetero kept": {"name": "dlsgd-hetero", "n": 3, "client_options": {"momentum": 0.5, "state": "kept"}},
    "gossip-sgd adamw kept": {"name": "gossip-sgd", "client_options": {"optimiser": "adamw", "state": "kept"}},
    "scaffold adamw": {"name": "scaffold", "n": 4, "experimental": True, "client_options": {"optimiser": "adamw"}},
    "fedagrac rmsprop kept": {
        "name": "fedagrac", "experimental": True, "start": "zeros",
        "client_options": {"optimiser": "rmsprop", "state": "kept"},
    },
    "fedlin clip": {"name": "fedlin", "experimental": True, "client_options": {"clip": 0.5}},
    "fednova nesterov adagrad": {"name": "fednova", "momentum": 0.5, "nesterov": True, "server_optimiser": "adagrad"},
    "hl-sgd adam": {"name": "hl-sgd", "client_options": {"optimiser": "adamw"}, "server_optimiser": "adam"},
}  # fmt: skip


OFTEN = ("fedasync nesterov kept", "local-sgd adamw kept", "scaffold adamw")  # the others in the soak


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.soak) for n in UNDER_LAW])
def test_methods_with_optimisers_keep_the_laws(name: str) -> None:
    spec = {"local_steps": 3, "client_lr": 0.02, **UNDER_LAW[name]}
    for law in law_cases(lambda: build_method(spec), None):
        law()


def test_clip_alone_under_experiment_is_the_plain_method_where_nothing_is_clipped() -> None:
    from test_laws import one_sample_world

    for name in ("scaffold", "fedagrac", "fedlin", "fednova"):
        spec = {"name": name, "local_steps": 3, "client_lr": 0.05}
        tried = {**spec, "experimental": True, "client_options": {"clip": 1e9}}
        one, other = (final(each, one_sample_world(), times(8), commits=6) for each in (spec, tried))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimiser": "adamm"}, "unknown client optimiser 'adamm': did you mean 'adamw'"),
        ({"optimiser": 3}, "unknown client optimiser '3'"),
        ({"beta1": 0.5}, "unknown client option 'beta1'"),
        ({"optimiser": "adamw", "beta2": 1.0}, "beta2 = 1.0; it must be below 1"),
        ({"optimiser": "adamw", "eps": 0}, "eps = 0 would divide by zero"),
        ({"optimiser": "rmsprop", "alpha": -1}, "alpha = -1; it must be a number that is not negative"),
        ({"nesterov": True}, "nesterov = true needs a momentum"),
        ({"momentum": 0.5, "nesterov": 1}, "nesterov = 1; it must be true or false"),
        ({"momentum": 0.5, "state": "lost"}, "state = 'lost'; it is one of 'reset', 'kept'"),
        ({"state": "kept"}, "state = 'kept', but plain SGD has none"),
    ],
)
def test_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_method({"name": "fedbuff", "client_options": options})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac", "fedagrac-avg", "fedlin", "fednova"])
def test_formulas_of_plain_steps_refuse_optimisers(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is defined for plain steps of SGD.* experimental = true"):
        build_method({"name": name, "client_options": {"optimiser": "adamw"}})
    with pytest.raises(ConfigError, match="unknown option of minibatch-sgd 'client_options'"):
        build_method({"name": "minibatch-sgd", "client_options": {}})


def test_kept_optimisers_do_not_begin_at_gradients() -> None:
    kept = {"momentum": 0.5, "state": "kept"}
    with pytest.raises(ConfigError, match="take start = 'zeros'"):
        build_method({"name": "fedagrac", "experimental": True, "client_options": kept})


# ---- the server ---------------------------------------------------------------------------------
SERVERS: dict[str, tuple[Any, Any]] = {
    "sgd": ("sgd", lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": ("momentum", lambda p: torch.optim.SGD(p, 0.3, momentum=0.9)),
    "sgd with momentum": ({"name": "sgd", "momentum": 0.7}, lambda p: torch.optim.SGD(p, 0.3, momentum=0.7)),
    "nesterov": ("nesterov", lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, nesterov=True)),
    "adagrad": (
        {"name": "adagrad", "eps": 0.01},
        lambda p: torch.optim.Adagrad(p, 0.3, initial_accumulator_value=1e-4, eps=0.01),
    ),
    "adam": (
        {"name": "adam", "beta2": 0.999, "eps": 1e-8, "bias_correction": True},
        lambda p: torch.optim.Adam(p, 0.3),
    ),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_optimiser_is_pytorchs(name: str) -> None:
    spec, theirs = SERVERS[name]
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
    ours, optimiser = optimisers.server_optimiser(0.3, spec), theirs([w])
    state = ours.init(w.detach().clone())
    for version in range(7):
        w.grad = torch.randn(6, generator=generator, dtype=torch.float64)
        optimiser.step()
        state = ours.apply(state, w.grad, version)
        torch.testing.assert_close(state["model"], w.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_adaptive_servers_follow_the_papers_box(name: str) -> None:
    """Algorithm 2 of Reddi et al., by hand."""
    rng = np.random.default_rng(1)
    w, m, v, tau = rng.standard_normal(5), np.zeros(5), np.full(5, 0.1**2), 0.1
    ours = optimisers.server_optimiser(0.3, {"name": name, "beta1": 0.8, "eps": tau})
    state = ours.init(torch.tensor(w))
    for version in range(6):
        delta = rng.standard_normal(5)
        m = 0.8 * m + 0.2 * delta
        v = {
            "adagrad": v + delta**2,
            "adam": 0.99 * v + 0.01 * delta**2,
            "yogi": v - 0.01 * delta**2 * np.sign(v - delta**2),
        }[name]
        w = w - 0.3 * m / (np.sqrt(v) + tau)
        state = ours.apply(state, torch.tensor(delta), version)
        np.testing.assert_allclose(state["model"].numpy(), w, rtol=1e-12)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("adamw", "unknown server optimiser 'adamw': did you mean 'adam'"),
        ({"name": "yogi", "beta1": 1}, "beta1 = 1; it must lie in [0, 1)"),
        ({"name": "adagrad", "eps": 0}, "eps = 0; it must be positive"),
        ({"name": "adagrad", "beta2": 0.5}, "unknown option of server optimiser 'adagrad' 'beta2'"),
        ({"name": "sgd", "nesterov": True}, "nesterov = true needs a momentum"),
    ],
)
def test_server_sentences(spec: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_method({"name": "fedbuff", "server_optimiser": spec})
    assert sentence in str(caught.value)
