"""FlatModule: a torch module whose parameters are views of one flat vector.

What is common to the models that torch computes: memory, buffers, state and travelling. Where loss
and optimizer come from, and what a step does, is for those who inherit.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, Flat, Share, State, rows_of
from sparkstrom.models.flat import Layout, bindable
from sparkstrom.models.torch import module_buffers, statistics
from sparkstrom.models.torch.optimizer_options import device_of, index_of
from sparkstrom.models.torch.optimizers import load_state, state_of
from sparkstrom.models.torch.pacing import BY_EPOCHS, EPOCH, Pacing, told
from sparkstrom.models.torch.parameters import (
    Named,
    Views,
    gathered,
    layout_of,
    move_buffers,
    named_parameters,
    need_same,
    refuse_aliases,
    tensor_on,
)
from sparkstrom.models.torch.tensors import (
    FORWARD_FITS,
    TorchBatch,
    batch_to,
    called,
    check_rows,
    explained,
    features_to,
    joined,
    outputs_of,
    slices_of,
)
from sparkstrom.models.torch.torch_losses import number_of
from sparkstrom.models.torch.travel import (
    awakened,
    parameter_hooks,
    register_hooks,
    without_storage,
)

Updater = tuple[Optimizer, LRScheduler | None]


class FlatModule:
    """A module behind the flat-parameter protocol, but for its loss, optimizer and step.

    Who inherits names in ``OPTIONS`` the attributes that travel, besides the module.
    """

    KIND = ""  # what ``describe`` calls it
    OPTIONS: tuple[str, ...] = ()
    _device_wanted: str | None
    _autocast: str | None
    _outputs_kind: str

    def _begin(self, module: nn.Module) -> None:
        """A user's module, with the values that it has now. Raise UsageError for what cannot be."""
        self._set_up(module)
        refuse_aliases(module, self._named)
        parameter_hooks(module, self._named)
        self._has_values = True
        if not module.training:
            module.train()

    def _set_up(self, module: nn.Module) -> None:
        """What follows from the module, here and where it is unpickled."""
        self._named = named_parameters(module)
        self._module = module
        self._layout: Layout = layout_of(self._named)
        self._buffer_shapes = module_buffers.shapes_of(module_buffers.named_buffers(module))
        self._device = torch.device("cpu")
        self._views: Views | None = None
        self._updater: Updater | None = None
        self._pacing = Pacing()
        self._has_values = False  # of its own, before it is bound to others
        self._initial: Flat | None = None
        self._has_stepped = False
        self._is_placed = False

    def __repr__(self) -> str:
        kind, module = type(self).__name__, type(self._module).__name__
        said = "".join(f", {name}={value}" for name, value in self._said().items())
        return f"{kind}({module}, {self.n_params:,} parameters{said})"

    def _said(self) -> dict[str, str]:
        """Name what else tells two models apart, such as the learning rate."""
        return {}

    # -- what they bring who inherit -------------------------------------------------------------

    def _make_updater(self) -> Updater:
        """Optimizer and scheduler of the module's parameters."""
        raise NotImplementedError

    def _train(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Any:
        """One minibatch; return its mean loss."""
        raise NotImplementedError

    # -- the flat-parameter protocol -------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """How many parameters, frozen ones among them, tied ones once."""
        return self._layout.size

    @property
    def module(self) -> nn.Module:
        """The user's module; its parameters are views of what ``bind`` took last."""
        return self._module

    def frozen_parameters(self) -> list[slice]:
        """Return where parameters without ``requires_grad`` are in the flat vector."""
        return [
            slice(start, start + parameter.numel())
            for parameter, start in zip(self._named.values(), self._layout.starts, strict=True)
            if not parameter.requires_grad
        ]

    def initial(self) -> Flat:
        """The module's own values, from before it was bound, f32[n_params]. They do not travel."""
        if self._has_values:
            return gathered(self._named)
        if self._initial is None:
            raise UsageError(
                "this TorchModel was pickled, and a module travels without its parameters: bind"
                " the ones it should have, or copy it with copy.deepcopy"
            )
        return self._initial.copy()

    def start_from(self, params: Flat) -> None:
        """Have these initial parameters, f32[n_params], in place of the module's own."""
        self._initial, self._has_values = bindable(params, self.n_params).copy(), False

    def place(self, share: Share) -> None:
        """Use this many threads, this GPU, and this seed (dropout) in this process."""
        torch.set_num_threads(share.threads)
        torch.manual_seed(share.seed)
        self._device = device_of(self._device_wanted, share.gpu)
        self._is_placed = True

    @property
    def cuda_device(self) -> int | None:
        """The GPU of this process that it trains on; None for the CPU, and before ``place``."""
        return index_of(self._device)

    def bind(self, params: Any) -> None:
        """Work on f32[n_params] of the host or its own device; the optimizer's state stays."""
        held = tensor_on(params, self.n_params, self._device)
        if self._has_values:
            self._initial, self._has_values = gathered(self._named), False
        move_buffers(self._device, self._module)
        self._views = Views(self._named, self._layout, held, held.to(self._device))
        if self._is_placed:  # an optimizer makes torch import 800 modules: not in the first step
            self._made()

    def step(self, batch: Batch) -> float:
        """One minibatch: change the bound parameters in place; return the mean loss.

        Raise UsageError where something has taken a parameter out of the flat vector.
        """
        views = self._bound()
        optimizer, scheduler = self._made()
        views.fetch()
        tensors = batch_to(self._device, batch)
        with self._pacing.step(optimizer, scheduler), self._pacing.statistics(self._module):
            loss = number_of(self._train(optimizer, tensors, batch.rows))
        if math.isnan(loss) and _has_nothing_to_learn(self._named):
            loss = 0.0
        self._pacing.scheduled(scheduler, loss)
        views.store()
        self._has_stepped = True
        return loss

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; the scheduler is where the fit is."""
        self._pacing.keep(workers, minibatches, counted)

    def horizons(self, workers: int) -> dict[str, str]:
        """What is changed where so many train, for people."""
        what = told(*self._made(), workers) | statistics.told(self._module, workers)
        if "scheduler" in what and self._pacing.interval == EPOCH:
            what["scheduler"] = BY_EPOCHS
        return what

    def predict(self, features: Columns) -> Any:
        """What the module puts out in evaluation mode, as arrays [rows, ...]."""
        with self._evaluating():
            return joined([self._outputs(rows) for rows in slices_of(features)])

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs_kind

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value where rows do not fit."""
        rows = rows_of(features)
        check_rows(features, rows, "features")
        check_rows(labels, rows, "labels")
        try:
            called(inspect.signature(self._module.forward).bind, features)
        except TypeError as error:
            raise UsageError(
                f"{type(self._module).__name__}.forward does not take these features: {error}"
            ) from error

    def updater_state(self) -> State:
        """The state of optimizer and scheduler, by name."""
        return state_of(*self._made(), self._named)

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal model returned."""
        load_state(*self._made(), self._named, state)

    def layer_of(self, index: int) -> str:
        """The name of the parameter, as in ``module.named_parameters()``."""
        return self._layout.name_of(index)

    def describe(self) -> dict[str, Any]:
        """Names and shapes in the vector's order; the code of a module cannot be described."""
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        return {
            "kind": self.KIND,
            "module": type(self._module).__qualname__,
            "text": str(self._module),
            "parameters": [[name, list(shape)] for name, shape in arrays],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Any:
        """Raise UsageError: the module's code is the user's, and is not saved."""
        raise UsageError(
            f"{description.get('module')} was saved without its code: load it with"
            f" SparkNetwork.load(path, spark, model={cls.__name__}(...)) and a module of the same"
            " class, or open NAME.pt with torch.load and module.load_state_dict"
        )

    # -- buffers, and what is saved beside the parameters ----------------------------------------

    def buffers_bytes(self) -> bytes:
        """BatchNorm's statistics and their like, as they are now.

        Raise UsageError naming a buffer whose shape has changed.
        """
        buffers = module_buffers.named_buffers(self._module)
        module_buffers.check_shapes(buffers, self._buffer_shapes)
        return module_buffers.packed(buffers)

    def load_buffers_bytes(self, data: bytes) -> None:
        """Take what ``buffers_bytes`` of an equal model returned."""
        module_buffers.load(module_buffers.named_buffers(self._module), data)

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Means in float64, in the given order; whole numbers take the largest."""
        return module_buffers.averaged(module_buffers.named_buffers(self._module), reports)

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """The same where each report counts so much."""
        return module_buffers.averaged(module_buffers.named_buffers(self._module), reports, weights)

    def exported(self) -> tuple[str, bytes]:
        """``.pt`` and a state_dict with the user's own keys: ``torch.load`` opens it alone."""
        state = {key: value.detach().cpu().clone() for key, value in self._state_dict().items()}
        file = io.BytesIO()
        torch.save(state, file)
        return ".pt", file.getvalue()

    # -- inside ----------------------------------------------------------------------------------

    def _state_dict(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self._module.state_dict().items() if torch.is_tensor(v)}

    def _bound(self) -> Views:
        assert self._views is not None, "bind parameters first"
        return self._views

    def _made(self) -> Updater:
        """Optimizer and scheduler, made where the training is."""
        if self._updater is None:
            self._updater = self._make_updater()
        return self._updater

    def _called(self, features: Any) -> Any:
        with explained(f"{type(self._module).__name__}.forward", FORWARD_FITS, features=features):
            return called(self._module, features)

    def _outputs(self, features: Columns) -> Any:
        with self._precision():
            return outputs_of(self._called(features_to(self._device, features)))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode; afterwards each part is in the mode that it was in."""
        self._bound().fetch()
        modes = [(part, part.training) for part in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():  # tensors that a module keeps must be good for training, too
                yield
        finally:
            for part, training in modes:
                part.training = training

    def _precision(self) -> Any:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    # -- travelling ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What ships: the module without the parameters' storage, buffers, factories, options."""
        need_same(self._module, self._named)
        state = {name: self.__dict__[name] for name in self.OPTIONS}
        hooks = parameter_hooks(self._module, self._named)
        module = without_storage(self._module, self._named)
        return {**state, "_module": module, "_hooks": hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(awakened(state["_module"]))
        register_hooks(self._named, state.get("_hooks", {}))  # saved by versions without hooks
        # Pickles of earlier versions lack options that came later, which are None by default.
        self.__dict__.update({name: state.get(name) for name in self.OPTIONS})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own for another fit, with the same initial parameters."""
        twin = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        twin._initial = self.initial() if self._has_values else self._initial
        return twin


def _has_nothing_to_learn(named: Named) -> bool:
    """Return whether all gradients are zero, as where the labels of a minibatch are all ignored.

    The loss is then a mean over nothing, which torch computes as NaN.
    """
    return all(p.grad is None or not p.grad.any() for p in named.values())
