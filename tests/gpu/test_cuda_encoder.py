"""Tests of the encoder for device arrays: messages and parameters equal the CPU's bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.encoding import backends
from sparkstrom.encoding import layers as samples
from sparkstrom.encoding.cuda.device import is_usable
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AdaptiveThreshold, AutoThreshold, FixedThreshold

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)

F32 = NDArray[np.float32]
K = 20
N = 300

BOTH_WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])


class Worker:
    """An encoder with its parameters, on the host or on the device."""

    def __init__(self, encoder: Encoder, backend: str) -> None:
        self.encoder, self.memory = encoder, backends.memory(backend)
        self.local = self.memory.zeros(encoder.n_params, np.float32)
        self.theta = self.memory.zeros(encoder.n_params, np.float32)

    def learn(self, delta: F32) -> Encoded | None:
        """Add changes to the parameters or to the residual, and publish."""
        if self.encoder.train_on == "replica":
            placed = self.memory.zeros(delta.size, np.float32)
            self.memory.add(placed, delta)
            return self.encoder.publish(placed, self.theta)
        self.memory.add(self.local, delta)
        return self.encoder.publish(self.local, self.theta)

    def held(self) -> list[list[float]]:
        """Return theta and the residual."""
        residual = self.encoder.residual(self.local, self.theta)
        return [self.memory.to_host(self.theta).tolist(), residual.tolist()]


def workers(train_on: str, **options: Any) -> list[Worker]:
    """Return a worker on the CPU and one on the device with equal options."""
    threshold = options.pop("threshold", FixedThreshold(1e-3))
    return [
        Worker(
            Encoder(
                N, K, threshold, train_on=train_on, backend=backends.backend(backend), **options
            ),
            backend,
        )
        for backend in ("cpu", "cuda")
    ]


def deltas(n: int, steps: int, spread: float) -> list[F32]:
    """Return random changes of ``n`` parameters, one array per step."""
    random = np.random.default_rng(steps)
    return [random.normal(0, spread, n).astype(np.float32) for _ in range(steps)]


@BOTH_WAYS
@pytest.mark.parametrize(
    ("spread", "form"), [(3e-4, Form.GAPS), (3e-3, Form.BITMAP_UP)], ids=["few", "many"]
)
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_device_encoder_sends_same_messages_as_cpu(
    train_on: str, spread: float, form: Form, aggregation: str
) -> None:
    host, device = workers(
        train_on,
        aggregation=aggregation,
        workers=3,
        clipping=ResidualClipping(2.0, 2),
        threshold=AdaptiveThreshold(1e-3),
    )
    forms = set()
    for delta in deltas(N, 3, spread):
        update = host.learn(delta)
        assert device.learn(delta) == update
        assert device.held() == host.held()
        forms.add(update.form if update else None)
    assert form in forms
    ours, theirs = device.encoder.counters, host.encoder.counters
    assert ours.mass_clipped == pytest.approx(
        theirs.mass_clipped, rel=1e-12
    )  # added in another order
    theirs.mass_clipped = ours.mass_clipped
    assert ours == theirs


@BOTH_WAYS
def test_nan_is_found_before_theta_changes(train_on: str) -> None:
    _, device = workers(train_on)
    delta = np.ones(N, np.float32)
    delta[17] = np.nan
    with pytest.raises(TrainingError, match="parameter 17 became nan"):
        device.learn(delta)
    assert not device.memory.to_host(device.theta).any()


def test_state_and_residuals_move_between_backends() -> None:
    host, device = workers("replica")
    first, second = deltas(N, 2, 1e-3)
    host.learn(first)
    host.encoder.accumulate(second)
    device.encoder.load_state(host.encoder.state())
    state = device.encoder.state()
    np.testing.assert_array_equal(state["residual"], host.encoder.state()["residual"])
    norms = device.encoder.residual_norms(device.local, device.theta)
    assert norms == pytest.approx(host.encoder.residual_norms(host.local, host.theta), rel=1e-12)


def test_accumulated_changes_are_sent_in_next_publication() -> None:
    """Accumulated changes are sent in the next publication."""
    host, device = workers("replica")
    for delta in deltas(N, 2, 1e-3):
        host.encoder.accumulate(delta)
        device.encoder.accumulate(cuda.to_device(delta))
    nothing = np.zeros(N, np.float32)
    assert device.learn(nothing) == host.learn(nothing)
    assert device.held() == host.held()


def tied(n: int, steps: int) -> list[F32]:
    """Return changes as after Adam's first step: all of equal size, or small multiples of it."""
    random = np.random.default_rng(n)
    sizes = np.float32([1, 1, 1, 1, 2, 4, 9])
    return [
        (random.choice([-1, 1], n) * random.choice(sizes, n) * 2.0**-10).astype(np.float32)
        for _ in range(steps)
    ]


@BOTH_WAYS
@pytest.mark.parametrize("learnt", [deltas(N, 3, 3e-3), tied(N, 3)], ids=["any", "tied"])
@pytest.mark.parametrize("layers", [None, Layers((7, 130, N), (3, 1, 2))], ids=["flat", "layers"])
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": AutoThreshold(0.02, 0.1)},
        {"threshold": AutoThreshold(0.02, 0.1, levels=1), "shake_frequency": 2},
        {"threshold": FixedThreshold(1e-3, levels=3), "clipping": ResidualClipping(1.5, 2)},
        {"threshold": AdaptiveThreshold(1e-3), "warm_up": WarmUp(3)},
    ],
    ids=["auto", "auto-one-level", "levels", "warm-up"],
)
def test_all_options_give_same_messages_on_both_backends(
    train_on: str, learnt: list[F32], layers: Layers | None, options: dict[str, Any]
) -> None:
    """Messages are equal also if tau is sampled: there are 300 parameters, SAMPLE_PARAMS is 200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "SAMPLE_PARAMS", 200)
        host, device = workers(train_on, layers=layers, aggregation="sqrt", workers=2, **options)
        for delta in learnt:
            update = host.learn(delta)
            assert device.learn(delta) == update
            assert update is not None
            assert device.held() == host.held()
    ours, theirs = device.encoder.counters, host.encoder.counters
    assert ours.mass_clipped == pytest.approx(theirs.mass_clipped, rel=1e-12)
    theirs.mass_clipped = ours.mass_clipped
    assert ours == theirs
