"""DL4J's updaters as one torch optimizer: a group for each array, with its own updater and options.

A step is done in DL4J's order: gradients are normalized, l1 and l2 added, weight decay taken off,
and then the updater's step. Momentum and beta1 lie in a group under torch's names, so that they
follow the fit's minibatches as those of torch's own optimizers do.
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

from sparkstrom.models.dl4j.java_names import typed
from sparkstrom.models.dl4j.training_rules import VECTORS, Rule, fresh_value

Tensor: TypeAlias = torch.Tensor
Group = dict[str, Any]
EXPONENT_MAX = 700.0  # of exp in float64
NORMALIZATIONS = (
    *("none", "renormalizel2perlayer", "renormalizel2perparamtype"),
    *("clipelementwiseabsolutevalue", "clipl2perlayer", "clipl2perparamtype"),
)


class Dl4jOptimizer(Optimizer):  # type: ignore[misc]
    """Steps as DL4J's updaters do; ``group_of`` makes its groups."""

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """One minibatch, from the gradients that are there."""
        reached = [g for g in self.param_groups if g["params"][0].grad is not None]
        _normalize(reached)
        for group in reached:
            parameter = group["params"][0]
            gradient = parameter.grad
            if group["l1"]:
                gradient = gradient + group["l1"] * parameter.sign()
            if group["l2"]:
                gradient = gradient + group["l2"] * parameter
            if group["decay"]:
                scale = group["lr"] if group["decay_by_rate"] else 1.0
                parameter.mul_(1 - scale * group["decay"])
            state = self.state[parameter] or self._begun(group, parameter)
            state["steps"] += 1
            parameter.sub_(STEPS[group["updater"]](gradient, state, group))

    def _begun(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        filled = fresh_value(group["updater"], group)
        state: dict[str, Any] = self.state[parameter]
        state.update({v: torch.full_like(parameter, filled) for v in VECTORS[group["updater"]]})
        state["steps"] = 0
        return state


def group_of(layer: int, parameter: Any, rule: Rule, epoch: int) -> Group:
    """Of one array of one layer; ``epoch`` is DL4J's, from which schedules go on."""
    options: Group = dict(rule.updater.options)
    rate, schedule = options.pop("learningrate", 1.0), schedule_of(rule)
    if schedule is not None and is_by_epoch(schedule):
        options["epoch"] = epoch
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    return {
        "params": [parameter],
        "updater": rule.updater.kind,
        "lr": rate if schedule is None else 1.0,  # a schedule says the rate itself
        **options,  # momentum, betas, epsilon, rho, rmsdecay, epoch
        "l1": rule.l1,
        "l2": rule.l2,
        "decay": rule.decay,
        "decay_by_rate": rule.decay_by_rate,
        "normalization": rule.normalization,
        "threshold": rule.threshold,
        "layer": layer,
    }


# -- gradients -------------------------------------------------------------------------------------


def _normalize(groups: list[Group]) -> None:
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
            _scale(gradients, float(norms.norm()), kind, limit)
        elif kind.endswith("perparamtype"):
            for gradient in gradients:
                _scale([gradient], float(gradient.norm()), kind, limit)


def _scale(gradients: list[Tensor], norm: float, kind: str, limit: float) -> None:
    """To norm 1, or to at most the limit where it is clipping."""
    clips = kind.startswith("clip")
    if not norm or (clips and norm <= limit):
        return
    for gradient in gradients:
        gradient.mul_((limit if clips else 1.0) / norm)


# -- updaters: what to subtract --------------------------------------------------------------------


def _sgd(gradient: Tensor, _: dict[str, Any], group: Group) -> Tensor:
    return gradient * group["lr"]


def _no_op(gradient: Tensor, _: dict[str, Any], group: Group) -> Tensor:
    return gradient  # DL4J's leaves it as it is, and that is subtracted: a rate of 1


def _nesterovs(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    velocity, mu = state["velocity"], group["momentum"]
    velocity.mul_(mu).sub_(gradient, alpha=group["lr"])
    return gradient * group["lr"] - mu * velocity


def _moments(gradient: Tensor, state: dict[str, Any], group: Group) -> tuple[Tensor, Tensor]:
    (beta1, beta2), mean, square = group["betas"], state["mean"], state["square"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return mean, square


def _rate(state: dict[str, Any], group: Group) -> float:
    """Adam's, with both corrections of bias."""
    (beta1, beta2), t = group["betas"], state["steps"]
    return float(group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t))


def _adam(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    mean, square = _moments(gradient, state, group)
    return _rate(state, group) * mean / (square.sqrt() + group["epsilon"])


def _adabelief(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    (beta1, beta2), mean, square = group["betas"], state["mean"], state["square"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    off = gradient - mean
    square.mul_(beta2).addcmul_(off, off, value=1 - beta2).add_(group["epsilon"])
    return _rate(state, group) * mean / (square.sqrt() + group["epsilon"])


def _amsgrad(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    mean, square = _moments(gradient, state, group)
    torch.maximum(state["largest"], square, out=state["largest"])
    return _rate(state, group) * mean / (state["largest"].sqrt() + group["epsilon"])


def _nadam(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    mean, square = _moments(gradient, state, group)
    beta1 = group["betas"][0]
    ahead = (beta1 * mean + (1 - beta1) * gradient) / (1 - beta1 ** state["steps"])
    return group["lr"] * ahead / (square.sqrt() + group["epsilon"])


def _adamax(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    (beta1, beta2), mean, largest = group["betas"], state["mean"], state["largest"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    torch.maximum(beta2 * largest, gradient.abs(), out=largest)
    return group["lr"] / (1 - beta1 ** state["steps"]) * mean / (largest + 1e-32)


def _adadelta(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    rho, epsilon, change = group["rho"], group["epsilon"], state["change"]
    state["square"].mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
    step = gradient * (change + epsilon).sqrt() / (state["square"] + epsilon).sqrt()
    change.mul_(rho).addcmul_(step, step, value=1 - rho)
    return step


def _adagrad(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    state["square"].addcmul_(gradient, gradient)
    return group["lr"] * gradient / (state["square"].sqrt() + group["epsilon"])


def _rmsprop(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor:
    decay = group["rmsdecay"]
    state["square"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
    return group["lr"] * gradient / (state["square"].sqrt() + group["epsilon"])


STEPS: dict[str, Callable[[Tensor, dict[str, Any], Group], Tensor]] = {
    "noop": _no_op,
    "none": _no_op,
    "sgd": _sgd,
    "nesterovs": _nesterovs,
    "adam": _adam,
    "adabelief": _adabelief,
    "amsgrad": _amsgrad,
    "nadam": _nadam,
    "adamax": _adamax,
    "adadelta": _adadelta,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


# -- learning rates that change --------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[dict[str, Any], int], float]] = {
    "fixedschedule": lambda o, i: o["value"],
    "exponentialschedule": lambda o, i: o["initialvalue"] * o["gamma"] ** i,
    "inverseschedule": lambda o, i: o["initialvalue"] / (1 + o["gamma"] * i) ** o["power"],
    "sigmoidschedule": lambda o, i: _sigmoid(o, o["gamma"] * (i - o["stepsize"])),
    "stepschedule": lambda o, i: o["initialvalue"] * o["decayrate"] ** (i // o["step"]),
    "polyschedule": lambda o, i: (
        o["initialvalue"] * (1 + i / o["maxiter"]) ** o["power"] if i < o["maxiter"] else 0.0
    ),
    "cycleschedule": lambda o, i: _cycle(o, i % o["cyclelength"]),
    "rampschedule": lambda o, i: _ramp(o, i),
    "mapschedule": lambda o, i: o["values"][str(max(k for k in map(int, o["values"]) if k <= i))],
}


def _sigmoid(o: dict[str, Any], z: float) -> float:
    """Of a rate that ends at 0, Python's exp would overflow one day; Java's is infinite."""
    return float(o["initialvalue"] / (1 + math.exp(-z))) if z > -EXPONENT_MAX else 0.0


def _cycle(o: dict[str, Any], at: int) -> float:
    """Up, down, and then below where it began."""
    first, half = o["initiallearningrate"], (o["cyclelength"] - o["annealinglength"]) // 2
    rise = (o["maxlearningrate"] - first) / half
    if at < 2 * half:
        return float(first + rise * (at if at < half else 2 * half - at))
    left = o["cyclelength"] - at
    return float(first * o["annealingdecay"] ** (o["annealinglength"] - left))


def _ramp(o: dict[str, Any], i: int) -> float:
    """From nearly nothing to another schedule's."""
    base = typed(o["baseschedule"])
    if base is None or is_by_epoch(base) or not is_known((base.kind, base.fields)):
        raise KeyError("baseschedule")
    return float(min((i + 1) / o["numiter"], 1.0) * SCHEDULES[base.kind](base.fields, i))


def schedule_of(rule: Rule) -> tuple[str, dict[str, Any]] | None:
    """Of its learning rate: the name, in lower case, and options; None where it stays the same."""
    found = typed(json.loads(rule.updater.schedules).get("learningrateschedule"))
    return None if found is None else (found.kind, found.fields)


def is_by_epoch(schedule: tuple[str, dict[str, Any]]) -> bool:
    """ScheduleType.EPOCH, not ITERATION."""
    return str(schedule[1].get("scheduletype", "")).lower() == "epoch"


def is_known(schedule: tuple[str, dict[str, Any]]) -> bool:
    """One of those above, with all of its options."""
    kind, options = schedule
    if kind not in SCHEDULES:
        return False
    try:
        return math.isfinite(SCHEDULES[kind](options, 0))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return False


def scheduler_of(rules: list[Rule], iterations: int, optimizer: Optimizer) -> LambdaLR:
    """Each group's learning rate, from where DL4J was."""
    return LambdaLR(
        optimizer,
        [partial(_rate_at, rule, iterations, optimizer, n) for n, rule in enumerate(rules)],
    )


def _rate_at(
    rule: Rule, iterations: int, optimizer: Optimizer, number: int, minibatches: int
) -> float:
    """The schedule's, or 1: the group's own."""
    found = schedule_of(rule)
    if found is None:
        return 1.0
    epoch = optimizer.param_groups[number].get("epoch")
    return SCHEDULES[found[0]](found[1], iterations + minibatches if epoch is None else epoch)


def stand_at_epoch(optimizer: Optimizer, scheduler: LambdaLR, epoch: int) -> None:
    """Rates by epoch, from the next step on."""
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, (base, rate) in zip(optimizer.param_groups, rates, strict=True):
        if group.get("epoch", epoch) != epoch:
            group["epoch"] = epoch
            group["lr"] = base * rate(scheduler.last_epoch)
