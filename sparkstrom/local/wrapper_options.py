"""Define the options of ``ParallelWrapper``, and combine them with those of SharedTrainingMaster.

DL4J's options that have no meaning here are listed with the reason, for error messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, KEY, custom, flag, whole
from sparkstrom.models.updaters import Updater
from sparkstrom.observe.progress_display import PROGRESS_MODES, check_progress
from sparkstrom.options.common import (
    LOCAL,
    LOCAL_ROUNDS,
    option,
    options_in,
    require,
    unknown_option_message,
)
from sparkstrom.options.gradient_sharing import ALIASES, ALL, ONE, SharedTrainingMaster
from sparkstrom.options.gradient_sharing import REFUSED as MASTER_REFUSED
from sparkstrom.options.network import REFUSED as VOID_REFUSED
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import (
    ACCUMULATOR,
    OUTER_OPTIMIZER,
    PER_WORKER,
    Accumulator,
)
from sparkstrom.options.resolution import ENVIRONMENT_PREFIX, resolve
from sparkstrom.rounds.averaging import RoundOptions

WORKERS = whole(1, 4096, unit="processes", remedy=", as a rule one for each core", words=(None,))
PREFETCH = whole(0, 65536, unit="blocks of rows", remedy=" blocks, as a rule 2")
FREQUENCY = whole(
    1,
    COUNT_MAX,
    unit="minibatches",
    remedy=" minibatches of a worker, as a rule 1 to 10",
    words=(None,),
)
AVERAGES = flag(words=(None,))


class TrainingMode(enum.Enum):
    """The way in which workers share what they learn. The names are DL4J's."""

    SHARED_GRADIENTS = "SHARED_GRADIENTS"  # asynchronously send thresholded updates
    AVERAGING = "AVERAGING"  # average parameters every averaging_frequency minibatches
    CUSTOM = "CUSTOM"  # like AVERAGING, but the user's accumulator combines the parameters


_NO_RDD = "there is no RDD: rows are read once per fit and distributed to the workers at random"
# Options of DL4J and SharedTrainingMaster that ParallelWrapper does not have, and why.
REFUSED: dict[str, str] = {
    **MASTER_REFUSED,
    "workers_per_node": "workers=N sets the number of processes",
    "repartition": _NO_RDD,
    "rdd_training_approach": _NO_RDD,
    "export_directory": _NO_RDD,
    "num_workers": "write workers=N",
    "void": "there is no network; give lease_s, log_bytes, window_bytes and max_chunk_size by "
    "themselves",
    "network_mask": "everything stays on this machine, in shared memory",
    "unicast_port": "the system picks one, on the loopback interface",
    "controller": "the calling process has it",
    "gradients_accumulator": "with training_mode='CUSTOM', accumulator= is a function of "
    "parameters; otherwise threshold=, residual_post_processor=, shake_frequency= and warm_up= "
    "control how updates are made",
    "report_score_after_averaging": "progress, listeners and summary.history report the loss",
    "workspace_mode": "memory is NumPy's, torch's or JAX's own matter",
    "trainer_factory": "training_mode='CUSTOM' with accumulator= is the way to rounds of your own",
    "model_params_supplier": "assign wrapper.parameters before fit",
    "updater_params_supplier": "an optimizer's state comes from a checkpoint: restore(path)",
}


def resolve_options(
    given: Mapping[str, Any],
    mode: TrainingMode,
    rounds: RoundOptions | None,
    env: Mapping[str, str],
) -> SharedTrainingMaster:
    """Return the options of all fits. Options that were not given come from the environment.

    Variables of options that ParallelWrapper does not take in this training mode are ignored.

    Args:
        given: The user's options by name, without ParallelWrapper's own parameters.
        mode: The training mode.
        rounds: The options of round-based training; None for gradient sharing.
        env: The environment variables.

    Raises:
        UsageError: An option is unknown, or has no meaning on one machine or in this training mode.
    """
    network = {each.name for each in options_in(VoidConfiguration) if each.metadata[LOCAL]}
    known = [*options_in(SharedTrainingMaster), *options_in(VoidConfiguration)]
    in_rounds = {each.name: each.metadata[LOCAL_ROUNDS] for each in known if each.metadata[LOCAL]}
    names = sorted(in_rounds)
    for name in given:
        meant = ALIASES.get(name, name)
        if meant not in in_rounds:
            refused, listed = {**VOID_REFUSED, **REFUSED}, [*names, *WRAPPER_PARAMETERS]
            raise UsageError(
                unknown_option_message("ParallelWrapper", name, listed, refused, ALIASES)
            )
        if mode is not TrainingMode.SHARED_GRADIENTS and not in_rounds[meant]:
            raise UsageError(
                f"training_mode={mode.value} sends no updates, all workers meet every"
                f" averaging_frequency minibatches: leave out {name}={given[name]!r}, or take"
                " training_mode='SHARED_GRADIENTS'"
            )
    void = {name: value for name, value in given.items() if name in network}
    rest = {name: value for name, value in given.items() if name not in network}
    if rounds is not None:
        # Workers in rounds count their own minibatches.
        rest |= {"scaling": None, "horizon": "worker"}
        rest["checkpoint_updaters"] = ALL if rounds.save_updater == PER_WORKER else ONE
    # Variables that a cluster sets for all programs may name options that have no meaning here.
    variables = {
        ENVIRONMENT_PREFIX + name.upper()
        for name, is_in_rounds in in_rounds.items()
        if mode is TrainingMode.SHARED_GRADIENTS or is_in_rounds
    }
    env = {name: value for name, value in env.items() if name in variables}
    return resolve(SharedTrainingMaster(VoidConfiguration(**void), **rest), {}, env)


def parse_training_mode(value: object) -> TrainingMode:
    """Return ``value``, a TrainingMode or the name of one, as a TrainingMode.

    Raise UsageError for any other value.
    """
    names = [mode.value for mode in TrainingMode]
    text = value.value if isinstance(value, TrainingMode) else value
    require(
        isinstance(text, str) and text in names,
        "training_mode",
        value,
        f"must be one of {', '.join(names)}",
    )
    return TrainingMode(text)


def _check_progress(value: Any) -> bool | str:
    """Return a value of the option ``progress`` as a bool or str; raise UsageError if invalid."""
    check_progress(value)
    return value if isinstance(value, str) else bool(value)


_MODES = ", ".join(f'"{mode.value}"' for mode in TrainingMode)
_PROGRESS = ", ".join(f'"{mode}"' for mode in PROGRESS_MODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperOptions:
    """The declarations of ParallelWrapper's own parameters, for its checks and documentation."""

    workers: int | None = option(
        None,
        WORKERS,
        "number of worker processes; None: one per CPU core that this process may use",
        when="Lower ``workers`` if a library already uses several cores in a step, or to leave"
        " cores to other programs. Set ``workers=1`` for a model on a GPU, because GPUs are not"
        " distributed to workers.",
    )
    training_mode: TrainingMode | str = option(
        TrainingMode.SHARED_GRADIENTS,
        custom(parse_training_mode, f"must be one of {_MODES}, or a TrainingMode"),
        "how workers share what they learn: by thresholded updates, by averaging their parameters,"
        " or by combining their parameters with ``accumulator``",
        when="Use AVERAGING or CUSTOM if two fits with the same data, seed and number of workers"
        " must be bit-identical.",
    )
    prefetch_buffer: int = option(
        2,
        PREFETCH,
        "number of blocks of rows, of some MiB each, that a thread reads ahead; 0: none",
        when="Set ``prefetch_buffer=0`` to read the rows in the thread that calls ``fit``.",
    )
    averaging_frequency: int | None = option(
        None,
        FREQUENCY,
        "for AVERAGING and CUSTOM: number of minibatches that each worker trains between two"
        " synchronizations, usually 1 to 10; None: 1",
        when="Raise ``averaging_frequency`` to synchronize less often. Lower"
        " ``averaging_frequency`` if accuracy suffers, as with many workers or a large learning"
        " rate.",
    )
    average_updaters: bool | None = option(
        None,
        AVERAGES,
        "for AVERAGING and CUSTOM: whether the optimizers' states are averaged, too; None: True",
        when="Set ``average_updaters=False`` for DiLoCo, in which each worker keeps its own"
        " optimizer state.",
    )
    accumulator: Accumulator | None = option(
        None,
        ACCUMULATOR,
        "for CUSTOM: a function, called in this process with (before f32[n_params], after"
        " f32[workers, n_params], rows i64[workers]). The function returns the parameters"
        " f32[n_params] with which all workers start the next round",
        when="Pass a function to combine parameters by a different rule than the mean, such as a"
        " median.",
    )
    outer: Updater | None = option(
        None,
        OUTER_OPTIMIZER,
        "for AVERAGING and CUSTOM: outer optimizer, which steps from a round's initial parameters"
        " towards the combined parameters; None: the next round starts with the combined"
        " parameters",
        when="For DiLoCo, use ``Nesterov(0.7, 0.9)`` with ``average_updaters=False``. DiLoCo suits"
        " long training whose rounds must be far apart.",
    )
    progress: bool | str = option(
        True,
        custom(_check_progress, f"must be True, False or one of {_PROGRESS}"),
        "whether or how to show progress (docs/progress.md)",
        when="Set ``progress=False`` to show neither progress nor warnings; the summary still has"
        ' the warnings. Use "plain" for logs.',
    )


WRAPPER_PARAMETERS = tuple(each.name for each in options_in(WrapperOptions))


def resolve_round_options(
    mode: TrainingMode,
    frequency: int | None,
    average_updaters: bool | None,
    accumulator: Accumulator | None,
    outer: Updater | None = None,
) -> RoundOptions | None:
    """Check the options of round-based training; return them, with defaults in place of None.

    Return None for gradient sharing, which has no rounds. Raise UsageError for an invalid value, or
    an option that has no meaning in this training mode.
    """
    given = {
        "averaging_frequency": frequency,
        "average_updaters": average_updaters,
        "accumulator": accumulator,
        "outer": outer,
    }
    if mode is TrainingMode.SHARED_GRADIENTS:
        for name, value in given.items():
            takes = "CUSTOM" if name == "accumulator" else "AVERAGING"
            reason = (
                f"workers do not meet with training_mode=SHARED_GRADIENTS; take {takes}, or leave"
                " it out (publish_every says how often updates are sent)"
            )
            require(value is None, name, value, reason)
        return None
    frequency = 1 if frequency is None else frequency
    frequency = FREQUENCY[KEY].read("averaging_frequency", frequency)
    averages = True if average_updaters is None else average_updaters
    averages = AVERAGES[KEY].read("average_updaters", averages)
    is_custom = mode is TrainingMode.CUSTOM
    reason = "training_mode=CUSTOM needs one: a function (before, after, rows) -> parameters"
    is_function = callable(accumulator) and not isinstance(accumulator, type)
    require(not is_custom or is_function, "accumulator", accumulator, reason)
    reason = "training_mode=AVERAGING takes the mean; one of yours is for training_mode='CUSTOM'"
    require(is_custom or accumulator is None, "accumulator", accumulator, reason)
    outer = OUTER_OPTIMIZER[KEY].read("outer", outer)
    return RoundOptions(frequency or 1, averages or PER_WORKER, outer, accumulator)
