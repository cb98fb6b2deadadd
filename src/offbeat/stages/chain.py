"""Stages one after the other: each encodes the first part of what the one before gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat import keys
from offbeat.method import Stage


@dataclass(frozen=True)
class Chain:
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        return " > ".join(stage.name for stage in self.stages)

    def encode(self, vector: Tensor, key: Tensor | int) -> tuple[Tensor, ...]:
        """The first part of the last stage, its other parts, then those of the stages before it."""
        along: tuple[Tensor, ...] = ()
        for place, stage in enumerate(self.stages):
            vector, *rest = stage.encode(vector, keys.fold(key, place))
            along = (*rest, *along)
        return (vector, *along)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        vector, along = parts[0], parts[1:]
        for stage, many in zip(reversed(self.stages), reversed(self.beside()), strict=True):
            vector, along = stage.decode((vector, *along[:many])), along[many:]
        return vector

    def bytes(self, dimension: int) -> int:
        """Of the last stage, and of what goes along from those before it."""
        vector, along = torch.zeros(dimension), 0
        for stage in self.stages[:-1]:
            vector, *rest = stage.encode(vector, 0)
            along += stage.bytes(dimension) - vector.nbytes if rest else 0
            dimension = vector.shape[0]
        return self.stages[-1].bytes(dimension) + along

    def beside(self) -> list[int]:
        """How many parts of each stage go along."""
        vector, many = torch.zeros(1), []
        for stage in self.stages:
            vector, *rest = stage.encode(vector, 0)
            many.append(len(rest))
        return many
