"""The numerics plane against PyTorch, closed forms and statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from offbeat import keys
from offbeat.errors import ConfigError
from offbeat.method import Local
from offbeat.numerics.local import gradient, sgd
from offbeat.numerics.optimisers import server_optimiser
from offbeat.numerics.rates import client_rate, rate
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.samples import Samples, permuted
from offbeat.numerics.staleness import staleness
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.wave import Problem, bytes_per_job, columns, draw, wave
from offbeat.records import Begun


# ---- keys ---------------------------------------------------------------------------------------
@given(seed=st.integers(0, 2**64 - 1), client=st.integers(0, 2**31), job=st.integers(0, 2**31))
def test_keys_are_the_same_in_python_numpy_and_torch(seed: int, client: int, job: int) -> None:
    plain = keys.key(seed, "batch", client, job)
    assert plain == int(keys.key(seed, "batch", np.array([client]), np.array([job]))[0])
    assert plain == int(keys.key(seed, "batch", torch.tensor([client]), torch.tensor([job]))[0])


def test_draws_are_uniform_and_streams_differ() -> None:
    n = np.arange(100_000)
    drawn = keys.uniform(keys.key(1, "a", n))
    assert abs(drawn.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(drawn, 20, (0, 1))[0] / 5000 - 1).max() < 0.1
    assert abs(np.corrcoef(drawn, keys.uniform(keys.key(1, "b", n)))[0, 1]) < 0.01
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.01
    assert len({keys.key(seed, "x") for seed in range(1000)}) == 1000


# ---- samples ------------------------------------------------------------------------------------
def samples(sizes: list[int], batch: int | None, sampling: Any = "replacement") -> Samples:
    total = sum(sizes)
    ends = np.cumsum(sizes)
    shards = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return Samples.of(torch.arange(total)[:, None].float(), torch.zeros(total), shards, batch, sampling)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_batches_come_from_the_clients_own_shard(sizes: list[int], seed: int) -> None:
    for sampling in ("replacement", "shuffle"):
        held = samples(sizes, 5, sampling)
        client = torch.arange(len(sizes))
        key = keys.key(seed, "batch", client, client)
        rows = held.rows(client, key, 0, 7)
        low = held.first[:, None, None]
        assert bool(((rows >= low) & (rows < low + held.size[:, None, None])).all())
        alone = held.rows(client[-1:], key[-1:], 3, 2)  # the same draws, whoever stands beside it
        assert torch.equal(rows[-1:, 3:5], alone)


def test_shuffle_runs_through_whole_permutations() -> None:
    held = samples([12], 4, "shuffle")
    rows = held.rows(torch.tensor([0]), keys.key(0, "batch", torch.tensor([0])), 0, 9).reshape(3, 12)
    assert all(sorted(epoch) == list(range(12)) for epoch in rows.tolist())
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 3


def test_replacement_covers_a_shard_evenly() -> None:
    held = samples([10], 100)
    rows = held.rows(torch.tensor([0]), torch.tensor([123]), 0, 200).flatten()
    counts = torch.bincount(rows, minlength=10) / 2000
    assert bool(((counts - 1).abs() < 0.1).all())


@given(size=st.integers(1, 300), key=st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None)
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    place = torch.arange(size)
    assert sorted(permuted(torch.tensor(key), place, torch.tensor(size)).tolist()) == list(range(size))


def test_permuted_is_fair_for_small_sets() -> None:
    key = keys.key(3, "fair", torch.arange(24_000))[:, None]
    orders = permuted(key, torch.arange(3)[None].expand(24_000, 3), torch.tensor(3))
    codes = torch.bincount(orders[:, 0] * 9 + orders[:, 1] * 3 + orders[:, 2], minlength=27)
    assert codes[codes > 0].tolist() == pytest.approx([4000] * 6, rel=0.06)


def test_in_order_reads_the_shard_as_it_is_stored_from_the_start_or_on_from_the_last_job() -> None:
    client, key = torch.tensor([0, 0, 1]), torch.tensor([5, 6, 7])
    earlier = torch.tensor([0, 3, 3])  # steps of jobs before this one
    restarted, continued = samples([8, 10], 2, "in-order"), samples([8, 10], 2, "in-order-continued")
    assert restarted.rows(client, key, 0, 3, 2, earlier).tolist() == [[[0, 1], [2, 3], [4, 5]]] * 2 + [
        [[8, 9], [10, 11], [12, 13]]
    ]
    assert continued.rows(client, key, 0, 3, 2, earlier).tolist() == [
        [[0, 1], [2, 3], [4, 5]], [[6, 7], [0, 1], [2, 3]], [[14, 15], [16, 17], [8, 9]],
    ]  # fmt: skip
    assert torch.equal(
        continued.rows(client, key, 1, 2, 2, earlier), continued.rows(client, key, 0, 3, 2, earlier)[:, 1:]
    )


def test_a_single_pass_sees_every_sample_once() -> None:
    """Jobs of one client that go on where the last one ended read a stream, once, while the shard lasts."""
    p = problem(sgd(0.1), nn.Sequential(nn.Flatten(), nn.Linear(162, 5)), batch=2, sampling="in-order-continued")
    seen = []
    before = 0
    for number, steps in enumerate((3, 1, 6, 2, 3)):
        work = columns(p, [Begun(3, number, 0, steps, before)], torch.device("cpu"))
        seen += draw(p, work, 0, steps, 2)[0].flatten().tolist()
        before += steps
    assert seen == list(range(28, 58))  # client 3 has rows 28 to 57, in 15 steps of 2


def test_batches_of_each_clients_own_size_are_exact() -> None:
    p = problem(sgd(0.1), convolutions(), (2, 5, 3, 4))
    assert [p.samples.per_step(client) for client in range(4)] == [2, 5, 3, 4]
    assert (p.samples.width, p.samples.epoch(3)) == (5, 8)
    batched, plain = wave(p, starts(p), JOBS), reference(p, starts(p), JOBS)
    assert torch.allclose(batched.updates["delta"], plain.updates["delta"], rtol=1e-9, atol=1e-12)


# ---- local steps --------------------------------------------------------------------------------
SIZES = [3, 17, 8, 30]


def problem(local: Local, model: nn.Module, batch: Any = 6, sampling: Any = "replacement") -> Problem:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((sum(SIZES), 2, 9, 9)))
    y = torch.from_numpy(rng.integers(0, 5, sum(SIZES)))
    ends = np.cumsum(SIZES)
    shards = [np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    flat = FlatModel(model, functional.cross_entropy, torch.float64)
    return Problem(flat, Samples.of(x, y, shards, batch, sampling), local, 11)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, (3, 2), stride=(1, 2), bias=False),
        nn.Tanh(), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6 * 2 * 2, 5),
    )  # fmt: skip


JOBS = [Begun(0, 0, 0, 4), Begun(2, 5, 0, 7), Begun(1, 1, 0, 1), Begun(3, 0, 0, 4)]


def starts(p: Problem) -> dict[str, torch.Tensor]:
    spread = 1 + 0.1 * torch.arange(len(JOBS), dtype=torch.float64)[:, None]
    return {"model": p.model.initial()[None] * spread}


@pytest.mark.parametrize("batch", [6, None])
@pytest.mark.parametrize("sampling", ["replacement", "shuffle", "in-order", "in-order-continued"])
@pytest.mark.parametrize(
    "local",
    [sgd(0.1), sgd(0.1, {"momentum": 0.9, "weight_decay": 0.01, "clip": 0.5}), sgd(0.1, proximal=0.3), gradient()],
    ids=["plain", "options", "proximal", "gradient"],
)
def test_unequal_steps_and_shards_are_exact(batch: int | None, sampling: Any, local: Local) -> None:
    """The batched wave pads nothing into the result: it equals one client after the other."""
    p = problem(local, convolutions(), batch, sampling)
    batched, plain = wave(p, starts(p), JOBS), reference(p, starts(p), JOBS)
    for name, update in plain.updates.items():
        assert torch.allclose(batched.updates[name], update, rtol=1e-9, atol=1e-12)
    assert torch.allclose(batched.losses, plain.losses, rtol=1e-12)
    assert batched.bad.tolist() == plain.bad.tolist() == [-1] * 4


def test_float32_waves_agree_with_the_twin_to_a_stated_tolerance() -> None:
    p = problem(sgd(0.1), convolutions())
    low = p._replace(model=FlatModel(convolutions(), functional.cross_entropy))
    held = low.samples
    low = low._replace(samples=Samples(held.x.float(), held.y, held.order, held.first, held.size, held.batch))
    begin = {"model": starts(p)["model"].float()}
    one, other = wave(low, begin, JOBS).updates["delta"], reference(low, begin, JOBS).updates["delta"]
    assert float((one - other).norm() / other.norm()) < 1e-5


def test_local_sgd_is_torch_optim_sgd() -> None:
    """Momentum and weight decay, step for step, on the batches that the key draws."""
    p = problem(sgd(0.05, {"momentum": 0.9, "weight_decay": 0.02}), convolutions())
    model = convolutions().double()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.02)
    job = Begun(3, 2, 0, 6)
    client = torch.tensor([3])
    rows = p.samples.rows(client, keys.key(11, "batch", client, torch.tensor([2])), 0, 6)[0]
    for batch in rows:
        optimiser.zero_grad()
        functional.cross_entropy(model(p.samples.x[batch]), p.samples.y[batch]).backward()
        optimiser.step()
    begin = {"model": p.model.initial()[None]}
    moved = begin["model"] - wave(p, begin, [job]).updates["delta"]
    assert torch.allclose(moved[0], torch.cat([q.detach().flatten() for q in model.parameters()]), atol=1e-12)


def test_rates_follow_the_jobs_version() -> None:
    local = sgd({"schedule": "step", "value": 0.1, "at": [5], "factor": 0.5})
    p = problem(local, nn.Sequential(nn.Flatten(), nn.Linear(162, 5)))
    begin = {"model": p.model.initial()[None].repeat(2, 1)}
    outcome = wave(p, begin, [Begun(1, 0, 4, 1), Begun(1, 0, 5, 1)])
    assert torch.allclose(outcome.updates["delta"][0], 2 * outcome.updates["delta"][1], atol=1e-12)


def test_bad_numbers_are_found_at_their_step() -> None:
    p = problem(sgd(0.1), nn.Sequential(nn.Flatten(), nn.Linear(162, 5)), batch=1, sampling="shuffle")
    client, key = torch.tensor([1]), keys.key(11, "batch", torch.tensor([1]), torch.tensor([0]))
    rows = p.samples.rows(client, key, 0, 10)[0, :, 0].tolist()
    p.samples.x[rows[4]] = float("nan")
    begin = {"model": p.model.initial()[None].repeat(2, 1)}
    jobs = [Begun(1, 0, 0, 10), Begun(0, 0, 0, 3)]
    assert wave(p, begin, jobs).bad.tolist() == reference(p, begin, jobs).bad.tolist() == [4, -1]


def test_memory_of_a_job_grows_with_model_and_batch() -> None:
    small = bytes_per_job(problem(sgd(0.1), nn.Sequential(nn.Flatten(), nn.Linear(162, 5))))
    assert bytes_per_job(problem(sgd(0.1), convolutions(), batch=60)) > bytes_per_job(
        problem(sgd(0.1), convolutions(), batch=6)
    )
    assert small > 8 * 8 * (162 * 5 + 5)


# ---- refused models -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "BatchNorm2d ('1') with running statistics"),
        (nn.LazyLinear(2), "parameter 'weight' has no shape yet"),
        (nn.Linear(1, 2, dtype=torch.complex64), "parameter 'weight' is complex"),
        (nn.Sequential(nn.ReLU()), "no parameters"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FlatModel(model, functional.cross_entropy)
    assert sentence in str(caught.value)


def test_batch_norm_without_statistics_is_allowed() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(196, 5)
    )
    p = problem(sgd(0.1), model)
    one, other = wave(p, starts(p), JOBS), reference(p, starts(p), JOBS)
    assert torch.allclose(one.updates["delta"], other.updates["delta"], atol=1e-10)


# ---- rates, staleness, server -------------------------------------------------------------------
def test_rate_schedules() -> None:
    assert rate(0.3)(7) == 0.3
    assert rate({"schedule": "inverse-sqrt", "value": 1.0, "scale": 3.0})(9) == 0.5
    falling = rate({"schedule": "cosine", "value": 1.0, "versions": 10})
    assert [round(falling(v), 6) for v in (0, 5, 10, 20)] == [1.0, 0.5, 0.0, 0.0]
    assert rate(lambda version: 1.0 + version)(2) == 3.0


@pytest.mark.parametrize(
    ("given_rate", "sentence"),
    [
        (-0.1, "client_lr = -0.1; a rate must be a positive number"),
        (float("nan"), "a rate must be a positive number"),
        ({"schedule": "stepp", "value": 1}, "did you mean 'step'"),
        ({"schedule": "step", "value": 1, "art": [1]}, "unknown option of client_lr: schedule 'step' 'art'"),
    ],
)
def test_bad_rates(given_rate: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client_rate(given_rate)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"clip": 0.0}, {"weight_decay": -1.0}, {"momentun": 0.9}])
def test_bad_client_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        sgd(0.1, options)


def test_staleness_functions() -> None:
    k = torch.tensor([0.0, 1.0, 4.0, 5.0, 14.0])
    assert staleness("constant")(k).tolist() == [1.0] * 5
    assert torch.allclose(staleness({"law": "polynomial", "a": 0.5})(k), (k + 1) ** -0.5)
    hinge = staleness({"law": "hinge", "a": 10, "b": 4})(k)
    assert torch.allclose(hinge, torch.tensor([1.0, 1.0, 1.0, 1 / 11, 1 / 101]))
    with pytest.raises(ConfigError, match="did you mean 'hinge'"):
        staleness("hinje")


def test_server_momentum_is_torch_optim_sgd() -> None:
    optimiser = server_optimiser(0.3, {"name": "sgd", "momentum": 0.8})
    state = optimiser.init(torch.ones(3))
    weight = nn.Parameter(torch.ones(3))
    theirs = torch.optim.SGD([weight], lr=0.3, momentum=0.8)
    for step in range(4):
        weight.grad = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
        state = optimiser.apply(state, weight.grad, step)
        theirs.step()
    assert torch.allclose(state["model"], weight.detach())


def test_server_adam_follows_its_formula() -> None:
    optimiser = server_optimiser(0.1, {"name": "adam", "beta1": 0.9, "beta2": 0.99, "eps": 0.01})
    state = optimiser.init(torch.zeros(1))
    w = m = 0.0
    v = 0.01**2
    for g in (1.0, -0.5, 2.0):
        state = optimiser.apply(state, torch.tensor([g]), 0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w -= 0.1 * m / (v**0.5 + 0.01)
    assert float(state["model"]) == pytest.approx(w, rel=1e-6)
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        server_optimiser(0.1, "adan")
