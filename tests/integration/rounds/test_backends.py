"""Test of rounds on all backends: RDDs, DataFrames (Spark Connect), processes of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import BACKENDS
from tests.integration.rounds import cases
from tests.integration.rounds.cases import CASES, EDGES, LocalBackend, SparkBackend, run_case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]  # one client runs all parts


@pytest.fixture(scope="module")
def rdd(spark: Any) -> Any:
    """A function that trains a case by RDDs and returns its results."""
    parts = list(cases.split(cases.digits()))
    rows = [list(zip(x, map(int, y), strict=True)) for x, y in parts]
    numbers = spark.sparkContext.parallelize(range(len(rows)), len(rows))
    backend = SparkBackend(spark, numbers.flatMap(lambda index: rows[index]), parts)
    return lambda name: run_case(backend, name)


@pytest.fixture
def dataframe(answers: Any) -> Any:
    """A function that returns a case's results by DataFrames; one client trained all cases."""
    return answers[BACKENDS].__getitem__


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    """A function that trains a case in processes of this machine and returns its results."""
    return lambda name: run_case(LocalBackend(cases.digits(), tmp_path), name)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("backend", ["processes", "rdd", "dataframe"])
def test_each_backend_equals_training_in_one_process(
    request: pytest.FixtureRequest, backend: str, name: str
) -> None:
    """A fit on each backend has the parameters of one process, also if it resumes a checkpoint."""
    if name == "frozen":
        pytest.importorskip("torch")
    case, told = CASES[name], request.getfixturevalue(backend)(name)
    assert told["off_by"] <= case.tolerance, told["text"]
    assert told["moved_by"] > 0.001
    assert told["equal"]
    assert told["minibatches"][0] == told["minibatches"][1]
    assert told["epochs"] == [1, 2]
    if not case.resumes:
        assert told["rounds"] == told["rounds_expected"]
        assert told["examples"] == [EDGES[-1]] * 2
    else:
        assert 0 < told["rounds"] < told["rounds_expected"]
        assert "enough" in told["said"]
        assert "resumed from" in told["text"]
        assert 0 < told["minibatches_resumed"] < told["minibatches"][0]
