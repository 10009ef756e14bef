"""Normalizers of data, as ``NormalizerSerializer`` writes them: plain values that transform arrays.

What DL4J's do to features of rank 3 and 4 is done along dimension 1, as there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.dl4j.dl4j_errors import NotImported
from sparkstrom.models.dl4j.nd4j_binary import ArrayReader, BadArray

F32 = NDArray[np.float32]
RANGE_MIN = 1e-5  # of a feature that is constant: ND4J's EPS_THRESHOLD
HEADER, VERSION = "NORMALIZER", 1


@dataclass(frozen=True, slots=True, eq=False)
class StandardizeNormalizer:
    """(x - mean) / std of each feature; DL4J's NormalizerStandardize."""

    mean: F32  # f32[features]
    std: F32
    label_mean: F32 | None = field(default=None, repr=False)  # where labels were fitted, too
    label_std: F32 | None = field(default=None, repr=False)

    def transform(self, features: NDArray[Any]) -> F32:
        """f32, of the same shape [rows, features, ...]."""
        return _standardized(features, self.mean, self.std)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """The same for labels; as they are where these were not fitted."""
        if self.label_mean is None or self.label_std is None:
            return np.asarray(labels, np.float32)
        return _standardized(labels, self.label_mean, self.label_std)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """A network's outputs in the units of the labels."""
        if self.label_mean is None or self.label_std is None:
            return np.asarray(outputs, np.float32)
        numbers = _numbers(outputs, self.label_mean.size)
        std, mean = _along(self.label_std, numbers), _along(self.label_mean, numbers)
        return np.asarray(numbers * np.where(std == 0, 1, std) + mean, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class MinMaxNormalizer:
    """Each feature from its own range to the target's; DL4J's NormalizerMinMaxScaler."""

    target_min: float
    target_max: float
    lower: F32  # f32[features]
    upper: F32
    label_lower: F32 | None = field(default=None, repr=False)
    label_upper: F32 | None = field(default=None, repr=False)

    def transform(self, features: NDArray[Any]) -> F32:
        """f32, of the same shape [rows, features, ...]."""
        return self._scaled(features, self.lower, self.upper)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """The same for labels; as they are where these were not fitted."""
        if self.label_lower is None or self.label_upper is None:
            return np.asarray(labels, np.float32)
        return self._scaled(labels, self.label_lower, self.label_upper)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """A network's outputs in the units of the labels."""
        if self.label_lower is None or self.label_upper is None:
            return np.asarray(outputs, np.float32)
        numbers = _numbers(outputs, self.label_lower.size)
        lower = _along(self.label_lower, numbers)
        wide = np.maximum(_along(self.label_upper, numbers) - lower, RANGE_MIN)
        shares = (numbers - self.target_min) / (self.target_max - self.target_min)
        return np.asarray(shares * wide + lower, np.float32)

    def _scaled(self, values: NDArray[Any], lower: F32, upper: F32) -> F32:
        numbers = _numbers(values, lower.size)
        first = _along(lower, numbers)
        wide = np.maximum(_along(upper, numbers) - first, RANGE_MIN)
        shares = (numbers - first) / wide
        scaled = shares * (self.target_max - self.target_min) + self.target_min
        return np.asarray(scaled, np.float32)


@dataclass(frozen=True, slots=True)
class ImageNormalizer:
    """Pixels from [0, pixel_max] to [range_min, range_max]; DL4J's ImagePreProcessingScaler."""

    range_min: float
    range_max: float
    pixel_max: float

    def transform(self, features: NDArray[Any]) -> F32:
        """f32, of the same shape."""
        shares = _numbers(features) / np.float32(self.pixel_max)
        return np.asarray(shares * (self.range_max - self.range_min) + self.range_min, np.float32)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """As they are: this one is of features."""
        return np.asarray(labels, np.float32)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """As they are."""
        return np.asarray(outputs, np.float32)


Normalizer = StandardizeNormalizer | MinMaxNormalizer | ImageNormalizer
NAMED: dict[str, Any] = {
    "standardize": StandardizeNormalizer,
    "min_max": MinMaxNormalizer,
    "image": ImageNormalizer,
}


def described(normalizer: Normalizer | None) -> dict[str, Any]:
    """JSON-able, for a model's description: {"normalizer": ...}; {} where there is none."""
    if normalizer is None:
        return {}
    name = next(name for name, kind in NAMED.items() if isinstance(normalizer, kind))
    values = {one.name: getattr(normalizer, one.name) for one in fields(normalizer)}
    listed = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    return {"normalizer": {"name": name, **listed}}


def normalizer_in(description: dict[str, Any]) -> Normalizer | None:
    """The one that ``described`` has put there."""
    if "normalizer" not in description:
        return None
    values = dict(description["normalizer"])
    kind = NAMED[values.pop("name")]
    made: Normalizer = kind(
        **{k: np.array(v, np.float32) if isinstance(v, list) else v for k, v in values.items()}
    )
    return made


def fitted_features(normalizer: Normalizer) -> int | None:
    """How many it was fitted to; None for one that takes any number."""
    if isinstance(normalizer, ImageNormalizer):
        return None
    fitted = normalizer.mean if isinstance(normalizer, StandardizeNormalizer) else normalizer.lower
    return fitted.size


def read_normalizer(path: str, reader: ArrayReader) -> Normalizer:
    """What normalizer.bin holds. Raise BadArray where it is damaged, NotImported by name."""
    header, version = reader.text(), reader.whole()
    if (header, version) != (HEADER, VERSION):
        raise BadArray(f"it begins with {header[:20]!r}, version {version}")
    kind = reader.text()
    if kind in ("STANDARDIZE", "MULTI_STANDARDIZE"):
        fitted = reader.flag()
        _check_one(path, kind, reader)
        arrays = [reader.array().reshape(-1) for _ in range(4 if fitted else 2)]
        return StandardizeNormalizer(*_of_one_length(arrays))
    if kind in ("MIN_MAX", "MULTI_MIN_MAX"):
        fitted = reader.flag()
        _check_one(path, kind, reader)
        low, high = reader.double(), reader.double()
        arrays = [reader.array().reshape(-1) for _ in range(4 if fitted else 2)]
        return MinMaxNormalizer(low, high, *_of_one_length(arrays))
    if kind == "IMAGE_MIN_MAX":
        return ImageNormalizer(reader.double(), reader.double(), reader.double())
    raise NotImported(path, f"normalizer {kind[:40]}", "it is of another kind", TAKE_IT_OUT)


TAKE_IT_OUT = (
    "normalize with pyspark.ml.feature, and take it out of the zip: zip -d FILE normalizer.bin"
)


def _check_one(path: str, kind: str, reader: ArrayReader) -> None:
    """Those of several inputs are read where there is one."""
    if not kind.startswith("MULTI_"):
        return
    inputs, outputs = reader.whole(), reader.whole()  # -1: labels were not fitted
    if inputs != 1 or outputs not in (-1, 1):
        what = f"it is of {inputs} inputs and {max(outputs, 0)} outputs"
        raise NotImported(path, f"normalizer {kind}", what, TAKE_IT_OUT)


def _of_one_length(arrays: list[F32]) -> list[F32]:
    for first, second in zip(arrays[::2], arrays[1::2], strict=True):
        if first.shape != second.shape:
            raise BadArray(f"{first.size} and {second.size} statistics of the same features")
    return arrays


def _standardized(values: NDArray[Any], mean: F32, std: F32) -> F32:
    numbers = _numbers(values, mean.size)
    centred = numbers - _along(mean, numbers)
    wide = _along(std, numbers)
    return np.asarray(centred / np.where(wide == 0, 1, wide), np.float32)


def _numbers(values: Any, width: int | None = None) -> F32:
    """As f32. Raise UsageError where dimension 1 is not as wide as what was fitted."""
    try:
        numbers = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the normalizer takes arrays of numbers [rows, ...]: {error}") from None
    if width is not None and (numbers.ndim < 2 or numbers.shape[1] != width):
        raise UsageError(
            f"the normalizer is of {width} features, the array of shape {list(numbers.shape)}: give"
            f" rows [rows, {width}, ...], as it was fitted to"
        )
    return numbers


def _along(statistics: F32, values: F32) -> F32:
    """For dimension 1 of the values."""
    return statistics.reshape(1, -1, *[1] * (values.ndim - 2))
