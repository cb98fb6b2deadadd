"""Fleets drawn from laws, among them the exact ones of the DLSGD paper. Each default is stated once, with its reason.

Options that recur: `latency` (s, each way), `mbit` (link speed each way in Mbit/s; None: infinitely fast), `jitter`
(the law of a factor on every duration), `drop_out` (probability that a job is lost while computing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.errors import ConfigError
from offbeat.fleets.clusters import MBIT, ClusterSpec, clusters_of
from offbeat.fleets.distributions import (
    Array,
    Exponential,
    Law,
    LawSpec,
    LogNormal,
    Uniform,
    drawn,
    draws,
    number_problems,
    numeric,
    read,
)
from offbeat.fleets.fleet import Fleet, clustered, improbable
from offbeat.fleets.presence import OnOff

HOUR = 3600.0
STEP = 0.01  # s per local step: a small CNN on ten samples takes a phone about that long


def compose(
    name: str,
    clients: int,
    seed: int,
    laws: Mapping[str, Any],
    problems: Sequence[str] = (),
    drop_out: float = 0.0,
    payload_bytes: float | None = None,
) -> Fleet:
    """A fleet whose arrays are drawn from `laws`; their problems and those `found` before are raised together.

    Keys of `laws`: step_seconds, latency, jitter and mbit, or down_mbit and up_mbit; None: no such delay.
    """
    faults = list(problems)
    known = readings(laws, faults)
    faults += improbable(drop_out)
    if faults:
        raise ConfigError(faults)

    def array(missing: float, *options: str) -> Array:
        for option in options:
            if option in known:
                return drawn(known[option], clients, seed, option)
        return np.full(clients, missing)

    latency = array(0.0, "latency")
    down = array(math.inf, "down_mbit", "mbit") * MBIT
    return Fleet(
        name=name,
        clients=clients,
        step_seconds=array(0.0, "step_seconds"),
        down_latency=latency,
        up_latency=latency,
        down_bandwidth=down,
        up_bandwidth=down if "mbit" in known else array(math.inf, "up_mbit") * MBIT,
        jitter=known.get("jitter"),
        drop_out=drop_out,
        payload_bytes=payload_bytes,
    )


def readings(laws: Mapping[str, Any], faults: list[str]) -> dict[str, Law]:
    """The laws that are given; `faults` takes what is wrong with them."""
    for option, spec in laws.items():
        if option.endswith("mbit") and numeric(spec) and spec == 0:
            faults += number_problems(option, spec, positive=True)
    return {option: read(spec, option, faults) for option, spec in laws.items() if spec is not None}


def uniform(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: float = STEP,
    slowest: float = 5.0,  # as in DLSGD
    latency: float = 0.0,
    mbit: float | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Step times uniform between `step_seconds` and `slowest` times that."""
    problems = number_problems("step_seconds", step_seconds) + number_problems("slowest", slowest, least=1.0)
    steps = Uniform(step_seconds, step_seconds * slowest) if not problems else 0.0
    laws = {"step_seconds": steps, "latency": latency, "mbit": mbit, "jitter": jitter}
    return compose("uniform", clients, seed, laws, problems, drop_out)


def equal(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: float = STEP,
    latency: float = 0.0,
    mbit: float | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Everyone alike: the fleet on which asynchrony has nothing to gain."""
    laws = {"step_seconds": step_seconds, "latency": latency, "mbit": mbit, "jitter": jitter}
    return compose("equal", clients, seed, laws, (), drop_out)


def lognormal(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: float = STEP,
    sigma: float = 0.5,  # 5 % to 95 % of the clients span a factor of 5, as in DLSGD
    latency: float = 0.0,
    mbit: float | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Log-normal step times with median `step_seconds`: many near the middle, a few very slow."""
    laws = {"step_seconds": LogNormal(step_seconds, sigma), "latency": latency, "mbit": mbit, "jitter": jitter}
    return compose("lognormal", clients, seed, laws, (), drop_out)


def exponential(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: float = STEP,
    latency: float = 0.0,
    mbit: float | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
) -> Fleet:
    """Exponential step times with mean `step_seconds`: the widest spread that is usual in analyses."""
    laws = {"step_seconds": Exponential(step_seconds), "latency": latency, "mbit": mbit, "jitter": jitter}
    return compose("exponential", clients, seed, laws, (), drop_out)


def straggling(
    clients: int = 100,
    seed: int = 0,
    *,
    share: float = 0.2,
    factor: float = 10.0,  # a round that waits for the slow is bound by them alone
    step_seconds: float = STEP,
    sigma: float = 0.2,  # mild: nine of ten of the others lie within 40 % of the median
    latency: float = 0.02,  # half the round trip of a usual mobile link
    mbit: float | None = 100.0,  # 2 MB in 0.16 s: less than 50 fast steps, so that computing sets the pace
    drop_out: float = 0.0,
) -> Fleet:
    """A `share` of the clients, drawn without regard to anything else, is `factor` times slower than the others."""
    problems = number_problems("share", share) + number_problems("factor", factor, positive=True)
    if share > 1:
        problems.append(f"share = {share}; it is a part of the fleet, between 0 and 1")
    laws = {"step_seconds": LogNormal(step_seconds, sigma), "latency": latency, "mbit": mbit}
    fleet = compose("straggling", clients, seed, laws, problems, drop_out)
    slow = np.argsort(draws(clients, seed, "straggler"))[: round(share * clients)]
    steps = fleet.step_seconds.copy()
    steps[slow] *= factor
    return replace(fleet, step_seconds=steps)


def custom(
    clients: int = 100,
    seed: int = 0,
    *,
    step_seconds: LawSpec = STEP,
    latency: LawSpec = 0.0,
    down_mbit: LawSpec | None = None,
    up_mbit: LawSpec | None = None,
    jitter: LawSpec | None = None,
    drop_out: float = 0.0,
    mean_on: float | None = None,
    mean_off: float | None = None,
    payload_bytes: float | None = None,
) -> Fleet:
    """Any law for each quantity; with `mean_on` and `mean_off` (s) clients come and go, for exponential times."""
    problems = [] if payload_bytes is None else number_problems("payload_bytes", payload_bytes)
    away = None
    if mean_on is not None and mean_off is not None:
        away = OnOff(mean_on, mean_off, seed)
        problems += away.problems(clients)
    elif mean_on is not None or mean_off is not None:
        problems.append(
            f"mean_on = {mean_on} and mean_off = {mean_off}; give both, or neither for clients always there"
        )
    laws = {
        "step_seconds": step_seconds,
        "latency": latency,
        "down_mbit": down_mbit,
        "up_mbit": up_mbit,
        "jitter": jitter,
    }
    return replace(compose("custom", clients, seed, laws, problems, drop_out, payload_bytes), presence=away)


def dlsgd_fashion_mnist(clients: int = 100, seed: int = 0) -> Fleet:
    """DLSGD, appendix B.1, Fashion-MNIST: 17.0 MFLOP a step, 2.2 MB a vector."""
    return dlsgd("dlsgd-fashion-mnist", clients, seed, 17.0e6, 2.2e6)


def dlsgd_cifar10(clients: int = 100, seed: int = 0) -> Fleet:
    """DLSGD, appendix B.1, CIFAR-10: 31.4 MFLOP a step, 3.53 MB a vector."""
    return dlsgd("dlsgd-cifar10", clients, seed, 31.4e6, 3.53e6)


def dlsgd(name: str, clients: int, seed: int, flop: float, payload_bytes: float) -> Fleet:
    """FLOP / 10 GFLOP/s for the fastest, times a slow-down uniform in [1, 5]; 400 Mbit/s both ways, no latency."""
    fastest = flop / 10e9
    laws = {"step_seconds": Uniform(fastest, 5 * fastest), "mbit": 400.0}
    return compose(name, clients, seed, laws, payload_bytes=payload_bytes)


def hlsgd(
    clients: int = 32,
    seed: int = 0,
    *,
    clusters: ClusterSpec = 4,  # rings
    step_hours: float = 0.01,  # c_cp
    d2d_hours: float = 0.005,  # c_d2d over two links; each link takes half of it
    d2s_hours: float = 0.05,  # c_d2s with one report per cluster; m reports take m times as long
) -> Fleet:
    """HL-SGD, section 6.1: hours per local step, per exchange of models in a ring, per report to the server.

    Downloads take no time there. The paper gives times, not bytes per second, so all of them stand as latencies."""
    given = {"step_hours": step_hours, "d2d_hours": d2d_hours, "d2s_hours": d2s_hours}
    problems = [sentence for name, hours in given.items() for sentence in number_problems(name, hours)]
    table = dict(clusters) if isinstance(clusters, Mapping) else {"count": clusters}
    latency = 0.0 if problems else d2d_hours * HOUR / 2
    try:
        made = clusters_of({"latency": latency, "shared_uplink": True, **table}, clients, seed)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    fleet = compose("hlsgd", clients, seed, {"step_seconds": step_hours * HOUR})
    return clustered(replace(fleet, up_latency=np.full(clients, d2s_hours * HOUR)), made)
