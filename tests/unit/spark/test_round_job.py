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


class SelfReferencingModel(DenseNetwork):
    """A model with a reference to itself, as a compiled model has."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.compiled = self.step


@pytest.fixture(autouse=True)
def cached_jobs(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[int, SparkRoundsJob]:
    """Give each test an empty cache of jobs and no ended fits; return the cache."""
    jobs = OrderedDict[int, SparkRoundsJob]()
    monkeypatch.setattr(round_job, "_cached_jobs", jobs)
    monkeypatch.setattr(
        round_job, "_ended_fits", type(round_job._ended_fits)(maxlen=round_job._ended_fits.maxlen)
    )
    return jobs


def make_packed_job() -> PackedJob:
    """Return the packed job of a new fit."""
    model = SelfReferencingModel([6, 3], updater=Adam())
    spec = FitSpec(1, 1, model.n_params, "test", job=next(NUMBERS))
    return PackedJob.pack(
        SparkRoundsJob(spec, model, ParameterAveragingTrainingMaster(), (), PieceSizes())
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_next_fit_frees_model_of_ended_fit(
    cached_jobs: Any, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fit frees an ended fit's model; frozen objects are searched only if necessary."""
    searched: list[None] = []
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (searched.append(None), unfreeze()))
    first = make_packed_job()
    model = weakref.ref(first.with_ended_fits().unpack().model)
    if frozen:
        gc.freeze()  # as after imports; see ``freeze_garbage_collector``
    assert first.with_ended_fits().unpack().model is model()
    record_ended_fit(first.fit)
    second = make_packed_job()
    second.with_ended_fits().unpack()
    assert list(cached_jobs) == [second.fit]
    assert model() is None
    assert len(searched) == frozen


def test_concurrent_fits_are_unpacked_once(cached_jobs: Any) -> None:
    """Concurrent fits are unpacked once, because compiling may take longer than a round."""
    fits = [make_packed_job() for _ in range(CACHED_JOBS_MAX)]
    models = [fit.with_ended_fits().unpack().model for fit in fits]
    for _ in range(2):
        assert [fit.with_ended_fits().unpack().model for fit in fits] == models
    record_ended_fit(fits[1].fit)
    assert fits[0].with_ended_fits().unpack().model is models[0]
    assert set(cached_jobs) == {fit.fit for fit in fits} - {fits[1].fit}
    more = [make_packed_job() for _ in range(2)]
    for fit in more:
        fit.with_ended_fits().unpack()
    assert list(cached_jobs) == [fits[3].fit, fits[0].fit, *(fit.fit for fit in more)]


def test_late_task_of_ended_fit_gets_its_own_job(cached_jobs: Any) -> None:
    """A late task of an ended fit, such as a retry by Spark, still gets its own job."""
    first, second = make_packed_job(), make_packed_job()
    record_ended_fit(first.fit)
    assert second.with_ended_fits().unpack().spec.job == second.fit
    assert first.with_ended_fits().unpack().spec.job == first.fit


def test_packed_job_names_only_newest_ended_fits(cached_jobs: Any) -> None:
    """A packed job names only the newest ended fits, not all 1,000."""
    for number in range(1000):
        record_ended_fit(number)
    over = make_packed_job().with_ended_fits().ended_fits
    assert len(over) < 100
    assert over[-1] == 999
