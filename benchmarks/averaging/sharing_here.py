"""Sharing in virtual time (``benchmarks.convergence.ours``), looked at after each epoch."""

from __future__ import annotations

from benchmarks.averaging.clock import Link
from benchmarks.convergence.ours import deliver, model_of, player_of
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat, Trial, measured
from sparkstrom.rehearsal.fit import PlayedFit


def shared(trial: Trial, link: Link) -> PlayedFit:
    """Train as long as messages take on this link: what is sent follows, and is sent again so."""
    played = _play(trial, Settings(step_s=link.step_s))
    latency = latency_of(played, trial, link)
    if latency > 0.2:
        played = _play(trial, Settings(step_s=link.step_s, latency=latency))
    return played


def _play(trial: Trial, settings: Settings) -> PlayedFit:
    """Play a fit; its points are of the epochs' ends, after one of the beginning."""
    judge = model_of(trial, settings)

    def measure(parameters: Flat, buffers: bytes) -> dict[str, float]:
        """The result of ``test``."""
        deliver(judge, parameters, buffers)
        return measured(judge.module, trial.task, trial.task.split().test)

    return player_of(trial, settings, measure).run()


def latency_of(played: PlayedFit, trial: Trial, link: Link) -> float:
    """Steps from a publication to its commit: its bytes, and those of all others, on one link."""
    assert played.parameters is not None
    sent = played.update_bytes / played.publications
    scaled = sent * link.params / played.parameters.size
    return max(0.1, 8 * scaled * trial.workers / link.bits / link.step_s)
