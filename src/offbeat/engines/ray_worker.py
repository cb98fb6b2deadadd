"""The actor of Ray: a tile worker whose problem came in a parcel, and whose versions lie in the object store."""

from __future__ import annotations

import copy
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

import ray
import torch

from offbeat.engines.settings import Settings
from offbeat.engines.tile_worker import Spec, TileWorker, array
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.wave import Problem

LARGE = ("x", "y", "order")  # arrays that are placed once for each node


class Parcel(NamedTuple):
    """A `Spec` as it travels: the model as it was given, and the large arrays as references."""

    spec: Spec  # without a problem
    model: Any
    local: Any
    seed: int
    samples: Samples  # without the large arrays
    arrays: Mapping[str, Any]


def parcel(spec: Spec, put: Callable[[Any], Any]) -> Parcel:
    problem = spec.problem
    model, samples = problem.model, problem.samples.to("cpu")
    arrays = {name: [put(array(getattr(samples, name)))] for name in LARGE}
    nothing: dict[str, Any] = dict.fromkeys(LARGE, torch.zeros(0))
    empty = replace(samples, **nothing)
    given = (copy.deepcopy(model.module).cpu(), model.loss, model.dtype, model.rounded)
    return Parcel(spec._replace(problem=None), given, problem.local, problem.seed, empty, arrays)  # type: ignore[arg-type]


class RayWorker(TileWorker):
    """An actor: it is there first, and hears of a run then."""

    settings: Settings | None = None

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def begin(self, given: Parcel) -> tuple[dict[str, Any], dict[str, int]]:
        """Make ready for a run. What the actor's bits rest on, and the sizes of its tiles."""
        if self.settings is not None:
            self.settings.__exit__()
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self.settings = Settings(given.spec.precision, device, 1)
        self.settings.__enter__()
        arrays: dict[str, Any] = {name: shared(ray.get(refs[0])) for name, refs in given.arrays.items()}
        samples = replace(given.samples, **arrays).to(device)
        problem = Problem(FlatModel(*given.model).to(device), samples, given.local, given.seed)
        super().__init__(given.spec._replace(problem=problem))
        facts = {
            **{name: version(name) for name in ("offbeat", "torch", "numpy", "ray")},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "instruction set": torch.backends.cpu.get_cpu_capability(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }
        return facts, self.sizes()

    def fetch(self, handle: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = ray.get(handle[0])
        return found


def shared(values: Any) -> torch.Tensor:
    """An array of the object store, as it lies there: it is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(values)
