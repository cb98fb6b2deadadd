"""Numbers in two bytes: rounded to the nearest, so nothing is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rounded:
    """Each number in a shorter float type."""

    name: str
    dtype: torch.dtype

    def encode(self, vector: Tensor, key: Tensor | int) -> tuple[Tensor, ...]:
        return (vector.to(self.dtype),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0].float()

    def bytes(self, dimension: int) -> int:
        return dimension * self.dtype.itemsize


def float16() -> Rounded:
    """11 bits of precision; numbers beyond 65504 become infinite, which ends a run with a sentence."""
    return Rounded("float16", torch.float16)


def bfloat16() -> Rounded:
    """8 bits of precision, the range of float32."""
    return Rounded("bfloat16", torch.bfloat16)
