"""Which sample a model or a loss fails on, in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from offbeat.errors import OffbeatError, shortened

UNCHECKPOINTED = (
    "torch.utils.checkpoint computes a part of the model once more on the way back, and what it draws there cannot "
    "be keyed: turn checkpointing off (a model of Hugging Face: model.gradient_checkpointing_disable()), or keep draws "
    "out of it. Memory is planned by the engine"
)
Attempt = Callable[[Tensor], Any]  # with a batch of these rows


def failing(rows: Iterable[int], attempt: Attempt, error: Exception) -> int | None:
    """The first row that fails in the same way when the batch is that row and itself once more (one alone has no
    variance); None where no row does, or all of them: then it is not for a sample."""
    first, passes = None, False
    for row in rows:
        try:
            attempt(torch.tensor([row, row]))
            passes = True
        except torch.OutOfMemoryError:
            raise
        except Exception as own:  # whatever a model of one's own raises
            first = row if first is None and type(own) is type(error) else first
        if passes and first is not None:
            return first
    return None


def told(error: Exception) -> str:
    """What an error says, its first line; of one that PyTorch tells in its own terms, what to do."""
    if isinstance(error, CheckpointError):
        return UNCHECKPOINTED
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {shortened(lines[0], 300).rstrip('.')}" if lines else "")


def blamed(where: str, data: str, rows: Iterable[int], attempt: Attempt, error: Exception) -> OffbeatError:
    """The error for a batch on which the model or the loss fails."""
    row = failing(rows, attempt, error)
    which = "" if row is None else f" It is sample {row} of {data}."
    return OffbeatError(f"{where}: the model or the loss fails with {told(error)}.{which}")
