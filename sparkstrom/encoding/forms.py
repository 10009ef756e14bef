"""Define the forms in which updates are encoded, and the types of an encoder's results and state.

An update can be written in several forms: as gaps between the indices of hits (the parameters that
it changes by tau), as gaps with levels (a hit of level l changes by tau * 2^l), or as a bitmap with
two bits for each parameter. Sums of updates, snapshots and model buffers have forms of their own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


class Form(enum.IntEnum):
    """The encoding of a payload, one byte on the wire. 0 is unused, so zeroed memory is invalid."""

    GAPS = 1  # for few hits: Rice-coded gaps between indices, and signs
    BITMAP_UP = 2  # 2 bits per parameter; the half step is +tau/2
    BITMAP_DOWN = 3  # 2 bits per parameter; the half step is -tau/2
    QUANTA = 4  # the sum of several consecutively numbered updates, sparse or dense
    THETA = 5  # f32 per parameter: part of a snapshot
    BUFFERS = 6  # the model's buffers (state other than parameters), in the model's own layout
    LEVELS = 7  # like GAPS, but each hit adds tau times its own power of two


# The four states of a parameter in a bitmap.
NOTHING, UP, DOWN, HALF = 0, 1, 2, 3


def half_side(form: Form) -> int:
    """Return the sign (+1 or -1) of half steps in a bitmap of this form."""
    return 1 if form is Form.BITMAP_UP else -1


def prefers_bitmap(hits: int, n_params: int) -> bool:
    """Return whether a bitmap is shorter than gaps, as it is if half of the parameters are hits.

    A bitmap takes 2 bits per parameter and includes half steps. Gaps for the same entries would
    take one bit per parameter, and two bits per entry (half step or not, and the sign).
    """
    return 2 * hits >= n_params


# What an encoder saves for the next fit: name -> value.
EncoderState = dict[str, "NDArray[Any] | float | int"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded update, ready to publish."""

    form: Form  # how the payload is encoded
    tau_quanta: int  # tau as a multiple of the grid's quantum: what a full hit of level 0 adds
    count: int  # number of entries in the payload
    payload: bytes  # the encoded entries
    sent_fraction: float  # count divided by the number of parameters


@dataclass(slots=True)
class EncoderTotals:
    """Totals of one encoder since its creation. A mass is a sum of absolute values, in float64."""

    publications: int = 0  # calls of ``Encoder.publish``, including those with nothing to send
    hits: int = 0  # entries sent, including half steps
    payload_bytes: int = 0  # of all messages; for benchmarks, which have no network that counts
    mass_sent: float = 0.0  # added to theta (parameter units)
    mass_clipped: float = 0.0  # destroyed by clipping the residual
    mass_scaled_away: float = 0.0  # removed from the residual but not sent (mean and sqrt)
    overflows: int = 0  # number of times that a parameter left the exact range
    first_overflow: int = -1  # index of the first such parameter, or -1
