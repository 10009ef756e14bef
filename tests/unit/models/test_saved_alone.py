"""What is saved opens in a Python that has neither Spark nor this package."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.saved_model import check_local_path, save_model
from sparkstrom.models import DenseNetwork

CLEAN = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refused())
sys.argv = ["clean", {path!r}]
"""
BY_NUMPY = """
import json
import numpy as np

flat = np.load(sys.argv[1])["parameters"]
described = json.load(open(sys.argv[1] + ".json"))["model"]["parameters"]
arrays, at = [], 0
for name, shape in described:
    size = int(np.prod(shape))
    arrays.append(flat[at : at + size].reshape(shape))
    at += size
assert at == flat.size, (at, flat.size)
x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
w1, b1, w2, b2 = {order}
out = np.maximum(x @ w1 + b1, 0) @ w2 + b2
print(*out.reshape(-1))
"""
BY_TORCH = """
import torch
from torch import nn

module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
module.load_state_dict(torch.load(sys.argv[1] + ".pt", weights_only=True))
out = module(torch.linspace(-1, 1, 12).reshape(3, 4))
print(*out.detach().reshape(-1).tolist())
"""
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def said_by(path: Path, code: str, *refused: str) -> list[float]:
    """What clean Python prints: numbers."""
    clean = CLEAN.format(refused={"sparkstrom", "pyspark", *refused}, path=str(path))
    command = [sys.executable, "-I", "-c", clean + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [float(word) for word in done.stdout.split()]


def test_a_dense_network_by_numpy(tmp_path: Path) -> None:
    model = DenseNetwork([4, 5, 2], loss="squared_error", seed=1)
    params = model.initial()
    model.bind(params)
    save_model(tmp_path / "net.npz", model.describe(), params, 1)
    found = said_by(tmp_path / "net.npz", BY_NUMPY.format(order="arrays"), "torch", "jax")
    np.testing.assert_allclose(found, model.predict(ROWS).reshape(-1), rtol=1e-5)


def test_a_module_by_numpy_and_by_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is pinned for CPython 3.11 only")
    from sparkstrom.models.torch import TorchModel

    nn = torch.nn
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    model = TorchModel(module, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    params = model.initial()
    model.bind(params)
    path = tmp_path / "net.npz"
    save_model(path, model.describe(), params, 1, exported=model.exported())
    wanted = model.predict(ROWS).reshape(-1)
    order = "arrays[0].T, arrays[1], arrays[2].T, arrays[3]"
    by_numpy = said_by(path, BY_NUMPY.format(order=order), "torch", "jax")
    np.testing.assert_allclose(by_numpy, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(said_by(path, BY_TORCH), wanted, rtol=1e-4, atol=1e-6)


def test_addresses_are_no_paths() -> None:
    with pytest.raises(UsageError, match=r"s3://bucket/net\.npz is a URL.*local path"):
        check_local_path("s3://bucket/net.npz")
    assert check_local_path(Path("net.npz")) == Path("net.npz")
