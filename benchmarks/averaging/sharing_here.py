"""Sharing in virtual time (``benchmarks.convergence.ours``), looked at after each epoch."""

from __future__ import annotations

from benchmarks.averaging.clock import Link
from benchmarks.convergence.ours import deliver, model_of, simulator_of
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat, Trial, measured
from sparkstrom.rehearsal.fit import SimulatedFit


def shared(trial: Trial, link: Link) -> SimulatedFit:
    """Train as long as messages take on this link: what is sent follows, and is sent again so."""
    simulated = _simulate(trial, Settings(step_s=link.step_s))
    latency = latency_of(simulated, trial, link)
    if latency > 0.2:
        simulated = _simulate(trial, Settings(step_s=link.step_s, latency=latency))
    return simulated


def _simulate(trial: Trial, settings: Settings) -> SimulatedFit:
    """Simulate a fit; its points are of the epochs' ends, after one of the beginning."""
    judge = model_of(trial, settings)

    def measure(parameters: Flat, buffers: bytes) -> dict[str, float]:
        """The result of ``test``."""
        deliver(judge, parameters, buffers)
        return measured(judge.module, trial.task, trial.task.split().test)

    return simulator_of(trial, settings, measure).run()


def latency_of(simulated: SimulatedFit, trial: Trial, link: Link) -> float:
    """Steps from a publication to its commit: its bytes, and those of all others, on one link."""
    assert simulated.parameters is not None
    sent = simulated.update_bytes / simulated.publications
    scaled = sent * link.params / simulated.parameters.size
    return max(0.1, 8 * scaled * trial.workers / link.bits / link.step_s)
