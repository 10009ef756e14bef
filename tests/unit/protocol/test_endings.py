"""Tests of ``TaskEnding``: the texts on the wire never change, and are decoded to enum members."""

from __future__ import annotations

from sparkstrom.protocol.common.events_and_effects import TaskEnding

WIRE = {
    "done": TaskEnding.DONE,
    "released": TaskEnding.RELEASED,
    "its partition is trained already": TaskEnding.DISMISSED,
    "another attempt of its task has taken the partition over": TaskEnding.SUPERSEDED,
    "its lease ran out": TaskEnding.LEASE_OVER,
    "the fit has failed": TaskEnding.FIT_FAILED,
    "training failed here": TaskEnding.FAILED,
}


def test_each_ending_has_fixed_text_on_wire() -> None:
    """Each ending but OTHER has a fixed text, from which it is decoded."""
    assert {text: TaskEnding.from_text(text) for text in WIRE} == WIRE
    assert set(TaskEnding) - set(WIRE.values()) == {TaskEnding.OTHER}


def test_similar_text_is_decoded_as_other() -> None:
    """Any other text, however similar, is decoded as OTHER."""
    for text in ("done.", "Done", "its lease ran out after 3 s", "silent for 3.0 s (lease 10 s)"):
        assert TaskEnding.from_text(text) is TaskEnding.OTHER
