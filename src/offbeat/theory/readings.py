"""Measured numbers with their uncertainty, where they come from, and what they mean in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.errors import ConfigError
from offbeat.theory.curvature import Path, Power
from offbeat.theory.divergence import Divergence, Noise

SURE = 1.96  # standard errors to each side of a 95 % interval


class Reading(NamedTuple):
    """One line. `low` and `high` bound a 95 % interval; None where there is no sampling error to speak of."""

    name: str
    symbol: str
    value: float
    low: float | None
    high: float | None
    how: str
    said: str


def over_rounds(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of what rounds gave, with a 95 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = SURE * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, max(0.0, mean - half), mean + half


def readings_of(
    path: Path,
    powers: Mapping[str, Power],
    apart: Divergence,
    sigma: Noise | None,
    batch: int | None,
    rho_max: float | None,
) -> list[Reading]:
    readings = curvatures(path, powers)
    slope = math.sqrt(apart.mean)
    zeta, gamma = math.sqrt(apart.zeta2), math.sqrt(apart.gamma2)
    far = zeta / slope if slope else math.inf
    error = SURE * float(apart.distances.std()) / math.sqrt(len(apart.distances)) if len(apart.distances) > 1 else 0.0
    spread = (max(0.0, apart.gamma2 - error) ** 0.5, (apart.gamma2 + error) ** 0.5)
    direction = "clients disagree on direction" if far > 1 else "clients agree on direction"
    readings += [
        Reading("grad", "|grad f|", slope, None, None, "at the point", "how steep the common objective is here"),
        Reading("zeta", "zeta", zeta, None, None, "at the point, largest of the clients",
                f"{direction}: the farthest gradient is off by {far:.3g} times the mean gradient"),
        Reading("gamma", "gamma, nu", gamma, *spread, "at the point, root mean square over clients",
                f"a typical client's gradient is off by {gamma / slope if slope else math.inf:.3g} mean gradients"),
        Reading("G", "G", math.sqrt(float(apart.norms.max())), None, None, "at the point, largest of the clients",
                "the steepest client"),
    ]  # fmt: skip
    try:
        b2 = apart.dissimilarity2
        said = "clients' gradients are as large as their mean" if b2 < 4 else "clients' gradients cancel in the mean"
        readings.append(Reading("B2", "B^2", b2, None, None, "at the point, largest of the clients", said))
    except ConfigError:
        pass  # at an optimum it has no value
    if sigma is not None:
        readings += noises(sigma, batch, slope)
    if apart.inside:
        inside, between = math.sqrt(float(np.mean(apart.inside))), math.sqrt(apart.between)
        said = "clusters differ more inside than from one another: gossip helps" if inside > between else (
            "clusters differ from one another more than inside: gossip cannot mend that")  # fmt: skip
        readings += [
            Reading("eps_inside", "eps_L", inside, None, None, "at the point, root mean square over clusters", said),
            Reading("eps_between", "eps_g", between, None, None, "at the point, with alpha = 1", said),
        ]
    if rho_max is not None:
        said = f"one exchange of models leaves at most {rho_max:.3g} of the distance to a cluster's mean"
        readings.append(Reading("rho_max", "rho_max", rho_max, None, None, "exact", said))
    return readings


def curvatures(path: Path, powers: Mapping[str, Power]) -> list[Reading]:
    h2 = over_rounds(path.heterogeneity)
    h = [None if value is None else math.sqrt(value) for value in h2]
    rounds = f"along the path, rounds: {len(path.heterogeneity)}; a lower estimate"
    tilde, steep = over_rounds(path.smoothness), over_rounds(path.global_smoothness)
    low = f"{math.sqrt(h2[0]) / tilde[0]:.3g}" if tilde[0] else "no"
    readings = [
        Reading("L_tilde", "L~", *tilde, rounds, "how fast the gradient of the most curved client turns"),
        Reading("L_g", "L_g", *steep, f"along gradient descent, steps: {len(path.global_smoothness)}",
                "how fast the gradient of the common objective turns"),
        Reading("L_h", "L_h", h[0] or 0.0, h[1], h[2], rounds,
                f"how much averaged models mislead: {low} of L~; local work is limited by this, not by L~"),
    ]  # fmt: skip
    names = {"smoothness": ("L_tilde_power", "L~"), "global_smoothness": ("L_g_power", "L_g"),
             "heterogeneity": ("L_h_power", "L_h")}  # fmt: skip
    least = powers.get("convexity")
    if least is not None:
        said = "every client is strongly convex here" if least.value > 0 else "some client is not strongly convex here"
        how = f"power iteration at the point, steps: {least.iterations}; an upper estimate"
        readings.append(Reading("mu", "mu", least.value, None, None, how, said))
    for name, power in powers.items():
        if name not in names:
            continue
        how = f"power iteration at the point, steps: {power.iterations}"
        said = "settled" if power.settled else "still growing: a lower estimate; give more iterations"
        readings.append(Reading(*names[name], power.value, None, None, how, said))
    return readings


def noises(sigma: Noise, batch: int | None, slope: float) -> list[Reading]:
    half = SURE * sigma.error
    low, high = (max(0.0, sigma.mean - half), sigma.mean + half) if sigma.error else (None, None)
    each = Reading("sigma2", "sigma^2", sigma.mean, low, high, "one sample, mean over clients",
                   "noise of a single sample's gradient")  # fmt: skip
    if batch is None:
        return [each]
    value = sigma.largest / (batch if sigma.batch is None else 1)
    said = "noise of a step outweighs its direction" if value > slope**2 else "a step's direction outweighs its noise"
    symbol, how = f"sigma^2 / {batch}", "one batch, largest of the clients"
    if sigma.batch is not None:
        symbol, how = f"sigma^2 of {batch}", f"batches of {batch} as they are drawn, largest of the clients"
    of_batch = Reading("sigma2_batch", symbol, value, None, None, how, said)
    return [each, of_batch] if sigma.batch is None else [of_batch]


def verdict(readings: Sequence[Reading]) -> str:
    """All of it in a sentence."""
    value = {reading.name: reading.value for reading in readings}
    steep, h = max(value["L_tilde"], value.get("L_tilde_power", 0)), max(value["L_h"], value.get("L_h_power", 0))
    apart = value["zeta"] > value["grad"]
    alike = h < 0.1 * steep
    if apart and alike:
        return "clients disagree on direction (zeta large) but hardly on curvature (L_h small): long local work is safe"
    if apart:
        return "clients disagree on direction and on curvature: long local work drifts; correct it, or keep it short"
    if alike:
        return "clients agree on direction and on curvature: they are nearly one client, and long local work is safe"
    return "clients agree on direction but differ in curvature: local work is limited by L_h"
