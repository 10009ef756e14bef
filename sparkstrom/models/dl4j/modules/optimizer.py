"""DL4J's updaters (optimizers) as one torch optimizer, with a parameter group for each array.

A step follows DL4J's order: normalize gradients, add l1 and l2, subtract weight decay, apply the
updater. Groups store momentum and beta1 under torch's names, so that they are scaled to the number
of workers like those of torch's own optimizers. Learning-rate schedules become one LambdaLR.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sparkstrom.models.dl4j.configuration import parse_typed
from sparkstrom.models.dl4j.parameters import STATE_VECTORS, TrainingRule, get_initial_vector_value

Tensor: TypeAlias = torch.Tensor
Group = dict[str, Any]
EXPONENT_MAX = 700.0  # exp of more overflows float64
NORMALIZATIONS = (
    *("none", "renormalizel2perlayer", "renormalizel2perparamtype"),
    *("clipelementwiseabsolutevalue", "clipl2perlayer", "clipl2perparamtype"),
)


class Dl4jOptimizer(Optimizer):  # type: ignore[misc]
    """Applies DL4J's updaters to parameter groups made by ``make_group``, each with one array."""

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Take a step with the current gradients; arrays without gradients do not change."""
        groups = [g for g in self.param_groups if g["params"][0].grad is not None]
        _normalize_gradients(groups)
        for group in groups:
            parameter = group["params"][0]
            gradient = parameter.grad
            if group["l1"]:
                gradient = gradient + group["l1"] * parameter.sign()
            if group["l2"]:
                gradient = gradient + group["l2"] * parameter
            if group["decay"]:
                scale = group["lr"] if group["decay_by_rate"] else 1.0
                parameter.mul_(1 - scale * group["decay"])
            state = self.state[parameter] or self._make_state(group, parameter)
            state["steps"] += 1
            parameter.sub_(STEP_FUNCTIONS[group["updater"]](gradient, state, group))

    def _make_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Make and return the initial state of one parameter."""
        value = get_initial_vector_value(group["updater"], group)
        state: dict[str, Any] = self.state[parameter]
        state.update(
            {v: torch.full_like(parameter, value) for v in STATE_VECTORS[group["updater"]]}
        )
        state["steps"] = 0
        return state


def make_group(layer: int, parameter: Any, rule: TrainingRule, epoch: int) -> Group:
    """Return the parameter group of one array.

    Args:
        layer: number of the array's layer; all gradients of a layer may be normalized together.
        parameter: the array.
        rule: how the array is trained.
        epoch: DL4J's epoch count, which schedules by epoch continue.
    """
    options: Group = dict(rule.optimizer.options)
    rate, schedule = options.pop("learningrate", 1.0), get_rate_schedule(rule)
    if schedule is not None and is_by_epoch(schedule):
        options["epoch"] = epoch
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    return {
        "params": [parameter],
        "updater": rule.optimizer.kind,
        "lr": rate if schedule is None else 1.0,  # the schedule returns the rate itself
        **options,  # momentum, betas, epsilon, rho, rmsdecay, epoch
        "l1": rule.l1,
        "l2": rule.l2,
        "decay": rule.decay,
        "decay_by_rate": rule.decay_by_rate,
        "normalization": rule.normalization,
        "threshold": rule.threshold,
        "layer": layer,
    }


def _normalize_gradients(groups: list[Group]) -> None:
    """Normalize or clip gradients in place, per layer or per array, as the groups specify."""
    by_layer: dict[int, list[Group]] = {}
    for group in groups:
        by_layer.setdefault(group["layer"], []).append(group)
    for members in by_layer.values():
        kind, limit = members[0]["normalization"], members[0]["threshold"]
        gradients = [group["params"][0].grad for group in members]
        if kind == "clipelementwiseabsolutevalue":
            for gradient in gradients:
                gradient.clamp_(-limit, limit)
        elif kind.endswith("perlayer"):
            norms = torch.stack([gradient.norm() for gradient in gradients])
            _scale_gradients(gradients, float(norms.norm()), kind, limit)
        elif kind.endswith("perparamtype"):
            for gradient in gradients:
                _scale_gradients([gradient], float(gradient.norm()), kind, limit)


def _scale_gradients(gradients: list[Tensor], norm: float, kind: str, limit: float) -> None:
    """Scale gradients in place from joint ``norm`` to 1, or for clipping at most to ``limit``."""
    clips = kind.startswith("clip")
    if not norm or (clips and norm <= limit):
        return
    for gradient in gradients:
        gradient.mul_((limit if clips else 1.0) / norm)


def _nesterovs_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return the step of Nesterov momentum, to be subtracted; update the velocity."""
    velocity, mu = state["velocity"], group["momentum"]
    velocity.mul_(mu).sub_(gradient, alpha=group["lr"])
    return gradient * group["lr"] - mu * velocity


def _update_moments(gradient: Tensor, state: dict[str, Any], group: Group) -> tuple[Tensor, Tensor]:
    """Update and return the running means of the gradient and of its square."""
    (beta1, beta2), mean, square = group["betas"], state["mean"], state["square"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return mean, square


def _bias_corrected_rate(state: dict[str, Any], group: Group) -> float:
    """Return Adam's learning rate including both bias corrections."""
    (beta1, beta2), t = group["betas"], state["steps"]
    return float(group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t))


def _adam_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return Adam's step, to be subtracted; update both running means in place."""
    mean, square = _update_moments(gradient, state, group)
    return _bias_corrected_rate(state, group) * mean / (square.sqrt() + group["epsilon"])


def _adabelief_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return AdaBelief's step; update the means of the gradient and of (gradient - mean)**2."""
    (beta1, beta2), mean, square = group["betas"], state["mean"], state["square"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    difference = gradient - mean
    square.mul_(beta2).addcmul_(difference, difference, value=1 - beta2).add_(group["epsilon"])
    return _bias_corrected_rate(state, group) * mean / (square.sqrt() + group["epsilon"])


def _amsgrad_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return AMSGrad's step, which divides by the largest mean square so far; update the state."""
    mean, square = _update_moments(gradient, state, group)
    torch.maximum(state["largest"], square, out=state["largest"])
    return _bias_corrected_rate(state, group) * mean / (state["largest"].sqrt() + group["epsilon"])


def _nadam_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return Nadam's step, to be subtracted; update both running means in place.

    Nadam is Adam with Nesterov's lookahead. As in DL4J, only the mean of the gradient is corrected
    for its bias, not that of the gradient's square.
    """
    mean, square = _update_moments(gradient, state, group)
    beta1 = group["betas"][0]
    lookahead = (beta1 * mean + (1 - beta1) * gradient) / (1 - beta1 ** state["steps"])
    return group["lr"] * lookahead / (square.sqrt() + group["epsilon"])


def _adamax_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return AdaMax's step; update the mean and the decayed maximum of absolute gradients."""
    (beta1, beta2), mean, largest = group["betas"], state["mean"], state["largest"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    torch.maximum(beta2 * largest, gradient.abs(), out=largest)
    return group["lr"] / (1 - beta1 ** state["steps"]) * mean / (largest + 1e-32)


def _adadelta_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return AdaDelta's step; update the mean squares of gradients and steps."""
    rho, epsilon, change = group["rho"], group["epsilon"], state["change"]
    state["square"].mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
    step = gradient * (change + epsilon).sqrt() / (state["square"] + epsilon).sqrt()
    change.mul_(rho).addcmul_(step, step, value=1 - rho)
    return step


def _adagrad_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return AdaGrad's step; update the sum of squares."""
    state["square"].addcmul_(gradient, gradient)
    return group["lr"] * gradient / (state["square"].sqrt() + group["epsilon"])


def _rmsprop_step(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    """Return RMSProp's step; update the mean square."""
    decay = group["rmsdecay"]
    state["square"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
    return group["lr"] * gradient / (state["square"].sqrt() + group["epsilon"])


# Each returns the step to subtract from the array: (gradient, state of the array, group) -> step.
STEP_FUNCTIONS: dict[str, Callable[[Tensor, dict[str, Any], Group], Tensor]] = {
    "noop": lambda gradient, state, group: gradient,  # DL4J subtracts the gradient unchanged
    "none": lambda gradient, state, group: gradient,
    "sgd": lambda gradient, state, group: gradient * group["lr"],
    "nesterovs": _nesterovs_step,
    "adam": _adam_step,
    "adabelief": _adabelief_step,
    "amsgrad": _amsgrad_step,
    "nadam": _nadam_step,
    "adamax": _adamax_step,
    "adadelta": _adadelta_step,
    "adagrad": _adagrad_step,
    "rmsprop": _rmsprop_step,
}


# Kind of a schedule -> (options in lower case, number of iterations or epochs) -> learning rate.
SCHEDULE_FUNCTIONS: dict[str, Callable[[dict[str, Any], int], float]] = {
    "fixedschedule": lambda o, i: o["value"],
    "exponentialschedule": lambda o, i: o["initialvalue"] * o["gamma"] ** i,
    "inverseschedule": lambda o, i: o["initialvalue"] / (1 + o["gamma"] * i) ** o["power"],
    "sigmoidschedule": lambda o, i: _sigmoid_rate(o, o["gamma"] * (i - o["stepsize"])),
    "stepschedule": lambda o, i: o["initialvalue"] * o["decayrate"] ** (i // o["step"]),
    "polyschedule": lambda o, i: (
        o["initialvalue"] * (1 + i / o["maxiter"]) ** o["power"] if i < o["maxiter"] else 0.0
    ),
    "cycleschedule": lambda o, i: _cycle_rate(o, i % o["cyclelength"]),
    "rampschedule": lambda o, i: _ramp_rate(o, i),
    "mapschedule": lambda o, i: o["values"][str(max(k for k in map(int, o["values"]) if k <= i))],
}


def _sigmoid_rate(options: dict[str, Any], z: float) -> float:
    """Return the rate of DL4J's sigmoid schedule at z; 0, as in Java, where exp would overflow."""
    return float(options["initialvalue"] / (1 + math.exp(-z))) if z > -EXPONENT_MAX else 0.0


def _cycle_rate(options: dict[str, Any], position: int) -> float:
    """Return the rate at ``position`` of DL4J's cycle, in which it rises, falls and then decays."""
    first = options["initiallearningrate"]
    half = (options["cyclelength"] - options["annealinglength"]) // 2
    rise = (options["maxlearningrate"] - first) / half
    if position < 2 * half:
        return float(first + rise * (position if position < half else 2 * half - position))
    remaining = options["cyclelength"] - position
    return float(first * options["annealingdecay"] ** (options["annealinglength"] - remaining))


def _ramp_rate(options: dict[str, Any], iteration: int) -> float:
    """Return the rate of DL4J's ramp schedule, rising from nearly 0 to that of a base schedule.

    Raise KeyError if the base schedule is unsupported.
    """
    base = parse_typed(options["baseschedule"])
    if base is None or is_by_epoch(base) or not is_supported_schedule((base.kind, base.fields)):
        raise KeyError("baseschedule")
    return float(
        min((iteration + 1) / options["numiter"], 1.0)
        * SCHEDULE_FUNCTIONS[base.kind](base.fields, iteration)
    )


def get_rate_schedule(rule: TrainingRule) -> tuple[str, dict[str, Any]] | None:
    """Return the learning rate's schedule as (kind in lower case, options), or None."""
    parsed = parse_typed(json.loads(rule.optimizer.schedules).get("learningrateschedule"))
    return None if parsed is None else (parsed.kind, parsed.fields)


def is_by_epoch(schedule: tuple[str, dict[str, Any]]) -> bool:
    """Return whether a schedule counts epochs (ScheduleType.EPOCH) instead of iterations."""
    return str(schedule[1].get("scheduletype", "")).lower() == "epoch"


def is_supported_schedule(schedule: tuple[str, dict[str, Any]]) -> bool:
    """Return whether a schedule is one of ``SCHEDULE_FUNCTIONS`` and has all options it needs."""
    kind, options = schedule
    if kind not in SCHEDULE_FUNCTIONS:
        return False
    try:
        return math.isfinite(SCHEDULE_FUNCTIONS[kind](options, 0))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return False


def make_scheduler(rules: list[TrainingRule], iterations: int, optimizer: Optimizer) -> LambdaLR:
    """Return a scheduler for all groups that continues from DL4J's iteration count."""
    return LambdaLR(
        optimizer,
        [partial(_rate_factor, rule, iterations, optimizer, n) for n, rule in enumerate(rules)],
    )


def _rate_factor(
    rule: TrainingRule, iterations: int, optimizer: Optimizer, number: int, minibatches: int
) -> float:
    """Return LambdaLR's factor for group ``number`` after this many minibatches.

    For a group with a schedule, whose own rate is 1, it is the scheduled rate; otherwise it is 1.
    ``iterations`` is DL4J's count of minibatches, from which schedules continue.
    """
    schedule = get_rate_schedule(rule)
    if schedule is None:
        return 1.0
    epoch = optimizer.param_groups[number].get("epoch")
    return SCHEDULE_FUNCTIONS[schedule[0]](
        schedule[1], iterations + minibatches if epoch is None else epoch
    )


def set_schedule_epoch(optimizer: Optimizer, scheduler: LambdaLR, epoch: int) -> None:
    """Set the epoch, and the rate, of the groups whose schedule counts epochs."""
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, (base, rate) in zip(optimizer.param_groups, rates, strict=True):
        if group.get("epoch", epoch) != epoch:
            group["epoch"] = epoch
            group["lr"] = base * rate(scheduler.last_epoch)
