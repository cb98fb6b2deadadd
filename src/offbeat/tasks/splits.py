"""Splits: who holds which training samples.

Each split is a function `(y, clients, seed, owners, **options)` and gives one array of sample indices per client,
in rising order, or class after class where `order` is "classes" (it matters to `sampling = "in-order"`). No sample is
given twice (but by "shared"), no client is left empty, and the same arguments give the same shards.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from offbeat.errors import ConfigError, unknown

Indices: TypeAlias = npt.NDArray[np.int64]
Owners: TypeAlias = npt.NDArray[Any] | None
Labels: TypeAlias = npt.NDArray[Any]
Fewer: TypeAlias = Literal["first", "drawn", "grouped"]
Order: TypeAlias = Literal["rows", "classes"]

IID, CLASSES, DIRICHLET, SINGLE_LABEL, SHARDS, NATURAL = range(6)  # purposes: two splits of one seed share no draw


def iid(y: Labels, clients: int, seed: int, owners: Owners = None) -> list[Indices]:
    """Random parts of all samples; sizes differ by at most one."""
    rng = _generator_of(y, clients, seed, IID)
    return _sorted(np.array_split(rng.permutation(len(y)), clients))


def shared(y: Labels, clients: int, seed: int, owners: Owners = None) -> list[Indices]:
    """Every client reads from the whole data set: one shared memory (DLSGD, section 2.1)."""
    _generator_of(y, clients, seed, IID)
    return [np.arange(len(y), dtype=np.int64)] * clients


def classes(
    y: Labels, clients: int, seed: int, owners: Owners = None, per_client: int = 2,
    deal: Literal["even", "random"] = "even", order: Order = "rows",
) -> list[Indices]:  # fmt: skip
    """Each client holds exactly `per_client` random classes; a class is divided evenly over its holders.

    Clients draw one after the other among the classes with the fewest holders, so that the numbers of holders differ
    by at most one and every class is held as soon as clients * per_client reaches the number of classes; with `deal`
    "random" every client draws among all classes alike. All samples are used, but for those of a class that nobody
    holds.
    """
    rng = _generator_of(y, clients, seed, CLASSES)
    members = _by_class(y, "classes")
    _at_least_one("per_client", per_client)
    if per_client > (known := len(members)):
        raise ConfigError([f"per_client is {per_client}, but the data has {known} classes; ask for {known} at most."])
    shards: list[list[Indices]] = [[] for _ in range(clients)]
    for indices, holders in zip(members, _deal(rng, known, clients, per_client, deal), strict=True):
        if len(indices) < len(holders):
            raise ConfigError(
                [
                    f"{len(holders)} clients should share the {len(indices)} samples of class {y[indices[0]]}; "
                    "take fewer clients or a smaller per_client."
                ]
            )
        smallest_first = sorted(holders, key=lambda client: sum(map(len, shards[client])))  # they get the odd samples
        parts = np.array_split(rng.permutation(indices), len(holders)) if holders else []
        for client, part in zip(smallest_first, parts, strict=True):
            shards[client].append(part)
    return _arranged([np.concatenate(parts) for parts in shards], y, order)


def _deal(rng: np.random.Generator, known: int, clients: int, per_client: int, deal: str) -> list[list[int]]:
    """The clients that hold each of the `known` classes."""
    holders: list[list[int]] = [[] for _ in range(known)]
    for client in range(clients):
        random_ties = rng.permutation(known)
        line = sorted(random_ties, key=lambda c: len(holders[c])) if deal == "even" else random_ties
        for c in line[:per_client]:
            holders[c].append(client)
    return holders


def dirichlet(
    y: Labels, clients: int, seed: int, owners: Owners = None, alpha: float = 0.3, minimum: int = 1,
    order: Order = "rows",
) -> list[Indices]:  # fmt: skip
    """Each class is divided in proportions p ~ Dirichlet(alpha, ..., alpha) over the clients; all samples are used.

    A client with fewer than `minimum` samples then gets random ones of the client that is the largest at that moment.
    """
    rng = _generator_of(y, clients, seed, DIRICHLET)
    members = _by_class(y, "dirichlet")
    if not (_real(alpha) and 0 < alpha < math.inf):
        raise ConfigError([f"alpha is {alpha}; give a positive number (small: few classes per client, large: iid)."])
    _at_least_one("minimum", minimum)
    if minimum * clients > len(y):
        raise ConfigError(
            [
                f"minimum is {minimum}, but {len(y)} samples give {clients} clients {len(y) // clients} each at most; "
                "take fewer clients or a smaller minimum."
            ]
        )
    parts = []
    for indices in members:
        cuts = np.cumsum(rng.dirichlet(np.full(clients, float(alpha))))[:-1] * len(indices)
        parts.append(np.split(rng.permutation(indices), np.minimum(cuts.round().astype(np.int64), len(indices))))
    shards = [list(rng.permutation(np.concatenate(mine))) for mine in zip(*parts, strict=True)]
    for shard in shards:
        while len(shard) < minimum:
            shard.append(max(shards, key=len).pop())
    return _arranged([np.array(shard) for shard in shards], y, order)


def single_label(y: Labels, clients: int, seed: int, owners: Owners = None, percent: float = 50) -> list[Indices]:
    """`percent` of each client's samples have one label, the rest is drawn uniformly from what remains of all labels.

    Client i's label is the (i mod classes)-th. All clients get the same number of samples: the largest for which every
    label suffices. What is then left over stays unused: fewer than `clients` samples while the labels suffice for all,
    more where `percent` asks for more of a label than there is. (Generalised FedAvg, experiments: "percentage of
    heterogeneous data".)
    """
    rng = _generator_of(y, clients, seed, SINGLE_LABEL)
    if not (_real(percent) and 0 <= percent <= 100):
        raise ConfigError([f"percent is {percent}; give a number from 0 (iid) to 100 (one label per client)."])
    members = [rng.permutation(indices) for indices in _by_class(y, "single-label")]
    holders = np.bincount(np.arange(clients) % len(members), minlength=len(members))
    supply = min(len(indices) // held_by for indices, held_by in zip(members, holders, strict=True) if held_by)
    sizes = (size for size in range(len(y) // clients, 0, -1) if round(size * percent / 100) <= supply)
    size = next(sizes, 0)
    if size == 0:
        raise ConfigError(
            [f"{percent} % of one label for each of {clients} clients is more than the data has; take fewer clients."]
        )
    own = round(size * percent / 100)
    mine = [members[i % len(members)][i // len(members) * own :][:own] for i in range(clients)]
    pool = rng.permutation(np.setdiff1d(np.arange(len(y)), np.concatenate(mine)))
    rest = pool[: clients * (size - own)].reshape(clients, size - own)
    return _sorted([np.concatenate(pair) for pair in zip(mine, rest, strict=True)])


def shards(
    y: Labels, clients: int, seed: int, owners: Owners = None, per_client: int = 2, order: Order = "rows"
) -> list[Indices]:
    """All samples, sorted by label, are cut into clients * per_client equal shards that are dealt at random."""
    rng = _generator_of(y, clients, seed, SHARDS)
    _by_class(y, "shards")
    _at_least_one("per_client", per_client)
    pieces = clients * per_client
    if pieces > len(y):
        raise ConfigError(
            [
                f"{clients} clients with per_client = {per_client} make {pieces} shards of {len(y)} samples, so that "
                "some would be empty; take fewer clients or a smaller per_client."
            ]
        )
    cut = np.array_split(np.argsort(y, kind="stable"), pieces)
    hands = rng.permutation(pieces).reshape(clients, per_client)
    return _arranged([np.concatenate([cut[piece] for piece in hand]) for hand in hands], y, order)


def natural(y: Labels, clients: int, seed: int, owners: Owners = None, fewer: Fewer = "first") -> list[Indices]:
    """One client per owner, in the order of their ids. `fewer` says what clients are when there are fewer of them.

    "first" are the first owners and "drawn" are random ones; the others stay unused. With "grouped" every owner is
    dealt at random to one client, whole; the numbers of owners differ by at most one.
    """
    rng = _generator_of(y, clients, seed, NATURAL)
    if owners is None:
        raise ConfigError(
            ["split 'natural' needs data with an owner for each sample, such as 'har' or 'leaf'; take another split."]
        )
    if len(owners) != len(y):
        raise ConfigError([f"there are {len(owners)} owners for {len(y)} samples; give one owner id per sample."])
    if fewer not in get_args(Fewer):
        raise ConfigError([unknown("fewer", str(fewer), get_args(Fewer))])
    held = _by_owner(owners)
    if clients > len(held):
        raise ConfigError([f"clients is {clients}, but the data has {len(held)} owners; ask for {len(held)} at most."])
    line = np.arange(len(held)) if fewer == "first" else rng.permutation(len(held))
    groups = np.array_split(line, clients) if fewer == "grouped" else [line[i : i + 1] for i in range(clients)]
    return _sorted([np.concatenate([held[owner] for owner in group]) for group in sorted(groups, key=min)])


def _by_owner(owners: npt.NDArray[Any]) -> list[Indices]:
    """The sample indices of each owner, in the order of their ids."""
    _, place, counts = np.unique(owners, return_inverse=True, return_counts=True)
    return np.split(np.argsort(place, kind="stable"), np.cumsum(counts)[:-1])


SPLITS: dict[str, Callable[..., list[Indices]]] = {
    "classes": classes,
    "dirichlet": dirichlet,
    "iid": iid,
    "natural": natural,
    "shards": shards,
    "shared": shared,
    "single-label": single_label,
}


def describe(shards: Sequence[Indices], y: Labels) -> dict[str, float]:
    """Smallest, mean and largest shard, and the mean number of distinct labels in a shard.

    >>> describe([np.array([0, 1]), np.array([2, 3, 4, 5])], np.array([0, 0, 0, 1, 1, 1]))
    {'min': 2, 'mean': 3.0, 'max': 4, 'classes': 1.5}
    """
    sizes = [len(shard) for shard in shards]
    labels = [len(np.unique(y[shard])) for shard in shards]
    return {"min": min(sizes), "mean": float(np.mean(sizes)), "max": max(sizes), "classes": float(np.mean(labels))}


# ---- checks -------------------------------------------------------------------------------------
def _generator_of(y: Labels, clients: int, seed: int, purpose: int) -> np.random.Generator:
    """The generator of a split, once the arguments that all splits have are right."""
    _at_least_one("clients", clients)
    if not _whole(seed) or seed < 0:
        raise ConfigError([f"seed is {seed}; give a whole number of at least 0."])
    if clients > len(y):
        raise ConfigError(
            [f"{clients} clients cannot share {len(y)} samples: some shards would be empty; ask for {len(y)} at most."]
        )
    return np.random.default_rng([seed, purpose])


def _by_class(y: Labels, split: str) -> list[Indices]:
    """The sample indices of each class that occurs."""
    if y.dtype.kind not in "iub" or y.ndim != 1:
        raise ConfigError(
            [f"split '{split}' needs one integer label per sample, y is {y.dtype} {y.shape}; take 'iid'."]
        )
    return [np.flatnonzero(y == label) for label in np.unique(y)]


def _at_least_one(option: str, value: int) -> None:
    if not _whole(value) or value < 1:
        raise ConfigError([f"{option} is {value}; give a whole number of at least 1."])


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _sorted(shards: Sequence[npt.NDArray[Any]]) -> list[Indices]:
    return [np.sort(shard).astype(np.int64) for shard in shards]


def _arranged(shards: Sequence[npt.NDArray[Any]], y: Labels, order: Order) -> list[Indices]:
    """Shards in rising order, or class after class and rising within."""
    if order not in get_args(Order):
        raise ConfigError([unknown("order", str(order), get_args(Order))])
    rising = _sorted(shards)
    return rising if order == "rows" else [shard[np.argsort(y[shard], kind="stable")] for shard in rising]
