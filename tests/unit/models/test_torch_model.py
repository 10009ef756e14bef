"""Tests of TorchModel: the module's parameters lie in the flat vector, and steps equal torch's."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Buffered, Exporting, FlatModel, Measured, Placeable

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.torch import TorchBatch, TorchModel  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.125)
CHANCE = np.random.default_rng(0)
FEATURES = CHANCE.normal(size=(24, 6)).astype(np.float32)
CLASSES = CHANCE.integers(0, 3, 24)
VALUES = CHANCE.normal(size=(24, 3)).astype(np.float32)
BATCH = Batch(FEATURES, CLASSES)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def bound(model: TorchModel) -> np.ndarray:
    params = model.initial()
    model.bind(params)
    return params


def train_with_torch(module: nn.Module, step: Any, steps: int = 3) -> np.ndarray:
    """Train the module in a plain loop of torch; return its parameters."""
    optimizer = SGD([p for p in module.parameters() if p.requires_grad])
    for _ in range(steps):
        optimizer.zero_grad()
        step(module)
        optimizer.step()
    return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


def plain_step(module: nn.Module) -> None:
    output = module(torch.from_numpy(FEATURES))
    functional.cross_entropy(output, torch.from_numpy(CLASSES)).backward()


def test_torch_model_implements_all_protocols_and_names_parameters() -> None:
    """TorchModel implements all protocols of models, and names each parameter."""
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), SGD)
    for protocol in (FlatModel, Buffered, Exporting, Measured, Placeable):
        assert isinstance(model, protocol)
    assert model.n_params == 6 * 5 + 5 + 5 * 3 + 3
    assert [model.layer_of(i) for i in (0, 30, 35, 52)] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    with pytest.raises(IndexError):
        model.layer_of(53)


def test_steps_in_bound_memory_equal_torch_loop() -> None:
    wanted = train_with_torch(mlp(), plain_step)
    module = mlp()
    model = TorchModel(module, nn.CrossEntropyLoss(), SGD)
    params = bound(model)
    losses = [model.step(BATCH) for _ in range(3)]
    assert losses[2] < losses[0]
    np.testing.assert_array_equal(params, wanted)
    params += 1  # as a remote update does
    assert module[0].weight[0, 0].item() == params[0]
    assert all(np.shares_memory(p.detach().numpy(), params) for p in module.parameters())


def test_module_keeps_its_parameter_objects_and_keys() -> None:
    module = mlp()
    weight, keys = module[0].weight, list(module.state_dict())
    model = TorchModel(module, nn.CrossEntropyLoss(), SGD)
    bound(model)
    model.step(BATCH)
    assert model.module is module
    assert module[0].weight is weight
    assert list(module.state_dict()) == keys


class TiedModule(nn.Module):
    """Encoder and decoder share one weight; ``frozen`` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(6, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.frozen(self.decoder(torch.tanh(self.encoder(x))))


def test_tied_parameters_are_stored_once_and_frozen_ones_unchanged() -> None:
    torch.manual_seed(1)
    module = TiedModule()
    wanted = train_with_torch(copy.deepcopy(module), plain_step)
    model = TorchModel(module, functional.cross_entropy, SGD)
    assert model.n_params == 36 + 21
    params = bound(model)
    for _ in range(3):
        model.step(BATCH)
    np.testing.assert_array_equal(params, wanted)
    np.testing.assert_array_equal(params[36:], model.initial()[36:])
    assert (params[:36] != model.initial()[:36]).any()
    travelled = pickle.loads(pickle.dumps(model))
    travelled.bind(params)
    assert travelled.module.decoder.weight is travelled.module.encoder.weight
    assert not travelled.module.frozen.weight.requires_grad


def test_parameter_groups_have_own_learning_rates() -> None:
    """A parameter group with learning rate 0 does not change."""

    def groups(named: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"params": [p for name, p in named.items() if name.endswith("weight")], "lr": 0.25},
            {"params": [p for name, p in named.items() if name.endswith("bias")], "lr": 0.0},
        ]

    model = TorchModel(mlp(), functional.cross_entropy, SGD, groups=groups)
    params = bound(model)
    model.step(BATCH)
    moved = {model.layer_of(int(i)) for i in np.flatnonzero(params != model.initial())}
    assert moved == {"0.weight", "2.weight"}


@pytest.mark.parametrize("parts", [2, 5, 24, 100])
def test_accumulated_step_equals_whole_step(parts: int) -> None:
    """A step in several parts gives the parameters of a whole step."""
    whole, cut = (
        TorchModel(mlp(), functional.cross_entropy, SGD, accumulate=n) for n in (1, parts)
    )
    one, other = bound(whole), bound(cut)
    weights = np.arange(24, dtype=np.float32)
    for batch in (BATCH, Batch(FEATURES, CLASSES, weights)):
        assert whole.step(batch) == pytest.approx(cut.step(batch), rel=1e-5)
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
@pytest.mark.parametrize("weights", [None, np.repeat(np.float32([0, 1, 3]), 8)])
@pytest.mark.parametrize("options", [{"weight": torch.tensor([1.0, 9.0, 0.1])}, {}])
def test_accumulated_parts_are_weighted_by_their_labels(
    options: Any, weights: Any, kind: Any
) -> None:
    """Accumulated parts are weighted by their labels; some parts have only ignored labels."""
    loss = nn.CrossEntropyLoss(ignore_index=1, **options)
    labels = CLASSES.astype(kind)
    labels[8:13] = 1
    whole, cut = (TorchModel(mlp(), loss, SGD, accumulate=n) for n in (1, 8))
    one, other = bound(whole), bound(cut)
    batch = Batch(FEATURES, labels, weights)
    assert cut.step(batch) == pytest.approx(whole.step(batch), rel=1e-5)
    np.testing.assert_allclose(one, other, atol=1e-6)
    nothing = Batch(FEATURES, np.ones(24, kind), weights)
    assert cut.step(nothing) == whole.step(nothing) == 0


def test_invalid_label_in_later_accumulated_part_is_refused() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    model = TorchModel(mlp(), loss, SGD, accumulate=3)
    bound(model)
    labels = CLASSES.copy()
    labels[20] = 7
    with pytest.raises(UsageError, match="labels must be 0 to 2"):
        model.step(Batch(FEATURES, labels))


def test_gradient_is_clipped_to_clip_norm() -> None:
    model = TorchModel(mlp(), functional.mse_loss, SGD, clip_norm=0.5)
    params = bound(model)
    model.step(Batch(FEATURES, 100 * VALUES))
    assert np.linalg.norm(params - model.initial()) == pytest.approx(0.5 * 0.125, rel=1e-4)


def test_autocast_computes_in_bfloat16_and_trains_in_float32() -> None:
    seen = []
    module = mlp()
    module[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    model = TorchModel(module, functional.cross_entropy, SGD, autocast=torch.bfloat16)
    bound(model)
    model.step(BATCH)
    assert seen == [torch.bfloat16]
    assert model.predict(FEATURES).dtype == np.float32
    assert {p.dtype for p in module.parameters()} == {torch.float32}


class TwoInputModule(nn.Module):
    """A module with two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, left: Any, right: Any) -> Any:
        return self.left(left), self.right(right)


def sum_of_losses(output: Any, target: Any) -> Any:
    labels = list(target.values()) if isinstance(target, dict) else target
    return functional.cross_entropy(output[0], labels[0]) + functional.mse_loss(
        output[1], labels[1]
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_several_inputs_and_outputs_by_position_or_name(accumulate: int) -> None:
    batches = [
        Batch((FEATURES, VALUES), (CLASSES, VALUES)),
        Batch({"right": VALUES, "left": FEATURES}, {"kind": CLASSES, "size": VALUES}),
    ]
    results = []
    for batch in batches:
        torch.manual_seed(3)
        model = TorchModel(TwoInputModule(), sum_of_losses, SGD, accumulate=accumulate)
        params = bound(model)
        model.check(batch.features, batch.labels)
        model.step(batch)
        results.append(params)
        logits, values = model.predict(batch.features)
        assert logits.shape == values.shape == (24, 3)
    np.testing.assert_array_equal(*results)


def test_custom_step_function_trains() -> None:
    """A user's step function trains, with weights; loss() then needs a loss function."""

    def step(module: Any, optimizer: Any, batch: TorchBatch) -> Any:
        assert batch.weights is not None
        optimizer.zero_grad()
        losses = functional.cross_entropy(module(batch.features), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum()
        loss.backward()
        optimizer.step()
        return loss

    model = TorchModel(mlp(), None, SGD, step=step)
    params = bound(model)
    before = model.step(Batch(FEATURES, CLASSES, np.full(24, 1 / 24, np.float32)))
    assert model.step(Batch(FEATURES, CLASSES, np.full(24, 1 / 24, np.float32))) < before
    assert (params != model.initial()).any()
    with pytest.raises(UsageError, match="no loss: pass loss="):
        model.loss(BATCH)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (nn.CrossEntropyLoss(), CLASSES),
        (partial(functional.cross_entropy, label_smoothing=0.1), CLASSES),
        (nn.MSELoss(), VALUES),
        (
            lambda output, target, weights=None: (
                functional.cross_entropy(output, target)
                if weights is None
                else (weights * functional.cross_entropy(output, target, reduction="none")).sum()
                / weights.sum()
            ),
            CLASSES,
        ),
    ],
)
def test_row_of_weight_two_equals_two_rows(loss: Any, labels: Any) -> None:
    rows = np.array([0, 1, 1, 3])
    once, twice = TorchModel(mlp(), loss, SGD), TorchModel(mlp(), loss, SGD)
    one, other = bound(once), bound(twice)
    weighted = Batch(FEATURES[:4], labels[:4], np.array([1, 2, 0, 1], np.float32))
    assert once.loss(weighted)[1] == 4.0
    assert once.step(weighted) == pytest.approx(twice.step(Batch(FEATURES[rows], labels[rows])))
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_row_weights_are_refused_if_loss_takes_none() -> None:
    model = TorchModel(mlp(), lambda output, target: (output**2).mean(), SGD)
    bound(model)
    with pytest.raises(UsageError, match="loss takes none: give it a parameter `weights`"):
        model.step(Batch(FEATURES, CLASSES, np.ones(24, np.float32)))


def test_scheduler_with_step_interval_steps_per_minibatch() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model = TorchModel(
        mlp(), functional.cross_entropy, SGD, scheduler=schedule, scheduler_interval="step"
    )
    bound(model)
    rates = []
    for _ in range(5):
        model.step(BATCH)
        rates.append(model.updater_state()["groups/0/lr"])
    assert rates == [0.125, 0.0625, 0.0625, 0.03125, 0.03125]


def test_reduce_on_plateau_receives_loss_of_each_minibatch() -> None:
    """ReduceLROnPlateau steps with each minibatch's loss."""
    schedule = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    still = partial(torch.optim.SGD, lr=0.0)
    model = TorchModel(
        mlp(), functional.cross_entropy, still, scheduler=lambda made: schedule(made, eps=-1)
    )
    bound(model)
    for _ in range(3):
        model.step(BATCH)
    assert model.updater_state()["scheduler/num_bad_epochs"] == 0  # reset by a reduction
    assert model.updater_state()["scheduler/last_epoch"] == 3


def test_prediction_restores_training_modes_of_layers() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    module[0].eval()  # frozen by its owner
    model = TorchModel(module, functional.cross_entropy, SGD)
    bound(model)
    before = model.buffers_bytes()
    np.testing.assert_array_equal(model.predict(FEATURES), model.predict(FEATURES))
    assert model.loss(BATCH) == model.loss(BATCH)
    model.step(BATCH)
    assert [part.training for part in module] == [False, True, True]
    assert model.buffers_bytes() == before


def test_concurrent_predictions_are_both_in_evaluation_mode() -> None:
    """While a thread predicts, another thread waits, and both predict in evaluation mode."""
    is_second_in, is_first_over = threading.Event(), threading.Event()
    modes: list[bool] = []

    class Meeting(nn.Linear):
        def forward(self, x: Any) -> Any:
            if threading.current_thread() is second:
                is_second_in.set()
                is_first_over.wait(60)
            elif second.ident is None:
                second.start()
                is_second_in.wait(0.2)  # the second thread must not enter now
            modes.append(self.training)
            return super().forward(x)

    model = TorchModel(Meeting(6, 3), functional.cross_entropy, SGD)
    second = threading.Thread(target=model.predict, args=(FEATURES,))
    bound(model)
    model.predict(FEATURES)
    is_first_over.set()
    second.join()
    assert (modes, model.module.training) == ([False, False], True)


class MergingLayer(nn.Linear):
    """Like a LoRA layer: its evaluation mode merges the trained parameter into the frozen one."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.added = nn.Parameter(torch.ones(3, 6))
        self.weight.requires_grad = False
        self.is_merged = False

    def train(self, mode: bool = True) -> MergingLayer:
        """Set the mode; merge in evaluation mode, and undo it in training mode."""
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += self.added.data * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Any) -> Any:
        """Return the outputs, with the merged weight if there is one."""
        weight = self.weight if self.is_merged else self.weight + self.added
        return functional.linear(x, weight, self.bias)


def test_module_that_merges_weights_in_eval_trains_after_validation() -> None:
    """A module whose train() and eval() change weights trains correctly after a validation."""
    model = TorchModel(nn.Sequential(MergingLayer()), functional.cross_entropy, SGD)
    bound(model)
    expected = model.predict(FEATURES)
    model.loss(BATCH)
    model.bind(model.initial())  # as before each prediction on the driver
    np.testing.assert_allclose(model.predict(FEATURES), expected, rtol=1e-5)
    before = model.module[0].added.detach().clone()
    model.step(BATCH)
    assert not torch.equal(model.module[0].added, before)


def normalized_nll(output: Any, target: Any) -> Any:
    """A loss of classes."""
    return functional.nll_loss(output, target) / output.shape[-1]


def gaussian_nll(output: Any, target: Any) -> Any:
    """A user's loss of values: the negative log likelihood of a normal distribution."""
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (nn.CrossEntropyLoss(), "logits"),
        (partial(functional.cross_entropy, label_smoothing=0.1), "logits"),
        (nn.BCEWithLogitsLoss(), "logits"),
        (nn.NLLLoss(), "logits"),
        (type("Weighted", (nn.NLLLoss,), {})(), "logits"),
        (functional.nll_loss, "logits"),
        (nn.MultiMarginLoss(), "logits"),
        (partial(functional.multi_margin_loss, margin=2.0), "logits"),
        (functional.mse_loss, "values"),
        (nn.PoissonNLLLoss(), "values"),
        (functional.poisson_nll_loss, "values"),
        (type("LogPoisson", (nn.PoissonNLLLoss,), {})(), "values"),
        (nn.GaussianNLLLoss(), "values"),
        (partial(functional.gaussian_nll_loss, var=torch.ones(1)), "values"),
        (gaussian_nll, "values"),
        (normalized_nll, "logits"),
    ],
)
def test_output_kind_follows_from_loss_unless_given(loss: Any, kind: str) -> None:
    """The kind of outputs follows from the loss, unless it is given."""
    assert TorchModel(mlp(), loss, SGD).outputs == kind
    assert TorchModel(mlp(), loss, SGD, outputs="probabilities").outputs == "probabilities"


def softmax_cross_entropy_with_logits(output: Any, target: Any) -> Any:
    """A user's loss of classes with TensorFlow's name."""
    return functional.cross_entropy(output, target)


def sigmoid_cross_entropy_with_logits(output: Any, target: Any) -> Any:
    """A user's loss of labels that are true or false, with TensorFlow's name."""
    return functional.binary_cross_entropy_with_logits(output, target)


@pytest.mark.parametrize(
    ("loss", "per_label"),
    [
        (nn.BCEWithLogitsLoss(), True),
        (functional.binary_cross_entropy, True),
        (nn.MultiLabelSoftMarginLoss(), True),
        (sigmoid_cross_entropy_with_logits, True),
        (softmax_cross_entropy_with_logits, False),
        (nn.CrossEntropyLoss(), False),
    ],
)
def test_per_label_follows_from_loss(loss: Any, per_label: bool) -> None:
    model = TorchModel(mlp(), loss, SGD)
    assert (model.per_label, model.outputs) == (
        per_label,
        "probabilities" if loss is functional.binary_cross_entropy else "logits",
    )


def test_prediction_of_many_rows_equals_that_of_few() -> None:
    model = TorchModel(mlp(), functional.cross_entropy, SGD)
    bound(model)
    many = np.tile(FEATURES, (100, 1))
    np.testing.assert_allclose(model.predict(many)[-24:], model.predict(FEATURES), atol=1e-6)
    assert model.predict(FEATURES[:0]).shape == (0, 3)
