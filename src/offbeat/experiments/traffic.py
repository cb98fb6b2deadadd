"""What a method sends: bytes of a broadcast and of each update, from the sizes that its vectors really have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.fleets.steps import Fixed, StepPlan
from offbeat.method import Cohort, Rule, Stage


@dataclass(frozen=True)
class Traffic:
    """Asked by the account and the clock."""

    rule: Rule
    samples: Sequence[int]  # of each client
    dimension: int  # numbers in a vector
    vector_bytes: float  # of one that no stage has encoded
    double: bool = False  # its numbers have 8 bytes, not 4

    def encoded(self, stage: Stage | None) -> float:
        """Bytes of one vector; where a paper states them for a plain one, the stage takes the same share of them."""
        if stage is None:
            return self.vector_bytes
        plain, size = self.dimension * (8 if self.double else 4), stage.bytes(self.dimension)
        return float(size) if self.vector_bytes == plain else self.vector_bytes * (size / plain)

    @property
    def down_vector(self) -> float:
        return self.encoded(self.rule.down)

    @property
    def up_vector(self) -> float:
        return self.encoded(self.rule.up)

    @property
    def down(self) -> float:
        """Bytes of one broadcast."""
        rule = self.rule
        vectors = len(rule.broadcasts) if rule.travels is None else rule.travels(self.everyone())[0]
        return float(vectors) * self.down_vector

    @property
    def up(self) -> float | None:
        """Bytes of one update; None where updates differ."""
        rule = self.rule
        if rule.travels is None:
            return len(rule.local.sends) * self.up_vector
        vectors = rule.travels(self.everyone())[1]
        return None if isinstance(vectors, torch.Tensor) else vectors * self.up_vector

    @property
    def up_most(self) -> float:
        """Bytes of the largest update."""
        return len(self.rule.local.sends) * self.up_vector if self.up is None else self.up

    def each_up(self, clients: Sequence[int], steps: Sequence[int]) -> list[float]:
        """Bytes of each update of a cohort."""
        if self.rule.travels is None:
            return [self.up_most] * len(clients)
        vectors = torch.as_tensor(self.rule.travels(self.cohort(clients, steps))[1], dtype=torch.float64)
        sizes: list[float] = (vectors.expand(len(clients)) * self.up_vector).tolist()
        return sizes

    def uploads(self, plan: StepPlan | None) -> float | list[float]:
        """Bytes that the upload of a job takes the time of: one number, or each client's own where updates differ and
        the steps of each client are fixed. Where steps are drawn, nobody knows beforehand: the largest."""
        if self.up is None and (plan is None or isinstance(plan, Fixed)):
            clients = range(len(self.samples))
            return self.each_up(clients, [1] * len(clients) if plan is None else plan.steps)
        return self.up_most

    def everyone(self) -> Cohort:
        return self.cohort(range(len(self.samples)), [1] * len(self.samples))

    def cohort(self, clients: Sequence[int], steps: Sequence[int]) -> Cohort:
        """What a rule can know of a cohort before its updates are there."""
        ones = [1] * len(steps)
        numbers = [[0] * len(steps), steps, [self.samples[client] for client in clients], ones, ones]
        stale, counts, samples, devices, newest = torch.tensor(numbers, dtype=torch.float64)
        whole = (len(self.samples), sum(self.samples), len(self.samples))
        return Cohort(stale, counts, samples, torch.tensor(clients), devices, 0, *whole, 0, {}, newest)
