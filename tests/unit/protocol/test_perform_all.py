"""Tests of ``perform_all``: which effects are still performed after the media driver has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from sparkstrom.base.errors import DriverLost
from sparkstrom.codec.messages import Address, ProbeReply
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import BY_DRIVER, Effect, perform_all

PLACE = Address("h", 1, 1, 2)
OPEN, CLOSE, TELL = ev.OpenEdge(0, 3, PLACE, PLACE), ev.CloseEdge(4), ev.SendDirect(ProbeReply(1))
ADMITTED, HASH, NOTE = ev.IdAssigned(1, 0, 0, 0, (), False), ev.HashReplica(9), ev.Note("n")


def make_performer_losing_driver(*deaths: Effect) -> tuple[Callable[[Effect], None], list[Effect]]:
    """Return a function that raises DriverLost at ``deaths``, and the list of what it performed."""
    done: list[Effect] = []

    def perform(effect: Effect) -> None:
        if effect in deaths:
            raise DriverLost("opening", -1000, f"at {type(effect).__name__}")
        done.append(effect)

    return perform, done


def test_effects_are_performed_in_order() -> None:
    perform, done = make_performer_losing_driver()
    perform_all([OPEN, ADMITTED, TELL], perform)
    assert done == [OPEN, ADMITTED, TELL]


@pytest.mark.parametrize(
    ("effects", "death", "performed"),
    [
        ([OPEN, ADMITTED, TELL], OPEN, [ADMITTED]),
        ([NOTE, CLOSE, OPEN, HASH], CLOSE, [NOTE, HASH]),
        ([TELL, NOTE, CLOSE], CLOSE, [TELL, NOTE]),
    ],
)
def test_only_effects_without_driver_are_performed_after_driver_loss(
    effects: list[Effect], death: Effect, performed: list[Effect]
) -> None:
    """After DriverLost, only effects that need no media driver are performed."""
    perform, done = make_performer_losing_driver(death)
    with pytest.raises(DriverLost, match=type(death).__name__):
        perform_all(effects, perform)
    assert done == performed


def test_first_of_two_driver_losses_is_raised() -> None:
    """Of two DriverLost errors the first is raised; nested effects may cause the second."""
    perform, done = make_performer_losing_driver(CLOSE, HASH)
    with pytest.raises(DriverLost, match="CloseEdge"):
        perform_all([CLOSE, HASH, NOTE], perform)
    assert done == [NOTE]


def test_other_errors_are_raised_at_once() -> None:
    def perform(effect: Effect) -> None:
        raise ZeroDivisionError(str(effect))

    with pytest.raises(ZeroDivisionError, match="CloseEdge"):
        perform_all([CLOSE, HASH], perform)


def test_every_effect_is_classified_by_need_of_driver() -> None:
    """Each effect is in exactly one of BY_DRIVER and the set of this test."""
    without = {
        ev.ApplyCommit, ev.OwnCommitted, ev.ApplyMergedRange, ev.InstallSnapshot,
        ev.UseInitialReplica, ev.InstallOptimizer, ev.IdAssigned,
        ev.OptimizerCopied, ev.ShowWorkerLog, ev.HashReplica, ev.ReportCounters,
        ev.Note, ev.Abort, ev.Complete,
    }  # fmt: skip
    assert without | BY_DRIVER == set(get_args(Effect))
    assert not without & BY_DRIVER
