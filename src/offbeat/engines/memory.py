"""What there is of each client between its jobs: one `[clients, d]` matrix for each name.

It lies on the device, in the host's memory or in a memory-mapped file, whichever is the first to have room.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from offbeat.config.choices import Choice
from offbeat.config.room import host_memory as host_memory
from offbeat.errors import ConfigError
from offbeat.method import State

Place = Literal["device", "host", "file"]
SHARE = {"device": 0.25, "host": 0.5, "file": 0.8}  # of what is free there
GIB = 2.0**30


class Memory:
    """Rows of clients by name; reading gives copies on the device."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, torch.dtype]], clients: int, device: torch.device, where: Choice = "auto"
    ) -> None:
        """`shapes` has the width and the type of each vector."""
        self.device = device
        size = sum(clients * width * dtype.itemsize for width, dtype in shapes.values())
        place, problems = chosen_place(size, f"{', '.join(shapes)} of {clients} clients", device, where)
        if problems:
            raise ConfigError(problems)
        self.place = place
        self.held = {name: room((clients, width), dtype, device, place) for name, (width, dtype) in shapes.items()}

    def read(self, names: Sequence[str], clients: Tensor) -> State:
        """Rows of these clients, one for each entry."""
        return {name: self.held[name][clients.to(self.held[name].device)].to(self.device) for name in names}

    def write(self, clients: Tensor, rows: State) -> None:
        for name, new in rows.items():
            held = self.held[name]
            held[clients.to(held.device)] = new.to(held.device)

    def save(self) -> State:
        return {f"memory/{name}": t for name, t in self.held.items()}

    def restore(self, tensors: State) -> None:
        for name, t in self.held.items():
            t.copy_(tensors[f"memory/{name}"])


def chosen_place(size: int, what: str, device: torch.device, where: Choice) -> tuple[Place, list[str]]:
    """Where so many bytes go, or the sentence on why there is no room for them."""
    rooms: dict[Place, float] = {place: SHARE[place] * free(place, device) for place in ("device", "host", "file")}
    order: tuple[Place, ...] = ("device", "host", "file")
    for place in order if where == "auto" else (where,):
        if size <= rooms[place]:
            return place, []
    known = ", ".join(f"{SHARE[place]:.0%} of what is free in {spoken(place)} is {rooms[place] / GIB:.3g} GiB"
                      for place in order)  # fmt: skip
    return "host", [
        f"client_memory = '{where}': {what} take {size / GIB:.3g} GiB; {known}. Choose another place, "
        "point TMPDIR to a larger disk, or take fewer clients, a smaller model or a method without memory"
    ]


def spoken(place: Place) -> str:
    return {"device": "the device's memory", "host": "the host's memory", "file": tempfile.gettempdir()}[place]


def free(place: Place, device: torch.device) -> float:
    """Bytes that are free there now."""
    if place == "device" and device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    if place == "file":
        return float(shutil.disk_usage(tempfile.gettempdir()).free)
    return host_memory()


def room(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, place: Place) -> Tensor:
    """Zeros. A file has no name: it goes with the process, however that ends."""
    if place != "file":
        return torch.zeros(shape, dtype=dtype, device=device if place == "device" else "cpu")
    with tempfile.NamedTemporaryFile(prefix="offbeat-") as file:
        file.truncate(shape[0] * shape[1] * dtype.itemsize)
        flat = torch.from_file(file.name, shared=True, size=shape[0] * shape[1], dtype=dtype)
    return flat.reshape(shape)
