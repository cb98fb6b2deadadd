"""Flower's part of lenet_protocol.py. Ray's processes import this module by name, so that images and network stay."""

from __future__ import annotations

import functools
import os
import time
from importlib.metadata import version

import lenet
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

client = ClientApp()


@functools.cache
def resident(device: str, double: bool) -> nn.Module:
    return lenet.network(double).to(device)


@client.train()
def train(message: Message, context: Context) -> Message:
    config, number = message.content["config"], int(context.node_config["partition-id"])
    device, double, own = str(config["device"]), bool(config["double"]), lenet.rows(number)
    x, y, _, _ = lenet.data(device, double)
    net = resident(device, double)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    generator = None
    if config["order"] == "shuffle":
        generator = torch.Generator().manual_seed(int(config["server-round"]) * lenet.CLIENTS + number)
    lenet.train(net, lenet.Batches(x[own], y[own], generator))
    metrics = MetricRecord({"num-examples": lenet.IMAGES})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def rounds(count: int, clients: int, device: str, order: str, double: bool, parallel: int) -> lenet.Done:
    """`parallel` processes, each of which trains one client after the other."""
    net = lenet.network(double).to(device)
    _, _, test_x, test_y = lenet.data(device, double)
    stamps: list[float] = []
    losses: list[float] = []
    server = ServerApp()

    def look(number: int, arrays: ArrayRecord) -> MetricRecord:
        """Flower calls this before the first round and after each."""
        net.load_state_dict(arrays.to_torch_state_dict())
        losses.append(lenet.mean_loss(net, test_x, test_y))
        stamps.append(time.perf_counter())
        return MetricRecord({"loss": losses[-1]})

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        everybody = {"fraction_train": 1.0, "min_train_nodes": clients, "min_available_nodes": clients}
        FedAvg(fraction_evaluate=0.0, **everybody).start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=count,
            train_config=ConfigRecord({"device": device, "order": order, "double": double}),
            evaluate_fn=look,
        )

    cuda = device.startswith("cuda")
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": parallel, "num_gpus": int(cuda), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / parallel if cuda else 0.0},
        },
    )
    if len(stamps) != count + 1:
        raise SystemExit(f"Flower ended after {len(stamps) - 1} of {count} rounds; its log says why")
    laps = np.diff(stamps).tolist()
    facts = {"flwr": version("flwr"), "ray": version("ray"), "parallel": parallel, "cores": os.cpu_count()}
    return lenet.Done(laps, net.state_dict(), losses[-1], facts)
