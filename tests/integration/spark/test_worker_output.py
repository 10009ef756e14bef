"""Tests of the output of a user's code on executors: the driver shows a limited number of lines."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.base.errors import TrainingError
from sparkstrom.listeners import TrainingListener
from sparkstrom.observe.listener_events import read_run_log
from sparkstrom.runtime import output_capture

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
torch = pytest.importorskip("torch", reason="torch is not here: see pyproject.toml")
from pyspark import cloudpickle  # noqa: E402
from torch import nn  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

SAYS = re.compile(r"^partition (\d) on (\S+) \(([a-z ]+)\) says: (.+)$")
LEFT_OUT = re.compile(r"^sparkstrom: workers printed ([\d,]+) lines more than were shown")
MESH = VoidConfiguration(mesh_build_mode="mesh", mesh_fan_out=2)


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class PrintingModule(nn.Module):
    """A module that prints, warns and logs in its first step, and prints ``each`` in every step."""

    def __init__(self, each: str = "", raises_at: int = 0) -> None:
        super().__init__()
        self.steps, self.each, self.raises_at = 0, each, raises_at
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        self.steps += 1
        if self.steps == 1 and self.training:
            print("printed by forward \x1b[31min red")
            warnings.warn("careful with this layer", RuntimeWarning, stacklevel=1)
            logging.getLogger("mine.model").warning("%d features", x.shape[1])
            logging.getLogger("mine.model").info("not this")
        if self.each:
            print(self.each, self.steps)
        if self.steps == self.raises_at:
            print("the last words")
            raise ValueError("my own mistake")
        return self.layer(x)


class RecordingListener(TrainingListener):
    def __init__(self) -> None:
        self.says: list[Any] = []

    def on_worker_says(self, event: Any) -> None:
        self.says.append(event)


def torch_model(**options: Any) -> TorchModel:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return TorchModel(PrintingModule(**options), nn.CrossEntropyLoss(), optimizer)


@pytest.fixture
def fit_and_capture_stderr(spark: Any, digits: Any) -> Callable[..., tuple[list[str], Any]]:
    """A function that runs a fit; returns its lines on stderr, and its summary or exception."""

    def run(model: Any, master: Any = None, workers: int = 4, **options: Any) -> Any:
        data = spark.sparkContext.parallelize(digits.rows(), workers)
        stream = io.StringIO()
        with redirect_stderr(stream):
            network = SparkNetwork(spark, model, master)
            try:
                ended: Any = network.fit(data, **options)
            except TrainingError as error:
                ended = error
            network.close()
        return stream.getvalue().splitlines(), ended

    return run


def group_lines_by_partition(lines: list[str]) -> dict[int, list[tuple[str, str]]]:
    """Return the phases and texts of workers' lines, by partition."""
    by: dict[int, list[tuple[str, str]]] = {}
    for match in filter(None, map(SAYS.match, lines)):
        by.setdefault(int(match[1]), []).append((match[3], match[4]))
    return by


@pytest.mark.slow
@pytest.mark.parametrize("void", [VoidConfiguration(), MESH], ids=["plain", "mesh"])
def test_prints_warnings_and_logs_of_workers_reach_driver(
    void: VoidConfiguration, fit_and_capture_stderr: Any, tmp_path: Path
) -> None:
    diary, log = RecordingListener(), tmp_path / "run.jsonl"
    lines, summary = fit_and_capture_stderr(
        torch_model(), SharedTrainingMaster(void), listeners=[diary], run_log=log, epochs=2
    )
    assert summary.replicas_equal
    by = group_lines_by_partition(lines)
    assert sorted(by) == [0, 1, 2, 3]
    for heard in by.values():
        assert [phase for phase, _ in heard] == ["training"] * 3
        printed, warned, logged = (text for _, text in heard)
        assert printed == "printed by forward \\x1b[31min red"
        assert warned.startswith("RuntimeWarning: careful with this layer (")
        assert logged == "WARNING mine.model: 64 features"
    assert len(diary.says) == 12
    told = [line for line in read_run_log(log) if line["event"] == "worker_says"]
    assert {line["partition"] for line in told} == {0, 1, 2, 3}
    assert {line["phase"] for line in told} == {"training"}


def test_print_in_every_step_is_limited_on_driver(fit_and_capture_stderr: Any, digits: Any) -> None:
    """Of many lines only a burst is shown; others are counted, and are in the executor's log."""
    mark = f"mark-{os.getpid()}-{np.random.default_rng().integers(1 << 40)}"
    lines, summary = fit_and_capture_stderr(torch_model(each=mark), workers=1, epochs=20)
    heard = group_lines_by_partition(lines)[0]
    told = len(heard)
    assert output_capture.LINES_BURST <= told < output_capture.LINES_BURST + 20
    (left_out,) = filter(None, map(LEFT_OUT.match, lines))
    logs = [path for name in ("stderr", "stdout") for path in work_directory().glob(f"*/*/{name}")]
    written = sum(path.read_text().count(mark) for path in logs)
    assert written >= summary.minibatches
    counted = told + int(left_out[1].replace(",", ""))
    assert written - 100 <= counted <= written + 3  # the last half second's lines may be lost


def work_directory() -> Path:
    """Return the directory in which executors of a local cluster write their logs."""
    import pyspark

    home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    return Path(home) / "work"


def test_output_before_worker_failure_is_shown(fit_and_capture_stderr: Any) -> None:
    """The lines that a worker prints before its failure are shown."""
    lines, error = fit_and_capture_stderr(torch_model(raises_at=3))
    assert str(error).startswith("ValueError: my own mistake (partition ")
    assert any("(training) says: the last words" in line for line in lines)


@pytest.mark.slow
def test_prints_of_jax_loss_reach_driver(fit_and_capture_stderr: Any) -> None:
    """Prints of a JAX loss are shown, both those of tracing and those of jax.debug.print."""
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from sparkstrom.models.jax import JaxModel

    def init(key: Any) -> Any:
        return 0.01 * jax.random.normal(key, (64, 10))

    def loss(outputs: Any, labels: Any) -> Any:
        print("loss is traced")
        jax.debug.print("first label {}", labels[0])
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    model = JaxModel(init, lambda params, x: x @ params, loss, optax.sgd(0.1))
    lines, summary = fit_and_capture_stderr(model, workers=2)
    assert summary.replicas_equal
    for heard in group_lines_by_partition(lines).values():
        texts = [text for _, text in heard]
        assert "loss is traced" in texts
        assert any(re.fullmatch(r"first label \d", text) for text in texts)


@pytest.mark.slow
def test_progress_false_hides_output_of_workers(
    spark: Any, digits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """With progress=False, a fit shows no lines of workers."""
    network = SparkNetwork(spark, torch_model(), progress=False)
    capfd.readouterr()
    network.fit(spark.sparkContext.parallelize(digits.rows(), 4))
    network.close()
    told = capfd.readouterr()
    assert "says" not in told.out + told.err
    assert "sparkstrom" not in told.out + told.err
