"""The client side of flower_protocol.py, in a module of its own.

Ray sends the app to its worker processes again with every message. What is imported by name stays in the worker, so
the images and the network are loaded once a process; had they been defined in the script, they would be rebuilt for
every client.
"""

from __future__ import annotations

import functools

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@functools.cache
def images(model: str, data: str, layout: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    if model in workload.SMALL:
        return tuple(torch.from_numpy(part).to(device) for part in workload.small_data())
    x, y, _, _ = workload.load(data, layout)
    order = workload.shuffled()
    return torch.from_numpy(x[order]).to(device), torch.from_numpy(y[order]).to(device)


@functools.cache
def network(model: str, layout: str, device: str) -> workload.Classifier:
    net = workload.small(model) if model in workload.SMALL else workload.Net(layout)
    return net.to(device)


@functools.cache
def spans(model: str, unequal: bool) -> list[tuple[int, int]]:
    if model in workload.SMALL:
        return [(k * workload.SMALL_IMAGES, (k + 1) * workload.SMALL_IMAGES) for k in range(workload.SMALL_USERS)]
    return workload.bounds(unequal)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    model, layout, device = (str(config[key]) for key in ("model", "layout", "device"))
    x, y = images(model, str(config["data"]), layout, device)
    begin, end = spans(model, bool(config["unequal"]))[int(context.node_config["partition-id"])]
    net = network(model, layout, device)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=workload.RATE)
    for at in range(begin, end, workload.BATCH):
        stop = min(at + workload.BATCH, end)
        optimizer.zero_grad()
        net.loss(x[at:stop], y[at:stop]).backward()
        optimizer.step()
    # Users count equally, whatever they own: FedAvg's weight is 1.
    reply = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=reply, reply_to=message)
