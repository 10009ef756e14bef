"""Accumulators: what makes one set of parameters out of those of all workers, after a round."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.models.base import Flat

# before f32[n_params], after f32[workers, n_params], rows i64[workers] -> f32[n_params]: what all
# begin the next round with. ``after`` has those that trained in the round; it is read only.
Accumulator = Callable[[Flat, Flat, NDArray[np.int64]], Flat]

ACCUMULATOR_RAISED = (
    "accumulator raised {!r}: it is called with (before, after, rows) after each round, in the"
    " calling process; its trace is below"
)


def accumulated(accumulator: Accumulator, before: Flat, after: Flat, rows: Sequence[float]) -> Flat:
    """What it makes of a round. Raise TrainingError where that are no parameters, or it raises."""
    try:
        made = np.asarray(accumulator(before, after, np.array(rows, np.int64)), np.float32)
    except Exception as error:  # the user's, who may raise anything
        trace = traceback.format_exc()
        raise TrainingError(ACCUMULATOR_RAISED.format(error), trace=trace) from error
    if made.shape != after.shape[1:] or not np.isfinite(made).all():
        raise TrainingError(
            f"accumulator returned {made.dtype.name}{list(made.shape)}, or values that are not"
            f" finite: it must return f32[{after.shape[1]}], the parameters of the next round"
        )
    return made
