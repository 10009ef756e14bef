"""Tests of wrong option values: each is refused by name or converted to Python's own type.

Each option gets some hundred values, most of which are wrong for it. A ``UsageError`` must name the
option. No other exception may be raised, no call may hang, and no NumPy scalar may be kept. What
``find_mistake`` describes must be refused; ``test_a_field_takes_values_of_its_own_kind_only``
compares each accepted value with the default. Otherwise an accepted value must be converted.
"""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, check_options, flag, whole
from sparkstrom.data.column_selection import ColumnSpec, check_column_spec
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import (
    ALGORITHMS,
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)
from sparkstrom.fit.evaluation import select_metrics
from sparkstrom.fit.strategy import GradientSharing
from sparkstrom.fit.trained_network import check_fit_arguments
from sparkstrom.local.parallel_wrapper import ParallelWrapper
from sparkstrom.local.wrapper_options import (
    TrainingMode,
    parse_training_mode,
    resolve_options,
    resolve_round_options,
)
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import UPDATERS, Adam, Sgd
from sparkstrom.observe.early_stopping import (
    TERMINATION_CONDITIONS,
    BestScoreEpochTerminationCondition,
    EarlyStopping,
    MaxEpochsTerminationCondition,
    MaxScoreIterationTerminationCondition,
    MaxTimeIterationTerminationCondition,
    ScoreImprovementEpochTerminationCondition,
)
from sparkstrom.observe.standard_listeners import CollectScoresListener, ScoreIterationListener
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.serving import ParallelInference, ServingOptions
from sparkstrom.spark.executor.inference import check_inputs
from sparkstrom.spark.network import SparkNetwork


class Colour(enum.Enum):
    RED = "sum"


WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 4, 2**31, 2**63, 2**64, 2**70, 10**9, 10**400, 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 4.0, 1e-300, 1e300, -1e300, math.nan, math.inf, -math.inf),
    *(np.int8(4), np.int64(4), np.uint64(2**63), np.float32(0.1), np.float64(0.1), np.float16(2)),
    *(np.float64("nan"), np.float32("inf"), np.True_, np.str_("sum"), np.datetime64("2020")),
    *(np.array(4), np.array([4]), np.array([1.0, 2.0]), np.array([]), np.zeros((2, 2), object)),
    *("", " ", "4", "0.1", "none", "None", "auto", "AUTO", "Auto ", "sum", "Sum", "loss", "nan"),
    *("a\0b", "x" * 100_000, "\ud800", b"auto", b"", bytearray(b"4")),
    *(Path("a/folder"), Path("."), 4 + 0j, fractions.Fraction(1, 3), decimal.Decimal("0.1")),
    *([], [4], [4, 5], (4,), (45000, 45000), (45001, 45000), (1, 2, 3), ("1", "2"), {}, {4: 5}),
    *({"layer 1": 2}, {"layer 1": "2"}, {4}, frozenset(), range(3), iter([1]), slice(1), ...),
    *(int, float, object(), object, len, lambda: 4, NotImplemented, Colour.RED, Colour),
    *(FixedThreshold, AutoThreshold, ResidualClipping, WarmUp, Adam, EarlyStopping, Sgd),
    *(VoidConfiguration, SharedTrainingMaster, TrainingMode, TrainingMode.AVERAGING),
]

NEEDED: dict[type[Any], dict[str, Any]] = {
    FixedThreshold: {"tau": 1e-3},
    WarmUp: {"publications": 4},
    MaxEpochsTerminationCondition: {"max_epochs": 4},
    ScoreImprovementEpochTerminationCondition: {"max_epochs_with_no_improvement": 4},
    BestScoreEpochTerminationCondition: {"best_expected_score": 0.1},
    MaxTimeIterationTerminationCondition: {"max_time": 4},
    MaxScoreIterationTerminationCondition: {"max_score": 4},
}
CLASSES: tuple[type[Any], ...] = (
    *ALGORITHMS,
    *TERMINATION_CONDITIONS,
    *UPDATERS.values(),
    EarlyStopping,
    ParameterAveragingTrainingMaster,
    ResidualClipping,
    ServingOptions,
    SharedTrainingMaster,
    VoidConfiguration,
    WarmUp,
)
FIELDS = [
    (made, option.name) for made in CLASSES for option in dataclasses.fields(made) if option.init
]


# Options that take True and False; for others, a truth value in place of a number is a mistake.
FLAGS = {
    *("resume", "keep_best", "collect_training_stats", "save_updater", "limit_overshoot"),
    *("encoding_debug_mode", "average_updaters", "verbose"),
}
MAY_BE_NEGATIVE = {
    *("best_expected_score", "max_score", "min_improvement", "seed"),
    "workers_per_node",  # -1: as many as there are cores
}
NO_OPTION_TAKES = (
    *(bytes, bytearray, complex, decimal.Decimal, np.ndarray, np.datetime64, range, slice, type),
    *(type(...), type(NotImplemented), Colour),
)


def find_mistake(name: str, value: Any) -> str:
    """Return why the option must refuse this value, whatever else it takes; "" if it may not."""
    if isinstance(value, NO_OPTION_TAKES) or type(value) is object:
        return "no option takes such a type"
    if isinstance(value, bool | np.bool_):
        return "" if name in FLAGS else "it is a truth value"
    if isinstance(value, numbers.Real):
        if name in FLAGS:
            return "it is a number"
        if isinstance(value, float | np.floating) and not math.isfinite(value):
            return "it is not finite"
        return "it is negative" if value < 0 and name not in MAY_BE_NEGATIVE else ""
    return ""


def find_usage_error(name: str, call: Callable[[Any], object], value: Any) -> str | None:
    """Return the text of the ``UsageError``, or None if the value is accepted."""
    try:
        call(value)
    except UsageError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{name}: {type(value)} raised {type(error).__name__}") from error
    return None


def check_values(
    name: str, call: Callable[[Any], object], values: Sequence[Any] = tuple(WRONG)
) -> None:
    """Pass each value; fail if a mistake is accepted, or refused in another way than by name.

    An option that takes numbers may take no text but "auto"; only ``validation`` takes a fraction
    or a column.
    """
    accepted: list[Any] = []
    for i, value in enumerate(values):
        said = find_usage_error(name, call, value)
        assert said is None or name in said, f"value {i} ({value!r:.60}): {said}"
        assert said is None or len(said) < 1000, f"value {i}: {len(said)} characters"
        if said is None:
            mistake = find_mistake(name, value)
            assert not mistake, f"value {i} ({value!r:.60}) is accepted: {mistake}"
            accepted.append(value)
    takes_numbers = any(isinstance(value, numbers.Real) for value in accepted)
    if takes_numbers and name != "validation":
        assert {value for value in accepted if isinstance(value, str)} <= {"auto"}


@pytest.mark.parametrize(("made", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_option_rejects_or_converts_wrong_values(made: type[Any], name: str) -> None:
    """An option of a class is refused or kept as Python's own finite type."""

    def construct(value: Any) -> None:
        kept = getattr(made(**{**NEEDED.get(made, {}), name: value}), name)
        assert not isinstance(kept, np.generic | np.ndarray | Path), f"{kept!r} is kept as it was"
        assert not isinstance(kept, float) or math.isfinite(kept), kept
        is_truth = isinstance(value, bool | np.bool_)
        assert not is_truth or isinstance(kept, bool), f"{value!r} stands for {kept!r}"

    check_values(name, construct)


@pytest.mark.parametrize(("made", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_a_field_takes_values_of_its_own_kind_only(made: type[Any], name: str) -> None:
    """An option whose default is a number or flag takes only those; other kinds are refused."""
    field = next(option for option in dataclasses.fields(made) if option.name == name)
    default = NEEDED.get(made, {}).get(name, field.default)
    accepted = [
        value
        for value in WRONG
        if find_usage_error(name, lambda v: made(**{**NEEDED.get(made, {}), name: v}), value)
        is None
    ]
    if isinstance(default, bool):
        assert accepted == [True, False, np.True_]
    elif isinstance(default, numbers.Real):
        others = [value for value in accepted if not isinstance(value, numbers.Real)]
        assert [value for value in others if value not in (None, "auto")] == []
    elif isinstance(default, enum.Enum):
        assert accepted == []


@pytest.mark.parametrize(("made", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_every_option_declares_its_type(made: type[Any], name: str) -> None:
    declared = {option.name: option for option in dataclasses.fields(made)}[name]
    assert KEY in declared.metadata or (made, name) == (EarlyStopping, "conditions")


@pytest.mark.parametrize("name", ["widths", "hidden", "loss", "updater", "seed", "l2"])
def test_dense_network_rejects_or_converts_wrong_values(name: str) -> None:
    check_values(name, lambda value: DenseNetwork(**{"widths": [2, 2], name: value}))


def test_dense_network_rejects_or_converts_one_wrong_width() -> None:
    """A single wrong width in a list of widths is refused."""
    check_values("widths", lambda value: DenseNetwork([2, value]))


def test_fit_rejects_or_converts_wrong_arguments() -> None:
    """``fit`` refuses wrong arguments by name."""
    model = DenseNetwork([2, 2])
    whole_call: dict[str, Any] = {
        "epochs": 1,
        "chosen": ColumnSpec("features", "label", None, 0.5),
        "early_stopping": None,
        "listeners": (),
        "run_log": None,
    }
    for name in ("epochs", "early_stopping", "listeners", "run_log"):
        check_values(name, lambda value: check_fit_arguments(model, **{**whole_call, name: value}))  # noqa: B023

    def held_out(value: Any) -> None:
        chosen = ColumnSpec("features", "label", None, value)
        check_fit_arguments(model, **{**whole_call, "chosen": chosen})
        check_column_spec(chosen, dataframe=True)

    check_values("validation", held_out)
    for name in ("features", "label", "weight"):
        check_values(
            name,
            lambda value: check_column_spec(
                ColumnSpec(**{"features": "x", "label": "y", "weight": None, name: value}),  # noqa: B023
                dataframe=True,
            ),
        )


def test_parallel_wrapper_rejects_or_converts_wrong_options() -> None:
    """``ParallelWrapper`` refuses wrong values of its own options by name."""
    model = DenseNetwork([2, 2])
    check_values("training_mode", parse_training_mode)
    averaging = TrainingMode.AVERAGING
    check_values(
        "averaging_frequency", lambda value: resolve_round_options(averaging, value, None, None)
    )
    check_values(
        "average_updaters", lambda value: resolve_round_options(averaging, None, value, None)
    )
    check_values("outer", lambda value: resolve_round_options(averaging, None, None, None, value))
    check_values(
        "accumulator", lambda value: resolve_round_options(TrainingMode.CUSTOM, None, None, value)
    )
    shared = TrainingMode.SHARED_GRADIENTS
    for name in ("lease_s", "log_bytes", "window_bytes", "batch_size_per_worker"):
        check_values(name, lambda value: resolve_options({name: value}, shared, None, {}))  # noqa: B023
    for name in ("workers", "prefetch_buffer", "progress"):
        with pytest.raises(UsageError, match=name):
            ParallelWrapper(model, **{name: np.array([1, 2])})
        with pytest.raises(UsageError, match=name):
            ParallelWrapper(model, **{name: 2.5})


def test_listeners_reject_or_convert_wrong_frequency() -> None:
    """Listeners refuse a wrong frequency by name."""
    check_values("frequency", ScoreIterationListener)
    check_values("frequency", CollectScoresListener)


@pytest.mark.parametrize(
    ("construct", "kept"),
    [
        (lambda: SharedTrainingMaster(batch_size_per_worker=np.int64(4)).batch_size_per_worker, 4),
        (lambda: SharedTrainingMaster(step_timeout=np.float32(0.5)).step_timeout, 0.5),
        (lambda: SharedTrainingMaster(resume=np.True_).resume, True),
        (
            lambda: SharedTrainingMaster(layer_multipliers={"a": np.int8(2)}).layer_multipliers[
                "a"
            ],
            2,
        ),
        (
            lambda: SharedTrainingMaster(checkpoint_directory=Path("a/b")).checkpoint_directory,
            "a/b",
        ),
        (lambda: SharedTrainingMaster(train_on=np.str_("replica")).train_on, "replica"),
        (lambda: VoidConfiguration(port_range=[np.int64(4000), 4001]).port_range, (4000, 4001)),
        (lambda: Adam(np.float64(0.25)).learning_rate, 0.25),
        (lambda: AdaptiveThreshold(np.float32(0.5)).tau_initial, 0.5),
    ],
)
def test_numpy_scalars_and_paths_become_python_types(
    construct: Callable[[], Any], kept: Any
) -> None:
    """NumPy scalars are kept as Python's numbers, and paths as strings."""
    assert construct() == kept
    assert type(construct()) is type(kept)


@pytest.mark.parametrize(
    ("construct", "words"),
    [
        (lambda: VoidConfiguration(unicast_port=True), "unicast_port=True: a UDP port"),
        (lambda: VoidConfiguration(mesh_depth=10**9), "mesh_depth=1000000000: must be at most"),
        (lambda: VoidConfiguration(lease_s=1e300), r"lease_s=1e\+300: must be at most"),
        (lambda: SharedTrainingMaster(rng_seed=2**70), "rng_seed=.*must be at most"),
        (lambda: SharedTrainingMaster(threshold=FixedThreshold), "this is a class: call it"),
        (lambda: ResidualClipping(5.0, math.nan), "frequency=nan: must be a whole number"),
        (lambda: ResidualClipping(np.zeros(3)), r"multiple=<ndarray of shape \(3,\)>: must be"),
        (lambda: TargetSparsityThreshold(decay="0.9"), "decay='0.9': must be a finite number"),
    ],
)
def test_usage_error_names_option_value_and_reason(
    construct: Callable[[], Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        construct()


def test_port_range_of_one_port_is_valid() -> None:
    """A port range of one port is valid."""
    assert VoidConfiguration(port_range=(45000, 45000)).executor_ports() == range(45000, 45001)


def test_check_options_checks_any_declared_dataclass() -> None:
    """``check_options`` checks and converts the fields of any dataclass with declared types."""

    @dataclasses.dataclass(frozen=True)
    class Example:
        workers: Any = dataclasses.field(default=2, metadata=whole(1, 8, unit="processes"))
        loud: Any = dataclasses.field(default=False, metadata=flag())

        def __post_init__(self) -> None:
            check_options(self, "Example")

    assert type(Example(np.int64(3)).workers) is int
    with pytest.raises(UsageError, match=r"^Example: workers=9: must be at most 8$"):
        Example(9)
    with pytest.raises(UsageError, match="loud='no': must be True or False"):
        Example(loud="no")


def test_min_workers_above_worker_count_is_rejected() -> None:
    """``min_workers`` above the number of workers is refused instead of waiting for ever."""
    master = SharedTrainingMaster(min_workers=3)
    GradientSharing(master).check_workers(3)
    with pytest.raises(UsageError, match="min_workers=3: the fit has 2 workers"):
        GradientSharing(master).check_workers(2)
    with pytest.raises(UsageError, match="min_workers=99"):
        ParallelWrapper(DenseNetwork([2, 2]), 2, min_workers=99)


@pytest.mark.parametrize("spark", [None, "local", "local[2]", 4, object(), dict, [], b"local"])
def test_network_rejects_invalid_spark_session(spark: object) -> None:
    with pytest.raises(UsageError, match=r"^spark=.*must be a SparkSession or SparkContext"):
        SparkNetwork(spark, DenseNetwork([2, 2]))


def test_evaluation_and_serving_reject_wrong_arguments() -> None:
    """Evaluation and serving refuse wrong arguments by name."""
    model = DenseNetwork([2, 2])
    check_values("metrics", lambda value: select_metrics(model, value, 1))
    check_values("positive", lambda value: select_metrics(model, "roc", value))
    check_values("inputs", lambda value: check_inputs(value, None))
    check_values("shapes", lambda value: check_inputs(None, value))
    check_values("parameters", lambda value: ParallelInference(model, parameters=value).close())
    with ParallelInference(model) as inference:
        check_values("timeout", inference.close)
    check_values("model", ParallelInference)


def test_wrapper_rejects_wrong_paths_parameters_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper refuses wrong paths, parameters and data with ``UsageError``."""
    monkeypatch.chdir(tmp_path)
    wrapper = ParallelWrapper(DenseNetwork([2, 2]), 2, progress=False)
    wrong = [value for value in WRONG if not isinstance(value, str | Path)]
    for call in (wrapper.save, wrapper.restore, ParallelWrapper.load):
        for value in wrong:
            said = find_usage_error("path", call, value)
            assert said is not None
            assert said.startswith("path=")
    check_values("parameters", lambda value: setattr(wrapper, "parameters", value))
    for value in (np.array(4), 4, None, object(), {4: 5}):
        with pytest.raises(UsageError):
            wrapper.fit(value)
        with pytest.raises(UsageError):
            wrapper.predict(value)


@pytest.mark.parametrize("name", [param.name for param in SparkstromEstimator().params])
def test_estimator_rejects_or_converts_wrong_params(name: str) -> None:
    """An estimator's parameters are refused by name or kept as Python's own types."""

    def construct(value: Any) -> None:
        made = SparkstromEstimator(model=DenseNetwork([2, 2]))
        made._set(**{name: value})
        kept = made.getOrDefault(name)
        assert not isinstance(kept, np.generic | np.ndarray), kept

    check_values(name, construct)


def test_wrapper_rejects_wrong_model() -> None:
    check_values("model", lambda value: ParallelWrapper(value, 2, progress=False))


# The adapters call functions to inspect their results, so errors inside are the user's own.
NO_FUNCTIONS = [value for value in WRONG if not callable(value)]


@pytest.mark.parametrize(
    "name",
    [
        *("module", "loss", "optimizer", "scheduler", "scheduler_interval", "groups", "device"),
        *("clip_norm", "accumulate", "autocast", "step", "outputs"),
    ],
)
def test_torch_model_rejects_or_converts_wrong_options(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not here")
    from sparkstrom.models.torch import TorchModel

    whole_call: dict[str, Any] = {
        "module": torch.nn.Linear(2, 3),
        "loss": torch.nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    }
    check_values(name, lambda value: TorchModel(**{**whole_call, name: value}), NO_FUNCTIONS)


@pytest.mark.parametrize(
    "name", ["module", "batch", "monitor", "device", "clip_norm", "autocast", "outputs"]
)
def test_lightning_model_rejects_or_converts_wrong_options(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not here")
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not here")
    from sparkstrom.models.lightning import LightningModel

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    check_values(name, lambda value: LightningModel(**{"module": Net(), name: value}), NO_FUNCTIONS)


@pytest.mark.parametrize(
    "name", ["init", "apply", "loss", "optimizer", "apply_train", "outputs", "seed"]
)
def test_jax_model_rejects_or_converts_wrong_options(name: str) -> None:
    optax = pytest.importorskip("optax", reason="optax is not here")
    from sparkstrom.models.jax import JaxModel

    whole_call: dict[str, Any] = {
        "init": lambda key: {"w": np.ones((2, 3), np.float32)},
        "apply": lambda params, x: x @ params["w"],
        "loss": optax.softmax_cross_entropy_with_integer_labels,
        "optimizer": optax.sgd(0.1),
    }
    check_values(name, lambda value: JaxModel(**{**whole_call, name: value}), NO_FUNCTIONS)


@pytest.mark.parametrize("name", ["model", "loss", "optimizer", "outputs"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_model_rejects_or_converts_wrong_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("jax", reason="jax is not here")
    pytest.importorskip("optree", reason="keras is not here")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    whole_call: dict[str, Any] = {
        "model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]),
        "loss": "mse",
        "optimizer": "sgd",
    }
    check_values(name, lambda value: KerasModel(**{**whole_call, name: value}), NO_FUNCTIONS)
