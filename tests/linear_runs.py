"""A small experiment on data drawn here: a linear model, three classes, clients of twenty samples; and a metric."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from offbeat import Experiment, Task, metric


@metric(more_is_better=False)
def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of wrong answers, by hand."""
    assert len(outputs) == len(targets)
    return (outputs.argmax(1) != targets).double().mean()


def small(clients: int = 12, test: bool = True, **options: Any) -> Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(clients * 20, 5, generator=generator)
    y = (x @ torch.randn(5, 3, generator=generator)).argmax(1)
    torch.manual_seed(1)
    shards = [range(20 * i, 20 * i + 20) for i in range(clients)]
    held = (x[:60] + 0.1, y[:60]) if test else None
    return Task(torch.nn.Linear(5, 3), functional.cross_entropy, (x, y), shards, held, **options)


def experiment(task: Task, **options: Any) -> Experiment:
    options = {"evaluate": {"every_commits": 4}, "until": {"commits": 12}, **options}
    method = {"name": "fedbuff", "client_lr": 0.1, "buffer_size": 4}
    return Experiment(method=method, task=task, device="cpu", **options)
