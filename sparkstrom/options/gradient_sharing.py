"""Define SharedTrainingMaster, the options of gradient-sharing training, named as in DL4J.

The class only stores and checks the options; ``SparkNetwork`` acts on them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import (
    COUNT_MAX,
    KEY,
    Refused,
    call_parser,
    custom,
    flag,
    instance,
    one_of,
    seconds,
    whole,
)
from sparkstrom.encoding import thresholds as dl4j_names
from sparkstrom.encoding.encoder import AGGREGATIONS
from sparkstrom.encoding.layers import MULTIPLIER_MAX
from sparkstrom.encoding.residual import TRAIN_ON, ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import (
    ALGORITHMS,
    AUTO,
    AutoThreshold,
    AveragingThreshold,
    ThresholdAlgorithm,
)
from sparkstrom.options.common import (
    BALANCED_REASON,
    KEPT_ROWS_REASON,
    ONE_ROW_REASON,
    WORKERS_MAX,
    CommonOptions,
    option,
    option_class,
    require,
    require_whole,
)
from sparkstrom.options.network import VoidConfiguration

SUM, MEAN, SQRT = "sum", "mean", "sqrt"
HORIZONS = FIT, WORKER = ("fit", "worker")
SEQUENTIAL, LIMITED, DDP = SCALINGS = ("sequential", "limited", "ddp")
# Scaling rule -> (horizon, aggregations)
RULES = {SEQUENTIAL: (FIT, (SUM,)), LIMITED: (FIT, (SUM,)), DDP: (WORKER, (MEAN, SQRT))}
DDP_SENT_FRACTION_MAX = 1.6e-2  # more than 200 times fewer bytes than dense float32 (measured)
SUMMED_WORKERS_MAX = 8  # with "limited", more workers train as so many would
ONE, ALL = CHECKPOINT_UPDATERS = ("one", "all")

_NO_GC = "Python frees an array when its last user is done; there is no collector to call"

# Maps DL4J's names that have no meaning here to the reason.
REFUSED: dict[str, str] = {
    **dl4j_names.REFUSED,
    "rdd_data_set_num_examples": ONE_ROW_REASON,
    "num_workers": "DL4J does not use it either; workers are workers_per_node x executors",
    "storage_level": KEPT_ROWS_REASON,
    "storage_level_streams": KEPT_ROWS_REASON,
    "transport": "there is one transport: Aeron, UDP between executors and IPC inside one",
    "transport_type": "there is one transport: Aeron, UDP between executors and IPC inside one",
    "repartition_strategy": BALANCED_REASON,
    "repartitioner": "there are as many partitions as workers; repartition='never' keeps yours",
    "worker_prefetch_num_batches": "a worker has its whole partition before its first step",
    "worker_toggle_periodic_gc": _NO_GC,
    "worker_periodic_gc_frequency": _NO_GC,
    "mesh_build_mode": "it belongs to VoidConfiguration(mesh_build_mode=...)",
    "unicast_port": "it belongs to VoidConfiguration(unicast_port=...)",
    "network_mask": "it belongs to VoidConfiguration(network_mask=...)",
    "controller_address": "it belongs to VoidConfiguration(controller_address=...)",
    "controller": "it belongs to VoidConfiguration(controller=...)",
}
# Maps DL4J's names to names of options.
ALIASES = {**dl4j_names.ALIASES, "void_configuration": "void", "repartition_data": "repartition"}

_CLIPPING = "must be None or a post-processor, such as ResidualClipping(5.0, 5)"
_MULTIPLIERS = 'must be None or a dictionary by layer, such as {"layer 1": 2}'
_THRESHOLD = f"must be {AUTO!r} or a threshold algorithm, such as AdaptiveThreshold(1e-3)"
_CLASSES = {made.__name__: made for made in (*ALGORITHMS, ResidualClipping, WarmUp)}
_parse_call = call_parser(_CLASSES, "AdaptiveThreshold(1e-3)")
_parse_algorithm = call_parser(_CLASSES, "AdaptiveThreshold(1e-3)", f"; or {AUTO}")


def _parse_threshold(key: str, text: str) -> object:
    """Parse AUTO or a threshold algorithm; ``key`` is the option's name for messages."""
    return AUTO if text.lower() == AUTO else _parse_algorithm(key, text)


def _parse_multipliers(key: str, text: str) -> object:
    """Parse a dictionary of layer multipliers; ``key`` is the option's name for messages.

    Raise UsageError if the text is not a Python literal.
    """
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise UsageError(f"{key}={text!r}: must be written like {{'layer 1': 2}}") from None


def _check_multipliers(value: object) -> dict[str, int] | None:
    """Return layer multipliers as a dictionary, or None.

    Raise Refused or UsageError if they are invalid.
    """
    if value is None:
        return None
    if not (isinstance(value, Mapping) and all(isinstance(layer, str) for layer in value)):
        raise Refused(_MULTIPLIERS)
    of_layer = whole(1, MULTIPLIER_MAX, unit="tau")[KEY]
    return {
        str(layer): of_layer.read(f"layer_multipliers[{layer!r}]", multiplier)
        for layer, multiplier in value.items()
    }


@option_class(refused=REFUSED, aliases=ALIASES)
@dataclass(frozen=True, slots=True)
class SharedTrainingMaster(CommonOptions):
    """Options of gradient-sharing training: workers asynchronously exchange thresholded updates.

    The method is that of Strom (2015) and of DL4J's class of this name. The constructor raises
    UsageError if a value, name or combination is invalid.
    """

    void: VoidConfiguration = option(
        VoidConfiguration(),
        instance((VoidConfiguration,), "must be a VoidConfiguration"),
        "addresses, ports and deadlines of the network between the workers",
        when="Pass a VoidConfiguration if the network needs fixed ports or addresses, other"
        " deadlines, or a mesh.",
        local=False,
    )
    _: KW_ONLY
    train_on: str = option(
        "local",
        one_of(TRAIN_ON),
        'parameters that a training step computes with: "local" is the shared parameters plus the'
        ' worker\'s own residual; "replica" is the shared parameters alone, as in DL4J',
        when='Keep "local", which is more accurate for the same number of bytes. Use "replica" only'
        " to train as DL4J does.",
        local_rounds=False,
    )
    threshold: ThresholdAlgorithm | str = option(
        AUTO,
        instance((ThresholdAlgorithm,), _THRESHOLD, words=(AUTO,), parse=_parse_threshold),
        'algorithm that chooses the threshold tau, which a change must reach to be sent; "auto"'
        ' means ``AutoThreshold()``; with ``scaling="ddp"``, it means'
        f" ``AutoThreshold(1e-3, {DDP_SENT_FRACTION_MAX})``, but averaged updates of four or more"
        " workers (those of Adam and its kind are not) contain up to 0.6 % of the parameters, and"
        " every eighth and the last contain 12 %",
        when='"auto" needs no tuning; keep it if updates are averaged. Otherwise, if links are'
        " fast, use ``AutoThreshold(1e-3, 3e-2)`` to send more, which helps Adam most. Near the"
        " largest stable learning rate, sending more makes training worse. Use another algorithm"
        " to train with a threshold that was tuned in DL4J.",
        local_rounds=False,
    )
    residual_post_processor: ResidualClipping | None = option(
        ResidualClipping(5.0, 5),
        instance((ResidualClipping,), _CLIPPING, words=(None,), parse=_parse_call),
        "post-processor of the residual, which contains a worker's changes that are not sent yet;"
        " None: the residual is not changed",
        when="With 16 or more workers, use ``ResidualClipping(1, 1)`` if the learning rate is near"
        " the largest that one process tolerates. If a warning says that clipping discards much of"
        " what was learned, clip less, for example with ``ResidualClipping(20.0)``.",
        local_rounds=False,
    )
    layer_multipliers: Mapping[str, int] | None = option(
        None,
        custom(_check_multipliers, _MULTIPLIERS, "tau", _parse_multipliers),
        'threshold of each named layer as a multiple of the threshold tau, such as ``{"layer 2": 4,'
        ' "layer 3 biases": 1}``; all other layers have the multiple 1',
        when="Set a multiple for a layer that changes much more than the others and would therefore"
        " fill the updates.",
        local_rounds=False,
        hash=False,
    )
    warm_up: WarmUp | None = option(
        None,
        instance(
            (WarmUp,),
            "must be None or a warm-up, such as WarmUp(100)",
            words=(None,),
            parse=_parse_call,
        ),
        "warm-up, in which each worker's first updates send more changes; None: no warm-up",
        when="Use a warm-up if early gradients are large and change quickly, so that they would"
        " arrive late. A warm-up raises the number of bytes at the beginning of a fit.",
        local_rounds=False,
    )
    shake_frequency: int = option(
        0,
        whole(0, COUNT_MAX, unit="publications", remedy=" publications, as a rule 100"),
        "every n-th update (publication) of a worker uses a third of the threshold; with 0, all"
        " updates use the full threshold",
        when="Set ``shake_frequency``, for example to 100, so that changes that stay below the"
        " threshold for long are sent from time to time.",
        local_rounds=False,
    )
    publish_every: int | str = option(
        AUTO,
        whole(1, COUNT_MAX, unit="steps", remedy=", or 'auto'", words=(AUTO,)),
        'training steps from one update (publication) of a worker to the next; "auto": a worker'
        " publishes when its last update is committed. If encoding an update takes more than a"
        " fifth of a step's time, a single worker also waits until the update contains two to four"
        " steps, and each of two workers until it contains two. This does not apply to the first"
        " 50 updates of a worker in a fit, nor if ``max_lead`` or ``max_staleness`` is a number",
        when='With "auto", the slowest link determines how often workers publish. Set a number,'
        " such as 4, to send fewer bytes; a worker's changes then wait longer in its residual.",
        local_rounds=False,
    )
    scaling: str | None = option(
        None,
        one_of(SCALINGS, (None,)),
        'rule by which hyperparameters carry over to more workers. "sequential" expects'
        ' hyperparameters that were tuned on one machine. "limited" expects the same, but more than'
        f' {SUMMED_WORKERS_MAX} workers train as {SUMMED_WORKERS_MAX} would. "ddp" expects'
        " hyperparameters that were tuned for as many ranks of DistributedDataParallel. None:"
        ' ``horizon`` and ``aggregation`` decide, by default as "sequential"',
        when='Use "ddp" for the learning rate and momentum of a DistributedDataParallel script that'
        ' has as many ranks as there are workers. With "ddp", each worker has its own momentum, and'
        " updates are averaged. With adaptive optimizers such as Adam, they weigh"
        " 1 / sqrt(workers) instead: divide AdamW's weight decay by sqrt(workers)."
        ' Use "limited" if more than eight workers shall train as eight do.'
        f' With "limited", momentum m becomes m ** {SUMMED_WORKERS_MAX}, and an update has the'
        f" weight {SUMMED_WORKERS_MAX} / workers. ``sparkstrom rehearse --scaling"
        " sequential,limited,ddp`` compares the rules (docs/rehearse.md).",
        local_rounds=False,
    )
    aggregation: str | None = option(
        None,
        one_of(tuple(AGGREGATIONS), (None,)),
        'weight of an update: 1 for "sum", 1 / workers for "mean", 1 / sqrt(workers) for "sqrt";'
        ' None: "sum"; but with ``scaling="ddp"``, "sqrt" if the optimizer is adaptive, such as'
        ' Adam, and "mean" otherwise',
        when='Try "sqrt" or "mean" if the sum of all workers\' steps is too large for the task. In'
        ' measurements, "sqrt" helped some tasks and harmed others.',
        local_rounds=False,
    )
    limit_overshoot: bool = option(
        True,
        flag(),
        "whether the weight of updates is limited while more than eight workers train and updates"
        " are summed. With a limit of n, each of k workers' updates has the weight n / k. n starts"
        " at 4 and grows. When a round (one update of every worker) undoes a part of the round"
        " before it, the fit warns and lowers n for the rest of the fit, even while eight or fewer"
        " workers train",
        when="Set ``limit_overshoot=False`` to sum the updates of all workers throughout the fit,"
        " for example to compare learning rates.",
        local_rounds=False,
    )
    horizon: str | None = option(
        None,
        one_of(HORIZONS, (None,)),
        'minibatches that momentum and schedules count: those of the whole "fit", or those of each'
        ' "worker"; None: "worker" with ``scaling="ddp"``, otherwise "fit"',
        when='Keep "fit" for hyperparameters that were tuned on one machine. Use "worker" for'
        " hyperparameters that were tuned with as many workers, as in DL4J.",
        local_rounds=False,
    )
    max_lead: int | str | None = option(
        AUTO,
        whole(
            1,
            COUNT_MAX,
            unit="steps",
            remedy=", or 'auto', or None for any number",
            words=(AUTO, None),
        ),
        'largest number of steps that a worker may be ahead of the slowest worker; "auto":'
        " ``publish_every`` if that is a number, otherwise 4 for up to two workers, 2 for three and"
        " 1 for more; None: no limit",
        when="Raise ``max_lead``, for example to 8, if waiting for the slowest worker costs much"
        " time, as with steps of about a millisecond. A higher ``max_lead`` needs a learning rate"
        " well below the largest stable rate. With one or two workers, also set"
        ' ``publish_every=2``, because a number for ``max_lead`` makes ``publish_every="auto"``'
        " publish after each step.",
        local_rounds=False,
    )
    max_staleness: int | str | None = option(
        AUTO,
        whole(
            0,
            COUNT_MAX,
            unit="rounds",
            remedy=" rounds, or 'auto', or None for any number",
            words=(AUTO, None),
        ),
        'largest number of rounds (``publish_every`` steps of every worker, one with "auto") by'
        ' which other workers\' updates may be late; "auto": 24 / workers steps (rounded'
        " down) less one round, at least 0; None: no limit",
        when="Lower ``max_staleness`` if messages take longer than steps and training with many"
        " workers is unstable. Raise ``max_staleness``, or use None, to wait less if the task"
        " tolerates later updates.",
        local_rounds=False,
    )
    min_workers: int = option(
        1,
        whole(1, WORKERS_MAX, unit="workers"),
        "workers that must join within ``start_timeout`` seconds",
        when="Raise ``min_workers`` if a fit should fail rather than start with only a few of its"
        " workers. Workers that come later join the running fit.",
        local_rounds=False,
    )
    step_timeout: float = option(
        600.0,
        seconds(),
        "seconds that one step, or one read of the data, may take",
        when="Raise ``step_timeout`` if a step, or a read of the data, can take longer. Lower"
        " ``step_timeout`` to notice sooner that a step hangs.",
    )
    checkpoint_updaters: str = option(
        ONE,
        one_of(CHECKPOINT_UPDATERS),
        'optimizer states in a checkpoint: "one" saves one worker\'s state and restores it to all'
        ' workers; "all" saves the state of every worker',
        when='Use "all" if the rows of the workers differ much, or if momentum averages over many'
        " steps. Every worker's state then passes through the driver's link at each checkpoint and"
        " is in each file.",
        local_rounds=False,
    )
    encoding_debug_mode: bool = option(
        False,
        flag(),
        "whether workers log the size and percentiles of their residuals from time to time",
        when="Set ``encoding_debug_mode=True`` to examine how large each worker's unsent changes"
        " are.",
        local_rounds=False,
    )
    debug_longer_iterations: int = option(
        0,
        whole(0, COUNT_MAX, unit="milliseconds"),
        "milliseconds that a worker sleeps in every step, to simulate a slow worker",
        when="Set ``debug_longer_iterations`` only to test how a fit behaves with slow workers.",
    )

    @property
    def minibatch_horizon(self) -> str:
        """Whose minibatches momentum and schedules count: those of the "fit" or of each "worker".

        If ``horizon`` is not given, ``scaling`` determines it.
        """
        return self.horizon or RULES[self.scaling or SEQUENTIAL][0]

    def choose_update_weight(self, is_adaptive: bool) -> str:
        """Return the weight of an update: "sum", "mean" or "sqrt".

        With ``scaling="ddp"`` it depends on the optimizer. An adaptive optimizer divides its steps
        by the size of past gradients. The gradient of one minibatch is mostly noise, so it is
        about sqrt(k) times as large as DDP's gradient, the mean over k ranks. A step of one of k
        workers therefore makes only 1 / sqrt(k) of the progress of a step of DDP, and updates
        weigh 1 / sqrt(k) instead of 1 / k. This is the square root scaling rule (Malladi et al.
        2022, "On the SDEs and scaling rules for adaptive gradient algorithms").

        Args:
            is_adaptive: whether the optimizer is adaptive, such as Adam.
        """
        if self.aggregation is not None:
            return self.aggregation
        if self.scaling == DDP:
            return SQRT if is_adaptive else MEAN
        return SUM

    @property
    def sums_updates(self) -> bool:
        """Whether updates are summed; ``scaling`` or ``limit_overshoot`` may limit the sum."""
        return self.choose_update_weight(is_adaptive=False) == SUM

    @property
    def threshold_algorithm(self) -> ThresholdAlgorithm:
        """The algorithm that chooses the threshold if the optimizer is not adaptive (SGD)."""
        return self.choose_threshold(is_adaptive=False)

    def choose_threshold(self, is_adaptive: bool) -> ThresholdAlgorithm:
        """Return the algorithm that chooses the threshold.

        "auto" depends on ``scaling``, and with "ddp" on the weight of updates.

        Args:
            is_adaptive: whether the optimizer is adaptive, such as Adam.
        """
        if not isinstance(self.threshold, str):
            return self.threshold
        if self.scaling != DDP:
            return AutoThreshold()
        if self.choose_update_weight(is_adaptive) == MEAN:
            return AveragingThreshold()
        return AutoThreshold(sent_fraction_max=DDP_SENT_FRACTION_MAX)

    @property
    def summed_workers_max(self) -> int | None:
        """Largest number of workers that all updates together may count as; None: no limit."""
        return SUMMED_WORKERS_MAX if self.scaling == LIMITED else None

    def __post_init__(self) -> None:
        self.check()
        if self.scaling is not None:
            horizon, aggregations = RULES[self.scaling]
            for name, implied in ("horizon", (horizon,)), ("aggregation", aggregations):
                value = getattr(self, name)
                meant = " or ".join(f"{name}={each!r}" for each in implied)
                reason = (
                    f"scaling={self.scaling!r} allows only {meant}; leave out scaling or {name}"
                )
                require(value in (None, *implied), name, value, reason)
        if isinstance(self.publish_every, int) and isinstance(self.max_lead, int):
            reason = ", the value of publish_every: workers tell how far they are when they publish"
            require_whole("max_lead", self.max_lead, self.publish_every, reason)
        require(
            self.debug_longer_iterations < 1000 * self.step_timeout,
            "debug_longer_iterations",
            self.debug_longer_iterations,
            f"ms; with step_timeout={self.step_timeout} s every step would be late",
        )


# How late updates may be with max_staleness="auto", in minibatches of the whole fit: stability
# depends on these, not on a worker's own steps.
STALENESS_TARGET = 24
# Two limits for the same reason. With max_lead="auto", a worker may be ahead of all others together
# by LEAD_TARGET of their minibatches. With publish_every="auto", an update contains at most
# UPDATE_TARGET minibatches of the whole fit. An update of several steps has fewer steps than a
# worker may be ahead. A worker that has to wait has then published the steps that the others wait
# for.
LEAD_TARGET = 4
UPDATE_TARGET = 4
