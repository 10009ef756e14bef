"""Tests of a controller in a Spark task: fits, reports by TCP or at the end, and its loss."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pyspark import cloudpickle

from sparkstrom import EarlyStopping, SetupError, TrainingError, UsageError, VoidConfiguration
from sparkstrom.fit import session as controller_losses
from sparkstrom.listeners import TrainingListener
from tests.integration.spark.conftest import processes
from tests.integration.yarn import counted_rows
from tests.integration.yarn.counted_rows import (
    THRESHOLD,
    CountingModel,
    numbered_rows,
    trainings,
)

CONTROLLERS = re.compile(r"/sparkstrom-\d+-[0-9a-f]{16}-driver")  # its media driver's memory
PORTS = 8  # for media drivers of two executors in this and the previous fit, and the controller's
ENDS_S = 60.0  # within which a fit without its controller ends


@pytest.fixture
def data(spark, digits):
    return spark.sparkContext.parallelize(digits.rows(), 3)


@pytest.fixture
def make_network_with_task_controller(make_network):
    """A function that makes a network whose controller is in a task."""

    def make(controller="executor", model=None, void=(), **options):
        void = VoidConfiguration(controller=controller, **dict(void))
        return make_network(model, void=void, **options)

    return make


class RecordingListener(TrainingListener):
    """A listener that records the commits of epochs' snapshots, iterations and the summary."""

    def __init__(self):
        self.commits, self.looks, self.summary = [], 0, None

    def on_iteration(self, event):
        self.looks += 1

    def on_epoch(self, event):
        self.commits.append(event.snapshot().commit)

    def on_fit_end(self, event):
        self.summary = event.summary


def check_complete_fit(summary):
    check_complete_fit_with_faults(summary)
    assert summary.faults == []


def check_complete_fit_with_faults(summary):
    """Check that four replicas are equal and that all minibatches were trained."""
    print(summary.table(), summary.warnings)
    assert summary.replicas_equal, summary.hashes
    assert len(summary.hashes) == 4  # three workers and the controller, in one of four slots
    assert summary.minibatches == summary.minibatches_expected


@pytest.mark.slow
@pytest.mark.flips("VoidConfiguration.controller")
def test_listeners_and_checkpoints_work_with_controller_in_task(
    make_network_with_task_controller,
    data,
    digits,
    tmp_path,
    running_master,
    in_background,
    wait_until,
):
    """With the controller in a task, listeners, early stopping and checkpoints work as usual."""
    heard, network = (
        RecordingListener(),
        make_network_with_task_controller(
            checkpoint_directory=str(tmp_path),
            checkpoint_every="1 epochs",
            debug_longer_iterations=5,
        ),
    )
    rule = EarlyStopping(patience=1, min_delta=0.5)
    fit = in_background(
        network.fit, data, epochs=9, validation=0.2, early_stopping=rule, listeners=[heard]
    )
    summary = fit.result(120)
    assert running_master() is None
    assert summary.replicas_equal
    assert len(summary.hashes) == 4
    assert summary.stopped is not None
    assert 0 < len(heard.commits) < 9
    assert sorted(heard.commits) == heard.commits
    assert 0 < heard.commits[0] < summary.updates  # a snapshot of that epoch, not of the end
    assert 0 < summary.best.commit <= summary.updates
    assert heard.looks > 1
    assert heard.summary == summary
    assert sorted(tmp_path.iterdir())[-1].name == Path(summary.checkpoint).name
    assert all(0 <= seconds < 60 for seconds in summary.phase_seconds.values())
    features, labels = digits.held_out
    # After an epoch or two, this depends on how far apart the workers were; by chance it is 0.1.
    assert (network.predict(features).argmax(1) == labels).mean() > 0.25
    network.close()


@pytest.fixture
def taken_ports():
    """The first and the last of some neighbouring TCP ports, all of which are in use."""
    with contextlib.ExitStack() as held:
        while True:
            with contextlib.ExitStack() as tried:
                first = tried.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = first.getsockname()[1]
                with contextlib.suppress(OSError):
                    for more in range(1, PORTS):
                        tried.enter_context(socket.create_server(("127.0.0.1", port + more)))
                    held.push(tried.pop_all())
                    break
        yield port, port + PORTS - 1


@pytest.mark.slow
def test_events_arrive_at_end_without_tcp_connection(
    make_network_with_task_controller, data, taken_ports
):
    """Without a free TCP port, early stopping is refused, and events come at the end of a fit."""
    heard, network = (
        RecordingListener(),
        make_network_with_task_controller(void={"port_range": taken_ports}),
    )
    with pytest.raises(SetupError, match=r"no TCP port of 127\.0\.0\.1"):
        network.fit(data, validation=0.2, early_stopping=EarlyStopping())
    summary = network.fit(data, epochs=3, listeners=[heard])
    check_complete_fit(summary)
    assert len(heard.commits) == 3
    assert set(heard.commits) == {summary.updates}
    network.close()


@pytest.mark.slow
def test_controller_in_task_averages_buffers(make_network_with_task_controller, data, digits):
    """A controller in a task averages BatchNorm's statistics and returns them to the driver."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    layers = [torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(16, 10))
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = TorchModel(module, torch.nn.CrossEntropyLoss(), sgd)
    network = make_network_with_task_controller(controller="127.0.0.1", model=model)
    before = float(network.module[1].running_mean.abs().sum())
    check_complete_fit(network.fit(data, epochs=2))
    assert before == 0.0
    assert float(network.module[1].running_mean.abs().sum()) > 0.1
    network.close()


def test_controller_without_slot_or_executor_is_rejected(make_network_with_task_controller, data):
    """A controller needs a free slot, and an executor at its address."""
    with pytest.raises(UsageError, match="needs one slot more: 4 workers"):
        make_network_with_task_controller(workers_per_node=2).fit(data)
    with pytest.raises(SetupError, match=r"'192\.0\.2\.1': no executor.* on 127\.0\.0\.1"):
        make_network_with_task_controller(controller="192.0.2.1").fit(data)


def find_controller_worker():
    """Return this process's Python worker that uses the controller's media driver."""
    table = {process.pid: process for process in processes()}

    def is_ours(pid):
        return pid == os.getpid() or (pid in table and is_ours(table[pid].parent))

    for process in (each for each in table.values() if is_ours(each.pid)):
        try:
            maps = (Path("/proc") / str(process.pid) / "maps").read_text()
        except OSError:
            continue
        if "pyspark.worker" in process.command and CONTROLLERS.search(maps):
            return process.pid
    raise AssertionError("no worker has a controller's media driver")


def find_executor_of(pid):
    """Return the process id of the executor that started the process."""
    table = {process.pid: process for process in processes()}
    while "CoarseGrainedExecutorBackend" not in table[pid].command:
        pid = table[pid].parent
    return pid


@pytest.mark.slow
@pytest.mark.flips("VoidConfiguration.controller_restarts")
def test_killed_controller_ends_fit_and_checkpoint_resumes_it(
    make_network_with_task_controller, data, in_background, wait_until, tmp_path
):
    """If the controller is killed, the error soon names its executor; a later fit is resumed."""
    options = {"checkpoint_directory": str(tmp_path), "checkpoint_every": "1 epochs"}
    options["void"] = {"controller_restarts": 0}
    network = make_network_with_task_controller(debug_longer_iterations=10, **options)
    before = network.parameters
    fit = in_background(network.fit, data, epochs=1000)
    wait_until(lambda: [*tmp_path.glob("checkpoint-*.npz")] or fit.done(), 90, "a checkpoint")
    os.kill(find_controller_worker(), signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"controller \(executor \d+ on 127.*was lost.*again"):
        fit.result(ENDS_S)
    np.testing.assert_array_equal(network.parameters, before)
    again = make_network_with_task_controller(**options)
    again._checkpoints.network = network._checkpoints.network  # as in another run of the program
    summary = again.fit(data, epochs=3)
    assert summary.resumed_from
    assert summary.minibatches == summary.minibatches_expected
    again.close()


EPOCHS = 15
COPIES = "sparkstrom-copies-*/checkpoint-*.npz"


@pytest.fixture
def counted_by_value():
    """Pickle the model by value, because executors cannot import tests."""
    cloudpickle.register_pickle_by_value(counted_rows)
    yield
    cloudpickle.unregister_pickle_by_value(counted_rows)


@pytest.mark.slow
def test_fit_survives_two_controller_losses_without_lost_rows(
    make_network_with_task_controller,
    spark,
    in_background,
    wait_until,
    tmp_path,
    monkeypatch,
    counted_by_value,
):
    """Each row counts once although the controller is killed before and after its first copy."""
    monkeypatch.setattr(controller_losses, "COPY_INTERVAL", "1 s")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"residual_post_processor": None, "publish_every": 1, "horizon": "worker"}
    network = make_network_with_task_controller(
        model=CountingModel(240),
        threshold=THRESHOLD,
        batch_size_per_worker=8,
        debug_longer_iterations=40,  # the fit lasts some seconds, with a copy in each
        checkpoint_updaters="one",
        **options,
    )
    heard = RecordingListener()
    rows = numbered_rows(spark.sparkContext, 240)
    fit = in_background(network.fit, rows, epochs=EPOCHS, listeners=[heard])
    wait_until(lambda: heard.looks > 1, 200, "training")
    os.kill(find_controller_worker(), signal.SIGKILL)
    wait_until(lambda: [*tmp_path.glob(COPIES)] or fit.done(), 200, "a copy")
    os.kill(find_executor_of(find_controller_worker()), signal.SIGKILL)
    summary = fit.result(200)
    check_complete_fit_with_faults(summary)
    assert trainings(network.parameters) == [EPOCHS]
    assert summary.minibatches == EPOCHS * 30
    assert [fault.what for fault in summary.faults] == ["controller lost"] * 2
    anew, goes_on = (text for text in summary.warnings if "the controller was lost" in text)
    assert re.search(r"starts again .* \d+ minibatches are trained again \(loss 1 of", anew)
    assert re.search(r"from a copy of \d+ commits: .* again, \d+ are not \(loss 2 of", goes_on)
    assert 0 < summary.minibatches_resumed < summary.minibatches
    assert summary.resumed_from is None
    assert not [*tmp_path.glob(COPIES)]
    network.close()


@pytest.mark.slow
def test_cancelled_fit_keeps_learned_parameters(
    make_network_with_task_controller, spark, data, in_background, wait_until
):
    """If Spark's jobs are cancelled, the fit fails, but the network has the learned parameters."""
    network = make_network_with_task_controller(debug_longer_iterations=10)
    before, heard = network.parameters, RecordingListener()
    fit = in_background(network.fit, data, epochs=1000, listeners=[heard])
    wait_until(lambda: len(heard.commits) > 1, 90, "training")
    spark.sparkContext.cancelAllJobs()
    with pytest.raises(TrainingError, match="the job was cancelled"):
        fit.result(ENDS_S)
    assert float(np.abs(network.parameters - before).max()) > 1e-3
    check_complete_fit(network.fit(data, epochs=1))
    network.close()
