"""How gradients differ at one point: between clients, inside and between clusters, and from sample to sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ConfigError
from offbeat.keys import key, unsigned
from offbeat.theory.gauge import Gauge

BATCHES = 32  # of each client, where no number is given


@dataclass(frozen=True)
class Divergence:
    """At one point, squares: of each client's gradient, of its distance from the mean, and of the mean itself."""

    norms: Tensor  # |grad F_i|^2, [N]
    distances: Tensor  # |grad F_i - grad f|^2, [N]
    mean: float  # |grad f|^2
    inside: tuple[float, ...] = ()  # eps_k^2: mean over a cluster of |grad F_i - grad f_k|^2
    between: float = 0.0  # mean over clusters, by devices, of |grad f_k|^2, less |grad f|^2: eps_g^2 with alpha = 1

    @property
    def zeta2(self) -> float:
        """zeta^2 = max_i |grad F_i - grad f|^2."""
        return float(self.distances.max())

    @property
    def gamma2(self) -> float:
        """gamma^2 (FedBuff), nu^2 (DLSGD): the mean in the place of the largest."""
        return float(self.distances.mean())

    @property
    def dissimilarity2(self) -> float:
        """B^2 (FedaGrac, Assumption 4): max_i |grad F_i|^2 / |grad f|^2."""
        if self.mean <= 1e-20 * float(self.norms.max()) or not self.mean:
            raise ConfigError(
                [
                    "the mean gradient is 0 here, so B = |grad F_i| / |grad f| has no value (Assumption 4 of FedaGrac "
                    "excludes such points); measure at a point that is no optimum"
                ]
            )
        return max(1.0, float(self.norms.max()) / self.mean)


def divergence(gauge: Gauge, x: Tensor, clusters: Sequence[Sequence[int]] = ()) -> Divergence:
    """One look at all clients' gradients, and a second where they do not fit together."""
    sums, norms, kept = torch.zeros_like(x), [], x[None]
    belongs = np.zeros(gauge.clients, dtype=np.int64)
    for number, members in enumerate(clusters):
        belongs[list(members)] = number
    owner = torch.from_numpy(belongs).to(x.device)
    of_clusters = x.new_zeros(len(clusters), len(x))
    for clients in gauge.groups():
        kept = gauge.gradients(x, clients)
        norms.append(kept.square().sum(1))
        sums += kept.sum(0)
        if clusters:
            of_clusters.index_add_(0, owner[clients], kept)
    mean = sums / gauge.clients
    fits = gauge.limit >= gauge.clients
    distances = [((kept if fits else gauge.gradients(x, clients)) - mean).square().sum(1) for clients in gauge.groups()]
    every, slope = torch.cat(norms), float(mean.square().sum())
    inside, between = [], -slope
    for number, members in enumerate(clusters):
        centre = float((of_clusters[number] / len(members)).square().sum())
        inside.append(max(0.0, float(every[list(members)].mean()) - centre))
        between += len(members) / gauge.clients * centre
    return Divergence(every, torch.cat(distances), slope, tuple(inside), max(0.0, between) if clusters else 0.0)


@dataclass(frozen=True)
class Noise:
    """sigma^2 of the gradient of one sample, or of a batch of `batch`, about its client's, by client."""

    of_clients: tuple[float, ...]
    errors: tuple[float, ...]  # standard errors; 0 where the whole shard was looked at
    batch: int | None = None  # None: of one sample

    @property
    def largest(self) -> float:
        return max(self.of_clients)

    @property
    def mean(self) -> float:
        return float(np.mean(self.of_clients))

    @property
    def error(self) -> float:
        """Of the mean."""
        return float(np.sqrt(np.square(self.errors).sum())) / len(self.errors)


def noise(gauge: Gauge, x: Tensor, most: int | None = 32, batch: int | None = None) -> Noise:
    """sigma_i^2 = E |grad loss(x; sample) - grad F_i(x)|^2 over a client's samples, at most so many of them.

    A batch of b independent samples has sigma^2 / b (DLSGD's and FedBuff's sigma-hat), where its loss is the mean of
    the losses of its samples. Where it is not, the noise is that of batches of `batch`, drawn with replacement."""
    lonely = [client for client, size in enumerate(gauge.whole.sizes) if size < 2]
    if lonely:
        more = f" and {len(lonely) - 1} more" if lonely[1:] else ""
        raise ConfigError(
            [
                f"client {lonely[0]}{more} has one sample: the noise of its gradients cannot be measured; leave the "
                "noise out, or give such clients more samples"
            ]
        )
    if not gauge.of_samples:
        return noise_of_batches(gauge, x, most or BATCHES, batch)
    variances, errors = [], []
    for clients in gauge.groups():
        centres = gauge.gradients(x, clients)
        rows = [sampled(gauge, client, most) for client in clients.tolist()]
        counts = [len(mine) for mine in rows]
        place = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(x.device)
        squares = []
        for whose, part in zip(torch.split(place, gauge.limit), torch.split(torch.cat(rows), gauge.limit), strict=True):
            squares.append((gauge.single(x, clients[whose], part) - centres[whose]).square().sum(1))
        for client, every in zip(clients.tolist(), torch.split(torch.cat(squares).double(), counts), strict=True):
            looked, shard = gauge.whole.sizes[client], gauge.samples.sizes[client]
            unbiased = 1.0 if looked == shard else looked / (looked - 1)  # the centre is a mean of what was looked at
            variances.append(unbiased * float(every.mean()))
            errors.append(0.0 if len(every) == shard else float(every.std() / len(every) ** 0.5))
    return Noise(tuple(variances), tuple(errors))


def noise_of_batches(gauge: Gauge, x: Tensor, many: int, batch: int | None) -> Noise:
    """Return E |grad of a batch - grad F_i|^2 of each client, from so many batches."""
    if batch is None:
        raise ConfigError(
            [
                "the loss of a batch is not the mean of the losses of its samples (weights of classes, ignored labels, "
                "a loss over the batch), so the noise of one sample says nothing of batches; give a batch_size"
            ]
        )
    variances, errors = [], []
    for clients in gauge.groups():
        centres, who = gauge.gradients(x, clients), clients.tolist()
        rows = torch.stack([drawn(gauge, client, many, batch) for client in who], dim=1)
        squares = [(gauge.batches(x, clients, part, k) - centres).square().sum(1) for k, part in enumerate(rows)]
        for client, every in zip(who, torch.stack(squares, dim=1).double(), strict=True):
            looked, shard = gauge.whole.sizes[client], gauge.samples.sizes[client]
            variances.append((1.0 if looked == shard else looked / (looked - 1)) * float(every.mean()))
            errors.append(float(every.std() / many**0.5) if many > 1 else math.inf)
    return Noise(tuple(variances), tuple(errors), batch)


def drawn(gauge: Gauge, client: int, many: int, batch: int) -> Tensor:
    """Return rows `[many, batch]` of batches of a client, drawn with replacement."""
    first, size = int(gauge.whole.first[client]), gauge.whole.sizes[client]
    rng = np.random.default_rng(unsigned(key(gauge.seed, "noise", client)))
    rows = gauge.whole.order[first : first + size]
    return rows[torch.from_numpy(rng.integers(0, size, (many, batch))).to(rows.device)]


def sampled(gauge: Gauge, client: int, most: int | None) -> Tensor:
    """Rows of some of a client's samples, or of all."""
    first, size = int(gauge.whole.first[client]), gauge.whole.sizes[client]
    rows = gauge.whole.order[first : first + size]
    if most is None or size <= most:
        return rows
    rng = np.random.default_rng(unsigned(key(gauge.seed, "noise", client)))
    chosen = rng.choice(size, most, replace=False)
    return rows[torch.from_numpy(np.sort(chosen)).to(rows.device)]
