"""Rows of text from the language reference that ``help()`` shows, some 460,000 characters.

It comes with Python (``pydoc_data.topics``), so nothing is downloaded. It differs a little between
versions, so compare losses only within one run. Pages are split before rows are cut out of them.
Some pages repeat parts of others, however: with seed 0 on CPython 3.11, 6 % of the text to test and
49 % of the text to validate are also in the text to train on (passages of 200 characters or more).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

CONTEXT = 64  # characters of a row
SYMBOLS = 64  # the 63 most frequent characters, and one symbol for all others
SHARES = (0.8, 0.1, 0.1)  # of the pages' characters

Row = tuple[NDArray[np.int64], NDArray[np.int64]]  # [rows, CONTEXT]: characters, and the next ones


def rows(counts: tuple[int, int, int], seed: int) -> list[Row]:
    """Return rows to train on, to validate and to test, from different pages."""
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
    """Return three texts, to train on, to validate and to test, of different pages."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    order = np.random.default_rng(seed).permutation(len(names))
    limits = np.cumsum(SHARES) * sum(map(len, topics.values()))
    texts, at = ["", "", ""], 0
    for name in (names[index] for index in order):
        texts[min(2, int(np.searchsorted(limits, at, side="right")))] += topics[name]
        at += len(topics[name])
    return texts
