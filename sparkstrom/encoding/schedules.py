"""Publications that do not go by the threshold algorithm: the first ones, and shake-ups.

Both replace tau for one message and nothing else: what is sent is still taken out of the residual,
so the conservation law does not know them. Publications count from 1 and go on from fit to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.errors import UsageError

SHAKE_DIVISOR = 3.0  # DL4J 1.0.0-beta, EncodingHandler: a third of the threshold


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Send much at first, and exponentially less from publication to publication.

    Early gradients are large and change quickly; held back until they reach a threshold made for
    later, they arrive stale. Source: Deep Gradient Compression (Lin et al. 2018, section 3.3),
    where sparsity rises from epoch to epoch as 75 %, 93.75 %, 98.4 %, 99.6 %, 99.9 %: these
    defaults with ``publications=4``. tau is found as there, from a sample of the residual. The
    threshold algorithm begins afterwards, from the last tau; a fixed one from its own. Raises
    UsageError for values out of range.
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


def shakes(publication: int, frequency: int) -> bool:
    """Whether publication number ``publication`` is a shake-up; ``frequency`` 0: none is."""
    return frequency > 0 and publication > 0 and publication % frequency == 0
