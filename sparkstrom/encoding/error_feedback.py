"""Error feedback: where lies what was learnt and not sent, and what moves it.

A model that trains on ``local`` needs no array for it: the residual is ``local - theta``, and a hit
that moves theta leaves it (under mean and sqrt, local moves too). One that trains on the replica
hands over what each step changed, and the residual is an array of its own (DL4J's rule). The two
differ in the kernels that look at them, which are chosen here, once.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.backends import I32, U8, Backend
from sparkstrom.encoding.encoded import EncoderState
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import LayeredKernels, Layers

TRAIN_ON = ("local", "replica")


class Operands(NamedTuple):
    """What a publication is made from, and what it moves: f32[n_params] both."""

    learnt: Flat  # ``local``, in/out, or training on the replica ``delta``: what the step changed
    theta: Flat  # in/out


class Stride(NamedTuple):
    """By how much a full hit moves (parameter units): each an even multiple of the quantum q."""

    least: float  # from where on a residual is a hit: tau or, where that is coarse, above it
    tau: float  # what the hit takes out of the residual
    step: float  # what it adds to theta: less than tau under mean and sqrt
    step_quanta: int  # the same, in quanta
    q: float


class Residual(Protocol):
    """What was learnt and not sent. Argument tables: ``sparkstrom.encoding.reference``."""

    def terms(self, at: Operands, /) -> tuple[Flat, Flat, int]:
        """(one, other, sign): before a scan the residual is one + sign * other."""

    def values(self, learnt: Flat, /) -> Flat:
        """Where a value that is not finite would be seen after a scan."""

    def scan(self, at: Operands, tau: float, codes: I32, /) -> tuple[int, int]:
        """Take in what was learnt, and find hits."""

    def choose(self, at: Operands, tau: float, limit: int, seed: int, codes: I32, /) -> int:
        """Find hits, those below 2 tau by chance."""

    def levels(self, at: Operands, codes: I32, tau: float, top: int, levels: U8, /) -> int:
        """Find how far each hit may move."""

    def move(self, at: Operands, codes: I32, stride: Stride, /) -> tuple[int, int]:
        """Take hits out, and put them into theta."""

    def move_levels(
        self, at: Operands, codes: I32, levels: U8, stride: Stride, /
    ) -> tuple[int, int]:
        """The same, each hit by 2^level times as much."""

    def bitmap(
        self, at: Operands, stride: Stride, side: int, scratch: U8, out: U8, /
    ) -> tuple[int, int, int, int]:
        """Take hits and half steps to one side out, put them into theta, and write them down."""

    def clip(self, at: Operands, limit: float, /) -> float:
        """Cut down to ``limit``; return the mass that this destroys."""

    def norms(self, at: Operands, /) -> tuple[float, float]:
        """Sums of absolute values and of squares, in float64."""

    def copy(self, at: Operands, /) -> Flat:
        """A copy f32[n_params] on the host."""

    def accumulate(self, delta: Flat, /) -> None:
        """Take in a step that is not published."""

    def add(self, saved: Flat, local: Flat, /) -> None:
        """Take over f32[n_params] that was kept from an earlier fit."""

    def state(self) -> EncoderState:
        """What survives from fit to fit."""

    def load_state(self, state: EncoderState, /) -> None:
        """Add what ``state`` gave elsewhere."""


def residual_of(
    train_on: str, n_params: int, backend: Backend, layers: Layers | None = None
) -> Residual:
    """The residual of a model that trains on ``train_on``: "local" or "replica"."""
    if train_on not in TRAIN_ON:
        raise UsageError(f"train_on={train_on!r}: must be 'local' or 'replica'")
    make = LocalResidual if train_on == "local" else OwnResidual
    return make(n_params, backend, layers)


class LocalResidual:
    """``local - theta``: it has no array of its own, and is in the caller's state, not in ours."""

    def __init__(self, n_params: int, backend: Backend, layers: Layers | None = None) -> None:
        self._n_params, self._memory, self._kernels = n_params, backend.memory, backend.kernels
        self._layered = LayeredKernels(backend, layers) if layers else backend.kernels

    def terms(self, at: Operands) -> tuple[Flat, Flat, int]:
        return at.learnt, at.theta, -1

    def values(self, learnt: Flat) -> Flat:
        return learnt

    def scan(self, at: Operands, tau: float, codes: I32) -> tuple[int, int]:
        return self._layered.scan_local(at.learnt, at.theta, tau, codes)

    def choose(self, at: Operands, tau: float, limit: int, seed: int, codes: I32) -> int:
        return self._layered.choose_local(at.learnt, at.theta, tau, limit, seed, codes)

    def levels(self, at: Operands, codes: I32, tau: float, top: int, levels: U8) -> int:
        return self._layered.levels_local(at.learnt, at.theta, codes, tau, top, levels)

    def move(self, at: Operands, codes: I32, stride: Stride) -> tuple[int, int]:
        steps = (stride.step, stride.step - stride.tau, stride.q)
        return self._layered.move(at.theta, at.learnt, codes, *steps)

    def move_levels(self, at: Operands, codes: I32, levels: U8, stride: Stride) -> tuple[int, int]:
        steps = (stride.step, stride.step - stride.tau, stride.q)
        return self._layered.move_levels(at.theta, at.learnt, codes, levels, *steps)

    def bitmap(
        self, at: Operands, stride: Stride, side: int, scratch: U8, out: U8
    ) -> tuple[int, int, int, int]:
        steps = (stride.tau, stride.step, side, stride.q)
        return self._kernels.bitmap_local(at.learnt, at.theta, *steps, scratch, out)

    def clip(self, at: Operands, limit: float) -> float:
        return self._layered.clip_local(at.learnt, at.theta, limit)

    def norms(self, at: Operands) -> tuple[float, float]:
        return self._kernels.norms_local(at.learnt, at.theta)

    def copy(self, at: Operands) -> Flat:
        residual: Flat = self._memory.to_host(at.learnt) - self._memory.to_host(at.theta)
        return residual

    def accumulate(self, delta: Flat) -> None:
        raise AssertionError("what is learnt on local is there already")

    def add(self, saved: Flat, local: Flat) -> None:
        _need_shape(saved, self._n_params)
        self._memory.add(local, saved)

    def state(self) -> EncoderState:
        return {}

    def load_state(self, state: EncoderState) -> None:
        """There is nothing to load: whoever keeps local keeps it."""


class OwnResidual:
    """An array of its own; a model that trains on the replica does not see it."""

    def __init__(self, n_params: int, backend: Backend, layers: Layers | None = None) -> None:
        self._n_params, self._memory, self._kernels = n_params, backend.memory, backend.kernels
        self._layered = LayeredKernels(backend, layers) if layers else backend.kernels
        self._array: Flat = backend.memory.zeros(n_params, np.float32)

    def terms(self, at: Operands) -> tuple[Flat, Flat, int]:
        return self._array, at.learnt, 1

    def values(self, learnt: Flat) -> Flat:
        return self._array

    def scan(self, at: Operands, tau: float, codes: I32) -> tuple[int, int]:
        return self._layered.scan_replica(self._array, at.learnt, tau, codes)

    def choose(self, at: Operands, tau: float, limit: int, seed: int, codes: I32) -> int:
        return self._layered.choose_replica(self._array, tau, limit, seed, codes)

    def levels(self, at: Operands, codes: I32, tau: float, top: int, levels: U8) -> int:
        return self._layered.levels_replica(self._array, codes, tau, top, levels)

    def move(self, at: Operands, codes: I32, stride: Stride) -> tuple[int, int]:
        steps = (stride.step, -stride.tau, stride.q)
        return self._layered.move(at.theta, self._array, codes, *steps)

    def move_levels(self, at: Operands, codes: I32, levels: U8, stride: Stride) -> tuple[int, int]:
        steps = (stride.step, -stride.tau, stride.q)
        return self._layered.move_levels(at.theta, self._array, codes, levels, *steps)

    def bitmap(
        self, at: Operands, stride: Stride, side: int, scratch: U8, out: U8
    ) -> tuple[int, int, int, int]:
        steps = (stride.tau, stride.step, side, stride.q)
        return self._kernels.bitmap_replica(self._array, at.theta, *steps, scratch, out)

    def clip(self, at: Operands, limit: float) -> float:
        return self._layered.clip_replica(self._array, limit)

    def norms(self, at: Operands) -> tuple[float, float]:
        return self._kernels.norms_replica(self._array)

    def copy(self, at: Operands) -> Flat:
        return self._memory.to_host(self._array).copy()

    def accumulate(self, delta: Flat) -> None:
        self._memory.add(self._array, delta)

    def add(self, saved: Flat, local: Flat) -> None:
        _need_shape(saved, self._n_params)
        self._memory.add(self._array, saved)

    def state(self) -> EncoderState:
        return {"residual": self._memory.to_host(self._array).copy()}

    def load_state(self, state: EncoderState) -> None:
        if "residual" in state:
            self.add(np.asarray(state["residual"], np.float32), self._array)


def _need_shape(saved: Flat, n_params: int) -> None:
    if saved.shape != (n_params,):
        raise UsageError(f"a residual of shape {saved.shape} for {n_params} parameters")
