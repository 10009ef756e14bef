"""A model hears what its task has of the machine, and gets a seed of its own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Share
from sparkstrom.worker import task_environment
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    assigned_gpu,
    freeze_garbage_collector,
    place_model,
)
from sparkstrom.worker.training_job import TrainingJob


class Asking(DenseNetwork):
    """Remembers its share."""

    share: Share | None = None

    def place(self, share: Share) -> None:
        self.share = share


def share_of(job: TrainingJob, partition: int, first_epoch: int = 0) -> Share:
    place = TaskEnvironment(partition, 5, "host", "jvm", Path("/nowhere"), cpus=3, gpu=1)
    model = Asking([6, 3])
    spec = replace(job.spec, first_epoch=first_epoch)
    place_model(replace(job, model=model, spec=spec), place)
    assert model.share is not None
    return model.share


def test_cpus_and_gpu_are_the_tasks(job_of: Callable[..., TrainingJob]) -> None:
    share = share_of(job_of(), 0)
    assert (share.threads, share.gpu) == (3, 1)


def test_seeds_differ_by_partition_fit_and_option_and_repeat(
    job_of: Callable[..., TrainingJob],
) -> None:
    job, other = job_of(), job_of(rng_seed=99)
    seeds = [share_of(job, 0), share_of(job, 1), share_of(job, 0, 5), share_of(other, 0)]
    assert len({share.seed for share in seeds}) == 4
    assert share_of(job, 0) == seeds[0]
    assert all(0 <= share.seed < 2**63 for share in seeds)


def test_a_model_that_does_not_ask_is_left_alone(job_of: Callable[..., TrainingJob]) -> None:
    place_model(job_of(), TaskEnvironment(0, 5, "host", "jvm", Path("/nowhere")))


@pytest.mark.parametrize(
    ("addresses", "index"), [(["3", "4"], 3), ([], None), (["GPU-8932f937"], None)]
)
def test_the_gpu_is_the_first_that_spark_names_by_index(
    addresses: list[str], index: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert assigned_gpu({"gpu": SimpleNamespace(addresses=addresses)}) == index
    assert ("is no index" in caplog.text) == (bool(addresses) and index is None)


def test_no_gpu_without_the_resource() -> None:
    assert assigned_gpu({"fpga": SimpleNamespace(addresses=["0"])}) is None


def test_what_is_imported_is_spared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    monkeypatch.setattr(task_environment, "_modules_frozen", 0)
    freeze_garbage_collector()
    freeze_garbage_collector()
    assert len(calls) == 1
    monkeypatch.setitem(sys.modules, "imported_by_another_model", ModuleType("of_a_test"))
    freeze_garbage_collector()
    assert len(calls) == 2
