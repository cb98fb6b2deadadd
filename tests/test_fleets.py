"""Fleets: keyed durations, the papers' numbers, a million clients, and every sentence on bad input."""

import math
import tracemalloc

import numpy as np
import pytest

from offbeat.config.options import defaults
from offbeat.errors import ConfigError
from offbeat.fleets.distributions import Exponential, LogNormal, Uniform
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import FLEETS, build
from offbeat.fleets.presence import Recorded
from offbeat.keys import key, uniform


def said(call):
    """The problems that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.problems


# ---- durations ----------------------------------------------------------------------------------
def test_durations_are_the_plain_arithmetic():
    fleet = build("equal", 4, step_seconds=0.5, latency=0.25, mbit=8.0)
    asked = fleet.durations(7, down_bytes=2e6, up_bytes=3e6)
    assert asked.clients == 4
    assert (asked.download(3, 0), asked.upload(3, 0), asked.compute(3, 0, 6)) == (2.25, 3.25, 3.0)
    assert asked.download_bound == 2.25
    assert asked.fails(0, 0) is None
    assert asked.presence(0) is None


def test_draws_are_keyed_and_independent_of_the_order_of_asking():
    jitter = {"law": "lognormal", "median": 1.0, "sigma": 0.4}
    fleet = build("uniform", 6, 2, mbit=10.0, jitter=jitter, drop_out=0.5)
    one, other = (fleet.durations(5, 1e6, 1e6) for _ in range(2))
    names = [(client, job) for client in range(6) for job in range(5)]
    forward = {n: (one.download(*n), one.compute(*n, 3), one.upload(*n), one.fails(*n)) for n in names}
    backward = {n: (other.fails(*n), other.upload(*n), other.compute(*n, 3), other.download(*n)) for n in names[::-1]}
    assert all(forward[name] == backward[name][::-1] for name in names)
    factor = LogNormal(1.0, 0.4)(uniform(key(5, "upload", 4, 2)))
    assert one.upload(4, 2) == 0.8 * factor
    assert len({value[0] for value in forward.values()}) == len(names)
    assert one.download(0, 0) != fleet.durations(6, 1e6, 1e6).download(0, 0)
    assert max(value[0] for value in forward.values()) <= one.download_bound


def test_a_client_is_the_same_in_a_larger_fleet():
    small, large = build("lognormal", 10, 4), build("lognormal", 1000, 4)
    assert (small.step_seconds == large.step_seconds[:10]).all()
    assert (small.step_seconds != build("lognormal", 10, 5).step_seconds).all()


def test_drop_out_has_its_probability_and_a_uniform_share():
    asked = build("equal", 2, drop_out=0.3).durations(0, 1.0, 1.0)
    shares = [share for job in range(20_000) if (share := asked.fails(1, job)) is not None]
    assert len(shares) / 20_000 == pytest.approx(0.3, abs=0.01)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.01)
    assert 0.0 < min(shares) < max(shares) < 1.0


def test_bytes_must_be_possible():
    assert said(lambda: build("equal").durations(0, -1.0, math.nan)) == (
        "down_bytes = -1.0; it must be a finite number >= 0",
        "up_bytes = nan; it must be a finite number >= 0",
    )


# ---- builders ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "fastest", "payload"), [("dlsgd-fashion-mnist", 0.0017, 2.2e6), ("dlsgd-cifar10", 0.00314, 3.53e6)]
)
def test_the_fleets_of_dlsgd_are_exact(name, fastest, payload):
    fleet = build(name, seed=1)
    assert fleet.clients == 100
    assert fleet.payload_bytes == payload
    steps = build(name, 50_000).step_seconds
    assert steps.min() == pytest.approx(fastest, rel=1e-3)
    assert steps.max() == pytest.approx(5 * fastest, rel=1e-3)
    assert ((steps >= fastest) & (steps <= 5 * fastest)).all()
    assert steps.mean() == pytest.approx(3 * fastest, rel=0.01)
    asked = fleet.durations(0, payload, payload)
    assert asked.download(0, 0) == asked.upload(99, 3) == asked.download_bound == payload * 8 / 400e6


def test_dlsgd_sends_fashion_mnist_in_44_milliseconds():
    assert build("dlsgd-fashion-mnist").durations(0, 2.2e6, 2.2e6).download(0, 0) == 0.044


def test_step_times_follow_their_law():
    assert np.median(build("lognormal", 20_000, step_seconds=2.0).step_seconds) == pytest.approx(2.0, rel=0.02)
    assert build("exponential", 20_000, step_seconds=2.0).step_seconds.mean() == pytest.approx(2.0, rel=0.03)
    assert build("uniform", 20_000, step_seconds=2.0, slowest=3.0).step_seconds.mean() == pytest.approx(4.0, rel=0.01)


def test_stragglers_are_an_exact_share():
    fleet = build("straggling", 50, 3, share=0.2, factor=100.0, sigma=0.1)
    assert (fleet.step_seconds > 0.1).sum() == 10
    calm = build("straggling", 50, 3, share=0.0, sigma=0.1)
    assert np.unique(np.round(fleet.step_seconds / calm.step_seconds)).tolist() == [1.0, 100.0]


def test_custom_takes_a_law_for_everything():
    fleet = build(
        "custom",
        1000,
        step_seconds={"law": "trace", "values": [0.1, 0.2]},
        latency={"law": "uniform", "low": 0.1, "high": 0.2},
        down_mbit={"law": "lognormal", "median": 16.0, "sigma": 1.0},
        up_mbit=8.0,
        jitter={"law": "exponential", "mean": 1.0},
        payload_bytes=10.0,
    )
    assert set(fleet.step_seconds.tolist()) == {0.1, 0.2}
    assert np.unique(fleet.up_bandwidth).tolist() == [1e6]
    assert np.median(fleet.down_bandwidth) == pytest.approx(2e6, rel=0.2)
    assert fleet.jitter == Exponential(1.0)
    assert fleet.payload_bytes == 10.0


def test_a_million_clients_are_light():
    tracemalloc.start()
    fleet = build("uniform", 1_000_000, mbit=10.0)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert fleet.durations(0, 1e6, 1e6).compute(999_999, 0, 2) == 2 * fleet.step_seconds[-1]


@pytest.mark.parametrize(
    ("name", "given", "sentences"),
    [
        ("unifrom", {}, ["unknown fleet 'unifrom': did you mean 'uniform'?"]),
        (
            "uniform",
            {"slowist": 2, "latency": "soon", "slowest": 0.5, "mbit": 0.0, "drop_out": 1.0, "clients": 0},
            [
                "unknown option of fleet 'uniform' 'slowist': did you mean 'slowest'?",
                "fleet 'uniform': latency = 'soon'; it must be a number",
                "fleet 'uniform': clients = 0; a fleet needs at least 1",
                "fleet 'uniform': slowest = 0.5; it must be a finite number >= 1",
                "fleet 'uniform': mbit = 0.0; it must be a finite number > 0",
                "fleet 'uniform': drop_out = 1.0; it is a probability, at least 0 and below 1",
            ],
        ),
        (
            "equal",
            {"mbit": -1.0, "clients": 2.5},
            ["fleet 'equal': clients = 2.5; it must be a whole", "fleet 'equal': mbit"],
        ),
        ("lognormal", {"sigma": math.nan}, ["fleet 'lognormal': sigma = nan; it must be a number"]),
        ("exponential", {"step_seconds": 0}, ["fleet 'exponential': step_seconds: mean = 0; it must be"]),
        (
            "straggling",
            {"share": 2.0, "factor": 0.0},
            ["fleet 'straggling': factor = 0.0", "fleet 'straggling': share = 2.0"],
        ),
        ("dlsgd-cifar10", {"mbit": 1.0}, ["unknown option of fleet 'dlsgd-cifar10' 'mbit'"]),
        ("custom", {"mean_on": 3.0}, ["fleet 'custom': mean_on = 3.0 and mean_off = None; give both"]),
        (
            "custom",
            {"mean_on": 0.0, "mean_off": -1.0},
            ["fleet 'custom': mean_on = 0.0", "fleet 'custom': mean_off = -1.0"],
        ),
        ("custom", {"payload_bytes": -1.0}, ["fleet 'custom': payload_bytes = -1.0"]),
        (
            "custom",
            {"latency": {"law": "trace", "values": [0.1, -5]}, "jitter": {"law": "normal"}},
            [
                "fleet 'custom': latency: entry 1 of the trace = -5; it must be",
                "fleet 'custom': unknown law of jitter 'norm",
            ],
        ),
    ],
)
def test_bad_fleets_are_refused_whole(name, given, sentences):
    problems = said(lambda: build(name, **given))
    assert len(problems) == len(sentences), problems
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)


def test_every_fleet_has_named_options_with_defaults():
    for name in FLEETS:
        assert {"clients", "seed"} <= set(defaults(FLEETS[name]))
    assert defaults(FLEETS["uniform"])["slowest"] == 5.0


def test_an_impossible_fleet_names_all_its_problems():
    presence = Recorded(
        [[(0.0, True)], [(-1.0, True), (3.0, False), (2.0, True)], [(0.0, True), (9.0, False)]], [None, None, 8.0]
    )
    fleet = Fleet(
        name="bad",
        clients=3,
        step_seconds=np.array([1.0, -2.0, math.nan]),
        down_latency=np.array([0.0, math.inf, 0.0]),
        up_latency=np.zeros(2),
        down_bandwidth=np.array([math.inf, 1.0, 0.0]),
        up_bandwidth=np.array([math.inf, 1.0, math.nan]),
        jitter=Uniform(2.0, 1.0),
        drop_out=-0.1,
        presence=presence,
        payload_bytes=math.nan,
    )
    assert fleet.problems() == [
        "step_seconds: client 1 has -2.0, client 2 has nan s; times are finite and >= 0, and 1e+12 s at most",
        "down_latency: client 1 has inf s; times are finite and >= 0, and 1e+12 s at most",
        "up_latency: an array of shape (2,) for 3 clients; give one number for each",
        "down_bandwidth: client 2 has 0.0 bytes/s; a link must carry more than 0 (infinity is allowed)",
        "up_bandwidth: client 2 has nan bytes/s; a link must carry more than 0 (infinity is allowed)",
        "jitter: low = 2.0 is above high = 1.0; swap them",
        "drop_out = -0.1; it is a probability, at least 0 and below 1",
        "presence of user 1: the first change is at -1.0 s; times are >= 0",
        "presence of user 1: a change at 2.0 s follows one at 3.0 s; times must ascend",
        "presence of user 2: period = 8.0 s does not reach beyond the last change at 9.0 s",
        "payload_bytes = nan; it must be a finite number >= 0",
    ]
    assert Fleet("none", 0, *[np.zeros(0)] * 5).problems() == ["clients = 0; a fleet needs at least 1"]


def test_a_step_law_is_looked_at_beside_other_problems_unless_it_asks_for_speeds():
    """What it is called elsewhere in its table does not matter."""
    with pytest.raises(ConfigError) as error:
        build("equal", 3, latency="none", local_steps={"law": "linear", "low": 1, "high": 2, "mode": "deadline"})
    assert any("mode = 'deadline'; it is 'fixed'" in problem for problem in error.value.problems)
    with pytest.raises(ConfigError) as error:
        build("equal", 3, latency="none", local_steps={"law": "deadline", "seconds": 1e-9})
    assert all("deadline" not in problem for problem in error.value.problems)
