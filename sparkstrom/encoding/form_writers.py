"""Forms being written: each writes its message, takes it out of the residual and moves theta.

In one act: a message that exists has been subtracted, and one that was not made has not. Which
form it is follows from the hit count alone (``FormWriters.of``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparkstrom.encoding import gaps, levels
from sparkstrom.encoding.backends import I32, SCRATCH_BYTES, U8, Memory
from sparkstrom.encoding.encoded import Encoded, EncoderState
from sparkstrom.encoding.error_feedback import Operands, Residual, Stride
from sparkstrom.encoding.forms import Form, half_side, prefers_bitmap
from sparkstrom.encoding.layers import Layers, indices_of


class Written(NamedTuple):
    """A message, and what it did."""

    encoded: Encoded
    steps: float  # how many times tau was sent in all, up or down
    overflows: int  # parameters moved beyond the exact range
    first_overflow: int  # the index of the first of them, or -1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that a scan and the forms share, made once."""

    n_params: int
    memory: Memory
    layers: Layers | None
    codes: I32  # in ``memory``: the hits of the last scan, as far as there is room
    out: U8  # on the host: a message being written

    @classmethod
    def of(
        cls, n_params: int, memory: Memory, layers: Layers | None, *, levels_max: int
    ) -> Workspace:
        """Room for every message that can become due; touched only as far as hits need it."""
        # From n/2 hits on the form is the bitmap, where there is one.
        room = n_params // 2 + 1 if has_bitmaps(layers, levels_max) else n_params
        sparse_bytes = levels.bytes_max(room, n_params, levels_max - 1) + gaps.FLUSH_BYTES
        out = np.empty(max(sparse_bytes, bitmap_bytes(n_params)), np.uint8)
        return cls(n_params, memory, layers, memory.empty(room, np.int32), out)


def has_bitmaps(layers: Layers | None, levels_max: int) -> bool:
    """Whether a bitmap can say what is sent: it knows one tau, and no multiple of it."""
    return layers is None and levels_max == 1


def bitmap_bytes(n_params: int) -> int:
    """The length of a bitmap: two bits per parameter."""
    return (n_params + 3) // 4


class FormWriter(Protocol):
    """Writes messages of one form."""

    def write(self, hits: int, at: Operands, stride: Stride, /) -> Written:
        """Publish what the last scan found: at least one hit."""


class GapsWriter:
    """Few hits, all moving by tau, or by their layer's multiple of it."""

    def __init__(self, residual: Residual, space: Workspace) -> None:
        self._residual, self._space = residual, space

    def write(self, hits: int, at: Operands, stride: Stride) -> Written:
        """As ``FormWriter.write``."""
        space = self._space
        codes = space.codes[:hits]
        on_host = space.memory.to_host(codes)
        size = gaps.encode(on_host, space.n_params, space.out)
        overflow = self._residual.move(at, codes, stride)
        payload, n = space.out[:size].tobytes(), space.n_params
        steps = int(space.layers.at(indices_of(on_host)).sum()) if space.layers else hits
        return Written(
            Encoded(Form.GAPS, stride.step_quanta, hits, payload, hits / n), steps, *overflow
        )


class LevelsWriter:
    """Few hits, each moving by the largest tau * 2^level that its residual reaches."""

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        self._residual, self._space, self._top = residual, space, levels_max - 1
        self._levels_of: U8 = space.memory.empty(space.codes.size, np.uint8)

    def write(self, hits: int, at: Operands, stride: Stride) -> Written:
        """As ``FormWriter.write``; ``GAPS`` where nobody reaches 2 tau."""
        space = self._space
        codes, found = space.codes[:hits], self._levels_of[:hits]
        top = self._residual.levels(at, codes, stride.tau, self._top, found)
        overflow = self._residual.move_levels(at, codes, found, stride)
        codes, found = space.memory.to_host(codes), space.memory.to_host(found)
        if top:
            size = levels.encode(codes, found, top, space.n_params, space.out)
        else:
            size = gaps.encode(codes, space.n_params, space.out)
        times = np.left_shift(1, found, dtype=np.int64)
        if space.layers:
            times *= space.layers.at(indices_of(codes))
        form, payload = Form.LEVELS if top else Form.GAPS, space.out[:size].tobytes()
        encoded = Encoded(form, stride.step_quanta, hits, payload, hits / space.n_params)
        return Written(encoded, float(times.sum()), *overflow)


class BitmapWriter:
    """Many hits, and half steps to one side in the same two bits; sides take turns."""

    def __init__(self, residual: Residual, space: Workspace) -> None:
        self._residual, self._space = residual, space
        self._packed: U8 = space.memory.mirror(space.out[: bitmap_bytes(space.n_params)])
        self._scratch: U8 = space.memory.empty(SCRATCH_BYTES, np.uint8)
        self._half_side = 1

    def write(self, hits: int, at: Operands, stride: Stride) -> Written:
        """As ``FormWriter.write``; the kernel counts hits itself."""
        form = Form.BITMAP_UP if self._half_side > 0 else Form.BITMAP_DOWN
        self._half_side = -self._half_side  # the next bitmap flushes the other side
        hits, halves, *overflow = self._residual.bitmap(
            at, stride, half_side(form), self._scratch, self._packed
        )
        space, count = self._space, hits + halves
        payload = space.memory.to_host(self._packed).tobytes()
        encoded = Encoded(form, stride.step_quanta, count, payload, count / space.n_params)
        return Written(encoded, hits + halves / 2, *overflow)

    def state(self) -> EncoderState:
        """Whose turn it is."""
        return {"half_side": self._half_side}

    def load_state(self, state: EncoderState) -> None:
        """Go on with the other side."""
        self._half_side = int(state["half_side"])


class FormWriters:
    """One of each form that can become due."""

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        """``levels_max``: how many steps a hit may move by; 1: tau alone."""
        self._n_params = space.n_params
        self._has_bitmaps = has_bitmaps(space.layers, levels_max)
        self._bitmap = BitmapWriter(residual, space)
        self._sparse: FormWriter = GapsWriter(residual, space)
        if levels_max > 1:
            self._sparse = LevelsWriter(residual, space, levels_max)

    def of(self, hits: int) -> FormWriter:
        """The form for so many hits."""
        if self._has_bitmaps and prefers_bitmap(hits, self._n_params):
            return self._bitmap
        return self._sparse

    def state(self) -> EncoderState:
        """What survives from fit to fit, whether or not bitmaps are written in this one."""
        return self._bitmap.state()

    def load_state(self, state: EncoderState) -> None:
        """Take it back."""
        self._bitmap.load_state(state)
