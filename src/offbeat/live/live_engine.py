"""The engine of a live run: commits are made here, and jobs elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.engines.engine import pick_device
from offbeat.engines.newest import Newest
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings, cores
from offbeat.experiments.assemble import Built
from offbeat.tasks.looks import Looks


class LiveEngine(Newest):
    """What a run's loop asks of whoever makes the commits."""

    def __init__(self, built: Built) -> None:
        experiment = built.experiment
        self.precision, self.device = experiment.precision, pick_device(experiment.device)
        self.settings = Settings(self.precision, self.device, cores())
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        self.flat = built.task.flat_model(dtype, self.precision == "bf16").to(self.device)
        sizes = [len(shard) for shard in built.task.shards]
        members = None
        if built.hybrid is not None and built.fleet.clusters is not None:
            members = [cluster.members for cluster in built.fleet.clusters.each]
        self.server = Server(built.method, self.flat.initial(), experiment.seed, sizes, members, "host")
        self.looks = Looks(built.task, built.watch, self.flat, built.task.samples(dtype).to(self.device))
        self.updates = 0  # that went into commits

    def report(self) -> dict[str, Any]:
        computed = {"jobs_computed": self.updates, "waves": 0, "mode": "live", "rung": "clients", "notes": []}
        return {**self.machine(), **computed}
