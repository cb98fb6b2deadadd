"""What a run shows of its newest version, whoever computes the jobs: metrics, and the model by parameter name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offbeat.config.choices import Precision
from offbeat.engines.server import Server
from offbeat.engines.settings import Settings
from offbeat.errors import BadNumbers
from offbeat.numerics.evaluation import Evaluation, Figure
from offbeat.numerics.vector import FlatModel
from offbeat.tasks.looks import Looks


class Newest:
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
            self.flat.use_buffers(self.server.state)
            values = self.looks(self.server.model)
            if not self.version and not math.isfinite(values["loss"]) and self.finite():
                raise BadNumbers(self.first_problem(values["loss"]))
            return values

    def first_problem(self, loss: float) -> str:
        """What is wrong with the first model, which no rate has touched."""
        main = self.looks.evaluations[0]
        row = main.not_finite(self.server.model) if isinstance(main, Evaluation) else None
        which = "" if row is None else f": that of sample {row} by itself is not finite"
        return (
            f"the loss of the first model on {main.data} is {loss}{which}. Nothing has been trained yet: look in "
            "the data and the loss for empty sequences, targets that are all left out, logarithms, roots and quotients"
        )

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
        return bool(self.server.model.isfinite().all())

    def model(self) -> dict[str, Tensor]:
        """The newest version as `load_state_dict` takes it: parameters, frozen ones too and those in several places by
        each of their names, and buffers, but for those that a file of tensors does not take."""
        module, views = self.flat.module, self.flat.views(self.server.model)
        self.flat.use_buffers(self.server.state)
        named = dict(module.named_parameters()) | views
        if self.flat.layout is not None:
            own = self.flat.layout.everywhere(self.flat.buffers(*self.flat.evaluated))
            saved = module.state_dict().keys()
            named |= {name: value for name, value in own.items() if name in saved and not value.is_complex()}
        trained = {id(p): views.get(name, p) for name, p in module.named_parameters()}
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex():
                named.setdefault(name, trained.get(id(value), value))
        return {name: value.detach().contiguous().clone().cpu() for name, value in named.items()}

    def machine(self) -> dict[str, Any]:
        """What a result says of where it was computed."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "precision": self.precision,
        }
