"""By value: what a user's script or notebook defines travels to worker processes as it is."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import SetupError


def packed_by_value(value: Any) -> bytes:
    """Bytes that ``pickle.loads`` opens in a worker. Raise SetupError without cloudpickle."""
    try:
        import cloudpickle
    except ImportError:
        raise SetupError(
            "worker processes are sent a model by cloudpickle, which is not installed: "
            "pip install cloudpickle"
        ) from None
    content: bytes = cloudpickle.dumps(value)
    return content
