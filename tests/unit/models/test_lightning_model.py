"""Tests that LightningModel trains on one worker as Lightning's own Trainer, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, EpochAware, FitLength, Share

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
pl = pytest.importorskip("pytorch_lightning", reason="pip install 'sparkstrom[lightning]'")
cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from sparkstrom.models.lightning import LightningModel  # noqa: E402

CHANCE = np.random.default_rng(3)
ROWS = CHANCE.normal(size=(48, 6)).astype(np.float32)
CLASSES = CHANCE.integers(0, 3, 48)
BATCH, BATCHES, EPOCHS = 8, 6, 3


class Net(pl.LightningModule):
    """A usual module: hyperparameters, BatchNorm, a metric, logging, an optimizer."""

    def __init__(self, width: int = 5, optimization: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.first, self.norm = nn.Linear(6, self.hparams.width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.optimization = optimization
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.norm(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        assert x.device == self.device
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log_dict({"loss": loss, "accuracy": self.accuracy}, prog_bar=True)
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", functional.cross_entropy(self(x), y), on_epoch=True)

    def configure_optimizers(self) -> Any:
        if self.optimization is not None:
            return self.optimization(self.parameters())
        return optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def sgd(parameters: Any) -> Any:
    return optim.SGD(parameters, lr=0.5)


def make_step_lr(made: Any, every: int = 1) -> Any:
    return optim.lr_scheduler.StepLR(made, every, gamma=0.5)


def by_epoch(parameters: Any) -> Any:
    made = sgd(parameters)
    return [made], [make_step_lr(made)]


def by_step(parameters: Any) -> Any:
    made = sgd(parameters)
    scheduler = {"scheduler": make_step_lr(made, 2), "interval": "step", "name": "lr"}
    return {"optimizer": made, "lr_scheduler": scheduler}


def by_other_steps(parameters: Any) -> Any:
    made = sgd(parameters)
    scheduler = {"scheduler": make_step_lr(made), "interval": "step", "frequency": np.int64(3)}
    return {"optimizer": made, "lr_scheduler": scheduler}


def by_other_epoch(parameters: Any) -> Any:
    made = sgd(parameters)
    return [made], [{"scheduler": make_step_lr(made), "frequency": 2}]


def train_with_lightning(net: Any, **options: Any) -> Any:
    """Train with Lightning's Trainer on minibatches in the rows' order; return the module."""
    data = TensorDataset(torch.from_numpy(ROWS), torch.from_numpy(CLASSES))
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, **quiet, **options
    )
    trainer.fit(net, DataLoader(data, BATCH))
    return net


def batch_at(index: int) -> Batch:
    cut = slice(index * BATCH, (index + 1) * BATCH)
    return Batch(ROWS[cut], CLASSES[cut])


def steps(model: LightningModel, told: Callable[[int], None] = lambda done: None) -> None:
    """Train on the same minibatches as a worker; call ``told`` before each step."""
    assert isinstance(model, EpochAware)
    for done in range(EPOCHS * BATCHES):
        epoch, index = divmod(done, BATCHES)
        model.set_position(epoch, index, BATCHES)
        told(done)
        model.step(batch_at(index))


def load_on_executor(model: LightningModel) -> tuple[LightningModel, np.ndarray]:
    """Return the model as an executor gets it, and the parameters that it is bound to."""
    twin, params = cloudpickle.loads(cloudpickle.dumps(model)), model.initial()
    twin.place(Share(threads=1, gpu=None, seed=1))
    twin.bind(params)
    return twin, params


def made(optimization: Any = None) -> Net:
    torch.manual_seed(0)
    return Net(optimization=optimization)


class OneCycle(Net):
    """A module with a schedule for the length of the fit, as in Lightning's documentation."""

    def configure_optimizers(self) -> Any:
        made = optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        scheduler = optim.lr_scheduler.OneCycleLR(made, max_lr=0.5, total_steps=total)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_estimated_stepping_batches_equals_trainer() -> None:
    """trainer.estimated_stepping_batches is the fit's length; OneCycleLR trains as there."""
    torch.manual_seed(0)
    alone = train_with_lightning(OneCycle())
    torch.manual_seed(0)
    model, params = load_on_executor(LightningModel(OneCycle()))
    model.set_fit_length(FitLength(EPOCHS, EPOCHS * BATCHES))
    assert alone.trainer.estimated_stepping_batches == EPOCHS * BATCHES
    steps(model, lambda n: model.keep_pace(1, n, n))
    wanted = np.concatenate([p.detach().numpy().reshape(-1) for p in alone.parameters()])
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimization", "options", "trainers"),
    [
        (None, {}, {}),
        (sgd, {}, {}),
        (by_epoch, {}, {}),
        (by_step, {}, {}),
        (by_other_steps, {}, {}),
        (by_other_epoch, {}, {}),
        (sgd, {"clip_norm": 0.05}, {"gradient_clip_val": 0.05}),
        (sgd, {"autocast": "bfloat16"}, {"precision": "bf16-mixed"}),
        (partial(optim.AdamW, lr=0.01), {}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_step_equals_lightning_trainer(optimization: Any, options: Any, trainers: Any) -> None:
    """Parameters, buffers and positions equal the Trainer's, with keep_pace and without."""
    alone = train_with_lightning(made(optimization), **trainers)
    for fit_tells in (True, False):
        model, params = load_on_executor(LightningModel(made(optimization), **options))
        steps(model, lambda n, m=model, t=fit_tells: m.keep_pace(1, n, n) if t else None)
        wanted = np.concatenate([p.detach().numpy().reshape(-1) for p in alone.parameters()])
        np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)
        for name, buffer in alone.named_buffers():
            np.testing.assert_allclose(model.module.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
        assert model.module.seen == alone.seen


def test_user_module_has_trained_parameters_and_no_added_attributes() -> None:
    """The user's module has the trained parameters, and no attributes of ours."""
    net = made()
    model = LightningModel(net)
    params = model.initial()
    model.bind(params)
    model.step(batch_at(0))
    assert model.module is net
    np.testing.assert_array_equal(params[:30], net.first.weight.detach().numpy().reshape(-1))
    assert net.hparams.width == 5
    assert net._trainer is None
    assert "log" not in vars(net)
    assert model.describe()["kind"] == "lightning"
    assert model.layer_of(0) == "first.weight"
    with pytest.raises(UsageError, match=r"Net was saved without its code.*LightningModel"):
        LightningModel.from_description(model.describe())


def test_four_workers_raise_momentum_to_fourth_power() -> None:
    model, params = load_on_executor(LightningModel(made()))
    alone, own = load_on_executor(LightningModel(made()))
    for model_, workers in ((model, 4), (alone, 1)):
        for n in range(3):
            model_.keep_pace(workers, n * workers, n * workers)
            model_.step(batch_at(n))
    assert model.horizons(4)["momentum"] == "0.9 -> 0.6561"
    assert not np.allclose(params, own)


@pytest.mark.parametrize(("optimizer", "adaptive"), [(None, False), (optim.Adam, True)])
def test_adaptive_optimizer_of_module_is_recognized(optimizer: Any, adaptive: bool) -> None:
    """SGD with momentum, the module's default, is not adaptive; Adam is."""
    assert LightningModel(made(optimizer)).has_adaptive_optimizer() == adaptive


@pytest.mark.parametrize(
    ("optimization", "what"), [(by_epoch, "by epochs"), (by_step, "by the fit's minibatches")]
)
def test_horizons_has_unit_of_schedule(optimization: Any, what: str) -> None:
    """horizons() tells whether a schedule steps by epochs or by minibatches."""
    model, _ = load_on_executor(LightningModel(made(optimization)))
    assert what in model.horizons(2)["scheduler"]


def test_another_worker_continues_from_optimizer_state() -> None:
    (model, params), (other, others) = (
        load_on_executor(LightningModel(made(by_step))) for _ in "ab"
    )
    for n in range(3):
        model.step(batch_at(n))
    np.copyto(others, params)
    other.load_updater_state(model.updater_state())
    other.load_buffers_bytes(model.buffers_bytes())
    for one in (model, other):
        one.keep_pace(1, 3, 3)
        one.step(batch_at(3))
    np.testing.assert_array_equal(params, others)


# -- batches, measuring, predicting ----------------------------------------------------------------


class DictBatchNet(Net):
    def training_step(self, batch: Any) -> Any:
        return {"loss": functional.cross_entropy(self(batch["x"]), batch["y"])}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"]).softmax(dim=1)


class WeightedNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weights = batch
        losses = functional.cross_entropy(self(x), y, reduction="none")
        return (losses * weights).sum() / weights.sum()


def test_named_columns_are_passed_as_one_dict() -> None:
    """Named columns are one dict in training_step; predict_step makes the predictions."""
    torch.manual_seed(0)
    model, params = load_on_executor(LightningModel(DictBatchNet(), outputs="probabilities"))
    plain, others = load_on_executor(LightningModel(made()))
    features, labels, _ = batch_at(0)
    model.step(Batch({"x": features}, {"y": labels}))
    plain.step(Batch(features, labels))
    np.testing.assert_array_equal(params, others)
    rows = model.predict({"x": ROWS})
    assert rows.shape == (48, 3)
    np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-5)
    assert (model.outputs, plain.outputs) == ("probabilities", "logits")
    with pytest.raises(UsageError, match="x are in both features and labels"):
        model.step(Batch({"x": features}, {"x": labels}))


def test_batch_function_passes_row_weights_to_step() -> None:
    """With ``batch=``, a step gets the rows' weights; without, they are refused."""
    weights = np.arange(8, dtype=np.float32)
    torch.manual_seed(0)
    model, params = load_on_executor(LightningModel(WeightedNet(), batch=tuple))
    before = params.copy()
    model.step(batch_at(0)._replace(weights=weights))
    assert not np.array_equal(params, before)
    with pytest.raises(UsageError, match=r"rows have weights.*batch="):
        load_on_executor(LightningModel(made()))[0].step(batch_at(0)._replace(weights=weights))


def test_minibatch_of_zero_weights_changes_no_parameter() -> None:
    """A minibatch of rows that weigh 0 only counts; the hook of an epoch's end is still called."""
    ends: list[int] = []

    class Ending(WeightedNet):
        def on_train_epoch_end(self) -> None:
            ends.append(self.trainer.num_training_batches)

    torch.manual_seed(0)
    model = LightningModel(Ending(), batch=tuple)
    params = model.initial()
    model.bind(params)
    ones = np.ones(BATCH, np.float32)
    for index, weights in enumerate((ones, 0 * ones)):
        model.set_position(0, index, 2)
        before = params.copy()
        loss = model.step(batch_at(index)._replace(weights=weights))
        assert (loss == 0) == np.array_equal(params, before) == (index == 1)
    assert ends == [2]


def test_loss_is_value_logged_by_validation_step() -> None:
    """loss() is the val_loss that validation_step logs; a value that is not logged is an error."""
    model, _ = load_on_executor(LightningModel(made()))
    model.step(batch_at(0))
    total, weight = model.loss(Batch(ROWS, CLASSES))
    logits = torch.from_numpy(model.predict(ROWS))
    wanted = functional.cross_entropy(logits, torch.from_numpy(CLASSES)).item()
    assert total / weight == pytest.approx(wanted, rel=1e-5)
    assert weight == len(ROWS)
    other, _ = load_on_executor(LightningModel(made(), monitor="val_acc"))
    with pytest.raises(UsageError, match=r"logs val_loss, but not 'val_acc': log it with"):
        other.loss(batch_at(0))


def test_merged_validation_losses_are_weighted_by_rows() -> None:
    class Measured(WeightedNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            features, labels, weights = batch
            losses = functional.cross_entropy(self(features), labels, reduction="none")
            self.log("val_loss", (weights * losses).sum() / weights.sum())

    model, _ = load_on_executor(LightningModel(Measured(), batch=tuple))
    weights = np.arange(len(ROWS), dtype=np.float32)
    whole = model.loss(Batch(ROWS, CLASSES, weights))
    parts = [model.loss(Batch(ROWS[i::2], CLASSES[i::2], weights[i::2])) for i in range(2)]
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-5)
    assert whole[1] == weights.sum()
    assert model.loss(Batch(ROWS, CLASSES, np.zeros_like(weights))) == (0.0, 0.0)


def test_module_without_usable_validation_is_refused() -> None:
    """need_loss() refuses modules whose validation cannot run here."""

    class Blind(Net):
        validation_step = pl.LightningModule.validation_step

    class Late(Net):
        def on_validation_epoch_end(self) -> None: ...

    class Metric(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.accuracy)

    with pytest.raises(UsageError, match="Blind has no validation_step"):
        LightningModel(Blind()).need_loss()
    with pytest.raises(UsageError, match=r"Late.on_validation_epoch_end would not be called"):
        LightningModel(Late()).need_loss()
    with pytest.raises(UsageError, match=r"logs val_loss as a MulticlassAccuracy"):
        load_on_executor(LightningModel(Metric()))[0].loss(batch_at(0))


def test_metrics_are_reset_at_epoch_start() -> None:
    """Metrics are reset at the start of an epoch."""
    model, _ = load_on_executor(LightningModel(made()))
    steps(model)
    assert int(model.module.accuracy.update_count) == BATCHES


def test_trained_model_is_copied_with_its_module() -> None:
    """A deep copy after training predicts the same with the same parameters."""
    model, params = load_on_executor(LightningModel(made()))
    steps(model)
    twin = copy.deepcopy(model)
    assert twin.module is not model.module
    twin.bind(params.copy())
    np.testing.assert_array_equal(twin.predict(ROWS), model.predict(ROWS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_device_without_gpu_is_refused() -> None:
    """device='cuda' is refused where there is no GPU."""
    with pytest.raises(UsageError, match="device='cuda'"):
        LightningModel(made(), device="cuda").place(Share(threads=1, gpu=None, seed=0))


def test_cpu_is_used_where_spark_gives_gpu() -> None:
    model = LightningModel(made(), device="cpu")
    model.place(Share(threads=1, gpu=0, seed=0))
    assert model.cuda_device is None
