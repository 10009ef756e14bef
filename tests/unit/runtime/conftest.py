"""Fixtures of the runtime's tests: encoded commits, a trivial model, meshes and trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Commit, Payload
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models.base import Batch, Flat, State
from tests.unit.runtime.endpoint_peers import Peer, open_edge_between
from tests.unit.runtime.fits import Mesh
from tests.unit.runtime.memories import as_host_array
from tests.unit.runtime.trainer_harness import TAU, N, Script, TrainerHarness

K = 10  # q = 1/1024

MakeCommit = Callable[..., Commit]


class ConstantStepModel:
    """A model that adds ``push`` to all parameters per step; its loss is the step's number."""

    def __init__(self, n_params: int, push: float = TAU) -> None:
        self.n_params, self.push = n_params, push
        self.params: Flat = np.zeros(n_params, np.float32)
        self.seen: list[Batch] = []
        self.losses: dict[int, float] = {}  # step (from 1) -> another loss
        self.state: State = {}

    def initial(self) -> Flat:
        return np.zeros(self.n_params, np.float32)

    def bind(self, params: Flat) -> None:
        self.params = as_host_array(params)

    def step(self, batch: Batch) -> float:
        self.seen.append(batch)
        self.params += np.float32(self.push)
        return self.losses.get(len(self.seen), float(len(self.seen)))

    def predict(self, features: NDArray[Any]) -> NDArray[np.float32]:
        return np.zeros((len(features), 1), np.float32)

    def check(self, features: NDArray[Any], labels: NDArray[Any]) -> None:
        if not np.isfinite(features).all():
            raise UsageError("a feature is not finite")

    def updater_state(self) -> State:
        return self.state

    def load_updater_state(self, state: State) -> None:
        self.state = dict(state)

    def layer_of(self, index: int) -> str:
        return f"layer {index}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "constant_step_model"}


@pytest.fixture
def make_commit() -> MakeCommit:
    """A factory of commits that move parameters by ``tau``: 3 adds to the third, -3 subtracts."""

    def make(commit: int, *hits: int, n_params: int = 300, tau: float = TAU) -> Commit:
        learnt, theta = np.zeros(n_params, np.float32), np.zeros(n_params, np.float32)
        for hit in hits:
            learnt[abs(hit) - 1] = tau if hit > 0 else -tau
        encoded = Encoder(n_params, K, FixedThreshold(tau)).publish(learnt, theta)
        assert encoded is not None
        return Commit(
            commit=commit,
            origin=9,
            seq=commit,
            payload=Payload(int(encoded.form), encoded.tau_quanta, encoded.count, encoded.payload),
        )

    return make


@pytest.fixture
def constant_step_model() -> Callable[..., ConstantStepModel]:
    return ConstantStepModel


@pytest.fixture
def draw_grid_parameters() -> Callable[[int, int], Flat]:
    """A function that draws random parameters f32[n] on the grid, from a seed."""

    def draw(n_params: int, seed: int = 0) -> Flat:
        quanta = np.random.default_rng(seed).integers(-1000, 1000, n_params)
        return (quanta * quantum(K)).astype(np.float32)

    return draw


@pytest.fixture
def make_mesh() -> Iterator[Callable[..., Mesh]]:
    """A factory of meshes, which are closed after the test."""
    made: list[Mesh] = []

    def make(*args: Any, **keywords: Any) -> Mesh:
        made.append(Mesh(*args, **keywords))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def pair(network: MemoryNetwork) -> tuple[Peer, Peer]:
    """The endpoints of the master and of node 7, connected by edge 3."""
    master, node = Peer(network, MASTER, 10), Peer(network, 7, 20)
    node.room.listen(node.address)
    open_edge_between(master, node, edge=3)
    return master, node


@pytest.fixture
def make_trainer(constant_step_model: Callable[..., Any]) -> Callable[..., TrainerHarness]:
    """A factory of benches whose model adds ``push`` to every parameter in each step."""

    def make(script: Script, push: float = TAU, **options: Any) -> TrainerHarness:
        return TrainerHarness(constant_step_model(N, push), script, **options)

    return make
