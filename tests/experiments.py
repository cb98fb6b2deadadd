"""Random experiments, and the law on bits that each of them must keep: methods x fleets x tasks x options."""

from __future__ import annotations

import hashlib
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from offbeat import Experiment, Task, replay, resume, run
from stopped_runs import killed_after

CLIENTS = 12
CLUSTERED = ("async-hl-sgd", "gossip-pga", "gossip-sgd", "hierarchical-local-sgd", "hl-sgd")
METHODS: dict[str, list[dict[str, Any]]] = {
    "minibatch-sgd": [{"n": 4}, {}],
    "local-sgd": [{"n": 4}, {"n": 5, "over_selection": 2}, {"weights": "size", "server_optimiser": "adam"}],
    "asysg": [{"n": 3}],
    "fedasync": [{}, {"proximal": 0.1}],
    "fedbuff": [
        {"buffer_size": 3},
        {"buffer_size": 2, "concurrency": 7},
        {"buffer_size": 4, "staleness": "polynomial"},
    ],
    "dlsgd-homo": [{"n": 3}, {"n": 2, "overlap": False}],
    "dlsgd-hetero": [{"n": 3}, {"n": 5, "client_options": {"momentum": 0.9}}],
    "fedprox": [{"n": 4, "proximal": 0.2}],
    "fednova": [{"n": 4}, {"momentum": 0.5}],
    "scaffold": [{"n": 4}, {"option": "I"}],
    "fedlin": [{"n": 5}],
    "fedagrac": [{}, {"n": 5}],
    "fedagrac-avg": [{}],
    "fedagrac-first": [{"start": "zeros"}],
    "fedagrac-reverse": [{}],
    "hl-sgd": [{"p": 0.5, "gossip_every": 2}],
    "gossip-sgd": [{}],
    "gossip-pga": [{"gossip_rounds": 2}],
    "hierarchical-local-sgd": [{"gossip_every": 2}],
    "async-hl-sgd": [{"buffer_size": 2, "gossip_every": 2}],
}
FLEETS: list[dict[str, Any]] = [{"name": "straggling"}, {"name": "uniform"}, {"name": "equal"}]


def drawn(number: int, device: str = "cpu") -> Experiment:
    """The experiment of this number."""
    rng = random.Random(number)
    name = sorted(METHODS)[number % len(METHODS)]
    method = {"name": name, "client_lr": 0.05, **rng.choice(METHODS[name])}
    if name in ("minibatch-sgd", "asysg"):
        method["server_lr"] = method.pop("client_lr")
    fleet = dict(rng.choice(FLEETS))
    if name in CLUSTERED:
        fleet["clusters"] = {"sizes": [CLIENTS] if name == "gossip-sgd" else [5, 3, 4]}
    elif name not in ("minibatch-sgd", "asysg"):
        method["local_steps"] = rng.choice([1, 3, 7])
    if rng.random() < 0.3 and name in ("fedbuff", "dlsgd-homo", "local-sgd"):
        jitter = {"jitter": {"law": "lognormal", "median": 1.0, "sigma": 0.2}}
        fleet |= {"sigma": 0.2} if fleet["name"] == "straggling" else jitter
    if name in CLUSTERED:
        method["local_steps"] = rng.choice([2, 4])
    return Experiment(
        method=method, task=task(rng), fleet=fleet, seed=rng.randrange(2**40), device=device,
        precision=rng.choice(["float32", "float32", "float64"]), until={"commits": rng.choice([5, 9, 14])},
        evaluate={"every_commits": 3}, checkpoint_seconds=rng.choice([1e-9, 60.0]),
        memory_gib=rng.choice([None, None, 0.001]),
    )  # fmt: skip


def short(number: int) -> Experiment:
    """The same with so few commits that the law can be asked often; every part of it still has one to be cut at."""
    return replace(drawn(number), until={"commits": 4})


def task(rng: random.Random) -> Task:
    torch.manual_seed(rng.randrange(1000))
    data = np.random.default_rng(rng.randrange(1000))
    y = torch.from_numpy(data.integers(0, 4, CLIENTS * 16))
    kind = rng.choice(["cnn", "cnn", "mlp", "linear", "wide"])
    if kind == "cnn":
        x = torch.from_numpy(data.standard_normal((CLIENTS * 16, 2, 9, 9), dtype=np.float32))
        layers: list[nn.Module] = [nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 2)]
        layers += [nn.GroupNorm(2, 6), nn.Flatten(), nn.Dropout(0.2), nn.Linear(54, 4)]
    else:
        x = torch.from_numpy(data.standard_normal((CLIENTS * 16, 20), dtype=np.float32))
        width = 200 if kind == "wide" else 24
        layers = [nn.Linear(20, 4)] if kind == "linear" else [nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width)]
        layers += [] if kind == "linear" else [nn.GELU(), nn.Linear(width, 4)]
    batch, sampling = rng.choice([(4, "replacement"), (5, "shuffle"), (None, "replacement")])
    sizes = [16] * CLIENTS if batch or rng.random() < 0.5 else [16 - (i % 3) * 4 for i in range(CLIENTS)]
    shards = [range(16 * i, 16 * i + size) for i, size in enumerate(sizes)]
    return Task(nn.Sequential(*layers), functional.cross_entropy, (x, y), shards, batch_size=batch, sampling=sampling)


def digest(model: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(model):
        whole.update(name.encode() + model[name].contiguous().numpy().tobytes())
    return whole.hexdigest()[:16]


def ends_at(experiment: Experiment, out: Path) -> str:
    """The digest of the model of a straight run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return digest(run(experiment, out).model)


def keeps_the_law(experiment: Experiment, out: Path, number: int) -> str:
    """Run twice = killed and resumed = extended = replayed; the digest of the model."""
    rng = random.Random(number + 1)
    own = {"task": experiment.task}
    commits = int(experiment.until["commits"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight = run(experiment, out / "straight")
        want, trace = digest(straight.model), (out / "straight" / "trace.parquet").read_bytes()
        seen = {"again": digest(run(experiment, out / "again").model)}
        killed_after(rng.randrange(1, commits), experiment, out / "killed")
        seen["resumed"] = digest(resume(out / "killed", **own).model)
        run(replace(experiment, until={"commits": rng.randrange(1, commits)}), out / "short")
        seen["extended"] = digest(resume(out / "short", until={"commits": commits}, **own).model)
        seen["replayed"] = digest(replay(out / "straight", **own).model)
    for name, found in seen.items():
        assert found == want, f"experiment {number} ({experiment.method}): {name} differs"
    for name in ("again", "killed", "short"):
        assert (out / name / "trace.parquet").read_bytes() == trace, f"experiment {number}: the trace of {name} differs"
    return want
