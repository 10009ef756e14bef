"""What comes out of an encoder: updates, what it counts, and what survives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from sparkstrom.encoding.forms import Form

EncoderState = dict[str, "NDArray[Any] | float | int"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An update, ready to be published. ``sent_fraction`` is entries per parameter."""

    form: Form
    tau_quanta: int  # what a full hit of level 0 adds, as a multiple of the job's quantum
    count: int  # entries in the payload
    payload: bytes
    sent_fraction: float


@dataclass(slots=True)
class Counters:
    """What an encoder did since it was made. Masses are sums of absolute values, float64."""

    publications: int = 0  # calls of publish; some found nothing to send
    messages: int = 0
    hits: int = 0  # entries sent, half steps among them
    payload_bytes: int = 0
    mass_sent: float = 0.0  # what theta moved by (parameter units)
    mass_clipped: float = 0.0  # destroyed by clipping the residual
    mass_scaled_away: float = 0.0  # taken out of the residual and not sent: mean and sqrt
    overflows: int = 0  # parameters moved beyond the exact range
    first_overflow: int = -1  # the index of the first of them
