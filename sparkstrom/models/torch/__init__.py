"""PyTorch modules with their parameters in one flat vector. Importing this requires torch."""

from sparkstrom.base.errors import UsageError

try:
    import torch as torch
except ImportError as missing:
    raise UsageError(
        f"{missing}: TorchModel needs it here and on every executor; do pip install"
        " 'sparkstrom[torch]'"
    ) from missing

from sparkstrom.models.torch.model import TorchModel
from sparkstrom.models.torch.tensors import TorchBatch

__all__ = ["TorchBatch", "TorchModel"]
