"""Networks that Deeplearning4j saved: read without Java, checked byte by byte."""

from sparkstrom.models.dl4j.data_normalizers import (
    ImageNormalizer,
    MinMaxNormalizer,
    StandardizeNormalizer,
)
from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork, NotImported
from sparkstrom.models.dl4j.importing import from_dl4j

__all__ = [
    "ImageNormalizer",
    "MinMaxNormalizer",
    "NoDl4jNetwork",
    "NotImported",
    "StandardizeNormalizer",
    "from_dl4j",
]
