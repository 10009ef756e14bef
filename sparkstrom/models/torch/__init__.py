"""PyTorch modules behind the flat-parameter protocol; nothing else imports torch."""

from sparkstrom.models.torch.model import TorchModel
from sparkstrom.models.torch.tensors import TorchBatch

__all__ = ["TorchBatch", "TorchModel"]
