"""SparseLoCo's message: the largest entries of each chunk, with their values in two bits.

A flat vector is cut into chunks of 4,096 entries. Of each chunk, the ``keep`` entries of largest
magnitude are sent: 12 bits for the position in the chunk, a sign, and one bit of magnitude. This
bit chooses between two float32 levels of the chunk: the mean magnitudes of the sent entries above
their median, and of the others. So messages of all workers have the same size, and can be sent by
an all-gather: 2 x 4 + keep x 14 / 8 bytes for each chunk of 16 KiB. (The paper, arXiv 2508.15706,
codes positions in 12 bits or entropy-codes them; chunks here may span layers.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 4096
POSITION_BITS = 12
KEEP = 64  # 1.6 % of a chunk; the paper's range is 32 to 128


def message_bytes(n_params: int, keep: int = KEEP) -> int:
    """Return the size of one worker's message in bytes."""
    return count_chunks(n_params) * (8 + keep * POSITION_BITS // 8 + keep // 8 + keep // 8)


def count_chunks(n_params: int) -> int:
    """Return the number of chunks; the last one is padded with zeros."""
    return -(-n_params // CHUNK)


def encode(values: NDArray[np.float32], keep: int = KEEP) -> NDArray[np.uint8]:
    """Return the message for f32[n_params]; ``keep`` must be a multiple of 8."""
    chunks = count_chunks(values.size)
    padded = np.zeros(chunks * CHUNK, np.float32)
    padded[: values.size] = values
    table = padded.reshape(chunks, CHUNK)
    positions = np.argpartition(np.abs(table), CHUNK - keep, axis=1)[:, CHUNK - keep :]
    positions.sort(axis=1)
    chosen = np.take_along_axis(table, positions, axis=1)
    magnitudes = np.abs(chosen)
    high = magnitudes > np.median(magnitudes, axis=1, keepdims=True)
    levels = np.stack([compute_means(magnitudes, ~high), compute_means(magnitudes, high)], axis=1)
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


def compute_means(values: NDArray[np.float32], chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the means of each row's chosen values; 0 if there are none."""
    count = np.maximum(1, chosen.sum(axis=1))
    means: NDArray[np.float64] = np.where(chosen, values, 0).sum(axis=1) / count
    return means.astype(np.float32)


def add_decoded(
    message: NDArray[np.uint8], to: NDArray[np.float32], factor: float, keep: int = KEEP
) -> None:
    """Add ``factor`` times a message's values to ``to``, f32[n_params]."""
    chunks = count_chunks(to.size)
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
    inside = where < to.size  # without the last chunk's padding
    to[where[inside]] += np.float32(factor) * signed.reshape(-1)[inside]
