"""Simulated fits over slow links, and tests that flow checkers (F1 to F4) report planted bugs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from sparkstrom.protocol.common.flow_control import SendWindow
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.worker import parent_link as in_flight
from sparkstrom.protocol.worker.parent_link import InFlight
from sparkstrom.runtime.message_endpoint import Outbox
from sparkstrom.simulation.fuzzing import simulate_seed
from tests.simulation.planted import Plant

MODES = [("links", 6, range(20)), ("links-mesh", 9, range(12))]


def violations(given: dict[str, Any], seeds: range) -> Iterator[str]:
    """Yield the violations of fits with six workers, seed by seed."""
    for seed in seeds:
        yield from simulate_seed(seed, 6, "links", given).violations


@pytest.mark.parametrize(("mode", "nodes", "seeds"), MODES)
def test_fits_over_slow_links_keep_invariants(mode: str, nodes: int, seeds: range) -> None:
    """Fits over slow links violate no invariant."""
    for seed in seeds:
        repeat = f"python -m sparkstrom.simulation --mode {mode} --nodes {nodes} --seeds {seed}"
        assert simulate_seed(seed, nodes, mode, {}).violations == [], repeat


@pytest.mark.parametrize(("seed", "nodes"), [(142, 6), (59, 4)], ids=["its link", "the lender's"])
def test_slowly_arriving_chunk_is_not_requested_again(seed: int, nodes: int) -> None:
    """A chunk that takes longer than the first retry time is not requested again."""
    assert simulate_seed(seed, nodes, "links", {}).violations == []


@pytest.mark.parametrize("seed", [880103, 880172], ids=["its updates", "a relay's sums"])
def test_messages_of_very_slow_host_get_through(seed: int) -> None:
    """Messages of a very slow host get through, as timeouts double with each lost edge."""
    assert simulate_seed(seed, 8, "links-mesh", {}).violations == []


@pytest.mark.parametrize(("mode", "nodes", "seed"), [("links", 12, 32), ("links-mesh", 8, 23)])
def test_sum_is_applied_during_snapshot_fetch(mode: str, nodes: int, seed: int) -> None:
    """Sums of realistic size are applied during a snapshot fetch, where they once failed."""
    assert simulate_seed(seed, nodes, mode, {}).violations == []


def resend_updates_under_way(patch: pytest.MonkeyPatch) -> None:
    """Send uncommitted updates again all the time."""
    patch.setattr(InFlight, "is_overdue", lambda self, now_s: len(self) > 0)
    patch.setattr(in_flight, "AGAIN_LEAST_S", 0.0)
    patch.setattr(in_flight, "ROUNDS", 0)


def stop_numbering_after_tenth_commit(patch: pytest.MonkeyPatch) -> None:
    """Number no update after commit 10."""
    number = Sequencer.number

    def tired(self: Sequencer, update: Any, *how: Any) -> Any:
        return None if self.head >= 10 else number(self, update, *how)

    patch.setattr(Sequencer, "number", tired)


def ignore_send_windows(patch: pytest.MonkeyPatch) -> None:
    """Ignore send windows."""
    patch.setattr(SendWindow, "has_room", lambda self, size: True)


def drop_multi_frame_messages(patch: pytest.MonkeyPatch) -> None:
    """Drop every tenth message of several frames."""
    put, calls = Outbox.put, itertools.count(1)

    def lossy(self: Outbox, frames: list[bytes], newest_of: Any = None) -> None:
        if len(frames) == 1 or next(calls) % 10:
            put(self, frames, newest_of)

    patch.setattr(Outbox, "put", lossy)


NARROW: dict[str, Any] = {"rate": 125_000.0, "params": 300_000, "density": 0.05, "publish_every": 1}
NARROW |= {"crashes": 0, "cuts": 0, "breaks": 0, "edge_deaths": 0, "pauses": 0, "narrow": 0}
NARROW |= {"narrows": 0, "max_lead": None}
PLANTED: list[tuple[Plant, str, dict[str, Any]]] = [
    (resend_updates_under_way, "F1: ", NARROW),
    (stop_numbering_after_tenth_commit, "F2: ", NARROW | {"rate": 10_000_000.0, "end_s": 90.0}),
    (ignore_send_windows, "F3: ", NARROW),
    (drop_multi_frame_messages, "F4: ", NARROW),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), PLANTED, ids=lambda p: getattr(p, "__name__", "")
)
def test_flow_checker_reports_planted_bug(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the seeds shows a violation that begins with the expected text."""
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, range(2)))


def test_narrow_fits_have_no_violations_without_planted_bug() -> None:
    assert list(violations(NARROW, range(2))) == []
