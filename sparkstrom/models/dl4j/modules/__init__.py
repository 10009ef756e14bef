"""DL4J's layers, losses and updaters in torch. The rest of ``models.dl4j`` works without torch."""

import sparkstrom.models.torch as torch_adapter  # its error says how to install torch

__all__ = ["torch_adapter"]
