"""Tests of choosing a kernel set by name or by an array's device, and of refusals' reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.encoding import backends
from sparkstrom.encoding.cuda import device as cuda_dlpack


class ArrayClaimingCuda:
    """A host array that claims by DLPack alone to be on a CUDA device."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (cuda_dlpack.CUDA, 0)

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


def test_unknown_backend_error_lists_valid_names() -> None:
    with pytest.raises(UsageError, match=r"backend='gpu'.*\['cpu', 'cuda', 'reference'\]"):
        backends.kernels("gpu")


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_backend_modules_implement_whole_protocols(name: str) -> None:
    backend = backends.backend(name)
    for protocol, module in (
        (backends.Kernels, backend.kernels),
        (backends.Memory, backend.memory),
    ):
        names = {member for member in vars(protocol) if not member.startswith("_")}
        assert names - set(dir(module)) == set()


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("/no/such/driver", "NUMBA_CUDA_DRIVER /no/such/driver is not a valid file path"),
        (sys.executable, "Error at driver init"),  # a file, but no driver
    ],
)
def test_cuda_without_a_driver_is_refused_with_the_reason(driver: str, reason: str) -> None:
    program = (
        "from sparkstrom.encoding import backends\n"
        "from sparkstrom.base.errors import SetupError\n"
        "try: backends.kernels('cuda')\n"
        "except SetupError as error: print(error)"
    )
    environment = os.environ | {"NUMBA_CUDA_DRIVER": driver, "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("backend='cuda': ")
    assert reason in done.stdout
    assert "use backend='cpu'" in done.stdout


def test_failed_kernel_compilation_is_reported_with_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """numba-cuda 0.30 with NumPy 2.5 raised AttributeError when the first kernel was compiled."""
    reason = "module 'numpy' has no attribute 'row_stack'"
    (tmp_path / "kernels_that_fail.py").write_text(f"raise AttributeError({reason!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backends, "CUDA_KERNELS", "kernels_that_fail")
    monkeypatch.setattr(backends, "_cuda_device", Mock)
    with pytest.raises(SetupError, match=f"backend='cuda'.*{reason}.*backend='cpu'"):
        backends.kernels("cuda")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
def test_dlpack_interface_has_address_shape_and_dtype(dtype: type) -> None:
    array = np.arange(12, dtype=dtype)[3:]
    told = cuda_dlpack.DLPackInterface(ArrayClaimingCuda(array)).__cuda_array_interface__
    ours = array.__array_interface__
    assert told["data"] == ours["data"]
    assert told["shape"] == ours["shape"]
    assert told["strides"] in (None, array.strides)
    assert np.dtype(told["typestr"]) == array.dtype


def test_dlpack_interface_has_strides_in_bytes() -> None:
    array = np.zeros((3, 8), np.float32)[:, ::2]
    told = cuda_dlpack.DLPackInterface(ArrayClaimingCuda(array)).__cuda_array_interface__
    assert (told["shape"], told["strides"]) == ((3, 4), (32, 8))


def test_dlpack_interface_rejects_complex_array() -> None:
    with pytest.raises(UsageError, match="must be float32"):
        cuda_dlpack.DLPackInterface(ArrayClaimingCuda(np.zeros(3, np.complex64)))
