"""Waiting for a checkpoint writer, without looking at the clock."""

from __future__ import annotations

from sparkstrom.checkpoint.writer import CheckpointWriter


def wait_for(writer: CheckpointWriter) -> None:
    """Until nothing is being written."""
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._offered is None, 60)
