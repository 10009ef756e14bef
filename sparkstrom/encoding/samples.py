"""tau from the update's own distribution: what a wanted fraction of a sample reaches."""

from __future__ import annotations

import math

import numpy as np

from sparkstrom.encoding.backends import Memory
from sparkstrom.encoding.cpu import host_memory
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import Layers

SAMPLE_PARAMS = 65_536  # tau from a sample: its error at 1 in 1,000 sent is an eighth of that


def tau_reached_by(
    fraction: float,
    publication: int,
    learnt: Flat,
    other: Flat,
    sign: int,
    layers: Layers | None = None,
    memory: Memory = host_memory,
) -> float | None:
    """The threshold that ``fraction`` of the residuals reach; None where all of them are 0.

    The residual is ``learnt + sign * other``, f32[n_params] each, which lie in ``memory``; of many
    a sample by chance is taken, the same for the same publication, and nothing else of them comes
    to the host. A residual counts in multiples of its layer's tau.
    """
    n_params = learnt.shape[0]
    where = None  # all of them
    if n_params > SAMPLE_PARAMS:  # by chance: a stride would see one column of a matrix
        where = np.random.default_rng(publication).integers(0, n_params, SAMPLE_PARAMS)
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.abs(memory.take(learnt, where) + np.float32(sign) * memory.take(other, where))
    if layers is not None:
        sizes /= layers.at(np.arange(n_params) if where is None else where)
    wanted = math.ceil(fraction * sizes.size)
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]  # the scan reports what is not finite
    if sizes.size == 0:
        return None
    nth = max(0, sizes.size - wanted)
    return float(np.partition(sizes, nth)[nth])
