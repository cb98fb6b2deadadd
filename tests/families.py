"""Model families with a width, their data and losses, written from the literature and PyTorch's own documentation.

`FAMILIES` maps a name to a `Family`. A family with `kinks` has points without a derivative (ReLU, maxima, sorting),
near which two correct float32 computations may differ by more than rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

CLASSES = 3
LENGTH = 5  # of sequences
Source = Callable[[int, int, torch.Generator], Any]


class Family(NamedTuple):
    """Model of a width, one source each for inputs and targets, and the mean loss of a batch."""

    make: Callable[[int], nn.Module]
    x: Source
    y: Source
    loss: Callable[[Any, Any], Tensor]
    kinks: bool
    options: Mapping[str, Any]


FAMILIES: dict[str, Family] = {}


def _sizes(shape: tuple[int | str, ...], w: int) -> list[int]:
    return [w if size == "w" else int(size) for size in shape]


def real(*shape: int | str) -> Source:
    return lambda rows, w, generator: torch.randn(rows, *_sizes(shape, w), generator=generator)


def whole(high: int | str, *shape: int | str) -> Source:
    return lambda rows, w, generator: torch.randint(
        0, *_sizes((high,), w), (rows, *_sizes(shape, w)), generator=generator
    )


def several(*sources: Source) -> Source:
    return lambda rows, w, generator: tuple(source(rows, w, generator) for source in sources)


def family(
    x: Source | None = None,
    y: Source | None = None,
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    kinks: bool = False,
    **options: Any,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(make: type[nn.Module]) -> type[nn.Module]:
        FAMILIES[make.__name__] = Family(make, x or real(LENGTH), y or whole(CLASSES), loss, kinks, options)
        return make

    return register


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def with_penalty(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1]


def first_as_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of values that the model computes for each sample."""
    return outputs.mean() + 0.0 * targets.to(outputs.dtype).mean()


TOKENS = whole(11, LENGTH)
NEXT = whole(11, LENGTH)
SEQUENCE = real(LENGTH, 4)
IMAGE = real(3, 8, 8)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


class Net(nn.Module):
    """Module of a width: `build` makes its parts."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.build(w)

    def build(self, w: int) -> None:
        raise NotImplementedError


# ---- parameters as inputs of layers ----------------------------------------------------------------
@family(SEQUENCE)
class Perceiver(Net):
    def build(self, w: int) -> None:
        self.latents = weight(w, w)
        self.q, self.k, self.v = nn.Linear(w, w), nn.Linear(4, w), nn.Linear(4, w)
        self.mix, self.out = nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.softmax(self.q(self.latents) @ self.k(x).mT / 3, -1) @ self.v(x)
        return self.out(torch.tanh(self.mix(found)).mean(1))


@family()
class FlatLatents(Net):
    """A vector of parameters, seen as a matrix, is the input of a layer."""

    def build(self, w: int) -> None:
        self.flat, self.w = nn.Parameter(torch.randn(w * w) / w**0.5), w
        self.inner, self.by, self.out = nn.Linear(w, w), nn.Linear(5, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.inner(self.flat.view(self.w, self.w)))
        return self.out(self.by(x) @ rows)


@family()
class ExpandedLatents(Net):
    def build(self, w: int) -> None:
        self.start = weight(3, w * 32)
        self.inner, self.by, self.out = nn.Linear(w * 32, w, bias=False), nn.Linear(5, 3), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.inner(self.start.expand(len(x), -1, -1)))
        return self.out((self.by(x)[..., None] * rows).sum(1))


@family()
class TransposedSlice(Net):
    def build(self, w: int) -> None:
        self.table = weight(w, 2 * w)
        self.inner, self.by, self.out = nn.Linear(w, 6), nn.Linear(5, w), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.by(x) @ torch.sin(self.inner(self.table[:, ::2].t())))


@family()
class ParameterIsInputAndWeight(Net):
    def build(self, w: int) -> None:
        self.p = weight(w, w)
        self.lin, self.first, self.out = nn.Linear(w, w), nn.Linear(5, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(self.first(x), self.p))
        return self.out(h @ self.lin(self.p) + F.linear(h, self.p.t(), self.lin.bias))


@family()
class WeightOfOneLayerIntoAnother(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)
        self.reader = nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        read = self.reader(self.b.weight)  # a layer reads the weight of another
        return self.out(torch.tanh(self.b(self.a(x))) @ read)


@family(whole("w"))
class Gcn(Net):
    """Two graph convolutions over learned node embeddings; a sample is a node."""

    def build(self, w: int) -> None:
        self.nodes, self.one, self.two = weight(w, w), nn.Linear(w, w), nn.Linear(w, CLASSES)
        links = (torch.rand(w, w) < 4 / w).float()
        links = ((links + links.t() + torch.eye(w)) > 0).float()
        scale = links.sum(1).rsqrt()
        self.register_buffer("links", scale[:, None] * links * scale)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.links @ self.two(torch.tanh(self.links @ self.one(self.nodes))))[ids]


@family(whole("w"))
class Gat(Net):
    def build(self, w: int) -> None:
        self.nodes, self.map, self.out = weight(w, w), nn.Linear(w, w, bias=False), nn.Linear(w, CLASSES)
        self.source, self.target = weight(w, 2), weight(w, 2)
        self.register_buffer("links", (torch.rand(w, w) < 4 / w) | torch.eye(w, dtype=torch.bool))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.map(self.nodes)
        scores = torch.tanh((h @ self.source)[:, None] + (h @ self.target)[None])
        shares = scores.masked_fill(~self.links[..., None], -torch.inf).softmax(1)
        return self.out(torch.einsum("ijh,jd->id", shares, h).tanh())[ids]


@family(whole("w"))
class GraphSage(Net):
    """Messages over a list of edges are added with `index_add`."""

    def build(self, w: int) -> None:
        self.nodes = nn.Embedding(w, w)
        self.own, self.others, self.out = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, CLASSES)
        self.register_buffer("edges", torch.randint(0, w, (2, 4 * w)))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.nodes.weight
        messages = self.others(h[self.edges[0]])
        around = torch.zeros_like(messages[: len(h)]).index_add(0, self.edges[1], messages) / 4
        return self.out(torch.tanh(self.own(h) + around))[ids]


@family(several(real("w", 4), real("w", "w")))
class GraphOfSample(Net):
    """Each sample is a graph with features and links; a learned embedding of each node is added."""

    def build(self, w: int) -> None:
        self.place, self.into = weight(w, w), nn.Linear(4, w)
        self.step, self.out = nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        h = self.into(x) + self.step(self.place)
        for _ in range(2):
            h = torch.tanh(self.step(links.softmax(-1) @ h))
        return self.out(h.mean(1))


@family(several(whole("w"), whole("w")), real(), mse)
class MatrixFactorisation(Net):
    def build(self, w: int) -> None:
        self.users, self.items = weight(w, w), weight(w, w)
        self.user_bias, self.item_bias = nn.Parameter(torch.zeros(w)), nn.Parameter(torch.zeros(w))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users[user] * self.items[item]).sum(-1) + self.user_bias[user] + self.item_bias[item]


@family(several(whole("w"), whole("w")), real(), mse)
class InductiveFactorisation(Net):
    """All scores are a product of mapped tables, from which the samples' are read."""

    def build(self, w: int) -> None:
        self.users, self.items = weight(w, w), weight(w, w)
        self.map = nn.Linear(w, w)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.map(self.users) @ self.items.t() / len(self.users) ** 0.5)[user, item]


@family(several(whole("w"), whole("w")), whole(2), lambda z, t: F.binary_cross_entropy_with_logits(z, t.to(z.dtype)))
class NeuralCollaborativeFiltering(Net):
    def build(self, w: int) -> None:
        self.users, self.items = nn.Embedding(w, w), nn.Embedding(w, w)
        self.mlp = nn.Sequential(nn.Linear(2 * w, w), nn.GELU(), nn.Linear(w, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.users(user), self.items(item)], -1)).squeeze(-1)


@family(real(5), IMAGE, mse)
class StyleGenerator(Net):
    """Images grow from a learned constant, modulated by a style."""

    def build(self, w: int) -> None:
        self.constant, self.style = nn.Parameter(torch.randn(1, w, 8, 8)), nn.Linear(5, w)
        self.conv, self.out = nn.Conv2d(w, 6, 3, padding=1), nn.Conv2d(6, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        styled = self.constant.expand(len(z), -1, -1, -1) * (1 + self.style(z))[..., None, None]
        return self.out(torch.tanh(self.conv(styled)))


@family(real(5), IMAGE, mse)
class ConvolvedConstant(Net):
    """A convolution's input is a parameter itself."""

    def build(self, w: int) -> None:
        self.constant, self.scale = nn.Parameter(torch.randn(1, w, 8, 8) / 3), nn.Linear(5, 3)
        self.conv = nn.Conv2d(w, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.conv(self.constant) * self.scale(z)[..., None, None]


@family(SEQUENCE)
class LearnedFirstState(Net):
    def build(self, w: int) -> None:
        self.first = weight(1, 1, w)
        self.gru, self.out = nn.GRU(4, w, batch_first=True), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x, self.first.expand(1, len(x), -1).contiguous())[1][0])


@family(TOKENS)
class PromptTuning(Net):
    """The backbone is frozen; prompts and the head train."""

    def build(self, w: int) -> None:
        self.table = nn.Embedding(11, w).requires_grad_(False)
        self.block = nn.TransformerEncoderLayer(w, 2, w, dropout=0.0, batch_first=True).requires_grad_(False)
        self.prompts, self.out = weight(w, w), nn.Linear(w, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        prompts = self.prompts.expand(len(ids), -1, -1)
        return self.out(self.block(torch.cat([prompts, self.table(ids)], 1)).mean(1))


@family(IMAGE)
class VisionTransformer(Net):
    def build(self, w: int) -> None:
        self.patches, self.token = nn.Conv2d(3, w, 4, 4), nn.Parameter(torch.zeros(1, 1, w))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, w))
        self.block = nn.TransformerEncoderLayer(
            w, 2, 2 * w, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm, self.out = nn.LayerNorm(w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        return self.out(self.norm(self.block(h))[:, 0])


@family(real("w"))
class MemoryNetwork(Net):
    def build(self, w: int) -> None:
        self.keys, self.values, self.out = weight(w, w), weight(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.softmax(x @ self.keys.t(), -1) @ self.values
        return self.out(x)


@family(SEQUENCE, several(real(4, 2), whole(CLASSES, 4)), lambda z, t: F.mse_loss(z[0], t[0])
        + F.cross_entropy(z[1].flatten(0, 1), t[1].flatten()))  # fmt: skip
class ObjectQueries(Net):
    """Detection with learned queries: boxes and classes."""

    def build(self, w: int) -> None:
        self.into, self.queries = nn.Linear(4, w), weight(4, w)
        self.decoder = nn.TransformerDecoderLayer(w, 2, w, dropout=0.0, activation="gelu", batch_first=True)
        self.boxes, self.classes = nn.Linear(w, 2), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.decoder(self.queries.expand(len(x), -1, -1), self.into(x))
        return self.boxes(h), self.classes(h)


@family(real(5), real(5), mse)
class SoftCodebook(Net):
    def build(self, w: int) -> None:
        self.codes, self.into, self.out = weight(w, w), nn.Linear(5, w), nn.Linear(w, 5)

    def forward(self, x: Tensor) -> Tensor:
        far = (self.into(x)[:, None] - self.codes).square().sum(-1)
        return self.out(torch.softmax(-far, -1) @ self.codes)


@family(real("w"))
class Prototypes(Net):
    def build(self, w: int) -> None:
        self.examples, self.embed = weight(CLASSES * 32, w), nn.Sequential(nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 6))

    def forward(self, x: Tensor) -> Tensor:
        centres = self.embed(self.examples).unflatten(0, (CLASSES, 32)).mean(1)
        return -(self.embed(x)[:, None] - centres).square().sum(-1)


@family(real("w"))
class ProductOfMatrices(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.c = weight(w, w), weight(w, w), weight(CLASSES, w)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.c @ self.b @ self.a).t()


@family(real("w"))
class AnchorsInTwoLayers(Net):
    """One parameter goes through two layers and one function, in three forms."""

    def build(self, w: int) -> None:
        self.anchors, self.one, self.two = weight(2, w, w), nn.Linear(w, 8), nn.Linear(w, 8)
        self.into, self.out = nn.Linear(w, 8), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.one(self.anchors[0]), self.two(self.anchors.mT[1])
        scores = self.into(x) @ (keys * torch.sigmoid(values)).t()
        return self.out(torch.softmax(scores, -1) @ self.anchors.mean(0))


# ---- penalties over parameters ---------------------------------------------------------------------
@family(loss=with_penalty)
class Orthogonality(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gram = self.b.weight.t() @ self.b.weight
        return self.out(torch.tanh(self.b(self.a(x)))), 0.01 * (gram - torch.eye(len(gram)).to(gram)).square().sum()


@family(loss=with_penalty, kinks=True)
class ElasticNet(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = sum(p.abs().sum() + p.square().sum() for _, p in self.named_parameters())
        return self.out(torch.tanh(self.b(self.a(x)))), 1e-3 * penalty


@family(loss=with_penalty)
class PenaltyOfTrained(Net):
    """Only parameters that require gradients are penalised."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w).requires_grad_(False), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        return self.out(torch.tanh(self.b(self.a(x)))), 0.05 * penalty


@family(loss=with_penalty)
class PenaltyByType(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = [v for part in (self.a, self.b) for v in (part.weight, x) if isinstance(v, nn.Parameter)]
        return self.out(torch.tanh(self.b(self.a(x)))), 0.05 * sum((p.square().sum() for p in weights), x.new_zeros(()))


@family()
class GradientHook(Net):
    """The gradient of an activation is scaled on its way back."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: 3.0 * g)
        return self.out(torch.tanh(self.b(h)))


@family()
class AskedForGradients(Net):
    """The model scales activations that require gradients."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.out(self.b(2.0 * h if h.requires_grad else h))


@family()
class NodeHook(Net):
    """The gradient that reaches a node of the graph is scaled."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda slopes: (3.0 * slopes[0],))
        return self.out(torch.tanh(self.b(h)))


@family(loss=with_penalty)
class GroupLasso(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(torch.tanh(self.b(self.a(x)))), 0.01 * self.b.weight.norm(dim=0).sum()


@family(loss=with_penalty)
class NuclearNorm(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.mid = weight(w, 5), weight(w, 5), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gram = self.b.t() @ self.b + 0.1 * torch.eye(5).to(self.b)
        return self.out(self.mid(torch.tanh(x @ self.a.t())) * (x @ self.b.t())), 0.01 * torch.logdet(gram)


# ---- tied weights ------------------------------------------------------------------------------------
@family(real("w"), real("w"), mse)
class TiedAutoencoder(Net):
    def build(self, w: int) -> None:
        self.into, self.bias = nn.Linear(w, w), nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.into(x)), self.into.weight.t(), self.bias)


@family(whole("w", LENGTH), whole("w", LENGTH), sequence_loss)
class TiedLanguageModel(Net):
    def build(self, w: int) -> None:
        self.table, self.mix = nn.Embedding(w, w), nn.Linear(w, w)
        self.out = nn.Linear(w, w, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(ids).cumsum(1)))) / 4


@family(SEQUENCE)
class UniversalTransformer(Net):
    """One block, three times."""

    def build(self, w: int) -> None:
        self.into, self.out = nn.Linear(4, w), nn.Linear(w, CLASSES)
        self.block = nn.TransformerEncoderLayer(w, 2, w, dropout=0.0, activation="gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for _ in range(3):
            h = self.block(h)
        return self.out(h.mean(1))


@family()
class DeepEquilibrium(Net):
    def build(self, w: int) -> None:
        self.inner, self.into, self.out = weight(w, w), nn.Linear(5, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        given, z = self.into(x), x.new_zeros(())
        for _ in range(6):
            z = torch.tanh(0.5 * z @ self.inner + given) if z.dim() else torch.tanh(given)
        return self.out(z)


@family(IMAGE, IMAGE, mse)
class TiedConvolutions(Net):
    """A convolution and its transpose share a kernel."""

    def build(self, w: int) -> None:
        self.into = nn.Conv2d(3, w, 3, padding=1)
        self.mid = nn.Conv2d(w, w, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mid(torch.tanh(self.into(x))))
        h = torch.tanh(F.conv_transpose2d(h, self.mid.weight, padding=1))
        return F.conv_transpose2d(h, self.into.weight, padding=1)


# ---- networks that make weights ----------------------------------------------------------------------
@family(several(real("w"), real(5)))
class HyperNetwork(Net):
    """The weights of the second layer are made of each sample's code."""

    def build(self, w: int) -> None:
        self.weights, self.first, self.out = nn.Linear(5, 4 * w), nn.Linear(w, w), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        made = self.weights(code).unflatten(-1, (4, -1))
        return self.out(torch.tanh(torch.bmm(made, self.first(x)[..., None]).squeeze(-1)))


@family(real("w"))
class HyperNetworkOfACode(Net):
    """A layer's weights are made of a learned code."""

    def build(self, w: int) -> None:
        self.code, self.make = weight(w, w), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.make(self.code) / 3)))


@family(several(real("w"), real(5)))
class Film(Net):
    def build(self, w: int) -> None:
        self.one, self.two, self.by = nn.Linear(w, w), nn.Linear(w, CLASSES), nn.Linear(5, 2 * w)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        scale, shift = self.by(by).chunk(2, -1)
        return self.two(torch.tanh((1 + scale) * self.one(x) + shift))


@family(several(SEQUENCE, real(5)))
class AdaptiveLayerNorm(Net):
    def build(self, w: int) -> None:
        self.into, self.mix, self.by = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(5, 3 * w)
        self.norm, self.out = nn.LayerNorm(w, elementwise_affine=False), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        h = self.into(x)
        shift, scale, gate = self.by(by)[:, None].chunk(3, -1)
        h = h + gate * self.mix(self.norm(h) * (1 + scale) + shift)
        return self.out(h.mean(1))


@family(SEQUENCE)
class FastWeights(Net):
    def build(self, w: int) -> None:
        self.into, self.k, self.v, self.q = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        k, v, q = F.normalize(self.k(x), dim=-1), self.v(x), self.q(x)
        memory = torch.zeros_like(v[:, 0, :, None] * k[:, 0, None])
        for t in range(x.shape[1]):
            error = v[:, t] - torch.einsum("bij,bj->bi", memory, k[:, t])
            memory = memory + self.rate * error[..., None] * k[:, t, None]
        return self.out(torch.einsum("bij,bj->bi", memory, q[:, -1]))


@family(several(real(4, 5), real(5)))
class InnerGradientStep(Net):
    """The head takes a gradient step on a support set inside the forward pass."""

    def build(self, w: int) -> None:
        self.body, self.head = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w)), weight(CLASSES, w)

    def forward(self, support: Tensor, x: Tensor) -> Tensor:
        features = torch.tanh(self.body(support)).flatten(0, 1)
        slope = torch.func.grad(lambda head: (features @ head.t()).square().mean())(self.head)
        return torch.tanh(self.body(x)) @ (self.head - 0.5 * slope).t()


# ---- mixtures, capsules --------------------------------------------------------------------------------
@family(real("w"))
class SoftMixture(Net):
    def build(self, w: int) -> None:
        self.gate, self.experts, self.out = nn.Linear(w, 4), weight(4, w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("be,eij,bj->bi", self.gate(x).softmax(-1), self.experts, x).tanh())


@family(real("w"), kinks=True)
class TopTwoMixture(Net):
    def build(self, w: int) -> None:
        self.gate, self.experts = nn.Linear(w, 5), nn.ModuleList(nn.Linear(w, w) for _ in range(5))
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).topk(2)
        every = torch.stack([torch.tanh(expert(x)) for expert in self.experts], 1)
        chosen = every.gather(1, best.indices[..., None].expand(-1, -1, every.shape[-1]))
        return self.out((best.values.softmax(-1)[..., None] * chosen).sum(1))


@family(SEQUENCE)
class SoftSlots(Net):
    """Slots of experts are mixtures of tokens (soft mixture of experts)."""

    def build(self, w: int) -> None:
        self.into, self.slots = nn.Linear(4, w), weight(w, 4, 2)
        self.experts, self.out = weight(4, w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        scores = torch.einsum("btd,den->bten", h, self.slots)
        slots = torch.einsum("btd,bten->bend", h, scores.softmax(1))
        made = torch.einsum("bend,edf->benf", slots, self.experts).tanh()
        back = torch.einsum("benf,bten->btf", made, scores.flatten(2).softmax(-1).view_as(scores))
        return self.out(back.mean(1))


@family(SEQUENCE, whole(CLASSES), lambda z, t: (z - F.one_hot(t, CLASSES).to(z.dtype)).square().sum(-1).mean())
class Capsules(Net):
    def build(self, w: int) -> None:
        self.maps = weight(LENGTH, CLASSES, w, 4)

    def forward(self, x: Tensor) -> Tensor:
        votes, scores = torch.einsum("ncij,bnj->bnci", self.maps, x), x.new_zeros(len(x), LENGTH, CLASSES)
        for turn in range(3):
            total = (scores.softmax(-1)[..., None] * votes).sum(1)
            square = total.square().sum(-1, keepdim=True)
            out = total * (square + 1e-6).sqrt() / (1 + square)
            if turn < 2:
                scores = scores + (votes * out[:, None]).sum(-1)
        return out.square().sum(-1).add(1e-6).sqrt()


# ---- convolutional networks --------------------------------------------------------------------------
@family(IMAGE, IMAGE, mse)
class UNet(Net):
    def build(self, w: int) -> None:
        self.down, self.mid = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, w, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(w, 4, 2, 2), nn.Conv2d(w + 4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.silu(self.down(x))
        low = F.silu(self.mid(F.avg_pool2d(top, 2)))
        return self.out(torch.cat([top, self.up(low)], 1))


@family(IMAGE, kinks=True)
class ResidualNet(Net):
    def build(self, w: int) -> None:
        self.stem, self.short = nn.Conv2d(3, w, 3, 2, 1, bias=False), nn.Conv2d(w, 2 * w, 1, 2, bias=False)
        self.one, self.two = nn.Conv2d(w, 2 * w, 3, 2, 1), nn.Conv2d(2 * w, 2 * w, 3, 1, 1)
        self.out = nn.Linear(2 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x), inplace=True)
        h = self.short(h) + self.two(F.relu(self.one(h)))
        return self.out(F.relu(h).mean((2, 3)))


@family(real(4, 12))
class Tcn(Net):
    """Causal convolutions with growing dilation, and residual sums."""

    def build(self, w: int) -> None:
        self.into, self.out = nn.Conv1d(4, w, 1), nn.Linear(w, CLASSES)
        self.layers = nn.ModuleList(nn.Conv1d(w, w, 2, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for i, layer in enumerate(self.layers):
            h = h + torch.tanh(layer(F.pad(h, (2**i, 0))))
        return self.out(h[..., -1])


@family(real(4, 12))
class WaveNet(Net):
    def build(self, w: int) -> None:
        self.into, self.filter, self.gate = (
            nn.Conv1d(4, w, 1),
            nn.Conv1d(w, w, 3, padding=1),
            nn.Conv1d(w, w, 3, padding=1),
        )
        self.skip, self.out = nn.Conv1d(w, w, 1), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.into(x), 0.0
        for _ in range(2):
            inner = torch.tanh(self.filter(h)) * torch.sigmoid(self.gate(h))
            total, h = total + self.skip(inner), h + inner
        return self.out(total.mean(-1))


@family(IMAGE)
class DepthwiseSeparable(Net):
    def build(self, w: int) -> None:
        self.stem, self.depth = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, 2 * w, 3, padding=1, groups=w)
        self.point, self.out = nn.Conv2d(2 * w, w, 1), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.hardswish(self.point(F.silu(self.depth(F.silu(self.stem(x)))))).mean((2, 3)))


@family(IMAGE)
class ConvNext(Net):
    def build(self, w: int) -> None:
        self.stem, self.depth = nn.Conv2d(3, w, 2, 2), nn.Conv2d(w, w, 7, padding=3, groups=w)
        self.norm, self.wide, self.back = nn.LayerNorm(w), nn.Linear(w, 4 * w), nn.Linear(4 * w, w)
        self.scale, self.out = nn.Parameter(0.5 * torch.ones(w)), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        inner = self.back(F.gelu(self.wide(self.norm(self.depth(h).permute(0, 2, 3, 1)))))
        return self.out((h + (self.scale * inner).permute(0, 3, 1, 2)).mean((2, 3)))


@family(IMAGE)
class SqueezeExcitation(Net):
    def build(self, w: int) -> None:
        self.stem, self.conv = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, w, 3, padding=1)
        self.less, self.more, self.out = nn.Conv2d(w, 4, 1), nn.Conv2d(4, w, 1), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(torch.tanh(self.stem(x)))
        h = h * torch.sigmoid(self.more(F.silu(self.less(F.adaptive_avg_pool2d(h, 1)))))
        return self.out(h.mean((2, 3)))


@family(real(1, 8, 8), real(1, 8, 8), mse)
class ConvolutionalAutoencoder(Net):
    def build(self, w: int) -> None:
        self.into = nn.Sequential(nn.Conv2d(1, w, 3, 2, 1), nn.ELU(), nn.Conv2d(w, w, 3, 2, 1))
        self.back = nn.Sequential(
            nn.ConvTranspose2d(w, w, 3, 2, 1, output_padding=1), nn.ELU(), nn.ConvTranspose2d(w, 1, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.into(x)))


@family(real(2, 4, 6, 6))
class Video(Net):
    def build(self, w: int) -> None:
        self.one, self.two = nn.Conv3d(2, w, 3, padding=1), nn.Conv3d(w, w, (1, 3, 3), stride=(1, 2, 2))
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.two(F.avg_pool3d(torch.tanh(self.one(x)), (2, 1, 1)))).mean((2, 3, 4)))


@family(real(1, 4, 4), real(1, 8, 8), mse)
class SuperResolution(Net):
    def build(self, w: int) -> None:
        self.one, self.mid, self.two = nn.Conv2d(1, w, 3, padding=1), nn.Conv2d(w, w, 1), nn.Conv2d(w, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        made = F.pixel_shuffle(self.two(torch.tanh(self.mid(torch.tanh(self.one(x))))), 2)
        return made + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


@family(IMAGE, kinks=True)
class Inception(Net):
    def build(self, w: int) -> None:
        self.one, self.three = nn.Conv2d(3, w, 1), nn.Conv2d(3, w, 3, padding=1)
        self.wide = nn.Sequential(nn.Conv2d(3, w, 1), nn.Conv2d(w, w, (1, 5), padding=(0, 2)), nn.Conv2d(w, w, (5, 1)))
        self.pooled, self.out = nn.Conv2d(3, w, 1), nn.Linear(4 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.pad(self.wide(x), (0, 0, 2, 2))
        parts = [self.one(x), self.three(x), wide, self.pooled(F.max_pool2d(x, 3, 1, 1))]
        return self.out(F.leaky_relu(torch.cat(parts, 1)).amax((2, 3)))


@family(IMAGE)
class DenseNet(Net):
    def build(self, w: int) -> None:
        self.layers = nn.ModuleList(nn.Conv2d(3 + i * w, w, 3, padding=1) for i in range(3))
        self.out = nn.Linear(3 + 3 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        return self.out(x.mean((2, 3)))


@family(IMAGE)
class ShuffledGroups(Net):
    def build(self, w: int) -> None:
        self.stem, self.one = nn.Conv2d(3, 4 * w, 1), nn.Conv2d(4 * w, 4 * w, 3, padding=1, groups=4)
        self.two, self.out = nn.Conv2d(4 * w, 4 * w, 1, groups=2), nn.Linear(4 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(self.stem(x)))
        return self.out(torch.tanh(self.two(F.channel_shuffle(h, 4))).mean((2, 3)))


@family(real(1, 8, 8), kinks=True)
class SpatialTransformer(Net):
    def build(self, w: int) -> None:
        self.look, self.move = nn.Linear(64, w), nn.Linear(w, 6)
        self.read, self.out = nn.Linear(64, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        straight = torch.tensor([1.0, 0, 0, 0, 1, 0]).to(x)
        moves = (0.3 * self.move(torch.tanh(self.look(x.flatten(1)))) + straight).view(-1, 2, 3)
        seen = F.grid_sample(x, F.affine_grid(moves, x.shape, align_corners=False), align_corners=False)
        return self.out(torch.tanh(self.read(seen.flatten(1))))


@family(IMAGE, kinks=True)
class AdaptivePools(Net):
    def build(self, w: int) -> None:
        self.conv, self.out = nn.Conv2d(3, w, 3), nn.Linear(w * 13, CLASSES)
        self.mid = nn.Conv2d(w, w, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mid(torch.tanh(self.conv(x)))
        pools = F.adaptive_avg_pool2d(h, (3, 3)), F.adaptive_max_pool2d(h, (2, 2))
        return self.out(torch.cat([pool.flatten(1) for pool in pools], 1))


@family(IMAGE)
class PaddedConvolutions(Net):
    """Borders that reflect, wrap and repeat."""

    def build(self, w: int) -> None:
        self.one = nn.Conv2d(3, w, 3, padding=1, padding_mode="reflect")
        self.two = nn.Conv2d(w, w, 3, padding=2, dilation=2, padding_mode="circular")
        self.three, self.out = nn.Conv2d(w, 4, 3, padding=1, padding_mode="replicate"), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))).mean((2, 3)))


@family(IMAGE)
class LocallyConnected(Net):
    """A kernel of its own at each place."""

    def build(self, w: int) -> None:
        self.kernels, self.out = weight(9, w, 3 * 16), nn.Linear(w, CLASSES)
        self.mid = nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=2)  # [rows, 48, 9]
        made = torch.einsum("bip,poi->bpo", patches, self.kernels)
        return self.out(torch.tanh(self.mid(torch.tanh(made))).mean(1))


@family(IMAGE)
class StandardisedKernels(Net):
    """Kernels are standardised before they are used."""

    def build(self, w: int) -> None:
        self.kernel, self.gain = nn.Parameter(torch.randn(w, 3, 3, 3)), nn.Parameter(torch.ones(w))
        self.mid, self.out = nn.Parameter(torch.randn(w, w, 1, 1)), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for kernel in (self.kernel, self.mid):
            flat = kernel.flatten(1)
            flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) * flat.shape[1] + 1e-4).sqrt()
            h = torch.tanh(F.conv2d(h, (flat * self.gain[:, None]).view_as(kernel)))
        return self.out(h.mean((2, 3)))


@family(several(IMAGE, real(5)))
class DynamicConvolution(Net):
    """Each sample mixes kernels, and its convolution is one group of a grouped convolution."""

    def build(self, w: int) -> None:
        self.kernels, self.by = nn.Parameter(torch.randn(4, w, 3, 3, 3) / 5), nn.Linear(5, 4)
        self.mid, self.out = nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        kernels = torch.einsum("bk,koixy->boixy", self.by(by).softmax(-1), self.kernels)
        made = F.conv2d(x.flatten(0, 1)[None], kernels.flatten(0, 1), groups=len(x))
        return self.out(torch.tanh(self.mid(made.view(len(x), -1, 36).mean(-1))))


@family(IMAGE)
class MlpMixer(Net):
    def build(self, w: int) -> None:
        self.patches = nn.Conv2d(3, w, 2, 2)
        self.across, self.within = nn.Linear(16, 16), nn.Sequential(nn.Linear(w, w), nn.GELU(), nn.Linear(w, w))
        self.one, self.two, self.out = nn.LayerNorm(w), nn.LayerNorm(w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = h + self.across(self.one(h).mT).mT
        return self.out((h + self.within(self.two(h))).mean(1))


@family(real(1, 8, 8), real(1, 8, 8), mse)
class FourierOperator(Net):
    """A product with complex weights between two Fourier transforms."""

    def build(self, w: int) -> None:
        self.into, self.out = nn.Conv2d(1, w, 1), nn.Conv2d(w, 1, 1)
        self.modes, self.straight = nn.Parameter(torch.randn(w, w, 4, 3, 2) / w), nn.Conv2d(w, w, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        low = torch.fft.rfft2(h)[..., :4, :3]
        made = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(self.modes))
        return self.out(torch.tanh(torch.fft.irfft2(F.pad(made, (0, 2, 0, 4)), s=(8, 8)) + self.straight(h)))


@family(real(1, 16))
class Wavelets(Net):
    """Haar coefficients, each band with a layer of its own."""

    def build(self, w: int) -> None:
        self.register_buffer("haar", torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]]) / 2**0.5)
        self.bands, self.mid = nn.ModuleList(nn.Linear(n, w) for n in (8, 4, 4)), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        bands = []
        for _ in range(2):
            x, fine = F.conv1d(x, self.haar.to(x.dtype), stride=2).split(1, 1)
            bands.append(fine)
        h = sum(layer(band[:, 0]) for layer, band in zip(self.bands, [*bands, x], strict=True))
        return self.out(torch.tanh(self.mid(torch.tanh(h))))


# ---- recurrences ---------------------------------------------------------------------------------------
@family(SEQUENCE)
class TanhRnn(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.RNN(4, w, 2, batch_first=True), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@family(SEQUENCE, kinks=True)
class ReluRnn(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.RNN(4, w, 2, nonlinearity="relu", batch_first=True), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])


@family(SEQUENCE)
class BidirectionalLstm(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.LSTM(4, w, 2, bidirectional=True, batch_first=True), nn.Linear(2 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0].mean(1))


@family(SEQUENCE)
class BidirectionalRnn(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.RNN(4, w, bidirectional=True, bias=False), nn.Linear(2 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.transpose(0, 1))[1].transpose(0, 1).flatten(1))


@family(SEQUENCE, real(LENGTH, 1), mse)
class Gru(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.GRU(4, w, 2, batch_first=True), nn.Linear(w, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


@family(SEQUENCE)
class ProjectedLstm(Net):
    def build(self, w: int) -> None:
        self.rnn, self.out = nn.LSTM(4, w, batch_first=True, proj_size=w // 2), nn.Linear(w // 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[1][0][0])


@family(SEQUENCE)
class LstmCells(Net):
    """Two cells in a loop; the first state is learned."""

    def build(self, w: int) -> None:
        self.one, self.two, self.out = nn.LSTMCell(4, w), nn.LSTMCell(w, w), nn.Linear(w, CLASSES)
        self.first = nn.Parameter(0.1 * torch.randn(4, w))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = (state.expand(len(x), -1) for state in self.first)
        for t in range(x.shape[1]):
            a, b = self.one(x[:, t], (a, b))
            c, d = self.two(a, (c, d))
        return self.out(c)


@family(SEQUENCE)
class GruCells(Net):
    def build(self, w: int) -> None:
        self.cell, self.back, self.out = nn.GRUCell(4, w), nn.RNNCell(4, w), nn.Linear(2 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = b = None
        for t in range(x.shape[1]):
            a, b = self.cell(x[:, t], a), self.back(x[:, -1 - t], b)
        return self.out(torch.cat([a, b], -1))


@family(SEQUENCE)
class PeepholeLstm(Net):
    def build(self, w: int) -> None:
        self.x, self.h, self.peep = nn.Linear(4, 4 * w), nn.Linear(w, 4 * w, bias=False), weight(3, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        c = h = x.new_zeros(len(x), self.peep.shape[1])
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(f + self.peep[0] * c) * c + torch.sigmoid(i + self.peep[1] * c) * torch.tanh(g)
            h = torch.sigmoid(o + self.peep[2] * c) * torch.tanh(c)
        return self.out(h)


@family(TOKENS, NEXT, sequence_loss)
class SequenceToSequence(Net):
    """A decoder of cells attends to an encoder (additive attention)."""

    def build(self, w: int) -> None:
        self.table, self.encoder, self.cell = nn.Embedding(11, w), nn.GRU(w, w, batch_first=True), nn.GRUCell(w, w)
        self.query, self.key, self.score = nn.Linear(w, w), nn.Linear(w, w, bias=False), nn.Linear(w, 1, bias=False)
        self.out = nn.Linear(w, 11)

    def forward(self, ids: Tensor) -> Tensor:
        memory, h = self.encoder(self.table(ids))
        h, keys, outputs = h[0], self.key(memory), []
        for _ in range(ids.shape[1]):
            shares = self.score(torch.tanh(keys + self.query(h)[:, None])).softmax(1)
            h = self.cell((shares * memory).sum(1), h)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


@family(SEQUENCE)
class EchoState(Net):
    """The reservoir is frozen; the readout and the scale of the input train."""

    def build(self, w: int) -> None:
        self.inner = nn.Parameter(torch.randn(w, w) / (2 * w**0.5), requires_grad=False)
        self.into, self.read, self.out = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), len(self.inner))
        for t in range(x.shape[1]):
            h = 0.7 * torch.tanh(self.into(x[:, t]) + h @ self.inner) + 0.3 * h
        return self.out(torch.tanh(self.read(h)))


@family(real("w"))
class NeuralOde(Net):
    """Euler steps of a field that depends on time."""

    def build(self, w: int) -> None:
        self.field, self.back, self.out = nn.Linear(w + 1, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(5):
            time = torch.full_like(x[:, :1], step / 5)
            x = x + 0.2 * self.back(torch.tanh(self.field(torch.cat([x, time], 1))))
        return self.out(x)


@family(real("w"))
class RungeKutta(Net):
    def build(self, w: int) -> None:
        self.field, self.out = nn.Sequential(nn.Linear(w, w), nn.Tanh()), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            a = self.field(x)
            b = self.field(x + 0.25 * a)
            c = self.field(x + 0.25 * b)
            x = x + (a + 2 * b + 2 * c + self.field(x + 0.5 * c)) / 12
        return self.out(x)


@family(real(8, 4))
class DiagonalStateSpace(Net):
    """S4 with a diagonal matrix: the kernel of complex powers, applied by a Fourier transform."""

    def build(self, w: int) -> None:
        self.real, self.imaginary = nn.Parameter(torch.zeros(w, 8)), nn.Parameter(torch.randn(w, 8))
        self.c, self.skip = nn.Parameter(torch.randn(w, 8, 2) / 4), nn.Parameter(torch.ones(w))
        self.into, self.mix, self.out = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        u, length = self.into(x).mT, x.shape[1]
        a = torch.complex(-0.5 * self.real.exp(), self.imaginary)
        powers = torch.exp(a[..., None] * torch.arange(length, device=x.device).to(x.dtype))
        kernel = torch.einsum("ws,wst->wt", torch.view_as_complex(self.c), powers).real
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)[
            ..., :length
        ]
        return self.out(torch.tanh(self.mix((y + self.skip[:, None] * u).mT)).mean(1))


@family(real(6, 4))
class SelectiveScan(Net):
    """Mamba's recurrence as a loop, with its depthwise convolution and gate."""

    def build(self, w: int) -> None:
        self.into, self.conv = nn.Linear(4, 2 * w), nn.Conv1d(w, w, 3, groups=w)
        self.step, self.by = nn.Linear(w, w), nn.Linear(w, 8)
        self.a, self.skip, self.out = (
            nn.Parameter(torch.randn(w, 4) / 3),
            nn.Parameter(torch.ones(w)),
            nn.Linear(w, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(x).chunk(2, -1)
        u = F.silu(self.conv(F.pad(u.mT, (2, 0)))).mT
        step, (b, c) = F.softplus(self.step(u)), self.by(u).chunk(2, -1)
        state, outputs = torch.zeros_like(u[:, 0, :, None] * self.a), []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.a.exp())
            state = decay * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
            outputs.append((state * c[:, t, None]).sum(-1) + self.skip * u[:, t])
        return self.out((torch.stack(outputs, 1) * F.silu(gate)).mean(1))


@family(real(6, 4))
class MinimalGru(Net):
    """A parallel scan in logarithms: cumulative sums and `logcumsumexp`."""

    def build(self, w: int) -> None:
        self.into, self.gate, self.value, self.out = (
            nn.Linear(4, w),
            nn.Linear(w, w),
            nn.Linear(w, w),
            nn.Linear(w, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        gate, value = self.gate(h), self.value(h)
        keep = (-F.softplus(gate)).cumsum(1)
        state = (keep + torch.logcumsumexp(F.logsigmoid(gate) + F.logsigmoid(value) - keep, 1)).exp()
        return self.out(state[:, -1])


@family(TOKENS, NEXT, sequence_loss)
class Rwkv(Net):
    def build(self, w: int) -> None:
        self.table, self.mix = nn.Embedding(11, w), nn.Parameter(torch.rand(3, w))
        self.k, self.v, self.r = (nn.Linear(w, w, bias=False) for _ in range(3))
        self.decay, self.bonus, self.out = nn.Parameter(torch.randn(w)), nn.Parameter(torch.zeros(w)), nn.Linear(w, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        before = F.pad(h, (0, 0, 1, -1))
        k, v, r = (layer(h * m + before * (1 - m)) for layer, m in zip((self.k, self.v, self.r), self.mix, strict=True))
        top = bottom = torch.zeros_like(h[:, 0])
        outputs = []
        for t in range(ids.shape[1]):
            now = torch.exp(k[:, t] + self.bonus)
            outputs.append(torch.sigmoid(r[:, t]) * (top + now * v[:, t]) / (bottom + now))
            fade, key = torch.exp(-F.softplus(self.decay)), torch.exp(k[:, t])
            top, bottom = fade * top + key * v[:, t], fade * bottom + key
        return self.out(torch.stack(outputs, 1))


@family(real(4, 8))
class QuasiRecurrent(Net):
    def build(self, w: int) -> None:
        self.conv, self.out, self.mid = nn.Conv1d(4, 2 * w, 2), nn.Linear(w, CLASSES), nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        value, keep = self.conv(x).chunk(2, 1)
        value, keep = value.tanh(), keep.sigmoid()
        h = value[..., 0]
        for t in range(1, value.shape[-1]):
            h = keep[..., t] * h + (1 - keep[..., t]) * value[..., t]
        return self.out(torch.tanh(self.mid(h)))


# ---- attention -----------------------------------------------------------------------------------------
@family(SEQUENCE)
class SelfAttention(Net):
    def build(self, w: int) -> None:
        self.into, self.attention = nn.Linear(4, w), nn.MultiheadAttention(w, 2, batch_first=True)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return self.out((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


@family(several(real(3, "w"), real(4, 6), real(4, 5)))
class CrossAttention(Net):
    """Keys and values of other sizes, with weights returned and a bias for each."""

    def build(self, w: int) -> None:
        self.attention = nn.MultiheadAttention(w, 2, kdim=6, vdim=5, batch_first=True, add_bias_kv=True)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found, shares = self.attention(q, k, v)
        return self.out(found.mean(1)) * (1 + shares.square().sum((1, 2)))[:, None]


@family(TOKENS, NEXT, sequence_loss)
class CausalAttention(Net):
    def build(self, w: int) -> None:
        self.table, self.all, self.out = nn.Embedding(11, w), nn.Linear(w, 3 * w, bias=False), nn.Linear(w, 11)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.all(self.table(ids)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


@family(SEQUENCE)
class LinearAttention(Net):
    def build(self, w: int) -> None:
        self.into, self.q, self.k, self.v = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        q, k, v = F.elu(self.q(h)) + 1, F.elu(self.k(h)) + 1, self.v(h)
        sums, scale = torch.einsum("btd,bte->btde", k, v).cumsum(1), k.cumsum(1)
        return self.out((torch.einsum("btd,btde->bte", q, sums) / (q * scale).sum(-1, keepdim=True)).mean(1))


@family(SEQUENCE)
class RelativePositions(Net):
    """A learned bias for each distance, read from a table, and its features (Shaw)."""

    def build(self, w: int) -> None:
        self.into, self.q, self.v = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, w)
        self.bias, self.far = nn.Embedding(2 * LENGTH - 1, 1), weight(2 * LENGTH - 1, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=x.device)
        apart = places[:, None] - places + LENGTH - 1
        h = self.into(x)
        q = self.q(h)
        scores = q @ h.mT + torch.einsum("bid,ijd->bij", q, self.far[apart]) + self.bias(apart)[..., 0]
        return self.out((torch.softmax(scores / 3, -1) @ self.v(h)).mean(1))


@family(TOKENS, NEXT, sequence_loss)
class Rotary(Net):
    def build(self, w: int) -> None:
        self.table, self.q, self.k, self.v = nn.Embedding(11, w), nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w)
        self.gain, self.out = nn.Parameter(torch.ones(w)), nn.Linear(w, 11)

    def turned(self, h: Tensor) -> Tensor:
        half = h.shape[-1] // 2
        angle = torch.arange(h.shape[1], device=h.device)[:, None] / 10 ** (torch.arange(half, device=h.device) / half)
        a, b, angle = h[..., 0::2], h[..., 1::2], angle.to(h.dtype)
        return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.rms_norm(self.table(ids), self.gain.shape, self.gain)
        scores = self.turned(self.q(h)) @ self.turned(self.k(h)).mT / h.shape[-1] ** 0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return self.out(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.v(h))


@family(SEQUENCE)
class MultiQueryAlibi(Net):
    """Heads share keys and values, with a penalty on distance whose slopes are learned."""

    def build(self, w: int) -> None:
        self.q, self.kv, self.slopes = nn.Linear(4, 4 * w), nn.Linear(4, 2 * w), nn.Parameter(torch.rand(4, 1, 1))
        self.mix, self.out = nn.Linear(4 * w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2), self.kv(x)[:, None].chunk(2, -1)
        places = torch.arange(x.shape[1], device=x.device).to(x.dtype)
        scores = q @ k.mT / k.shape[-1] ** 0.5 - self.slopes * (places[:, None] - places).abs()
        return self.out(self.mix((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1))


@family(SEQUENCE)
class RandomFeatureAttention(Net):
    def build(self, w: int) -> None:
        self.q, self.k, self.v, self.mid = nn.Linear(4, w), nn.Linear(4, w), nn.Linear(4, w), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)
        self.register_buffer("features", torch.randn(w, 2 * w) / w**0.5)

    def lifted(self, h: Tensor) -> Tensor:
        return torch.exp(h @ self.features / 3 - h.square().sum(-1, keepdim=True) / (2 * h.shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.lifted(self.q(x)), self.lifted(self.k(x))
        found = q @ (k.mT @ self.v(x)) / (q @ k.sum(1)[..., None])
        return self.out(torch.tanh(self.mid(found)).mean(1))


@family(SEQUENCE)
class SetTransformer(Net):
    """Inducing points and a learned seed are the queries."""

    def build(self, w: int) -> None:
        self.into, self.points, self.seed = nn.Linear(4, w), weight(1, w, w), weight(1, 1, w)
        self.up, self.down, self.pool = (nn.MultiheadAttention(w, 2, batch_first=True) for _ in range(3))
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, points, seed = self.into(x), self.points.expand(len(x), -1, -1), self.seed.expand(len(x), -1, -1)
        inner = self.up(points, h, h, need_weights=False)[0]
        h = h + self.down(h, inner, inner, need_weights=False)[0]
        return self.out(self.pool(seed, h, h)[0][:, 0])


@family(SEQUENCE)
class Linformer(Net):
    def build(self, w: int) -> None:
        self.into, self.shorter = nn.Linear(4, w), weight(3, LENGTH)
        self.q, self.k, self.v, self.talk = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, w), weight(2, 2)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        short = self.shorter @ h
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(h), self.k(short), self.v(short)))
        shares = torch.einsum("bhij,hg->bgij", q @ k.mT / 3, self.talk).softmax(-1)
        return self.out((shares @ v).transpose(1, 2).flatten(2).mean(1))


@family(TOKENS, NEXT, sequence_loss)
class EncoderDecoder(Net):
    def build(self, w: int) -> None:
        self.table, self.out = nn.Embedding(11, w), nn.Linear(w, 11)
        self.body = nn.Transformer(w, 2, 1, 1, w, dropout=0.0, activation="gelu", batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        mask = torch.full((LENGTH, LENGTH), -torch.inf, device=ids.device, dtype=h.dtype).triu(1)
        return self.out(self.body(h.flip(1), h, tgt_mask=mask))


@family(several(SEQUENCE, whole(2, LENGTH)))
class MaskedPooling(Net):
    """Padding is hidden from attention by a mask of each sample."""

    def build(self, w: int) -> None:
        self.into, self.query, self.mid, self.out = nn.Linear(4, w), weight(w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        h = torch.tanh(self.mid(self.into(x)))
        scores = (h @ self.query).masked_fill(hidden.bool(), -1e9)
        return self.out((scores.softmax(-1)[..., None] * h).sum(1))


# ---- sets, pairs, contrasts ----------------------------------------------------------------------------
@family(SEQUENCE)
class DeepSets(Net):
    def build(self, w: int) -> None:
        self.each = nn.Sequential(nn.Linear(4, w), nn.SiLU(), nn.Linear(w, w))
        self.all = nn.Sequential(nn.Linear(2 * w, w), nn.SiLU(), nn.Linear(w, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        h = self.each(x)
        return self.all(torch.cat([h.sum(1), torch.logsumexp(h, 1)], -1))


@family(several(real(5), real(5)), whole(2), lambda z, t: F.cosine_embedding_loss(*z, 2 * t - 1, margin=-1.5))
class Siamese(Net):
    def build(self, w: int) -> None:
        self.body = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(a), self.body(b)


def contrast(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Each row's partner is the row of the same place in the other view."""
    a, b, scale = outputs
    scores = a @ b.t() * scale
    mine = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(scores, mine) + F.cross_entropy(scores.t(), mine)) / 2 + 0.0 * targets.sum()


@family(several(real(5), real(4)), loss=contrast)
class Clip(Net):
    """Contrast of two towers with a learned temperature, over the batch."""

    def build(self, w: int) -> None:
        self.one, self.two = nn.Linear(5, w), nn.Linear(4, w)
        self.shared, self.scale = nn.Linear(w, w), nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = (F.normalize(self.shared(torch.tanh(h)), dim=-1) for h in (self.one(a), self.two(b)))
        return a, b, self.scale.exp()


def redundancy(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 0.1).sqrt() for z in outputs)
    cross = a.t() @ b / len(a)
    return (cross - torch.eye(len(cross)).to(cross)).square().mean() + 0.0 * targets.sum()


@family(several(real(5), real(5)), loss=redundancy)
class BarlowTwins(Net):
    def build(self, w: int) -> None:
        self.body = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(a), self.body(b)


@family(several(real(5), real(5), real(5)), loss=lambda z, t: F.triplet_margin_loss(*z) + 0.0 * t.sum(), kinks=True)
class Triplets(Net):
    def build(self, w: int) -> None:
        self.body = nn.Sequential(nn.Linear(5, w), nn.ReLU(), nn.Linear(w, w))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(a), self.body(b), self.body(c)


@family(several(real("w"), whole(CLASSES)), loss=with_penalty)
class Centres(Net):
    """Distances to learned centres of the classes, read by label."""

    def build(self, w: int) -> None:
        self.body, self.out, self.centres = nn.Linear(w, w), nn.Linear(w, CLASSES), weight(CLASSES, w)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.out(h), 0.1 * (h - self.centres[label]).square().sum(-1).mean()


@family(several(real(5), real(5)), loss=lambda z, t: z.mean() + 0.0 * t.sum())
class DetachedTarget(Net):
    """SimSiam: one view predicts the other, whose embedding is detached."""

    def build(self, w: int) -> None:
        self.body, self.guess = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w)), nn.Linear(w, w)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.body(a), self.body(b)
        with torch.no_grad():
            c = self.body(a[:, :5])
        guesses = -F.cosine_similarity(self.guess(a), b.detach()) - F.cosine_similarity(self.guess(b), a.detach())
        return guesses + 0.1 * (self.guess(b) - c).square().mean(-1)


# ---- parametrisations, structured matrices ---------------------------------------------------------------
@family()
class WeightNorm(Net):
    def build(self, w: int) -> None:
        self.a, self.b = nn.Linear(5, w), parametrizations.weight_norm(nn.Linear(w, w))
        self.out = parametrizations.weight_norm(nn.Linear(w, CLASSES), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Symmetric(nn.Module):
    def forward(self, m: Tensor) -> Tensor:
        return m.triu() + m.triu(1).mT


@family()
class SymmetricWeight(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, CLASSES)
        parametrize.register_parametrization(self.b, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(self.a(x))))


@family()
class CayleyRotation(Net):
    """A rotation made of a skew matrix, with a power series."""

    def build(self, w: int) -> None:
        self.skew, self.a, self.out = (
            nn.Parameter(torch.randn(w, w) / (4 * w**0.5)),
            nn.Linear(5, w),
            nn.Linear(w, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        skew = self.skew.triu(1) - self.skew.triu(1).t()
        h = term = self.a(x)
        for k in range(1, 6):
            term = term @ skew / k
            h = h + term
        return self.out(torch.tanh(h))


@family()
class MatrixExponential(Net):
    def build(self, w: int) -> None:
        self.skew, self.a, self.out = (
            nn.Parameter(torch.randn(w, w) / (4 * w**0.5)),
            nn.Linear(5, w),
            nn.Linear(w, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x) @ torch.matrix_exp(self.skew - self.skew.t())))


@family(real("w"))
class LowRankAdapters(Net):
    """Frozen weights with trained sums of low rank (LoRA)."""

    def build(self, w: int) -> None:
        self.base, self.out = nn.Linear(w, w).requires_grad_(False), nn.Linear(w, CLASSES).requires_grad_(False)
        self.down, self.up, self.last = weight(w, w), nn.Parameter(0.1 * torch.randn(w, w)), weight(CLASSES, w)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.base(x) + F.linear(F.linear(x, self.down), self.up))
        return self.out(h) + F.linear(h, self.last)


@family(real(8, 8))
class KroneckerLayer(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.mid = weight(w, 8), weight(8, 8), nn.Linear(8 * w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(x.flatten(1) @ torch.kron(self.a, self.b).t()))))


@family(real("w"))
class Circulant(Net):
    def build(self, w: int) -> None:
        self.c, self.sign, self.out = weight(w), nn.Parameter(torch.ones(w)), nn.Linear(w, CLASSES)
        self.mid = nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.fft.irfft(torch.fft.rfft(x * self.sign) * torch.fft.rfft(self.c), x.shape[-1])
        return self.out(torch.tanh(self.mid(torch.tanh(turned))))


@family(real(4, 4, 4))
class TensorTrain(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.c = weight(4, w), weight(w, 4, w), nn.Parameter(torch.randn(w, 4, CLASSES) / w**0.5 / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bijk,ip,pjq,qkc->bc", x, self.a, self.b, self.c)


@family(several(real("w"), real("w")))
class Bilinear(Net):
    def build(self, w: int) -> None:
        self.form, self.out = nn.Bilinear(w, w, 4), nn.Linear(4, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(torch.tanh(self.form(a, b)))


@family(several(real("w"), real(5)))
class NeuralTensor(Net):
    def build(self, w: int) -> None:
        self.form, self.line = weight(4, w, 5), nn.Linear(w, 4)
        self.mid, self.out = nn.Linear(w, w), nn.Linear(4, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = torch.tanh(self.mid(a))
        return self.out(torch.tanh(torch.einsum("bi,kij,bj->bk", a, self.form, b) + self.line(a)))


@family(real("w"))
class Monotone(Net):
    """Weights are positive by construction."""

    def build(self, w: int) -> None:
        self.a, self.b, self.shift = weight(w, w), weight(CLASSES, w), nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, F.softplus(self.a) / 8, self.shift)), self.b.exp() / 4)


@family(real("w"), real("w"), lambda z, t: F.binary_cross_entropy_with_logits(z, torch.sigmoid(t)))
class MaskedAutoencoder(Net):
    """Masks on the weights let each output depend on earlier inputs alone."""

    def build(self, w: int) -> None:
        self.one, self.two = nn.Linear(w, w), nn.Linear(w, w)
        self.register_buffer("before", torch.ones(w, w).tril())
        self.register_buffer("strictly", torch.ones(w, w).tril(-1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, self.one.weight * self.before, self.one.bias))
        return F.linear(h, self.two.weight * self.strictly, self.two.bias)


@family(real(8))
class Butterfly(Net):
    def build(self, w: int) -> None:
        self.stages, self.wide, self.out = weight(3, 4, 2, 2), nn.Linear(8, w), nn.Linear(w, CLASSES)
        self.mid = nn.Linear(w, w)

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            pairs = x.unflatten(-1, (4 >> i, 2, 1 << i)).transpose(-1, -2).reshape(len(x), 4, 2)
            made = torch.einsum("bpi,pij->bpj", pairs, stage)
            x = made.reshape(len(x), 4 >> i, 1 << i, 2).transpose(-1, -2).flatten(1)
        return self.out(torch.tanh(self.mid(self.wide(x))))


# ---- embeddings, tables ----------------------------------------------------------------------------------
@family(whole("w", LENGTH))
class PaddedEmbedding(Net):
    def build(self, w: int) -> None:
        self.table, self.out = nn.Embedding(w, w, padding_idx=0), nn.Linear(w, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids)).mean(1))


@family(whole("w", LENGTH))
class BagOfWords(Net):
    def build(self, w: int) -> None:
        self.sums, self.means = nn.EmbeddingBag(w, w, mode="sum"), nn.EmbeddingBag(w, w, mode="mean")
        self.out = nn.Linear(2 * w, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.cat([self.sums(ids), self.means(ids)], -1).tanh())


@family(several(whole("w", LENGTH), real(LENGTH)))
class WeightedBag(Net):
    def build(self, w: int) -> None:
        self.table, self.out = nn.EmbeddingBag(w, w, mode="sum"), nn.Linear(w, CLASSES)

    def forward(self, ids: Tensor, shares: Tensor) -> Tensor:
        return self.out(self.table(ids, per_sample_weights=shares).tanh())


@family(whole("w", 4), real(), mse)
class FactorisationMachine(Net):
    def build(self, w: int) -> None:
        self.line, self.factors, self.bias = nn.Embedding(w, 1), nn.Embedding(w, w), nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.factors.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        v = self.factors(ids)
        pairs = (v.sum(1).square() - v.square().sum(1)).sum(-1) / 2
        return self.bias + self.line(ids).sum((1, 2)) + pairs


@family(several(whole("w", 3), real(5)), whole(2), lambda z, t: F.binary_cross_entropy_with_logits(z, t.to(z.dtype)))
class WideAndDeep(Net):
    def build(self, w: int) -> None:
        self.wide, self.table, self.line = nn.EmbeddingBag(w, 1, mode="sum"), nn.Embedding(w, w), nn.Linear(5, 1)
        self.deep = nn.Sequential(nn.Linear(3 * w + 5, w), nn.Softplus(), nn.Linear(w, 1))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return (self.wide(ids) + self.line(x) + self.deep(torch.cat([self.table(ids).flatten(1), x], 1)))[:, 0]


@family(TOKENS)
class HashedEmbedding(Net):
    """Each token is a learned mixture of rows of a small table."""

    def build(self, w: int) -> None:
        self.table, self.shares, self.out = weight(w, w), nn.Embedding(11, 2), nn.Linear(w, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.stack([ids * 7 + 3, ids * 5 + 1], -1) % len(self.table)
        return self.out((self.shares(ids)[..., None] * self.table[places]).sum(2).mean(1))


@family(several(whole("w"), whole("w")), real(), mse)
class GloVe(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.c, self.d = nn.Embedding(w, w), nn.Embedding(w, w), nn.Embedding(w, 1), nn.Embedding(w, 1)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return (
            torch.einsum("bd,bd->b", self.a(i), self.b(j)) / self.a.embedding_dim**0.5 + (self.c(i) + self.d(j))[:, 0]
        )


@family(several(whole("w"), whole("w", 3)), loss=lambda z, t: -F.logsigmoid(z).mean() + 0.0 * t.sum())
class SkipGram(Net):
    """The first of the contexts is real, the others are negative samples."""

    def build(self, w: int) -> None:
        self.table, self.context = nn.Embedding(w, w), nn.Embedding(w, w)

    def forward(self, word: Tensor, around: Tensor) -> Tensor:
        scores = torch.bmm(self.context(around), self.table(word)[..., None])[..., 0] / 3
        return scores * torch.tensor([1.0, -1.0, -1.0]).to(scores)


@family(several(whole("w"), whole(4), whole("w")), real(), mse)
class TranslatedEntities(Net):
    def build(self, w: int) -> None:
        self.entities, self.relations = nn.Embedding(w, w), nn.Embedding(4, w)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        apart = self.entities(head) + self.relations(relation) - self.entities(tail)
        return 1.0 - apart.square().mean(-1).add(1e-3).sqrt()


@family(several(whole("w"), whole(4), whole("w")), real(), mse)
class ComplexEntities(Net):
    def build(self, w: int) -> None:
        self.entities, self.relations = weight(2, w, w), weight(2, 4, w)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        a, b, c = (torch.complex(*table[:, ids]) for table, ids in (
            (self.entities, head), (self.relations, relation), (self.entities, tail)))  # fmt: skip
        return (a * b * c.conj()).real.sum(-1)


# ---- norms -----------------------------------------------------------------------------------------------
@family(IMAGE)
class GroupNorms(Net):
    def build(self, w: int) -> None:
        self.one, self.two = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, w, 3, padding=1)
        self.norm, self.whole, self.out = nn.GroupNorm(2, w), nn.GroupNorm(1, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.whole(self.two(F.silu(self.norm(self.one(x)))))).square().mean((2, 3)))


@family(IMAGE)
class InstanceNorms(Net):
    def build(self, w: int) -> None:
        self.one, self.two = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, w, 3)
        self.norm, self.out = nn.InstanceNorm2d(w, affine=True), nn.Linear(w, CLASSES)
        self.local = nn.LocalResponseNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.local(F.silu(self.two(F.silu(self.norm(self.one(x)))))).mean((2, 3)))


@family(real("w"))
class LayerNorms(Net):
    """Layer and root-mean-square norms around layers, as a module and by hand."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, CLASSES)
        self.one, self.two, self.gain = nn.LayerNorm(w), nn.RMSNorm(w, eps=1e-5), nn.Parameter(torch.ones(w))

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.b(F.gelu(self.one(self.a(x)))))
        return self.out(h * self.gain * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6))


@family(real("w"), batch_norm="batch")
class BatchNorms(Net):
    def build(self, w: int) -> None:
        self.a, self.norm = nn.Linear(w, w), nn.BatchNorm1d(w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.norm(self.a(x))))


@family(IMAGE, batch_norm="averaged")
class AveragedBatchNorms(Net):
    def build(self, w: int) -> None:
        self.one, self.norm = nn.Conv2d(3, w, 3, bias=False), nn.BatchNorm2d(w)
        self.two, self.last, self.out = nn.Conv2d(w, w, 3), nn.BatchNorm2d(w, momentum=0.3), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.last(self.two(F.silu(self.norm(self.one(x)))))).mean((2, 3)))


# ---- units -----------------------------------------------------------------------------------------------
@family(real("w"), kinks=True)
class Maxout(Net):
    def build(self, w: int) -> None:
        self.a, self.out = nn.Linear(w, 3 * w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.a(x).unflatten(-1, (-1, 3)).amax(-1))


@family(real("w"))
class GatedUnits(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.c = nn.Linear(w, 2 * w), nn.Linear(w, 2 * w, bias=False), nn.Linear(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.glu(self.a(x))
        left, right = self.b(h).chunk(2, -1)
        h = h + F.silu(left) * right
        gate = torch.sigmoid(self.c(h))
        return self.out(gate * torch.tanh(h) + (1 - gate) * h)


@family(real("w"), kinks=True)
class KinkedUnits(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(w, w), nn.Linear(2 * w, w), nn.Linear(w, CLASSES)
        self.slope = nn.PReLU(w)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.slope(self.b(torch.cat([F.relu(h), F.relu(-h)], -1)))
        return self.out(F.hardtanh(h) + F.softshrink(h, 0.1) + F.relu6(h))


@family()
class KolmogorovArnold(Net):
    """Sums of cubic B-splines of each input."""

    def build(self, w: int) -> None:
        self.one, self.two, self.base = weight(w, 5, 8), weight(CLASSES, w, 8), nn.Linear(5, w)
        self.mid = nn.Linear(w, w)

    def splines(self, x: Tensor) -> Tensor:
        knots = torch.arange(12, device=x.device).to(x.dtype) / 2 - 2.75
        x = x[..., None]
        basis = ((x >= knots[:-1]) & (x < knots[1:])).to(x.dtype)
        for k in range(1, 4):
            left = (x - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1]) * basis[..., :-1]
            basis = left + (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k]) * basis[..., 1:]
        return basis

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x) + torch.einsum("big,oig->bo", self.splines(torch.tanh(x)), self.one)
        return torch.einsum("big,oig->bo", self.splines(torch.tanh(self.mid(h))), self.two)


@family(real("w"))
class RadialBasis(Net):
    def build(self, w: int) -> None:
        self.centres, self.log_width, self.out = weight(w, w), nn.Parameter(torch.zeros(w)), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        far = (x[:, None] - self.centres).square().mean(-1)
        return self.out(torch.exp(-far * self.log_width.exp()))


@family(real("w"))
class DistanceLayer(Net):
    """Distances by `torch.cdist`."""

    def build(self, w: int) -> None:
        self.centres, self.out = weight(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.exp(-torch.cdist(x, self.centres) / len(self.centres) ** 0.5))


@family()
class FourierFeatures(Net):
    def build(self, w: int) -> None:
        self.waves, self.phase = weight(5, w), nn.Parameter(torch.rand(w))
        self.mid, self.out = nn.Linear(2 * w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        angle = x @ self.waves + self.phase
        return self.out(torch.tanh(self.mid(torch.cat([angle.cos(), angle.sin()], -1))))


@family(real(2), real(1), mse)
class SineNetwork(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(2, w), nn.Linear(w, w), nn.Linear(w, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sin(2 * self.b(torch.sin(3 * self.a(x)))))


@family(real("w"))
class PolynomialNetwork(Net):
    def build(self, w: int) -> None:
        self.layers, self.out = nn.ModuleList(nn.Linear(w, w) for _ in range(3)), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = h + layer(x) * h
        return self.out(h)


@family(real("w"))
class CrossNetwork(Net):
    """Explicit products of features, by vectors and by matrices (DCN, both versions)."""

    def build(self, w: int) -> None:
        self.vectors, self.bias = weight(2, w), nn.Parameter(torch.zeros(2, w))
        self.matrix, self.out = nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for v, b in zip(self.vectors, self.bias, strict=True):
            h = x * (h @ v)[:, None] / 3 + b + h
        return self.out(torch.tanh(x * self.matrix(h) + h))


@family()
class Chebyshev(Net):
    def build(self, w: int) -> None:
        self.one, self.two, self.mid = weight(5, w, 5), weight(w, CLASSES, 5), nn.Linear(w, w)

    def powers(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        terms = [torch.ones_like(x), x]
        for _ in range(3):
            terms.append(2 * x * terms[-1] - terms[-2])
        return torch.stack(terms, -1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bid,iod->bo", self.powers(x), self.one)
        return torch.einsum("bid,iod->bo", self.powers(self.mid(h)), self.two) / 20


# ---- sorting, gathering, scans over values ---------------------------------------------------------------
@family(real("w"), kinks=True)
class Sorting(Net):
    """Sorted activations in groups and over the row, weighted by place."""

    def build(self, w: int) -> None:
        self.a, self.b, self.places, self.out = nn.Linear(w, w), nn.Linear(w, w), weight(w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)
        return self.out(self.b(h).sort(-1, descending=True).values * self.places)


@family(several(real("w"), whole("w", "w")))
class Gathering(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = h.gather(1, places) + torch.zeros_like(h).scatter_add(1, places, h)
        return self.out(self.b(h).tanh())


@family(real(6, 3))
class CumulativeSums(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(3, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.a(x))
        h = h.cumsum(1) / 6 + h.cumprod(1) + h.flip(1).diff(dim=1, prepend=h[:, :1])
        return self.out(torch.tanh(self.b(h)).roll(1, 1)[:, ::2].mean(1))


@family(real(6, 3))
class SegmentMeans(Net):
    """Rows of a sample are summed into three segments in place."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(3, w), nn.Linear(w, w), nn.Linear(3 * w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(self.a(x)))
        sums = torch.zeros_like(h[:, :3])
        sums.index_add_(1, torch.tensor([0, 0, 1, 2, 2, 2], device=x.device), h)
        return self.out(sums.flatten(1))


@family(real("w"), kinks=True)
class HardGates(Net):
    """`where`, `clamp`, `minimum` and a straight-through estimate."""

    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        soft = torch.sigmoid(self.a(x))
        hard = (soft > 0.5).to(soft) + soft - soft.detach()
        h = self.b(x)
        return self.out(torch.where(h > 0, hard * h, 0.1 * h.clamp(-1, 1)) + torch.minimum(soft, h))


@family(real("w", 2))
class ComplexLayers(Net):
    def build(self, w: int) -> None:
        self.one, self.two = nn.Parameter(torch.randn(w, w, 2) / w**0.5), nn.Parameter(torch.randn(CLASSES, w, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(x) @ torch.view_as_complex(self.one).t()
        h = h * torch.sigmoid(h.abs().square())
        return (h @ torch.view_as_complex(self.two).mH / 4).real


# ---- structured outputs ----------------------------------------------------------------------------------
@family(real("w"), whole(4), lambda z, t: F.nll_loss(z, t))
class SoftTree(Net):
    def build(self, w: int) -> None:
        self.body, self.split, self.leaves = nn.Linear(w, w), nn.Linear(w, 7), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        turns, paths = self.split(torch.tanh(self.body(x))), [0.0] * 8
        for leaf, bits in enumerate(itertools.product((0, 1), repeat=3)):
            node = 0
            for bit in bits:
                paths[leaf] = paths[leaf] + F.logsigmoid(turns[:, node] if bit else -turns[:, node])
                node = 2 * node + 1 + bit
        return torch.logsumexp(torch.stack(paths, -1)[..., None] + self.leaves.log_softmax(-1), 1)


@family(several(SEQUENCE, whole(4, LENGTH)), loss=first_as_loss)
class RandomField(Net):
    """Likelihood of a chain of tags: a forward pass of `logsumexp`."""

    def build(self, w: int) -> None:
        self.into, self.mid, self.out, self.turns = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, 4), weight(4, 4)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.mid(self.into(x))))
        total = scores[:, 0]
        for t in range(1, x.shape[1]):
            total = torch.logsumexp(total[..., None] + self.turns, 1) + scores[:, t]
        path = scores.gather(2, tags[..., None]).sum((1, 2)) + self.turns[tags[:, :-1], tags[:, 1:]].sum(1)
        return torch.logsumexp(total, -1) - path


@family(several(real(5, 5), real(5, 1)), loss=first_as_loss)
class GaussianProcess(Net):
    """Likelihood of targets under a kernel of learned features, by a Cholesky factor."""

    def build(self, w: int) -> None:
        self.body, self.noise = (
            nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w)),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        apart = (h[:, :, None] - h[:, None]).square().mean(-1)
        kernel = torch.exp(-apart) + (0.1 + F.softplus(self.noise)) * torch.eye(5).to(x)
        factor = torch.linalg.cholesky(kernel)
        half = torch.linalg.solve_triangular(factor, y, upper=False)
        return half.square().sum((1, 2)) / 2 + factor.diagonal(dim1=1, dim2=2).log().sum(1)


@family(several(real(5, 5), real(5)))
class LinearSolve(Net):
    """Ridge regression in each sample's features, solved inside the model."""

    def build(self, w: int) -> None:
        self.body, self.out, self.wide = nn.Linear(5, w), nn.Linear(5, CLASSES), nn.Linear(w, w)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.wide(torch.tanh(self.body(x))))
        gram = h @ h.mT / h.shape[-1] + torch.eye(5).to(x)
        return self.out(torch.linalg.solve(gram, y[..., None])[..., 0])


@family(real("w"))
class SolvedByParameter(Net):
    """A system whose matrix is a parameter (an implicit layer)."""

    def build(self, w: int) -> None:
        self.a, self.out = nn.Parameter(torch.randn(w, w) / (4 * w**0.5)), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.linalg.solve(torch.eye(len(self.a)).to(x) + self.a, x.t()).t().tanh())


@family(real("w"), loss=first_as_loss)
class CouplingFlow(Net):
    def build(self, w: int) -> None:
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(w // 2, w), nn.Tanh(), nn.Linear(w, w)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total, (a, b) = 0.0, x.chunk(2, -1)
        for net in self.nets:
            shift, scale = net(a).chunk(2, -1)
            a, b = b * torch.tanh(scale).exp() + shift, a
            total = total + torch.tanh(scale).mean(-1)
        return (a.square() + b.square()).mean(-1) / 2 - total


@family(real("w"), loss=first_as_loss)
class LinearFlow(Net):
    """The log-determinant of a matrix of parameters."""

    def build(self, w: int) -> None:
        self.m, self.shift = nn.Parameter(torch.eye(w) + 0.1 * torch.randn(w, w) / w**0.5), nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.m.t() + self.shift
        return z.square().mean(-1) / 2 - torch.linalg.slogdet(self.m).logabsdet / len(self.m)


@family(real(5), real(), lambda z, t: -torch.logsumexp(z[0].log_softmax(-1) - (t[:, None] - z[1]).square()
        * (-z[2]).exp() / 2 - z[2] / 2, -1).mean())  # fmt: skip
class MixtureDensity(Net):
    def build(self, w: int) -> None:
        self.body, self.out = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh()), nn.Linear(w, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.out(self.body(x)).chunk(3, -1)


@family(real(4, 5), whole(4, 4), sequence_loss)
class Sinkhorn(Net):
    def build(self, w: int) -> None:
        self.a, self.b, self.out = nn.Linear(5, w), nn.Linear(w, w), nn.Linear(w, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))
        for _ in range(4):
            scores = scores - torch.logsumexp(scores, -1, keepdim=True)
            scores = scores - torch.logsumexp(scores, -2, keepdim=True)
        return scores


@family(several(real("w"), real(6)), real("w"), lambda z, t: F.mse_loss(z[0], t) - 0.05 * (
        1 + z[2] - z[1].square() - z[2].exp()).sum(-1).mean())  # fmt: skip
class VariationalAutoencoder(Net):
    """Noise is part of the data."""

    def build(self, w: int) -> None:
        self.into, self.code = nn.Linear(w, w), nn.Linear(w, 12)
        self.back, self.out = nn.Linear(6, w), nn.Linear(w, w)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.code(torch.tanh(self.into(x))).chunk(2, -1)
        return self.out(torch.tanh(self.back(mean + noise * (spread / 2).exp()))), mean, spread


@family(several(real(8), real(2)), real(), mse)
class DeepOperator(Net):
    def build(self, w: int) -> None:
        self.branch = nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, w))
        self.trunk = nn.Sequential(nn.Linear(2, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh())
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, u: Tensor, at: Tensor) -> Tensor:
        return torch.einsum("bi,bi->b", self.branch(u), self.trunk(at)) / 4 + self.bias


@family(real(4), real(4), mse)
class Hamiltonian(Net):
    """The field is a gradient of the model's own energy."""

    def build(self, w: int) -> None:
        self.a, self.b, self.c = nn.Linear(4, w), nn.Linear(w, w), nn.Linear(w, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def energy(at: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(at))))).sum()

        q, p = torch.func.grad(energy)(x).chunk(2, -1)
        return torch.cat([p, -q], -1)


@family(real("w"), whole(4), lambda z, t: F.nll_loss(z, t))
class Ordinal(Net):
    """Thresholds rise by construction: a cumulative sum of positive steps."""

    def build(self, w: int) -> None:
        self.a, self.b, self.steps = nn.Linear(w, w), nn.Linear(w, 1), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        cuts = F.softplus(self.steps).cumsum(0) - 1
        below = torch.sigmoid(cuts - self.b(torch.tanh(self.a(x))))
        return F.pad(below, (0, 1), value=1.0).sub(F.pad(below, (1, 0))).clamp(min=1e-6).log()


def cox(outputs: Tensor, targets: Tensor) -> Tensor:
    """Partial likelihood; rows in the batch are ordered by time."""
    order = targets.argsort(descending=True)
    risk = outputs[order]
    return (torch.logcumsumexp(risk, 0) - risk).mean()


@family(real("w"), real(), cox)
class ProportionalHazards(Net):
    def build(self, w: int) -> None:
        self.a, self.b = nn.Linear(w, w), nn.Linear(w, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))[:, 0]


@family(real("w"), real(), lambda z, t: torch.maximum(0.9 * (t[:, None] - z), 0.1 * (z - t[:, None])).mean(), True)
class Quantiles(Net):
    def build(self, w: int) -> None:
        self.a, self.b = nn.Linear(w, w), nn.Linear(w, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.elu(self.a(x)))


@family(
    real("w"), whole(6), lambda z, t: F.poisson_nll_loss(z, t.to(z.dtype)) + 0.1 * F.smooth_l1_loss(z, t.to(z.dtype))
)
class Counts(Net):
    def build(self, w: int) -> None:
        self.a, self.b = nn.Linear(w, w), nn.Linear(w, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))[:, 0]


@family(real(LENGTH, 4), whole(4, 4), lambda z, t: (z[:, :4] - t.to(z.dtype)).square().mean())
class DynamicWarping(Net):
    """Soft minimum over the paths of a table, by a double loop."""

    def build(self, w: int) -> None:
        self.a, self.b, self.shape = nn.Linear(4, w), nn.Linear(w, w), weight(3, w)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        cost = (h[:, :, None] - self.shape).square().mean(-1)
        table: dict[tuple[int, int], Tensor] = {}
        for i, j in itertools.product(range(LENGTH), range(3)):
            before = [table[at] for at in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if at in table]
            table[i, j] = cost[:, i, j] - (torch.logsumexp(-torch.stack(before), 0) if before else 0.0)
        return torch.stack([table[LENGTH - 1 - k, 2 - k % 3] for k in range(4)], -1)


@family(several(real(5), real(1)), real(1), mse)
class DirectionalDerivative(Net):
    """A physics-informed residual: a forward-mode derivative with respect to time."""

    def build(self, w: int) -> None:
        self.a, self.b, self.c = nn.Linear(6, w), nn.Linear(w, w), nn.Linear(w, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        def field(at: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(torch.cat([x, at], -1))))))

        value, slope = torch.func.jvp(field, (t,), (torch.ones_like(t),))
        return slope + 0.5 * value


@family()
class StridedViews(Net):
    """Overlapping windows of a vector of parameters, at an explicit place in its memory."""

    def build(self, w: int) -> None:
        self.scale, self.line = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(w * w + w))
        self.first, self.out = nn.Linear(5, w), nn.Linear(w, CLASSES)
        self.w = w

    def forward(self, x: Tensor) -> Tensor:
        rows = self.line.as_strided((self.w, self.w), (self.w, 1), self.w)
        return self.scale * self.out(torch.tanh(self.first(x) @ rows / self.w**0.5))


@family()
class WindowsOfParameters(Net):
    def build(self, w: int) -> None:
        self.first, self.line, self.out = nn.Linear(5, w), nn.Parameter(torch.randn(w * w + w)), nn.Linear(w, CLASSES)
        self.w = w

    def forward(self, x: Tensor) -> Tensor:
        rows = self.line.unfold(0, self.w, self.w)[1:]  # a view of all but the first window
        return self.out(torch.tanh(F.linear(self.first(x), rows) / math.sqrt(self.w)))
