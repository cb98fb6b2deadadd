"""Windows of one long array of tokens: samples that are places in it, and are copied only when a batch is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigError


class Stream:
    """An array of tokens `[n]`, perhaps a memory-mapped file, and one copy of it for each device that asks."""

    def __init__(self, tokens: Any) -> None:
        if isinstance(tokens, np.ndarray) and not tokens.flags.writeable:
            tokens = private(tokens)
        try:
            whole = signed(torch.as_tensor(tokens))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError([f"a stream of tokens must be one array of whole numbers ({error})"]) from None
        if whole.dim() != 1 or whole.is_floating_point() or whole.is_complex() or not len(whole):
            shape = f"{list(whole.shape)} of type {whole.dtype}"
            raise ConfigError([f"a stream of tokens must be one line of whole numbers, and not empty; it is {shape}"])
        self.copies = {whole.device: whole}
        self.least, self.most = int(whole.min()), int(whole.max())

    def on(self, device: torch.device) -> Tensor:
        if device not in self.copies:
            self.copies[device] = next(iter(self.copies.values())).to(device)
        return self.copies[device]


def signed(values: Tensor) -> Tensor:
    """Unsigned whole numbers of several bytes as int64: PyTorch indexes and compares few of their types."""
    if values.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        return values
    whole = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((whole < 0).any()):
        raise ConfigError(["whole numbers of type uint64 must be below 2**63, and some are larger; give smaller ones"])
    return whole


def private(tokens: np.ndarray) -> np.ndarray:
    """An array that may be written to, as PyTorch wants it, though nobody does: of a mapped file the same pages."""
    if not isinstance(tokens, np.memmap) or tokens.filename is None or not tokens.flags.c_contiguous:
        return tokens.copy()
    return np.memmap(tokens.filename, tokens.dtype, "c", tokens.offset, tokens.shape)


@dataclass(frozen=True, eq=False)
class Windows:
    """Sample r is `length` tokens from place `start[r] + offset` on, as int64; a `length` of None is one token alone.

    It is indexed as a tensor `[samples, length]` is, by rows.

    >>> Windows(Stream(np.arange(9, dtype=np.uint8)), torch.tensor([0, 4]), 3)[1]
    tensor([4, 5, 6])
    """

    stream: Stream
    start: Tensor  # [samples], int64
    length: int | None
    offset: int = 0

    def __getitem__(self, rows: Any) -> Tensor:
        place = self.start[rows] + self.offset
        if self.length is not None:
            place = place[..., None] + torch.arange(self.length, device=place.device)
        return self.stream.on(place.device)[place].long()

    def clear_of(self, rows: Any) -> np.ndarray:
        """Return for each window whether none of its tokens, `[start, start + length)`, is in one of these windows.
        Then no token that follows one of its own, as a target, follows one of theirs, either.

        >>> Windows(Stream(np.arange(9)), torch.tensor([0, 2, 4, 6]), 3).clear_of([0])
        array([False, False,  True,  True])
        """
        starts, length = self.start.cpu().numpy(), self.length or 1
        change = np.zeros(2 + int(starts.max()) + length, np.int64)  # windows that begin less those that end
        np.add.at(change, starts[rows], 1)
        np.subtract.at(change, starts[rows] + length, 1)
        before = np.concatenate([[0], np.cumsum(np.cumsum(change) > 0)])  # shared tokens in front of each place
        clear: np.ndarray = before[starts + length] == before[starts]
        return clear

    def __len__(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.start), *(() if self.length is None else (self.length,))))

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def device(self) -> torch.device:
        return self.start.device

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return False

    def to(self, device: torch.device | str) -> Windows:
        start = self.start.to(device)
        self.stream.on(start.device)  # now, and not inside a graph that is being captured
        return replace(self, start=start)


def windows(
    tokens: Any, length: int, starts: Any = None, stride: int | None = None, predict: str = "all"
) -> tuple[Windows, Windows]:
    """`(x, y)` of a task that predicts the next token: x the windows of `length`, y the tokens one place further on, or
    (`predict` "last") the one that follows. They begin at `starts`, or at every `stride`-th place (None: one behind the
    other). Nothing is copied; `tokens` may be a memory-mapped array.
    """
    stream = tokens if isinstance(tokens, Stream) else Stream(tokens)
    many = len(next(iter(stream.copies.values())))
    if length < 1 or length >= many:
        raise ConfigError([f"windows of length {length} over {many} tokens; give at least 1 and fewer than there are"])
    if predict not in ("all", "last"):
        raise ConfigError([f"predict = '{predict}'; it is 'all' or 'last'"])
    if starts is None:
        starts = np.arange(0, many - length, stride or length)
    start = torch.as_tensor(np.asarray(starts, dtype=np.int64))
    if len(start) and (int(start.min()) < 0 or int(start.max()) + length >= many):
        worst = int(start.max()) if int(start.min()) >= 0 else int(start.min())
        raise ConfigError(
            [f"a window of length {length} from place {worst} on leaves {many} tokens; give 0..{many - length - 1}"]
        )
    last = Windows(stream, start, None, length)
    return Windows(stream, start, length), last if predict == "last" else Windows(stream, start, length, 1)
