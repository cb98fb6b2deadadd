"""Data sets: a table of loaders, each giving scaled training and test arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from offbeat import keys
from offbeat.errors import ConfigError, OffbeatError, unknown
from offbeat.tasks import files
from offbeat.tasks.leaf import find_users, read_users
from offbeat.tasks.text import held_out_of

Scale: TypeAlias = Literal["unit", "symmetric", "standard"]
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

DIGITS_TEST = 360  # of 1797


@dataclass(frozen=True, eq=False)
class Data:
    """A data set, scaled and checked: one row per sample.

    `classes` is the number of labels (0 .. classes-1), or None where `y` holds float32 targets.
    `owners` gives for each training sample the id of the person it came from, where there is one.
    """

    name: str
    x: Floats
    y: npt.NDArray[Any]
    x_test: Floats
    y_test: npt.NDArray[Any]
    classes: int | None
    owners: Integers | None

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            _check(self.name, part, x, y, self.classes)
        if len(self.x) == 0:
            raise OffbeatError(f"data set '{self.name}' has no training sample; give at least one.")
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise OffbeatError(
                f"data set '{self.name}' has training samples of shape {self.x.shape[1:]} and test samples of "
                f"shape {self.x_test.shape[1:]}; make them equal."
            )
        if self.owners is not None and self.owners.shape != (len(self.x),):
            raise OffbeatError(
                f"data set '{self.name}' has owners of shape {self.owners.shape} for {len(self.x)} training "
                "samples; give one owner id per sample."
            )


def _check(name: str, part: str, x: Floats, y: npt.NDArray[Any], classes: int | None) -> None:
    wanted = np.float32 if classes is None else np.int64
    if x.dtype != np.float32 or y.dtype != wanted:
        raise OffbeatError(
            f"data set '{name}' has {part} x of type {x.dtype} and y of type {y.dtype}; convert them to float32 and "
            f"{np.dtype(wanted)}."
        )
    if len(x) != len(y):
        raise OffbeatError(f"data set '{name}' has {len(x)} {part} samples and {len(y)} values of y; make them equal.")
    _finite(f"data set '{name}', {part} x", x)
    _finite(f"data set '{name}', {part} y", y)
    if classes is None:
        return
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if bad.size:
        raise OffbeatError(
            f"data set '{name}': {part} sample {bad[0]} has label {y[bad[0]]}, but with {classes} classes labels are "
            f"0 to {classes - 1}. Correct the labels or the number of classes."
        )


def _finite(what: str, values: npt.NDArray[Any]) -> None:
    finite = np.isfinite(values).reshape(len(values), int(np.prod(values.shape[1:]))).all(axis=1)
    if not finite.all():
        raise OffbeatError(f"{what} holds NaN or infinity, first in sample {np.argmin(finite)}. Repair or drop it.")


def scaled(train: files.Bytes, test: files.Bytes, scale: Scale, top: int = 255) -> tuple[Floats, Floats]:
    """Pixels 0..top of images [n, C, H, W] as numbers.

    "unit" is pixel / top, in [0, 1]; "symmetric" is 2 pixel / top - 1, in [-1, 1]; "standard" is (pixel - mean) / std
    per channel, both taken over the training set.
    """
    if scale not in get_args(Scale):
        raise ConfigError([unknown("scale", str(scale), get_args(Scale))])
    levels = np.arange(top + 1)
    out, out_test = np.empty(train.shape, np.float32), np.empty(test.shape, np.float32)
    for c in range(train.shape[1]):
        mean, std = (top / 2, top / 2) if scale == "symmetric" else (0.0, float(top))
        if scale == "standard":  # exact, from the histogram of pixel values
            counts = sum(np.bincount(part.ravel(), minlength=top + 1) for part in np.array_split(train[:, c], 16))
            mean = float(np.average(levels, weights=counts))
            std = float(np.average((levels - mean) ** 2, weights=counts)) ** 0.5 or 1.0  # a constant channel stays 0
        table = ((levels - mean) / std).astype(np.float32)
        for images, into in ((train, out), (test, out_test)):
            for i in range(0, len(images), 64):  # few at a time, in the cache: ten times as fast
                into[i : i + 64, c] = table[images[i : i + 64, c]]
    return out, out_test


def _images(name: str, train: list[files.Bytes], test: list[files.Bytes], scale: Scale, top: int = 255) -> Data:
    x, x_test = scaled(train[0], test[0], scale, top)
    return Data(name, x, train[1].astype(np.int64), x_test, test[1].astype(np.int64), 10, None)


# ---- the loaders --------------------------------------------------------------------------------
def digits(scale: Scale = "unit") -> Data:
    """The 8x8 digits bundled with scikit-learn: 1437 for training and 360 for testing, the same on every machine.

    Stratified: the samples, in a fixed random order within their class, are laid class after class, and the test
    samples are taken from this line at even distances.
    """
    from sklearn.datasets import load_digits  # takes a second to import, and only this data set needs it

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.uint8)
    n = np.arange(len(labels), dtype=np.int64)
    line = np.lexsort((keys.key(0, "digits test", n), labels))
    held = np.zeros(len(n), bool)
    held[line[np.diff(np.arange(len(n) + 1) * DIGITS_TEST // len(n)) == 1]] = True
    return _images("digits", [images[~held], labels[~held]], [images[held], labels[held]], scale, top=16)


def _idx_set(name: str, source: str, scale: Scale) -> Data:
    parts = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    _, paths = files.locate(name, [files.Layout(name, parts)], source)
    train, test = files.idx_pair(paths[0], paths[1], 10), files.idx_pair(paths[2], paths[3], 10)
    return _images(name, list(train), list(test), scale)


def fashion_mnist(scale: Scale = "standard") -> Data:
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothes, [n, 1, 28, 28], 10 classes."""
    source = "the Fashion-MNIST repository of Zalando Research or the Debian package dataset-fashion-mnist"
    return _idx_set("fashion-mnist", source, scale)


def mnist(scale: Scale = "standard") -> Data:
    """MNIST: 60,000 + 10,000 handwritten digits, [n, 1, 28, 28], 10 classes."""
    return _idx_set("mnist", "the MNIST page of Y. LeCun, C. Cortes and C. Burges", scale)


def cifar10(scale: Scale = "standard") -> Data:
    """CIFAR-10: 50,000 + 10,000 colour images, [n, 3, 32, 32], 10 classes; binary or pickled official batches."""
    batches = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    binary = tuple(f"{batch}.bin" for batch in batches)
    layouts = [
        files.Layout("cifar10/cifar-10-batches-bin", binary),
        files.Layout("cifar-10-batches-bin", binary),
        files.Layout("cifar10", binary),
        files.Layout("cifar10/cifar-10-batches-py", batches),
        files.Layout("cifar-10-batches-py", batches),
    ]
    layout, paths = files.locate("cifar10", layouts, "the CIFAR-10 page of A. Krizhevsky, University of Toronto")
    reader = files.cifar_bin if layout.files == binary else files.cifar_py
    parts = [reader(path) for path in paths]
    train = [np.concatenate([part[i] for part in parts[:-1]]) for i in (0, 1)]
    return _images("cifar10", train, list(parts[-1]), scale)


CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cinic10(scale: Scale = "standard") -> Data:
    """CINIC-10: 90,000 + 90,000 colour images, [n, 3, 32, 32], 10 classes; folders train/ and test/ of PNG files."""
    source = "the CINIC-10 page of L. N. Darlow and others, University of Edinburgh"
    parts = files.find_folders("cinic10", ("cinic10", "CINIC-10", "cinic-10"), ("train", "test"), source)
    lacks = [part / name for part in parts for name in CINIC_CLASSES if not (part / name).is_dir()]
    if lacks:
        raise files.damaged(
            lacks[0].parent, f"it has no folder {lacks[0].name}; classes are {', '.join(CINIC_CLASSES)}"
        )
    train, test = (files.image_folders(part, CINIC_CLASSES, 32) for part in parts)
    return _images("cinic10", list(train), list(test), scale)


def har(held_out: int = 0) -> Data:
    """UCI HAR: smartphone motion features of real people, 6 activities; `owners` are the people.

    Of each person's samples, in file order, every fifth is held out for testing; or all samples of `held_out` people,
    at even distances in the order of their ids, and none of the others.
    """
    layout = files.Layout("uci-har", ("uci_har_train_features.npz",))
    source = "the UCI Machine Learning Repository (Human Activity Recognition Using Smartphones; arrays x, y, subject)"
    _, (path,) = files.locate("har", [layout], source)
    x, y, subject = files.npz(path, ("x", "y", "subject"))
    _check_har(path, x, y, subject)
    rank = np.empty(len(y), np.int64)
    for person in np.unique(subject):
        mine = np.flatnonzero(subject == person)
        rank[mine] = np.arange(len(mine))
    test, x, y = rank % 5 == 4, x.astype(np.float32), y.astype(np.int64)
    if held_out:
        people = np.unique(subject)
        test = np.isin(subject, people[sorted(held_out_of(len(people), held_out))])
    return Data("har", x[~test], y[~test], x[test], y[test], 6, subject[~test].astype(np.int64))


def _check_har(path: Path, x: npt.NDArray[Any], y: npt.NDArray[Any], subject: npt.NDArray[Any]) -> None:
    kinds = (x.ndim, x.dtype.kind, y.ndim, y.dtype.kind in "iu", subject.ndim, subject.dtype.kind in "iu")
    if kinds != (2, "f", 1, True, 1, True):
        raise files.damaged(path, "x should be a matrix of floats, y and subject vectors of integers")
    files.check_labels(path, y, 6)
    _finite(str(path), x)


def a9a() -> Data:
    """a9a of LIBSVM: 32,561 + 16,281 adults of a census, 123 features that are 0 or 1, 2 classes (label -1 is 0)."""
    source = "the LIBSVM page of data sets for binary classification"
    _, paths = files.locate("a9a", [files.Layout("a9a", ("a9a", "a9a.t"))], source)
    (x, y), (x_test, y_test) = (files.libsvm(path, 123, labels=(-1, 1)) for path in paths)
    return Data("a9a", x, (y > 0).astype(np.int64), x_test, (y_test > 0).astype(np.int64), 2, None)


def leaf(folder: str = "leaf", classes: int | None = None) -> Data:
    """A set in LEAF's layout, such as FEMNIST: JSON files of samples by user; `owners` are the users.

    `folder` holds train/*.json and test/*.json. Samples whose length is a square are images [n, 1, side, side], others
    are vectors. `classes` None is the largest label plus one.
    """
    if classes is not None and classes < 1:
        raise ConfigError([f"classes is {classes}; give a whole number of at least 1, or none."])
    train, test = (read_users(paths, classes) for paths in find_users(folder))
    classes = classes or 1 + int(max(train.y.max(), test.y.max()))
    x, x_test = (_square(part.x) for part in (train, test))
    return Data("leaf", x, train.y, x_test, test.y, classes, train.owners)


def _square(x: Floats) -> Floats:
    side = math.isqrt(x.shape[1])
    return x.reshape(-1, 1, side, side) if side * side == x.shape[1] else x


DATA: dict[str, Callable[..., Data]] = {
    "a9a": a9a,
    "cifar10": cifar10,
    "cinic10": cinic10,
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "har": har,
    "leaf": leaf,
    "mnist": mnist,
}
