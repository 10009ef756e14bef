"""Define sparkstrom's exception classes, grouped by what the user has to do about them.

    SparkstromError
    ├── UsageError        fix the call: a value, a combination of options, or the data
    ├── SetupError        fix the machine: shared memory, a port, a library or Java
    │   └── NetworkError  fix the network: mask, addresses or firewall; retrying does not help
    ├── PeerError         another process misbehaved; training continues without it
    │   └── WireError     received bytes that are not a valid message of this job
    ├── TransportError    a C call of Aeron failed
    │   └── DriverLost    the media driver (Aeron's process) died or hangs; another can be started
    ├── QueueFull         too many requests wait for a model: try again later
    ├── TrainingError     training cannot continue: NaN, an exception, or lost replicas
    │   ├── RowsRefused   a worker rejected a row; also a UsageError
    │   └── ControllerLost the task that ran the controller died; another can resume from a copy
    └── CheckpointDamaged a checkpoint file is truncated or changed; an older one may be intact

Spark pickles exceptions. Every class therefore passes its fields to ``super().__init__``, so that
``cls(*exc.args)`` recreates the exception.
"""

from __future__ import annotations

LINE_MAX = 200  # characters of another program's error text that one of our messages quotes


class SparkstromError(Exception):
    """Base class of all exceptions that sparkstrom raises deliberately."""


class UsageError(SparkstromError, ValueError):
    """The user's call is wrong. The message names the value, the reason and the remedy."""


class SetupError(SparkstromError, RuntimeError):
    """The machine or cluster is not ready. The message names the problem, place and remedy."""


class NetworkError(SetupError):
    """Two hosts cannot reach each other; the message names the mask, address or firewall to fix.

    A task that fails with this error is not retried, because Spark would start it on the same host.
    """


class PeerError(SparkstromError):
    """Another process misbehaved or went away; training continues without it."""


class WireError(PeerError):
    """Received bytes are not a valid message of this job. Decoders raise no other exception."""


class TransportError(SparkstromError):
    """A call to Aeron's C library failed. Holds the operation and Aeron's error code and text."""

    def __init__(self, doing: str, code: int, text: str) -> None:
        super().__init__(doing, code, text)
        self.doing, self.code, self.text = doing, code, text

    def __str__(self) -> str:
        return f"{self.doing}: Aeron error {self.code}: {self.text}"


class DriverLost(TransportError):
    """The media driver, Aeron's process for network I/O, died or hangs.

    The remedy is to start another one and to reopen all connections.
    """


def escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, escaped as ``\\ud83d``.

    They come from users' data and from file names, and must not prevent the report of an error.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def first_line(words: object) -> str:
    """Return the first non-empty line of ``str(words)``, cut to ``LINE_MAX`` characters.

    Returns "no reason" if no line has text, or if a user's exception has no text because its
    ``__str__`` raises. Lone surrogates are escaped.
    """
    try:
        lines = escape_surrogates(str(words)).splitlines()
    except Exception:  # of the user's code; the report of an error must not fail
        lines = []
    line = next((line.strip() for line in lines if line.strip()), "no reason")
    return line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 4]} ..."


def format_reason(error: BaseException) -> str:
    """Format an exception as one line of text, for messages that do not show its traceback."""
    if isinstance(error, SparkstromError):
        return next(iter(escape_surrogates(str(error)).splitlines()), "no reason")
    return f"{type(error).__name__}: {first_line(error)}"


class TrainingError(SparkstromError):
    """Training must stop: an exception or NaN in a worker, or replicas that cannot be trusted.

    ``str(error)`` is one line. ``trace``, the worker's traceback, is attached as a note; Python
    prints the note below that line if nobody catches the error.
    """

    def __init__(
        self, reason: str, host: str = "", partition: int = -1, trace: str = "", phase: str = ""
    ) -> None:
        super().__init__(reason, host, partition, trace, phase)
        # ``host`` and ``partition`` are the worker's, or "" and -1 if no worker is named.
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
    """A worker rejected one of its rows: fix the data, as for any other UsageError.

    This is also a TrainingError, because the error names the worker's host. ``partition`` is the
    worker's partition. ``reason`` names the row's original partition; the message shows only this.
    """

    def __str__(self) -> str:
        return f"{self.reason} (found on {self.host})" if self.host else self.reason


class QueueFull(SparkstromError):
    """Too many requests are waiting for a model, so this one is rejected; try again later."""


class ControllerLost(TrainingError):
    """The task that ran a fit's controller has been lost. ``what`` names the task and the cause."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(reason)
        self.args, self.what = (reason, what), what


class CheckpointDamaged(SparkstromError):
    """A file is truncated, altered or not a checkpoint. Such a file is neither used nor deleted."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.why}"
