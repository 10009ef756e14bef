"""Row checks: values that no model takes, refused by row and place before training."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Columns, arrays_of

FEATURES, LABELS = "features", "labels"
FILL = "it must be a finite number; fill it or drop the row"


class BadValue(UsageError):
    """A value that a model cannot take, and where it is, for who knows the columns' names.

    ``role``: features or labels; ``array``: which of several, its name or its place from 0, empty
    for the only one; ``place``: of the value in its row, as ``3, 4``, empty for a single number.
    """

    def __init__(
        self,
        role: str,
        array: str,
        row: int,
        place: str,
        said: str,
        why: str,
    ) -> None:
        super().__init__(role, array, row, place, said, why)
        self.role, self.array, self.row, self.place = role, array, row, place
        self.said, self.why = said, why

    def __str__(self) -> str:
        which = f"[{self.array}]" if self.array else ""
        what = "label" if self.role == LABELS else self.role
        return f"row {self.row}: {what}{which}{self.at} is {self.said}: {self.why}"

    @property
    def at(self) -> str:
        """Its place in the row, for people."""
        return f" at [{self.place}]" if self.place else ""


def refuse_bad(role: str, columns: Columns, index: int, good: NDArray[np.bool_], why: str) -> None:
    """Raise BadValue for the first value of an array that is not ``good`` [rows, ...]."""
    if good.all():
        return
    row, *place = (int(at) for at in np.argwhere(~good)[0])
    value = arrays_of(columns)[index][(row, *place)]
    several = "" if isinstance(columns, np.ndarray) else str(index)
    array = list(columns)[index] if isinstance(columns, dict) else several
    raise BadValue(role, array, row, ", ".join(map(str, place)), str(value), why)


def refuse_not_finite(role: str, columns: Columns) -> None:
    """Raise BadValue for NaN and infinity."""
    for i, array in enumerate(arrays_of(columns)):
        if array.dtype.kind == "f":
            refuse_bad(role, columns, i, np.isfinite(array), FILL)


def refuse_strange_classes(labels: NDArray[Any], classes: int, ignored: int | None = None) -> None:
    """Raise BadValue for a label [rows] that is not in [0, classes) and not ``ignored``."""
    whole = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))
    if ignored is not None:
        whole |= labels == ignored
    refuse_bad(LABELS, labels, 0, whole, no_class(classes))


def no_class(classes: int) -> str:
    """Why a label is none of so many classes, and what to do."""
    return (
        f"labels must be 0 to {classes - 1}, as the model puts out {classes} classes; renumber the"
        " labels, or give the model more outputs"
    )
