"""Tests that a fit that ends early also cancels a job that Spark was still starting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.fit import supervisor as fitting
from sparkstrom.fit.supervisor import FitSupervisor


class LateJob:
    """A fake job that only the third attempt cancels, because Spark did not know it before."""

    def __init__(self) -> None:
        self.cancelled = 0

    def start(self) -> None:
        raise KeyboardInterrupt

    def cancel(self) -> None:
        self.cancelled += 1

    def wait(self, seconds: float) -> bool:
        return self.cancelled >= 3


def test_job_of_interrupted_fit_is_cancelled_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor cancels an interrupted fit's job repeatedly, until the job ends."""
    monkeypatch.setattr(fitting, "ABORT_NOTICE_S", 0.0)
    job, said = LateJob(), list[str]()
    master: Any = SimpleNamespace(start=lambda: None, give_up=said.append, end=lambda: None)
    events: Any = SimpleNamespace(begin=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        FitSupervisor(master, job, events).run()  # type: ignore[arg-type]
    assert (job.cancelled, said) == (3, ["KeyboardInterrupt"])
