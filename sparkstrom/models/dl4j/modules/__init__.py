"""DL4J's layers, losses and updaters on torch; the rest of the import does not need torch."""

import sparkstrom.models.torch as torch_adapter  # its error says how to install torch

__all__ = ["torch_adapter"]
