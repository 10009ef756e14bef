"""Manage a directory of numbered checkpoint files, of which only the newest few are kept."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import CheckpointDamaged, SetupError, SparkstromError, UsageError
from sparkstrom.base.untrusted_files import NotAFileError
from sparkstrom.checkpoint.files import (
    Checkpoint,
    open_folder,
    read_untrusted_checkpoint,
    temporary_name,
    verify_digest,
    write_checkpoint,
)

log = logging.getLogger(__name__)

FILE_NAME = re.compile(r"checkpoint-([0-9]{6,})\.npz")

WriteLine = Callable[[str], object]  # shows a line of text to the user


class CheckpointDirectory:
    """A directory with the numbered checkpoint files of one training.

    Only one fit at a time may write to the directory.

    Args:
        url: a path, or a URL on any file system that fsspec supports.
        keep_last: number of intact files that ``remove_old`` keeps, at least 1.

    Raises:
        UsageError: ``keep_last`` is less than 1, or the file system is unknown.
    """

    def __init__(self, url: str | os.PathLike[str], keep_last: int = 3) -> None:
        if keep_last < 1:
            raise UsageError(f"keep_last is {keep_last}: at least the newest checkpoint is kept")
        self.url, self.keep_last = os.fspath(url), keep_last
        self._folder = open_folder(url)
        # Names of files whose state is known. Files never change, so each is verified only once.
        self._intact: set[str] = set()
        self._damaged: set[str] = set()
        self._protected: set[str] = set()  # names of files that ``remove_old`` keeps and ignores

    @property
    def location(self) -> str:
        """Where the directory is: its absolute path without symbolic links, or its URL."""
        place = self._folder.path_or_url("").rstrip("/")
        return place if "://" in place else os.path.realpath(place)

    def check(self) -> None:
        """Create the directory and write to it, as a test. Raise SetupError if that fails."""
        probe = temporary_name(f"probe-{uuid.uuid4().hex}")
        try:
            self._folder.create()
            self._folder.list_names()
            self._folder.put(probe, lambda file: file.write(b"sparkstrom"))
            self._folder.remove(probe)
        except SparkstromError:
            raise
        except Exception as error:  # file systems raise errors of any kind
            raise SetupError(
                f"checkpoint directory {self.url!r} cannot be written ({format_error(error)}): "
                "create it, allow this user to write there, or set another checkpoint_directory"
            ) from error

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint atomically, under the next free number; return its path or URL.

        Also remove temporary files of writers that died. Errors of the file system are raised
        unchanged.
        """
        self._folder.create()
        self._folder.remove_abandoned()
        number = 1 + max(map(_file_number, self._list_names()), default=0)
        while True:
            name = f"checkpoint-{number:06d}.npz"
            try:
                self._folder.put(name, lambda file: write_checkpoint(checkpoint, file))
            except FileExistsError:  # another process has just written it
                number += 1
                continue
            self._intact.add(name)
            return self._folder.path_or_url(name)

    def protect_existing(self) -> None:
        """Keep the files that exist now, besides the newest ``keep_last`` of later ones.

        Raise SetupError if the directory cannot be read.
        """
        try:
            self._protected = set(self._list_names())
        except Exception as error:
            raise self._unreadable(error) from error

    def remove_old(self) -> None:
        """Remove all intact files except the newest ``keep_last``.

        Damaged files, and files that existed at a call of ``protect_existing``, are kept as well.
        """
        kept = self._damaged | self._protected
        names = [name for name in self._list_names() if name not in kept]
        if len(names) > self.keep_last:
            for name in [name for name in names if self._is_intact(name)][self.keep_last :]:
                self._folder.remove(name)
                self._intact.discard(name)

    def read_newest(self, report: WriteLine) -> tuple[str, Checkpoint] | None:
        """Read the newest intact file; return (its path or URL, the checkpoint), or None if none.

        Args:
            report: called with a line of text for each damaged file that is skipped.

        Raises:
            SetupError: the directory cannot be read.
            UsageError: the newest file has a format newer than this version can read.
        """
        try:
            for name in self._list_names():
                try:
                    found = self._read(name)
                except CheckpointDamaged as damaged:
                    self._damaged.add(name)
                    report(f"{damaged}; using the checkpoint before it")
                    continue
                if found is not None:
                    self._intact.add(name)
                    return self._folder.path_or_url(name), found
        except SparkstromError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error
        return None

    def _unreadable(self, error: Exception) -> SetupError:
        """Return an error that explains that the directory cannot be read."""
        return SetupError(
            f"checkpoint directory {self.url!r} cannot be read ({format_error(error)}): make it"
            " readable, wait until the store is back, or choose another checkpoint_directory"
        )

    def _list_names(self) -> list[str]:
        """Return the names of all checkpoint files, newest first."""
        found = filter(FILE_NAME.fullmatch, self._folder.list_names())
        return sorted(found, key=_file_number, reverse=True)

    def _read(self, name: str) -> Checkpoint | None:
        """Read a checkpoint file; return None if another process has removed the file.

        Raise CheckpointDamaged if the file is damaged or not a regular file.
        """
        try:
            with self._folder.open(name) as file:
                return read_untrusted_checkpoint(file, self._folder.path_or_url(name))
        except FileNotFoundError:
            return None
        except NotAFileError as error:
            raise CheckpointDamaged(self._folder.path_or_url(name), format_error(error)) from None

    def _is_intact(self, name: str) -> bool:
        """Return whether a file exists and matches its digest; the result is remembered."""
        if name in self._intact:
            return True
        try:
            with self._folder.open(name) as file:
                verify_digest(file, self._folder.path_or_url(name))
        except FileNotFoundError:
            return False
        except (CheckpointDamaged, NotAFileError):
            self._damaged.add(name)
            return False
        self._intact.add(name)
        return True


def open_checkpoint(path: str | os.PathLike[str], report: WriteLine) -> tuple[str, Checkpoint]:
    """Read a checkpoint file; return (its path or URL, the checkpoint).

    Args:
        path: path or URL of a file (``*.npz``), or of a directory, whose newest intact file is
            read.
        report: called with a line of text for each damaged file that is skipped.

    Raises:
        UsageError: there is no checkpoint, or its format is newer than this version can read.
        CheckpointDamaged: the named file is damaged.
        SetupError: the file or directory cannot be read.
    """
    address = os.fspath(path)
    parent, _, name = address.rstrip("/").rpartition("/")
    if not name.endswith(".npz"):
        newest = CheckpointDirectory(address).read_newest(report)
        if newest is None:
            raise UsageError(
                f"{address!r} contains no checkpoint: name a checkpoint file"
                " (checkpoint-NNNNNN.npz), or the checkpoint_directory of an earlier fit"
            )
        return newest
    folder = open_folder(parent or ("/" if address.startswith("/") else "."))
    try:
        with folder.open(name) as file:
            return folder.path_or_url(name), read_untrusted_checkpoint(
                file, folder.path_or_url(name)
            )
    except SparkstromError:
        raise
    except NotAFileError as error:
        raise CheckpointDamaged(address, format_error(error)) from None
    except FileNotFoundError:
        raise UsageError(f"there is no checkpoint {address!r}: name a file or a directory of them"
                         ) from None  # fmt: skip
    except Exception as error:
        raise SetupError(
            f"checkpoint {address!r} cannot be read ({format_error(error)}): make it readable, or "
            "wait until the store is back"
        ) from error


def format_error(error: BaseException) -> str:
    """Return the error of any file system as one line of text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words: list[Any] = [type(error).__name__, *str(error).splitlines()[:1]]
    return ": ".join(words)


def _file_number(name: str) -> int:
    """Return the number in a checkpoint file's name."""
    match = FILE_NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])
