"""LightningModules behind the flat-parameter protocol: of lightning and of pytorch_lightning."""

from sparkstrom.models.lightning.lightning_model import LightningModel

__all__ = ["LightningModel"]
