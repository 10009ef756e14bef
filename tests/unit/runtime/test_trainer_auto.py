"""The trainer with ``publish_every=None``: it publishes as fast as updates are committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Directive
from sparkstrom.runtime import trainer_thread
from tests.unit.runtime.trainer_harness import TAU, TRAIN, Script, TrainerHarness, steps

BUSY = Directive(Command.TRAIN, publishes=False)


def test_trainer_publishes_when_directive_allows_and_at_end(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """If a step may not publish, its change stays in the residual for the next update."""
    script = [([], command) for command in (TRAIN, BUSY, BUSY, TRAIN, BUSY, BUSY)]
    made = make_trainer(script, publish_every=None)
    events = made.run()
    assert [e.steps for e in events if isinstance(e, ev.UpdatePublished)] == [1, 4, 6]
    assert [e.steps for e in events if isinstance(e, ev.StepCompleted)] == [2, 3, 5]
    sent = made.replica.theta.to_host() / TAU + made.replica.residual() / TAU
    np.testing.assert_allclose(sent, 6.0)


def test_directive_after_step_decides_whether_to_publish(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """The directive after the step decides, as updates in flight may be committed during a step."""
    made = make_trainer([([], BUSY)], publish_every=None)
    step = made.replica.step

    def committed_meanwhile(batch: Any) -> float:
        made.channel.publish([], TRAIN)
        return step(batch)

    made.replica.step = committed_meanwhile  # type: ignore[method-assign]
    assert [e.steps for e in made.run() if isinstance(e, ev.UpdatePublished)] == [1]


def test_fixed_publish_every_ignores_publishing_ban_of_directive(
    make_trainer: Callable[..., TrainerHarness],
) -> None:
    """With a fixed ``publish_every``, the trainer publishes although the directive forbids it."""
    events = make_trainer(steps(6, BUSY), publish_every=2).run()
    assert [e.steps for e in events if isinstance(e, ev.UpdatePublished)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("encode_s", "workers", "most", "expected"),
    [
        (1.0, 2, 8, 4),
        (1.0, 3, 8, 2),
        (1.0, 4, 8, 2),
        (1.0, 5, 8, 1),
        (1.0, 1, 3, 3),
        (0.39, 1, 8, 2),
        (0.41, 1, 8, 3),
        (0.19, 2, 8, 1),
    ],
)
def test_min_steps_per_update_limits_encoding_share(
    make_trainer: Callable[..., TrainerHarness],
    encode_s: float,
    workers: int,
    most: int,
    expected: int,
) -> None:
    """After the early publications, updates have so many steps that encoding takes a fifth."""
    made = make_trainer([], publish_every=None, minibatches_per_update_max=most)
    made.trainer._encode_s.add(encode_s)
    made.trainer._step_s.add(1.0)
    made.replica.encoder.counters.publications = trainer_thread.EARLY_PUBLICATIONS
    assert made.trainer.min_steps_per_update(workers) == expected
    made.replica.encoder.counters.publications -= 1
    assert made.trainer.min_steps_per_update(workers) == 1


def test_update_combines_steps_up_to_minibatch_limit(
    make_trainer: Callable[..., TrainerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates have 2 minibatches in total; with two workers that is one step of each."""
    monkeypatch.setattr(trainer_thread, "EARLY_PUBLICATIONS", 2)
    monkeypatch.setattr(trainer_thread, "ENCODING_SHARE_MAX", 0.0)

    def published(script: Script) -> list[int]:
        events = make_trainer(script, publish_every=None, minibatches_per_update_max=2).run()
        return [e.steps for e in events if isinstance(e, ev.UpdatePublished)]

    assert published(steps(6)) == [1, 2, 4, 6]
    assert published(steps(6, Directive(Command.TRAIN, workers=2))) == [1, 2, 3, 4, 5, 6]


def test_drain_publishes_update_with_fewer_steps_than_minimum(
    make_trainer: Callable[..., TrainerHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update with fewer steps than wanted is published if the directive changed to DRAIN."""
    monkeypatch.setattr(trainer_thread, "EARLY_PUBLICATIONS", 0)
    monkeypatch.setattr(trainer_thread, "ENCODING_SHARE_MAX", 0.0)
    made = make_trainer(steps(1), publish_every=None, minibatches_per_update_max=2)
    step = made.replica.step

    def drained_meanwhile(batch: Any) -> float:
        made.channel.publish([], Directive(Command.DRAIN))
        return step(batch)

    made.replica.step = drained_meanwhile  # type: ignore[method-assign]
    assert [e.steps for e in made.run() if isinstance(e, ev.UpdatePublished)] == [1]


def test_recent_mean_forgets_slow_first_step() -> None:
    """The mean of 300 short steps after a long first one is close to the short ones."""
    mean = trainer_thread.RecentMean()
    for seconds in (3.0, *[0.001] * 300):
        mean.add(seconds)
    assert 0.001 < mean.value < 0.002
