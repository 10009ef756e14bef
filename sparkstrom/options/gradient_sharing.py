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
from sparkstrom.encoding.thresholds import ALGORITHMS, AUTO, ThresholdAlgorithm
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

SUM = "sum"
HORIZONS = FIT, WORKER = ("fit", "worker")
SEQUENTIAL, LIMITED, DDP = SCALINGS = ("sequential", "limited", "ddp")
# Scaling rule -> (horizon, aggregation)
RULES = {SEQUENTIAL: (FIT, SUM), LIMITED: (FIT, SUM), DDP: (WORKER, "mean")}
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
ALIASES = {
    **dl4j_names.ALIASES,
    "void_configuration": "void",
    "repartition_data": "repartition",
}

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
    """Parse a dictionary of layer multipliers. Raise UsageError if it is not a Python literal."""
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
        when="Set it if the network needs fixed ports or addresses, other deadlines, or a"
        " mesh; see the options of VoidConfiguration.",
        local=False,
    )
    _: KW_ONLY
    train_on: str = option(
        "local",
        one_of(TRAIN_ON),
        'parameters that a step computes with: "local" is the shared parameters plus'
        ' the worker\'s own residual, "replica" is the shared parameters alone, as in'
        " DL4J",
        when='"local" is more accurate for the same number of bytes. Use "replica" only to'
        " train as DL4J does.",
        local_rounds=False,
    )
    threshold: ThresholdAlgorithm | str = option(
        AUTO,
        instance((ThresholdAlgorithm,), _THRESHOLD, words=(AUTO,), parse=_parse_threshold),
        'selects what to send; "auto" means ``AutoThreshold()``',
        when='"auto" needs no tuning. Use ``AutoThreshold(1e-3, 3e-2)`` to send more if links'
        " are fast, which helps Adam most; near the largest stable learning rate, sending"
        " more makes training worse. Use another algorithm to train with a threshold that"
        " was tuned in DL4J.",
        local_rounds=False,
    )
    residual_post_processor: ResidualClipping | None = option(
        ResidualClipping(5.0, 5),
        instance((ResidualClipping,), _CLIPPING, words=(None,), parse=_parse_call),
        "post-processor of the residual, which is what a worker learned and has not sent; None: the"
        " residual is not changed",
        when="Use ``ResidualClipping(1, 1)`` from 16 workers on if the learning rate is near"
        " the largest that one process tolerates. Clip less, as with"
        " ``ResidualClipping(20.0)``, if a warning says that clipping loses much of what"
        " was learned.",
        local_rounds=False,
    )
    layer_multipliers: Mapping[str, int] | None = option(
        None,
        custom(_check_multipliers, _MULTIPLIERS, "tau", _parse_multipliers),
        'thresholds of layers in multiples of the threshold tau, such as ``{"layer 2":'
        ' 4, "layer 3 biases": 1}``; all others have 1',
        when="Set it if one layer changes much more than the others and, with one threshold"
        " for all layers, fills the updates.",
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
        "sends more in each worker's first updates; None: no more than in all others",
        when="Set it if early gradients are large and change quickly, so that they would"
        " arrive late. It raises the number of bytes at the beginning of a fit.",
        local_rounds=False,
    )
    shake_frequency: int = option(
        0,
        whole(0, COUNT_MAX, unit="publications", remedy=" publications, as a rule 100"),
        "every n-th update of a worker (publication) uses a third of the threshold; 0: none",
        when="Set it, for example to 100, if changes that stay below the threshold for long"
        " should be sent from time to time.",
        local_rounds=False,
    )
    publish_every: int | str = option(
        AUTO,
        whole(1, COUNT_MAX, unit="steps", remedy=", or 'auto'", words=(AUTO,)),
        "training steps from one update of a worker to its next (publication);"
        ' "auto": publish when the last update is committed',
        when='With "auto" the slowest link sets the pace. Set a number, such as 4, to send'
        " fewer bytes; what a worker learns meanwhile waits in its residual.",
        local_rounds=False,
    )
    scaling: str | None = option(
        None,
        one_of(SCALINGS, (None,)),
        'rule by which hyperparameters carry over to more workers: "sequential" continues the'
        ' recipe of one machine; "limited" does the same, but more than'
        f" {SUMMED_WORKERS_MAX} workers train as {SUMMED_WORKERS_MAX} would;"
        ' "ddp" continues a recipe that was tuned for as many ranks of'
        " DistributedDataParallel; None: by ``horizon`` and ``aggregation``, as a rule sequential",
        when='Use "ddp" for learning rate and momentum of a DistributedDataParallel script with as'
        " many ranks as workers: each worker then has its own momentum, and updates are averaged."
        ' Use "limited" if training with 16 or more workers is unstable: it uses'
        f" momentum m ** {SUMMED_WORKERS_MAX}, and updates that weigh"
        f" {SUMMED_WORKERS_MAX} / workers. ``sparkstrom rehearse --scaling"
        " sequential,limited,ddp`` compares them (docs/rehearse.md).",
        local_rounds=False,
    )
    aggregation: str | None = option(
        None,
        one_of(tuple(AGGREGATIONS), (None,)),
        'weight of an update: 1 for "sum", 1 / workers for "mean", 1 / sqrt(workers) for "sqrt";'
        ' None: "sum", with ``scaling="ddp"`` "mean"',
        when='Try "sqrt" or "mean" if the sum of all workers\' steps is too large for the task.'
        ' In measurements, "sqrt" helped some tasks and harmed others.',
        local_rounds=False,
    )
    limit_overshoot: bool = option(
        True,
        flag(),
        "with more than eight workers whose updates are summed: when successive rounds undo each"
        " other, sum the updates of fewer workers from then on, and warn",
        when="Set it to False to sum the updates of all workers throughout the fit, for example to"
        " compare learning rates.",
        local_rounds=False,
    )
    horizon: str | None = option(
        None,
        one_of(HORIZONS, (None,)),
        'minibatches that momentum and schedules count: those of the "fit", or of each "worker";'
        ' None: "fit", with ``scaling="ddp"`` "worker"',
        when='Keep "fit" for hyperparameters that were tuned on one machine. Use "worker" for'
        " those that were tuned on as many workers, as in DL4J.",
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
        'steps that a worker may be ahead of the slowest; "auto": ``publish_every`` if that is a'
        " number, else 1; None: any number",
        when="Raise it, for example to 8, if waiting for the slowest worker costs much time,"
        " as with steps of about a millisecond, and the learning rate leaves room.",
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
        "how late other workers' updates may be, in rounds (one round: one step of every worker);"
        ' "auto": 24 / workers - 1, rounded down, at least 0; None: any number',
        when="Lower it if messages take longer than steps and training with many workers is"
        " unstable. Raise it, or use None, to wait less for updates if the task tolerates"
        " later ones.",
        local_rounds=False,
    )
    min_workers: int = option(
        1,
        whole(1, WORKERS_MAX, unit="workers"),
        "workers that must join within ``start_timeout`` seconds",
        when="Raise it if a fit should fail rather than start with only a few of its workers."
        " Workers that come later join it.",
        local_rounds=False,
    )
    step_timeout: float = option(
        600.0,
        seconds(),
        "seconds for one step, or for one read of the data",
        when="Raise it if a step, or a read of the data, can take longer. Lower it to notice a"
        " step that hangs sooner.",
    )
    checkpoint_updaters: str = option(
        ONE,
        one_of(CHECKPOINT_UPDATERS),
        'optimizer states in a checkpoint: of "one" worker, restored to all, or of "all"',
        when='Use "all" if the rows of the workers differ much, or if momentum lasts long.'
        " Every worker's state then passes through the driver's link at each checkpoint"
        " and is in each file.",
        local_rounds=False,
    )
    encoding_debug_mode: bool = option(
        False,
        flag(),
        "log the residual's size and percentiles from time to time",
        when="Set it to True to examine how much of what it learns each worker holds back.",
        local_rounds=False,
    )
    debug_longer_iterations: int = option(
        0,
        whole(0, COUNT_MAX, unit="milliseconds"),
        "milliseconds to sleep in every step, to simulate a slow worker",
        when="Set it only in tests of how a fit behaves with slow workers.",
    )

    @property
    def minibatch_horizon(self) -> str:
        """The minibatches that momentum and schedules count: of the "fit" or of each "worker"."""
        return self.horizon or RULES[self.scaling or SEQUENTIAL][0]

    @property
    def update_weight(self) -> str:
        """The weight of an update: "sum", "mean" or "sqrt"."""
        return self.aggregation or RULES[self.scaling or SEQUENTIAL][1]

    @property
    def summed_workers_max(self) -> int | None:
        """Most workers whose updates are summed in full, by "limited"; None: no limit."""
        return SUMMED_WORKERS_MAX if self.scaling == LIMITED else None

    def __post_init__(self) -> None:
        self.check()
        if self.scaling is not None:
            rule = zip(("horizon", "aggregation"), RULES[self.scaling], strict=True)
            for name, implied in rule:
                value = getattr(self, name)
                reason = f"scaling={self.scaling!r} means {name}={implied!r}; leave out one of them"
                require(value in (None, implied), name, value, reason)
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
