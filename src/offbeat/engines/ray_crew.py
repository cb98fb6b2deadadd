"""Workers that are actors of Ray: one for each device, or for each core, on one machine or many.

Actors are asked for at the start; those for which there is no room yet join when there is, such as when a node is
added. For one that is lost another is asked for. The data is placed once, and shared by all actors of a node.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from offbeat.engines.crew import Crew, CrewMaker, Reply
from offbeat.engines.tile_worker import Spec, array
from offbeat.errors import OffbeatError

START = 120.0  # seconds until the first worker must be there


def ray_problems() -> list[str]:
    return [] if find_spec("ray") else ["engine = 'ray', but Ray is not installed; pip install 'offbeat[ray]'"]


def ray_crew(workers: int | None, address: str | None) -> CrewMaker:
    def make(spec: Spec) -> Crew:
        return RayCrew(spec, workers, address)

    return make


@contextmanager
def quietly() -> Iterator[None]:
    """Ray's warnings of its own future are not a user's, and it takes over signals."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def loopback() -> Iterator[None]:
    """Keep Ray from putting the network card's address in the place of the loopback address, as it does on Linux."""
    from ray._private import ray_constants

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[1]
        if before[0] is None:
            del os.environ[name]
        else:
            os.environ[name] = before[0]


def connect(address: str | None, cores: int) -> bool:
    """Be connected to the cluster at an address, or to one that is started here; whether it was not so before."""
    with quietly():
        import ray

        if ray.is_initialized():
            return False
        logging.getLogger("ray").setLevel(logging.ERROR)
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        try:
            answers(address)
            if address is None:
                with loopback():
                    ray.init("local", num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **common)
            else:
                ray.init(address=address, **common)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            where = f"address = '{address}'" if address else "a cluster on this machine"
            raise OffbeatError(
                f"no Ray cluster could be reached by {where} ({reason}). Start one with `ray start --head`, give its "
                "address, or leave address out for one that is started here"
            ) from None
    return True


def answers(address: str | None) -> None:
    """An error where nobody listens: Ray itself would end the process."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        with socket.create_connection((host, int(port)), timeout=10):
            pass


def devices(kind: str) -> int:
    """How many GPUs, or processor cores, the cluster has."""
    import ray

    return int(ray.cluster_resources().get("GPU" if kind == "cuda" else "CPU", 0))


class RayCrew:
    """Actors by number."""

    name = "ray"
    grace = 20.0  # seconds that the others have to come after the first, before work begins without them

    def __init__(self, spec: Spec, workers: int | None, address: str | None) -> None:
        from offbeat.engines.settings import cores

        self.mine = connect(address, max(workers or 0, cores()))
        import ray
        from ray import exceptions

        self.ray, self.exceptions = ray, exceptions
        self.gone = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.WorkerCrashedError)
        self.number, self.closed = 0, False
        self.live: dict[int, Any] = {}
        self.coming: dict[Any, tuple[int, Any]] = {}  # who was asked for and is not there yet, by a reference
        self.tickets: dict[Any, tuple[int, int]] = {}  # references: worker and ticket
        self.asked = 0
        self.facts: dict[str, Any] = {}
        self.sizes: Mapping[str, int] = {}
        self.notes: list[str] = []
        try:
            with quietly():
                actor, self.parcel, room = self.prepare(spec)
            self.actor = ray.remote(actor).options(**room, max_restarts=0, max_task_retries=0)
            for _ in range(workers or max(1, devices("cuda" if "num_gpus" in room else "cpu"))):
                self.hire()
            self.gather()
        except BaseException:
            self.close()
            raise

    def prepare(self, spec: Spec) -> tuple[Any, Any, dict[str, float]]:
        """The class of the actors, what they begin with, and the room that each takes."""
        from offbeat.engines.ray_worker import RayWorker, parcel

        gpu = devices("cuda") and spec.problem.samples.x.device.type == "cuda"
        room = {"num_cpus": 1.0} | ({"num_gpus": 1.0} if gpu else {})
        return RayWorker, parcel(spec, self.put), room

    # ---- people ---------------------------------------------------------------------------------
    def hire(self) -> None:
        self.number += 1
        actor = self.actor.remote()
        self.coming[actor.begin.remote(self.parcel)] = (self.number, actor)

    def gather(self) -> None:
        """Wait for the first worker, and a little for the others."""
        began = time.monotonic()
        while self.coming and (not self.live or time.monotonic() - began < self.grace):
            ready, _ = self.ray.wait(list(self.coming), timeout=0.5)
            for ref in ready:
                self.welcome(ref)
            if not self.live and time.monotonic() - began > START:
                raise OffbeatError(self.crowded())

    def crowded(self) -> str:
        free = {name: n for name, n in self.ray.available_resources().items() if name in ("CPU", "GPU")}
        return (
            f"no worker could be started within {START:.0f} s; the cluster has {free or 'nothing'} free, and a worker "
            "takes one core, or one core and one GPU. End what else runs there, or add a node; `offbeat resume` goes on"
        )

    def welcome(self, ref: Any) -> int | None:
        """Take in a worker that is there; None if it died on the way, or is not of the same kind."""
        number, actor = self.coming.pop(ref)
        try:
            facts, sizes = self.ray.get(ref)
        except self.exceptions.RayTaskError as error:
            raise self.sentence(error) from None
        except self.gone as error:
            cause = getattr(error, "cause", None) or error
            raise OffbeatError(f"a worker could not be started: {str(cause).strip().splitlines()[-1]}") from None
        first = self.facts or facts
        versions = [k for k in ("python", "torch", "numpy", "offbeat", "ray") if first.get(k) != facts.get(k)]
        if versions:
            said = "; ".join(f"{k}: {first.get(k)} on one node, {facts.get(k)} on another" for k in versions)
            self.ray.kill(actor)
            raise OffbeatError(f"the nodes of the cluster differ ({said}); install the same versions on all of them")
        other = [key for key in first if first[key] != facts.get(key)]
        if other:
            warnings.warn(
                f"workers are not of one kind ({', '.join(other)}), so bits depend on who computes what", stacklevel=2
            )
        self.facts, self.sizes = first, self.sizes or sizes
        self.live[number] = actor
        return number

    def workers(self) -> list[int]:
        return sorted(self.live)

    def lose(self, worker: int) -> None:
        actor = self.live.pop(worker, None)
        if actor is not None:
            with suppress(Exception):
                self.ray.kill(actor)
        self.tickets = {ref: each for ref, each in self.tickets.items() if each[0] != worker}
        self.hire()

    # ---- words ----------------------------------------------------------------------------------
    def put(self, value: Any) -> Any:
        try:
            return self.ray.put(value)
        except (self.exceptions.ObjectStoreFullError, self.exceptions.OutOfDiskError) as error:
            raise self.sentence(error) from None

    def share(self, state: Mapping[str, Tensor]) -> Any:
        return [self.put({name: array(t) for name, t in state.items()})]

    def ask(self, worker: int, what: str, *given: Any) -> int:
        self.asked += 1
        actor = self.live.get(worker)
        if actor is None:
            raise OffbeatError(f"worker {worker} is not there any more")
        self.tickets[getattr(actor, what).remote(*given)] = (worker, self.asked)
        return self.asked

    def hear(self) -> Reply | None:
        began = time.monotonic()
        while self.tickets or (self.coming and not self.live):
            if not self.live and time.monotonic() - began > START:
                raise OffbeatError(self.crowded())
            ready, _ = self.ray.wait([*self.coming, *self.tickets], timeout=1.0)  # newcomers first: answers keep coming
            for ref in ready:
                if ref in self.coming:
                    number = self.welcome(ref)
                    if number is not None:
                        return Reply(number)
                    continue
                worker, ticket = self.tickets.pop(ref)
                try:
                    return Reply(worker, ticket, self.ray.get(ref))
                except self.exceptions.RayTaskError as error:
                    raise self.sentence(error) from None
                except self.gone as error:
                    self.lose(worker)
                    return Reply(worker, lost=type(error).__name__)
        return None

    def sentence(self, error: Any) -> BaseException:
        """What a worker or the object store says, in words of ours where we know it."""
        cause = getattr(error, "cause", error)
        if isinstance(cause, self.exceptions.ObjectStoreFullError | self.exceptions.OutOfDiskError):
            return OffbeatError(
                "the object store of a node is full: it holds the data once, the versions in use, and what is under "
                "way. Start nodes with a larger one (`ray start --object-store-memory BYTES`), or take a smaller task"
            )
        if missing := re.search(r"No module named '([\w.]+)'", str(cause)):
            return OffbeatError(
                f"a worker does not find the module '{missing[1]}': code of your own must be on every node, installed "
                "or in a directory of PYTHONPATH there"
            )
        return cause if isinstance(cause, BaseException) else error

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for actor in [*self.live.values(), *(actor for _, actor in self.coming.values())]:
            with suppress(Exception):
                self.ray.kill(actor)
        if self.mine:
            with quietly():
                self.ray.shutdown()
