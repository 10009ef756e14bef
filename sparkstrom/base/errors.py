"""The error tree. An error says who must act, and carries its facts as fields.

    SparkstromError
    ├── UsageError        fix the call: a value, a combination of options, the data
    ├── SetupError        fix the machine: shared memory, port, library, Java
    │   └── NetworkError  fix the network: mask, addresses, firewall; trying again is vain
    ├── PeerError         another process misbehaved; the mesh copes
    │   └── WireError     bytes that are no frame of ours, or not for us
    ├── TransportError    a C call of Aeron failed
    │   └── DriverLost    the media driver died or does not answer; another can be started
    ├── QueueFull         too many requests wait for a model: ask again later
    ├── TrainingError     stop: NaN, an exception in training, replicas lost
    │   ├── RowsRefused   a worker refused a row: a UsageError, too
    │   └── ControllerLost the task with the fit's master died; another can go on from a copy
    └── CheckpointDamaged a checkpoint file that is cut or changed; one before it may be whole

Spark pickles exceptions: every class passes its fields to ``super().__init__``, so that
``cls(*exc.args)`` rebuilds it.
"""

from __future__ import annotations

LINE_MAX = 200  # of other people's words inside one of our lines


class SparkstromError(Exception):
    """Base of everything that sparkstrom raises on purpose."""


class UsageError(SparkstromError, ValueError):
    """The call is wrong: the message names the value, the reason and the remedy."""


class SetupError(SparkstromError, RuntimeError):
    """The machine or cluster is not ready: the message names what, where, and the remedy."""


class NetworkError(SetupError):
    """Two hosts cannot speak as things are: mask, address, firewall. It names what to mend.

    A task that fails with it is not waited for: Spark would start it there again.
    """


class PeerError(SparkstromError):
    """Another process misbehaved or went away; the mesh copes."""


class WireError(PeerError):
    """Bytes that are no message of this job. Decoders raise this and nothing else."""


class TransportError(SparkstromError):
    """A C call of Aeron failed; Aeron's own code and words are kept."""

    def __init__(self, doing: str, code: int, text: str) -> None:
        super().__init__(doing, code, text)
        self.doing, self.code, self.text = doing, code, text

    def __str__(self) -> str:
        return f"{self.doing}: Aeron error {self.code}: {self.text}"


class DriverLost(TransportError):
    """The media driver died or stopped answering: close, ask for one and open the edges again."""


def first_line(words: object) -> str:
    """What others' words begin with, to stand inside a message; all of them belong behind it."""
    line = next((line.strip() for line in str(words).splitlines() if line.strip()), "no reason")
    return line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 4]} ..."


def reason_of(error: Exception) -> str:
    """One line for people; the traceback follows it."""
    if isinstance(error, SparkstromError):
        return str(error).splitlines()[0]
    return f"{type(error).__name__}: {first_line(error)}"


class TrainingError(SparkstromError):
    """Training must stop: an exception or NaN in a worker, or replicas that cannot be trusted.

    Its words are one line; ``trace``, the worker's traceback, is a note, which Python prints after
    that line where nobody catches the error.
    """

    def __init__(
        self, reason: str, host: str = "", partition: int = -1, trace: str = "", phase: str = ""
    ) -> None:
        super().__init__(reason, host, partition, trace, phase)
        self.reason, self.host, self.partition, self.trace = reason, host, partition, trace
        self.phase = phase  # what the worker was doing, in words
        if trace:
            self.add_note(trace)

    def __str__(self) -> str:
        if self.partition < 0:
            return self.reason
        doing = f", {self.phase}" if self.phase else ""
        return f"{self.reason} (partition {self.partition} on {self.host}{doing})"


class RowsRefused(TrainingError, UsageError):
    """A worker refused one of its rows: fix the data, as for any other UsageError.

    It is a TrainingError, too: it says where the worker was. ``partition`` is the worker's; the
    row's own, before rows were dealt, is in ``reason``, and the only one in the message.
    """

    def __str__(self) -> str:
        return f"{self.reason} (found on {self.host})" if self.host else self.reason


class QueueFull(SparkstromError):
    """So many requests wait for a model that one more is refused; ask again later."""


class ControllerLost(TrainingError):
    """The task that had the master of a fit is gone. ``what``: which one, and why."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(reason)
        self.args, self.what = (reason, what), what


class CheckpointDamaged(SparkstromError):
    """A checkpoint file is cut, changed, or none: it is left where it is, and never used."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.why}"
