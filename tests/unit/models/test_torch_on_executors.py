"""Tests of TorchModel's pickles, of placing it on a machine, and of its export to torch."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Share, from_description

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402
from sparkstrom.models.torch.parameters import ParameterViews, make_layout  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.125)
CHANCE = np.random.default_rng(0)
FEATURES = CHANCE.normal(size=(24, 6)).astype(np.float32)
CLASSES = CHANCE.integers(0, 3, 24)
BATCH = Batch(FEATURES, CLASSES)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def bound(model: TorchModel) -> np.ndarray:
    params = model.initial()
    model.bind(params)
    return params


def test_pickle_has_buffers_but_no_parameters() -> None:
    """A pickle has buffers, but no parameters, which bind() provides."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 3))
    model = TorchModel(module, functional.cross_entropy, SGD)
    params = bound(model)
    model.step(BATCH)
    shipped = pickle.dumps(model)
    assert 2 * 4 * 4000 < len(shipped) < 2 * 4 * 4000 + 10_000 < model.n_params * 4
    other = pickle.loads(shipped)
    with pytest.raises(UsageError, match="bind"):
        other.initial()
    assert other.buffers_bytes() == model.buffers_bytes() != b""
    other.bind(params.copy())
    np.testing.assert_array_equal(other.predict(FEATURES), model.predict(FEATURES))


def test_deep_copy_is_independent_with_same_initial_parameters() -> None:
    model = TorchModel(mlp(), functional.cross_entropy, SGD)
    twin = copy.deepcopy(model)
    params = bound(model)
    model.step(BATCH)
    np.testing.assert_array_equal(twin.initial(), model.initial())
    assert (params != twin.initial()).any()
    assert twin.module is not model.module


@pytest.mark.parametrize("travel", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy])
def test_copy_of_module_in_eval_mode_has_original_training_modes(travel: Any) -> None:
    """A copy has the modes from the model's creation, even if the module is in eval mode now."""
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    module[0].eval()  # frozen by its owner
    model = TorchModel(module, functional.cross_entropy, SGD)
    module.eval()  # as users do with network.module between two fits
    arrived = travel(travel(model))
    assert [part.training for part in arrived.module.modules()] == [True, False, True, True]
    assert not any(part.training for part in module.modules())


def test_attributes_of_parameters_survive_pickling() -> None:
    """Attributes that a user has set on parameters are pickled."""
    module = mlp()
    module[0].bias.no_decay = True
    other = pickle.loads(pickle.dumps(TorchModel(module, functional.cross_entropy, SGD)))
    assert other.module[0].bias.no_decay


def test_unpickled_gru_takes_same_step() -> None:
    """An unpickled GRU, which has its own list of weights, takes the same step."""
    torch.manual_seed(0)
    model = TorchModel(nn.GRU(6, 4, batch_first=True), gru_loss, SGD)
    params, other = bound(model), pickle.loads(pickle.dumps(model))
    far = params.copy()
    other.bind(far)
    sequences = CHANCE.normal(size=(5, 7, 6)).astype(np.float32)
    batch = Batch(sequences, np.zeros((5, 7, 4), np.float32))
    assert model.step(batch) == other.step(batch)
    np.testing.assert_array_equal(params, far)


def gru_loss(output: Any, target: Any) -> Any:
    return functional.mse_loss(output[0], target)


def test_place_sets_thread_count_and_random_seed() -> None:
    """place() sets torch's number of threads and random seed."""
    threads = torch.get_num_threads()
    model = TorchModel(mlp(), functional.cross_entropy, SGD)
    draws = []
    for seed in (1, 1, 2):
        model.place(Share(threads=1, gpu=None, seed=seed))
        draws.append(torch.rand(1).item())
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("device", "gpu"), [("cuda", None), (None, 0)])
def test_missing_gpu_is_refused_with_device_name(device: str | None, gpu: int | None) -> None:
    model = TorchModel(mlp(), functional.cross_entropy, SGD, device=device)
    with pytest.raises(UsageError, match=r"device='cuda.*sees no GPU"):
        model.place(Share(threads=torch.get_num_threads(), gpu=gpu, seed=0))


def test_parameters_are_copied_between_host_and_device() -> None:
    """copy_from_shared() and copy_to_shared() move parameters between host and device."""
    module = mlp()
    named = dict(module.named_parameters())
    params = np.zeros(53, np.float32)
    host = torch.from_numpy(params)
    views = ParameterViews(
        named, make_layout(named), host, host.clone()
    )  # the clone replaces a GPU's memory
    params += 2  # a remote update
    assert module[0].bias[0] == 0
    views.copy_from_shared()
    assert module[0].bias[0] == 2
    with torch.no_grad():
        module[0].bias.mul_(2)
    assert params[30] == 2
    views.copy_to_shared()
    assert params[29:32].tolist() == [2, 4, 4]


def test_device_option_cpu_overrides_gpu_assigned_by_spark() -> None:
    """With device="cpu", the module stays on the CPU although its task has a GPU."""
    model = TorchModel(mlp(), functional.cross_entropy, SGD, device="cpu")
    model.place(Share(threads=torch.get_num_threads(), gpu=0, seed=0))
    bound(model)
    model.step(BATCH)
    assert model.cuda_device is None
    assert {parameter.device.type for parameter in model.module.parameters()} == {"cpu"}


def test_exported_state_dict_is_loadable_by_torch(tmp_path: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    model = TorchModel(module, functional.cross_entropy, SGD)
    bound(model)
    model.step(BATCH)
    suffix, content = model.exported()
    (tmp_path / f"model{suffix}").write_bytes(content)
    fresh = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    fresh.eval()
    with torch.no_grad():
        np.testing.assert_array_equal(
            fresh(torch.from_numpy(FEATURES)).numpy(), model.predict(FEATURES)
        )


def test_description_lists_parameters_but_cannot_create_torch_model() -> None:
    description = TorchModel(mlp(), functional.cross_entropy, SGD).describe()
    assert description["parameters"][0] == ["0.weight", [5, 6]]
    with pytest.raises(UsageError, match=r"saved without its code.*model=TorchModel"):
        from_description(description)
