"""`offbeat.bench.families`: families of models in waves, against the plain loop, in one run."""

from __future__ import annotations

import gc
import time
import warnings
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offbeat.bench import work
from offbeat.config.choices import Precision
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build_method
from offbeat.records import Begun
from offbeat.tasks.models import build
from offbeat.tasks.task import Task

SAMPLES, STEPS = 40, 20  # of each client


class Family(NamedTuple):
    """A model by name, the shape of one sample, and how many different tokens or classes there are."""

    name: str
    model: str
    shape: tuple[int, ...]
    outputs: int
    options: dict[str, Any] = {}
    tokens: bool = False
    every_place: bool = False  # a target at every place of a sequence

    @property
    def parameters(self) -> int:
        model = build(self.model, self.shape, self.outputs, 0, **self.options)
        return sum(p.numel() for p in model.parameters())


FAMILIES = (
    Family("logistic regression", "logistic", (1, 28, 28), 10),
    Family("MLP 784-200-10", "mlp", (1, 28, 28), 10),
    Family("DLSGD CNN", "dlsgd-cnn", (1, 28, 28), 10),
    Family("1-d convolution, HAR", "har-conv1d", (561,), 6),
    Family("embedding recommender", "recommender", (20,), 2000, tokens=True),
    Family("GRU, 1 x 128", "gru", (40,), 80, tokens=True),
    Family("LSTM, 2 x 256", "char-lstm", (80,), 80, tokens=True),
    Family("GPT, 0.8M", "gpt", (64,), 65, tokens=True, every_place=True),
    Family("ViT, 0.7M", "vit", (3, 32, 32), 10),
    Family("MobileNet-like, 137k", "mobilenet", (3, 32, 32), 10),
    Family("ResNet-18, 0.7M", "resnet18-gn", (3, 32, 32), 10, {"width": 16}),
    Family("ResNet-18, 11M", "resnet18-gn", (3, 32, 32), 10, {"width": 64}),
    Family("transformer, 10M, context 256", "transformer-10m", (256,), 65, tokens=True, every_place=True),
)


def family_task(family: Family, clients: int) -> Task:
    """Random data of the family's form: values do not matter for speed."""
    rng = np.random.default_rng(0)
    count = clients * SAMPLES
    if family.tokens:
        x = torch.from_numpy(rng.integers(0, family.outputs, (count, *family.shape)))
    else:
        x = torch.from_numpy(rng.standard_normal((count, *family.shape), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, family.outputs, (count, *(family.shape if family.every_place else ()))))
    shards = [np.arange(SAMPLES * i, SAMPLES * (i + 1)) for i in range(clients)]
    model = build(family.model, family.shape, family.outputs, 0, **family.options)
    loss = at_every_place if family.every_place else functional.cross_entropy
    return Task(model, loss, (x, y), shards, batch_size=work.BATCH, name=family.name)


def at_every_place(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def measure(family: Family, clients: int, device: torch.device, precision: Precision, quick: bool) -> dict[str, Any]:
    """Client-steps per second of waves and of the plain loop, and seconds before the first wave was done."""
    gc.collect()  # graphs of the family before hold memory
    torch.manual_seed(0)
    task = family_task(family, clients)
    jobs = [Begun(client, 0, 0, STEPS) for client in range(clients)]
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine(build_method({"name": "local-sgd", "local_steps": STEPS}), task, 0, device, precision)
        engine.solve(jobs)
        work.finish(device)
        first = time.perf_counter() - began
        work.warm_up(partial(engine.solve, jobs), device, 1.0 if quick else 4.0)
    few = range(min(clients, 3))
    loop = partial(work.plain_loop, task, few, lambda _: STEPS, device)
    loop()
    plain = wave = float("inf")
    for _ in range(3 if quick else 5):
        plain = min(plain, work.seconds(loop, device))
        wave = min(wave, work.seconds(partial(engine.solve, jobs), device))
    rates = len(few) * STEPS / plain, clients * STEPS / wave
    return {
        "model": family.name, "parameters": family.parameters, "clients": clients, "plain": rates[0], "wave": rates[1],
        "ratio": rates[1] / rates[0], "first wave s": first, "way": engine.solver.rung,
        "notes": sorted({str(note.message).splitlines()[0] for note in said}),
    }  # fmt: skip
