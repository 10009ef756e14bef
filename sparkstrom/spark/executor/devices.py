"""Where a worker's parameters lie: on the GPU that its model trains on, or on the host."""

from __future__ import annotations

import logging

from sparkstrom.base.errors import SetupError
from sparkstrom.encoding.backends import Backend, host, on_device
from sparkstrom.models.base import DeviceModel, FlatModel

log = logging.getLogger(__name__)


def backend_of(model: FlatModel) -> Backend:
    """The backend on the model's GPU, once it is placed; the host's where it has none.

    A model works without it as before, by copies, so what is missing is a warning.
    """
    device = model.cuda_device if isinstance(model, DeviceModel) else None
    if device is None:
        return host()
    try:
        return on_device(device)
    except SetupError as error:
        log.warning("parameters stay on the host, and each step copies them: %s", error)
        return host()
