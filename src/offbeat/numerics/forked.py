"""Generators in another state for a while. Threads of one process share them, so one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch

ELSEWHERE = RLock()  # held while generators are in another state: other threads wait before they look at them


@contextmanager
def forked(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """PyTorch's generators, those of these devices too, are put back afterwards."""
    with ELSEWHERE, torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        yield
