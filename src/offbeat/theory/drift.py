"""The average drift at a point: rho of (A.1) in the FedAvg paper on heterogeneity (Wang et al. 2022).

rho = |1 / (gamma I) (mean_i x_i^I - x)| after I local steps of rate gamma from x: how far the mean of all clients moves
per step. At an optimum of f it is small where local steps do no harm, however far single clients go.
"""

from __future__ import annotations

from torch import Tensor

from offbeat.theory.curvature import Round
from offbeat.theory.gauge import Gauge


def drift(gauge: Gauge, x: Tensor, steps: int, lr: float) -> float:
    """rho at x, by `steps` local steps of SGD by every client."""
    return float(Round(gauge, x, steps, lr).moved.norm()) / (lr * steps)
