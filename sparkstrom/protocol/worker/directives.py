"""Directives: what a node's trainer is to do, as follows from where the node stands."""

from __future__ import annotations

from functools import lru_cache

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import Phase, State
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.protocol.common.stages import INSTALLING
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.trainer_view import TrainerView

RUNNING = Phase.RUNNING  # see ``stages``: this is asked after every event
JOINING = Directive(Order.WAIT, "joining")
GATHERING = Directive(Order.WAIT, "the others have not joined yet")
WINDOW_FULL = Directive(Order.WAIT, "its updates are not committed yet")
STALE = Directive(Order.WAIT, "what the others sent a round ago is not here yet")
AHEAD = Directive(Order.WAIT, "it is ahead of the slowest")
NOT_THERE = Directive(Order.WAIT, "the last updates have not come yet")
DRAIN = Directive(Order.DRAIN)
TRANSFERRING = Directive(Order.WAIT, "the updater's state of another worker is on its way")
LINGERING = Directive(Order.WAIT, "others hear from it that the fit is done")
DONE = Directive(Order.END, Ending.DONE.value, why=Ending.DONE)


class Directives:
    """What the parts of a node say, put together."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        replication: Replication,
        own: InFlight,
        trainer: TrainerView,
        fit: FitView,
        transfers: OptimizerTransfers,
        children: Children,
    ) -> None:
        self._limits, self._replication, self._own = limits, replication, own
        self._trainer, self._fit = trainer, fit
        self._transfers, self._children = transfers, children

    def now(self) -> Directive:
        """The command that holds now."""
        replication, state = self._replication, self._fit.state
        pauses, stage = replication.pauses, replication.stage
        if replication.fetch is not None or (stage is INSTALLING and pauses):
            return Directive(Order.PAUSE, "a replica is on its way", number=pauses)
        if state is None or not replication.has_replica:
            return JOINING
        if state.phase is RUNNING:
            return TRANSFERRING if self._transfers.fetch is not None else self._train(state)
        match state.phase:
            case Phase.DONE if self._trainer.audit is not None:
                return DONE if self._fit.may_end else LINGERING
            case Phase.AUDIT | Phase.DONE:
                at_final = replication.received >= state.final
                return _audit(state.final, state.epochs) if at_final else NOT_THERE
            case Phase.DRAINING:
                return DRAIN
            case _:
                return GATHERING

    def _train(self, state: State) -> Directive:
        most = self._limits.publications_max
        if most is None and not self._own.has_room():
            return WINDOW_FULL
        workers = max(1, state.training)  # itself, which the master may not have heard
        limit = None
        if workers > 1:
            limit, waits = self._steps_max(state, workers)
            if limit is not None and self._trainer.steps >= limit:
                return waits
        publishes = most is None or len(self._own) < most
        told = state.minibatches, state.epochs
        return _train(limit, publishes, self._round_s(state), workers, *told)

    def _round_s(self, state: State) -> float:
        """From a publication to its commit, lately. Or until the last one has it, where all wait.

        Links that are too narrow for every update carry sums, late: what takes a step together then
        waits for these, and has to send less, whoever's link it is.
        """
        if self._limits.max_lead is None or not self._own.round_s:
            return self._own.round_s
        waits_s = max(state.wait_ms / 1000, round(self._children.wait_s, 3))
        return max(self._own.round_s, waits_s)

    def _steps_max(self, state: State, workers: int) -> tuple[int | None, Directive]:
        """How far it may go, None: to the end; and what it waits for there.

        Its own update, once committed, shows that all that the others had sent by then is here,
        too: ``max_staleness`` counts the steps that go on meanwhile. ``max_lead`` counts from the
        slowest.
        """
        limits = self._limits
        limit, waits = None, AHEAD
        if limits.max_lead is not None:
            limit = self._trainer.steps_up_to(state.slowest + limits.max_lead)
        if limits.max_staleness is not None:
            beside = max(limits.max_staleness, limits.age_of_updates // workers - limits.steps_each)
            oldest = self._own.oldest
            sent = self._trainer.steps + 1 if oldest is None else oldest.steps  # with the next one
            if limit is None or sent + beside < limit:
                limit, waits = sent + beside, STALE
        return limit, waits


@lru_cache(maxsize=1024)  # asked after every event, and seldom answered anew
def _train(
    steps_max: int | None,
    publishes: bool,
    round_s: float,
    workers: int,
    minibatches: int,
    epochs: int,
) -> Directive:
    return Directive(
        Order.TRAIN,
        steps_max=steps_max,
        publishes=publishes,
        round_s=round_s,
        workers=workers,
        minibatches=minibatches,
        epochs=epochs,
    )


def _audit(final: CommitNo, epochs: int) -> Directive:
    return Directive(Order.AUDIT, commit=final, epochs=epochs)
