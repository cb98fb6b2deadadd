"""Captured steps of several inputs, windows, client optimisers and batch normalisation are those of the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat import Task, windows
from offbeat.engines.captured import GraphAdvance
from offbeat.experiments.assemble import build_method
from offbeat.numerics import local
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.wave import Problem, wave
from offbeat.records import Begun
from offbeat.tasks.losses import sequence_cross_entropy
from offbeat.tasks.models import build
from test_batch_norm import start as start_of
from test_batch_norm import task as batch_norm_task
from test_own_data import columns, task

JOBS = [Begun(0, 0, 0, 7), Begun(1, 2, 0, 7), Begun(2, 1, 0, 3)]


def streamed() -> Task:
    x, y = windows(np.random.default_rng(0).integers(0, 7, 500, dtype=np.uint8), 5)
    model = build("gpt", (5,), 7, 0, width=8, layers=1, heads=2)
    return Task(model, sequence_cross_entropy, (x, y), [range(i, len(x), 3) for i in range(3)], batch_size=4)


def imaged() -> Task:
    x, y = torch.randn(30, 6), torch.randint(3, (30,))
    return Task(nn.Linear(6, 3), functional.cross_entropy, (x, y), [range(i, 30, 3) for i in range(3)], batch_size=4)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "several inputs": (lambda: task(columns()), {"momentum": 0.5}),
    "windows": (streamed, {}),
    "adamw": (imaged, {"optimiser": "adamw"}),
    "adamw kept": (imaged, {"optimiser": "adamw", "state": "kept"}),
    "rmsprop": (imaged, {"optimiser": "rmsprop", "momentum": 0.5}),
    "nesterov": (imaged, {"momentum": 0.5, "nesterov": True, "clip": 0.1}),
    "batch norm of batches": (lambda: batch_norm_task("batch"), {}),
    # a bias before the norm has no slope: of what is there by rounding, a smaller eps would make steps
    "batch norm averaged": (lambda: batch_norm_task("averaged"), {"optimiser": "adamw", "eps": 1e-4}),
    "batch norm local": (lambda: batch_norm_task("local"), {"momentum": 0.5}),
}


def problem(name: str) -> Problem:
    make, options = CASES[name]
    given = make()
    model = given.flat_model(torch.float64).to("cuda")
    plain = build_method({"name": "local-sgd"})
    method = replace(plain, what=replace(plain.what, local=local.sgd(0.05, options)))
    ruled = method if model.ruled is None else model.ruled.method(method)
    return Problem(model, given.samples(torch.float64).to("cuda"), ruled.what.local, 7)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_are_the_twins(name: str) -> None:
    p = problem(name)
    start = start_of(p)
    want = reference(p, start, JOBS)
    advance = GraphAdvance()
    advance.worth = 1
    first = None
    for how in (wave(p, start, JOBS), *(wave(p, start, JOBS, advance) for _ in range(3))):
        for key, update in want.updates.items():
            gap = (how.updates[key] - update).double().norm()
            assert float(gap / update.double().norm().clamp(min=1e-300)) < 1e-10
        first = how
    again = wave(p, start, JOBS, advance)
    assert first is not None
    assert torch.equal(again.updates["delta"], first.updates["delta"])
    assert any(size.graphs for size in advance.graphs.values())
