"""Tests of what a task does with its model: share of the machine, seed, and freeing memory."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Share
from sparkstrom.spark.executor import entry_points
from sparkstrom.spark.executor.entry_points import LazyPickle
from sparkstrom.worker import task_environment
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    assigned_gpu,
    free_last_model,
    freeze_garbage_collector,
    place_model,
    remember_model,
    unpickle_without_collecting,
)
from sparkstrom.worker.training_job import TrainingJob


class PlaceableModel(DenseNetwork):
    """A model that records its share of the machine."""

    share: Share | None = None

    def place(self, share: Share) -> None:
        self.share = share


def compute_share(job: TrainingJob, partition: int, first_epoch: int = 0) -> Share:
    """Return the share that a model gets in a task with 3 cpus and GPU 1."""
    place = TaskEnvironment(partition, 5, "host", "jvm", Path("/nowhere"), cpus=3, gpu=1)
    model = PlaceableModel([6, 3])
    spec = replace(job.spec, first_epoch=first_epoch)
    place_model(replace(job, model=model, spec=spec), place)
    assert model.share is not None
    return model.share


def test_model_share_has_cpus_and_gpu_of_task(make_job: Callable[..., TrainingJob]) -> None:
    """A model's share has the cpus and the GPU of its task."""
    share = compute_share(make_job(), 0)
    assert (share.threads, share.gpu) == (3, 1)


def test_share_seed_depends_on_partition_fit_and_rng_seed(
    make_job: Callable[..., TrainingJob],
) -> None:
    job, other = make_job(), make_job(rng_seed=99)
    seeds = [
        compute_share(job, 0),
        compute_share(job, 1),
        compute_share(job, 0, 5),
        compute_share(other, 0),
    ]
    assert len({share.seed for share in seeds}) == 4
    assert compute_share(job, 0) == seeds[0]
    assert all(0 <= share.seed < 2**63 for share in seeds)


def test_place_model_accepts_model_without_place_method(
    make_job: Callable[..., TrainingJob],
) -> None:
    """A model without a method ``place`` is accepted."""
    job = make_job()
    assert not hasattr(job.model, "place")
    place_model(job, TaskEnvironment(0, 5, "host", "jvm", Path("/nowhere")))


@pytest.mark.parametrize(
    ("addresses", "index"), [(["3", "4"], 3), ([], None), (["GPU-8932f937"], None)]
)
def test_assigned_gpu_is_first_address_if_numeric(
    addresses: list[str], index: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU is the first address of Spark's; a warning is logged if it is not an index."""
    assert assigned_gpu({"gpu": SimpleNamespace(addresses=addresses)}) == index
    assert ("is not an index" in caplog.text) == (bool(addresses) and index is None)


def test_no_gpu_is_assigned_without_gpu_resource() -> None:
    assert assigned_gpu({"fpga": SimpleNamespace(addresses=["0"])}) is None


class CyclicModel(DenseNetwork):
    """A model that refers to itself, as models on JAX do."""

    def __init__(self) -> None:
        super().__init__([6, 3])
        self.compiled = self.step


def test_model_of_last_fit_is_freed_before_next_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last fit's model is freed; frozen objects are searched only for the first model."""
    searched: list[None] = []
    unfreeze = gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (searched.append(None), unfreeze()))
    monkeypatch.setattr(task_environment, "_last_models", [])
    for fit in range(3):
        free_last_model()
        assert len(searched) == min(fit, 1)
        model = CyclicModel()
        remember_model(model)
        if fit == 0:
            gc.freeze()  # the first model, with the modules that it imported
        known = weakref.ref(model)
        del model
        assert known() is not None
    free_last_model()
    assert known() is None


def test_task_frees_last_model_before_unpickling_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    for name in ("require_library", "require_controller_reachable", "get_task_context"):
        monkeypatch.setattr(entry_points, name, lambda *_: None)
    monkeypatch.setattr(entry_points, "free_last_model", lambda: done.append("freed"))
    monkeypatch.setattr(
        entry_points, "unpickle_without_collecting", lambda _: done.append("unpickled")
    )
    monkeypatch.setattr(entry_points, "train_partition", lambda *_: done.append("trained"))
    entry_points.run_training_task(LazyPickle(b"", None), None, 0, [])
    assert done == ["freed", "unpickled", "trained"]


def test_objects_are_frozen_again_only_after_new_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are frozen once, and again only if further modules were imported."""
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    monkeypatch.setattr(task_environment, "_modules_frozen", 0)
    freeze_garbage_collector()
    freeze_garbage_collector()
    assert len(calls) == 1
    monkeypatch.setitem(sys.modules, "imported_by_another_model", ModuleType("of_a_test"))
    freeze_garbage_collector()
    assert len(calls) == 2


class CollectorProbe:
    """Unpickles to True if the garbage collector is on; ``fails``: unpickling raises KeyError."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def __reduce__(self) -> tuple[Callable[[bool], bool], tuple[bool]]:
        return read_collector, (self._fails,)


def read_collector(fails: bool) -> bool:
    """Return whether the garbage collector is on."""
    if fails:
        raise KeyError("a name that the job needs")
    return gc.isenabled()


def test_garbage_collector_is_off_while_job_is_unpickled() -> None:
    """The collector is off while a value is unpickled, and on afterwards, also after an error."""
    assert gc.isenabled()
    assert unpickle_without_collecting(pickle.dumps(CollectorProbe(fails=False))) is False
    assert gc.isenabled()
    with pytest.raises(KeyError):
        unpickle_without_collecting(pickle.dumps(CollectorProbe(fails=True)))
    assert gc.isenabled()
    gc.disable()
    try:
        unpickle_without_collecting(pickle.dumps(CollectorProbe(fails=False)))
        assert not gc.isenabled()
    finally:
        gc.enable()
