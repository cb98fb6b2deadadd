"""The actor of Ray: a tile worker whose problem came in a parcel, and whose versions lie in the object store."""

from __future__ import annotations

import copy
import io
import pickle
import platform
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import ray
import torch
from ray.cloudpickle import CloudPickler

from offbeat.engines.settings import Settings
from offbeat.engines.tile_worker import Spec, TileWorker, array
from offbeat.numerics.windows import Stream

LARGE = 1 << 16  # bytes of a tensor that is placed once for each node, instead of travelling to each actor


class Parcel(NamedTuple):
    """A `Spec` as it travels: pickled, but for its large tensors, which lie in the object store."""

    content: bytes
    arrays: list[Any]  # references


class Packer(CloudPickler):  # type: ignore[misc]
    """Takes large tensors out of what it pickles, and puts each into the object store once."""

    def __init__(self, file: Any, put: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self.put = put
        self.arrays: list[Any] = []
        self.places: dict[int, int] = {}  # by the tensor's id
        self.kept: list[Any] = []  # so that no id comes twice

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Stream):
            return "stream", self.place(obj, obj.on(torch.device("cpu"))), obj.least, obj.most
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.nbytes >= LARGE:
            return "tensor", self.place(obj, obj)
        return None

    def place(self, obj: Any, values: torch.Tensor) -> int:
        if id(obj) not in self.places:
            self.places[id(obj)] = len(self.arrays)
            self.kept.append(obj)
            self.arrays.append(self.put(array(values)))
        return self.places[id(obj)]


class Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel) -> None:
        super().__init__(io.BytesIO(parcel.content))
        self.arrays = ray.get(parcel.arrays)

    def persistent_load(self, pid: Any) -> Any:
        kind, place, *rest = pid
        values = shared(self.arrays[place])
        if kind == "tensor":
            return values
        stream = object.__new__(Stream)
        stream.copies, (stream.least, stream.most) = {values.device: values}, rest
        return stream


def parcel(spec: Spec, put: Callable[[Any], Any]) -> Parcel:
    problem = spec.problem
    model = copy.copy(problem.model)
    model.module = copy.deepcopy(model.module).cpu()
    if model.ruled is not None:
        model.ruled = copy.deepcopy(model.ruled)
        model.ruled.layout.to("cpu")
    there = problem._replace(model=model, samples=problem.samples.to("cpu"))
    file = io.BytesIO()
    packer = Packer(file, put)
    packer.dump(spec._replace(problem=there))
    return Parcel(file.getvalue(), packer.arrays)


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
        spec: Spec = Unpacker(given).load()
        self.settings = Settings(spec.precision, device, 1)
        self.settings.__enter__()
        there = spec.problem
        problem = there._replace(model=there.model.to(device), samples=there.samples.to(device))
        super().__init__(spec._replace(problem=problem))
        facts = {
            **{name: version(name) for name in ("offbeat", "torch", "numpy", "ray")},
            "python": platform.python_version(),
            "machine": platform.machine(),
            "instruction set": torch.backends.cpu.get_cpu_capability(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }
        return facts, self.sizes()

    def fetch(self, handle: Any) -> Mapping[str, Any]:
        state: Mapping[str, Any] = ray.get(handle[0])
        return state


def shared(values: Any) -> torch.Tensor:
    """An array of the object store, as it lies there: it is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(values)
