"""DL4J's layers, losses and updaters on torch; nothing else of the import needs it."""

import sparkstrom.models.torch as torch_adapter  # says what to install where torch is missing

__all__ = ["torch_adapter"]
