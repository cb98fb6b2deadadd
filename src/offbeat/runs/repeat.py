"""How far a replay ended from the run that it repeats.

Where nothing differs that decides rounding, not one bit may. Elsewhere every sum may be rounded in another way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offbeat.errors import ConfigError, OffbeatError

# Relative norms, elsewhere than where the run was made (docs/design.md, "Between machines", has the figures).
TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "tf32": 1e-1, "bf16": 1e-1}


@dataclass(frozen=True)
class Distance:
    """Between two models: the largest difference of two parameters, and the norm of all against that of the stored."""

    same_bits: bool
    largest: float
    relative: float
    metrics: float  # the largest difference of losses and accuracies at the same commits
    environment: tuple[str, ...]  # what differs between there and here
    tolerance: float  # for `relative`

    @property
    def within(self) -> bool:
        return self.same_bits or self.relative <= self.tolerance

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"within": self.within}

    def __str__(self) -> str:
        where = f"; different here: {'; '.join(self.environment)}" if self.environment else ""
        return (
            f"relative distance {self.relative:.3g} (tolerance {self.tolerance:g}), largest difference "
            f"{self.largest:.3g}, of the metrics {self.metrics:.3g}{where}"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def apart_by(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The difference; a buffer may hold infinities, such as those of a mask."""
    return torch.where(a == b, 0.0, a - b)


def distance(
    model: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], metrics: Sequence[Mapping[str, Any]],
    recorded: Sequence[Mapping[str, Any]], environment: Sequence[str], tolerance: float | None, precision: str,
) -> Distance:  # fmt: skip
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError([f"tolerance = {tolerance}; it must be a number, 0 or more"])
    shapes = [{name: t.shape for name, t in tensors.items()} for tensors in (model, stored)]
    if shapes[0] != shapes[1]:
        raise OffbeatError(f"the stored model holds {shapes[1]}, this one {shapes[0]}; it is another model")
    pairs = [(model[name].double(), stored[name].double()) for name in model]
    moved = math.sqrt(sum(float(apart_by(a, b).square().sum()) for a, b in pairs))
    size = math.sqrt(sum(float(b[b.isfinite()].square().sum()) for _, b in pairs))
    looks = {row["commit"]: row for row in recorded}
    both = [(row, looks[row["commit"]]) for row in metrics if row["commit"] in looks]
    apart = [abs(a[name] - b[name]) for a, b in both for name in ("loss", "accuracy") if None not in (a[name], b[name])]
    return Distance(
        all(torch.equal(bits(model[name]), bits(stored[name])) for name in model),
        max((float(apart_by(a, b).abs().max()) for a, b in pairs if a.numel()), default=0.0),
        moved / size if size else (math.inf if moved else 0.0),
        max(apart, default=0.0),
        tuple(environment),
        tolerance if tolerance is not None else (TOLERANCES[precision] if environment else 0.0),
    )
