"""Totals: what all workers of a fit have told, taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sparkstrom.observe.telemetry import LinkBytes, WorkerCounters


@dataclass(frozen=True, slots=True)
class FitTotals:
    """Sums over workers, each as it is told by one; the departed count, too."""

    examples: int
    loss_sum: float
    last_examples: int
    last_loss_sum: float
    rows_held_out: int  # of each partition once: who replaces a worker reads the same rows
    spilled_bytes: int  # likewise
    fresh_updaters: int
    publications: int
    hits: int
    mass_clipped: float
    mass_scaled_away: float
    mass_left: float
    mass_waited: float
    residual_square: float
    overflows: int
    tau: float | None  # the mean; None: nobody has published
    update_bytes: int
    rejected: int
    by_kind: Counter[str]  # bytes that nodes handed over to be sent
    links: tuple[LinkBytes, ...]
    unknown: tuple[str, ...]  # names that nobody here knows

    @classmethod
    def of(cls, told: Iterable[WorkerCounters]) -> FitTotals:
        """What these workers have told."""
        told = list(told)
        training = [one.training for one in told if one.training is not None]
        nodes = [one.node for one in told if one.node is not None]
        taus = [one.tau for one in training if one.tau is not None]
        by_partition = {one.partition: one for one in training if one.partition >= 0}.values()
        return cls(
            examples=sum(one.examples for one in training),
            loss_sum=sum(one.loss_sum for one in training),
            last_examples=sum(one.last_examples for one in training),
            last_loss_sum=sum(one.last_loss_sum for one in training),
            rows_held_out=sum(one.rows_held_out for one in by_partition),
            spilled_bytes=sum(one.spilled_bytes for one in by_partition),
            fresh_updaters=sum(one.fresh_updaters for one in training),
            publications=sum(one.publications for one in training),
            hits=sum(one.hits for one in training),
            mass_clipped=sum(one.mass_clipped for one in training),
            mass_scaled_away=sum(one.mass_scaled_away for one in training),
            mass_left=sum(one.mass_left for one in training),
            mass_waited=sum(one.mass_waited for one in training),
            residual_square=sum(one.residual_square or 0.0 for one in training),
            overflows=sum(one.overflows for one in training),
            tau=sum(taus) / len(taus) if taus else None,
            update_bytes=sum(one.update_bytes for one in nodes),
            rejected=sum(one.rejected for one in nodes),
            by_kind=_added(one.by_kind for one in nodes),
            links=tuple(one.links for one in nodes if one.links is not None),
            unknown=tuple(sorted({name for one in told for name in one.unknown})),
        )

    def waiting_in_residuals(self, workers: int, minibatches: int) -> float:
        """How long what workers learn waits until it is sent, in minibatches of the fit; the mean.

        By Little's law a mass waits ``mass_waited / mass_left`` of its worker's steps, and each of
        them is as many minibatches of the fit as workers train. At most the fit: ``minibatches``.
        """
        if not self.mass_waited:
            return 0.0
        if not self.mass_left:
            return float(minibatches)
        return min(workers * self.mass_waited / self.mass_left, float(minibatches))


def _added(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return total
