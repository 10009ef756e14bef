"""Tests of whole fits with one worker's parameters on a device and the others' on the host.

On a GPU the worker trains a TorchModel there. Under Numba's simulator device memory is host memory:
models are bound to the NumPy array behind a simulated array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkstrom.encoding import backends
from sparkstrom.encoding.cuda.device import SIMULATED, is_usable
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Share
from sparkstrom.models.torch import TorchModel
from sparkstrom.worker.training_task import choose_backend
from tests.unit.runtime.fits import EPOCHS, Mesh, assert_fit_complete
from tests.unit.runtime.memories import BackendDenseNetwork, as_host_array

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)

ON_A_GPU = pytest.mark.skipif(
    SIMULATED or not torch.cuda.is_available(),
    reason="needs a GPU that torch and Numba see; simulated, torch is on the host",
)


class TorchOnMemory(TorchModel):
    """A TorchModel that is bound to a simulated device's memory."""

    def bind(self, params: Any) -> None:
        super().bind(as_host_array(params))


def torch_model(kind: type[TorchModel] = TorchModel, device: str = "cpu") -> TorchModel:
    """Return a model with as many parameters as the mesh's own network."""
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = kind(module, nn.CrossEntropyLoss(), optimizer, device=device)
    model.place(Share(threads=1, gpu=None, seed=0))
    return model


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = Mesh(partitions=3)
    yield made
    made.close()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "dense": (partial(BackendDenseNetwork, [5, 8, 3]), partial(DenseNetwork, [5, 8, 3])),
    "torch": (partial(torch_model, TorchOnMemory), torch_model),
}


@pytest.mark.skipif(not SIMULATED, reason="a GPU's memory is none that these models can work on")
@pytest.mark.parametrize("kind", MODELS)
def test_device_and_host_replicas_end_equal(mesh: Mesh, kind: str) -> None:
    on_device, on_host = MODELS[kind]
    before = mesh.theta.digest()
    mesh.begin()
    mesh.add_worker(0, model=on_device(), backend=backends.on_device(0))
    for partition in (1, 2):
        mesh.add_worker(partition, model=on_host())
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    assert before not in outcome.hashes.values()
    assert mesh.trainers[0].counts.steps == 5 * EPOCHS
    assert all(replica.encoder.counters.hits for replica in mesh.replicas)


@ON_A_GPU
def test_torch_model_on_gpu_trains_in_replica_memory(mesh: Mesh) -> None:
    """The module's parameters are the replica's memory on the GPU, and all replicas end equal."""
    model = torch_model(device="cuda:0")
    device = choose_backend(model)
    assert device.name == backends.CUDA
    mesh.begin()
    mesh.add_worker(0, model=model, backend=device)
    for partition in (1, 2):
        mesh.add_worker(partition, model=torch_model())
    assert_fit_complete(mesh, mesh.finish())
    local: Any = mesh.replicas[0].theta.local
    first = next(iter(model.module.parameters()))
    assert first.is_cuda
    assert first.data_ptr() == local.__cuda_array_interface__["data"][0]
    values = torch.cat([p.detach().flatten() for p in model.module.parameters()])
    assert values.cpu().numpy().tobytes() == device.memory.to_host(local).tobytes()


@ON_A_GPU
def test_reader_does_not_wait_for_default_stream() -> None:
    """The reader's stream does not wait for the default stream, and reads the current values."""
    device = backends.on_device(0)
    theta = device.memory.zeros(1000, "f4")
    read = device.memory.reader(theta)
    torch.cuda._sleep(2_000_000_000)  # about a second of the default stream
    assert not read(10, 20).any()
    assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
