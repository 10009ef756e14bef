"""Import networks that Deeplearning4j saved, without Java."""

from sparkstrom.models.dl4j.files import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.importing import from_dl4j
from sparkstrom.models.dl4j.normalizers import (
    ImageNormalizer,
    MinMaxNormalizer,
    StandardizeNormalizer,
)

__all__ = [
    "ImageNormalizer",
    "MinMaxNormalizer",
    "NoDl4jNetwork",
    "NotImported",
    "StandardizeNormalizer",
    "from_dl4j",
]
