"""What a Python worker keeps of the fits whose rounds it has made."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.spark.averaging import round_job
from sparkstrom.spark.averaging.round_job import (
    JOBS_MAX,
    AveragingJob,
    PackedJob,
    PieceSizes,
    fit_is_over,
)

NUMBERS = itertools.count(1)


class Jitted(DenseNetwork):
    """Holds what holds it, as a model that is compiled does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.compiled = self.step


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[OrderedDict[int, AveragingJob]]:
    """Jobs of this process; and no fit has ended yet."""
    jobs = OrderedDict[int, AveragingJob]()
    monkeypatch.setattr(round_job, "_opened", jobs)
    monkeypatch.setattr(round_job, "_over", type(round_job._over)(maxlen=round_job._over.maxlen))
    yield jobs
    gc.unfreeze()


def begin() -> PackedJob:
    """A fit."""
    model = Jitted([6, 3], updater=Adam())
    spec = FitSpec(1, 1, model.n_params, "test", job=next(NUMBERS))
    return PackedJob.of(
        AveragingJob(spec, model, ParameterAveragingTrainingMaster(), (), PieceSizes())
    )


def test_a_fit_that_is_over_goes_when_the_next_one_comes(kept: Any) -> None:
    """With its model's memory, whatever the garbage collector has been told to spare."""
    first = begin()
    model = weakref.ref(first.now().opened().model)
    gc.freeze()  # as after imports; see ``spare_collections``
    assert first.now().opened().model is model()
    fit_is_over(first.number)
    second = begin()
    second.now().opened()
    assert list(kept) == [second.number]
    assert model() is None


def test_fits_that_run_at_once_are_opened_once(kept: Any) -> None:
    """A model may have been compiled, which takes longer than a round."""
    fits = [begin() for _ in range(JOBS_MAX)]
    models = [fit.now().opened().model for fit in fits]
    for _ in range(2):
        assert [fit.now().opened().model for fit in fits] == models
    fit_is_over(fits[1].number)
    assert fits[0].now().opened().model is models[0]
    assert set(kept) == {fit.number for fit in fits} - {fits[1].number}
    more = [begin() for _ in range(2)]
    for fit in more:
        fit.now().opened()
    assert list(kept) == [fits[3].number, fits[0].number, *(fit.number for fit in more)]


def test_a_task_of_a_fit_that_is_over_is_right_all_the_same(kept: Any) -> None:
    """One that Spark tries again while the fit is being ended."""
    first, second = begin(), begin()
    fit_is_over(first.number)
    assert second.now().opened().spec.job == second.number
    assert first.now().opened().spec.job == first.number


def test_no_more_fits_are_told_than_workers_may_have(kept: Any) -> None:
    for number in range(1000):
        fit_is_over(number)
    over = begin().now().over
    assert len(over) < 100
    assert over[-1] == 999
