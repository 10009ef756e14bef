"""Models made of LightningModules, from the package ``lightning`` or ``pytorch_lightning``."""

from sparkstrom.models.lightning.model import LightningModel

__all__ = ["LightningModel"]
