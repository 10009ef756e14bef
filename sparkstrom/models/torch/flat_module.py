"""FlatModule: base class of torch models whose parameters are views of one flat vector.

This class handles memory, buffers, the optimizer's state and pickling; subclasses add the loss, the
optimizer and the training step.

A pickle contains the module without the memory of its parameters. Functions such as loss and step
are pickled next to the module. A function that captures the module itself is refused: on an
executor it would get a separate copy of the module, and what it trains there would be lost.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import io
import itertools
import math
import os
import threading
import types
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, number, shown, whole
from sparkstrom.models.base import (
    Batch,
    Columns,
    FitLength,
    Flat,
    Layout,
    Share,
    State,
    check_bindable,
    count_rows,
)
from sparkstrom.models.row_checks import describe_error
from sparkstrom.models.torch.hyperparameter_scaling import (
    BY_EPOCHS,
    EPOCH,
    UNKNOWN_LENGTH,
    WorkerScaling,
    describe_scaling,
    describe_statistics,
)
from sparkstrom.models.torch.losses import check_loss, loss_to_float
from sparkstrom.models.torch.optimizers import (
    FIT_PREFIX,
    count_scheduler_steps,
    drop_schedule,
    dump_state,
    load_state,
)
from sparkstrom.models.torch.parameters import (
    NamedParameters,
    ParameterViews,
    as_tensor,
    average_buffers,
    check_buffer_forms,
    gather_values,
    get_buffer_forms,
    load_buffers,
    make_layout,
    move_buffers,
    named_buffers,
    named_parameters,
    pack_buffers,
    refuse_buffer_aliases,
    require_same_parameters,
)
from sparkstrom.models.torch.tensors import (
    FORWARD_REMEDY,
    TorchBatch,
    batch_to_device,
    call_with_features,
    check_rows,
    explaining_shape_errors,
    features_to_device,
    join_outputs,
    outputs_to_numpy,
    split_rows,
)

INSPECTED_MAX = 10_000  # maximum objects to inspect: a function may refer to a whole program

EMPTY_CELL = types.CellType()  # equals the closure cell of a variable without a value


def copy_without_storage(module: nn.Module, named: NamedParameters) -> nn.Module:
    """Return a copy of the module whose parameters keep their shape but take one element of memory.

    Parametrizations are inactive until ``activate_parametrizations`` is called, because torch
    refuses to pickle their classes. Raise UsageError if the module cannot be copied.
    """
    memo: dict[int, Any] = {
        id(parameter): _strip_storage(parameter) for parameter in named.values()
    }
    try:
        copied: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            f"module {type(module).__name__} cannot be copied, so it cannot be sent to executors:"
            f" {describe_error(error)}"
        ) from error
    _refuse_shared_functions(module, copied)
    for part in copied.modules():
        if _has_active_parametrizations(part):
            part.__class__ = parametrize.type_before_parametrizations(part)
    return copied


def _refuse_shared_functions(module: nn.Module, copied: nn.Module) -> None:
    """Raise UsageError if a hook or attribute of ``copied`` is a function that captures ``module``.

    Copies share functions with the original, whereas bound methods are copied with the module.
    """
    for name, part in copied.named_modules():
        for attribute, value in vars(part).items():
            if "state_dict" in attribute:  # hooks that training does not call
                continue
            values = value.values() if isinstance(value, dict) else value
            for each in values if isinstance(value, dict | list | tuple) else (value,):
                if isinstance(each, types.FunctionType | partial):
                    title = getattr(each, "__qualname__", "partial(...)")
                    place = f"{name or type(module).__name__}.{attribute}"
                    functions = {f"the function {title} in {place}": each}
                    refuse_captured_module(module, remedy=METHOD_REMEDY, **functions)


def activate_parametrizations(module: nn.Module) -> nn.Module:
    """Activate the parametrizations (weight_norm, ...) of a copied module; return the module."""
    for part in list(module.modules()):
        if parametrize.is_parametrized(part) and not _has_active_parametrizations(part):
            parametrize._inject_new_class(part)
            for name in part.parametrizations:
                parametrize._inject_property(part, name)
    return module


def _has_active_parametrizations(part: nn.Module) -> bool:
    """Return whether the module's class is one that torch generated to apply parametrizations."""
    return parametrize.is_parametrized(part) and type(part).__name__.startswith("Parametrized")


def _strip_storage(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of equal shape and attributes whose memory is a single element, 0."""
    values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    stripped = nn.Parameter(values, requires_grad=parameter.requires_grad)
    stripped.__dict__.update(parameter.__dict__)  # user-defined attributes, such as no_decay
    return stripped


@contextlib.contextmanager
def switch_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode within the context; then restore each submodule's mode.

    The module's own ``train`` or ``eval`` is called at the start and at the end of the context,
    because these methods may also change parameters: LoRA layers merge and unmerge weights.
    """
    modes = [(part, part.training) for part in module.modules()]
    _set_mode(module, training)
    try:
        yield
    finally:
        _set_mode(module, modes[0][1])
        for part, part_training in modes:
            part.training = part_training


def overrides_modes(module: nn.Module) -> bool:
    """Return whether the module or a part of it has its own ``train`` or ``eval``.

    These may change parameters; see ``switch_mode``.
    """
    return any(
        name in vars(part) or getattr(type(part), name) is not getattr(nn.Module, name)
        for part in module.modules()
        for name in ("train", "eval")
    )


def _set_mode(module: nn.Module, training: bool) -> None:
    """Call the module's own ``train`` or ``eval``."""
    if training:
        module.train()
    else:
        module.eval()


# Parameter name -> (hooks on its gradient, hooks called after its gradient was accumulated).
Hooks = dict[str, tuple[list[Any], list[Any]]]


def collect_hooks(module: nn.Module, named: NamedParameters) -> Hooks:
    """Return the hooks of each parameter that has hooks.

    torch drops the hooks of parameters when a module is pickled or copied, so they are pickled
    separately. Raise UsageError for a hook that captures the module itself.
    """
    found: Hooks = {}
    for name, parameter in named.items():
        of_gradient = list((parameter._backward_hooks or {}).values())
        accumulated = list((parameter._post_accumulate_grad_hooks or {}).values())
        if of_gradient or accumulated:
            found[name] = of_gradient, accumulated
            hooks = {f"a hook on {name} ({n})": h for n, h in enumerate(of_gradient + accumulated)}
            refuse_captured_module(module, remedy=HOOK_REMEDY, **hooks)
    return found


def register_hooks(named: NamedParameters, hooks: Hooks) -> None:
    """Register the hooks from ``collect_hooks`` on the parameters of the same names."""
    for name, (of_gradient, accumulated) in hooks.items():
        for hook in of_gradient:
            named[name].register_hook(hook)
        for hook in accumulated:
            named[name].register_post_accumulate_grad_hook(hook)


FUNCTION_REMEDY = (
    "use the function's arguments, return what the loss needs from forward, or pass step=, which"
    " is given the module"
)
HOOK_REMEDY = (
    "let the hook use its argument, and tensors that are read from the module before the hook"
    " is defined (mask = self.mask)"
)
METHOD_REMEDY = (
    "make it a method of the module's class (methods are copied with the module), or read constants"
    " before the function is defined (n = self.n)"
)


def refuse_captured_module(
    module: nn.Module, remedy: str = FUNCTION_REMEDY, **functions: Any
) -> None:
    """Raise UsageError if a function captures the module, or a part of it with parameters.

    Args:
        module: the module.
        remedy: end of the error message.
        functions: name of an argument, for the message -> function or None.
    """
    names: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
    for name, part in module.named_modules():
        if any(True for _ in part.parameters()):
            names[id(part)] = name or type(module).__name__
    for argument, function in functions.items():
        for reachable in _reachable_objects(function):
            if (found := names.get(id(reachable))) is not None:
                raise UsageError(
                    f"{argument} holds the module itself ({found}): on an executor that would be a"
                    f" second copy, not the one that is trained; {remedy}"
                )


def _reachable_objects(function: Any) -> Iterator[Any]:
    """Yield the objects that would be pickled with a function, at most ``INSPECTED_MAX``.

    They are found through closures, defaults, attributes, and globals that the function reads.
    """
    queue, seen = deque([function]), {id(function)}
    while queue and len(seen) < INSPECTED_MAX:
        value = queue.popleft()
        yield value
        for part in itertools.islice(_referenced_objects(value), INSPECTED_MAX):
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)


def _referenced_objects(value: Any) -> Iterator[Any]:
    """Yield the objects that ``value`` refers to directly and that would be pickled with it."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != EMPTY_CELL)
        yield from _iter_used_globals(value)
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif not isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType):
        yield from getattr(value, "__dict__", {}).values()


def _iter_used_globals(function: types.FunctionType) -> Iterator[Any]:
    """Yield the torch modules, tensors and functions among the globals that a function reads.

    Functions that are defined in another Python module are not included.
    """
    for name in _list_global_names(function.__code__):
        value = function.__globals__.get(name)
        beside = getattr(value, "__module__", None) == function.__module__
        if isinstance(value, nn.Module | torch.Tensor) or (
            beside and isinstance(value, types.FunctionType)
        ):
            yield value


def _list_global_names(code: types.CodeType) -> set[str]:
    """Return the names of the globals that the code reads, including its nested functions."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _list_global_names(constant)
    return names


NAN_LOSSES = (
    "minibatches of this worker with a loss of NaN and no gradient: {}; they do not count in the"
    " loss of an epoch. Either all labels are ignored, or the step skips an overflow; if they are"
    " many, check both"
)
ACCUMULATE = whole(1)[KEY]
CLIP_NORM = number(above=0, remedy=", or None", words=(None,))[KEY]
DEVICES = ("cpu", "cuda")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"  # GPUs that this process sees, in its order


def check_options(
    loss: Any, step: Any, clip_norm: float | None, accumulate: int, autocast: str | None
) -> None:
    """Raise UsageError, with the valid values, if an option of TorchModel is invalid."""
    if loss is not None or step is None:
        check_loss(loss)
    if step is not None:
        _refuse_options_with_step(step, clip_norm, accumulate, autocast)
    if not (autocast is None or (isinstance(autocast, str) and autocast == "bfloat16")):
        raise UsageError(
            f"autocast={shown(autocast)}: must be 'bfloat16' or None; float16 needs a scaled loss,"
            " and float32 is what None computes in"
        )


def _refuse_options_with_step(
    step: Any, clip_norm: float | None, accumulate: int, autocast: str | None
) -> None:
    """Raise UsageError for options that have no effect with a user-defined step."""
    options = {
        "clip_norm": clip_norm,
        "accumulate": None if accumulate == 1 else accumulate,
        "autocast": autocast,
    }
    given = [name for name, value in options.items() if value is not None]
    if given or not callable(step):
        raise UsageError(
            f"step={shown(step)} with {', '.join(given) or 'nothing else'}: a step of your own is a"
            " function (module, optimizer, batch) -> loss and does these itself; pass none of"
            " clip_norm, accumulate, autocast"
        )


def check_device_name(name: str | None) -> str | None:
    """Return the name. Raise UsageError unless it is None or names the CPU or a CUDA device."""
    if name is None:
        return None
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if (kind in DEVICES and name == kind) or (kind == "cuda" and index.isdecimal()):
        return name
    raise UsageError(
        f"device={shown(name)}: must be 'cpu', 'cuda', 'cuda:NUMBER', or None for the GPU that"
        " Spark assigned to the task, if any"
    )


def choose_device(name: str | None, gpu: int | None) -> torch.device:
    """Return the device for this task: the named device, else Spark's GPU, else the CPU.

    Args:
        name: the option ``device``; "cuda" also means Spark's GPU, unless ``gpu`` is None.
        gpu: number of the GPU that Spark assigned to the task, or None.

    Raises:
        UsageError: the device does not exist.
    """
    if gpu is not None and name in (None, "cuda"):
        # Spark counts the GPUs of the machine, torch those that are visible to this process.
        seen = os.environ.get(VISIBLE_DEVICES, "").split(",")
        name = f"cuda:{seen.index(str(gpu)) if str(gpu) in seen else gpu}"
    if name is None or name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            f"device={name!r}, but torch {torch.__version__} sees no GPU on this executor:"
            " install a CUDA build there, or pass device='cpu'"
        )
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device={name!r}, but torch sees {torch.cuda.device_count()} GPUs on this executor"
            f" ({VISIBLE_DEVICES}={os.environ.get(VISIBLE_DEVICES)!r}): pass device='cuda:NUMBER'"
            " below that, or let Spark assign them (spark.task.resource.gpu.amount)"
        )
    return device


OptimizerPair = tuple[Optimizer, LRScheduler | None]
TOTAL_STEPS_KEY = f"{FIT_PREFIX}total_steps"


class FlatModule:
    """A torch module with its parameters in one flat vector.

    Subclasses define ``_make_optimizer`` and ``_train_batch``.

    Class attributes of subclasses:
        KIND: ``kind`` of the model's description.
        OPTIONS: names of attributes that are pickled besides the module.
    """

    KIND = ""
    OPTIONS: tuple[str, ...] = ()
    # Weight of the latest step's minibatch in an epoch's loss; None: that of its rows.
    step_weight: float | None = None
    _device_wanted: str | None
    _autocast: str | None
    _outputs_kind: str

    def _adopt_module(self, module: nn.Module) -> None:
        """Use the user's module with its current values. Raise UsageError if it is invalid.

        If the module as a whole is in evaluation mode, set training mode.
        """
        self._set_up(module)
        refuse_buffer_aliases(module, self._named_parameters)
        collect_hooks(module, self._named_parameters)
        self._has_values = True
        if not module.training:
            module.train()
        self._note_training_modes()

    def _set_up(self, module: nn.Module) -> None:
        """Initialize everything that is derived from the module; also called after unpickling."""
        self._named_parameters = named_parameters(module)
        self._module = module
        self._layout: Layout = make_layout(self._named_parameters)
        self._buffer_forms = get_buffer_forms(named_buffers(module))
        self._device = torch.device("cpu")
        self._views: ParameterViews | None = None
        self._optimizer_pair: OptimizerPair | None = None
        self._scaling = WorkerScaling()
        self._has_values = False  # whether the module still contains its initial parameters
        self._initial: Flat | None = None
        self._has_stepped, self._nan_losses = False, 0
        self._training_modes: dict[str, bool] = {}  # submodule -> its mode while training
        self._mode_lock = threading.RLock()  # held while a prediction uses modes and memory
        self._fit_length: FitLength | None = None  # None: not known yet
        self._early_optimizer_state: State | None = None  # loaded before the fit's length was known

    def __repr__(self) -> str:
        kind, module = type(self).__name__, type(self._module).__name__
        options = "".join(
            f", {name}={value}" for name, value in self._collect_options_for_repr().items()
        )
        return f"{kind}({module}, {self.n_params:,} parameters{options})"

    def _collect_options_for_repr(self) -> dict[str, str]:
        """Return the options to show in ``repr``, such as the learning rate: name -> text."""
        return {}

    def _make_optimizer(self) -> OptimizerPair:
        """Return a new optimizer for the module's parameters, and its scheduler or None."""
        raise NotImplementedError

    def _train_batch(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Any:
        """Train the module on ``batch``, a minibatch of ``rows`` rows on the model's device.

        Subclasses compute the gradients, step ``optimizer`` (not the scheduler) and return the mean
        loss, as a number or a tensor with one entry.
        """
        raise NotImplementedError

    def _depends_on_fit_length(self) -> bool:
        """Return whether the scheduler depends on the length of the fit."""
        return False

    @property
    def n_params(self) -> int:
        """The number of parameters, including frozen ones; tied parameters count once."""
        return self._layout.size

    @property
    def module(self) -> nn.Module:
        """The user's module, whose parameters are views of the most recently bound memory."""
        return self._module

    def frozen_parameters(self) -> list[slice]:
        """Return the slices of the flat vector whose parameters have ``requires_grad=False``."""
        return [
            slice(start, start + parameter.numel())
            for parameter, start in zip(
                self._named_parameters.values(), self._layout.starts, strict=True
            )
            if not parameter.requires_grad
        ]

    def initial(self) -> Flat:
        """Return the initial parameters, f32[n_params].

        They are those given to ``start_from``, else the module's before the first ``bind``. Raise
        UsageError if the model was unpickled without ``start_from``.
        """
        if self._has_values:
            return gather_values(self._named_parameters)
        if self._initial is None:
            raise UsageError(
                f"this {type(self).__name__} was pickled, and pickles contain no parameters: bind"
                " parameters, or copy the model with copy.deepcopy"
            )
        return self._initial.copy()

    def start_from(self, params: Flat) -> None:
        """Make later calls of ``initial`` return a copy of these parameters, f32[n_params]."""
        self._initial, self._has_values = check_bindable(params, self.n_params).copy(), False

    def place(self, share: Share) -> None:
        """Set torch's number of threads and random seed in this process; choose the device.

        Raise UsageError if the wanted device does not exist.
        """
        torch.set_num_threads(share.threads)
        torch.manual_seed(share.seed)
        self._device = choose_device(self._device_wanted, share.gpu)

    @property
    def cuda_device(self) -> int | None:
        """The index of the GPU that trains the model; None for the CPU, or before ``place``."""
        if self._device.type != "cuda":
            return None
        index = self._device.index
        return int(torch.cuda.current_device()) if index is None else index

    def bind(self, params: Any) -> None:
        """Make the parameters views of ``params``, f32[n_params], without resetting the optimizer.

        ``params`` is on the host or on the model's device. If it is on the host and the model on a
        GPU, the parameters are views of a copy, which each step copies back.
        """
        shared = as_tensor(params, self.n_params, self._device)
        if self._has_values:
            self._initial, self._has_values = gather_values(self._named_parameters), False
        with self._mode_lock:  # not while another thread predicts
            move_buffers(self._device, self._module)
            self._views = ParameterViews(
                self._named_parameters, self._layout, shared, shared.to(self._device)
            )

    def step(self, batch: Batch) -> float:
        """Train on one minibatch, changing the bound parameters in place; return the mean loss.

        Return 0 for a NaN loss if all gradients are 0 and the parameters finite, as when all labels
        are ignored; such a step does not count in an epoch's loss. Warn of it when 1, 10, 100, ...
        were taken. If all rows weigh 0, change nothing and return 0; schedules advance. Raise
        UsageError if a parameter's memory is no longer part of the flat vector afterwards.
        """
        views = self._require_bound()
        optimizer, scheduler = self._get_optimizer()
        self.step_weight = None
        if not batch.total_weight:
            self._skip_batch()
            optimizer._opt_called = True  # else schedulers warn
            self._scaling.advance_scheduler(scheduler, None)
            return 0.0
        views.copy_from_shared()
        tensors = batch_to_device(self._device, batch)
        with (
            self._scaling.scaled_step(optimizer, scheduler),
            self._scaling.scaled_statistics(self._module),
        ):
            loss = loss_to_float(self._train_batch(optimizer, tensors, batch.rows))
        if (
            math.isnan(loss)
            and _has_zero_gradients(self._named_parameters)
            and all(torch.isfinite(each).all() for each in self._named_parameters.values())
        ):
            loss = self.step_weight = 0.0
            self._nan_losses += 1
            if str(self._nan_losses).strip("0") == "1":
                warnings.warn(NAN_LOSSES.format(self._nan_losses), stacklevel=2)
        is_loss = loss != 0 or not _has_zero_gradients(self._named_parameters)
        self._scaling.advance_scheduler(scheduler, loss if is_loss else None)
        views.copy_to_shared()
        self._has_stepped = True
        return loss

    def _skip_batch(self) -> None:
        """Count a minibatch whose rows all weigh 0; a subclass may have more to do."""

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Make the next step scale momentum and advance the schedule, as ``Paced`` specifies."""
        self._scaling.set_global_step(workers, minibatches, counted)

    def set_fit_length(self, length: FitLength) -> None:
        """Set the fit's length; rebuild optimizer and scheduler if the scheduler depends on it.

        The optimizer keeps its state. Such a scheduler starts again in each fit, and keeps its last
        rate beyond the fit's end.
        """
        if length == self._fit_length:
            return
        state = None
        if self._optimizer_pair is not None and self._depends_on_fit_length():
            state = self._early_optimizer_state or self.updater_state()
        self._fit_length, self._early_optimizer_state = length, None
        if state is not None:
            self.load_updater_state(state)

    def horizons(self, workers: int) -> dict[str, str]:
        """Return what this many workers change in momentum and schedule: name -> text."""
        changes = describe_scaling(*self._get_optimizer(), workers) | describe_statistics(
            self._module, workers
        )
        if "scheduler" in changes and self._scaling.interval == EPOCH:
            changes["scheduler"] = BY_EPOCHS
        return changes

    def has_adaptive_optimizer(self) -> bool:
        """Return whether steps are divided by the size of past gradients, as in Adam."""
        # Before ``bind``, parameters have no values and are not on their device: keep no optimizer.
        optimizer, _ = self._optimizer_pair or self._make_optimizer()
        # torch's and ``Dl4jOptimizer``'s names for what keeps the divisor above 0. Muon's eps is
        # for the norm of the current step, which it makes orthogonal in ns_steps iterations.
        return any(
            (group.get("eps") or group.get("epsilon")) and "ns_steps" not in group
            for group in optimizer.param_groups
        )

    def predict(self, features: Columns) -> Any:
        """Return the module's outputs in evaluation mode as arrays [rows, ...]."""
        with self._evaluation_mode():
            return join_outputs([self._predict_rows(rows) for rows in split_rows(features)])

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: logits, probabilities or values."""
        return self._outputs_kind

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError for rows that are not finite numbers or that ``forward`` cannot take.

        Only the number and names of the features are compared with the arguments of ``forward``.
        """
        rows = count_rows(features)
        check_rows(features, rows, "features")
        check_rows(labels, rows, "labels")
        try:
            call_with_features(inspect.signature(self._module.forward).bind, features)
        except TypeError as error:
            raise UsageError(
                f"{type(self._module).__name__}.forward does not take these features: {error}"
            ) from error

    def updater_state(self) -> State:
        """Return the state of optimizer and scheduler, named as in ``models.torch.optimizers``."""
        return dump_state(*self._get_optimizer(), self._named_parameters) | self._get_fit_state()

    def load_updater_state(self, state: State) -> None:
        """Restore a state returned by ``updater_state`` of an equal model.

        A scheduler that depends on the fit's length continues only if the state is of this fit.
        """
        self._get_optimizer()
        if not self._depends_on_fit_length():
            load_state(*self._get_optimizer(), self._named_parameters, state)
            return
        fit_state = self._get_fit_state()
        saved_fit_state = {k: v for k, v in state.items() if k.startswith(FIT_PREFIX)}
        if fit_state and fit_state == saved_fit_state:
            rest = {k: v for k, v in state.items() if k not in saved_fit_state}
            load_state(*self._get_optimizer(), self._named_parameters, rest)
            return
        if self._fit_length is None:
            self._early_optimizer_state = dict(state)
        self._optimizer_pair = None
        load_state(*self._get_optimizer(), self._named_parameters, drop_schedule(state))
        if fit_state and all(
            saved_fit_state.get(k) == fit_state[k] for k in fit_state if k != TOTAL_STEPS_KEY
        ):
            self._scaling.resume_at(self._get_optimizer()[1], count_scheduler_steps(state))

    def layer_of(self, index: int) -> str:
        """Return the name, as in ``named_parameters()``, of the parameter with entry ``index``."""
        return self._layout.name_at(index)

    def describe(self) -> dict[str, Any]:
        """Return names and shapes of the parameters; the module's code is not included."""
        arrays = zip(self._layout.names, self._layout.shapes, strict=True)
        return {
            "kind": self.KIND,
            "module": type(self._module).__qualname__,
            "text": str(self._module),
            "parameters": [[name, list(shape)] for name, shape in arrays],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Any:
        """Raise UsageError, because a description lacks the code of the user's module."""
        raise UsageError(
            f"{description.get('module')} was saved without its code: load it with"
            f" SparkNetwork.load(path, spark, model={cls.__name__}(...)) and a module of the same"
            " class, or open NAME.pt with torch.load and module.load_state_dict"
        )

    def buffers_bytes(self) -> bytes:
        """Return the current buffers, such as BatchNorm's statistics.

        Raise UsageError, naming the buffer, if the shape or dtype of a buffer has changed.
        """
        buffers = named_buffers(self._module)
        check_buffer_forms(buffers, self._buffer_forms)
        return pack_buffers(buffers)

    def load_buffers_bytes(self, data: bytes) -> None:
        """Restore buffers from ``buffers_bytes``; raise UsageError if the size differs."""
        load_buffers(named_buffers(self._module), data)

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Return the mean of ``reports``, each a worker's buffers; for integers the maximum."""
        return average_buffers(named_buffers(self._module), reports)

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """Return the mean as ``average_buffers`` does, with a weight for each report."""
        return average_buffers(named_buffers(self._module), reports, weights)

    def exported(self) -> tuple[str, bytes]:
        """Return (".pt", content): a file with the state_dict's tensors, for ``torch.load``."""
        state = {
            name: value.detach().cpu().clone()
            for name, value in self._module.state_dict().items()
            if torch.is_tensor(value)
        }
        file = io.BytesIO()
        torch.save(state, file)
        return ".pt", file.getvalue()

    def _require_bound(self) -> ParameterViews:
        """Return the ``ParameterViews``; fail if ``bind`` has not been called."""
        assert self._views is not None, "bind parameters first"
        return self._views

    def _get_optimizer(self) -> OptimizerPair:
        """Return (optimizer, scheduler or None); the first call creates them."""
        if self._optimizer_pair is None:
            self._optimizer_pair = self._make_optimizer()
            made_for = self._fit_length or UNKNOWN_LENGTH
            self._scaling.fit_length = made_for if self._depends_on_fit_length() else None
        return self._optimizer_pair

    def _get_fit_state(self) -> State:
        """Return entries for a saved state that identify the fit that the scheduler belongs to.

        The result is empty for a scheduler that does not depend on the fit's length.
        """
        self._get_optimizer()
        length = self._fit_length
        if length is None or not self._depends_on_fit_length():
            return {}
        return {
            f"{FIT_PREFIX}first_epoch": length.first_epoch,
            f"{FIT_PREFIX}minibatches_before": length.minibatches_before,
            TOTAL_STEPS_KEY: self._scaling.count_steps(length),
        }

    def _call_module(self, features: Any) -> Any:
        """Return the module's outputs. Raise UsageError, with shapes, if torch rejects features."""
        with explaining_shape_errors(
            f"{type(self._module).__name__}.forward", FORWARD_REMEDY, features=features
        ):
            return call_with_features(self._module, features)

    def changes_parameters(self) -> bool:
        """Return whether predictions change parameters, as when LoRA layers merge weights.

        Switch to evaluation mode and back as a test, and restore the exact parameters.
        """
        if not overrides_modes(self._module):
            return False
        parameters = list(self._named_parameters.values())
        before = [parameter.detach().clone() for parameter in parameters]
        with switch_mode(self._module, False):
            pairs = zip(parameters, before, strict=True)
            changed = not all(torch.equal(now, earlier) for now, earlier in pairs)
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)
        return changed

    def _predict_rows(self, features: Columns) -> Any:
        """Return the module's outputs for these rows as NumPy arrays."""
        with self._autocast_context():
            return outputs_to_numpy(self._call_module(features_to_device(self._device, features)))

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Set evaluation mode within the context; afterwards restore each submodule's mode.

        First copy the bound parameters to the device if they are on the host. Other threads that
        predict with the same model wait until the context ends.
        """
        with self._mode_lock:
            self._require_bound().copy_from_shared()
            # Tensors from inference_mode could not be used in training.
            with switch_mode(self._module, training=False), torch.no_grad():
                yield

    def _note_training_modes(self) -> None:
        """Store each submodule's mode, unless the module as a whole is in evaluation mode."""
        if self._module.training:
            self._training_modes = {k: part.training for k, part in self._module.named_modules()}

    def _copy_in_training_modes(self) -> nn.Module:
        """Return ``copy_without_storage`` of the module, in the modes stored when it last trained.

        The module itself keeps its current modes, such as evaluation mode after ``eval()``.
        """
        with self._mode_lock:
            self._note_training_modes()
            if self._module.training:
                copied = copy_without_storage(self._module, self._named_parameters)
            else:
                with switch_mode(self._module, training=True):
                    copied = copy_without_storage(self._module, self._named_parameters)
        for name, part in copied.named_modules():
            part.training = self._training_modes.get(name, part.training)
        return copied

    def _autocast_context(self) -> Any:
        """Return the context manager for computing with the option ``autocast``."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def __getstate__(self) -> dict[str, Any]:
        """Return options, hooks, and the module in training mode, without parameter memory."""
        require_same_parameters(self._module, self._named_parameters)
        state = {name: self.__dict__[name] for name in self.OPTIONS}
        hooks = collect_hooks(self._module, self._named_parameters)
        module = self._copy_in_training_modes()
        # torch pickles parameters of derived classes, such as geoopt's, as plain ones.
        classes = {
            name: type(each)
            for name, each in self._named_parameters.items()
            if issubclass(type(each), nn.Parameter) and type(each) is not nn.Parameter
        }
        return {**state, "_module": module, "_hooks": hooks, "_classes": classes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled model. Its parameters have no values until ``bind``."""
        self._set_up(activate_parametrizations(state["_module"]))
        self._note_training_modes()
        # Pickles of earlier versions lack hooks, classes, and newer options, whose default is None.
        for name, kind in state.get("_classes", {}).items():
            self._named_parameters[name].__class__ = kind
        register_hooks(self._named_parameters, state.get("_hooks", {}))
        self.__dict__.update({name: state.get(name) for name in self.OPTIONS})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a separate model for another fit, with the same initial parameters."""
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__())
        copied._initial = self.initial() if self._has_values else self._initial
        return copied


def _has_zero_gradients(named: NamedParameters) -> bool:
    """Return whether all gradients are zero, as after a minibatch whose labels are all ignored.

    The loss of such a minibatch is a mean over no labels, for which torch returns NaN.
    """
    return all(p.grad is None or not p.grad.any() for p in named.values())
