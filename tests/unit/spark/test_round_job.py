"""Tests of a Python worker's cache of jobs: kept while their fits run, freed after them."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import OrderedDict
from typing import Any

import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.spark.rounds import tasks as round_job
from sparkstrom.spark.rounds.tasks import (
    CACHED_JOBS_MAX,
    PackedJob,
    SparkRoundsJob,
    record_ended_fit,
)

NUMBERS = itertools.count(1)


class Jitted(DenseNetwork):
    """A model with a reference to itself, as a compiled model has."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.compiled = self.step


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[int, SparkRoundsJob]:
    """Give each test an empty cache of jobs and no ended fits; return the cache."""
    jobs = OrderedDict[int, SparkRoundsJob]()
    monkeypatch.setattr(round_job, "_cached_jobs", jobs)
    monkeypatch.setattr(
        round_job, "_ended_fits", type(round_job._ended_fits)(maxlen=round_job._ended_fits.maxlen)
    )
    return jobs


def begin() -> PackedJob:
    """Return the packed job of a new fit."""
    model = Jitted([6, 3], updater=Adam())
    spec = FitSpec(1, 1, model.n_params, "test", job=next(NUMBERS))
    return PackedJob.pack(
        SparkRoundsJob(spec, model, ParameterAveragingTrainingMaster(), (), PieceSizes())
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_a_fit_that_is_over_goes_when_the_next_one_comes(
    kept: Any, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fit frees an ended fit's model; frozen objects are searched only if necessary."""
    searched: list[None] = []
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (searched.append(None), unfreeze()))
    first = begin()
    model = weakref.ref(first.with_ended_fits().unpack().model)
    if frozen:
        gc.freeze()  # as after imports; see ``freeze_garbage_collector``
    assert first.with_ended_fits().unpack().model is model()
    record_ended_fit(first.fit)
    second = begin()
    second.with_ended_fits().unpack()
    assert list(kept) == [second.fit]
    assert model() is None
    assert len(searched) == frozen


def test_fits_that_run_at_once_are_opened_once(kept: Any) -> None:
    """Concurrent fits are unpacked once, because compiling may take longer than a round."""
    fits = [begin() for _ in range(CACHED_JOBS_MAX)]
    models = [fit.with_ended_fits().unpack().model for fit in fits]
    for _ in range(2):
        assert [fit.with_ended_fits().unpack().model for fit in fits] == models
    record_ended_fit(fits[1].fit)
    assert fits[0].with_ended_fits().unpack().model is models[0]
    assert set(kept) == {fit.fit for fit in fits} - {fits[1].fit}
    more = [begin() for _ in range(2)]
    for fit in more:
        fit.with_ended_fits().unpack()
    assert list(kept) == [fits[3].fit, fits[0].fit, *(fit.fit for fit in more)]


def test_a_task_of_a_fit_that_is_over_is_right_all_the_same(kept: Any) -> None:
    """A late task of an ended fit, such as a retry by Spark, still gets its own job."""
    first, second = begin(), begin()
    record_ended_fit(first.fit)
    assert second.with_ended_fits().unpack().spec.job == second.fit
    assert first.with_ended_fits().unpack().spec.job == first.fit


def test_no_more_fits_are_told_than_workers_may_have(kept: Any) -> None:
    """A packed job names only the newest ended fits, not all 1,000."""
    for number in range(1000):
        record_ended_fit(number)
    over = begin().with_ended_fits().ended_fits
    assert len(over) < 100
    assert over[-1] == 999
