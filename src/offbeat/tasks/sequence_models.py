"""Models of sequences: recurrence and attention over tokens, patches of images and lines of features.

A sample is `input_shape = (length,)`: whole numbers below `vocabulary` (None: the outputs) where a model has a table,
real numbers for `har-conv1d`; images for `vit`. They are built by name with `offbeat.tasks.models.build`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import ConfigError
from offbeat.tasks.large_models import images, share


class Recurrent(nn.Module):
    """Tokens through a table and a recurrence; the state after the last one gives the scores."""

    def __init__(self, vocabulary: int, width: int, recurrence: nn.LSTM | nn.GRU, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.recurrence = recurrence
        self.scores = nn.Linear(recurrence.hidden_size, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrence(self.table(tokens))
        scores: Tensor = self.scores(states[:, -1])
        return scores


def char_lstm(
    input_shape: tuple[int, ...], outputs: int, vocabulary: int | None = None, width: int = 8, hidden: int = 256,
    layers: int = 2,
) -> nn.Module:  # fmt: skip
    """The LSTM over characters of McMahan et al. (2017) and LEAF: the next character after the last one.

    819,920 parameters with 80 outputs, whatever the length; there it is 80.
    """
    line("char-lstm", input_shape)
    positive(width=width, hidden=hidden, layers=layers)
    return Recurrent(vocabulary or outputs, width, nn.LSTM(width, hidden, layers, batch_first=True), outputs)


def gru(
    input_shape: tuple[int, ...], outputs: int, vocabulary: int | None = None, width: int = 32, hidden: int = 128,
    layers: int = 1,
) -> nn.Module:  # fmt: skip
    """A small GRU over tokens: the next one after the last. 75,088 parameters with 80 outputs."""
    line("gru", input_shape)
    positive(width=width, hidden=hidden, layers=layers)
    return Recurrent(vocabulary or outputs, width, nn.GRU(width, hidden, layers, batch_first=True), outputs)


class Block(nn.Module):
    """A transformer's layer: attention, then a network at each place; each behind a normalisation, beside the input."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.before = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias)
        self.together = nn.Linear(width, width, bias)
        self.between = nn.LayerNorm(width)
        self.wider = nn.Linear(width, 4 * width, bias)
        self.back = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        x = x + functional.dropout(self.together(seen.transpose(1, 2).flatten(2)), dropout)
        return x + functional.dropout(self.back(functional.gelu(self.wider(self.between(x)))), dropout)


class Transformer(nn.Module):
    """Tokens and their places through blocks; scores at every place, each from what stands before."""

    def __init__(self, vocabulary: int, length: int, width: int, blocks: list[Block], outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.LayerNorm(width)
        self.scores = nn.Linear(width, outputs, bias=False)
        for part in (self.table, self.places, self.scores):
            nn.init.normal_(part.weight if isinstance(part, nn.Module) else part, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.last(self.blocks(self.table(tokens) + self.places)))
        return scores


def gpt(
    input_shape: tuple[int, ...], outputs: int, vocabulary: int | None = None, width: int = 128, layers: int = 4,
    heads: int = 4, dropout: float = 0.0,
) -> nn.Module:  # fmt: skip
    """A small GPT: the next token at every place. 818,176 parameters with 65 outputs and a length of 64."""
    return transformer("gpt", input_shape, outputs, vocabulary, width, layers, heads, dropout, True)


def transformer_10m(
    input_shape: tuple[int, ...], outputs: int, vocabulary: int | None = None, width: int = 384, layers: int = 6,
    heads: int = 6, dropout: float = 0.0,
) -> nn.Module:  # fmt: skip
    """A GPT without biases in its layers, 384 wide: 10,775,040 parameters with 65 outputs and a length of 256."""
    return transformer("transformer-10m", input_shape, outputs, vocabulary, width, layers, heads, dropout, False)


def transformer(
    name: str, input_shape: tuple[int, ...], outputs: int, vocabulary: int | None, width: int, layers: int, heads: int,
    dropout: float, bias: bool,
) -> nn.Module:  # fmt: skip
    length = line(name, input_shape)
    attention_fits(name, width, layers, heads, dropout)
    blocks = [Block(width, heads, True, dropout, bias) for _ in range(layers)]
    return Transformer(vocabulary or outputs, length, width, blocks, outputs)


class Patches(nn.Module):
    """An image as a line of patches with their places, the mean of which gives the scores."""

    def __init__(self, channels: int, patches: int, side: int, width: int, blocks: list[Block], outputs: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, side, stride=side)
        self.places = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.LayerNorm(width)
        self.scores = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        line = self.patch(x).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.scores(self.last(self.blocks(line)).mean(1))
        return scores


def vit(
    input_shape: tuple[int, ...], outputs: int, patch: int = 4, width: int = 96, layers: int = 6, heads: int = 3,
    dropout: float = 0.0,
) -> nn.Module:  # fmt: skip
    """A small vision transformer. 683,050 parameters on 3x32x32 with 10 outputs."""
    positive(patch=patch)
    channels, height, wide = images("vit", input_shape, patch)
    if height % patch or wide % patch:
        raise ConfigError(
            [f"images of {height}x{wide} pixels are no whole patches of {patch}; take a divisor of both."]
        )
    attention_fits("vit", width, layers, heads, dropout)
    blocks = [Block(width, heads, False, dropout, True) for _ in range(layers)]
    return Patches(channels, (height // patch) * (wide // patch), patch, width, blocks, outputs)


def har_conv1d(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Two 1-d convolutions over a line of features with pooling, then 64. 286,374 parameters on HAR's 561 features."""
    length = line("har-conv1d", input_shape, 16)
    left = ((length - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Unflatten(1, (1, length)),
        nn.Conv1d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(32, 32, 5),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(32 * left, 64),
        nn.ReLU(),
        nn.Linear(64, outputs),
    )


class Recommender(nn.Module):
    """The mean of what was chosen, through a hidden layer, gives a score to everything there is."""

    def __init__(self, items: int, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(items, width)
        self.hidden = nn.Linear(width, hidden)
        self.scores = nn.Linear(hidden, outputs)

    def forward(self, chosen: Tensor) -> Tensor:
        scores: Tensor = self.scores(functional.relu(self.hidden(self.table(chosen).mean(1))))
        return scores


def recommender(
    input_shape: tuple[int, ...], outputs: int, vocabulary: int | None = None, width: int = 32, hidden: int = 64
) -> nn.Module:
    """The next of `outputs` items from the last `length` that someone chose. 196,112 parameters with 2,000 items."""
    line("recommender", input_shape)
    positive(width=width, hidden=hidden)
    return Recommender(vocabulary or outputs, width, hidden, outputs)


# ---- checks -------------------------------------------------------------------------------------
def line(model: str, input_shape: tuple[int, ...], least: int = 1) -> int:
    """The length of samples that are lines."""
    if len(input_shape) != 1 or input_shape[0] < least:
        raise ConfigError(
            [
                f"model '{model}' needs lines of at least {least} numbers, the data has samples of shape "
                f"{'x'.join(map(str, input_shape)) or '()'}; take another model."
            ]
        )
    return input_shape[0]


def positive(**sizes: int) -> None:
    if problems := [
        f"{name} is {size}; give a whole number of at least 1." for name, size in sizes.items() if size < 1
    ]:
        raise ConfigError(problems)


def attention_fits(model: str, width: int, layers: int, heads: int, dropout: float) -> None:
    positive(width=width, layers=layers, heads=heads)
    share("dropout", dropout)
    if width % heads:
        raise ConfigError([f"model '{model}': width = {width} is no multiple of heads = {heads}; make it one."])
