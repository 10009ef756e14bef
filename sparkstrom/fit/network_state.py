"""Hold a network's state from one fit to the next.

The state includes the parameters, the optimizer states, the number of epochs trained so far, and
the names of residual files: at the end of a fit, each worker saves its residual (changes that it
has not sent) on its executor. Buffers (such as BatchNorm statistics) are kept in the model itself,
so networks of one model object share them; a fit that starts with another network's buffers warns.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.encoding.grid import first_exponent, next_exponent
from sparkstrom.fit.checkpoints import FitKey, ResumePoint
from sparkstrom.fit.events import FinishedFit
from sparkstrom.fit.supervisor import FitCancelled
from sparkstrom.models.base import (
    Flat,
    FlatModel,
    buffers_to_save,
    get_buffers,
    load_buffers,
)
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.runtime.master_control import Snapshot
from sparkstrom.runtime.optimizer_states import OptimizerStates, pretrained_optimizer_states
from sparkstrom.runtime.theta import Theta
from sparkstrom.worker.training_job import make_initial_theta

log = logging.getLogger(__name__)

NO_STATES = OptimizerStates()
FILES_LOST = (
    "the fit failed, and its workers may have used up the residuals and optimizer states that the"
    " fit before it left on the executors: the next fit starts without them"
)
SHARED_BUFFERS = (
    "the model's buffers, such as BatchNorm's statistics, are those that a fit of another network"
    " left in it: this fit starts with them, although its parameters are not that network's; if"
    " both networks have the same model object, it changes them for both. Make each network with"
    " its own copy of an untrained model: copy.deepcopy(model); to continue the other network,"
    " assign its parameters; ignore this to start with these buffers"
)

_lock = threading.Lock()  # held while the following are used: several fits may run in threads
_holders = weakref.WeakSet["NetworkStateHolder"]()  # of all networks of this process
_holder_numbers = itertools.count()
# Digest of buffers that networks have trained or restored -> number of each network's holder ->
# digest of its parameters with these buffers. Only the newest are kept.
_trained_buffers: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()
TRAINED_BUFFERS_MAX = 1000


def copy_if_used(model: FlatModel | None) -> FlatModel | None:
    """Return a model for ``load``: a copy if a network uses it and would share what is loaded.

    Buffers and the weights of frozen layers are in the model itself.
    """
    with _lock:
        is_used = model is not None and any(each.holds(model) for each in _holders)
    if not is_used or not buffers_to_save(model):
        return model
    log.info("load: the model is copied, because another network uses it; see network.model")
    return copy.deepcopy(model)


class FitParameters(Protocol):
    """The parameters and buffers that a fit has trained, as the driver program has them."""

    @property
    def k(self) -> int:
        """Exponent of the parameters' grid: in gradient sharing they are multiples of 2^-k."""

    @property
    def buffers(self) -> bytes:
        """The model's buffers; b"" if it has none."""
        ...

    def to_host(self) -> Flat:
        """Return a copy of the parameters, f32[n_params]."""
        ...


@dataclass(frozen=True, slots=True)
class NetworkState:
    """The parameters and everything else with which the next fit continues, as an immutable value.

    Buffers are not included, because the model itself holds them.
    """

    parameters: Flat  # f32[n_params], read-only
    k: int | None = None  # parameters are multiples of 2^-k; None: no fit has chosen k yet
    kept: CheckpointFiles = field(default_factory=dict)  # residual files on executors
    states: OptimizerStates = NO_STATES  # optimizer states for the next fit
    states_workers: int = 0  # number of workers of the fit that ``states`` come from
    epochs: int = 0  # number of epochs trained so far
    minibatches: int = 0  # number trained since the optimizers' first step
    # Of each streaming query, by its id: the newest trained micro-batch, the id of the query's run
    # that trained it, and the fit's summary.
    micro_batches: Mapping[str, tuple[int, str | None, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the parameters read-only, so that a rollback restores the same values."""
        parameters = self.parameters.view()
        parameters.flags.writeable = False
        object.__setattr__(self, "parameters", parameters)


class NetworkStateHolder:
    """Holds a network's current ``NetworkState``; each change replaces the state as a whole."""

    is_final = False  # whether the fit that is under way will not change the state any more

    def __init__(self, model: FlatModel) -> None:
        self._model, self._number = model, next(_holder_numbers)
        with _lock:
            _holders.add(self)
        parameters = np.array(model.initial(), np.float32)
        # An imported model may bring an optimizer state for all workers.
        self._value = NetworkState(parameters, states=pretrained_optimizer_states(model))

    @property
    def value(self) -> NetworkState:
        """The current state."""
        return self._value

    @property
    def parameters(self) -> Flat:
        """The parameters, f32[n_params], read-only."""
        return self._value.parameters

    @property
    def epochs(self) -> int:
        """Number of epochs trained so far."""
        return self._value.epochs

    @property
    def buffers(self) -> bytes:
        """The model's current buffers."""
        return get_buffers(self._model)

    def holds(self, model: FlatModel) -> bool:
        """Return whether the network is one of this model object."""
        return self._model is model

    def shared_buffers_warning(self) -> str | None:
        """Return a warning if the model has buffers of another network, with other parameters."""
        with _lock:
            owners = dict(_trained_buffers.get(self._digest_buffers(self.buffers), {}))
        if not owners or self._number in owners or self._digest_parameters() in owners.values():
            return None
        return SHARED_BUFFERS

    def _digest_buffers(self, buffers: bytes) -> bytes:
        """Return the SHA-256 of the model's buffers and number of parameters."""
        return hashlib.sha256(buffers + b"%d" % self._model.n_params).digest()

    def _digest_parameters(self) -> bytes:
        """Return the SHA-256 of the parameters."""
        return hashlib.sha256(self.parameters.data).digest()

    @property
    def minibatches_before(self) -> int:
        """Number of minibatches since the next fit's optimizers started; 0 if they start anew."""
        value = self._value
        return value.minibatches if value.kept or value.states.one else 0

    def theta(self, multipliers: Mapping[str, int]) -> Theta:
        """Return a copy of the parameters for a fit, rounded to multiples of 2^-k.

        ``multipliers``: thresholds of layers in multiples of the threshold tau, by layer name.
        """
        return make_initial_theta(self._model, self.parameters, self.grid_exponent(), multipliers)

    def grid_exponent(self) -> int:
        """Return k, and remember it: parameters are rounded to multiples of 2^-k.

        The first fit chooses k; later fits keep it unless the parameters need a coarser grid.
        """
        parameters, k = self._value.parameters, self._value.k
        k = first_exponent(parameters) if k is None else next_exponent(parameters, k)
        self._value = replace(self._value, k=k)
        return k

    @contextlib.contextmanager
    def rollback_on_error(self) -> Iterator[None]:
        """Restore the state if the block raises anything but KeyboardInterrupt or FitCancelled.

        Residual files are not restored, because workers may have used them; if there were any, log
        a warning. After the block, ``is_final`` is True.
        """
        before, buffers = self._value, self.buffers
        try:
            yield
        except (KeyboardInterrupt, FitCancelled):
            raise
        except BaseException:
            self._value = replace(before, kept={})
            load_buffers(self._model, buffers)
            if before.kept:
                log.warning(FILES_LOST)
            raise
        finally:
            self.is_final = True

    def resume_state(self, workers: int) -> tuple[CheckpointFiles, OptimizerStates]:
        """Return the residual files and optimizer states for the next fit.

        If the fit has another number of ``workers`` than the last one, per-worker states no longer
        apply, and every worker gets the common one.
        """
        kept, states = self._value.kept, self._value.states
        if workers != self._value.states_workers:
            states = OptimizerStates(states.one)
        return kept, states

    def forget_resume_state(self) -> None:
        """Forget the residual files and optimizer states, because a fit uses them up."""
        self._value = replace(self._value, kept={}, states=NO_STATES)

    def assign(self, values: Flat, epochs: int | None = None, *, any_value: bool = False) -> None:
        """Replace the parameters, and drop residual files and optimizer states of earlier fits.

        Args:
            values: f32[n_params], or anything that NumPy converts to it.
            epochs: Number of epochs that the values were trained for; None: as many as before.
            any_value: Whether values may be infinite or NaN, as in the file of a diverged model.

        Raises:
            UsageError: The values are not numbers, not finite as float32, or not as many as the
                model has parameters.
        """
        try:
            with np.errstate(over="ignore"):
                given, values = values, np.asarray(values, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"parameters={shown(values)}: give an array f32{list(self.parameters.shape)}"
            ) from error
        if values.shape != self.parameters.shape:
            raise UsageError(
                f"parameters of shape {values.shape}: this model has {self.parameters.shape}"
            )
        finite = np.isfinite(values)
        if not (any_value or finite.all()):
            index = int(np.argmin(finite))
            raise UsageError(
                f"parameters[{index}]={np.asarray(given)[index]}: must be a finite number of"
                " float32; look at how it was computed, or at the file"
            )
        self._value = replace(
            self._value,
            parameters=np.ascontiguousarray(values).copy(),
            kept={},
            states=NO_STATES,
            epochs=self.epochs if epochs is None else epochs,
            micro_batches={},
        )

    def record_micro_batch(self, key: FitKey, run: str | None, summary: Any) -> None:
        """Note that the parameters contain a micro-batch; do nothing outside of a stream.

        ``run`` identifies the run of the streaming query.
        """
        if key.stream:
            trained = {**self._value.micro_batches, key.stream: (key.batch, run, summary)}
            self._value = replace(self._value, micro_batches=trained)

    def find_micro_batch(self, key: FitKey, run: str | None) -> Any:
        """Return the summary of the fit of a micro-batch in another run of its query, or None.

        In one run, Spark never repeats a micro-batch: a second fit is what the user wants.
        """
        batch, trained_in, summary = self._value.micro_batches.get(key.stream, (None, None, None))
        return summary if batch == key.batch and run and run != trained_in else None

    def take_result(
        self,
        theta: FitParameters,
        end: FinishedFit,
        best: Snapshot | None,
        states: OptimizerStates = NO_STATES,
    ) -> None:
        """Replace the state with the result of a finished fit.

        Args:
            theta: Parameters and buffers at the end.
            end: The finished fit.
            best: The snapshot of the best epoch, which replaces ``theta``; None: there is none.
            states: Optimizer states at the end. They and the residual files are kept only if the
                parameters are those of the end.
        """
        outcome = end.outcome
        done = replace(
            self._value,
            minibatches=end.spec.minibatches_before + outcome.minibatches,
            epochs=end.spec.first_epoch + end.epochs_trained,
        )
        if best is None or best.commit == outcome.commits:
            done = replace(
                done,
                parameters=theta.to_host(),
                kept=outcome.kept,
                states=states,
                states_workers=end.spec.workers,
            )
            self._replace_state(done, theta.buffers)
        else:  # files and optimizer states belong to the last parameters, not to the best ones
            self._replace_state(replace(done, parameters=best.parameters), best.buffers)

    def keep_interrupted(self, theta: FitParameters, spec: FitSpec, epochs: int) -> None:
        """Keep parameters and buffers of a fit that was interrupted after ``epochs`` epochs."""
        done = spec.first_epoch + epochs
        self._replace_state(
            replace(self._value, parameters=theta.to_host(), epochs=done), theta.buffers
        )

    def load_checkpoint(self, checkpoint: ResumePoint) -> None:
        """Replace the state with that of a checkpoint."""
        saved = NetworkState(
            checkpoint.parameters,
            k=checkpoint.k,
            states=checkpoint.states,
            states_workers=len(checkpoint.starts),
            epochs=checkpoint.first_epoch + (checkpoint.epochs_done or 0),
            minibatches=checkpoint.minibatches_before + checkpoint.minibatches,
        )
        self._replace_state(saved, checkpoint.buffers)

    def _replace_state(self, state: NetworkState, buffers: bytes) -> None:
        """Replace the state and load the buffers into the model.

        Note that they are this network's, unless they are constant.
        """
        before, self._value = self.buffers, state
        load_buffers(self._model, buffers)
        if not (after := self.buffers):
            return
        digest = self._digest_buffers(after)
        with _lock:
            if after != before or digest in _trained_buffers:
                owners = _trained_buffers.setdefault(digest, {})
                owners[self._number] = self._digest_parameters()
                _trained_buffers.move_to_end(digest)
                while len(_trained_buffers) > TRAINED_BUFFERS_MAX:
                    _trained_buffers.popitem(last=False)
