"""The forms of an encoded update, and the values that an encoder returns and counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


class Form(enum.IntEnum):
    """The encoding of a payload. u8 on the wire; 0 is unused, so zeroed memory is invalid."""

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
    """Return the sign (+1 or -1) of half steps in a bitmap of this form."""
    return 1 if form is Form.BITMAP_UP else -1


def prefers_bitmap(hits: int, n_params: int) -> bool:
    """Return whether a bitmap is the shorter form: from half of all parameters on.

    A bitmap takes 2 bits per parameter and includes half steps. Gaps for the same entries would
    take one bit per parameter and two per entry (whether it is a half step, and its sign).
    """
    return 2 * hits >= n_params


EncoderState = dict[str, "NDArray[Any] | float | int"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded update, ready to publish."""

    form: Form  # how the payload is encoded
    tau_quanta: int  # what a full hit of level 0 adds, as a multiple of the job's quantum
    count: int  # entries in the payload
    payload: bytes  # the encoded entries
    sent_fraction: float  # count divided by the number of parameters


@dataclass(slots=True)
class EncoderTotals:
    """Totals of one encoder since its creation. Masses are sums of absolute values, float64."""

    publications: int = 0  # calls of publish; some found nothing to send
    hits: int = 0  # entries sent, half steps among them
    payload_bytes: int = 0  # of all messages; for benchmarks, which have no wire to count
    mass_sent: float = 0.0  # what theta moved by (parameter units)
    mass_clipped: float = 0.0  # destroyed by clipping the residual
    mass_scaled_away: float = 0.0  # taken out of the residual and not sent: mean and sqrt
    overflows: int = 0  # parameters moved beyond the exact range
    first_overflow: int = -1  # the index of the first of them
