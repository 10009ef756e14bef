"""What all models share: which arrays lie where in the one flat vector, and checks of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Columns, Flat

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Named arrays one behind the other in a flat vector."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    starts: tuple[int, ...]
    size: int  # of the whole vector

    @classmethod
    def of(cls, arrays: Iterable[tuple[str, Shape]]) -> Layout:
        """In the order given."""
        names, shapes, starts, at = [], [], [], 0
        for name, shape in arrays:
            names.append(name)
            shapes.append(tuple(shape))
            starts.append(at)
            at += prod(shape)
        return cls(tuple(names), tuple(shapes), tuple(starts), at)

    def views(self, flat: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Each name and its array: memory of ``flat``, no copy."""
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            yield name, flat[start : start + prod(shape)].reshape(shape)

    def name_of(self, index: int) -> str:
        """The array that element ``index`` belongs to. Raise IndexError outside."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.names[bisect_right(self.starts, index) - 1]


def bindable(params: Flat, n_params: int) -> Flat:
    """The parameters themselves. Raise UsageError if a model cannot work on this memory."""
    fits = params.shape == (n_params,) and params.dtype == np.float32
    if not (fits and params.flags.c_contiguous and params.flags.writeable):
        raise UsageError(
            f"parameters {params.dtype}{list(params.shape)}: need float32[{n_params}],"
            " contiguous and writable"
        )
    return params


def bindable_on_device(params: Any, n_params: int) -> Any:
    """The same for memory of a GPU, by its ``__cuda_array_interface__``."""
    told = params.__cuda_array_interface__
    shape, read_only = tuple(told["shape"]), told["data"][1]
    fits = shape == (n_params,) and told["typestr"] == "<f4"
    if not fits or told.get("strides") not in (None, (4,)) or read_only:
        raise UsageError(
            f"parameters {told['typestr']}{list(shape)} on a device: need <f4[{n_params}],"
            " contiguous and writable"
        )
    return params


def one_array(columns: Columns, what: str = "features") -> NDArray[Any]:
    """The only array there is. Raise UsageError for several: not every model takes them."""
    if isinstance(columns, np.ndarray):
        return columns
    if not columns:
        raise UsageError(f"there are no {what}, and this model needs them: name their column")
    names = f" ({', '.join(map(str, columns))})" if isinstance(columns, dict) else ""
    raise UsageError(
        f"{len(columns)} arrays of {what}{names}: this model takes one; name one column, or several"
        " numeric ones that make one array, or bring a model with several inputs (TorchModel)"
    )
