"""Tests that host memory and device memory have the same operations with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding import backends
from sparkstrom.encoding import layers as samples
from sparkstrom.encoding.cuda.device import TILE, is_usable
from sparkstrom.encoding.layers import Layers
from tests.gpu.compared import Q, arbitrary_floats, near_theta, seeds, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)

EITHER = pytest.mark.parametrize("name", ["cpu", "cuda"])


def test_cuda_modules_implement_whole_protocols() -> None:
    for protocol, module in (
        (backends.Kernels, backends.kernels("cuda")),
        (backends.Memory, backends.memory("cuda")),
    ):
        names = {name for name in vars(protocol) if not name.startswith("_")}
        assert names - set(dir(module)) == set()


@EITHER
@given(n=sizes, seed=seeds)
def test_copy_is_independent_of_original(name: str, n: int, seed: int) -> None:
    memory, host = backends.memory(name), arbitrary_floats(n, seed)
    first = memory.from_host(host.copy())
    second = memory.copy(first)
    memory.assign(first, np.zeros(n, np.float32))
    assert memory.to_host(second).tobytes() == host.tobytes()
    assert not memory.to_host(first).any()


@EITHER
@given(n=sizes, seed=seeds)
def test_assign_copies_between_host_and_device(name: str, n: int, seed: int) -> None:
    memory, host = backends.memory(name), arbitrary_floats(n, seed)
    there, also = memory.zeros(n, np.float32), memory.zeros(n + 3, np.float32)
    back = np.zeros(n, np.float32)
    memory.assign(there, host)
    memory.assign(memory.part(also, slice(2, n + 2)), there)
    memory.assign(back, there)
    assert back.tobytes() == host.tobytes()
    framed = memory.to_host(also)
    assert framed[2 : n + 2].tobytes() == host.tobytes()
    assert not framed[[0, 1, -1]].any()
    memory.assign(back, np.ones(n, np.float32))
    assert (back == 1).all()


@EITHER
@pytest.mark.parametrize("other", [np.zeros(3, np.float32), np.zeros(1, np.float32), np.zeros(4)])
def test_assign_rejects_other_size_or_dtype(name: str, other: Any) -> None:
    """An array of another size or type is not assigned."""
    memory = backends.memory(name)
    target = memory.zeros(4, np.float32)
    with pytest.raises(AssertionError):
        memory.assign(target, other)
    with pytest.raises(AssertionError):
        memory.assign(target, memory.from_host(other))


@EITHER
@given(n=sizes, seed=seeds)
def test_subtract_works_in_place(name: str, n: int, seed: int) -> None:
    memory, (one, other) = backends.memory(name), near_theta(n, seed, 1000)
    first, second = memory.from_host(one.copy()), memory.from_host(other.copy())
    memory.subtract(first, first, second)
    assert memory.to_host(first).tobytes() == (one - other).tobytes()
    memory.subtract(second, first, second)
    assert memory.to_host(second).tobytes() == ((one - other) - other).tobytes()


def test_subtract_rejects_host_array() -> None:
    memory, host = backends.memory("cuda"), np.zeros(4, np.float32)
    with pytest.raises(UsageError, match=r"other is a numpy\.ndarray in host memory"):
        memory.subtract(memory.zeros(4, np.float32), memory.zeros(4, np.float32), host)


@EITHER
def test_part_is_view_of_whole_array(name: str) -> None:
    memory = backends.memory(name)
    whole = memory.zeros(TILE + 9, np.float32)
    for where in (slice(3, TILE), slice(TILE + 9, None), slice(0)):
        part = memory.part(whole, where)
        memory.assign(part, np.ones(part.size, np.float32))
    assert np.flatnonzero(memory.to_host(whole)).tolist() == list(range(3, TILE))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("layers", [None, Layers((100, 300), (1, 5))])
@given(seed=seeds, fraction=st.sampled_from([1e-3, 0.1, 1.0]), many=st.booleans())
def test_sampled_tau_is_equal_on_both_backends(
    sign: int, layers: Layers | None, seed: int, fraction: float, many: bool
) -> None:
    """Both sample the same tau, also if residuals are NaN or infinite, which the scan reports."""
    one, other = near_theta(300, seed, 1000)
    one[seed % 300], one[seed % 299] = np.nan, np.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "SAMPLE_PARAMS", 100 if many else 300)
        found = []
        for name in ("cpu", "cuda"):
            backend = backends.backend(name)
            placed = (backend.memory.from_host(each.copy()) for each in (one, other))
            found.append(samples.tau_reached_by(fraction, seed, *placed, sign, layers, backend))
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0] > Q / 1000
