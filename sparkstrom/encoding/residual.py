"""Keep and clip the residual: what a worker has learned but not yet sent (error feedback).

An entry of the residual that reaches the threshold tau is sent. There are two kinds of residual:

- ``LocalResidual``: the model trains on its own array ``local``, and ``theta`` are the shared
  parameters. The residual is ``local - theta`` and needs no array. Sending an entry adds tau to
  theta, which reduces the difference by tau. With the aggregations "mean" and "sqrt", less than tau
  is added to theta; the rest is subtracted from local, so that the difference still shrinks by tau.
- ``ReplicaResidual``: the model trains on theta, and the change of each step is added to a separate
  array. This is DL4J's rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, check_options, number, whole
from sparkstrom.encoding.backends import I32, U8, Backend
from sparkstrom.encoding.forms import EncoderState
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import LayeredKernels, Layers

TRAIN_ON = ("local", "replica")


class PublicationArrays(NamedTuple):
    """The arrays that a publication (``Encoder.publish``) reads and changes, f32[n_params]."""

    learnt: Flat  # ``local`` (in/out); for ReplicaResidual, the change of the last step (in)
    theta: Flat  # the shared parameters (in/out)


class StepSizes(NamedTuple):
    """A hit's step sizes at level 0, in parameter units.

    A hit is an entry of the residual whose absolute value is at least ``hit_min``. A hit of level l
    is at least 2^l * ``hit_min``, and its steps are 2^l times as large.
    """

    hit_min: float  # smallest residual that is a hit
    tau: float  # what a hit subtracts: at most ``hit_min``; in large updates, 2.25 times as much
    step: float  # what a hit adds to theta: less than tau under mean and sqrt
    step_quanta: int  # ``step`` in quanta
    q: float  # the quantum, of which all sizes are even multiples


class Residual(Protocol):
    """Interface of a residual: the sum of learned changes that have not been sent.

    A hit is a parameter whose residual reaches tau in absolute value, and its code is its index, or
    ``~index`` if the residual is negative. ``encoding.reference_kernels`` documents more arguments.
    """

    def terms(self, arrays: PublicationArrays, /) -> tuple[Flat, Flat, int]:
        """Return (one, other, sign): before ``scan`` the residual is one + sign * other."""

    def values(self, learnt: Flat, /) -> Flat:
        """Return the array, ``learnt`` or another, in which ``scan`` finds NaN and infinity."""

    def scan(self, arrays: PublicationArrays, tau: float, codes: I32, /) -> tuple[int, int]:
        """Add new changes, and write the codes (index and sign) of all hits to ``codes``.

        Returns (number of hits, bits of the largest absolute value, which reveal NaN and infinity).
        """

    def choose(
        self, arrays: PublicationArrays, tau: float, limit: int, seed: int, codes: I32, /
    ) -> int:
        """Write codes of hits again, but of those below 2 tau only a random share, limit / 2^32.

        Returns the number of selected hits. ``seed`` determines the choice.
        """

    def find_levels(
        self, arrays: PublicationArrays, codes: I32, tau: float, top: int, levels: U8, /
    ) -> int:
        """Write each hit's level, the largest l <= top with |residual| >= tau * 2^l, to ``levels``.

        Returns the highest of the levels; 0 without hits.
        """

    def move(
        self, arrays: PublicationArrays, codes: I32, step_sizes: StepSizes, /
    ) -> tuple[int, int]:
        """Subtract +-tau from the residual and add +-step to theta, at the hits in ``codes``.

        Returns (number of parameters that left the exact range, index of the first or -1).
        """

    def move_by_levels(
        self, arrays: PublicationArrays, codes: I32, levels: U8, step_sizes: StepSizes, /
    ) -> tuple[int, int]:
        """Apply hits like ``move``, with steps times 2^level; return the result of ``move``."""

    def bitmap(
        self, arrays: PublicationArrays, step_sizes: StepSizes, side: int, scratch: U8, out: U8, /
    ) -> tuple[int, int, int, int]:
        """Write hits and half steps (of sign ``side``) to ``out`` as a bitmap, and apply them.

        Returns (hits, half steps, overflows, index of the first overflow or -1). Overflows are
        parameters that left the exact range. ``scratch`` is working memory.
        """

    def clip(self, arrays: PublicationArrays, limit: float, /) -> float:
        """Clip the residual to +-``limit``; return the sum of absolute changes."""

    def sums(self, arrays: PublicationArrays, /) -> tuple[float, float]:
        """Return the sum of the residual's absolute values and that of its squares, in float64."""

    def copy(self, arrays: PublicationArrays, /) -> Flat:
        """Return a copy of the residual, f32[n_params], on the host."""

    def accumulate(self, delta: Flat, /) -> None:
        """Add ``delta``, the change that a training step made, to the residual; publish nothing."""

    def add_saved(self, saved: Flat, local: Flat, /) -> None:
        """Add ``saved``, the residual f32[n_params] of an earlier fit, to this residual.

        LocalResidual adds it to ``local``; ReplicaResidual does not use ``local``.
        """

    def state(self) -> EncoderState:
        """Return the state to keep for the next fit."""

    def load_state(self, state: EncoderState, /) -> None:
        """Add to this residual the one in ``state``, which the method ``state`` returned.

        A state without a residual has no effect.
        """


def create_residual(
    train_on: str, n_params: int, backend: Backend, layers: Layers | None = None
) -> Residual:
    """Create a LocalResidual (``train_on`` is "local") or a ReplicaResidual ("replica").

    Raises UsageError for any other ``train_on``.
    """
    if train_on not in TRAIN_ON:
        raise UsageError(f"train_on={train_on!r}: must be 'local' or 'replica'")
    make = LocalResidual if train_on == "local" else ReplicaResidual
    return make(n_params, backend, layers)


class LocalResidual:
    """The residual ``local - theta``, without an array of its own; the model trains on local."""

    def __init__(self, n_params: int, backend: Backend, layers: Layers | None = None) -> None:
        """Select the kernels of ``backend``; with ``layers``, use one threshold per layer."""
        self._n_params, self._memory, self._kernels = n_params, backend.memory, backend.kernels
        self._layered = LayeredKernels(backend, layers) if layers else backend.kernels

    def terms(self, arrays: PublicationArrays) -> tuple[Flat, Flat, int]:
        """Return (local, theta, -1): the residual is local - theta."""
        return arrays.learnt, arrays.theta, -1

    def values(self, learnt: Flat) -> Flat:
        """Return ``local``: if a training step produces NaN or infinity, ``local`` contains it."""
        return learnt

    def scan(self, arrays: PublicationArrays, tau: float, codes: I32) -> tuple[int, int]:
        """Write codes of hits in local - theta; return (hits, bits of the largest |local|)."""
        return self._layered.scan_local(arrays.learnt, arrays.theta, tau, codes)

    def choose(
        self, arrays: PublicationArrays, tau: float, limit: int, seed: int, codes: I32
    ) -> int:
        """Write codes of hits, a random part of those below 2 tau; return how many."""
        return self._layered.choose_local(arrays.learnt, arrays.theta, tau, limit, seed, codes)

    def find_levels(
        self, arrays: PublicationArrays, codes: I32, tau: float, top: int, levels: U8
    ) -> int:
        """Write to ``levels`` each hit's level, at most ``top``; return the highest one, or 0."""
        return self._layered.find_levels_local(arrays.learnt, arrays.theta, codes, tau, top, levels)

    def move(self, arrays: PublicationArrays, codes: I32, step_sizes: StepSizes) -> tuple[int, int]:
        """Add +-step to theta and +-(step - tau) to local at hits; return (overflows, first)."""
        steps = (step_sizes.step, step_sizes.step - step_sizes.tau, step_sizes.q)
        return self._layered.move(arrays.theta, arrays.learnt, codes, *steps)

    def move_by_levels(
        self, arrays: PublicationArrays, codes: I32, levels: U8, step_sizes: StepSizes
    ) -> tuple[int, int]:
        """Apply hits like ``move``, with steps times 2^level; return (overflows, first or -1)."""
        steps = (step_sizes.step, step_sizes.step - step_sizes.tau, step_sizes.q)
        return self._layered.move_by_levels(arrays.theta, arrays.learnt, codes, levels, *steps)

    def bitmap(
        self, arrays: PublicationArrays, step_sizes: StepSizes, side: int, scratch: U8, out: U8
    ) -> tuple[int, int, int, int]:
        """Write local - theta as a bitmap, and apply the bitmap to theta and local."""
        steps = (step_sizes.tau, step_sizes.step, side, step_sizes.q)
        return self._kernels.bitmap_local(arrays.learnt, arrays.theta, *steps, scratch, out)

    def clip(self, arrays: PublicationArrays, limit: float) -> float:
        """Clip local to within ``limit`` of theta; return the sum of absolute changes."""
        return self._layered.clip_local(arrays.learnt, arrays.theta, limit)

    def sums(self, arrays: PublicationArrays) -> tuple[float, float]:
        """Return the sum of |local - theta| and the sum of (local - theta)^2."""
        return self._kernels.residual_sums_local(arrays.learnt, arrays.theta)

    def copy(self, arrays: PublicationArrays) -> Flat:
        """Return a copy of local - theta on the host."""
        residual: Flat = self._memory.to_host(arrays.learnt) - self._memory.to_host(arrays.theta)
        return residual

    def accumulate(self, delta: Flat) -> None:
        """Raise AssertionError, because ``local`` already contains every step."""
        raise AssertionError("``local`` already contains every step")

    def add_saved(self, saved: Flat, local: Flat) -> None:
        """Add a saved residual f32[n_params] to ``local``."""
        _check_shape(saved, self._n_params)
        self._memory.add(local, saved)

    def state(self) -> EncoderState:
        """Return {}: the residual is part of the caller's ``local``."""
        return {}

    def load_state(self, state: EncoderState) -> None:
        """Do nothing: the caller's ``local`` contains the residual."""


class ReplicaResidual:
    """A residual in an array of its own; the model trains on theta, the shared parameters."""

    def __init__(self, n_params: int, backend: Backend, layers: Layers | None = None) -> None:
        """Allocate a residual of zeros; with ``layers``, use a threshold per layer."""
        self._n_params, self._memory, self._kernels = n_params, backend.memory, backend.kernels
        self._layered = LayeredKernels(backend, layers) if layers else backend.kernels
        self._array: Flat = backend.memory.zeros(n_params, np.float32)

    def terms(self, arrays: PublicationArrays) -> tuple[Flat, Flat, int]:
        """Return (residual, change of the last step, 1), because ``scan`` will add the two."""
        return self._array, arrays.learnt, 1

    def values(self, learnt: Flat) -> Flat:
        """Return the residual array itself, and ignore ``learnt``, the change of the last step.

        ``scan`` has added that change to the residual, and with it any NaN or infinity.
        """
        return self._array

    def scan(self, arrays: PublicationArrays, tau: float, codes: I32) -> tuple[int, int]:
        """Add the last step's change, and write codes of hits in the residual.

        Return (hits, bits of the largest |residual|).
        """
        return self._layered.scan_replica(self._array, arrays.learnt, tau, codes)

    def choose(
        self, arrays: PublicationArrays, tau: float, limit: int, seed: int, codes: I32
    ) -> int:
        """Write codes of hits again, a random part of those below 2 tau; return how many."""
        return self._layered.choose_replica(self._array, tau, limit, seed, codes)

    def find_levels(
        self, arrays: PublicationArrays, codes: I32, tau: float, top: int, levels: U8
    ) -> int:
        """Write to ``levels`` each hit's level, at most ``top``; return the highest one, or 0."""
        return self._layered.find_levels_replica(self._array, codes, tau, top, levels)

    def move(self, arrays: PublicationArrays, codes: I32, step_sizes: StepSizes) -> tuple[int, int]:
        """Add +-step to theta and subtract +-tau from the residual; see ``Residual.move``."""
        steps = (step_sizes.step, -step_sizes.tau, step_sizes.q)
        return self._layered.move(arrays.theta, self._array, codes, *steps)

    def move_by_levels(
        self, arrays: PublicationArrays, codes: I32, levels: U8, step_sizes: StepSizes
    ) -> tuple[int, int]:
        """Apply hits like ``move``, with steps times 2^level; return (overflows, first or -1)."""
        steps = (step_sizes.step, -step_sizes.tau, step_sizes.q)
        return self._layered.move_by_levels(arrays.theta, self._array, codes, levels, *steps)

    def bitmap(
        self, arrays: PublicationArrays, step_sizes: StepSizes, side: int, scratch: U8, out: U8
    ) -> tuple[int, int, int, int]:
        """Write the residual as a bitmap, and apply the bitmap to theta and the residual."""
        steps = (step_sizes.tau, step_sizes.step, side, step_sizes.q)
        return self._kernels.bitmap_replica(self._array, arrays.theta, *steps, scratch, out)

    def clip(self, arrays: PublicationArrays, limit: float) -> float:
        """Clip the residual to +-``limit``; return the sum of absolute changes."""
        return self._layered.clip_replica(self._array, limit)

    def sums(self, arrays: PublicationArrays) -> tuple[float, float]:
        """Return the sum of |residual| and the sum of its squares."""
        return self._kernels.residual_sums_replica(self._array)

    def copy(self, arrays: PublicationArrays) -> Flat:
        """Return a copy of the residual on the host."""
        return self._memory.to_host(self._array).copy()

    def accumulate(self, delta: Flat) -> None:
        """Add ``delta``, the change that a training step made, to the residual; publish nothing."""
        self._memory.add(self._array, delta)

    def add_saved(self, saved: Flat, local: Flat) -> None:
        """Add a saved residual f32[n_params] to this one; ``local`` is not used."""
        _check_shape(saved, self._n_params)
        self._memory.add(self._array, saved)

    def state(self) -> EncoderState:
        """Return a copy of the residual, on the host, under the key "residual"."""
        return {"residual": self._memory.to_host(self._array).copy()}

    def load_state(self, state: EncoderState) -> None:
        """Add to this residual the one in ``state``, which the method ``state`` returned.

        A state without a residual has no effect.
        """
        if "residual" in state:
            self.add_saved(np.asarray(state["residual"], np.float32), self._array)


def _check_shape(saved: Flat, n_params: int) -> None:
    """Raise UsageError unless a saved residual has one entry per parameter."""
    if saved.shape != (n_params,):
        raise UsageError(f"a residual of shape {saved.shape} for {n_params} parameters")


class ResidualPostProcessor(Protocol):
    """Interface of a processor that changes the residual after each message."""

    def process(
        self, residual: Residual, arrays: PublicationArrays, publication: int, tau: float, /
    ) -> float:
        """Change the residual; return the sum of the absolute values that are lost.

        arrays       arrays of the publication, which ``residual.clip`` needs
        publication  number of the publication, from 1
        tau          threshold of the publication (parameter units)
        """


@dataclass(frozen=True, slots=True)
class ResidualClipping:
    """Clips the residual to +-``multiple`` * tau at every ``frequency``-th publication.

    DL4J: ``ResidualClippingPostProcessor``. As in DL4J, clipping follows encoding, uses the
    message's tau, and is skipped if nothing was sent. Unlike in DL4J, ``frequency`` counts
    publications, not training steps. Pass ``None`` instead of this object for no clipping.

    Args:
        multiple: clip absolute values above this many tau.
        frequency: number of publications from one clipping to the next.

    Raises:
        UsageError: the multiple or the frequency is below 1.
    """

    multiple: float = field(
        default=5.0,
        metadata=number(
            least=1, unit="tau", remedy=", or clipping would destroy what the next message sends"
        ),
    )
    frequency: int = field(
        default=5,
        metadata=whole(
            1,
            COUNT_MAX,
            unit="publications",
            remedy=" publication; for no clipping give None in place of ResidualClipping",
        ),
    )

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)

    def is_due(self, publication: int) -> bool:
        """Return whether publication number ``publication`` (from 1) is followed by clipping."""
        return publication % self.frequency == 0

    def process(
        self, residual: Residual, arrays: PublicationArrays, publication: int, tau: float
    ) -> float:
        """Clip the residual if clipping is due; return the sum of absolute changes, or 0.0."""
        return residual.clip(arrays, self.multiple * tau) if self.is_due(publication) else 0.0
