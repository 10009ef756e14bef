"""Accumulators: what makes one set of parameters out of those of all workers, after a round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.base import Flat

# before f32[n_params], after f32[workers, n_params], rows i64[workers] -> f32[n_params]: what all
# begin the next round with. ``after`` has those that trained in the round; it is read only.
Accumulator = Callable[[Flat, Flat, NDArray[np.int64]], Flat]
