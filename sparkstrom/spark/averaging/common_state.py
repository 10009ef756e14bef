"""Common state: what the workers' next round begins with, on the driver; and as it is saved."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkstrom.codec.states import decode_state_untrusted, encode_state
from sparkstrom.models.base import Buffered, Flat, FlatModel, State
from sparkstrom.runtime.averaging import (
    OuterStep,
    agreed,
    averaged_buffers,
    fresh_state,
    need_finite,
)
from sparkstrom.runtime.lent_state import (
    PARTITION,
    STEPS,
    UPDATER,
    LentStates,
    steps_in,
    updater_in,
)
from sparkstrom.spark.averaging.round_job import RoundReport
from sparkstrom.spark.driver.averaging_master import OWN, ParameterAveragingTrainingMaster

OUTER = "outer/"
NOBODY = -1  # whose state the one for all is


class CommonState:
    """Parameters f32[n_params], buffers, optimizers' states and the outer step's.

    Arrays are replaced, never changed, but for the outer step's own.
    """

    def __init__(
        self,
        model: FlatModel,
        master: ParameterAveragingTrainingMaster,
        parameters: Flat,
        states: LentStates,
        steps: int,
    ) -> None:
        """``steps`` of each worker before, where the states do not say."""
        self._model, self._save = model, master.save_updater
        self.parameters = parameters
        self.buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
        self.fresh = fresh_state(copy.deepcopy(model), parameters)
        self.updater, self.own = self.fresh, dict[int, State]()
        self.outer, self.steps, self.rounds = OuterStep(master.outer), steps, 0
        if states.one:
            self._go_on(states)

    def _go_on(self, states: LentStates) -> None:
        """With what a fit before had."""
        told = decode_state_untrusted(states.one)
        self.steps = steps_in(states.one, self.steps)
        outer = {k.removeprefix(OUTER): v for k, v in told.items() if k.startswith(OUTER)}
        if self.outer.updater is not None and set(outer) == set(self.outer.updater.init(0)):
            self.outer.state = outer
        if self._save:
            self.updater = updater_in(states.one)
        if self._save == OWN:
            own = states.own.items()  # older files have one of nobody
            self.own = {index: updater_in(state) for index, state in own if index != NOBODY}

    def advance(
        self, mean: Flat, reports: Sequence[RoundReport], sums: Mapping[str, State]
    ) -> None:
        """To the next round. ``sums``: states' arrays, "" of all, or by worker's number.

        Raise TrainingError where parameters are not finite any more.
        """
        trained = [report for report in reports if report.weight]
        parameters = self.outer.step(self.parameters, mean)
        need_finite(self._model, parameters, self.rounds + 1)
        self.parameters = parameters
        if any(report.buffers for report in trained) and isinstance(self._model, Buffered):
            buffers = [one.buffers for one in trained]
            weights = [one.weight for one in trained]
            self.buffers = averaged_buffers(self._model, buffers, weights)
        if self._save == OWN:
            for report in trained:
                self.own[report.partition] = {
                    **report.rest,
                    **sums.get(f"{report.partition}/", {}),
                }
        elif self._save:
            rests = [report.rest for report in trained]
            weights = [report.weight for report in trained]
            rest = agreed(rests, weights, [report.steps for report in trained])
            self.updater = {**rest, **sums.get("", {})}
        self.steps += max(report.steps for report in trained)
        self.rounds += 1

    def held(self) -> HeldStates:
        """Of this moment. Only what the next rounds change in place is copied."""
        outer = copy.deepcopy(self.outer.state)
        return HeldStates(self.updater, dict(self.own), outer, self.steps)

    def copies(self) -> tuple[bytes, ...]:
        """As checkpoints and later fits have them."""
        return self.held().encoded()

    def digest(self) -> str:
        """SHA-256 of parameters and buffers, as hex."""
        return hashlib.sha256(self.parameters.tobytes() + self.buffers).hexdigest()


@dataclass(frozen=True, slots=True)
class HeldStates:
    """Optimizers' states of one moment."""

    updater: State
    own: Mapping[int, State]
    outer: State
    steps: int

    def encoded(self, *, everybody: bool = True) -> tuple[bytes, ...]:
        """As checkpoints and later fits have them; the first one has the outer step's, too."""
        more: State = {OUTER + name: value for name, value in self.outer.items()}
        more[STEPS] = self.steps
        if not self.own:
            return (_encoded(self.updater, NOBODY, more),)
        first, *others = sorted(self.own)
        one = _encoded(self.own[first], first, more)
        return (one, *(_encoded(self.own[index], index, {}) for index in others if everybody))


def _encoded(updater: State, partition: int, more: State) -> bytes:
    named = {UPDATER + name: value for name, value in updater.items()}
    return encode_state(named | more | {PARTITION: partition})


class AveragedParameters:
    """What a fit in rounds delivers, as ``Learnt`` takes it."""

    def __init__(self, common: CommonState, k: int) -> None:
        self._common, self.k = common, k

    @property
    def buffers(self) -> bytes:
        """The model's."""
        return self._common.buffers

    def to_host(self) -> Flat:
        """A copy."""
        return np.array(self._common.parameters)
