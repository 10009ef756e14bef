"""The zip that ``ModelSerializer.writeModel`` makes: which entries it has, read within limits.

    configuration.json    the network, and how it is trained
    coefficients.bin      all parameters, one behind the other
    updaterState.bin      the updater's, where it was saved
    normalizer.bin        the data's normalizer, where one was added

Whoever made the file, no more memory is taken than its real size can fill: deflate makes at most
1,032 bytes of one.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.files import EXPANSION_MAX, check_members
from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.nd4j_binary import ArrayReader, BadArray

CONFIGURATION, COEFFICIENTS, UPDATER, NORMALIZER, NO_PARAMS = (
    "configuration.json",
    "coefficients.bin",
    "updaterState.bin",
    "normalizer.bin",
    "noParams.marker",
)
CONFIGURATION_BYTES_MAX = 64 << 20
Read = TypeVar("Read")

DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError),
)


class ModelZip:
    """One file. Raises NoDl4jNetwork naming the entry that is missing or wrong."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        if not path.is_file():
            raise UsageError(f"path={self.path!r}: there is no such file; name a zip of DL4J's")
        try:
            self._file = zipfile.ZipFile(path)
            check_members(self._file, path.stat().st_size)
        except DAMAGE as error:
            raise NoDl4jNetwork(self.path, f"it cannot be opened as a zip ({error})") from None
        self._sizes = {info.filename: info for info in self._file.infolist()}

    def __enter__(self) -> ModelZip:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, entry: str) -> bool:
        """Is there such an entry, with something in it?"""
        return entry in self._sizes and self._sizes[entry].file_size > 0

    def configuration(self) -> dict[str, Any]:
        """The network's description."""
        info = self._info(CONFIGURATION)
        if info.file_size > CONFIGURATION_BYTES_MAX:
            raise NoDl4jNetwork(
                self.path, f"{CONFIGURATION} has {info.file_size} bytes: no network's is that long"
            )
        try:
            found = json.loads(self._file.open(info).read(CONFIGURATION_BYTES_MAX))
        except DAMAGE as error:
            why = f"{CONFIGURATION} cannot be read ({type(error).__name__}: {error})"
            raise NoDl4jNetwork(self.path, why) from None
        if not isinstance(found, dict):
            raise NoDl4jNetwork(self.path, f"{CONFIGURATION} is no JSON object")
        return found

    def values(self, entry: str, expected: int) -> NDArray[np.float32]:
        """A flat array of so many values, f32[expected]."""
        return self.read(entry, lambda reader: reader.array(expected).reshape(-1))

    def read(self, entry: str, how: Callable[[ArrayReader], Read]) -> Read:
        """What ``how`` reads of an entry."""
        info = self._info(entry)
        limit = min(info.file_size, info.compress_size * EXPANSION_MAX + EXPANSION_MAX)
        try:
            with self._file.open(info) as stream:
                return how(ArrayReader(stream, limit))
        except NotImported:  # a ValueError, too
            raise
        except (BadArray, MemoryError, *DAMAGE) as error:
            raise NoDl4jNetwork(self.path, f"{entry}: {error}") from None

    def _info(self, entry: str) -> zipfile.ZipInfo:
        if entry not in self._sizes:
            said = ", ".join(sorted(self._sizes)[:8]) or "nothing"
            raise NoDl4jNetwork(self.path, f"there is no {entry} in it, only {said}")
        return self._sizes[entry]
