"""Tasks by name: a data set with a model and a split, each of them a choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from offbeat.config import registry
from offbeat.config.options import fits, option_problems
from offbeat.config.room import too_large
from offbeat.errors import ConfigError, in_words
from offbeat.numerics.buffers import BatchNorm
from offbeat.numerics.forked import forked
from offbeat.numerics.samples import Sampling
from offbeat.numerics.windows import Stream, windows
from offbeat.tasks.data import DATA, Scale
from offbeat.tasks.losses import reason, sequence_cross_entropy
from offbeat.tasks.models import build as build_model
from offbeat.tasks.models import parameters
from offbeat.tasks.quadratic import quadratic, random_quadratic
from offbeat.tasks.task import Task
from offbeat.tasks.text import OWNERS, cut, owned, read_texts

COPIES = 6  # of a model in a run, at least: as given, as trained, versions, and what a job needs
Named = str | Mapping[str, Any]  # "iid", or {name = "dirichlet", alpha = 0.3}


def classification(
    data: str,
    seed: int,
    clients: int | None = 100,
    model: Named = "mlp",
    split: Named = "iid",
    batch_size: int | list[int] | None = 10,
    sampling: Sampling = "replacement",
    scale: Scale | None = None,
    held_out: int = 0,
    batch_norm: BatchNorm | None = None,
) -> Task:
    """A labelled data set, divided over clients. `scale` None is the data set's own default.

    Where samples have owners (`har`: people), `held_out` of them are for testing alone; `clients` None is one for each
    of the others. `batch_norm` is the rule for a model with running statistics.
    """
    read: dict[str, Any] = {} if scale is None else {"scale": scale}
    read |= {"held_out": held_out} if held_out else {}
    return labelled(data, read, seed, clients, model, split, batch_size, sampling, batch_norm)


def leaf(
    seed: int,
    clients: int | None = None,
    model: Named = "leaf-femnist-cnn",
    split: Named = "natural",
    batch_size: int | list[int] | None = 10,
    sampling: Sampling = "replacement",
    folder: str = "leaf",
    classes: int | None = None,
    batch_norm: BatchNorm | None = None,
) -> Task:
    """A set in LEAF's layout, such as FEMNIST: JSON files of samples by user, in train/ and test/ of `folder`.

    `clients` None is one for each user. To put all users on fewer clients, take
    split = {name = "natural", fewer = "grouped"}. `classes` None is the largest label plus one.
    """
    read = {"folder": folder, "classes": classes}
    return labelled("leaf", read, seed, clients, model, split, batch_size, sampling, batch_norm)


def labelled(
    data: str,
    read: Mapping[str, Any],
    seed: int,
    clients: int | None,
    model: Named,
    split: Named,
    batch_size: int | list[int] | None,
    sampling: Sampling,
    batch_norm: BatchNorm | None,
) -> Task:
    """The data set, read with the options `read` and divided. `clients` None is one for each owner."""
    split_name, split_options = named("split", split)
    model_name, model_options = named("model", model)
    fixed = ("y", "clients", "seed", "owners")
    problems = option_problems(f"split '{split_name}'", registry.find("split", split_name), split_options, fixed)
    problems += option_problems(f"data '{data}'", DATA[data], read)
    if problems:
        raise ConfigError(problems)
    loaded = DATA[data](**read)
    if clients is None and loaded.owners is not None:
        clients = len(np.unique(loaded.owners))
    shards = split_up(split_name, loaded.y, clients, seed, loaded.owners, split_options)
    if problems := model_problems(model_name, tuple(loaded.x.shape[1:]), loaded.classes or 1, model_options):
        raise ConfigError(problems)
    net = build_model(model_name, tuple(loaded.x.shape[1:]), loaded.classes or 1, seed, **model_options)
    return Task(
        net,
        functional.cross_entropy,
        (torch.from_numpy(loaded.x), torch.from_numpy(loaded.y)),
        shards,
        (torch.from_numpy(loaded.x_test), torch.from_numpy(loaded.y_test)),
        batch_size,
        sampling,
        data,
        batch_norm=batch_norm,
    )


CONTEXT = {"char-lstm": 80, "gru": 40, "transformer-10m": 256}  # tokens that a model sees; 64 for others


def text(
    data: str,
    seed: int,
    clients: int | None = None,
    model: Named = "char-lstm",
    split: Named = "natural",
    batch_size: int | list[int] | None = 10,
    sampling: Sampling = "replacement",
    folder: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    minimum: int = 1000,
    held_out: int = 0,
    test_share: float = 0.1,
    test_windows: int = 2000,
) -> Task:
    """The next character ("shakespeare", by speaker) or byte ("linux-doc", by folder) of texts.

    Texts are `text/NAME.jsonl` (plain, .xz, .gz) or a folder `text/NAME` of text files, or those of `folder`. `clients`
    None is one for each owner with at least `minimum` tokens. Samples are windows of `context` tokens at every
    `stride`-th place: none is one behind the other for a model that gives scores at every place, and every place for
    one that gives them for the last. For testing is the last `test_share` of each text, or the whole texts of
    `held_out` owners; at most `test_windows` windows of it, at even distances.
    """
    split_name, split_options = named("split", split)
    model_name, model_options = named("model", model)
    length = CONTEXT.get(model_name, 64) if context is None else context
    sizes = {"context": length, "minimum": minimum, "test_windows": test_windows, "stride": stride or 1}
    problems = [f"task '{data}': {name} = {n}; give at least 1" for name, n in sizes.items() if n < 1]
    if not 0 < test_share < 1:
        problems.append(f"task '{data}': test_share = {test_share}; give a number between 0 and 1")
    fixed = ("y", "clients", "seed", "owners")
    problems += option_problems(f"split '{split_name}'", registry.find("split", split_name), split_options, fixed)
    if problems:
        raise ConfigError(problems)
    find, unit = OWNERS[data]
    whole = owned(find(read_texts(data, folder)), unit, minimum, data)
    many = len(whole.vocabulary)
    if problems := model_problems(model_name, (length,), many, model_options):
        raise ConfigError(problems)
    net = build_model(model_name, (length,), many, seed, **model_options)
    predict = "all" if scored_places(model_name, net, length) else "last"
    places = cut(whole, length, stride or (length if predict == "all" else 1), held_out, test_share, test_windows)
    if not len(places.starts) or not len(places.test):
        raise ConfigError(
            [f"task '{data}': texts are too short for windows of {length} tokens; take a smaller context"]
        )
    owners = np.unique(places.owners, return_inverse=True)[1]
    shards = split_up(split_name, owners, clients or 1 + int(owners.max()), seed, owners, split_options)
    stream = Stream(whole.tokens)
    train, test = (windows(stream, length, starts, predict=predict) for starts in (places.starts, places.test))
    loss = sequence_cross_entropy if predict == "all" else functional.cross_entropy
    return Task(net, loss, train, shards, test, batch_size, sampling, data)


def split_up(name: str, y: Any, clients: Any, seed: int, owners: Any, options: dict[str, Any]) -> Any:
    """The shards that a split gives, one for each client."""
    shards = registry.make("split", name, y, clients, seed, owners, **options)
    if isinstance(shards, Sized) and len(shards) != clients:
        raise ConfigError(
            [f"split '{name}' gives {len(shards)} shards for {clients} clients; it must give one for each"]
        )
    return shards


@torch.enable_grad()
def scored_places(name: str, model: torch.nn.Module, length: int) -> bool:
    """Whether a model of tokens gives scores at every place, and not for the last alone."""
    try:
        with forked():
            return bool(model(torch.zeros(1, length, dtype=torch.int64)).dim() == 3)
    except Exception as error:  # whatever a model of one's own raises
        raise ConfigError(
            [f"model '{name}' does not take {length} tokens: {reason(error)}. Take one with a table, such as 'gpt'"]
        ) from error


def quadratics(
    seed: int, clients: int = 10, dimension: int = 5, spread: float = 1.0, noise: float = 0.0, samples: int = 1
) -> Task:
    """Random strongly convex quadratics with a known optimum; no accuracy, the loss is the value."""
    what = f"task 'quadratic' with clients = {clients:,}, samples = {samples:,} and dimension = {dimension:,}"
    size = 8.0 * clients * (dimension**2 + 3 * samples * (dimension**2 + dimension))
    if problems := too_large(what, size, "take fewer of one of them"):
        raise ConfigError(problems)
    matrices, linear = random_quadratic(clients, dimension, spread, seed=seed)
    return quadratic(matrices, linear, None, noise, samples, seed)


def model_problems(name: str, shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]) -> list[str]:
    """A model that this machine cannot hold, counted before a single weight is drawn."""
    said = "".join(f", {key} = {in_words(value)}" for key, value in options.items())
    try:
        numbers = parameters(name, shape, outputs, options)
    except RuntimeError:  # more bytes than an address has
        return [f"model '{name}'{said} has more parameters than any machine can hold; take a smaller one"]
    what = f"model '{name}'{said} has {numbers:,} parameters; a run of it"
    return too_large(what, 4.0 * COPIES * numbers, "take a smaller model")


DEFAULTS: dict[str, dict[str, Any]] = {  # what a data set starts from, when the config does not say
    "a9a": {"model": "logistic"},
    "digits": {"model": "logistic"},
    "fashion-mnist": {"model": "dlsgd-cnn"},
    "mnist": {"model": "mlp"},
    "cifar10": {"model": "dlsgd-cnn"},
    "cinic10": {"model": "vgg16"},
    "har": {"model": "mlp", "split": "natural", "clients": None},
}
TASKS: dict[str, Callable[..., Task]] = {
    **dict.fromkeys(DATA, classification),
    "leaf": leaf,
    **dict.fromkeys(OWNERS, text),
    "quadratic": quadratics,
}


def build_task(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """The task of that name, or every problem with its options at once."""
    make: Callable[..., Task] = registry.find("task", name)
    problems = option_problems(f"task '{name}'", make, options, ("data", "seed"))
    for count in ("clients", "dimension", "samples", "batch_size"):
        given = options.get(count)
        given = given if fits(given, float) else None
        if not problems and count == "batch_size" and given is not None and given < 1:
            problems.append(f"task '{name}': batch_size = {given}; give at least 1, or none for the whole shard")
        elif not problems and given is not None and given < 1:
            problems.append(f"task '{name}': {count} = {given}; it must be at least 1")
    if problems:
        raise ConfigError(problems)
    if make is classification:
        return classification(name, seed, **{**DEFAULTS[name], **options})
    if make is text:
        return text(name, seed, **options)
    task: Task = registry.make("task", name, seed=seed, **options)
    return task


def named(kind: str, given: Named) -> tuple[str, dict[str, Any]]:
    options = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in options:
        known = ", ".join(registry.shipped(kind))
        raise ConfigError([f"{kind} = {in_words(given)} has no name; write {kind}.name = ... (known: {known})"])
    name = str(options.pop("name"))
    registry.find(kind, name)
    return name, options
