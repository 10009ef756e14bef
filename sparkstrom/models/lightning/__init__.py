"""LightningModules, from ``lightning`` or ``pytorch_lightning``, as flat-parameter models."""

from sparkstrom.models.lightning.model import LightningModel

__all__ = ["LightningModel"]
