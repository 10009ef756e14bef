"""How an update is written down: one number in the header, known to encoder and decoder."""

from __future__ import annotations

import enum


class Form(enum.IntEnum):
    """What a payload is. u8 on the wire; 0 stays free so that zeroed memory is no update."""

    GAPS = 1  # Rice-coded index gaps and signs: few hits
    BITMAP_UP = 2  # 2 bits per parameter; the half step is +tau/2
    BITMAP_DOWN = 3  # 2 bits per parameter; the half step is -tau/2
    QUANTA = 4  # several updates summed ("merged range"), as sparse as what it holds
    THETA = 5  # f32 per parameter: part of a snapshot
    BUFFERS = 6  # arrays beside the parameters, as the model lays them out
    LEVELS = 7  # as GAPS, each hit moving by tau times a power of two


# The four states of a parameter in a bitmap.
NOTHING, UP, DOWN, HALF = 0, 1, 2, 3


def half_side(form: Form) -> int:
    """The sign of the half step in a bitmap of this form: +1 or -1."""
    return 1 if form is Form.BITMAP_UP else -1


def prefers_bitmap(hits: int, n_params: int) -> bool:
    """Whether a bitmap is the shorter way to say what it says: from half of all parameters on.

    A bitmap takes 2 bits per parameter and carries half steps too. Gaps for the same entries would
    take one bit per parameter and two per entry (is it a half step, and the sign).
    """
    return 2 * hits >= n_params
