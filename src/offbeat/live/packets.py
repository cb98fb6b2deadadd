"""What travels as one raw buffer: vectors one after the other, each as its stage encodes it, then single numbers.

Both sides know the layout from the rule, so a buffer has no head of its own and its size is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from mmap import mmap

import numpy as np
import torch
from torch import Tensor

from offbeat.method import Rule, Stage
from offbeat.numerics.vector import FlatModel

Keys = Callable[[int], int]  # the key of the i-th vector


class Layout:
    """Some named vectors of one dimension and, behind them, named numbers."""

    def __init__(
        self, vectors: Sequence[str], numbers: Sequence[str], stage: Stage | None, dimension: int, dtype: torch.dtype
    ) -> None:
        self.vectors, self.numbers, self.stage = tuple(vectors), tuple(numbers), stage
        self.dimension, self.dtype = dimension, dtype

    @cached_property
    def parts(self) -> list[tuple[torch.dtype, int]]:
        """Type and length of each tensor that a vector becomes."""
        if self.stage is None:
            return [(self.dtype, self.dimension)]
        encoded = self.stage.encode(torch.zeros(self.dimension, dtype=self.dtype), 0)
        return [(part.dtype, part.numel()) for part in encoded]

    @cached_property
    def size(self) -> int:
        vector = sum(dtype.itemsize * many for dtype, many in self.parts)
        return vector * len(self.vectors) + 8 * len(self.numbers)

    def pack(self, tensors: Mapping[str, Tensor], key: Keys) -> bytearray:
        """The buffer of these vectors and numbers; `key` says what stages draw by."""
        buffer = bytearray(self.size)
        flat, at = np.frombuffer(buffer, dtype=np.uint8), 0
        for place, name in enumerate(self.vectors):
            vector = tensors[name].detach()
            encoded = (vector,) if self.stage is None else self.stage.encode(vector, key(place))
            for part, (dtype, many) in zip(encoded, self.parts, strict=True):
                raw = part.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
                flat[at : at + dtype.itemsize * many] = raw
                at += len(raw)
        for name in self.numbers:
            flat[at : at + 8] = np.frombuffer(np.float64(float(tensors[name])).tobytes(), dtype=np.uint8)
            at += 8
        return buffer

    def unpack(self, buffer: bytes | bytearray | mmap | np.ndarray, device: torch.device) -> dict[str, Tensor]:
        """What the receiver has of them."""
        raw = torch.frombuffer(bytearray(buffer) if isinstance(buffer, bytes) else buffer, dtype=torch.uint8)
        if raw.numel() != self.size:
            raise ValueError(f"{raw.numel()} bytes instead of {self.size}")
        vectors: dict[str, Tensor] = {}
        at = 0
        for name in self.vectors:
            pieces = []
            for dtype, many in self.parts:
                piece = raw[at : at + dtype.itemsize * many].clone().view(dtype)
                pieces.append(piece.to(device))
                at += dtype.itemsize * many
            vector = pieces[0] if self.stage is None else self.stage.decode(tuple(pieces))
            vectors[name] = vector.to(self.dtype)
        for name in self.numbers:
            vectors[name] = raw[at : at + 8].clone().view(torch.float64)[0].to(self.dtype).to(device)
            at += 8
        return vectors


def broadcast_layout(rule: Rule, model: FlatModel) -> Layout:
    return Layout(rule.broadcasts, (), rule.down, model.dimension, model.dtype)


def update_layout(rule: Rule, model: FlatModel) -> Layout:
    return Layout(rule.local.sends, rule.local.numbers, rule.up, model.dimension, model.dtype)


def prime_layout(rule: Rule, model: FlatModel) -> Layout:
    return Layout(("gradient",), (), rule.up, model.dimension, model.dtype)


def mean_layout(rule: Rule, model: FlatModel) -> Layout:
    return Layout(rule.local.sends, rule.local.numbers, None, model.dimension, model.dtype)


def model_layout(model: FlatModel) -> Layout:
    """What neighbours exchange."""
    return Layout(("model",), (), None, model.dimension, model.dtype)
