"""Fit checkpoints: which fit of a program a checkpoint is of, and what a fit does with it.

The same program run again makes the same fits in the same order. So a fit goes on from a checkpoint
of its own number, begins with the parameters of an earlier fit's, and is not repeated where the
newest is of a later one. In a stream a micro-batch's id takes the place of the number: Spark gives
it again when it repeats one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.cadence import parse_every
from sparkstrom.checkpoint.checkpoint_directory import CheckpointDirectory, open_checkpoint
from sparkstrom.models.base import FlatModel
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.checkpoint_content import FitKey, Resumption, resumption_of
from sparkstrom.spark.driver.checkpoint_keeper import Kept

STREAM, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's own spellings

_claims: dict[str, str] = {}  # directory -> the network of this program that it is of

Say = Callable[[str], None]


class Use(enum.Enum):
    """What a fit does with a checkpoint."""

    GO_ON = "go on"  # it is this fit's
    BEGIN = "begin"  # with its parameters: it is an earlier fit's
    SKIP = "skip"  # this fit is done


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and what this fit does with it."""

    use: Use
    checkpoint: Resumption


@dataclass(slots=True)
class FitCheckpoints:
    """One network's. Nothing is read before its first fit, and nothing without a directory."""

    model: FlatModel
    master: TrainingMaster
    network: str  # names it in this program
    fits: int = 0  # that are over
    summaries: dict[str, Any] = field(default_factory=dict)  # of these, by number, as JSON
    _given: Resumption | None = None  # read, and not used up
    _by_hand: Resumption | None = None  # the same, until a fit that went on from it is over
    _looks: bool = True  # the next fit reads what there is

    @property
    def directory(self) -> CheckpointDirectory | None:
        """Where checkpoints go, if they do."""
        url = self.master.checkpoint_directory
        return None if url is None else CheckpointDirectory(url, self.master.keep_last)

    def restore(self, path: str, say: Say) -> Resumption:
        """Use this one instead of the newest; raise UsageError where it is none of this model."""
        self._given = self._by_hand = resumption_of(*open_checkpoint(path, say), self.model)
        self._looks = False
        done = self._given.epochs_done is not None
        self.fits = self._given.key.number - (0 if done else 1)
        return self._given

    def find(self, key: FitKey, epochs: int, say: Say) -> Found | None:
        """What this fit is to do with the newest checkpoint, or the one that was given."""
        if self._looks:
            self._given = self._newest(say)
            self._looks = False  # what was refused, or could not be read, is asked again
        given = self._given
        if given is None:
            return None
        self.summaries = given.summaries
        use = use_of(given, key, epochs)
        if use is not Use.SKIP:
            self._given = None
        say(IN_WORDS[use].format(**_facts(given, key)))
        return Found(use, given)

    def _newest(self, say: Say) -> Resumption | None:
        directory = self.directory
        if directory is None:
            return None
        directory.check()
        if not self.master.resume:
            return None
        self._claim(directory.url)
        found = directory.newest(say)
        return None if found is None else resumption_of(*found, self.model)

    def _claim(self, url: str) -> None:
        """For ever: another network's fits have the same numbers, and would be taken for these."""
        if (
            _claims.setdefault(url.removeprefix("file://").rstrip("/"), self.network)
            != self.network
        ):
            raise UsageError(
                f"checkpoint_directory={url!r} is another network's of this program: a network goes"
                " on with its own fits only; give each its own directory, or say resume=False to"
                " train anew beside what is there"
            )

    def kept(self, key: FitKey, k: int, states: LentStates) -> Kept | None:
        """For a fit that is about to begin; None: it keeps nothing."""
        directory = self.directory
        if directory is None:
            return None
        return self.kept_in(directory, self.master.checkpoint_every, key, k, states)

    def kept_in(
        self, directory: CheckpointDirectory, every: str, key: FitKey, k: int, states: LentStates
    ) -> Kept:
        """The same, in this directory, so often."""
        return Kept(
            directory=directory,
            every=parse_every(every),
            key=key,
            model=self.model,
            threshold=repr(self.master.threshold),
            k=k,
            states=states,
            summaries=self.summaries,
            updaters=self.master.checkpoint_updaters,
        )

    def done(self, key: FitKey, summary: dict[str, Any]) -> None:
        """What a fit said of itself: for the same fit when the program is run again."""
        earlier = {} if key.stream else self.summaries  # a stream has no end
        self.summaries = {**earlier, str(key.number): summary}

    def is_over(self, number: int) -> None:
        """Done, or ended by a person: the next one has the next number."""
        self.fits, self._by_hand = max(self.fits, number), None

    def has_failed(self) -> None:
        """The next one has the same number, and goes on from what was saved."""
        if self.directory is None:
            self._given = self._by_hand
        else:
            self._looks, self._given = True, None

    @contextmanager
    def kept_if_it_fails(self) -> Iterator[None]:
        """What raises in the block fails a fit before it has begun."""
        try:
            yield
        except BaseException:
            self.has_failed()
            raise


def key_of(number: int, properties: Callable[[str], str | None]) -> FitKey:
    """Of the fit that is called now. ``properties``: of this thread, as Spark has them."""
    stream, batch = properties(STREAM), properties(BATCH)
    if stream and batch:
        return FitKey(number, stream, int(batch))
    return FitKey(number)


def use_of(given: Resumption, key: FitKey, epochs: int) -> Use:
    """See the module."""
    if key.stream != given.key.stream:
        return Use.BEGIN
    here, there = (key.batch, given.key.batch) if key.stream else (key.number, given.key.number)
    if here != there:
        return Use.SKIP if here < there else Use.BEGIN
    enough = given.epochs_done is not None and epochs <= given.epochs
    return Use.SKIP if enough else Use.GO_ON


def _facts(given: Resumption, key: FitKey) -> Mapping[str, Any]:
    whole = min(given.trained.values(), default=0)
    return {
        "path": given.path,
        "fit": f"micro-batch {key.batch}" if key.stream else f"fit {key.number}",
        "minibatches": f"{given.minibatches:,}",
        "whole": whole,
        "epochs": given.epochs,
    }


IN_WORDS = {
    Use.GO_ON: "sparkstrom goes on from {path}: {minibatches} minibatches of {fit} are in it, "
    "{whole} of {epochs} epochs are whole",
    Use.BEGIN: "sparkstrom begins {fit} with the parameters of {path}",
    Use.SKIP: "sparkstrom: {fit} is done in {path} and is not repeated; to train anew give another"
    " checkpoint_directory, or resume=False",
}
