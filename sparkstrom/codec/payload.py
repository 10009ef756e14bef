"""Decode payloads (updates, sums of updates, snapshot chunks), and encode the last two.

An update changes some parameters, its entries or hits, by the threshold tau or a multiple of it.
Everything from the network is checked first: lengths before memory is allocated, every index before
it is used, every float before it can reach theta (the shared parameters). docs/wire-format.md
describes the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.encoding import gaps
from sparkstrom.encoding import leveled_gaps as levels
from sparkstrom.encoding import update_sum as sums
from sparkstrom.encoding.backends import host
from sparkstrom.encoding.forms import Form, half_side
from sparkstrom.encoding.grid import EXACT_QUANTA, Flat
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.leveled_gaps import TOP_MAX
from sparkstrom.encoding.update_sum import UpdateSum

Indices = NDArray[np.int32]  # i32[count], ascending and unique
Quanta = NDArray[np.int32]  # i32[count], signed multiples of the job's quantum

BITMAPS = (Form.BITMAP_UP, Form.BITMAP_DOWN)
HIT_BITS_MIN = 2  # in the form GAPS a hit (an entry) takes at least a stop bit and a sign


@dataclass(frozen=True, slots=True)
class Bitmap:
    """An update in bitmap form that has been checked but not unpacked."""

    packed: NDArray[np.uint8]  # u8[(n_params+3)//4], two bits per parameter, as in ``forms``
    side: int  # +1 or -1: a half step adds side * tau / 2
    tau_quanta: int  # tau (the threshold), as a multiple of the grid's quantum


def decode_update_untrusted(
    payload: bytes,
    form: int,
    count: int,
    tau_quanta: int,
    n_params: int,
    layers: Layers | None = None,
) -> tuple[Indices, Quanta]:
    """Decode an update into parameter indices and the amounts to add there.

    Amounts are in quanta, the unit of all parameters: +-tau, +-tau/2 (half steps of bitmaps) or
    +-tau * 2^level (form LEVELS).

    Args:
        payload: the encoded entries.
        form: an ``encoding.forms.Form`` value.
        count: number of entries that the header announces.
        tau_quanta: threshold in quanta.
        n_params: number of parameters.
        layers: multipliers of tau by layer; None: one tau for all.

    Returns:
        int32[count] indices, ascending and unique, and int32[count] amounts. Allocates at most
        8 bytes per entry that the payload has room for.

    Raises:
        WireError: the payload is malformed; no other exception is raised.
    """
    multiplier = (layers.largest if layers else 1) << (TOP_MAX if form == Form.LEVELS else 0)
    _check_header(count, tau_quanta, n_params, multiplier)
    if form in (Form.GAPS, Form.LEVELS):
        hits = _decode_hits(payload, Form(form), count, tau_quanta, n_params)
    elif form in BITMAPS:
        hits = _decode_bitmap(payload, Form(form), count, tau_quanta, n_params)
    else:
        raise WireError(f"an update has form 1, 2, 3 or 7, not {form}")
    if layers is not None:
        layers.scale(*hits)
    return hits


def _check_header(count: int, tau_quanta: int, n_params: int, multiplier: int) -> None:
    """Raise WireError unless the number of entries and the threshold are valid for the model.

    ``multiplier`` is the largest factor by which an entry may multiply the threshold.
    """
    if not 1 <= count <= n_params:
        raise WireError(f"an update of {count} entries for {n_params} parameters")
    if not 2 <= tau_quanta <= EXACT_QUANTA // multiplier or tau_quanta % 2:
        most = f"2^24 / {multiplier}"
        raise WireError(f"a threshold of {tau_quanta} quanta: must be even, within 2 .. {most}")


def _decode_hits(
    payload: bytes, form: Form, count: int, tau_quanta: int, n_params: int
) -> tuple[Indices, Quanta]:
    """Return the entries' indices and amounts in the form GAPS or LEVELS, or raise WireError."""
    if count * HIT_BITS_MIN > 8 * (len(payload) - 1):
        raise WireError(f"{count} hits announced, {len(payload)} bytes cannot hold so many")
    indices, quanta = np.empty(count, np.int32), np.empty(count, np.int32)
    data = np.frombuffer(payload, np.uint8)
    if form == Form.LEVELS:
        reason = levels.read(data, n_params, tau_quanta, indices, quanta)
    else:
        reason = gaps.read(data, n_params, tau_quanta, indices, quanta)
    if reason:
        raise WireError(f"{form.name.lower()} of {count} hits in {len(payload)} bytes: {reason}")
    return indices, quanta


def _decode_bitmap(
    payload: bytes, form: Form, count: int, tau_quanta: int, n_params: int
) -> tuple[Indices, Quanta]:
    """Return indices and amounts of an update in bitmap form, or raise WireError."""
    packed = _check_bitmap(payload, count, n_params)
    indices, quanta = np.empty(count, np.int32), np.empty(count, np.int32)
    host().kernels.bitmap_decode(packed, n_params, half_side(form), tau_quanta, indices, quanta)
    return indices, quanta


def read_bitmap_untrusted(
    payload: bytes, form: int, count: int, tau_quanta: int, n_params: int
) -> Bitmap:
    """Check an update in bitmap form and return the bitmap without unpacking it.

    A packed bitmap can be added ten times faster than indices and amounts. The arguments are those
    of ``decode_update_untrusted``. Raise WireError, and no other error, if the update is invalid.
    """
    _check_header(count, tau_quanta, n_params, 1)
    if form not in BITMAPS:
        raise WireError(f"a bitmap has form 2 or 3, not {form}")
    packed = _check_bitmap(payload, count, n_params)
    return Bitmap(packed, half_side(Form(form)), tau_quanta)


def _check_bitmap(payload: bytes, count: int, n_params: int) -> NDArray[np.uint8]:
    """Return a bitmap as packed bytes. Raise WireError if its length, count or padding is wrong."""
    if len(payload) != (n_params + 3) // 4:
        raise WireError(f"a bitmap of {len(payload)} bytes for {n_params} parameters")
    packed = np.frombuffer(payload, np.uint8)
    if (found := host().kernels.bitmap_count(packed, n_params)) != count:
        what = "has padding bits set" if found < 0 else f"holds {found} entries"
        raise WireError(f"a bitmap that announces {count} entries {what}")
    return packed


def encode_quanta(total: UpdateSum) -> bytes:
    """Encode a sum of updates (``Form.QUANTA``) as a list or an array, whichever is shorter."""
    return sums.encode(total)


def decode_quanta_untrusted(payload: bytes, n_params: int) -> UpdateSum:
    """Decode a sum of updates. Raise WireError, and no other error, if it is invalid."""
    return sums.decode_untrusted(payload, n_params)


def encode_theta(theta: Flat) -> bytes:
    """Encode the parameters of one snapshot chunk as little-endian float32 (``Form.THETA``)."""
    return theta.astype("<f4", copy=False).tobytes()


def decode_theta_untrusted(payload: bytes, n_params: int, k: int) -> Flat:
    """Decode a snapshot chunk of ``n_params`` parameters into a new float32 vector.

    Raise WireError, and no other error, unless every value is a finite multiple of the quantum
    2^-k, and not -0.0.
    """
    if len(payload) != 4 * n_params:
        raise WireError(f"a snapshot chunk of {len(payload)} bytes for {n_params} parameters")
    theta = np.frombuffer(payload, "<f4").astype(np.float32)
    with np.errstate(invalid="ignore"):
        quanta = np.ldexp(theta.astype(np.float64), k)
        wrong = (
            ~np.isfinite(theta) | (quanta != np.rint(quanta)) | ((theta == 0) & np.signbit(theta))
        )
    if wrong.any():
        index = int(np.argmax(wrong))
        raise WireError(f"a snapshot chunk whose value {index} is {theta[index]}: not on the grid")
    return theta
