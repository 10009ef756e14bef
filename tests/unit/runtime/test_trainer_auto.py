"""The trainer where the link sets the pace of its publications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Command, Directive
from sparkstrom.runtime import trainer
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


SHORT = {"encode_s": 1.0, "step_s": 1.0}  # encoding needs as much time as a step


@pytest.mark.parametrize(
    ("times", "workers", "most", "expected"),
    [
        (SHORT, 2, 8, 4),
        (SHORT, 3, 8, 2),
        (SHORT, 4, 8, 2),
        (SHORT, 5, 8, 1),
        (SHORT, 1, 3, 3),
        ({"encode_s": 0.39, "step_s": 1.0}, 1, 8, 2),
        ({"encode_s": 0.41, "step_s": 1.0}, 1, 8, 3),
        ({"encode_s": 0.19, "step_s": 1.0}, 2, 8, 1),
        ({"encode_s": 0.0, "step_s": 0.0}, 2, 8, 1),
    ],
)
@pytest.mark.parametrize("measured", [True, False])
def test_an_update_has_so_many_steps_that_encoding_takes_a_fifth_of_their_time(
    bench: Callable[..., Bench],
    times: dict[str, float],
    workers: int,
    most: int,
    expected: int,
    measured: bool,
) -> None:
    encode_s = None if measured else times["encode_s"]
    options = {"publish_every": None, "minibatches_per_update_max": most}
    made = bench([], encode_s=encode_s, **options)
    made.channel.publish([], Directive(Command.TRAIN, workers=workers))
    counts, published = made.trainer.counts, trainer.EARLY_PUBLICATIONS
    counts.steps, made.replica.encoder.counters.publications = published, published
    counts.seconds["stepping"] = times["step_s"] * published
    if measured:
        counts.seconds["encoding"] = times["encode_s"] * published
    assert made.trainer.min_steps_per_update() == expected
    made.replica.encoder.counters.publications -= 1
    assert made.trainer.min_steps_per_update() == 1


def test_short_steps_are_published_together(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "EARLY_PUBLICATIONS", 2)
    options = {"publish_every": None, "minibatches_per_update_max": 2, "encode_s": 1e9}
    events = bench(steps(6), **options).run()
    assert [e.steps for e in events if isinstance(e, ev.UpdatePublished)] == [1, 2, 4, 6]
