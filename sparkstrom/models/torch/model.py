"""TorchModel: a user's module, loss and optimizer, trained on one flat vector.

The module's parameters are views of the vector that ``bind`` supplies, so the optimizer steps in
place on what the encoder reads; nothing is copied, but a host's vector for a model on a GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, Flat, Share, State, rows_of
from sparkstrom.models.flat import Layout, bindable
from sparkstrom.models.torch import module_buffers, statistics
from sparkstrom.models.torch.optimizer_options import (
    check_options,
    device_name,
    device_of,
    index_of,
)
from sparkstrom.models.torch.optimizers import (
    NO_GRADIENT,
    Groups,
    OptimizerFactory,
    SchedulerFactory,
    clip,
    load_state,
    made_optimizer,
    made_scheduler,
    state_of,
    stepped,
)
from sparkstrom.models.torch.pacing import Pacing, told
from sparkstrom.models.torch.parameters import (
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
    LOSS_FITS,
    TorchBatch,
    batch_to,
    called,
    check_rows,
    explained,
    features_to,
    joined,
    outputs_of,
    parts_of,
    slices_of,
)
from sparkstrom.models.torch.torch_losses import Loss, number_of, outputs_kind, weighted
from sparkstrom.models.torch.travel import awakened, refuse_holders, without_storage

OPTIONS = (
    *("_loss", "_custom", "_factories", "_device_wanted", "_clip_norm", "_accumulate"),
    *("_autocast", "_outputs_kind"),
)
Step = Callable[[nn.Module, Optimizer, TorchBatch], Any]


class TorchModel:
    """A torch module with its loss and optimizer, behind the flat-parameter protocol.

    ``loss(output, target)`` returns the rows' mean; ``optimizer(parameters)`` and
    ``scheduler(optimizer)`` make theirs, as ``partial(torch.optim.Adam, lr=1e-3)`` does;
    the scheduler steps by the fit's minibatches. ``groups`` makes torch's parameter
    groups from a dict name -> parameter. ``device`` is where workers train: None takes the GPU that
    Spark assigned to the task, or else the CPU. ``clip_norm`` bounds the gradient's norm;
    ``accumulate`` computes a minibatch in so many parts, one after the other;
    ``autocast="bfloat16"`` computes in bfloat16. ``step(module, optimizer, batch: TorchBatch) ->
    loss`` does a whole step as a user wants it; then ``loss`` is for scores only, and may be None.
    ``outputs`` says what the module puts out, for metrics: logits, probabilities or values; by
    default logits for torch's losses of classes, else values.
    Raise UsageError for what cannot train here, with reason and remedy.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: OptimizerFactory,
        *,
        scheduler: SchedulerFactory | None = None,
        groups: Groups | None = None,
        device: str | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: str | torch.dtype | None = None,
        step: Step | None = None,
        outputs: str | None = None,
    ) -> None:
        self._set_up(module)
        self._loss, self._custom = loss, step
        self._outputs_kind = outputs_kind(outputs, loss)
        self._factories = optimizer, groups, scheduler
        self._device_wanted = device_name(device)
        self._clip_norm, self._accumulate = clip_norm, accumulate
        self._autocast = None if autocast is None else str(autocast).removeprefix("torch.")
        check_options(loss, step, clip_norm, accumulate, self._autocast)
        refuse_aliases(module, self._named)
        refuse_holders(
            module, loss=loss, step=step, optimizer=optimizer, groups=groups, scheduler=scheduler
        )
        self._has_values = True
        if not module.training:
            module.train()
        made_scheduler(scheduler, made_optimizer(optimizer, groups, self._named))
        without_storage(module, self._named)

    def _set_up(self, module: nn.Module) -> None:
        """What follows from the module, here and where it is unpickled."""
        self._named = named_parameters(module)
        self._module = module
        self._layout: Layout = layout_of(self._named)
        self._device = torch.device("cpu")
        self._views: Views | None = None
        self._updater: tuple[Optimizer, LRScheduler | None] | None = None
        self._pacing = Pacing()
        self._has_values = False  # of its own, before it is bound to others
        self._initial: Flat | None = None
        self._has_stepped = False
        self._is_placed = False

    # -- the flat-parameter protocol -------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """How many parameters, frozen ones among them, tied ones once."""
        return self._layout.size

    @property
    def module(self) -> nn.Module:
        """The user's module; its parameters are views of what ``bind`` took last."""
        return self._module

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
        move_buffers(self._device, self._module, self._loss)
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
            if self._custom is None:
                loss = number_of(self._gradient_step(optimizer, tensors, batch.rows))
            else:
                loss = number_of(self._custom(self._module, optimizer, tensors))
        self._pacing.scheduled(scheduler, loss)
        views.store()
        self._has_stepped = True
        return loss

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; the scheduler is where the fit is."""
        self._pacing.keep(workers, minibatches, counted)

    def horizons(self, workers: int) -> dict[str, str]:
        """What is changed where so many train, for people."""
        return told(*self._made(), workers) | statistics.told(self._module, workers)

    def predict(self, features: Columns) -> Any:
        """What the module puts out in evaluation mode, as arrays [rows, ...]."""
        with self._evaluating():
            return joined([self._outputs(rows) for rows in slices_of(features)])

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs_kind

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights) in evaluation mode; nothing changes."""
        if self._loss is None:
            raise UsageError("this TorchModel has a step of its own and no loss: pass loss= for it")
        tensors = batch_to(self._device, batch)
        with self._evaluating(), self._precision():
            mean = float(self._loss_of(self._called(tensors.features), tensors))
        weight = batch.rows if tensors.weights is None else float(tensors.weights.double().sum())
        return mean * weight, weight

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
            "kind": "torch",
            "module": type(self._module).__qualname__,
            "text": str(self._module),
            "parameters": [[name, list(shape)] for name, shape in arrays],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> TorchModel:
        """Raise UsageError: the module's code is the user's, and is not saved."""
        raise UsageError(
            f"{description.get('module')} was saved without its code: load it with"
            " SparkNetwork.load(path, spark, model=TorchModel(...)) and a module of the same class,"
            " or open NAME.pt with torch.load and module.load_state_dict"
        )

    # -- buffers, and what is saved beside the parameters ----------------------------------------

    def buffers_bytes(self) -> bytes:
        """BatchNorm's statistics and their like, as they are now."""
        return module_buffers.packed(module_buffers.named_buffers(self._module))

    def load_buffers_bytes(self, data: bytes) -> None:
        """Take what ``buffers_bytes`` of an equal model returned."""
        module_buffers.load(module_buffers.named_buffers(self._module), data)

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Means in float64, in the given order; whole numbers take the largest."""
        return module_buffers.averaged(module_buffers.named_buffers(self._module), reports)

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

    def _made(self) -> tuple[Optimizer, LRScheduler | None]:
        """Optimizer and scheduler, made where the training is."""
        if self._updater is None:
            factory, groups, scheduler = self._factories
            optimizer = made_optimizer(factory, groups, self._named)
            self._updater = optimizer, made_scheduler(scheduler, optimizer)
        return self._updater

    def _gradient_step(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for part, share in parts_of(batch, rows, self._accumulate):
            with self._precision():
                loss = self._loss_of(self._called(part.features), part) * share
            loss.backward()
            total += loss.detach()
        with_gradient = [p for p in self._named.values() if p.grad is not None]
        if not with_gradient:
            raise UsageError(NO_GRADIENT)
        if self._clip_norm is not None:
            clip(with_gradient, self._clip_norm)
        stepped(optimizer, with_gradient)
        return total

    def _loss_of(self, output: Any, batch: TorchBatch) -> torch.Tensor:
        assert self._loss is not None
        with explained("the loss", LOSS_FITS, output=output, target=batch.labels), self._strictly():
            if batch.weights is None:
                loss = self._loss(output, batch.labels)
            else:
                loss = weighted(self._loss, output, batch.labels, batch.weights)
        if not (isinstance(loss, torch.Tensor) and loss.ndim == 0):
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"loss(output, target) returned {shape}: it must be one number, the"
                             " mean over rows")  # fmt: skip
        return loss

    def _called(self, features: Any) -> Any:
        with explained(f"{type(self._module).__name__}.forward", FORWARD_FITS, features=features):
            return called(self._module, features)

    @contextlib.contextmanager
    def _strictly(self) -> Iterator[None]:
        """Before the first step is done: torch's warning that [n, 1] meets [n] is an error."""
        if self._has_stepped:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            yield

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
        state = {name: self.__dict__[name] for name in OPTIONS}
        return {**state, "_module": without_storage(self._module, self._named)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(awakened(state["_module"]))
        self.__dict__.update({name: state[name] for name in OPTIONS})

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchModel:
        """A model of its own for another fit, with the same initial parameters."""
        twin = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        twin._initial = self.initial() if self._has_values else self._initial
        return twin
