"""Residual post-processors: what happens to the mass that no message took.

Clipping destroys mass on purpose, against a residual that grows faster than it is sent. So it
counts what it destroys: conservation is only a law when the losses are terms of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sparkstrom.base.option_types import COUNT_MAX, check_options, number, whole
from sparkstrom.encoding.error_feedback import Operands, Residual


class ResidualPostProcessor(Protocol):
    """What happens to the residual after a message was made of it."""

    def process(self, residual: Residual, at: Operands, publication: int, tau: float, /) -> float:
        """Change the residual; return the mass that this destroys.

        at           local and theta, where the residual lies between them
        publication  its number, from 1
        tau          of that message (parameter units)
        """


@dataclass(frozen=True, slots=True)
class ResidualClipping:
    """Clip the residual to ``multiple`` tau at every ``frequency``-th publication.

    DL4J: ``ResidualClippingPostProcessor``. As there it comes after encoding, with the tau of that
    message, and is skipped when nothing was sent. Unlike there it counts publications, not
    training steps. ``None`` in its place clips nothing. Raises UsageError for a multiple or a
    frequency below 1.
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
        check_options(self)

    def is_due(self, publication: int) -> bool:
        """Whether publication number ``publication`` (from 1) ends with clipping."""
        return publication % self.frequency == 0

    def process(self, residual: Residual, at: Operands, publication: int, tau: float) -> float:
        """Clip where this publication ends with it."""
        return residual.clip(at, self.multiple * tau) if self.is_due(publication) else 0.0
