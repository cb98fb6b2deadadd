"""What a run shows of its newest version, whoever computes the jobs: metrics, and the model by parameter name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.choices import Precision
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings
from offbeat.numerics.evaluation import Figure
from offbeat.numerics.vector import FlatModel
from offbeat.tasks.looks import Looks


class Shown:
    """An engine has a server, the model that its vectors are of, and what looks at them."""

    server: Server
    flat: FlatModel
    looks: Looks
    settings: Settings
    device: torch.device
    precision: Precision

    @property
    def version(self) -> int:
        return self.server.version

    def evaluate(self) -> dict[str, Any]:
        """The metrics of the newest version."""
        with self.settings, torch.no_grad():
            return self.looks(self.server.state["model"])

    @property
    def figures(self) -> dict[str, Figure]:
        """What each metric is."""
        return self.looks.figures

    def faults(self) -> dict[str, str]:
        """What metrics said that failed."""
        return dict(self.looks.faults.first)

    def client_figures(self) -> dict[str, list[float | None]]:
        """What the last evaluation found of each client."""
        return self.looks.of_clients(len(self.server.sizes))

    def finite(self) -> bool:
        return bool(self.server.state["model"].isfinite().all())

    def model(self) -> dict[str, Tensor]:
        """The newest version by parameter name, as `load_state_dict` takes it; frozen ones too."""
        named = dict(self.flat.module.named_parameters()) | self.flat.views(self.server.state["model"])
        return {name: value.detach().contiguous().clone().cpu() for name, value in named.items()}

    def machine(self) -> dict[str, Any]:
        """What a result says of where it was computed."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "precision": self.precision,
        }
