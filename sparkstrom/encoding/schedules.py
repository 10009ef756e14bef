"""Publications that do not go by the threshold algorithm: the first ones, and shake-ups.

Both replace tau for one message and nothing else: what is sent is still taken out of the residual,
so the conservation law does not know them. Publications count from 1 and go on from fit to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import Layers

SHAKE_DIVISOR = 3.0  # DL4J 1.0.0-beta, EncodingHandler: a third of the threshold
SAMPLE_PARAMS = 65_536  # tau from a sample: its error at 1 in 1,000 sent is an eighth of that


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Send much at first, and exponentially less from publication to publication.

    Early gradients are large and change quickly; held back until they reach a threshold made for
    later, they arrive stale. Source: Deep Gradient Compression (Lin et al. 2018, section 3.3),
    where sparsity rises from epoch to epoch as 75 %, 93.75 %, 98.4 %, 99.6 %, 99.9 %: these
    defaults with ``publications=4``. tau is found as there, from a sample of the residual. The
    threshold algorithm begins afterwards, from the last tau; a fixed one from its own.
    """

    publications: int  # of each worker; an epoch's worth or a few
    sent_fraction_first: float = 0.25  # of all parameters, in the first message
    sent_fraction_last: float = 1e-3  # what the ramp would reach one publication after its last

    def __post_init__(self) -> None:
        whole = isinstance(self.publications, int) and not isinstance(self.publications, bool)
        if not (whole and self.publications >= 1):
            raise UsageError(
                f"publications={self.publications!r}: must be a whole number of at least 1; for no"
                " warm-up give None in place of WarmUp"
            )
        if not 0 < self.sent_fraction_last <= self.sent_fraction_first < 1:
            raise UsageError(
                f"sent_fraction_first={self.sent_fraction_first}, sent_fraction_last="
                f"{self.sent_fraction_last}: need 0 < last <= first < 1, as fractions of all"
                " parameters"
            )

    def covers(self, publication: int) -> bool:
        """Whether publication number ``publication`` (from 1) belongs to the warm-up."""
        return publication <= self.publications

    def sent_fraction(self, publication: int) -> float:
        """What this publication is to send, as a fraction of all parameters."""
        ratio = self.sent_fraction_last / self.sent_fraction_first
        return float(self.sent_fraction_first * ratio ** ((publication - 1) / self.publications))

    def tau(
        self, publication: int, learnt: Flat, other: Flat, sign: int, layers: Layers | None = None
    ) -> float | None:
        """The threshold that so many residuals of a sample reach; None where all of them are 0.

        The residual is ``learnt + sign * other``, f32[n_params] each. The sample is the same for
        the same publication.
        """
        where = np.arange(learnt.size)
        if learnt.size > SAMPLE_PARAMS:  # by chance: a stride would see one column of a matrix
            where = np.random.default_rng(publication).integers(0, learnt.size, SAMPLE_PARAMS)
        with np.errstate(invalid="ignore", over="ignore"):
            sizes = np.abs(learnt[where] + np.float32(sign) * other[where])
        if layers is not None:
            sizes /= layers.at(where)
        sizes = sizes[(sizes > 0) & np.isfinite(sizes)]  # the scan reports what is not finite
        if sizes.size == 0:
            return None
        wanted = math.ceil(self.sent_fraction(publication) * where.size)
        nth = max(0, sizes.size - wanted)
        return float(np.partition(sizes, nth)[nth])


def shakes(publication: int, frequency: int) -> bool:
    """Whether publication number ``publication`` is a shake-up; ``frequency`` 0: none is."""
    return frequency > 0 and publication > 0 and publication % frequency == 0
