"""The scan: who reaches tau, and chance among those who are tied."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np

from sparkstrom.base.errors import TrainingError
from sparkstrom.encoding.error_feedback import Operands, Residual
from sparkstrom.encoding.form_writers import Workspace
from sparkstrom.encoding.grid import Flat

INFINITY_BITS = 0x7F800000  # bits of a float32 at or above this, sign aside, are not a number
CROWDED = 1.5  # times the wanted hits: many residuals are tied, and chance must choose among them
SEED_CODES = 4096  # hits whose signs tell workers apart that learn by the same step


class Scan:
    """One pass over the residual, which finds hits, and what is not finite, before any change."""

    def __init__(
        self,
        residual: Residual,
        space: Workspace,
        layer_of: Callable[[int], str] | None = None,
    ) -> None:
        """``layer_of`` names a parameter's layer in error messages."""
        self._residual, self._space, self._layer_of = residual, space, layer_of

    def find(self, at: Operands, tau: float) -> int:
        """Write who reaches tau into the workspace; return how many they are.

        Raises TrainingError naming index and layer where anything is NaN or infinite.
        """
        hits, worst = self._residual.scan(at, tau, self._space.codes)
        if worst >= INFINITY_BITS:
            values = self._residual.values(at.learnt)
            raise self._not_finite(self._space.memory.to_host(values))
        return hits

    def leave_to_chance(
        self, hits: int, fraction: float, at: Operands, tau: float, number: int
    ) -> int:
        """Leave to chance who of many tied ones is sent; the others stay in the residual.

        hits      that ``find`` found with this tau
        fraction  of all parameters, that is wanted
        number    of the publication: others are taken in the next one
        returns   how many hits there are now

        After Adam's first step all residuals are about as large, and no tau parts them. From 2 tau
        on everybody is sent: by tau's making these are no more than are wanted.
        """
        codes = self._space.codes
        wanted = math.ceil(fraction * self._space.n_params)
        if hits <= CROWDED * wanted:
            return hits
        found = self._space.memory.to_host(codes[: min(hits, SEED_CODES)])
        seed = zlib.crc32(found.tobytes(), number)
        large = self._residual.choose(at, tau, 0, seed, codes)
        limit = max(0, wanted - large) * 2**32 // (hits - large) if hits > large else 0
        return min(codes.size, self._residual.choose(at, tau, limit, seed, codes))

    def _not_finite(self, values: Flat) -> TrainingError:
        index = int(np.argmin(np.isfinite(values)))
        where = f" ({self._layer_of(index)})" if self._layer_of else ""
        return TrainingError(
            f"parameter {index}{where} became {values[index]} in training; nothing of that step was"
            " published. Lower the learning rate, clip gradients, or look at the data"
        )
