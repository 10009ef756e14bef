"""Import archives: those that have not changed since are not read again for every task.

Spark begins each Python task with ``importlib.invalidate_caches``, for files sent meanwhile. Python
3.11 then reads the directory of every archive anew, in Python, once for each package in it that was
imported: of Spark's own jar with 5,000 names twice, of pyspark.zip a dozen times. That is 0.2 s of
processor time for each task, most of what a small one takes.
"""

from __future__ import annotations

import os
import sys
import time
import zipimport

IS_EAGER = sys.version_info < (3, 12)  # later ones read when something is imported, and once
SETTLED_S = 60.0  # an archive written so recently may be written again at the same clock tick

Stamp = tuple[int, int, int, int, int]


class ImportArchive(zipimport.zipimporter):
    """An importer that looks whether its archive is another one now, before it reads it again."""

    def __init__(self, path: str, stamp: Stamp) -> None:
        super().__init__(path)  # takes the directory that was read for its predecessor
        self._stamp: Stamp | None = stamp

    def invalidate_caches(self) -> None:
        """What importlib asks of every importer."""
        stamp = stamp_of(self.archive)
        if stamp is None or stamp != self._stamp:
            super().invalidate_caches()
            self._stamp = stamp


def keep_unchanged_archives() -> None:
    """In a task: from now on this process reads an archive of its import path only when it changed.

    For the tasks after this one, which has paid already. What was written so long before the task
    that its stamp is settled is what the task has read.
    """
    if not IS_EAGER:
        return
    for path, importer in list(sys.path_importer_cache.items()):
        if type(importer) is zipimport.zipimporter and (stamp := stamp_of(importer.archive)):
            sys.path_importer_cache[path] = ImportArchive(path, stamp)


def stamp_of(archive: str) -> Stamp | None:
    """By which an archive is told from what was there before; None: not settled, or gone."""
    try:
        facts = os.stat(archive)
    except OSError:
        return None
    if time.time() - facts.st_ctime < SETTLED_S:
        return None
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
