"""Data sets on disk: where they are looked for, and readers for their official layouts. Nothing is downloaded."""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from offbeat.errors import OffbeatError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
DEBIAN = Path("/usr/share/datasets")
CIFAR_PIXELS = 3 * 32 * 32
LARGEST = float(np.finfo(np.float32).max)
LARGEST_FILE = 2**29  # bytes, unpacked; of the sets read here none has a file half as large
LARGEST_TEXT = 2**24  # bytes of a LIBSVM text: six times a9a
SAMPLES = 2**20  # of an idx file: more than the largest MNIST-like set has (814,255)
PIECE = 2**20  # bytes read in one go


class Layout(NamedTuple):
    """One way a data set may lie under a root: a folder, and the files in it (each as it is, or gzipped)."""

    folder: str
    files: tuple[str, ...]


def roots() -> list[Path]:
    """The directories that are searched, first to last."""
    named = os.environ.get("OFFBEAT_DATA")
    cache = os.environ.get("XDG_CACHE_HOME")
    ours = (Path(cache) if cache else Path.home() / ".cache") / "offbeat"
    return ([Path(named).expanduser()] if named else []) + [ours, DEBIAN]


def locate(name: str, layouts: Sequence[Layout], source: str) -> tuple[Layout, list[Path]]:
    """The first root that holds a whole layout: the layout, and its files in order."""
    looked = []
    for root in roots():
        for layout in layouts:
            folder = root / layout.folder
            paths = [next((p for p in (folder / f, folder / f"{f}.gz") if p.is_file()), None) for f in layout.files]
            files = [path for path in paths if path is not None]
            if len(files) == len(paths):
                return layout, files
            lacks = ", ".join(file for file, path in zip(layout.files, paths, strict=True) if path is None)
            looked.append(f"  {folder}: " + (f"there, but lacks {lacks}" if folder.is_dir() else "no such directory"))
    wanted = "; or ".join(dict.fromkeys(", ".join(layout.files) for layout in layouts))
    raise missing(name, f"{wanted} (plain or .gz)", looked, source, layouts[0].folder)


def missing(name: str, wanted: str, looked: Sequence[str], source: str, folder: str) -> OffbeatError:
    return OffbeatError(
        f"data set '{name}' was not found. Looked for {wanted} in\n" + "\n".join(looked) + "\n"
        f"Get it from {source}, put it in a folder '{folder}', and set OFFBEAT_DATA to the directory "
        "that holds this folder."
    )


def damaged(path: Path, reason: str) -> OffbeatError:
    return OffbeatError(f"{path} is damaged: {reason}. Replace it with a fresh copy.")


def read(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a file, unpacked when its name ends in .gz. Not more than `most` of them are ever in memory."""
    with unpacked(path) as file:
        content = read_bytes(path, file, most + 1)
    if len(content) > most:
        raise OffbeatError(
            f"{path} holds more than {most:,} bytes, unpacked, and no more are read here. If it is what it should be, "
            "cut it into parts or read it where there is more memory."
        )
    return content


def unpacked(path: Path) -> IO[bytes]:
    """A file to be read from its beginning, unpacked as it is read when its name ends in .gz."""
    try:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error})") from error


def read_bytes(path: Path, file: IO[bytes], most: int) -> bytes:
    """The next bytes of a file: `most`, or those that are left. They are taken in pieces, so that memory grows with
    what is there and not with what a header promises."""
    parts = []
    try:
        while most > 0 and (part := file.read(min(most, PIECE))):
            parts.append(part)
            most -= len(part)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    return b"".join(parts)


def check_labels(path: Path, labels: npt.NDArray[Any], classes: int) -> None:
    """Refuses labels outside 0..classes-1, naming the file and the first bad sample."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if bad.size:
        raise damaged(path, f"sample {bad[0]} has label {labels[bad[0]]}, labels are 0 to {classes - 1}")


def idx(path: Path, sides: tuple[int, ...]) -> Bytes:
    """An idx file of bytes: two zeros, type 8, the number of dimensions, big-endian sizes, then the values. The first
    size is the number of samples, the others must be `sides`. Nothing is read beyond what the header promises."""
    magic = bytes([0, 0, 8, 1 + len(sides)])
    with unpacked(path) as file:
        begin = read_bytes(path, file, 4)
        if begin != magic:
            raise damaged(path, f"it starts with {begin.hex() or 'nothing'}, not with {magic.hex()}")
        header = read_bytes(path, file, 4 * magic[3])
        if len(header) < 4 * magic[3]:
            raise damaged(path, "it ends inside its header")
        shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
        if shape[1:] != sides:
            given, wanted = ("x".join(map(str, each)) for each in (shape[1:], sides))
            raise damaged(path, f"its images are {given}, they should be {wanted}")
        if shape[0] > SAMPLES:
            raise damaged(path, f"its header promises {shape[0]:,} samples; sets of this kind have {SAMPLES:,} at most")
        expected = math.prod(shape)
        content = read_bytes(path, file, expected + 1)
    start = 4 + 4 * magic[3]
    if len(content) != expected:
        has = f"{start + len(content)}" if len(content) < expected else "more"
        raise damaged(path, f"its header promises {start + expected} bytes, it has {has}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def idx_pair(images: Path, labels: Path, classes: int) -> tuple[Bytes, Bytes]:
    """Images [n, 1, 28, 28] and labels [n] of one part of an MNIST-like set."""
    x, y = idx(images, (28, 28)), idx(labels, ())
    if len(x) == 0 or len(x) != len(y):
        raise damaged(labels, f"it has {len(y)} labels for {len(x)} images in {images.name}")
    check_labels(labels, y, classes)
    return x[:, None], y


def cifar_bin(path: Path) -> tuple[Bytes, Bytes]:
    """A binary batch: records of 1 label byte and 3072 pixels (R, G, B planes, row-major)."""
    content = np.frombuffer(read(path), np.uint8)
    record = 1 + CIFAR_PIXELS
    if content.size == 0 or content.size % record:
        raise damaged(path, f"its {content.size} bytes are no whole number of records of {record} bytes")
    records = content.reshape(-1, record)
    check_labels(path, records[:, 0], 10)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds NumPy arrays and plain Python values; anything else in a pickle could run foreign code."""

    ALLOWED: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how protocol 2 writes bytes
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 batch needs")
        return self.ALLOWED[module, name]


def cifar_py(path: Path) -> tuple[Bytes, Bytes]:
    """A pickled batch: a dictionary with b"data" (uint8 [n, 3072]) and b"labels"."""
    try:
        batch = _ArraysOnly(io.BytesIO(read(path)), encoding="bytes").load()
        x, labels = batch[b"data"], batch[b"labels"]
        flat = isinstance(labels, np.ndarray) or (type(labels) is list and set(map(type, labels)) <= {int})
        if not isinstance(x, np.ndarray) or not flat:  # lists in lists could unfold to any size
            raise ValueError("its data is no array, or its labels no list of whole numbers")
        y = np.asarray(labels)
    except OffbeatError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise damaged(path, f"it is no pickled batch ({type(error).__name__}: {error})") from error
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != CIFAR_PIXELS or len(x) == 0:
        raise damaged(path, f"its data is {x.dtype} of shape {x.shape}, not uint8 of shape (n, {CIFAR_PIXELS})")
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise damaged(path, f"its labels are {y.dtype} of shape {y.shape} for {len(x)} images")
    check_labels(path, y, 10)
    return x.reshape(-1, 3, 32, 32), y.astype(np.uint8)


def image_folders(folder: Path, classes: Sequence[str], side: int) -> tuple[Bytes, Bytes]:
    """Colour images [n, 3, side, side] and labels [n] of a folder with a folder of image files for each class."""
    images, labels = [], []
    for label, name in enumerate(classes):
        paths = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
        if not paths:
            raise damaged(folder / name, "it holds no image (.png, .jpg)")
        for path in paths:
            try:
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"), np.uint8)
            except (OSError, SyntaxError, ValueError) as error:
                raise damaged(path, f"it cannot be read as an image ({error})") from error
            if pixels.shape != (side, side, 3):
                raise damaged(path, f"it is {pixels.shape[1]}x{pixels.shape[0]}, it should be {side}x{side}")
            images.append(pixels.transpose(2, 0, 1))
        labels += [label] * len(paths)
    return np.stack(images), np.array(labels, np.uint8)


def find_folders(name: str, layouts: Sequence[str], parts: Sequence[str], source: str) -> list[Path]:
    """The folders of a set's parts, in the first root that has them all."""
    looked = []
    for root in roots():
        for layout in layouts:
            folders = [root / layout / part for part in parts]
            if all(path.is_dir() for path in folders):
                return folders
            lacks = ", ".join(path.name for path in folders if not path.is_dir())
            said = f"there, but lacks {lacks}" if (root / layout).is_dir() else "no such directory"
            looked.append(f"  {root / layout}: {said}")
    raise missing(name, f"folders {', '.join(parts)}", looked, source, layouts[0])


def npz(path: Path, keys: Sequence[str]) -> list[npt.NDArray[Any]]:
    """The named arrays of an npz file, one row per sample in each."""
    try:
        with zipfile.ZipFile(io.BytesIO(read(path))) as archive:
            known = [name.removesuffix(".npy") for name in archive.namelist()]
            if missing := [key for key in keys if key not in known]:
                raise damaged(path, f"it has no array {', '.join(missing)}, only {', '.join(known)}")
            arrays = [npy(archive, f"{key}.npy") for key in keys]
    except OffbeatError:
        raise
    except Exception as error:  # a broken archive may raise anything
        raise damaged(path, f"it is no npz archive of arrays ({error})") from error
    if any(array.ndim == 0 or len(array) != len(arrays[0]) for array in arrays):
        shapes = ", ".join(f"{key} {array.shape}" for key, array in zip(keys, arrays, strict=True))
        raise damaged(path, f"its arrays differ in length ({shapes})")
    return arrays


def npy(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    """One array of an archive, if it is as long as its header says and no longer than any file of ours."""
    size = archive.getinfo(name).file_size
    if size > LARGEST_FILE:
        raise ValueError(f"{name} would unpack to {size:,} bytes, more than {LARGEST_FILE:,}")
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = reader(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name} promises {shape} numbers of type {dtype}, but has {size:,} bytes")
    with archive.open(name) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def libsvm(path: Path, features: int, labels: Sequence[float] = ()) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Samples [n, features] and labels [n] of a text with a line `label index:value ...` for each sample.

    Indices begin at 1 and rise along a line; features that a line does not name are 0. Blank lines and what follows
    a '#' do not count. `labels` are the ones that may occur; without them any number may.
    """
    lines = (
        (number, line.partition(b"#")[0].split()) for number, line in enumerate(io.BytesIO(read(path, LARGEST_TEXT)), 1)
    )
    samples = [(number, words) for number, words in lines if words]
    if not samples:
        raise damaged(path, "it has no sample")
    x, y = np.zeros((len(samples), features), np.float32), np.empty(len(samples))
    for row, (number, (label, *pairs)) in enumerate(samples):
        y[row] = _real(label)
        try:
            if math.isnan(y[row]):
                raise ValueError(f"the label {_shown(label)} is no finite number")
            if labels and y[row] not in labels:
                raise ValueError(f"the label is {_shown(label)}, it must be one of {', '.join(map(str, labels))}")
            columns, values = _sparse(pairs, features)
        except ValueError as error:
            raise damaged(path, f"in line {number} {error}") from None
        x[row, columns] = values
    return x, y


def _sparse(pairs: Sequence[bytes], features: int) -> tuple[list[int], list[float]]:
    """The columns, counted from 0, and the values of one line's pairs; a ValueError says what is wrong with one."""
    columns: list[int] = []
    values: list[float] = []
    last = 0
    for pair in pairs:
        word, colon, value = pair.partition(b":")
        if not colon:
            raise ValueError(f"{_shown(pair)} is no pair index:value")
        try:
            index = int(word.replace(b"_", b"?"))  # Python would read 1_0 as ten
        except ValueError:
            raise ValueError(f"the index of {_shown(pair)} is no whole number") from None
        if not 1 <= index <= features:
            raise ValueError(f"the index of {_shown(pair)} is not among 1 to {features}")
        if index <= last:
            raise ValueError(f"the index of {_shown(pair)} follows {last}, but indices must rise")
        number = _real(value)
        if number != number:
            raise ValueError(f"the value of {_shown(pair)} is no finite number")
        columns.append(index - 1)
        values.append(number)
        last = index
    return columns, values


def _real(word: bytes) -> float:
    """The number that a word says, or NaN where it says none that a float32 can hold."""
    try:
        value = float(word.replace(b"_", b"?"))
    except ValueError:
        return math.nan
    return value if abs(value) <= LARGEST else math.nan


def _shown(word: bytes) -> str:
    return repr(word[:40].decode("ascii", "replace"))
