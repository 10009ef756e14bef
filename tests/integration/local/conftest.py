"""Fixtures: wrappers with real processes, and a model that counts the trainings of each row."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest

from sparkstrom import ParallelWrapper
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.fit import checkpoints
from sparkstrom.local.worker_pool import WorkerPool
from sparkstrom.transport.aeron.driver_directories import (
    ProcessIdentity,
    identify_process,
    is_process_alive,
)

FORKING = Path(__file__).parents[1] / "mesh" / "forking.py"


def _load() -> Any:
    """Load the mesh tests' module, for its model, and register it to be pickled by value."""
    spec = importlib.util.spec_from_file_location("local_forking", FORKING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


tallying = _load()


class TallyCase:
    """Data and options with which each training of a row adds exactly tau to its parameters."""

    model = staticmethod(tallying.Tally)
    rows = tallying.N_PARAMS // tallying.WIDTH
    data = (np.zeros((rows, 1), np.float32), np.arange(rows))
    options: ClassVar[dict[str, Any]] = {
        "batch_size_per_worker": 4,
        "threshold": FixedThreshold(tallying.TAU),
        "residual_post_processor": None,
        "debug_longer_iterations": 10,
        "progress": False,
    }

    @staticmethod
    def trainings(wrapper: ParallelWrapper) -> dict[float, int]:
        """Return the number of rows for each number of trainings."""
        counts, parameters = np.unique(wrapper.parameters / tallying.TAU, return_counts=True)
        return {
            float(count): int(p) // tallying.WIDTH
            for count, p in zip(counts, parameters, strict=True)
        }


@pytest.fixture
def tally_case() -> type[TallyCase]:
    return TallyCase


@pytest.fixture
def wrapper() -> Iterator[Callable[..., ParallelWrapper]]:
    """A function that makes a ParallelWrapper; after the test, none of its processes may remain."""
    made: list[ParallelWrapper] = []
    processes: list[ProcessIdentity] = []

    def make(*arguments: Any, **options: Any) -> ParallelWrapper:
        made.append(ParallelWrapper(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        processes += map(identify_process, each.worker_pids())
        scratch = each._context.scratch
        each.close()
        assert not scratch.exists()
    assert [process for process in processes if is_process_alive(process)] == []


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Two worker processes for all tests of a file that need none of their own."""
    made = WorkerPool(2, tmp_path_factory.mktemp("pool"), 30.0)
    yield made
    made.close()


@pytest.fixture
def pooled_wrapper(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ParallelWrapper]]:
    """``pooled_wrapper(model, ...)`` makes a wrapper as if in another program, but with ``pool``.

    Importing torch or JAX in processes of its own would take most of a test's time.
    """
    made: list[ParallelWrapper] = []

    def make(model: Any, **options: Any) -> ParallelWrapper:
        monkeypatch.setattr(checkpoints, "_directory_owners", {})
        made.append(ParallelWrapper(model, len(pool), **options))
        made[-1]._context = replace(made[-1]._context, pool=pool)
        return made[-1]

    yield make
    for each in made:
        each.close()
