"""Tests of the default output: listeners' lines, held-out figures and the short summary."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparkstrom.encoding import backends
from sparkstrom.encoding.cpu import kernel_loader as compiled
from sparkstrom.fit.listeners import ProgressListener
from sparkstrom.listeners import ScoreIterationListener
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.observe.progress import ProgressFigures, ProgressRate
from sparkstrom.observe.reporting.summary_rendering import summary_text
from sparkstrom.observe.standard_listeners import log, log_or_print

LINE = ProgressFigures(
    phase="training", workers=2, partitions=2, epoch=1.0, epochs=2, loss=0.5, examples=10,
    updates=1, bytes_sent=1, staleness=0.0, waiting=0.0,
)  # fmt: skip
MADE = {
    "workers": 2, "epochs": 3, "seconds": 10.0, "n_params": 1000, "loss": 0.25, "examples": 5000,
    "phase_seconds": {"train": 5.0}, "minibatches": 30, "bytes_sent": 10, "bytes_dense": 1000,
}  # fmt: skip


def test_listener_line_goes_to_stderr_without_configured_logging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without configured logging, a listener's line goes to standard error."""
    monkeypatch.setattr(log, "propagate", False)  # pytest's own handlers are further up
    monkeypatch.setitem(sys.modules, "tqdm", None)
    event = SimpleNamespace(loss=0.5, minibatches=200)
    ScoreIterationListener(100).on_iteration(event)
    assert capsys.readouterr().err == "loss at minibatch 200 is 0.5\n"


def test_listener_line_goes_only_to_configured_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """If logging is configured, a listener's line goes to the log only."""
    with caplog.at_level(logging.INFO, log.name):
        log_or_print("loss 100% of 1")
    assert caplog.messages == ["loss 100% of 1"]
    assert capsys.readouterr().err == ""


def test_missing_or_failing_stderr_raises_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or failing standard error raises no exception."""
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for stream in (None, SimpleNamespace(write=_fails, flush=_fails)):
        monkeypatch.setattr(sys, "stderr", stream)
        log_or_print("a line")


def _fails(*_: object) -> None:
    raise BrokenPipeError


def test_progress_line_has_held_out_loss() -> None:
    words = replace(LINE, held_out=0.125).to_texts(ProgressRate())
    assert words[1:3] == ["loss 0.5000", "held-out 0.1250"]
    assert not any("held-out" in word for word in LINE.to_texts(ProgressRate()))


def test_progress_line_keeps_newest_known_held_out_loss() -> None:
    """The progress line keeps the newest known held-out figure when a later epoch has none."""
    progress = ProgressListener(SimpleNamespace())
    progress.on_epoch(Epoch(1, 0.5, 10, 0.25, 2, held_weight=4.0))
    progress.on_epoch(Epoch(2, 0.5, 10, float("nan"), 2, held_weight=4.0))
    assert progress._held_out == 0.25


def test_short_summary_mentions_how_to_print_all_figures() -> None:
    """The short summary has at most 15 lines and mentions how to print all figures."""
    page = summary_text(MADE)
    assert page.splitlines()[0] == "2 workers trained 3 epochs of 1,000 parameters in 10 s"
    assert "0.25 in the last epoch" in page
    assert "1,000 examples/s" in page
    assert "No warnings" in page
    assert page.endswith("All figures: print(summary.table(all=True))")
    assert len(page.splitlines()) <= 15
    assert "minibatches" not in page
    assert "minibatches" in summary_text(MADE, whole=True)


def test_kernel_compilation_is_announced_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message announces the compilation of kernels only if they are not compiled yet."""
    said: list[str] = []
    backends.warm_up()
    backends.warm_up(say=said.append)
    assert said == []  # kernels are compiled already
    monkeypatch.setattr(compiled, "are_compiled", lambda: False)
    backends.warm_up(say=said.append)
    assert said == ["sparkstrom: compiling kernels, once per machine: about 15 s"]


def test_summary_omits_comparison_if_dense_updates_are_smaller() -> None:
    """The comparison with dense updates is left out if dense updates would be smaller."""
    assert "100 times less than dense updates" in summary_text(MADE)
    assert "times less" not in summary_text({**MADE, "bytes_dense": 5})
