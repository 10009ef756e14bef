"""Gradient sharing in virtual time (``benchmarks.convergence.ours``), measured after each epoch."""

from __future__ import annotations

from benchmarks.averaging.clock import Link
from benchmarks.convergence.ours import load_result, make_model, simulator_of
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat, Trial, measured
from sparkstrom.rehearsal.fit import SimulatedFit


def simulate_sharing(trial: Trial, link: Link) -> SimulatedFit:
    """Simulate a fit with the delays of a link.

    The delays depend on the size of updates, which a first simulation finds; if they exceed a fifth
    of a step, a second simulation uses them.
    """
    simulated = _simulate(trial, Settings(step_s=link.step_s))
    latency = compute_latency(simulated, trial, link)
    if latency > 0.2:
        simulated = _simulate(trial, Settings(step_s=link.step_s, latency=latency))
    return simulated


def _simulate(trial: Trial, settings: Settings) -> SimulatedFit:
    """Simulate a fit; it has a measured point at the start, and at each epoch's end."""
    judge = make_model(trial, settings)

    def measure(parameters: Flat, buffers: bytes) -> dict[str, float]:
        """Return the measures on ``test``."""
        load_result(judge, parameters, buffers)
        return measured(judge.module, trial.task, trial.task.split().test)

    return simulator_of(trial, settings, measure).run()


def compute_latency(simulated: SimulatedFit, trial: Trial, link: Link) -> float:
    """Return the delay in steps in which a link transfers one update of each worker."""
    assert simulated.parameters is not None
    sent = simulated.update_bytes / simulated.publications
    scaled = sent * link.params / simulated.parameters.size
    return max(0.1, 8 * scaled * trial.workers / link.bits / link.step_s)
