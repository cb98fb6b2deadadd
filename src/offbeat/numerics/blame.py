"""Which sample a model or a loss fails on, in a sentence."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

import offbeat
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


def first_line(error: Exception) -> str:
    """What an error says, its first line; of one that PyTorch tells in its own terms, what to do."""
    if isinstance(error, CheckpointError):
        return UNCHECKPOINTED
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {shortened(lines[0], 300).rstrip('.')}" if lines else "")


REMEDIES = (  # PyTorch's words, what they mean here, and what helps
    ("data-dependent control flow", "it decides by the values of a batch; torch.where in its place could be batched"),
    ("Cannot access data pointer", "it takes numbers out of a tensor (.tolist(), .numpy())"),
    (".item()", "it takes a number out of a tensor (.item(), int(), float())"),
)
HUGGING_FACE = (
    "build a model of Hugging Face with attn_implementation='eager', which does not look at the mask's values"
)


def why_not_batched(error: Exception) -> str:
    """What a model does that the client axis cannot take, where, and what helps, as far as that is known."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    meaning = next((meaning for words, meaning in REMEDIES if words in text), text)
    place = own_place(error)
    advice = f"; {HUGGING_FACE}" if meaning != text and "transformers/" in place else ""
    return meaning + (f" ({place})" if place else "") + advice


def own_place(error: Exception) -> str:
    """The innermost line of code that is neither PyTorch's nor ours: 'folder/file.py:12', or nothing."""
    ours = tuple(f"{Path(module.__file__).parent}{os.sep}" for module in (torch, offbeat) if module.__file__)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if Path(name).is_absolute() and not name.startswith(ours)]
    return "{}/{}:{}".format(*Path(own[-1][0]).parts[-2:], own[-1][1]) if own else ""


def blamed(where: str, data: str, rows: Iterable[int], attempt: Attempt, error: Exception) -> OffbeatError:
    """The error for a batch on which the model or the loss fails."""
    row = failing(rows, attempt, error)
    which = "" if row is None else f" It is sample {row} of {data}."
    return OffbeatError(f"{where}: the model or the loss fails with {first_line(error)}.{which}")
