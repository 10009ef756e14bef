"""A helper that waits for a checkpoint writer."""

from __future__ import annotations

from sparkstrom.checkpoint.writer import CheckpointWriter


def wait_for_writer(writer: CheckpointWriter) -> None:
    """Wait until no checkpoint is being written, at most 60 s."""
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._offered is None, 60)
