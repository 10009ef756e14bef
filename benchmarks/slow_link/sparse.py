"""SparseLoCo's message: the largest entries of each chunk, their values in two bits.

A flat vector is cut into chunks of 4,096. Of each, the ``keep`` entries of largest magnitude go: 12
bits of position inside the chunk, a sign and one bit of magnitude. That bit chooses between two
levels per chunk, float32: the mean magnitudes of the chosen entries below and above their middle.
So a message has the same size on every worker, and an all-gather carries it:
2 x 4 + keep x 14 / 8 bytes for each chunk of 16 KiB. (The paper, arXiv 2508.15706, codes positions
in 12 bits or entropy-codes them; chunks here run over layers' borders.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 4096
POSITION_BITS = 12
KEEP = 64  # 1.6 % of a chunk; the paper's range is 32 to 128


def message_bytes(n_params: int, keep: int = KEEP) -> int:
    """Of one worker's message."""
    return chunks_of(n_params) * (8 + keep * POSITION_BITS // 8 + keep // 8 + keep // 8)


def chunks_of(n_params: int) -> int:
    """The last one may be filled up with zeros."""
    return -(-n_params // CHUNK)


def encode(values: NDArray[np.float32], keep: int = KEEP) -> NDArray[np.uint8]:
    """The message for f32[n_params]; ``keep`` must be a multiple of 8."""
    chunks = chunks_of(values.size)
    padded = np.zeros(chunks * CHUNK, np.float32)
    padded[: values.size] = values
    table = padded.reshape(chunks, CHUNK)
    positions = np.argpartition(np.abs(table), CHUNK - keep, axis=1)[:, CHUNK - keep :]
    positions.sort(axis=1)
    chosen = np.take_along_axis(table, positions, axis=1)
    magnitudes = np.abs(chosen)
    high = magnitudes > np.median(magnitudes, axis=1, keepdims=True)
    levels = np.stack([mean_where(magnitudes, ~high), mean_where(magnitudes, high)], axis=1)
    low_bytes = (positions & 0xFF).astype(np.uint8)
    nibbles = (positions >> 8).astype(np.uint8)
    parts = (
        levels.astype(np.float32).view(np.uint8),
        low_bytes,
        nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        np.packbits(chosen < 0, axis=1),
        np.packbits(high, axis=1),
    )
    return np.concatenate([part.reshape(-1) for part in parts])


def mean_where(values: NDArray[np.float32], chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Means of each row's chosen values; 0 where there are none."""
    count = np.maximum(1, chosen.sum(axis=1))
    means: NDArray[np.float64] = np.where(chosen, values, 0).sum(axis=1) / count
    return means.astype(np.float32)


def add_decoded(
    message: NDArray[np.uint8], to: NDArray[np.float32], factor: float, keep: int = KEEP
) -> None:
    """``to`` moves by ``factor`` times what the message says; f32[n_params]."""
    chunks = chunks_of(to.size)
    sizes = (chunks * 8, chunks * keep, chunks * keep // 2, chunks * keep // 8)
    levels, low_bytes, nibbles, signs, high = np.split(message, np.cumsum(sizes))
    positions = low_bytes.reshape(chunks, keep).astype(np.int64)
    pairs = nibbles.reshape(chunks, keep // 2)
    positions[:, ::2] |= (pairs & 15).astype(np.int64) << 8
    positions[:, 1::2] |= (pairs >> 4).astype(np.int64) << 8
    table = levels.view(np.float32).reshape(chunks, 2)
    which = np.unpackbits(high.reshape(chunks, -1), axis=1)
    values = np.take_along_axis(table, which.astype(np.int64), axis=1)
    negative = np.unpackbits(signs.reshape(chunks, -1), axis=1).astype(bool)
    signed = np.where(negative, -values, values)
    where = (positions + CHUNK * np.arange(chunks)[:, None]).reshape(-1)
    inside = where < to.size  # the last chunk's padding
    to[where[inside]] += np.float32(factor) * signed.reshape(-1)[inside]
