"""Residual checkpoints: residuals that workers leave on their executors between two fits.

Each file is granted once in all, to one joiner on that executor. The file of a grantee that
died, and one that nobody was granted, is lost mass, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import ResidualCheckpoint

CheckpointFiles = dict[str, dict[str, float]]  # executor -> file -> mass (parameter units)


class ResidualCheckpoints:
    """Files of the last fit on their way to new owners, and files made in this one."""

    def __init__(self, kept: CheckpointFiles) -> None:
        self._free = {executor: dict(files) for executor, files in kept.items()}
        self._granted: dict[NodeId, dict[str, float]] = {}
        self.files: CheckpointFiles = {}
        self.lost_mass = 0.0
        self.granted_files = 0

    def grant(self, executor: str, node: NodeId) -> None:
        """A file for this new process, if its executor still has one."""
        files = self._free.get(executor)
        if files:
            path = min(files)
            self._granted[node] = {path: files.pop(path)}
            self.granted_files += 1

    def keep(self, executor: str, node: NodeId, kept: ResidualCheckpoint | None) -> None:
        """A worker has left this for the next fit, with what it had been granted in it."""
        if kept is not None:
            self.files.setdefault(executor, {})[kept.path] = kept.mass
            self.used(node)

    def returned(self, former: NodeId, node: NodeId) -> None:
        """The process came back under a new id; what it was granted stays its own."""
        if former in self._granted:
            self._granted[node] = self._granted.pop(former)

    def granted(self, node: NodeId) -> tuple[str, ...]:
        """What this node was granted, under whichever id of its process."""
        return tuple(self._granted.get(node, ()))

    def used(self, node: NodeId) -> None:
        """What this node was granted is not lost, whatever becomes of it."""
        self._granted.pop(node, None)

    def settle(self, live: Iterable[NodeId]) -> None:
        """The fit is done: whoever lives has used what it was granted; the rest is lost."""
        for node in live:
            self.used(node)
        self.finish()

    def finish(self) -> None:
        """The fit is done: what nobody was granted, or went with its owner, is lost."""
        for files in (*self._free.values(), *self._granted.values()):
            self.lost_mass += sum(files.values())
        self._free.clear()
        self._granted.clear()
