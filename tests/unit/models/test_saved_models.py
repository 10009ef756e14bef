"""Tests that saved models open in a Python without Spark and this package, and from URLs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.checkpoint.files import RemoteFolder
from sparkstrom.checkpoint.saved_model import load_model, path_to_load, path_to_save, save_model
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


def run_without_packages(path: Path, code: str, *refused: str) -> list[float]:
    """Return the numbers that ``code`` prints in a Python without the refused packages."""
    clean = CLEAN.format(refused={"sparkstrom", "pyspark", *refused}, path=str(path))
    command = [sys.executable, "-I", "-c", clean + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [float(word) for word in done.stdout.split()]


def test_saved_dense_network_is_usable_with_numpy_alone(tmp_path: Path) -> None:
    """NumPy alone computes a saved network's predictions."""
    model = DenseNetwork([4, 5, 2], loss="squared_error", seed=1)
    params = model.initial()
    model.bind(params)
    save_model(tmp_path / "net.npz", model.describe(), params, 1)
    found = run_without_packages(
        tmp_path / "net.npz", BY_NUMPY.format(order="arrays"), "torch", "jax"
    )
    np.testing.assert_allclose(found, model.predict(ROWS).reshape(-1), rtol=1e-5)


def test_saved_module_is_usable_with_numpy_or_torch_alone(tmp_path: Path) -> None:
    """NumPy alone and torch alone compute a saved module's predictions."""
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
    by_numpy = run_without_packages(path, BY_NUMPY.format(order=order), "torch", "jax")
    np.testing.assert_allclose(by_numpy, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(run_without_packages(path, BY_TORCH), wanted, rtol=1e-4, atol=1e-6)


@pytest.fixture
def url() -> Iterator[str]:
    """Yield the URL of a file in a folder that does not exist, in fsspec's memory file system."""
    yield "memory://models/today/net.npz"
    files = fsspec.filesystem("memory")
    if files.exists("/models"):
        files.rm("/models", recursive=True)


def test_model_round_trip_through_url(url: str) -> None:
    first, second = DenseNetwork([4, 5, 2], seed=1), DenseNetwork([4, 5, 2], seed=2)
    for model in (first, second):  # the second replaces the first
        with path_to_save(url) as path:
            save_model(path, model.describe(), model.initial(), 3, exported=(".pt", b"state"))
        assert not path.exists()
    files = fsspec.filesystem("memory")
    assert files.cat(f"{url}.pt") == b"state"
    with path_to_load(url) as path:
        loaded, parameters, epochs = load_model(path)
    assert loaded.n_params == first.n_params
    np.testing.assert_array_equal(parameters, second.initial())
    assert epochs == 3


def test_load_and_save_errors_name_url(url: str) -> None:
    """Errors name the URL, also if the file that was read is a local copy."""
    with pytest.raises(UsageError, match=f"{url} cannot be read"), path_to_load(url):
        pass
    with pytest.raises(UsageError, match=r"no file system for path 'nosuch://net\.npz'"):
        path_to_save("nosuch://net.npz").__enter__()
    fsspec.filesystem("memory").pipe({url: b"", f"{url}.json": b""})
    with (
        pytest.raises(UsageError, match=r"net\.npz is not a saved model") as caught,
        path_to_load(url) as path,
    ):
        load_model(path)
    assert caught.value.__notes__ == [f"{path} is a local copy of {url}"]


def test_failed_upload_error_names_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("the store is down")

    monkeypatch.setattr(RemoteFolder, "put", refuse)
    with (
        pytest.raises(SetupError, match=f"{url} cannot be written .*the store is down"),
        path_to_save(url) as path,
    ):
        path.write_bytes(b"")


def test_local_path_is_used_unchanged(tmp_path: Path) -> None:
    with path_to_save(tmp_path / "net.npz") as to, path_to_load(str(tmp_path / "net.npz")) as of:
        assert to == of == tmp_path / "net.npz"


def test_file_system_that_fails_to_open_is_reported_with_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Unable to load libjvm")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(SetupError, match=r"'hdfs:///net\.npz' cannot be opened .*CLASSPATH"):
        path_to_save("hdfs:///net.npz").__enter__()


def test_model_round_trip_in_root_of_file_system() -> None:
    model = DenseNetwork([4, 5, 2], seed=1)
    with path_to_save("memory://root.npz") as path:
        save_model(path, model.describe(), model.initial(), 1)
    with path_to_load("memory://root.npz") as path:
        assert load_model(path)[2] == 1
    fsspec.filesystem("memory").rm(["/root.npz", "/root.npz.json"])
