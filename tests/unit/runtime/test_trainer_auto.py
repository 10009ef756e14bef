"""The trainer where the link sets the pace of its publications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Command, Directive
from tests.unit.runtime.benches import TAU, TRAIN, Bench, steps

BUSY = Directive(Command.TRAIN, publishes=False)


def test_it_publishes_when_it_may_and_at_the_end(bench: Callable[..., Bench]) -> None:
    """What it learned meanwhile waits in the residual, and goes with the next one."""
    script = [([], command) for command in (TRAIN, BUSY, BUSY, TRAIN, BUSY, BUSY)]
    made = bench(script, publish_every=None)
    events = made.run()
    assert [e.steps for e in events if isinstance(e, ev.UpdatePublished)] == [1, 4, 6]
    assert [e.steps for e in events if isinstance(e, ev.StepCompleted)] == [2, 3, 5]
    sent = made.replica.theta.to_host() / TAU + made.replica.residual() / TAU
    np.testing.assert_allclose(sent, 6.0)


def test_whether_it_may_publish_is_asked_after_the_step(bench: Callable[..., Bench]) -> None:
    """What was under way when the step began may have been committed meanwhile."""
    made = bench([([], BUSY)], publish_every=None)
    step = made.replica.step

    def committed_meanwhile(batch: Any) -> float:
        made.channel.publish([], TRAIN)
        return step(batch)

    made.replica.step = committed_meanwhile  # type: ignore[method-assign]
    assert [e.steps for e in made.run() if isinstance(e, ev.UpdatePublished)] == [1]


def test_every_so_many_steps_does_not_ask_whether_it_may(
    bench: Callable[..., Bench],
) -> None:
    events = bench(steps(6, BUSY), publish_every=2).run()
    assert [e.steps for e in events if isinstance(e, ev.UpdatePublished)] == [2, 4, 6]
