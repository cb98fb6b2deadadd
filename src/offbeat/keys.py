"""Keyed randomness: every draw is a hash of (seed, purpose, client, job, ...), never of call order.

A key is a signed 64-bit integer. The arithmetic is that of 64-bit words which wrap, so the same lines serve Python
integers, int64 arrays of NumPy and int64 tensors of torch on any device, and give the same keys on all of them. Numbers
below a key are those of the generator SplitMix64 that begins at this key (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014; multipliers by D. Stafford): each step is a bijection, so different words below
one key, and one word below different keys, never meet.
"""

from __future__ import annotations

import random
from functools import lru_cache
from numbers import Integral
from typing import Any

from offbeat.errors import ConfigError

MASK = 0xFFFFFFFF
HALF, FULL = 1 << 63, (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # constants are signed, as the arrays are
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
NUMBER = -2  # the word of `uniform`; -1 is free for callers, who count from 0 otherwise


def fold(key: Any, word: Any) -> Any:
    """The key of a sub-stream: `fold(fold(root, client), job)`. A word has up to 64 bits and may be negative.

    >>> [fold(0, 0), fold(0, 1), fold(1, 0)]
    [-2152535657050944081, 7960286522194355700, -7995527694508729151]
    """
    x = scatter(key, word)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def word(key: Any, slot: Any) -> Any:
    """A number of 32 bits, 0 .. 2^32 - 1, for a slot of a key; cheaper than `fold`, and no key.

    >>> [word(0, 0), word(0, 1), word(1, 0)]
    [3793791032, 1853398634, 2433363437]
    """
    return (scatter(key, slot) >> 32) & MASK


def scatter(key: Any, word: Any) -> Any:
    """Key and word in 64 bits of which the upper ones depend on all. Masks after shifts: the sign must not spread."""
    x = wrap(int64(key) + wrap((int64(word) + 1) * STEP))
    x = wrap((x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST)
    return wrap((x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND)


def wrap(x: Any) -> Any:
    """Python's integers in 64 bits; arrays and tensors wrap by themselves."""
    return ((x + HALF) & FULL) - HALF if type(x) is int else x


def int64(x: Any) -> Any:
    """Python's integer for single numbers, NumPy's too, which would warn when they wrap; arrays must be of int64."""
    if type(x) is int:
        return x
    if isinstance(x, Integral):
        return int(x)
    if not str(x.dtype).endswith("int64"):
        raise TypeError(f"a key or word has type {x.dtype}; give int64: other types wrap at other places")
    return x


def key(seed: int, purpose: str, *words: Any) -> Any:
    """The root key of a purpose, folded with further words (integers, arrays or tensors)."""
    result: Any = root(seed, purpose)
    for one in words:
        result = fold(result, one)
    return result


@lru_cache(4096)
def root(seed: int, purpose: str) -> int:
    """Different for all seeds; the length ends the purpose, so no purpose goes on where another one has words."""
    if not 0 <= seed <= FULL:
        raise ConfigError([f"seed is {seed}; give a whole number from 0 to 2**64 - 1"])
    name = purpose.encode()
    result: int = fold(seed, 0)
    for number in (*name, -1 - len(name)):
        result = fold(result, number)
    return result


def unsigned(key: int) -> int:
    """A key as a number from 0 to 2^64 - 1: a seed for generators that take no negative ones."""
    return key & FULL


def uniform(k: Any) -> Any:
    """A number in (0, 1) from a key, with 52 random bits; for Python and NumPy, in float64.

    >>> 0.0 < uniform(key(0, "speed", 3)) < 1.0
    True
    """
    return (((fold(k, NUMBER) >> 12) & 0xFFFFFFFFFFFFF) + 0.5) / float(1 << 52)


def generator(seed: int, purpose: str) -> random.Random:
    """The generator that is handed to a policy; nothing else draws from it."""
    return random.Random(unsigned(key(seed, purpose)))
