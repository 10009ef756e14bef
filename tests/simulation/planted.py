"""Bugs that tests plant in plain fits and in meshes, to see that a checker reports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common import events_and_effects as performing
from sparkstrom.protocol.common.events_and_effects import Effect
from sparkstrom.protocol.worker.joining import Joining
from sparkstrom.protocol.worker.node import Deadlines
from sparkstrom.simulation.fuzzing import simulate_seed
from sparkstrom.simulation.invariants import TopologyChecker
from sparkstrom.simulation.replica import N_PARAMS, SimLearner, SimReplica
from sparkstrom.simulation.run_options import NO_FAULTS

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(60)  # one of them must show the bug; mostly the first does

CALM = {field.name: getattr(NO_FAULTS, field.name) for field in fields(NO_FAULTS)}
ROUGH = {"crashes": 3, "cuts": 2, "loss": 0.1, "stop": 0.0, "failure": 0.0}
NARROW = ROUGH | {"window_bytes": 600, "log_bytes": 300, "max_lead": 6}
DEATHS = ROUGH | {"driver_deaths": 12}


def violations(given: dict[str, Any], seeds: range) -> Iterator[str]:
    """Yield the violations of fits with four workers directly under the master, seed by seed."""
    for seed in seeds:
        yield from simulate_seed(seed, 4, "plain", given).violations


def discard_residual(patch: pytest.MonkeyPatch) -> None:
    """Discard the residual at each publication."""
    publish = SimLearner.publish

    def lossy(self: SimLearner) -> bytes:
        payload = publish(self)
        self.residual = [0] * N_PARAMS
        return payload

    patch.setattr(SimLearner, "publish", lossy)


def return_wrong_digest(patch: pytest.MonkeyPatch) -> None:
    """Replace every third hash of a replica by another one."""
    digest = SimReplica.digest
    calls = iter(range(10_000))
    patch.setattr(SimReplica, "digest", lambda self: "0" if next(calls) % 3 == 1 else digest(self))


def disable_wait_deadlines(patch: pytest.MonkeyPatch) -> None:
    """Disable the deadlines of all waits."""
    patch.setattr(Deadlines, "timeout_directive", lambda self, now_s: None)


def skip_effects_after_driver_death(patch: pytest.MonkeyPatch) -> None:
    """When the media driver dies, skip all remaining effects of the list."""

    def hasty(effects: Iterable[Effect], perform: Callable[[Effect], None]) -> None:
        for effect in effects:
            perform(effect)

    patch.setattr(performing, "perform_all", hasty)


def skip_effects_without_transport_check(patch: pytest.MonkeyPatch) -> None:
    """Do the same, and disable the check that compares machines with their transports."""
    skip_effects_after_driver_death(patch)
    patch.setattr(TopologyChecker, "check_transports", lambda self, *seen: None)


def claim_open_child_edges(patch: pytest.MonkeyPatch) -> None:
    """After its media driver died, let a node report that its children's edges are still open."""
    on_opened = Joining.on_streams_opened

    def vain(self: Joining, opened: ev.StreamsOpened, now_s: float) -> list[Effect]:
        return on_opened(self, msgspec.structs.replace(opened, alone=False), now_s)

    patch.setattr(Joining, "on_streams_opened", vain)
