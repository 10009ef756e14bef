"""Tests of listeners in real fits: events, snapshots, lost workers, and a listener that raises."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom import TrainingError, VoidConfiguration
from sparkstrom.listeners import CollectScoresListener, EvaluativeListener, TrainingListener
from sparkstrom.observe.listener_events import read_run_log


@pytest.fixture
def data(spark, digits):
    return spark.sparkContext.parallelize(digits.rows(), 4)


class RecordingListener(TrainingListener):
    """A listener that records all events, and a snapshot at each epoch's end."""

    def __init__(self):
        self.events, self.copies = [], []

    def _add_news(self, event):
        self.events.append(event)

    on_fit_begin = on_iteration = on_worker_change = on_fit_end = _add_news

    def on_epoch(self, event):
        self._add_news(event)
        self.copies.append(event.snapshot())

    def of(self, kind):
        return [event for event in self.events if type(event).__name__ == kind]


def test_listeners_and_run_log_get_all_events(make_network, data, digits, tmp_path):
    """Listeners and the run log get all events of a fit, with consistent numbers."""
    network, diary, scores = make_network(), RecordingListener(), CollectScoresListener()
    judged = EvaluativeListener(*digits.held_out, say=lambda text: None)
    summary = network.fit(
        data,
        epochs=4,
        validation=0.2,
        listeners=[diary, scores, judged],
        run_log=tmp_path / "run.jsonl",
    )
    assert summary.replicas_equal
    kinds = [type(event).__name__ for event in diary.events]
    assert (kinds[0], kinds[-1]) == ("FitBegin", "FitEnd")
    assert diary.events[-1].summary is summary
    assert [event.epoch for event in diary.of("EpochEnd")] == [1, 2, 3, 4]
    assert all(np.isfinite(event.validation) for event in diary.of("EpochEnd"))
    newest = diary.of("Iteration")[-1]
    assert newest.minibatches == summary.minibatches == sum(w.steps for w in summary.per_worker)
    assert summary.bytes_by_kind["updates"] >= newest.bytes_by_kind["updates"] > 0
    assert summary.bytes_by_kind["updates"] >= summary.bytes_sent
    assert {"commits", "control"} <= set(summary.bytes_by_kind)
    assert 0 < newest.bytes_wire <= summary.bytes_wire
    assert diary.of("WorkerChange")[0].joined <= {0, 1, 2, 3}
    commits = [copy.commit for copy in diary.copies]
    assert commits == sorted(commits)
    assert commits[-1] <= summary.updates
    assert np.isfinite(diary.copies[-1].parameters).all()
    assert [epoch for epoch, _ in judged.results] == [1, 2, 3, 4]
    assert judged.results[-1][1].classification.accuracy > 0.5
    assert scores.scores
    lines = read_run_log(tmp_path / "run.jsonl")
    assert (lines[0]["event"], lines[-1]["event"]) == ("fit_begin", "fit_end")
    assert lines[-1]["summary"]["minibatches"] == summary.minibatches
    assert lines[-1]["summary"]["hashes"] == summary.hashes
    network.close()


def test_failing_listener_ends_only_its_fit(make_network, data):
    class Broken(TrainingListener):
        def on_epoch(self, event):
            raise ValueError("my own mistake")

    network = make_network(debug_longer_iterations=5)
    with pytest.raises(TrainingError, match=r"Broken\.on_epoch raised ValueError: my own mistake"):
        network.fit(data, epochs=200, listeners=[Broken()])
    assert network.fit(data).replicas_equal
    network.close()


@pytest.mark.slow
def test_listeners_get_worker_loss_during_fit(
    make_network, data, in_background, victims, wait_until, has_trained
):
    """Listeners get the event of a lost worker while the fit still runs."""
    diary = RecordingListener()
    network = make_network(void=VoidConfiguration(lease_s=3.0), debug_longer_iterations=25)
    fit = in_background(network.fit, data, epochs=20, listeners=[diary])
    wait_until(lambda: has_trained(200), 60, "training")
    victims.kill(victims.workers()[0])
    wait_until(lambda: any(c.left for c in diary.of("WorkerChange")), 60, "the loss")
    assert not fit.done()
    summary = fit.result(timeout=120)
    losses = [change for change in diary.of("WorkerChange") if change.left]
    (partition,) = losses[0].left
    assert losses[0].reasons[0].startswith(f"partition {partition} on ")
    assert any(partition in change.joined for change in diary.of("WorkerChange")[-2:])
    assert summary.minibatches == summary.minibatches_expected
    network.close()
