"""The workload of lenet_protocol.py: images, clients, network, one client's training. Needs NumPy and PyTorch only.

L: 100 clients of 500 CIFAR-10 images, two classes each; every client takes part in every round; five local epochs of
batch 50 (50 steps), SGD at rate 0.1; the mean of the models, and the 10,000 test images after each round; 5 rounds.

Facts read in blazefl/blazefl, whose README compares BlazeFL with Flower so (benchmarks/blazefl-case/main.py,
benchmarks/flower-case/pyproject.toml and example/, commits 69180d1 and a6e27cb):
  * convolutions of 6 and 16 channels, 5x5, no padding, each with ReLU and 2x2 max pooling; dense 120, 84, 10: 62,006
    parameters, the network of PyTorch's CIFAR-10 tutorial;
  * 200 shards sorted by class, two for each client; batches are shuffled anew in each epoch; no augmentation;
  * the server evaluates the test set after each round, in batches of 50; the clock runs around all five rounds;
  * BlazeFL runs in threads (a Python without the lock) or in processes, started anew by spawning in each round.
Images are random here: the speed is the same, the accuracy means nothing. All simulators get the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLIENTS, IMAGES, TEST, CLASSES = 100, 500, 10_000, 10
BATCH, EPOCHS, RATE, ROUNDS = 50, 5, 0.1, 5
STEPS = EPOCHS * IMAGES // BATCH
PARAMETERS = 62_006


class Done(NamedTuple):
    """What a simulator came to: seconds of each round, the last model, and facts of its own."""

    laps: list[float]
    model: Mapping[str, Tensor]
    test_loss: float
    facts: dict[str, Any] = {}


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def network(double: bool = False) -> nn.Sequential:
    """Version 0, the same for all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return layers().double() if double else layers()


@functools.cache
def data(device: str = "cpu", double: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, client after client, and test images and labels: once a process."""
    rng = np.random.default_rng(0)
    classes = rng.permutation(2 * CLIENTS).reshape(CLIENTS, 2) // (2 * CLIENTS // CLASSES)  # of two shards each
    labels = rng.permuted(np.repeat(classes, IMAGES // 2, axis=1), axis=1).ravel()
    x = rng.standard_normal((CLIENTS * IMAGES + TEST, 3, 32, 32), dtype=np.float32)
    y = np.concatenate([labels, rng.integers(0, CLASSES, TEST)])
    images, targets = (
        torch.from_numpy(x).to(device, torch.float64 if double else torch.float32),
        torch.from_numpy(y).to(device),
    )
    many = CLIENTS * IMAGES
    return images[:many], targets[:many], images[many:], targets[many:]


def rows(client: int) -> slice:
    return slice(client * IMAGES, (client + 1) * IMAGES)


class Batches:
    """An epoch each time it is gone through: shuffled with the generator, or as stored where there is none.

    The images lie on the device already; a DataLoader would bring them one by one.
    """

    dataset = None  # BlazeFL hands it back after training

    def __init__(self, x: Tensor, y: Tensor, generator: torch.Generator | None) -> None:
        self.x, self.y, self.generator = x, y, generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.generator is None:
            yield from zip(self.x.split(BATCH), self.y.split(BATCH), strict=True)
            return
        order = torch.randperm(len(self.y), generator=self.generator).to(self.y.device)
        for chosen in order.split(BATCH):
            yield self.x[chosen], self.y[chosen]


def train(net: nn.Module, batches: Batches) -> None:
    """One client's local epochs."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimiser.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimiser.step()


@torch.no_grad()
def mean_loss(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    parts = [
        functional.cross_entropy(net(a), b, reduction="sum")
        for a, b in zip(x.split(1_000), y.split(1_000), strict=True)
    ]
    return float(torch.stack(parts).sum()) / len(y)


def vector(model: Mapping[str, Tensor]) -> np.ndarray:
    """All parameters in one row."""
    return torch.cat([model[name].detach().cpu().flatten() for name in network().state_dict()]).numpy()
