"""Publications that do not go by the threshold algorithm: the first ones, and shake-ups.

Both replace tau for one message and nothing else: what is sent is still taken out of the residual,
so the conservation law does not know them. Publications count from 1 and go on from fit to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, check_options, number, whole

SHAKE_DIVISOR = 3.0  # DL4J 1.0.0-beta, EncodingHandler: a third of the threshold


_FRACTION = number(
    above=0, below=1, remedy=", as a fraction of all parameters: 0 < last <= first < 1"
)


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

    # of each worker; an epoch's worth or a few
    publications: int = field(
        metadata=whole(
            1,
            COUNT_MAX,
            unit="publications",
            remedy="; for no warm-up give None in place of WarmUp",
        )
    )
    # of all parameters, in the first message
    sent_fraction_first: float = field(default=0.25, metadata=_FRACTION)
    # what the ramp would reach one publication after its last
    sent_fraction_last: float = field(default=1e-3, metadata=_FRACTION)

    def __post_init__(self) -> None:
        check_options(self)
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
