"""Tests of DenseNetwork: gradients by finite differences, accuracy on digits, refused rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork, FlatModel
from sparkstrom.models.base import Batch, Flat, State, from_description
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, RmsProp, Sgd, Updater

RATE = 2.0**-6


def bound(network: DenseNetwork) -> NDArray[np.float32]:
    params = network.initial()
    network.bind(params)
    return params


def batch_for(
    network: DenseNetwork, rows: int, random: np.random.Generator
) -> tuple[Any, dict[str, Any]]:
    """Return features, and labels of each kind: classes, one-hot, numbers."""
    features = random.normal(size=(rows, 3)).astype(np.float32)
    classes = random.integers(0, 4, rows)
    labels = {
        "classes": classes,
        "one-hot": np.eye(4, dtype=np.int64)[classes],
        "numbers": random.normal(size=(rows, 4)).astype(np.float32),
    }
    return features, labels


@pytest.mark.parametrize("hidden", ["relu", "tanh", "sigmoid", "identity"])
@pytest.mark.parametrize(
    ("loss", "labelled"),
    [("cross_entropy", "classes"), ("cross_entropy", "one-hot"), ("squared_error", "numbers")],
)
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_gradients_equal_finite_differences(
    hidden: str, loss: str, labelled: str, l2: float
) -> None:
    network = DenseNetwork([3, 7, 5, 4], hidden=hidden, loss=loss, updater=Sgd(RATE), l2=l2, seed=5)
    params = bound(network)
    features, labels = batch_for(network, 6, np.random.default_rng(11))
    start = params.copy()

    def loss_at(point: NDArray[np.float64]) -> float:
        params[:] = point
        penalty = sum(
            0.5 * l2 * float(np.square(params[i], dtype=np.float64))
            for i in range(params.size)
            if network.layer_of(i).endswith("weights")
        )
        return network.step(Batch(features, labels[labelled])) + penalty

    params[:] = start
    network.step(Batch(features, labels[labelled]))
    gradient = (start.astype(np.float64) - params) / RATE
    for i in np.random.default_rng(2).choice(start.size, 25, replace=False):
        step = np.zeros(start.size)
        step[i] = 2.0**-8
        slope = (loss_at(start + step) - loss_at(start - step)) / 2.0**-7
        assert gradient[i] == pytest.approx(slope, rel=0.02, abs=2e-3)


def digits() -> tuple[Any, Any, Any, Any]:
    features, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(features))
    features = (features[order] / 16).astype(np.float32)
    labels = labels[order]
    return features[:1437], labels[:1437], features[1437:], labels[1437:]


@pytest.mark.parametrize(
    "updater", [Sgd(0.1), Nesterov(0.01), Adam(1e-3), RmsProp(1e-3), AdaGrad(0.01)]
)
def test_every_updater_learns_digits(updater: Updater) -> None:
    features, labels, held_out, answers = digits()
    network = DenseNetwork([64, 128, 10], updater=updater, seed=1)
    bound(network)
    for epoch in range(15):
        order = np.random.default_rng(epoch).permutation(len(features))
        for rows in np.array_split(order, 45):
            network.step(Batch(features[rows], labels[rows]))
    accuracy = (network.predict(held_out).argmax(axis=1) == answers).mean()
    assert accuracy >= 0.96


def test_same_seed_gives_bitwise_equal_training() -> None:
    features, labels, _, _ = digits()
    runs = []
    for seed in (1, 1, 2):
        network = DenseNetwork([64, 16, 10], updater=Adam(), seed=seed)
        params = bound(network)
        for start in range(0, 320, 32):
            network.step(Batch(features[start : start + 32], labels[start : start + 32]))
        runs.append(params.tobytes())
    assert runs[0] == runs[1] != runs[2]


def test_loss_is_finite_for_huge_logits() -> None:
    network = DenseNetwork([1, 2], updater=Sgd(1e-9))
    params = bound(network)
    params[:] = [1e4, -1e4, 0, 0]
    one = np.ones((1, 1), np.float32)
    assert network.step(Batch(one, np.array([0]))) == 0.0
    assert network.step(Batch(one, np.array([1]))) == pytest.approx(2e4)
    assert network.predict(one).tolist() == [[1.0, 0.0]]


def test_whole_floats_are_accepted_as_classes() -> None:
    losses = []
    for labels in (np.array([2, 0]), np.array([2.0, 0.0], np.float32)):
        network = DenseNetwork([3, 4])
        bound(network)
        network.check(np.ones((2, 3)), labels)
        losses.append(network.step(Batch(np.ones((2, 3), np.float32), labels)))
    assert losses[0] == losses[1]


def test_squared_error_accepts_labels_as_column_or_vector() -> None:
    network = DenseNetwork([2, 1], loss="squared_error", updater=Sgd(1e-9))
    params = bound(network)
    params[:] = [1, 1, 0]
    features = np.array([[1, 1], [2, 2]], np.float32)
    for labels in (np.array([1.0, 4.0]), np.array([[1.0], [4.0]])):
        assert network.step(Batch(features, labels)) == pytest.approx(0.5)
    assert network.predict(features).shape == (2, 1)


def test_step_changes_bound_array_and_predict_does_not() -> None:
    network = DenseNetwork([3, 4], updater=Sgd(0.5))
    params = bound(network)
    before = params.copy()
    network.predict(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(params, before)
    network.step(Batch(np.ones((2, 3), np.float32), np.array([0, 1])))
    assert (params != before).any()


def test_pickle_has_neither_parameters_nor_updater_state() -> None:
    """A pickle has neither parameters nor updater state, and gives an equal network."""
    network = DenseNetwork([64, 300, 10], updater=Adam(0.5), seed=7, l2=0.25)
    assert isinstance(network, FlatModel)
    bound(network)
    shipped = pickle.dumps(network)
    assert len(shipped) < 1000
    copy = pickle.loads(shipped)
    assert copy.describe() == network.describe()
    np.testing.assert_array_equal(copy.initial(), network.initial())
    assert from_description(network.describe()).describe() == network.describe()


class HalfSgd(Sgd):
    """A subclass of Sgd, which workers would replace by Sgd itself."""

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return half the step."""
        return super().update(gradient, state) / 2


def test_updater_subclass_is_refused() -> None:
    with pytest.raises(UsageError, match=r"updater=HalfSgd.*one of sparkstrom.models.updaters"):
        DenseNetwork([2, 2], updater=HalfSgd(0.1))


def test_network_continues_from_loaded_updater_state() -> None:
    """A network with another's parameters and updater state takes the same step."""
    features, labels, _, _ = digits()
    one, other = (DenseNetwork([64, 10], updater=Adam()) for _ in range(2))
    params = bound(one)
    one.step(Batch(features[:32], labels[:32]))
    state = {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in one.updater_state().items()
    }
    for array in state.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False  # as it comes out of a file
    copied = params.copy()
    other.bind(copied)
    other.load_updater_state(state)
    for network in (one, other):
        network.step(Batch(features[32:64], labels[32:64]))
    np.testing.assert_array_equal(params, copied)


@pytest.mark.parametrize(
    ("state", "why"),
    [({}, "adam needs"), ({"mean": np.zeros(3), "square": np.zeros(3), "steps": 1}, "shape")],
)
def test_updater_state_of_another_network_is_refused(state: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DenseNetwork([3, 4], updater=Adam()).load_updater_state(state)


def test_layer_of_names_layer_of_each_parameter() -> None:
    network = DenseNetwork([2, 3, 2])
    names = [network.layer_of(i) for i in range(network.n_params)]
    assert names == (
        ["layer 1 weights"] * 6
        + ["layer 1 biases"] * 3
        + ["layer 2 weights"] * 6
        + ["layer 2 biases"] * 2
    )
    with pytest.raises(IndexError):
        network.layer_of(network.n_params)


ROWS = np.zeros((3, 2), np.float32)
CLASSES = np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("features", "labels", "why"),
    [
        (np.zeros((3, 5)), CLASSES, "rows have 5 features, the network takes 2"),
        (np.array([[0, 0], [0, np.nan], [0, 0]]), CLASSES, r"row 1: features at \[1\] is nan"),
        (np.array([[0, 0], [0, 0], [np.inf, 0]]), CLASSES, r"row 2: features at \[0\] is inf"),
        (ROWS, np.array([0, 3, 1]), "row 1: label is 3: labels must be 0 to 2, as"),
        (ROWS, np.array([0, 1, -1]), "row 2: label is -1"),
        (ROWS, np.array([0.5, 1, 1]), r"row 0: label is 0\.5: labels must be 0 to 2"),
        (ROWS, np.array([0, np.nan, 1]), "row 1: label is nan"),
        (ROWS, np.zeros((3, 2)), r"labels have shape \[3, 2\], the network has 3 outputs"),
        (ROWS, np.array([0, 1]), "3 rows of features, but 2 labels"),
    ],
)
def test_unsuitable_rows_are_refused_with_row_number(features: Any, labels: Any, why: str) -> None:
    network = DenseNetwork([2, 3])
    network.check(ROWS, CLASSES)
    with pytest.raises(UsageError, match=why):
        network.check(features, labels)


def test_non_finite_target_is_refused_with_row_number() -> None:
    network = DenseNetwork([2, 1], loss="squared_error")
    with pytest.raises(UsageError, match="row 2: label is inf"):
        network.check(ROWS, np.array([0.5, 1, np.inf]))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"widths": [3]}, "widths"),
        ({"widths": [3, 0, 2]}, "widths"),
        ({"widths": [3, 1]}, "two outputs"),
        ({"widths": [3, 2], "hidden": "gelu"}, "hidden='gelu'"),
        ({"widths": [3, 2], "loss": "hinge"}, "loss='hinge'"),
        ({"widths": [3, 2], "l2": -1.0}, r"l2=-1\.0"),
    ],
)
def test_invalid_network_argument_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DenseNetwork(**arguments)


@pytest.mark.parametrize(
    "params", [np.zeros(7, np.float32), np.zeros(8), np.zeros(16, np.float32)[::2]]
)
def test_bind_refuses_array_of_wrong_size_dtype_or_stride(params: Any) -> None:
    with pytest.raises(UsageError, match=r"need float32\[8\]"):
        DenseNetwork([3, 2]).bind(params)


def test_description_of_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'transformer', only dense"):
        from_description({"kind": "transformer"})


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_row_of_weight_two_equals_two_rows(loss: str) -> None:
    random = np.random.default_rng(3)
    features = random.normal(size=(4, 3)).astype(np.float32)
    labels = np.array([0, 3, 1, 2]) if loss == "cross_entropy" else random.normal(size=(4, 4))
    once, twice = DenseNetwork([3, 4], loss=loss), DenseNetwork([3, 4], loss=loss)
    weighted, repeated = bound(once), bound(twice)
    weights = np.array([1, 2, 0, 1], np.float32)
    rows = [0, 1, 1, 3]
    loss_weighted = once.step(Batch(features, labels, weights))
    loss_repeated = twice.step(Batch(features[rows], labels[rows]))
    assert loss_weighted == pytest.approx(loss_repeated, rel=1e-6)
    np.testing.assert_allclose(weighted, repeated, rtol=1e-6)


def test_minibatch_of_zero_weights_changes_no_parameter() -> None:
    """Neither momentum nor the penalty changes parameters without a row that counts."""
    network = DenseNetwork([2, 4], updater=Nesterov(0.1), l2=0.1)
    params = bound(network)
    network.step(Batch(ROWS, CLASSES))
    before = params.copy()
    assert network.step(Batch(ROWS, CLASSES, np.zeros(len(ROWS), np.float32))) == 0.0
    np.testing.assert_array_equal(params, before)


@pytest.mark.parametrize("features", [(ROWS, ROWS), {"left": ROWS, "right": ROWS}])
def test_dense_network_refuses_several_inputs(features: Any) -> None:
    with pytest.raises(UsageError, match=r"2 arrays of features.*takes one"):
        DenseNetwork([3, 4]).check(features, CLASSES)
