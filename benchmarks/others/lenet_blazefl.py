"""BlazeFL's part of lenet_protocol.py: its own FedAvg server and trainers (blazefl.contrib), our data and network.

Every client's images lie in a file of their own, as in BlazeFL's benchmark. Threads and the serial trainer keep what
they have read, and processes read it again in each round, because BlazeFL starts new ones for each.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lenet
import torch
import torch.multiprocessing as mp
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch import Tensor, nn


@functools.cache
def stored(path: Path, device: str) -> tuple[Tensor, Tensor]:
    x, y = torch.load(path)
    return x.to(device), y.to(device)


class Network:
    def __init__(self, double: bool) -> None:
        self.double = double

    def select_model(self, model_name: str) -> nn.Module:
        """A client's network: BlazeFL writes the server's parameters into it."""
        return lenet.layers().double() if self.double else lenet.layers()


class Parts:
    """The clients' images, and those of the test set (no client)."""

    def __init__(self, folder: Path, clients: int, device: str, order: str, double: bool) -> None:
        self.folder, self.device, self.order = folder, device, order
        x, y, test_x, test_y = lenet.data("cpu", double)
        for client in range(clients):
            own = lenet.rows(client)
            torch.save((x[own].clone(), y[own].clone()), self.path(client))
        torch.save((test_x.clone(), test_y.clone()), self.path(None))

    def path(self, client: int | None) -> Path:
        return self.folder / f"{'test' if client is None else client}.pt"

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None = None, generator: torch.Generator | None = None
    ) -> lenet.Batches:
        shuffled = cid is not None and self.order == "shuffle"
        return lenet.Batches(*stored(self.path(cid), self.device), generator if shuffled else None)

    def set_dataset(self, type_: str, cid: int | None, dataset: Any) -> None:
        """Nothing changes in training."""


def rounds(count: int, clients: int, device: str, order: str, double: bool, parallel: int, mode: str) -> lenet.Done:
    if mode == "processes":
        mp.set_start_method("spawn")  # as BlazeFL's benchmark does; CUDA needs it
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder), clients, device, order, double)
        common: dict[str, Any] = {
            "model_selector": Network(double),
            "model_name": "lenet",
            "dataset": parts,
            "device": device,
            "num_clients": clients,
            "batch_size": lenet.BATCH,
            "seed": 0,
        }
        server = FedAvgBaseServerHandler(global_round=count, sample_ratio=1.0, **common)
        server.model.load_state_dict(lenet.network(double).state_dict())
        learning = common | {"epochs": lenet.EPOCHS, "lr": lenet.RATE}
        trainer: Any
        if mode == "threads":
            trainer = FedAvgThreadPoolClientTrainer(num_parallels=parallel, **learning)
        elif mode == "processes":
            places = {"share_dir": Path(folder) / "share", "state_dir": Path(folder) / "state"}
            trainer = FedAvgProcessPoolClientTrainer(
                num_parallels=parallel, ipc_mode=IPCMode.SHARED_MEMORY, **places, **learning
            )
        else:
            trainer = FedAvgBaseClientTrainer(**learning)
        laps, loss = [], 0.0
        while not server.if_stop():
            began = time.perf_counter()
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            loss = server.get_summary()["server_loss"]  # evaluates the test set
            laps.append(time.perf_counter() - began)
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    facts = {"blazefl": version("blazefl"), "mode": mode, "parallel": parallel, "interpreter_lock": locked}
    return lenet.Done(laps, server.model.state_dict(), loss, facts)
