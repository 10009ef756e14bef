"""A checkpoint directory: numbered files, the newest whole one, and how many are kept."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import CheckpointDamaged, SetupError, SparkstromError, UsageError
from sparkstrom.base.files import NotAFileError
from sparkstrom.checkpoint.checkpoint_file import (
    Checkpoint,
    check_whole,
    pack_checkpoint,
    read_checkpoint_untrusted,
)
from sparkstrom.checkpoint.folders import folder_of, unfinished

NAME = re.compile(r"checkpoint-([0-9]{6,})\.npz")

Say = Callable[[str], object]


class CheckpointDirectory:
    """The checkpoints of one training, by one writer at a time.

    url         a path, or a URL of any file system that fsspec reaches
    keep_last   so many whole files stay, 1 or more

    Raise UsageError where there is no such file system.
    """

    def __init__(self, url: str | os.PathLike[str], keep_last: int = 3) -> None:
        if keep_last < 1:
            raise UsageError(f"keep_last is {keep_last}: at least the newest checkpoint is kept")
        self.url, self.keep_last = os.fspath(url), keep_last
        self._folder = folder_of(url)
        self._whole: set[str] = set()  # files are never changed: each is read through once
        self._damaged: set[str] = set()

    def check(self) -> None:
        """Make the directory and write to it. Raise SetupError where that fails."""
        probe = unfinished(f"probe-{uuid.uuid4().hex}")
        try:
            self._folder.make()
            self._folder.names()
            self._folder.put(probe, lambda file: file.write(b"sparkstrom"))
            self._folder.remove(probe)
        except SparkstromError:
            raise
        except Exception as error:  # any file system, any kind of error
            raise SetupError(
                f"checkpoint directory {self.url!r} cannot be written ({reason_of(error)}): "
                "make it, allow this user to write there, or choose another checkpoint_directory"
            ) from error

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a file beyond the newest, whole or not at all; answer its path or URL.

        Raise what the file system raises.
        """
        self._folder.make()
        self._folder.remove_left()
        number = 1 + max(map(_number, self._names()), default=0)
        while True:
            name = f"checkpoint-{number:06d}.npz"
            try:
                self._folder.put(name, lambda file: pack_checkpoint(checkpoint, file))
            except FileExistsError:  # somebody else's at the same moment
                number += 1
                continue
            self._whole.add(name)
            return self._folder.address(name)

    def remove_old(self) -> None:
        """Remove whole files beyond ``keep_last``. Damaged ones stay, to be looked at."""
        names = [name for name in self._names() if name not in self._damaged]
        if len(names) > self.keep_last:
            for name in [name for name in names if self._is_whole(name)][self.keep_last :]:
                self._folder.remove(name)
                self._whole.discard(name)

    def newest(self, say: Say) -> tuple[str, Checkpoint] | None:
        """The newest whole file, as its path or URL and content; None where there is none.

        Says of each damaged one that another is taken. Raise SetupError where the directory cannot
        be read, and UsageError where the newest is of a newer version of sparkstrom.
        """
        try:
            for name in self._names():
                try:
                    found = self._read(name)
                except CheckpointDamaged as damaged:
                    self._damaged.add(name)
                    say(f"{damaged}; the checkpoint before it is taken")
                    continue
                if found is not None:
                    self._whole.add(name)
                    return self._folder.address(name), found
        except SparkstromError:
            raise
        except Exception as error:
            raise SetupError(
                f"checkpoint directory {self.url!r} cannot be read ({reason_of(error)}): make it "
                "readable, wait until the store is back, or choose another checkpoint_directory"
            ) from error
        return None

    def _names(self) -> list[str]:
        """Checkpoints, the newest first."""
        found = filter(NAME.fullmatch, self._folder.names())
        return sorted(found, key=_number, reverse=True)

    def _read(self, name: str) -> Checkpoint | None:
        """None where somebody else has removed it."""
        try:
            with self._folder.open(name) as file:
                return read_checkpoint_untrusted(file, self._folder.address(name))
        except FileNotFoundError:
            return None
        except NotAFileError as error:
            raise CheckpointDamaged(self._folder.address(name), reason_of(error)) from None

    def _is_whole(self, name: str) -> bool:
        if name in self._whole:
            return True
        try:
            with self._folder.open(name) as file:
                check_whole(file, self._folder.address(name))
        except FileNotFoundError:
            return False
        except (CheckpointDamaged, NotAFileError):
            self._damaged.add(name)
            return False
        self._whole.add(name)
        return True


def open_checkpoint(path: str | os.PathLike[str], say: Say) -> tuple[str, Checkpoint]:
    """A named file, or the newest whole one of a directory, and its path or URL.

    Raise UsageError where there is none, and CheckpointDamaged where the named one is.
    """
    address = os.fspath(path)
    parent, _, name = address.rstrip("/").rpartition("/")
    if not name.endswith(".npz"):
        found = CheckpointDirectory(address).newest(say)
        if found is None:
            raise UsageError(
                f"{address!r} has no checkpoint: name a file that is one (checkpoint-NNNNNN.npz),"
                " or the checkpoint_directory of an earlier fit"
            )
        return found
    folder = folder_of(parent or ("/" if address.startswith("/") else "."))
    try:
        with folder.open(name) as file:
            return folder.address(name), read_checkpoint_untrusted(file, folder.address(name))
    except SparkstromError:
        raise
    except NotAFileError as error:
        raise CheckpointDamaged(address, reason_of(error)) from None
    except FileNotFoundError:
        raise UsageError(f"there is no checkpoint {address!r}: name a file or a directory of them"
                         ) from None  # fmt: skip
    except Exception as error:
        raise SetupError(
            f"checkpoint {address!r} cannot be read ({reason_of(error)}): make it readable, or "
            "wait until the store is back"
        ) from error


def reason_of(error: BaseException) -> str:
    """Why a file system refused, in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words: list[Any] = [type(error).__name__, *str(error).splitlines()[:1]]
    return ": ".join(words)


def _number(name: str) -> int:
    found = NAME.fullmatch(name)
    assert found is not None, name
    return int(found[1])
