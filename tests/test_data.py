from __future__ import annotations

import gzip
import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from offbeat.errors import ConfigError, OffbeatError
from offbeat.tasks import files
from offbeat.tasks.data import DATA, Data, a9a, digits, fashion_mnist, har, mnist, scaled
from offbeat.tasks.make import build_task

rng = np.random.default_rng(0)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that OFFBEAT_DATA names; the other roots are empty too."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN", tmp_path / "debian")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, n: int = 12, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part in ("train", "t10k"):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (n, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(n) % 10
    for name, values in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(values)))
        else:
            (folder / name).write_bytes(idx_bytes(values))
    return arrays


def write_har(folder: Path, **changes: object) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "x": rng.standard_normal((30, 7)).astype(np.float32),
        "y": (np.arange(30) % 6).astype(np.uint8),
        "subject": np.repeat(np.array([1, 4, 9], np.uint8), [12, 5, 13]),
    } | changes
    np.savez_compressed(folder / "uci_har_train_features.npz", **arrays)
    return arrays


# ---- digits -------------------------------------------------------------------------------------
def test_digits_are_split_the_same_everywhere():
    data = digits()
    assert (data.x.shape, data.x_test.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (data.x.dtype, data.y.dtype, data.classes, data.owners) == (np.float32, np.int64, 10, None)
    assert (data.x.min(), data.x.max()) == (0.0, 1.0)
    # sums over the chosen samples: any other choice of 360 would change them
    assert int((data.x_test * 16).sum()) == 113737
    assert data.y_test[:12].tolist() == [1, 5, 8, 8, 4, 7, 0, 9, 9, 7, 7, 3]


def test_digits_are_stratified_and_whole():
    data = digits()
    train, test = np.bincount(data.y, minlength=10), np.bincount(data.y_test, minlength=10)
    assert np.all(np.abs(test - (train + test) * 360 / 1797) < 1)
    rows = np.concatenate([data.x, data.x_test]).reshape(1797, 64)
    whole = load_digits().data.astype(np.float32)
    assert np.array_equal(rows[np.lexsort(rows.T)] * 16, whole[np.lexsort(whole.T)])


def test_standard_scale_is_of_the_training_set():
    data = digits(scale="standard")
    assert abs(float(data.x.mean(dtype=np.float64))) < 1e-6
    assert abs(float(data.x.std(dtype=np.float64)) - 1) < 1e-6
    assert abs(float(data.x_test.mean())) > 1e-6


def test_scale_is_per_channel_and_leaves_a_constant_channel_at_zero():
    train = rng.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
    train[:, 1] = 7
    x, x_test = scaled(train, train[:5], "standard")
    mean, std = train.mean((0, 2, 3)), train.std((0, 2, 3))
    for c in (0, 2):
        np.testing.assert_allclose(x[:, c], (train[:, c] - mean[c]) / std[c], rtol=1e-5, atol=1e-6)
    assert not x[:, 1].any()
    assert np.array_equal(x_test, x[:5])
    np.testing.assert_allclose(scaled(train, train, "unit")[0], train / 255.0, rtol=1e-6)
    np.testing.assert_allclose(scaled(train, train, "symmetric")[0], train / 127.5 - 1, rtol=1e-6, atol=1e-6)


def test_unknown_scale():
    with pytest.raises(ConfigError, match=r"'standart': did you mean 'standard'\? Known: standard, symmetric, unit"):
        digits(scale="standart")


# ---- idx ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("name", "loader"), [("mnist", mnist), ("fashion-mnist", fashion_mnist)])
def test_idx_sets(root, name, loader, zipped):
    arrays = write_idx(root / name, zipped=zipped)
    data = loader(scale="unit")
    assert data.name == name
    assert data.x.shape == data.x_test.shape == (12, 1, 28, 28)
    np.testing.assert_allclose(data.x[:, 0] * 255, arrays["train-images-idx3-ubyte"], atol=1e-3)
    np.testing.assert_allclose(data.x_test[:, 0] * 255, arrays["t10k-images-idx3-ubyte"], atol=1e-3)
    assert np.array_equal(data.y, arrays["train-labels-idx1-ubyte"])
    assert abs(float(loader().x.mean(dtype=np.float64))) < 1e-6


def test_roots_are_searched_in_order(root, tmp_path, monkeypatch):
    for place, n in (("debian", 10), ("cache/offbeat", 11), ("data", 12)):
        write_idx(tmp_path / place / "mnist", n)
    assert len(mnist().x) == 12
    monkeypatch.delenv("OFFBEAT_DATA")
    assert len(mnist().x) == 11
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    assert len(mnist().x) == 10
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert files.roots()[0] == tmp_path / "home/.cache/offbeat"


def test_missing_set_says_what_where_and_whence(root, tmp_path):
    write_idx(root / "fashion-mnist")
    (root / "fashion-mnist/train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(OffbeatError) as caught:
        fashion_mnist()
    message = str(caught.value)
    assert "data set 'fashion-mnist' was not found. Looked for train-images-idx3-ubyte, train-labels-idx1" in message
    assert f"{root / 'fashion-mnist'}: there, but lacks train-labels-idx1-ubyte\n" in message
    assert f"{tmp_path / 'cache/offbeat/fashion-mnist'}: no such directory" in message
    assert f"{tmp_path / 'debian/fashion-mnist'}: no such directory" in message
    assert "the Fashion-MNIST repository of Zalando Research or the Debian package dataset-fashion-mnist" in message
    assert "set OFFBEAT_DATA to the directory that holds" in message


@pytest.mark.parametrize("name", ["a9a", "cifar10", "har", "mnist"])
def test_every_missing_set_names_its_source(root, name):
    with pytest.raises(OffbeatError, match=rf"'{name}' was not found(.|\n)*Get it from the (.|\n)*OFFBEAT_DATA"):
        DATA[name]()


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
GOOD = idx_bytes(np.zeros((12, 28, 28)))


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (IMAGES, b"", "starts with nothing, not with 00000803"),
        (IMAGES, b"\0\0\x09\x03" + GOOD[4:], "starts with 00000903, not with 00000803"),
        (IMAGES, GOOD[:9], "ends inside its header"),
        (IMAGES, GOOD[:-1], "promises 9424 bytes, it has 9423"),
        (IMAGES, GOOD + b"\0", "promises 9424 bytes, it has more"),
        (IMAGES, idx_bytes(np.zeros((12, 27, 28))), "images are 27x28, they should be 28x28"),
        (IMAGES + ".gz", b"not gzip", "cannot be read"),
        (IMAGES + ".gz", gzip.compress(GOOD, mtime=0)[:-12], "cannot be read"),
        (LABELS, idx_bytes(np.array([0, 1, 10] + 9 * [0])), "sample 2 has label 10, labels are 0 to 9"),
        (LABELS, idx_bytes(np.zeros(11)), "11 labels for 12 images in t10k-images-idx3-ubyte"),
    ],
)
def test_damaged_idx(root, file, content, reason):
    write_idx(root / "mnist", zipped=False)
    (root / "mnist" / file.removesuffix(".gz")).unlink()
    (root / "mnist" / file).write_bytes(content)
    with pytest.raises(OffbeatError, match=rf"mnist/{file} is damaged: .*{reason}.*Replace it with a fresh copy"):
        mnist()


# ---- har ----------------------------------------------------------------------------------------
def test_har_holds_out_every_fifth_sample_of_each_person(root):
    arrays = write_har(root / "uci-har")
    data = har()
    held = [4, 9, 16, 21, 26]  # people own rows 0-11, 12-16 and 17-29
    kept = np.setdiff1d(np.arange(30), held)
    assert np.array_equal(data.x_test, arrays["x"][held])
    assert np.array_equal(data.x, arrays["x"][kept])
    assert np.array_equal(data.y, arrays["y"][kept])
    assert np.array_equal(data.owners, arrays["subject"][kept])
    assert (data.classes, data.x.dtype, data.y.dtype) == (6, np.float32, np.int64)


NAN = np.zeros((30, 7), np.float32)
NAN[11, 3] = np.nan


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": NAN}, r"features\.npz holds NaN or infinity, first in sample 11"),
        ({"y": np.full(30, 6)}, "damaged: sample 0 has label 6, labels are 0 to 5"),
        ({"y": np.zeros(29, np.uint8)}, r"damaged: its arrays differ in length \(x \(30, 7\), y \(29,\)"),
        ({"y": np.zeros(30)}, "damaged: x should be a matrix of floats, y and subject vectors of integers"),
        ({"x": np.array([None] * 30)}, "damaged: it is no npz archive of arrays"),
    ],
)
def test_damaged_har(root, changes, reason):
    write_har(root / "uci-har", **changes)
    with pytest.raises(OffbeatError, match=reason):
        har()


def test_har_file_that_is_no_archive(root):
    write_har(root / "uci-har")
    path = root / "uci-har/uci_har_train_features.npz"
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(OffbeatError, match=r"features\.npz is damaged: it is no npz archive"):
            har()
    np.savez(path, x=np.zeros(3))
    with pytest.raises(OffbeatError, match="it has no array y, subject, only x"):
        har()


# ---- a9a ----------------------------------------------------------------------------------------
LINES = b"""# people
-1 3:1 11:1 123:1

+1 1:0.5 2:-2e1  # two features
-1
"""


def write_a9a(folder: Path, train: bytes = LINES, test: bytes = b"+1 123:1\r\n", zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("a9a", train), ("a9a.t", test)):
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(text) if zipped else text)


@pytest.mark.parametrize("zipped", [True, False])
def test_a9a(root, zipped):
    write_a9a(root / "a9a", zipped=zipped)
    data = a9a()
    want = np.zeros((3, 123), np.float32)
    want[0, [2, 10, 122]] = 1
    want[1, :2] = 0.5, -20
    assert np.array_equal(data.x, want)
    assert np.array_equal(data.x_test, want[:1] * 0 + (np.arange(123) == 122))
    assert (data.y.tolist(), data.y_test.tolist(), data.classes, data.owners) == ([0, 1, 0], [1], 2, None)


def test_a9a_is_a_task_with_logistic_regression_and_no_scale(root):
    write_a9a(root / "a9a")
    task = build_task("a9a", {"clients": 2}, 0)
    assert [tuple(p.shape) for p in task.model.parameters()] == [(2, 123), (2,)]
    with pytest.raises(ConfigError, match="data 'a9a' has no options, but 'scale' was given; leave it out"):
        build_task("a9a", {"clients": 2, "scale": "unit"}, 0)


def test_libsvm_labels_are_what_the_file_says(tmp_path):
    (tmp_path / "text").write_bytes(b"7 1:1\n-0.25 2:1\n1e3")
    x, y = files.libsvm(tmp_path / "text", 2)
    assert (x.dtype, x.tolist(), y.tolist()) == (np.float32, [[1, 0], [0, 1], [0, 0]], [7, -0.25, 1000])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"yes 1:1", "the label 'yes' is no finite number"),
        (b"1:1 2:1", "the label '1:1' is no finite number"),
        (b"nan 1:1", "the label 'nan' is no finite number"),
        (b"0 1:1", "the label is '0', it must be one of -1, 1"),
        (b"1 1:1 2", "'2' is no pair index:value"),
        (b"1 a:1", "the index of 'a:1' is no whole number"),
        (b"1 :1", "the index of ':1' is no whole number"),
        (b"1 1_0:1", "the index of '1_0:1' is no whole number"),
        (b"1 1.0:1", "the index of '1.0:1' is no whole number"),
        (b"1 0:1", "the index of '0:1' is not among 1 to 123"),
        (b"1 -3:1", "the index of '-3:1' is not among 1 to 123"),
        (b"1 5:1 124:1", "the index of '124:1' is not among 1 to 123"),
        (b"1 5:1 4:1", "the index of '4:1' follows 5, but indices must rise"),
        (b"1 5:1 5:1", "the index of '5:1' follows 5, but indices must rise"),
        (b"1 5:", "the value of '5:' is no finite number"),
        (b"1 5:one", "the value of '5:one' is no finite number"),
        (b"1 5:1_0", "the value of '5:1_0' is no finite number"),
        (b"1 5:inf", "the value of '5:inf' is no finite number"),
        (b"1 5:1e39", "the value of '5:1e39' is no finite number"),  # more than a float32 can hold
        (b"1 5:1:1", "the value of '5:1:1' is no finite number"),
        (b"\xff\x00", "the label '\ufffd"),
    ],
)
def test_damaged_libsvm(root, line, reason):
    write_a9a(root / "a9a", LINES + line + b"\n1 1:1\n")
    with pytest.raises(OffbeatError) as caught:
        a9a()
    assert f"{root / 'a9a/a9a'} is damaged: in line 6 {reason}" in str(caught.value)
    assert str(caught.value).endswith(". Replace it with a fresh copy.")


def test_libsvm_without_a_sample_or_cut_short(root):
    write_a9a(root / "a9a", test=b"# nothing\n\n")
    with pytest.raises(OffbeatError, match=r"a9a/a9a\.t is damaged: it has no sample"):
        a9a()
    write_a9a(root / "a9a", zipped=True)
    (root / "a9a/a9a").unlink()
    (root / "a9a/a9a.gz").write_bytes(gzip.compress(LINES, mtime=0)[:-9])
    with pytest.raises(OffbeatError, match=r"a9a/a9a\.gz is damaged: it cannot be read"):
        a9a()


# ---- Data ---------------------------------------------------------------------------------------
X, Y = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 1])
BAD = X.copy()
BAD[2, 1] = np.inf


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": BAD}, "training x holds NaN or infinity, first in sample 2"),
        ({"x_test": BAD}, "test x holds NaN or infinity, first in sample 2"),
        ({"y": np.array([0, 1, 3, 9])}, "training sample 2 has label 3, but with 3 classes labels are 0 to 2"),
        ({"y_test": np.array([0, 1, 2, -1])}, "test sample 3 has label -1"),
        ({"y": Y[:3]}, "4 training samples and 3 values of y"),
        (
            {"x": X.astype(np.float64)},
            "training x of type float64 and y of type int64; convert them to float32 and int64",
        ),
        ({"classes": None}, "y of type int64; convert them to float32 and float32"),
        ({"x": X[:0], "y": Y[:0]}, "no training sample"),
        ({"x_test": X[:, :1]}, r"training samples of shape \(2,\) and test samples of shape \(1,\)"),
        ({"owners": Y[:2]}, r"owners of shape \(2,\) for 4 training samples"),
    ],
)
def test_bad_data_is_refused(changes, reason):
    good = {"name": "mine", "x": X, "y": Y, "x_test": X, "y_test": Y, "classes": 3, "owners": None}
    Data(**good)
    with pytest.raises(OffbeatError, match=f"data set 'mine'.*{reason}"):
        Data(**good | changes)


def test_regression_targets_and_an_empty_test_set():
    y = np.array([0.5, -1, 2, 0], np.float32)
    Data("line", X, y, X[:0], y[:0], None, None)
    with pytest.raises(OffbeatError, match="training y holds NaN or infinity, first in sample 0"):
        Data("line", X, y * np.float32(np.nan), X, y, None, None)


# ---- the real files -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "tests"),
    [
        ("fashion-mnist", (60_000, 1, 28, 28), 10_000),
        ("mnist", (60_000, 1, 28, 28), 10_000),
        ("cifar10", (50_000, 3, 32, 32), 10_000),
        ("har", (5890, 561), 1462),
        ("a9a", (32_561, 123), 16_281),
    ],
)
def test_real_data(name, shape, tests):
    if "OFFBEAT_DATA" not in os.environ:
        pytest.skip("OFFBEAT_DATA names no directory")
    try:
        data = DATA[name]()
    except OffbeatError as error:
        if "was not found" not in str(error):
            raise
        pytest.skip(str(error))
    assert (data.x.shape, data.x_test.shape) == (shape, (tests, *shape[1:]))
    assert len(np.unique(data.y)) == len(np.unique(data.y_test)) == data.classes
    if name == "har":
        assert len(np.unique(data.owners)) == 21
    elif name == "a9a":
        assert np.array_equal(np.unique(data.x), [0, 1])
        assert (data.y.sum(), data.y_test.sum()) == (7841, 3846)
    else:
        assert abs(data.x.mean((0, 2, 3), dtype=np.float64)).max() < 1e-5
        assert abs(data.x.std((0, 2, 3), dtype=np.float64) - 1).max() < 1e-5


# ---- sizes that a file declares -----------------------------------------------------------------
def peak(call) -> tuple[int, str]:
    """The most bytes that Python and NumPy took at once for a refusal, and its sentence."""
    tracemalloc.start()
    try:
        with pytest.raises(OffbeatError) as caught:
            call()
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


def zeros_gz(header: bytes, size: int) -> bytes:
    """A gzip file of a header and so many zeros: a thousandth of that."""
    return gzip.compress(header + bytes(size), 6)


@pytest.mark.parametrize(
    ("file", "header", "reason"),
    [
        (IMAGES, idx_bytes(np.zeros((12, 28, 28)))[:16], "promises 9424 bytes, it has more"),
        (IMAGES, bytes([0, 0, 8, 3]) + np.array([2**32 - 1, 28, 28], ">u4").tobytes(), "promises 4,294,967,295 sample"),
        (IMAGES, bytes([0, 0, 8, 3]) + np.array([2**20, 28, 28], ">u4").tobytes(), "promises 822083600 bytes, it has"),
        (IMAGES, bytes([0, 0, 8, 3]) + np.array([1, 2**31, 2**31], ">u4").tobytes(), "they should be 28x28"),
        (LABELS, bytes([0, 0, 8, 1]) + np.array([2**31], ">u4").tobytes(), "promises 2,147,483,648 samples"),
        (LABELS, b"", "starts with 00000000"),
    ],
)
def test_an_idx_file_is_read_no_further_than_its_header_says(root, file, header, reason):
    write_idx(root / "mnist", zipped=False)
    (root / "mnist" / file).unlink()
    (root / "mnist" / f"{file}.gz").write_bytes(zeros_gz(header, 2**25))
    most, said = peak(mnist)
    assert reason in said
    assert most < 2**27 if "822083600" in reason else most < 2**24


def test_a_file_that_unpacks_to_more_than_any_is_not_unpacked(root, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 2**20)
    path = root / "batch.gz"
    path.write_bytes(zeros_gz(b"", 2**25))
    most, said = peak(lambda: files.read(path, 2**20))
    assert "holds more than 1,048,576 bytes, unpacked" in said
    assert most < 2**23


def test_an_npz_that_promises_more_than_it_has(root):
    write_har(root / "uci-har")
    path = root / "uci-har/uci_har_train_features.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 7)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        for name in ("y", "subject"):
            one = io.BytesIO()
            np.save(one, np.zeros(30, np.uint8))
            archive.writestr(f"{name}.npy", one.getvalue())
    most, said = peak(har)
    assert "x.npy promises (1099511627776, 7) numbers of type float32, but has" in said
    assert most < 2**23


def test_an_npz_that_unpacks_to_more_than_any(root, monkeypatch):
    write_har(root / "uci-har", x=np.zeros((2**16, 7), np.float32))
    monkeypatch.setattr(files, "LARGEST_FILE", 2**20)
    assert "x.npy would unpack to 1,835,136 bytes" in peak(har)[1]


def test_lists_in_lists_in_a_pickled_batch_are_not_unfolded(tmp_path):
    labels: list = [0] * 9
    for _ in range(12):
        labels = [labels] * 9
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": np.zeros((9, 3072), np.uint8), b"labels": labels}))
    most, said = peak(lambda: files.cifar_py(path))
    assert "its labels no list of whole numbers" in said
    assert most < 2**23
