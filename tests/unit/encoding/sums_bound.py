"""An upper bound of a sum's bytes, computed from its updates' headers alone, for tests."""

from __future__ import annotations

import math

HEADER_BYTES = 15  # of a sparse sum, see ``sparkstrom.encoding.update_sum``
DENSE_HEADER_BYTES = 5
QUANTA_MAX = 2**31  # the largest absolute value of an entry

GAP_BITS = 3.4  # beyond log2 of the mean gap: Rice's parameter is a power of 2 and may be a guess


def sum_bytes_bound(entries: int, n_params: int, quanta_max: int = QUANTA_MAX) -> int:
    """Return the most bytes that a sum of updates with ``entries`` entries in all can take.

    ``quanta_max``: the most that a parameter moves, at most the sum of the updates' largest steps.
    """
    dense = DENSE_HEADER_BYTES + 4 * n_params
    count = min(entries, n_params)
    if count < 1:
        return min(dense, HEADER_BYTES)
    value_bits = 2 + min(quanta_max, QUANTA_MAX).bit_length()  # with the sign and a terminator
    bits = count * (math.log2(n_params / count) + GAP_BITS + value_bits)
    return min(dense, HEADER_BYTES + math.ceil(bits / 8) + 5)
