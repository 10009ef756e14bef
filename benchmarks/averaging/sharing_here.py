"""Sharing in virtual time (``benchmarks.convergence.replicas``), looked at after each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.averaging.clock import Link
from benchmarks.convergence.replicas import Fit, Worker
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Trial, measured


@dataclass(frozen=True, slots=True)
class Seen:
    """At an epoch's end."""

    test: dict[str, float]
    bytes_sent: int  # so far, by all workers


class SeenFit(Fit):
    """Measures the first worker's theta when all are through an epoch."""

    def __init__(self, trial: Trial, settings: Settings) -> None:
        super().__init__(trial, settings)
        self._epochs_of_attempt, self._judge = trial, self._model()
        self.seen: list[Seen] = []

    def _end_step(self, worker: Worker, at: float) -> None:
        super()._end_step(worker, at)
        if min(each.position.epoch for each in self.workers) > len(self.seen):
            self.seen.append(self._look())

    def _look(self) -> Seen:
        replicas: list[Any] = [each.replica for each in self.workers]
        self._judge.bind(replicas[0].theta.to_host())
        reports = [replica.model.buffers_bytes() for replica in replicas]
        if reports[0]:
            self._judge.load_buffers_bytes(self._judge.average_buffers(reports))
        test = measured(
            self._judge.module,
            self._epochs_of_attempt.task,
            self._epochs_of_attempt.task.split().test,
        )
        return Seen(test, sum(replica.encoder.counters.payload_bytes for replica in replicas))


def shared(trial: Trial, link: Link) -> SeenFit:
    """Train as long as messages take on this link: what is sent follows, and is sent again so."""
    fit = SeenFit(trial, Settings(step_s=link.step_s))
    fit.run()
    latency = latency_of(fit, trial, link)
    if latency > 0.2:
        fit = SeenFit(trial, Settings(step_s=link.step_s, latency=latency))
        fit.run()
    return fit


def latency_of(fit: SeenFit, trial: Trial, link: Link) -> float:
    """Steps from a publication to its commit: its bytes, and those of all others, on one link."""
    counters = [each.replica.encoder.counters for each in fit.workers]
    sent = sum(each.payload_bytes for each in counters) / sum(
        each.publications for each in counters
    )
    scaled = sent * link.params / fit.n_params
    return max(0.1, 8 * scaled * trial.workers / link.bits / link.step_s)
