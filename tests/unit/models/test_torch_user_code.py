"""Tests of modules, losses and optimizers as users write them: what works, and error messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402
from sparkstrom.models.torch.flat_module import choose_device  # noqa: E402

CHANCE = np.random.default_rng(5)
ROWS = CHANCE.normal(size=(8, 4)).astype(np.float32)
TARGETS = CHANCE.normal(size=(8, 3)).astype(np.float32)
CLASSES = CHANCE.integers(0, 3, 8)
SGD = partial(optim.SGD, lr=0.1)
mse = functional.mse_loss


def load_on_executor(model: TorchModel) -> tuple[TorchModel, np.ndarray]:
    """Return the model as an executor gets it, and the parameters that it is bound to."""
    twin, params = cloudpickle.loads(cloudpickle.dumps(model)), model.initial()
    twin.bind(params)
    return twin, params


def assert_trains_as_in_torch(module: nn.Module, loss: Any) -> None:
    """Compare one step on an executor with one in plain torch."""
    alone = nn.Linear(4, 3)
    alone.load_state_dict(nn.Linear.state_dict(module), strict=False)
    model, params = load_on_executor(TorchModel(module, loss, SGD))
    model.step(Batch(ROWS, TARGETS))
    optimizer = SGD(alone.parameters())
    loss(alone(torch.from_numpy(ROWS)), torch.from_numpy(TARGETS)).backward()
    optimizer.step()
    wanted = np.concatenate([p.detach().numpy().reshape(-1) for p in alone.parameters()])
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


# -- modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_unpickled_parametrized_module_trains_as_in_torch(norm: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    alone = copy.deepcopy(module)
    model, params = load_on_executor(TorchModel(module, mse, SGD))
    optimizer = SGD(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = mse(alone(torch.from_numpy(ROWS)), torch.from_numpy(TARGETS))
        loss.backward()
        optimizer.step()
        assert model.step(Batch(ROWS, TARGETS)) == pytest.approx(float(loss.detach()), rel=1e-5)
    wanted = np.concatenate([p.detach().numpy().reshape(-1) for p in alone.parameters()])
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)
    assert list(model.module.state_dict()) == list(alone.state_dict())
    again = cloudpickle.loads(cloudpickle.dumps(model))
    again.bind(params)
    alone.eval()
    np.testing.assert_allclose(
        again.predict(ROWS), alone(torch.from_numpy(ROWS)).detach().numpy(), atol=1e-6
    )


def test_weights_loaded_after_model_creation_are_initial() -> None:
    module = nn.Linear(4, 3)
    model = TorchModel(module, mse, SGD)
    module.load_state_dict({"weight": torch.full((3, 4), 2.0), "bias": torch.full((3,), 2.0)})
    assert set(model.initial()) == {2.0}
    assert set(copy.deepcopy(model).initial()) == {2.0}
    model.bind(np.zeros(15, np.float32))
    assert set(model.initial()) == {2.0}, "what it is bound to later is not its own"


def test_module_changed_after_model_creation_cannot_be_pickled() -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    model = TorchModel(module, mse, SGD)
    module.double()
    with pytest.raises(UsageError, match=r"parameter 0\.weight is float64"):
        pickle.dumps(model)
    module.float()
    module[0] = nn.Linear(4, 3)
    with pytest.raises(UsageError, match=r"parameter 0\.weight of Sequential was replaced"):
        pickle.dumps(model)


class Overlapping(nn.Module):
    """Two parameters, the second of which begins inside the first."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.ones(20)
        self.a, self.b = nn.Parameter(values[:12]), nn.Parameter(values[8:])


class Aliased(nn.Linear):
    """A module with a buffer that is a part of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", self.weight.data[1])


class Columns(nn.Module):
    """Two parameters that are halves of one matrix: interleaved in memory, but disjoint."""

    def __init__(self) -> None:
        super().__init__()
        left, right = torch.ones(3, 4).chunk(2, dim=1)
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)


def test_overlapping_parameters_or_buffers_are_refused() -> None:
    """Parameters or buffers that overlap in memory are refused; interleaved ones are not."""
    with pytest.raises(UsageError, match="parameters a and b share memory"):
        TorchModel(Overlapping(), mse, SGD)
    with pytest.raises(UsageError, match="buffer mean lies in the memory of parameter weight"):
        TorchModel(Aliased(), mse, SGD)
    assert TorchModel(Columns(), mse, SGD).n_params == 12


class CachingModule(nn.Linear):
    """A module that keeps a tensor from one call to the next, as rotary embeddings do."""

    kept: Any = None

    def forward(self, x: Any) -> Any:
        if self.kept is None:
            self.kept = torch.ones(1, 3)
        return super().forward(x) * self.kept * self.weight.sum()


def test_tensor_cached_in_prediction_is_usable_in_training() -> None:
    """A tensor that a module kept from a prediction can be used in a training step."""
    model, _ = load_on_executor(TorchModel(CachingModule(4, 3), mse, SGD))
    model.predict(ROWS)
    assert np.isfinite(model.step(Batch(ROWS, TARGETS)))


class InputChangingModule(nn.Linear):
    """A module that changes its inputs in place."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.sub_(1))


def test_module_that_changes_inputs_does_not_change_rows() -> None:
    """Otherwise an evaluation's loss would be of rows that its predictions have changed."""
    model, rows = load_on_executor(TorchModel(InputChangingModule(4, 3), mse, SGD))[0], ROWS.copy()
    batch = Batch(rows, TARGETS)
    model.predict(rows)
    model.loss(batch)
    model.step(batch)
    np.testing.assert_array_equal(rows, ROWS)


class DerivativeModule(nn.Linear):
    """A module that returns derivatives of its layer, as physics-informed networks do."""

    def __init__(self, gradients: bool) -> None:
        super().__init__(4, 3)
        self.gradients = gradients

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.gradients or torch.is_grad_enabled()):
            x = x.clone().requires_grad_()
            out = super().forward(x).square().sum()
            return torch.autograd.grad(out, x, create_graph=True)[0][:, :3]


def test_module_may_compute_derivatives_in_predictions() -> None:
    model, _ = load_on_executor(TorchModel(DerivativeModule(True), mse, SGD))
    assert model.predict(ROWS).shape == TARGETS.shape
    model, _ = load_on_executor(TorchModel(DerivativeModule(False), mse, SGD))
    with pytest.raises(UsageError, match=r"no_grad: .*torch\.enable_grad"):
        model.predict(ROWS)


class CustomParameter(nn.Parameter):
    """A derived class of parameters, such as geoopt's ManifoldParameter."""


class DerivedCustomParameter(CustomParameter):
    """A class derived from that one."""


def test_parameter_subclasses_survive_pickling() -> None:
    """An optimizer may treat parameters by their class."""
    net = nn.Linear(4, 3)
    net.weight, net.bias = CustomParameter(net.weight.data), DerivedCustomParameter(net.bias.data)
    model, _ = load_on_executor(TorchModel(net, mse, SGD))
    assert [type(p) for p in model.module.parameters()] == [CustomParameter, DerivedCustomParameter]


class Oscillator(nn.Linear):
    """A module with complex and boolean buffers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("seen", torch.tensor([True, False]))


def test_complex_buffers_are_averaged_and_flags_stay_set() -> None:
    one, other = (TorchModel(Oscillator(), mse, SGD) for _ in range(2))
    other.module.phase.mul_(3)
    other.module.seen[:] = torch.tensor([False, False])
    one.load_buffers_bytes(one.average_buffers([one.buffers_bytes(), other.buffers_bytes()]))
    assert one.module.phase.tolist() == [2 + 4j, 6 - 2j]
    assert one.module.seen.tolist() == [True, False]


class NoneReturningModule(nn.Linear):
    """A module with an output that is not a tensor."""

    def forward(self, x: Any) -> Any:
        return {"y": super().forward(x), "cache": None}


def test_output_that_is_no_tensor_is_refused_with_its_type() -> None:
    model = TorchModel(NoneReturningModule(4, 3), lambda out, y: mse(out["y"], y), SGD)
    model.bind(model.initial())
    model.step(Batch(ROWS, TARGETS))
    with pytest.raises(UsageError, match="returns a NoneType: predictions are tensors"):
        model.predict(ROWS)


# -- functions that hold the module ----------------------------------------------------------------

NET = nn.Linear(4, 3)


class ModuleWithLoss(nn.Linear):
    """A module with a loss of its own."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.criterion = nn.MSELoss()

    def penalized(self, output: Any, target: Any) -> Any:
        return mse(output, target) + self.weight.norm()

    def shifted(self, part: Any, inputs: Any, output: Any) -> Any:
        """Return the output plus the bias, as a hook."""
        return output + self.bias


class ModuleHolder:
    """An object that holds the module."""

    def __init__(self, net: nn.Module) -> None:
        self.parts = {"net": net}

    def step(self, module: Any, optimizer: Any, batch: Any) -> Any:
        return self.parts["net"](batch.features).sum()


def by_name(output: Any, target: Any) -> Any:
    return mse(output, target) + NET.weight.norm()


def loss_by_name_indirectly(output: Any, target: Any) -> Any:
    """Return a loss that uses the module in another function."""
    return by_name(output, target)


def holder(what: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a module, and an option that holds the module in this way."""
    net = ModuleWithLoss()
    return {
        "closure": (net, {"loss": lambda out, y: mse(net(out), y)}),
        "parameter": (net, {"loss": partial(lambda w, out, y: mse(out, y) + w.sum(), net.bias)}),
        "method": (net, {"loss": net.penalized}),
        "object": (net, {"step": ModuleHolder(net).step}),
        "global": (NET, {"loss": loss_by_name_indirectly}),
        "optimizer": (net, {"optimizer": lambda params: SGD(net.parameters())}),
    }[what]


@pytest.mark.parametrize(
    "what", ["closure", "parameter", "method", "object", "global", "optimizer"]
)
def test_option_that_holds_module_is_refused(what: str) -> None:
    module, options = holder(what)
    arguments = {"loss": mse, "optimizer": SGD} | options
    with pytest.raises(UsageError, match=f"{next(iter(options))} holds the module itself"):
        TorchModel(module, **arguments)


@pytest.mark.parametrize("place", ["hook", "attribute"])
def test_inner_function_that_holds_module_is_refused(place: str) -> None:
    """A copy of a module has the same functions, which would use the original module."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    if place == "hook":
        net[0].register_forward_hook(lambda _part, _inputs, out: out * net[1].bias)
    else:
        net.forward = lambda x: net[1](net[0](x))
    with pytest.raises(UsageError, match=r"the function .*lambda.* holds the module itself"):
        TorchModel(net, mse, SGD)


@pytest.mark.parametrize("kind", ["first of two hooks", "list", "partial"])
def test_function_that_holds_module_is_found_among_others(kind: str) -> None:
    """A hook that holds the module is found beside others, in lists and in partials."""
    net = ModuleWithLoss()

    def scaled(factor: Any) -> Any:
        return lambda _part, _inputs, out: out * factor

    if kind == "first of two hooks":
        net.register_forward_hook(scaled(net.bias))
        net.register_forward_hook(scaled(2.0))
    elif kind == "list":
        net.acts = [scaled(1.0), lambda x: net.bias + x]
    else:
        net.act = partial(lambda k, x: k * net.bias + x, 2.0)
    with pytest.raises(UsageError, match="holds the module itself"):
        TorchModel(net, mse, SGD)


def test_state_dict_hook_that_holds_module_is_accepted() -> None:
    """A module trains as in torch although a hook of ``state_dict`` captures it."""
    net = ModuleWithLoss()
    net._register_state_dict_hook(lambda _part, state, *_: state.update(own=net.bias))
    assert_trains_as_in_torch(net, mse)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_method_hooks_and_compiled_modules_are_accepted() -> None:
    """A hook that is a method uses the copy's parameters, and so does a compiled module."""
    net = ModuleWithLoss()
    net.register_forward_hook(net.shifted)
    net.register_forward_hook(lambda _part, _inputs, out: 2 * out)
    model, params = load_on_executor(TorchModel(net, mse, SGD))
    model.step(Batch(ROWS, TARGETS))
    np.testing.assert_array_equal(model.predict(0 * ROWS)[0], 4 * params[-3:])
    TorchModel(torch.compile(nn.Linear(4, 3)), mse, SGD)


class OneBased(nn.CrossEntropyLoss):
    """A loss whose classes are numbered from 1."""

    def forward(self, output: Any, target: Any) -> Any:
        return super().forward(output, target - 1)


class VariableWidthModule(nn.Linear):
    """A module whose outputs are as wide as the longest row of a minibatch."""

    def forward(self, x: Any) -> Any:
        return super().forward(x[:, :4])[:, : int(x[:, 4].max())]


def test_custom_loss_or_module_may_accept_labels_beyond_outputs() -> None:
    """The number of outputs limits labels only if no code of the user changes either."""
    labels, long = np.array([1, 3], np.int64), np.array([5, 2], np.int64)
    rows = np.array([[1, 1, 1, 1, 2], [1, 1, 1, 1, 3]], np.float32)
    own, _ = load_on_executor(TorchModel(nn.Linear(5, 3), OneBased(), SGD))
    own.step(Batch(rows, labels))
    own.check(rows, labels)
    pointing, _ = load_on_executor(
        TorchModel(VariableWidthModule(4, 8), nn.CrossEntropyLoss(), SGD)
    )
    pointing.step(Batch(rows, labels - 1))
    pointing.check(rows, long)
    plain, _ = load_on_executor(TorchModel(nn.Linear(5, 3), nn.CrossEntropyLoss(), SGD))
    plain.step(Batch(rows, labels - 1))
    with pytest.raises(UsageError, match=r"is 3: labels must be 0 to 2"):
        plain.check(rows, labels)


def test_loss_that_holds_another_module_is_accepted() -> None:
    """A loss may hold a part of the module without parameters, or another module."""
    net, teacher = ModuleWithLoss(), nn.Linear(3, 3)
    assert_trains_as_in_torch(net, net.criterion)
    assert_trains_as_in_torch(net, lambda out, y: mse(out, teacher(y).detach()))
    assert_trains_as_in_torch(nn.Linear(4, 3), by_name)


def test_loss_without_gradient_for_any_parameter_is_refused() -> None:
    """A loss that gives no parameter a gradient is refused."""
    other = nn.Linear(4, 3)
    model = TorchModel(nn.Linear(4, 3), lambda out, y: other(y.new_ones(1, 4)).sum(), SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match="no parameter of the module got a gradient"):
        model.step(Batch(ROWS, TARGETS))


# -- losses ----------------------------------------------------------------------------------------


def mean_square(output: Any, target: Any) -> Any:
    """Return one of torch's losses."""
    return mse(output, target)


@pytest.mark.parametrize(
    ("outputs", "loss", "rows", "labels", "why"),
    [
        (1, mse, ROWS, TARGETS[:, 0], r"float32\[8, 1\], target float32\[8\].*every target"),
        (1, mean_square, ROWS, TARGETS[:, 0], r"target float32\[8\].*Using a target size"),
        (3, functional.cross_entropy, ROWS, CLASSES + np.float32(0.5), "whole numbers"),
        (3, functional.cross_entropy, ROWS, CLASSES + 7, "labels must be 0 to 2, .* row 0 of this"),
        (3, mse, ROWS[:, :3], TARGETS, r"Linear\.forward failed for features float32\[8, 3\]"),
    ],
)
def test_step_error_has_shapes_or_labels_of_unsuitable_rows(
    outputs: int, loss: Any, rows: Any, labels: Any, why: str
) -> None:
    model, _ = load_on_executor(TorchModel(nn.Linear(4, outputs), loss, SGD))
    with pytest.raises(UsageError, match=why):
        model.step(Batch(rows, labels))


def test_error_of_other_loss_failure_does_not_mention_classes() -> None:
    model = TorchModel(nn.Linear(4, 3), lambda out, y: mse(out, y[:, None, None] + 9.0), SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"the loss failed for .*int64\[8\]") as caught:
        model.step(Batch(ROWS, CLASSES + 7))
    assert "labels must be" not in str(caught.value)


def test_invalid_label_of_sequence_is_reported_by_row_and_column() -> None:
    class Words(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x).reshape(-1, 3, 2)

    labels = np.zeros((8, 2), np.int64)
    labels[0, 0], labels[5, 1] = -100, 3  # torch ignores the label -100
    model = TorchModel(Words(4, 6), functional.cross_entropy, SGD)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"labels must be 0 to 2, .* row 5, column 1 .* has 3;"):
        model.step(Batch(ROWS, labels))


class MyError(Exception):
    """A user's exception."""


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, TypeError, IndexError, MyError])
@pytest.mark.parametrize("where", ["loss", "forward"])
def test_exception_of_user_code_is_unchanged(kind: Any, where: str) -> None:
    class Refusing(nn.Linear):
        def forward(self, x: Any) -> Any:
            if where == "forward":
                raise kind("my own words")
            return super().forward(x)

    def loss(output: Any, target: Any) -> Any:
        raise kind("my own words")

    model = TorchModel(Refusing(4, 3), loss, SGD)
    model.bind(model.initial())
    with pytest.raises(kind) as caught:
        model.step(Batch(ROWS, TARGETS))
    assert (type(caught.value), str(caught.value)) == (kind, "my own words")


@pytest.mark.parametrize("loss", [nn.KLDivLoss(reduction="batchmean"),
                                  partial(functional.kl_div, reduction="batchmean")])  # fmt: skip
def test_batchmean_loss_is_weighted_by_rows(loss: Any) -> None:
    shares = np.abs(TARGETS) / np.abs(TARGETS).sum(axis=1, keepdims=True)
    module = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
    model = TorchModel(module, loss, SGD)
    model.bind(model.initial())
    plain, _ = model.loss(Batch(ROWS, shares))
    even, weight = model.loss(Batch(ROWS, shares, np.full(8, 0.5, np.float32)))
    assert even / weight == pytest.approx(plain / 8, rel=1e-5)


def test_custom_step_may_return_numpy_number_as_loss() -> None:
    model = TorchModel(nn.Linear(4, 3), None, SGD, step=lambda *given: np.float32(0.5))
    model.bind(model.initial())
    assert model.step(Batch(ROWS, TARGETS)) == 0.5


# -- optimizers, schedulers, devices ---------------------------------------------------------------


class CountingSgd(optim.SGD):
    """An optimizer whose state has a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step()


def test_optimizer_state_without_parameter_is_carried_over() -> None:
    """An optimizer's state that belongs to no parameter is part of the model's state."""
    model = TorchModel(nn.Linear(4, 3), mse, partial(CountingSgd, lr=0.1))
    one, _ = load_on_executor(model)
    other, _ = load_on_executor(model)
    one.step(Batch(ROWS, TARGETS))
    other.load_updater_state(one.updater_state())
    other.step(Batch(ROWS, TARGETS))
    assert other.updater_state()["shared/steps"] == 2


def sparse(optimizer: Any, **options: Any) -> tuple[TorchModel, np.ndarray]:
    """Return a model with an embedding, by default with sparse gradients, and its parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(9, 3, sparse=options.pop("sparse", True)), nn.Linear(3, 3))
    model = TorchModel(module, mse, optimizer, **options)
    params = model.initial()
    model.bind(params)
    return model, params


def test_sparse_gradients_are_clipped_like_dense_ones() -> None:
    (one, ours), (other, wanted) = (sparse(SGD, clip_norm=0.01, sparse=s) for s in (True, False))
    rows = np.array([1, 1, 4, 4, 4, 7, 2, 2])
    one.step(Batch(rows, TARGETS))
    other.step(Batch(rows, TARGETS))
    np.testing.assert_allclose(ours, wanted, atol=1e-6)


def test_sparse_gradient_error_names_optimizers_that_accept_them() -> None:
    model, _ = sparse(optim.Adam)
    with pytest.raises(UsageError, match=r"Adam and sparse gradients.*SGD and Adagrad"):
        model.step(Batch(CLASSES, TARGETS))


def test_too_short_schedule_error_explains_scheduler_step() -> None:
    one_cycle = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=2)
    model, _ = load_on_executor(TorchModel(nn.Linear(4, 3), mse, SGD, scheduler=one_cycle))
    for _ in range(2):
        model.step(Batch(ROWS, TARGETS))
    with pytest.raises(UsageError, match=r"OneCycleLR.*once after each minibatch of the fit"):
        model.step(Batch(ROWS, TARGETS))
    with pytest.raises(UsageError, match=r"from the optimizer alone.*functools\.partial"):
        TorchModel(nn.Linear(4, 3), mse, SGD, scheduler=optim.lr_scheduler.StepLR)


def test_gpu_assigned_by_spark_is_mapped_to_visible_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_device(None, None) == torch.device("cpu")
    assert choose_device(None, 1) == choose_device("cuda", 1) == torch.device("cuda:1")
    assert choose_device("cuda:0", 1) == torch.device("cuda:0")
    assert choose_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(UsageError, match=r"'cuda:5'.*sees 2 GPUs.*CUDA_VISIBLE_DEVICES=None"):
        choose_device(None, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert choose_device(None, 5) == torch.device("cuda:1")


def test_outputs_whose_width_depends_on_longest_row_are_refused() -> None:
    """Outputs as wide as the longest row differ in width between slices of the rows."""

    class Longest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return self.scale * x[:, : int((x != 0).sum(dim=1).max())]

    model = TorchModel(Longest(), loss=nn.MSELoss(), optimizer=lambda p: optim.SGD(p, lr=0.1))
    model.bind(model.initial())
    features = np.zeros((1500, 4), np.float32)
    features[0] = 1
    features[1200, :2] = 1
    with pytest.raises(UsageError, match=r"returns \[4\] for some rows and \[2\] for others"):
        model.predict(features)
