"""The work that is timed: tasks on random numbers (values do not matter for speed), and PyTorch's plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from offbeat.tasks.models import build
from offbeat.tasks.task import Task

SHAPE, BATCH = (1, 28, 28), 10
MODELS = {"logistic": "LR", "mlp": "MLP", "dlsgd-cnn": "CNN"}

# The protocol that pfl-research published for its speed (Granqvist et al., 2024): CIFAR-10, iid.
USERS, IMAGES, COHORT, RATE, LOOK = 1000, 50, 50, 0.1, 10  # and 1,500 rounds, which are timed one by one


def small_task(model: str, clients: int) -> Task:
    """Sixty random 28x28 images for each client."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((clients * 60, *SHAPE), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, clients * 60))
    shards = [np.arange(60 * i, 60 * (i + 1)) for i in range(clients)]
    return Task(build(model, SHAPE, 10, 0), functional.cross_entropy, (x, y), shards, batch_size=BATCH, name=model)


def shares(unequal: bool) -> list[int]:
    """Images of each user: 50, or 10 and a share by a log-normal law (sigma 1) of what is left."""
    if not unequal:
        return [IMAGES] * USERS
    weights = np.random.default_rng(0).lognormal(0.0, 1.0, USERS)
    free = USERS * (IMAGES - 10)
    ends = np.floor(np.cumsum(weights) / weights.sum() * free + 0.5).astype(int)
    return [int(n) for n in 10 + np.diff(ends, prepend=0)]


def protocol_task(unequal: bool) -> Task:
    """The protocol's users and network, on random images."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((USERS * IMAGES + 10_000, 3, 32, 32), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, len(x)))
    ends = np.cumsum(shares(unequal))
    shards = [np.arange(end - size, end) for end, size in zip(ends, shares(unequal), strict=True)]
    test = (x[USERS * IMAGES :], y[USERS * IMAGES :])
    data = (x[: USERS * IMAGES], y[: USERS * IMAGES])
    model = build("pfl-cnn", (3, 32, 32), 10, 0)
    return Task(
        model,
        functional.cross_entropy,
        data,
        shards,
        test=test,
        batch_size=BATCH,
        sampling="shuffle",
        name="pfl protocol",
    )


def plain_loop(task: Task, clients: Sequence[int], steps: Callable[[int], int], device: torch.device) -> None:
    """What one would write without this package: a module, an optimiser, one client after the other."""
    rows = torch.cat([torch.as_tensor(task.shards[client]) for client in clients])
    x, y = (t[rows].to(device) for t in task.training)  # what these clients hold
    shards = torch.split(torch.arange(len(rows), device=device), [len(task.shards[client]) for client in clients])
    model = task.model.to(device).train()
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    for client, shard in zip(clients, shards, strict=True):
        model.load_state_dict(begin)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps(client)):
            rows = shard[torch.randint(len(shard), (BATCH,), device=device)]
            optimiser.zero_grad()
            task.loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    model.load_state_dict(begin)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one go, the device's included."""
    finish(device)
    began = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - began


def warm_up(job: Callable[[], Any], device: torch.device, least: float) -> None:
    """Until everything is compiled, captured or traced: some goes, and some seconds, but no more than half a minute."""
    began, goes = time.perf_counter(), 0
    while (goes < 16 or time.perf_counter() - began < least) and time.perf_counter() - began < 30:
        job()
        finish(device)
        goes += 1


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Floating-point operations of a step's products on a batch, and numbers in its activations."""
    products = outputs = 0.0
    first = True

    def count(layer: nn.Module, _args: Any, out: torch.Tensor) -> None:
        nonlocal products, outputs, first
        outputs += 0 if isinstance(layer, nn.Flatten) else out.numel()
        if isinstance(layer, nn.Conv2d | nn.Linear):
            each = layer.weight[0].numel()  # multiply-adds for one output
            passes = 2 if first else 3  # forwards, weights, and inputs but for the first layer
            products += 2.0 * passes * each * out.numel()
            first = False

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if not list(layer.children())]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return products, outputs
