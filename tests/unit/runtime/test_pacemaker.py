"""What a worker's model is told before each step: how many train, and how far the fit is."""

from __future__ import annotations

from typing import Any

from sparkstrom.models.networks import DenseNetwork
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.runtime.pacemaker import Pacemaker
from tests.unit.runtime.benches import Bench, N, Script


class Listening(DenseNetwork):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__([2, N // 3])
        self.told: list[tuple[int, int, int]] = []

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        self.told.append((workers, minibatches, counted))


def train(workers: int = 1, minibatches: int = 0) -> Directive:
    return Directive(Order.TRAIN, workers=workers, minibatches=minibatches)


def told(*commands: Directive, before: int = 0) -> list[tuple[int, int, int]]:
    model = Listening()
    pacemaker = Pacemaker(model, before)
    for steps, command in enumerate(commands):
        pacemaker.keep(command, steps)
    return model.told


def test_between_two_words_of_the_master_all_are_as_fast_as_this_worker() -> None:
    assert told(train(4), train(4), train(4, 6), train(4, 6)) == [
        (4, 0, 0), (4, 4, 0), (4, 6, 6), (4, 10, 6),
    ]  # fmt: skip


def test_the_estimate_never_goes_back() -> None:
    words = [train(4), train(4), train(4), train(4, 5), train(4, 5), train(4, 12)]
    assert [about for _, about, _ in told(*words)] == [0, 4, 8, 8, 9, 12]


def test_when_some_have_finished_the_fit_goes_on_more_slowly() -> None:
    words = [*[train(4)] * 3, *[train(1)] * 3]
    assert [about for _, about, _ in told(*words)] == [0, 4, 8, 12, 13, 14]


def test_earlier_fits_are_counted_in() -> None:
    assert told(train(2), train(2, 3), before=100) == [(2, 100, 100), (2, 103, 103)]


def a_fit(script: Script, **schedule: Any) -> list[tuple[int, int, int]]:
    model = Listening()
    Bench(model, script, **schedule).run()
    return model.told


def test_the_trainer_tells_its_model_before_each_step() -> None:
    script: Script = [([], train(4)), ([], train(4, 3)), ([], train(3, 9))]
    assert a_fit(script, minibatches_before=20) == [(4, 20, 20), (4, 23, 23), (3, 29, 29)]


def test_where_workers_count_their_own_steps_nothing_is_told() -> None:
    assert a_fit([([], train(4))]) == []
