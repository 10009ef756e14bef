"""DL4J's layers, losses and updaters in torch; other parts of the import work without torch."""

import sparkstrom.models.torch as torch_adapter  # its error says how to install torch

__all__ = ["torch_adapter"]
