"""Models: plain `nn.Sequential`s, built from the shape of one sample and the number of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offbeat.errors import ConfigError, unknown
from offbeat.options import option_problems


def logistic(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Multinomial logistic regression: the scores W x + b; the softmax is in the loss."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def linear(input_shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
    """Linear regression: W x + b."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def mlp(input_shape: tuple[int, ...], outputs: int, hidden: int = 200) -> nn.Sequential:
    """One hidden layer with ReLU."""
    _positive("hidden", hidden)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def dlsgd_cnn(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The network of the DLSGD experiments: two 5x5 convolutions without padding, each with 2x2 pooling, then 512.

    582,026 parameters on 1x28x28 and 878,538 on 3x32x32, with 10 outputs.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise ConfigError(
            [
                f"model 'dlsgd-cnn' needs images of channels x height x width of at least 16x16 pixels, the data has "
                f"samples of shape {'x'.join(map(str, input_shape)) or '()'}; take 'mlp' or 'logistic'."
            ]
        )
    channels, height, width = input_shape
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * math.prod(left), 512),
        nn.ReLU(),
        nn.Linear(512, outputs),
    )


def pfl_cnn(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The network of pfl-research's CIFAR-10 benchmark: two 3x3 convolutions, one pooling, 128, with dropout.

    1,626,442 parameters on 3x32x32 with 10 outputs. Weights are Glorot-uniform, as there.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 6:
        raise ConfigError(
            [
                f"model 'pfl-cnn' needs images of channels x height x width of at least 6x6 pixels, the data has "
                f"samples of shape {'x'.join(map(str, input_shape)) or '()'}; take 'mlp' or 'logistic'."
            ]
        )
    channels, height, width = input_shape
    model = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, outputs),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "dlsgd-cnn": dlsgd_cnn,
    "linear": linear,
    "logistic": logistic,
    "mlp": mlp,
    "pfl-cnn": pfl_cnn,
}


def build(name: str, input_shape: tuple[int, ...], outputs: int, seed: int, **options: Any) -> nn.Module:
    """The named model on the CPU, with PyTorch's default initial weights drawn from `seed` alone.

    The global generators of PyTorch are left as they were, on every device.

    >>> build("mlp", (1, 8, 8), 10, seed=0, hidden=32)[1]
    Linear(in_features=64, out_features=32, bias=True)
    """
    if name not in MODELS:
        raise ConfigError([unknown("model", name, MODELS)])
    problems = option_problems(f"model '{name}'", MODELS[name], options, ("input_shape", "outputs"))
    if problems:
        raise ConfigError(problems)
    _positive("outputs", outputs)
    for size in input_shape:
        _positive(f"a side of input_shape {tuple(input_shape)}", size)
    if not -(2**63) <= seed < 2**64:
        raise ConfigError([f"seed is {seed}; give a whole number of 64 bits."])
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reach the other devices
        return MODELS[name](tuple(input_shape), outputs, **options)


def _positive(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError([f"{what} is {value}; give a whole number of at least 1."])
