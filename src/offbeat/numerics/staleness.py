"""Staleness functions s(k): how much an update counts that started k versions ago; s(0) = 1.

Constant, polynomial and hinge are those of Xie et al. (2019, section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.config.options import option_problems
from offbeat.errors import ConfigError, unknown


def constant() -> Callable[[Tensor], Tensor]:
    return torch.ones_like


def polynomial(a: float = 0.5) -> Callable[[Tensor], Tensor]:
    """`(k + 1)^-a`; a = 1/2 is FedBuff's choice in Nguyen et al. (2022)."""
    return lambda k: (k + 1) ** -a


def hinge(a: float = 10.0, b: float = 4.0) -> Callable[[Tensor], Tensor]:
    """1 up to b versions, then `1 / (a (k - b) + 1)`."""
    return lambda k: torch.where(k <= b, torch.ones_like(k), 1 / (a * (k - b).clamp(min=0) + 1))


LAWS: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
    "constant": constant, "polynomial": polynomial, "hinge": hinge,
}  # fmt: skip


def staleness(spec: str | Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """From a name, or a table such as `{law = "hinge", a = 10, b = 4}`.

    >>> staleness({"law": "polynomial", "a": 1})(torch.tensor([0.0, 1.0, 3.0]))
    tensor([1.0000, 0.5000, 0.2500])
    """
    options: dict[str, Any] = {"law": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("law", "constant")
    if not isinstance(name, str) or name not in LAWS:
        raise ConfigError([unknown("staleness law", str(name), LAWS)])
    problems = option_problems(f"staleness '{name}'", LAWS[name], options)
    if not problems:
        problems = [f"staleness '{name}': {k} = {v}; it must not be negative" for k, v in options.items() if v < 0]
    if problems:
        raise ConfigError(problems)
    return LAWS[name](**options)
