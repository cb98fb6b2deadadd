"""Models, built from the shape of one sample and the number of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offbeat.config import registry
from offbeat.config.options import option_problems
from offbeat.errors import ConfigError
from offbeat.numerics.forked import forked
from offbeat.tasks.large_models import CropFlip as CropFlip
from offbeat.tasks.large_models import alexnet, images, mobilenet, resnet18_gn, share, vgg16, vgg19
from offbeat.tasks.sequence_models import char_lstm, gpt, gru, har_conv1d, recommender, transformer_10m, vit


def logistic(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Multinomial logistic regression: the scores W x + b; the softmax is in the loss."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def linear(input_shape: tuple[int, ...], outputs: int = 1) -> nn.Sequential:
    """Linear regression: W x + b."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def mlp(input_shape: tuple[int, ...], outputs: int, hidden: int = 200) -> nn.Sequential:
    """One hidden layer with ReLU: the two-layer network of many papers, where they do not say how wide it is."""
    _positive("hidden", hidden)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def dlsgd_cnn(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The network of the DLSGD experiments: two 5x5 convolutions without padding, each with 2x2 pooling, then 512.

    582,026 parameters on 1x28x28 and 878,538 on 3x32x32, with 10 outputs.
    """
    channels, height, width = images("dlsgd-cnn", input_shape, 16)
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
    channels, height, width = images("pfl-cnn", input_shape, 6)
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


def fedagrac_cnn(input_shape: tuple[int, ...], outputs: int, dropout: float = 0.5) -> nn.Sequential:
    """The 2-layer CNN of the FedaGrac experiments (Table 3): two 5x5 convolutions with 2x2 pooling, then 50.

    21,840 parameters on 1x28x28 with 10 outputs. The first dropout is of whole channels, before the pooling.
    """
    channels, height, width = images("fedagrac-cnn", input_shape, 16)
    share("dropout", dropout)
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.Dropout2d(dropout),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20 * math.prod(left), 50),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(50, outputs),
    )


def fedavg_cifar_cnn(input_shape: tuple[int, ...], outputs: int, crop: int | None = 24) -> nn.Sequential:
    """The CIFAR-10 network of McMahan et al. (2017), from a tutorial of TensorFlow: two 5x5 convolutions, 384, 192.

    It sees the `crop` x `crop` pixels in the middle of an image: 1,068,298 parameters on 3x32x32 with 10 outputs. None
    is the whole image: 1,756,426. There images are cropped, mirrored and coloured at random, and there is a local
    response normalisation, without parameters, in each of the first two layers; both are left out here. Weights begin
    as PyTorch draws them.
    """
    channels, height, width = images("fedavg-cifar-cnn", input_shape, 1)
    middle: list[nn.Module] = []
    if crop is not None:
        _positive("crop", crop)
        if crop > min(height, width):
            raise ConfigError(
                [f"crop is {crop}, but images are {height}x{width}; give {min(height, width)} at most, or none."]
            )
        middle, height, width = [CentreCrop(crop)], crop, crop
    left = [(side + 3) // 4 for side in (height, width)]
    return nn.Sequential(
        *middle,
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Flatten(),
        nn.Linear(64 * math.prod(left), 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, outputs),
    )


def leaf_femnist_cnn(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The FEMNIST network of LEAF (Caldas et al. 2019): two 5x5 convolutions with 2x2 pooling, then 2048.

    6,603,710 parameters on 1x28x28 with 62 outputs.
    """
    channels, height, width = images("leaf-femnist-cnn", input_shape, 4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 2048),
        nn.ReLU(),
        nn.Linear(2048, outputs),
    )


def heterogeneity_cnn(input_shape: tuple[int, ...], outputs: int, filters: int = 32) -> nn.Sequential:
    """The CIFAR-10 network of the FedAvg paper on heterogeneity (Appendix C): two 5x5 convolutions, 512, 128.

    1,144,106 parameters on 3x32x32 with 10 outputs. The paper prints two convolutions of 32 filters and then a layer
    of 4096 x 512, which do not fit each other: 4096 is 64 x 8 x 8, of a padding by 2 and 64 filters in the second one.
    The padding is taken; `filters` in the second one are 32, and with 64 the layer is as printed: 2,218,314
    parameters. ReLUs, of which it does not speak, stand after every layer but the last.
    """
    channels, height, width = images("heterogeneity-cnn", input_shape, 4)
    _positive("filters", filters)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, filters, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(filters * (height // 4) * (width // 4), 512),
        nn.ReLU(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


class CentreCrop(nn.Module):
    """The `size` x `size` pixels in the middle of an image; half a pixel is rounded up and left."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top, left = ((side - self.size) // 2 for side in x.shape[-2:])
        return x[..., top : top + self.size, left : left + self.size]


MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "char-lstm": char_lstm,
    "dlsgd-cnn": dlsgd_cnn,
    "fedagrac-cnn": fedagrac_cnn,
    "fedavg-cifar-cnn": fedavg_cifar_cnn,
    "gpt": gpt,
    "gru": gru,
    "har-conv1d": har_conv1d,
    "heterogeneity-cnn": heterogeneity_cnn,
    "leaf-femnist-cnn": leaf_femnist_cnn,
    "linear": linear,
    "logistic": logistic,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "pfl-cnn": pfl_cnn,
    "recommender": recommender,
    "resnet18-gn": resnet18_gn,
    "transformer-10m": transformer_10m,
    "vgg16": vgg16,
    "vgg19": vgg19,
    "vit": vit,
}


def build(name: str, input_shape: tuple[int, ...], outputs: int, seed: int, **options: Any) -> nn.Module:
    """The named model on the CPU, with initial weights drawn from `seed` alone.

    The global generators of PyTorch are left as they were, on every device.

    >>> build("mlp", (1, 8, 8), 10, seed=0, hidden=32)[1]
    Linear(in_features=64, out_features=32, bias=True)
    """
    check(name, input_shape, outputs, options)
    if not -(2**63) <= seed < 2**64:
        raise ConfigError([f"seed is {seed}; give a whole number of 64 bits."])
    with torch.device("cpu"), forked():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reach the other devices
        model: nn.Module = registry.make("model", name, tuple(input_shape), outputs, **options)
        return model


def parameters(name: str, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]) -> int:
    """How many numbers the named model has; none of them is drawn. A RuntimeError says that they cannot be counted."""
    check(name, input_shape, outputs, options)
    with torch.device("meta"):
        model: nn.Module = registry.make("model", name, tuple(input_shape), outputs, **options)
        return sum(p.numel() for p in model.parameters())


def check(name: str, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]) -> None:
    """Refuses a model that cannot be built."""
    make = registry.find("model", name)
    problems = option_problems(f"model '{name}'", make, options, ("input_shape", "outputs"))
    if problems:
        raise ConfigError(problems)
    _positive("outputs", outputs)
    for size in input_shape:
        _positive(f"a side of input_shape {tuple(input_shape)}", size)


def _positive(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError([f"{what} is {value}; give a whole number of at least 1."])
