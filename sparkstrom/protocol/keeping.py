"""Keeping: residuals that workers leave on their executors between two fits.

Each file is granted once in all, to one joiner on that executor. The file of a grantee that
died, and one that nobody was granted, is lost mass, and counted.
"""

from __future__ import annotations

from sparkstrom.codec.messages import Kept

KeptFiles = dict[str, dict[str, float]]  # executor -> file -> mass (parameter units)


class Keeping:
    """Files of the last fit on their way to new owners, and files made in this one."""

    def __init__(self, kept: KeptFiles) -> None:
        self._free = {executor: dict(files) for executor, files in kept.items()}
        self._granted: dict[int, dict[str, float]] = {}
        self.made: KeptFiles = {}
        self.lost_mass = 0.0
        self.granted_files = 0

    def grant(self, executor: str, node: int) -> tuple[str, ...]:
        """A file for this joiner, if its executor still has one."""
        files = self._free.get(executor)
        if not files:
            return ()
        path = min(files)
        self._granted[node] = {path: files.pop(path)}
        self.granted_files += 1
        return (path,)

    def keep(self, executor: str, kept: Kept | None) -> None:
        """A worker has left this for the next fit."""
        if kept is not None:
            self.made.setdefault(executor, {})[kept.path] = kept.mass

    def returned(self, former: int, node: int) -> None:
        """The process came back under a new id, with what it had been granted."""
        if former in self._granted:
            self._granted[node] = self._granted.pop(former)

    def used(self, node: int) -> None:
        """This node has lived to the end of its fit: what it was granted was not lost."""
        self._granted.pop(node, None)

    def finish(self) -> None:
        """The fit is done: what nobody was granted, or went with its owner, is lost."""
        for files in (*self._free.values(), *self._granted.values()):
            self.lost_mass += sum(files.values())
        self._free.clear()
        self._granted.clear()
