"""Text that is offline: the language reference that ``help()`` reads, some 460,000 characters.

It comes with every Python (``pydoc_data.topics``) and differs a little from version to version, so
losses are compared within one run. Pages are parted before rows are cut out of them: nothing that
is measured was trained on.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

CONTEXT = 64  # characters that a row sees
SYMBOLS = 64  # the most frequent ones; all others are one more
SHARES = (0.8, 0.1, 0.1)  # of the pages' characters

Row = tuple[NDArray[np.int64], NDArray[np.int64]]  # [rows, CONTEXT]: characters, and the next ones


def rows(counts: tuple[int, int, int], seed: int) -> list[Row]:
    """Rows for training, choosing and measuring, each from pages of its own."""
    parts = pages(seed)
    most = Counter(parts[0]).most_common(SYMBOLS - 1)
    number = {character: index + 1 for index, (character, _) in enumerate(most)}
    random = np.random.default_rng(seed)
    made = []
    for text, count in zip(parts, counts, strict=True):
        codes = np.array([number.get(character, 0) for character in text], np.int64)
        firsts = random.integers(0, len(codes) - CONTEXT, count)
        windows = codes[firsts[:, None] + np.arange(CONTEXT + 1)]
        made.append((windows[:, :-1].copy(), windows[:, 1:].copy()))
    return made


def pages(seed: int) -> list[str]:
    """The three texts."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    order = np.random.default_rng(seed).permutation(len(names))
    limits = np.cumsum(SHARES) * sum(map(len, topics.values()))
    texts, at = ["", "", ""], 0
    for name in (names[index] for index in order):
        texts[min(2, int(np.searchsorted(limits, at, side="right")))] += topics[name]
        at += len(topics[name])
    return texts
