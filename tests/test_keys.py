"""Keys: the same in Python, NumPy and torch, of 64 bits, and without a pattern that a test of this size can see.

Every draw here is fixed, so a test passes always or never; limits stand about five deviations from what chance gives.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat import keys
from offbeat.errors import ConfigError
from offbeat.numerics.samples import Samples, permuted

INT64 = st.integers(-(2**63), 2**63 - 1)
SEEDS = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1]


def bits(values: Any, many: int) -> Any:
    """`[..., many]`: the lowest bits, the lowest first."""
    return (np.asarray(values)[..., None] >> np.arange(many)) & 1


def distinct(values: Any) -> int:
    return 1 + int(np.count_nonzero(np.diff(np.sort(values))))


def correlation(one: Any, other: Any) -> float:
    return abs(float(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]))


# ---- arithmetic ---------------------------------------------------------------------------------
def test_words_below_a_key_are_splitmix64() -> None:
    """The first outputs for the seed 1234567, as published with many implementations of SplitMix64."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [keys.unsigned(keys.fold(1234567, n)) for n in range(5)] == known


@given(key=INT64, word=st.one_of(INT64, st.integers(-300, 300)))
def test_folds_and_words_are_the_same_in_python_numpy_and_torch(key: int, word: int) -> None:
    for draw, low, high in ((keys.fold, -(2**63), 2**63), (keys.word, 0, 2**32)):
        plain = draw(key, word)
        assert type(plain) is int
        assert low <= plain < high
        for kind in (np.array, torch.tensor):
            for pair in ((kind([key]), word), (key, kind([word])), (kind([[key]]), kind([word, word]))):
                value = draw(*pair)
                assert str(value.dtype).endswith("int64")
                assert (value == plain).all()
        assert int(draw(torch.tensor(key), torch.tensor(word))) == plain
        assert draw(np.int64(key), np.int64(word)) == plain  # a single number of NumPy would warn when it wraps
    assert keys.uniform(key) == keys.uniform(np.array([key]))[0]


def test_nothing_warns_when_it_wraps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = np.array([-(2**63), -1, 0, 2**63 - 1])
        for value in (*ends, *ends.tolist(), ends):
            keys.uniform(keys.fold(keys.fold(value, ends), value))


@pytest.mark.parametrize("other", [np.zeros(1, np.int32), torch.zeros(1, dtype=torch.int32), np.zeros(1)])
def test_other_types_are_refused(other: Any) -> None:
    for pair in ((other, 1), (1, other)):
        with pytest.raises(TypeError, match="give int64"):
            keys.fold(*pair)


# ---- keys do not meet ---------------------------------------------------------------------------
def test_seeds_of_64_bits_have_roots_of_their_own() -> None:
    roots = {keys.key(seed, "batch") for seed in [*SEEDS, *(2**bit for bit in range(64)), *range(5000)]}
    assert len(roots) == len({*SEEDS, *(2**bit for bit in range(64)), *range(5000)})
    assert keys.key(0, "batch", 3, 4) != keys.key(2**32 + 1, "batch", 3, 4)
    assert keys.generator(0, "policy").random() != keys.generator(2**32 + 1, "policy").random()
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=r"from 0 to 2\*\*64 - 1"):
            keys.key(seed, "batch")


def test_purposes_and_words_do_not_run_into_one_another() -> None:
    names = ["", "a", "b", "ab", "a\0", "ba", "abc"]
    words = [(), (0,), (97,), (98,), (98, 99), (0, 0), (-2,), (-3,), (97, -2)]
    every = [keys.key(0, name, *folded) for name in names for folded in words]
    assert len(set(every)) == len(every)


def test_a_million_jobs_have_keys_of_their_own() -> None:
    client, job = (axis.ravel() for axis in np.meshgrid(np.arange(1000), np.arange(1000)))
    few = np.concatenate([keys.key(seed, "batch", client[:50_000], job[:50_000]) for seed in SEEDS])
    for made in (keys.key(0, "batch", client, job), few):
        assert distinct(made) == len(made)
        for half in (made & keys.MASK, made >> 32):  # n^2 / 2^33 pairs of n meet by chance in 32 bits
            meetings = len(made) - distinct(half)
            assert abs(meetings - len(made) ** 2 / 2**33) < 5 * (len(made) ** 2 / 2**33) ** 0.5 + 1


# ---- no pattern ---------------------------------------------------------------------------------
GRID = keys.key(7, "batch", np.arange(64)[:, None, None], np.arange(64)[:, None])  # [client, job, 1]


@pytest.mark.parametrize(("draw", "many"), [(keys.fold, 64), (keys.word, 32)])
def test_every_bit_is_balanced_and_alone(draw: Any, many: int) -> None:
    found = bits(draw(GRID, np.arange(16)), many).reshape(-1, many)  # 65,536 draws
    assert np.abs(found.mean(0) - 0.5).max() < 5 * 0.5 / 256
    between = np.corrcoef(found.T) - np.eye(many)
    assert np.abs(between).max() < 5.5 / 256


@pytest.mark.parametrize(("draw", "many"), [(keys.fold, 64), (keys.word, 32)])
@pytest.mark.parametrize("which", ["key", "word"])
def test_one_bit_turns_half_of_all(draw: Any, many: int, which: str) -> None:
    n = 4096
    key, word = GRID[:, :, 0].ravel(), np.arange(n) % 100
    flip = np.array([1 << bit if bit < 63 else -(2**63) for bit in range(64)])[:, None]
    changed = draw(key ^ flip, word) if which == "key" else draw(key, word ^ flip)
    turned = bits(draw(key, word) ^ changed, many).mean(1)  # [bit of the input, bit of the result]
    assert abs(turned.mean() - 0.5) < 0.002
    assert np.abs(turned - 0.5).max() < 6 * 0.5 / n**0.5  # of 4,096 figures


@pytest.mark.parametrize("draw", [lambda k, s: keys.uniform(keys.fold(k, s)), keys.word], ids=["uniform", "word"])
def test_neighbours_do_not_know_one_another(draw: Any) -> None:
    """Clients, jobs and slots (or steps) at distances 1, 2 and 3, and neighbouring seeds."""
    found = draw(GRID, np.arange(32))  # [client, job, slot]
    limit = 5 / found.size**0.5
    for axis in range(3):
        line = np.moveaxis(found, axis, 0)
        for lag in (1, 2, 3):
            assert correlation(line[lag:], line[:-lag]) < limit * 1.1
    for seed in (8, 7 + 2**32, 7 + 2**63):
        other = keys.key(seed, "batch", np.arange(64)[:, None, None], np.arange(64)[:, None])
        assert correlation(found, draw(other, np.arange(32))) < limit


def test_batches_are_drawn_evenly() -> None:
    """Chi-square over the samples of shards, and over pairs of neighbouring slots, steps and jobs."""
    size = 10
    shards = [np.arange(client * size, (client + 1) * size) for client in range(8)]
    samples = Samples.of(torch.zeros(80, 1), torch.zeros(80), shards, 5)
    client = torch.arange(8).repeat_interleave(64)
    key = keys.key(3, "batch", client, torch.arange(64).repeat(8))
    place = samples.rows(client, key, 0, 40) - client[:, None, None] * size  # [512, 40, 5]
    pairs = [place[..., 1:] + size * place[..., :-1], place[:, 1:] + size * place[:, :-1]]
    pairs.append(place[1:] + size * place[:-1])
    for counts in (torch.bincount(place.flatten()), *(torch.bincount(pair.flatten()) for pair in pairs)):
        each = counts.sum() / len(counts)
        square = float(((counts - each) ** 2 / each).sum())
        free = len(counts) - 1
        assert abs(square - free) < 5 * (2 * free) ** 0.5
    assert [len(torch.bincount(pair.flatten())) for pair in pairs] == [100] * 3


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_few_is_as_likely(size: int) -> None:
    many = 24_000
    key = keys.key(5, "order", torch.arange(many))[:, None]
    orders = permuted(key, torch.arange(size)[None].expand(many, size), torch.tensor(size))
    codes = (orders * size ** torch.arange(size)).sum(1)
    counts = torch.unique(codes, return_counts=True)[1].double()
    free = [1, 5, 23, 119][size - 2]
    assert len(counts) == free + 1
    each = many / (free + 1)
    assert abs(float(((counts - each) ** 2 / each).sum()) - free) < 5 * (2 * free) ** 0.5
