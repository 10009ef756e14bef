"""Check rows before training, with errors that name the row and the value; used by all models.

``is_raised_by_user_code`` distinguishes errors that the user's code raises on purpose from those of
a model's library.
"""

from __future__ import annotations

import dis
import importlib.util
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.models.base import Columns, arrays_of


def is_raised_by_user_code(error: BaseException, *libraries: str) -> bool:
    """Return whether ``error`` is from a ``raise`` or ``assert`` outside these packages."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_lasti < 0:
        return False
    code = trace.tb_frame.f_code
    is_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and not code.co_filename.startswith(tuple(map(_package_directory, libraries)))


def _package_directory(library: str) -> str:
    """Return the directory of an installed package, with a trailing separator."""
    spec = importlib.util.find_spec(library)
    assert spec is not None, f"{library} raised something"
    assert spec.origin is not None, "it is a package of files"
    return os.path.dirname(spec.origin) + os.sep


def describe_error(error: BaseException) -> str:
    """Return "Class: message" for an error, with only the first line of the message."""
    return f"{type(error).__name__}: {first_line(error)}"


FEATURES, LABELS = "features", "labels"  # the two roles that columns can have
FILL_REMEDY = "it must be a finite number; fill it or drop the row"


class BadValue(UsageError):
    """Raised for a value that a model cannot train on.

    A caller that knows the names of the columns can build a better message from the attributes.

    Attributes:
        role: ``FEATURES`` or ``LABELS``.
        array: name or position of the array; empty if it is the only one.
        row: the row's position in the minibatch.
        position: the value's position in the row, such as ``3, 4``; empty for a single number.
        text: the value as text.
        reason: why the value is invalid, and the remedy.
    """

    def __init__(
        self, role: str, array: str, row: int, position: str, text: str, reason: str
    ) -> None:
        super().__init__(role, array, row, position, text, reason)
        self.role, self.array, self.row, self.position = role, array, row, position
        self.text, self.reason = text, reason

    def __str__(self) -> str:
        which = f"[{self.array}]" if self.array else ""
        what = "label" if self.role == LABELS else self.role
        return f"row {self.row}: {what}{which}{self.location_text} is {self.text}: {self.reason}"

    def moved(self, rows: int) -> BadValue:
        """Return the same error with ``rows`` added to its row number."""
        role, array, row, *rest = self.args
        return type(self)(role, array, row + rows, *rest)

    @property
    def location_text(self) -> str:
        """The value's position as text, such as " at [3, 4]"; empty for a single number."""
        return f" at [{self.position}]" if self.position else ""


def refuse_invalid_values(
    role: str, columns: Columns, index: int, valid: NDArray[np.bool_], reason: str
) -> None:
    """Raise BadValue for the first value of array number ``index`` that ``valid`` marks as False.

    ``valid`` has the array's shape. ``role`` and ``reason`` become attributes of the error.
    """
    if valid.all():
        return
    row, *position = (int(at) for at in np.argwhere(~valid)[0])
    value = arrays_of(columns)[index][(row, *position)]
    number = "" if isinstance(columns, np.ndarray) else str(index)
    array = list(columns)[index] if isinstance(columns, dict) else number
    raise BadValue(role, array, row, ", ".join(map(str, position)), str(value), reason)


def refuse_non_finite(role: str, columns: Columns) -> None:
    """Raise BadValue for the first NaN or infinity in the floating-point arrays of the columns."""
    for i, array in enumerate(arrays_of(columns)):
        if array.dtype.kind == "f":
            refuse_invalid_values(role, columns, i, np.isfinite(array), FILL_REMEDY)


def refuse_unknown_classes(
    labels: NDArray[Any], classes: int, ignored: int | None = None, remedy: str = ""
) -> None:
    """Raise BadValue for the first label that is neither a class index nor ``ignored``.

    Class indices are the whole numbers in [0, classes), also if stored as floats. ``remedy`` is
    text to add to the end of the message.
    """
    is_class = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))
    if ignored is not None:
        is_class |= labels == ignored
    refuse_invalid_values(LABELS, labels, 0, is_class, explain_unknown_class(classes) + remedy)


def explain_unknown_class(classes: int) -> str:
    """Return an error text, with a remedy, for a label outside [0, classes)."""
    return (
        f"labels must be 0 to {classes - 1}, as the model returns {classes} classes; renumber the"
        " labels, or give the model more outputs"
    )
