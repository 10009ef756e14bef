"""Tests of PyTorch modules on real executors."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import AdaptiveThreshold, FixedThreshold, SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from pyspark import cloudpickle  # noqa: E402
from torch import nn  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in workers; two may wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def train(spark: Any) -> Any:
    """A function that fits on four workers; keywords are SharedTrainingMaster's."""

    def run(model: TorchModel, rows: list[Any], epochs: int, **options: Any) -> SparkNetwork:
        master = SharedTrainingMaster(**{"threshold": AdaptiveThreshold(1e-3), **options})
        network = SparkNetwork(spark, model, master, progress=False)
        summary = network.fit(spark.sparkContext.parallelize(rows, 4), epochs=epochs)
        assert summary.replicas_equal, summary.hashes
        assert summary.minibatches == summary.minibatches_expected
        assert summary.examples == epochs * len(rows)
        network.close()
        return network

    return run


def train_in_one_process(
    model: TorchModel, features: Any, labels: Any, epochs: int, rows: int
) -> TorchModel:
    """Train the model in this process, and return it."""
    model.bind(model.initial())
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))
        for start in range(0, len(order), rows):
            index = order[start : start + rows]
            model.step(Batch(features[index], labels[index]))
    return model


def accuracy(model: Any, features: Any, labels: Any) -> float:
    return float((model.predict(features).argmax(1) == labels).mean())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=1e-3)


def test_perceptron_learns_and_loads_after_saving(train, digits, spark, tmp_path):
    """A trained module is saved; torch alone reads the file, and so does SparkNetwork.load."""
    module = mlp()
    network = train(TorchModel(module, nn.CrossEntropyLoss(), SGD), digits.rows(), 12)
    features, labels = digits.held_out
    assert accuracy(network, features, labels) > 0.9
    assert network.module is module
    assert list(network.module.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    network.save(tmp_path / "digits.npz")
    again = mlp()
    again.load_state_dict(torch.load(tmp_path / "digits.npz.pt", weights_only=True))
    with torch.no_grad():
        outputs = again(torch.from_numpy(features)).numpy()
    np.testing.assert_array_equal(outputs, network.model.predict(features))
    with pytest.raises(UsageError, match="saved without its code"):
        SparkNetwork.load(tmp_path / "digits.npz", spark)
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), SGD)
    loaded = SparkNetwork.load(tmp_path / "digits.npz", spark, model=model)
    np.testing.assert_array_equal(loaded.parameters, network.parameters)
    other = TorchModel(nn.Linear(64, 10), nn.CrossEntropyLoss(), SGD)
    with pytest.raises(UsageError, match=r"has parameter \['0.weight'"):
        SparkNetwork.load(tmp_path / "digits.npz", spark, model=other)


def test_momentum_and_scheduler_adapt_to_all_workers(train, spark, make_network, digits):
    """Momentum and scheduler adapt to the minibatches of all workers, in two fits."""
    warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.01, total_iters=80)
    moving = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    made = TorchModel(mlp(), nn.CrossEntropyLoss(), moving, scheduler=warm_up)
    network = make_network(made)
    data = spark.sparkContext.parallelize(digits.rows(), 4)
    summary = network.fit(data, epochs=4)
    assert summary.horizons == {
        "workers": 4,
        "momentum": "0.9 -> 0.6561",
        "scheduler": "steps by the fit's minibatches",
    }
    assert "4 workers: momentum 0.9 -> 0.6561, scheduler steps" in summary.table()
    again = network.fit(data, epochs=2)
    assert again.horizons == summary.horizons
    assert not [text for text in again.warnings if "own steps" in text]
    network.close()
    assert accuracy(network, *digits.held_out) > 0.7  # after 270 minibatches


def test_fit_warns_if_step_changes_no_parameter(spark, make_network, digits):
    """A fit warns if the user's own step changes no parameter."""
    model = TorchModel(mlp(), None, SGD, step=lambda module, optimizer, batch: 0.5)
    network = make_network(model)
    summary = network.fit(spark.sparkContext.parallelize(digits.rows()[:256], 4), epochs=1)
    network.close()
    assert "no minibatch changed a parameter" in summary.warnings[-1], summary.warnings


def test_network_without_torch_model_has_no_module(make_network):
    with pytest.raises(UsageError, match=r"DenseNetwork has no module.*network\.parameters"):
        _ = make_network(DenseNetwork([2, 2])).module


# -- a convolutional network with BatchNorm and dropout --------------------------------------------

EPOCHS = 20


def convolutions(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


@pytest.mark.slow
def test_four_workers_train_batch_norm_and_dropout_as_well_as_one_process(train, digits):
    features, labels = digits.held_out
    ones, fours = [], []
    for seed in range(3):
        model = TorchModel(convolutions(seed), nn.CrossEntropyLoss(), ADAM)
        twin = copy.deepcopy(model)
        ones.append(
            accuracy(
                train_in_one_process(twin, digits.features, digits.labels, EPOCHS, 32),
                features,
                labels,
            )
        )
        options = {"rng_seed": seed, "threshold": FixedThreshold(5e-4), "max_lead": 2}
        network = train(model, digits.rows(), EPOCHS, **options)
        fours.append(accuracy(network.model, features, labels))
    assert np.mean(fours) >= np.mean(ones) - 0.005, (fours, ones)


# -- a transformer over characters -----------------------------------------------------------------

WINDOW = 32  # characters


class Characters(nn.Module):
    """A transformer that predicts next characters; input and output embedding are the same."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.place = nn.Parameter(torch.randn(WINDOW, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embed.weight
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Any) -> Any:
        seen = self.embed(text.long()) + self.place
        return self.head(self.body(seen, mask=self.mask, is_causal=True)).transpose(1, 2)


def text_of(module: Any, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return characters [windows, WINDOW] of the module's source, and the next of each."""
    source = Path(module.__file__).read_text(encoding="utf-8").encode("ascii", "replace")
    codes = np.frombuffer(source, np.uint8).astype(np.int64)[: windows * WINDOW + 1]
    return codes[:-1].reshape(-1, WINDOW), codes[1:].reshape(-1, WINDOW)


@pytest.mark.slow
def test_four_workers_train_transformer_like_one_process(train):
    """Four workers reduce a transformer's loss by at least 0.75 of what one process does."""
    text, following = text_of(ast, 512)
    torch.manual_seed(0)
    fast = partial(torch.optim.AdamW, lr=2e-3)
    model = TorchModel(Characters(), nn.CrossEntropyLoss(), fast, clip_norm=1.0)
    one = train_in_one_process(copy.deepcopy(model), text, following, 10, 8)
    rows = list(zip(text, following, strict=True))
    options = {"batch_size_per_worker": 8, "threshold": FixedThreshold(3e-3), "max_lead": 2}
    network = train(model, rows, 10, **options)
    whole = Batch(text, following)
    wanted, loss, fresh = (
        m.loss(whole)[0] / len(text)
        for m in (one, network.model, bind_initial(copy.deepcopy(model)))
    )
    assert loss < wanted + 0.25 * (fresh - wanted), (loss, wanted, fresh)
    assert network.module.head.weight is network.module.embed.weight


def bind_initial(model: TorchModel) -> TorchModel:
    model.bind(model.initial())
    return model


# -- embeddings, of which each batch touches a few rows --------------------------------------------

USERS, ITEMS = 300, 200


class Ratings(nn.Module):
    """A module whose rating is the product of two embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 4, sparse=True)
        self.items = nn.Embedding(ITEMS, 4, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, pair: Any) -> Any:
        user, item = pair.long().unbind(1)
        return (self.users(user) * self.items(item)).sum(1)


def test_sparse_embeddings_change_only_rows_in_data(train):
    """Sparse embeddings change in exactly the rows that occur in the data."""
    chance = np.random.default_rng(0)
    users, items = chance.normal(size=(USERS, 2)), chance.normal(size=(ITEMS, 2))
    pairs = np.stack([chance.integers(0, USERS // 2, 4000), chance.integers(0, ITEMS, 4000)], 1)
    clean = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1)
    ratings = (clean + 0.3 * chance.normal(size=len(pairs))).astype(np.float32)  # noise: loss > 0
    torch.manual_seed(0)
    model = TorchModel(Ratings(), nn.MSELoss(), partial(torch.optim.SGD, lr=1.0))
    one = train_in_one_process(copy.deepcopy(model), pairs, ratings, 12, 32)
    rows = list(zip(pairs, ratings, strict=True))
    network = train(model, rows, 12, threshold=FixedThreshold(0.03))
    whole = Batch(pairs, ratings)
    wanted, loss = (m.loss(whole)[0] / len(pairs) for m in (one, network.model))
    assert wanted < 0.1 * float(np.square(ratings).mean())
    assert loss < 1.5 * wanted, (loss, wanted)
    moved = np.abs(network.parameters - model.initial()) > 1e-6  # the grid rounds by less
    assert moved[: USERS * 4].reshape(USERS, 4).any(1).tolist() == [
        n < USERS // 2 for n in range(USERS)
    ]


class ScheduledModule(nn.Module):
    """A module with gradient 1 in each step; ``total`` is the length that its scheduler got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.weight + 0 * x[:, :1]


def falling_step(module: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = module(batch.features).mean()
    loss.backward()
    optimizer.step()
    module.total.fill_(module.weight.total)
    return loss


def make_falling_scheduler(optimizer: Any, total_steps: int) -> Any:
    optimizer.param_groups[0]["params"][0].total = total_steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)


@pytest.mark.slow
def test_scheduler_spans_minibatches_of_all_workers(spark: Any) -> None:
    """The scheduler's length is the fit's number of minibatches; partitions differ in size."""
    rows = [(np.zeros(2, np.float32), 0) for _ in range(150)]
    parts = spark.sparkContext.parallelize(rows, 4).coalesce(3)  # one has the rows of two
    sgd = partial(torch.optim.SGD, lr=0.01)
    model = TorchModel(
        ScheduledModule(), None, sgd, scheduler=make_falling_scheduler, step=falling_step
    )
    master = SharedTrainingMaster(
        threshold=FixedThreshold(1e-3), batch_size_per_worker=4, repartition="never"
    )
    with SparkNetwork(spark, model, master, progress=False) as network:
        summary = network.fit(parts, epochs=3)
        assert len({worker.steps for worker in summary.per_worker}) > 1
        assert int(network.module.total) == summary.minibatches_expected
