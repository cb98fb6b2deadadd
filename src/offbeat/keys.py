"""Keyed randomness: every draw is a hash of (seed, purpose, client, job, ...), never of call order.

The arithmetic is 32-bit in 64-bit words, so the same lines serve Python integers, NumPy arrays and torch
tensors on any device, and give the same keys on all of them; `uniform` is for Python and NumPy, in float64. The mixer
is the `lowbias32` integer hash (C. Wellons, "Hash Function Prospector").
"""

from __future__ import annotations

import random
from typing import Any

MASK = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """A bijection of the 32-bit words that scatters neighbours.

    >>> [mix(0), mix(1), mix(2)]
    [0, 1753845952, 3507691905]
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def fold(key: Any, word: Any) -> Any:
    """The key of a sub-stream: `fold(fold(root, client), job)`."""
    return mix((key ^ mix((word + 0x9E3779B9) & MASK)) & MASK)


def key(seed: int, purpose: str, *words: Any) -> Any:
    """The root key of a purpose, folded with further words (integers, arrays or tensors)."""
    result: Any = mix(seed & MASK) ^ mix((seed >> 32) & MASK)
    for byte in purpose.encode():
        result = fold(result, byte)
    for word in words:
        result = fold(result, word)
    return result


def uniform(k: Any) -> Any:
    """A number in (0, 1) from a key, with 52 random bits.

    >>> 0.0 < uniform(key(0, "speed", 3)) < 1.0
    True
    """
    high, low = fold(k, 1), fold(k, 2)
    return ((high << 20) + (low >> 12) + 0.5) / float(1 << 52)


def generator(seed: int, purpose: str) -> random.Random:
    """The generator that is handed to a policy; nothing else draws from it."""
    return random.Random((key(seed, purpose, 0) << 32) | key(seed, purpose, 1))
