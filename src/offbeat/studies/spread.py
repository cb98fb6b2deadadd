"""Runs side by side: the calls of a sweep, each on a worker of a Ray cluster, on one machine or many.

Each call has one core (or one core and one GPU) and computes on one thread, however many workers there are; so a sweep
gives the same bits on one as on eight. A call whose worker dies is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from offbeat.engines.ray_crew import connect, devices, quietly, ray_problems
from offbeat.engines.settings import limit_cores
from offbeat.errors import ConfigError, OffbeatError
from offbeat.runs.progress import Progress

T = TypeVar("T")
TRIES = 3  # of a call whose worker dies


class Call(NamedTuple):
    """What a worker is to call, and the name it goes by."""

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]


def alone(function: Callable[..., T], given: tuple[Any, ...]) -> T:
    """A call on one thread."""
    torch.set_num_threads(1)
    limit_cores(1)
    return function(*given)


@contextmanager
def connected(workers: int, address: str | None = None) -> Iterator[None]:
    """One cluster for several sweeps; one that is started here ends with them."""
    if problems := ray_problems():
        raise ConfigError(problems)
    mine = connect(address, workers)
    import ray

    try:
        yield
    finally:
        if mine:
            with quietly():
                ray.shutdown()


def spread(
    calls: Sequence[Call], workers: int, address: str | None = None, device: str = "cpu", label: str = "sweep"
) -> Iterator[tuple[int, Any]]:
    """The results as they come, each with the place of its call. An error of a call is raised here."""
    with connected(workers, address):
        yield from results_of(calls, workers, device, label)


def results_of(calls: Sequence[Call], workers: int, device: str, label: str) -> Iterator[tuple[int, Any]]:
    import ray

    progress = Progress(label, {})
    room = {"num_cpus": 1, "num_gpus": 1 if device != "cpu" and devices("cuda") else 0}
    remote = ray.remote(alone).options(**room, max_retries=TRIES - 1)
    waiting, running, done = list(enumerate(calls))[::-1], dict[Any, int](), 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place, call = waiting.pop()
                running[remote.remote(call.function, call.given)] = place
            if progress.wanted:
                names = ", ".join(calls[place].name for place in running.values())
                progress.write(f"{label}  {done} of {len(calls)} done  now: {names}")
            ready, _ = ray.wait(list(running), timeout=1.0)
            for ref in ready:
                place = running.pop(ref)
                done += 1
                yield place, result_of(ray, ref, calls[place])
    finally:
        progress.close()
        for ref in running:
            ray.cancel(ref, force=True)


def result_of(ray: Any, ref: Any, call: Call) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, OffbeatError) else error from None
    except ray.exceptions.RayError as error:
        raise OffbeatError(
            f"{call.name}: its worker died {TRIES} times ({type(error).__name__}); if the memory ran out, take fewer "
            "workers. What the others made is kept, and --resume goes on"
        ) from None
