"""Normalizers that DL4J saves with a network (``NormalizerSerializer``), and how to read them.

Features of rank 3 and 4 are normalized along dimension 1, as in DL4J.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.dl4j.files import ArrayReader, BadArray, NotImported

F32 = NDArray[np.float32]
RANGE_MIN = 1e-5  # minimum range, for constant features: ND4J's EPS_THRESHOLD
HEADER, VERSION = "NORMALIZER", 1


@dataclass(frozen=True, slots=True, eq=False)
class StandardizeNormalizer:
    """Computes (x - mean) / std of each feature, like DL4J's NormalizerStandardize.

    Statistics are f32[features] or f32[labels]. The statistics of labels are None if the normalizer
    was not fitted to labels.
    """

    mean: F32  # f32[features]
    std: F32  # f32[features], standard deviation
    label_mean: F32 | None = field(default=None, repr=False)  # f32[labels]
    label_std: F32 | None = field(default=None, repr=False)  # f32[labels]

    def transform(self, features: NDArray[Any]) -> F32:
        """Return normalized features [rows, features, ...] as float32 of the same shape."""
        return _standardize(features, self.mean, self.std)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """Return normalized labels, or the same labels if the normalizer was not fitted to them."""
        if self.label_mean is None or self.label_std is None:
            return np.asarray(labels, np.float32)
        return _standardize(labels, self.label_mean, self.label_std)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """Convert outputs to the units of the original labels, as float32.

        The values do not change if the normalizer was not fitted to labels.
        """
        if self.label_mean is None or self.label_std is None:
            return np.asarray(outputs, np.float32)
        numbers = _to_float32(outputs, self.label_mean.size)
        std = _reshape_for_broadcast(self.label_std, numbers)
        mean = _reshape_for_broadcast(self.label_mean, numbers)
        return np.asarray(numbers * np.where(std == 0, 1, std) + mean, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class MinMaxNormalizer:
    """Maps each feature's range to a target range, like DL4J's NormalizerMinMaxScaler.

    Bounds are f32[features] or f32[labels]. The bounds of labels are None if the normalizer was not
    fitted to labels.
    """

    target_min: float  # bounds of the target range
    target_max: float
    lower: F32  # f32[features], minimum of each feature
    upper: F32  # f32[features], maximum of each feature
    label_lower: F32 | None = field(default=None, repr=False)  # f32[labels]
    label_upper: F32 | None = field(default=None, repr=False)  # f32[labels]

    def transform(self, features: NDArray[Any]) -> F32:
        """Return normalized features [rows, features, ...] as float32 of the same shape."""
        return self._rescale(features, self.lower, self.upper)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """Return normalized labels, or the same labels if the normalizer was not fitted to them."""
        if self.label_lower is None or self.label_upper is None:
            return np.asarray(labels, np.float32)
        return self._rescale(labels, self.label_lower, self.label_upper)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """Convert outputs to the units of the original labels, as float32.

        The values do not change if the normalizer was not fitted to labels.
        """
        if self.label_lower is None or self.label_upper is None:
            return np.asarray(outputs, np.float32)
        numbers = _to_float32(outputs, self.label_lower.size)
        lower = _reshape_for_broadcast(self.label_lower, numbers)
        width = np.maximum(_reshape_for_broadcast(self.label_upper, numbers) - lower, RANGE_MIN)
        shares = (numbers - self.target_min) / (self.target_max - self.target_min)
        return np.asarray(shares * width + lower, np.float32)

    def _rescale(self, values: NDArray[Any], lower: F32, upper: F32) -> F32:
        """Map values from each feature's range [lower, upper] to the target range."""
        numbers = _to_float32(values, lower.size)
        start = _reshape_for_broadcast(lower, numbers)
        width = np.maximum(_reshape_for_broadcast(upper, numbers) - start, RANGE_MIN)
        shares = (numbers - start) / width
        scaled = shares * (self.target_max - self.target_min) + self.target_min
        return np.asarray(scaled, np.float32)


@dataclass(frozen=True, slots=True)
class ImageNormalizer:
    """Maps pixels from [0, pixel_max] to a target range, like DL4J's ImagePreProcessingScaler."""

    range_min: float  # bounds of the target range
    range_max: float
    pixel_max: float  # the largest possible pixel, such as 255

    def transform(self, features: NDArray[Any]) -> F32:
        """Return normalized pixels as float32 of the same shape."""
        shares = _to_float32(features) / np.float32(self.pixel_max)
        return np.asarray(shares * (self.range_max - self.range_min) + self.range_min, np.float32)

    def transform_labels(self, labels: NDArray[Any]) -> F32:
        """Return the labels unchanged, because this normalizer is only for features."""
        return np.asarray(labels, np.float32)

    def revert_labels(self, outputs: NDArray[Any]) -> F32:
        """Return the outputs unchanged, because this normalizer is only for features."""
        return np.asarray(outputs, np.float32)


Normalizer = StandardizeNormalizer | MinMaxNormalizer | ImageNormalizer
NORMALIZERS_BY_NAME: dict[str, Any] = {
    "standardize": StandardizeNormalizer,
    "min_max": MinMaxNormalizer,
    "image": ImageNormalizer,
}


def describe_normalizer(normalizer: Normalizer | None) -> dict[str, Any]:
    """Return {"normalizer": ...} for a model's JSON description; {} if there is no normalizer."""
    if normalizer is None:
        return {}
    name = next(name for name, kind in NORMALIZERS_BY_NAME.items() if isinstance(normalizer, kind))
    values = {each.name: getattr(normalizer, each.name) for each in fields(normalizer)}
    listed = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
    return {"normalizer": {"name": name, **listed}}


def normalizer_from_description(description: dict[str, Any]) -> Normalizer | None:
    """Return the normalizer of a model's JSON description, or None."""
    if "normalizer" not in description:
        return None
    values = dict(description["normalizer"])
    kind = NORMALIZERS_BY_NAME[values.pop("name")]
    made: Normalizer = kind(
        **{k: np.array(v, np.float32) if isinstance(v, list) else v for k, v in values.items()}
    )
    return made


def count_normalized_features(normalizer: Normalizer) -> int | None:
    """Return the number of features that the normalizer requires; None if it takes any number."""
    if isinstance(normalizer, ImageNormalizer):
        return None
    fitted = normalizer.mean if isinstance(normalizer, StandardizeNormalizer) else normalizer.lower
    return fitted.size


def read_normalizer(path: str, reader: ArrayReader) -> Normalizer:
    """Read the normalizer from normalizer.bin.

    Args:
        path: the zip file, for error messages.
        reader: reader of the entry.

    Raises:
        BadArray: the entry is damaged.
        NotImported: the normalizer is of an unknown kind, or for several inputs.
    """
    header, version = reader.read_text(), reader.read_int()
    if (header, version) != (HEADER, VERSION):
        raise BadArray(f"it begins with {header[:20]!r}, version {version}")
    kind = reader.read_text()
    if kind in ("STANDARDIZE", "MULTI_STANDARDIZE"):
        fitted = reader.read_bool()
        _check_single_input(path, kind, reader)
        arrays = [reader.read_array().reshape(-1) for _ in range(4 if fitted else 2)]
        return StandardizeNormalizer(*_check_equal_lengths(arrays))
    if kind in ("MIN_MAX", "MULTI_MIN_MAX"):
        fitted = reader.read_bool()
        _check_single_input(path, kind, reader)
        low, high = reader.read_double(), reader.read_double()
        arrays = [reader.read_array().reshape(-1) for _ in range(4 if fitted else 2)]
        return MinMaxNormalizer(low, high, *_check_equal_lengths(arrays))
    if kind == "IMAGE_MIN_MAX":
        return ImageNormalizer(reader.read_double(), reader.read_double(), reader.read_double())
    raise NotImported(
        path, f"normalizer {kind[:40]}", "its kind is not supported", NORMALIZER_REMEDY
    )


NORMALIZER_REMEDY = (
    "normalize with pyspark.ml.feature, and remove it from the zip: zip -d FILE normalizer.bin"
)


def _check_single_input(path: str, kind: str, reader: ArrayReader) -> None:
    """Raise NotImported if a normalizer has several inputs or outputs."""
    if not kind.startswith("MULTI_"):
        return
    inputs, outputs = reader.read_int(), reader.read_int()  # -1 outputs: not fitted to labels
    if inputs != 1 or outputs not in (-1, 1):
        what = f"it has {inputs} inputs and {max(outputs, 0)} outputs"
        raise NotImported(path, f"normalizer {kind}", what, NORMALIZER_REMEDY)


def _check_equal_lengths(arrays: list[F32]) -> list[F32]:
    """Return the arrays. Raise BadArray unless the two arrays of each pair have the same shape."""
    for first, second in zip(arrays[::2], arrays[1::2], strict=True):
        if first.shape != second.shape:
            raise BadArray(f"{first.size} and {second.size} statistics of the same features")
    return arrays


def _standardize(values: NDArray[Any], mean: F32, std: F32) -> F32:
    """Return (values - mean) / std, with statistics along dimension 1; a std of 0 counts as 1."""
    numbers = _to_float32(values, mean.size)
    centered = numbers - _reshape_for_broadcast(mean, numbers)
    scale = _reshape_for_broadcast(std, numbers)
    return np.asarray(centered / np.where(scale == 0, 1, scale), np.float32)


def _to_float32(values: Any, width: int | None = None) -> F32:
    """Convert values to float32. Raise UsageError unless dimension 1 has ``width`` features."""
    try:
        numbers = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the normalizer takes arrays of numbers [rows, ...]: {error}") from None
    if width is not None and (numbers.ndim < 2 or numbers.shape[1] != width):
        raise UsageError(
            f"the normalizer is for {width} features, the array has shape {list(numbers.shape)}:"
            f" pass rows [rows, {width}, ...], which it was fitted to"
        )
    return numbers


def _reshape_for_broadcast(statistics: F32, values: F32) -> F32:
    """Reshape statistics [features] so that they broadcast along dimension 1 of ``values``."""
    return statistics.reshape(1, -1, *[1] * (values.ndim - 2))
