"""One byte for a number, rounded at random so that the mean is right (as in QSGD: Alistarh et al., NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offbeat import keys
from offbeat.errors import ConfigError

LEVELS = 127  # on each side of zero


@dataclass(frozen=True)
class Int8:
    """Blocks of numbers share a scale, the largest of them / 127, in float32; x / scale is rounded up with the
    probability of its fraction, else down."""

    block: int
    name: str = "int8"

    def encode(self, vector: Tensor, key: Tensor | int) -> tuple[Tensor, ...]:
        size = vector.shape[0]
        rows = F.pad(vector, (0, -size % self.block)).reshape(-1, self.block)
        scale = (rows.abs().amax(dim=1) / LEVELS).float()  # NaN and infinity go on into the scale, and are seen
        exact = torch.where(scale[:, None] > 0, rows / scale[:, None], 0.0).reshape(-1)[:size]
        down = exact.floor()
        drawn = keys.word(key, torch.arange(size, device=vector.device)).to(vector.dtype) / 2.0**32
        whole = (down + (drawn < exact - down)).clamp(-LEVELS, LEVELS)  # the scale itself is rounded
        return whole.nan_to_num(0.0).to(torch.int8), scale

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        whole, scale = parts
        size = whole.shape[0]
        rows = F.pad(whole.float(), (0, -size % self.block)).reshape(-1, self.block)
        return (rows * scale[:, None]).reshape(-1)[:size]

    def bytes(self, dimension: int) -> int:
        return dimension + 4 * -(-dimension // self.block)


def int8(block: int = 2048) -> Int8:
    """Every `block` numbers have a scale of their own: 4 bytes more for each block."""
    if block < 1:
        raise ConfigError([f"int8: block = {block}; give 1 or more numbers that share a scale"])
    return Int8(block)
