"""What must hold of every stage. A law gives a sentence on what fails, or None."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.laws.of_methods import touched
from offbeat.laws.worlds import generators
from offbeat.method import Stage, passed

SIZES = (1, 7, 5000)  # numbers in a vector
KEYS = 256  # draws over which a mean is taken


def vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def sizes(stage: Stage) -> str | None:
    """`bytes` is the size of all that `encode` gives."""
    for size in SIZES:
        parts = stage.encode(vector(size), 1)
        if not isinstance(parts, tuple) or not all(isinstance(part, Tensor) for part in parts):
            return f"`encode` gives a {type(parts).__name__}; it must give a tuple of tensors"
        if (said := stage.bytes(size)) != (real := sum(part.nbytes for part in parts)):
            return f"`bytes({size})` is {said}, but the encoded tensors have {real} bytes"
    return None


def near(stage: Stage) -> str | None:
    """What is decoded is a vector as long as the one that was sent, and on average nearer to it than nothing."""
    for size in SIZES:
        sent = vector(size)
        decoded = [stage.decode(stage.encode(sent, key)) for key in range(KEYS)]
        if decoded[0].shape != sent.shape:
            return f"of {size} numbers `decode` gives the shape {tuple(decoded[0].shape)}"
        gap = float((torch.stack(decoded).double().mean(dim=0) - sent).norm() / sent.norm())
        if not gap < 1:
            return f"of {size} numbers the mean over {KEYS} keys lies {gap:.3g} times the vector's length away from it"
    return None


def keyed(stage: Stage) -> str | None:
    """The same vector and key give the same bits, and nothing is drawn but by key."""
    before, sent = generators(), vector(SIZES[-1])
    one, other = (stage.encode(sent, 3) for _ in range(2))
    drawn = [name for name, state in generators().items() if state != before[name]]
    if drawn:
        return f"it draws from the global generator of {' and of '.join(drawn)}; draw by key instead"
    return None if all(map(torch.equal, one, other)) else "the same vector with the same key is encoded in another way"


def batched(stage: Stage) -> str | None:
    """Vectors of many clients, encoded together, come to what each comes to alone."""
    rows, keys = torch.stack([vector(SIZES[1]) * (i + 1) for i in range(3)]), torch.arange(3)
    together = torch.vmap(lambda row, key: passed(stage, row, key))(rows, keys)
    alone = torch.stack([passed(stage, row, key) for row, key in zip(rows, keys, strict=True)])
    return None if torch.equal(together, alone) else "three vectors together are decoded to others than one by one"


def untouched(stage: Stage) -> str | None:
    """What it is given stays as it was."""
    parts, changed = touched(stage.encode, vector(SIZES[1]), 1)
    if changed:
        return "`encode` changes the vector in its place"
    return "`decode` changes the parts in their place" if touched(stage.decode, parts)[1] else None


def not_finite(stage: Stage) -> str | None:
    """A vector with a number that is not finite does not come out finite: the run must see it."""
    for bad in (torch.nan, torch.inf):
        sent = vector(SIZES[1])
        sent[2] = bad
        if passed(stage, sent, 1).isfinite().all():
            return f"of a vector with {bad} all numbers come out finite"
    return None


LAWS: tuple[Callable[[Stage], str | None], ...] = (sizes, near, keyed, batched, untouched, not_finite)
