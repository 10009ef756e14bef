"""Define how options are declared, and the options that all training masters have in common.

Each option is declared once, as a dataclass field made by ``option``. The declaration contains the
default, the type with range, unit and text form (``base.option_types``), the documentation, and
whether ParallelWrapper has the option. Constructors, checks, ``spark.sparkstrom.*``, the
environment, ParallelWrapper, help() and the documentation site all use this declaration.

A value given to the constructor takes precedence over ``spark.sparkstrom.*`` and the environment,
even if it equals the default. Therefore the attribute ``given`` has the names that were passed, and
``resolution.resolve`` fills in only the others. An unknown name, or a DL4J name that has no meaning
here, raises UsageError with an explanation instead of Python's TypeError.
"""

from __future__ import annotations

import difflib
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from sparkstrom.base import option_types
from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import (
    BYTES_MAX,
    COUNT_MAX,
    Metadata,
    Refused,
    check_options,
    custom,
    flag,
    is_whole,
    one_of,
    parse_number,
    path,
    seconds,
    shown,
    whole,
)
from sparkstrom.checkpoint.writer import parse_checkpoint_every
from sparkstrom.data.row_store import MEMORY_MIN_BYTES

# Keys of a field's metadata; see the arguments of ``option``.
DOC, WHEN, LOCAL, LOCAL_ROUNDS = "doc", "when", "local", "local_rounds"
WIDTH = 96  # columns of a generated docstring

Options = TypeVar("Options")


def option(
    default: Any,
    kind: Metadata,
    doc: str,
    *,
    when: str,
    local: bool = True,
    local_rounds: bool = True,
    hash: bool | None = None,
) -> Any:
    """Return a dataclass field that declares an option.

    Args:
        default: The option's value if none is given; it must be immutable.
        kind: The option's type, range, unit and text form, from ``base.option_types``.
        doc: What the option means, for the class's docstring and docs/options.md.
        when: When to change the option, in whole sentences, for the same places.
        local: Whether ParallelWrapper has the option.
        local_rounds: Whether ParallelWrapper also has the option for round-based training.
        hash: Whether the value is part of the dataclass's hash; None: yes.
    """
    metadata = {**kind, DOC: doc, WHEN: when, LOCAL: local, LOCAL_ROUNDS: local and local_rounds}
    return field(default=default, hash=hash, metadata=metadata)


def given_field() -> Any:
    """Return a dataclass field for ``given``, the names of the options that the caller passed."""
    return field(init=False, repr=False, compare=False)


def options_in(cls: Any) -> Iterator[Field[Any]]:
    """Return an iterator over the options that a class or its instance declares, in order."""
    return (each for each in fields(cls) if DOC in each.metadata)


def describe(declared: Field[Any], width: int = WIDTH) -> str:
    """Return an option's wrapped lines for a docstring: its meaning, and when to change it."""
    text = f"{declared.name}: {declared.metadata[DOC]}. {declared.metadata[WHEN]}"
    return textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)


def option_class(
    refused: Mapping[str, str], aliases: Mapping[str, str], *, owner: str = ""
) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator for a frozen dataclass with a field ``given`` made by ``given_field``.

    The decorated class's constructor accepts aliases and records which options were given. The
    decorator also adds the documentation of the options to the class's docstring.

    Args:
        refused: Maps DL4J's names that have no meaning here to the reason.
        aliases: Maps DL4J's names for options of this class to the options' names.
        owner: What to call the class in messages; "" means the class's own name.
    """

    def decorate(cls: type[Options]) -> type[Options]:
        generated: Callable[..., None] = cls.__init__
        declared = [each for each in fields(cls) if each.init]  # type: ignore[arg-type]
        names = [each.name for each in declared]
        positional = [each.name for each in declared if not each.kw_only]

        @functools.wraps(generated)
        def init(self: Options, *args: Any, **keywords: Any) -> None:
            values = _resolve_aliases(owner or cls.__name__, keywords, names, refused, aliases)
            object.__setattr__(self, "given", frozenset([*positional[: len(args)], *values]))
            generated(self, *args, **values)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        if cls.__doc__ and (documented := list(options_in(cls))):
            arguments = textwrap.indent("\n".join(map(describe, documented)), " " * 8)
            cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Args:\n{arguments}\n    "
        return cls

    return decorate


def _resolve_aliases(
    owner: str,
    keywords: Mapping[str, Any],
    names: list[str],
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    """Return the keyword arguments with aliases replaced by the options' names.

    ``names`` are the options that ``owner`` has. For ``refused`` and ``aliases``, see
    ``option_class``. Raise UsageError for an unknown or refused name, or if an option is given
    twice.
    """
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = aliases.get(keyword, keyword)
        if name not in names:
            raise UsageError(unknown_option_message(owner, keyword, names, refused, aliases))
        if name in values:
            raise UsageError(f"{owner}: {name} is given twice, once as {keyword}; keep one")
        values[name] = value
    return values


def unknown_option_message(
    owner: str, name: str, names: list[str], refused: Mapping[str, str], aliases: Mapping[str, str]
) -> str:
    """Return the message that ``owner`` has no option ``name``, with the reason or a close match.

    ``names`` are the options that ``owner`` has. For ``refused`` and ``aliases``, see
    ``option_class``.
    """
    snake = to_snake_case(name)
    if snake in refused:
        return f"{owner} takes no {name}: {refused[snake]}"
    near = difflib.get_close_matches(snake, [*names, *aliases], n=1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(names)}"
    return f"{owner} knows no option {name}; {hint}"


def to_snake_case(name: str) -> str:
    """Convert a camelCase name, as in DL4J, to snake_case: evaluateROC becomes evaluate_roc."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def require(holds: bool, option: str, value: object, reason: str) -> None:
    """Raise UsageError unless ``holds`` is True; the message has option, value and reason."""
    if not holds:
        raise UsageError(f"{option}={shown(value)}: {reason}")


def require_one_of(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    option_types.one_of(choices)[option_types.KEY].read(option, value)


def require_whole(option: str, value: object, least: int, remedy: str = "") -> int:
    """Return ``value`` as an int. Raise UsageError unless it is a whole number >= ``least``."""
    return int(option_types.whole(least, remedy=remedy)[option_types.KEY].read(option, value))


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` as a float. Raise UsageError unless it is a finite number above 0."""
    return float(option_types.seconds(least=0.0)[option_types.KEY].read(option, value))


def require_flag(option: str, value: object) -> bool:
    """Return ``value`` as a bool. Raise UsageError unless it is True or False."""
    return bool(option_types.flag()[option_types.KEY].read(option, value))


ALL_SLOTS = -1  # value of workers_per_node, as in DL4J: all task slots of an executor
WORKERS_MAX = 2**16  # number of workers on one executor or host; Linux starts fewer processes
ROWS_MAX = 2**31 - 1  # number of rows in one minibatch
APPROACHES = ("direct", "export")
REPARTITIONS = ("always", "never")

ONE_ROW_REASON = "an element of the data is one (features, label) row"
BALANCED_REASON = "placement is always balanced, and random by rng_seed"
KEPT_ROWS_REASON = "a worker keeps its own rows for all epochs: see batch_memory_bytes"

_WORKERS_PER_NODE = "must be a whole number of at least 1, or -1 for all task slots"

# Types of options that Spark ML's Params and other signatures also use.
BATCH_SIZE = whole(1, ROWS_MAX, unit="rows", remedy=", as a rule 32")


def _check_workers_per_node(value: object) -> int:
    """Return a number of workers or ALL_SLOTS. Raise Refused for anything else."""
    if not (is_whole(value) and (int(value) == ALL_SLOTS or 1 <= int(value) <= WORKERS_MAX)):
        raise Refused(_WORKERS_PER_NODE)
    return int(value)


def _check_interval(value: object) -> str:
    """Return a checkpoint interval unchanged. Raise UsageError if it is invalid."""
    parse_checkpoint_every(value)
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The options of every training master."""

    batch_size_per_worker: int = option(
        32,
        BATCH_SIZE,
        "rows in one minibatch of a worker; the last minibatch of an epoch may have fewer rows",
        when="Keep the size with which one machine trains well. Lower ``batch_size_per_worker``,"
        " for example to 16, if a worker takes fewer than about ten steps per epoch.",
    )
    workers_per_node: int = option(
        ALL_SLOTS,
        custom(_check_workers_per_node, _WORKERS_PER_NODE, "workers", parse_number),
        "workers per executor; -1: one worker for each task slot of the executor",
        when="Set ``workers_per_node`` to use fewer task slots than an executor has. Every worker"
        " is a process with its own replica and its own rows in memory.",
        local=False,
    )
    repartition: str = option(
        "always",
        one_of(REPARTITIONS),
        '"always" distributes rows evenly and at random (seed: ``rng_seed``); "never" leaves rows'
        " in their partitions",
        when='Use "never" if the rows are already distributed evenly and at random. Spark then'
        " needs no shuffle, but uneven partitions stay uneven, and a fit has at most as many"
        " workers as partitions.",
        local=False,
    )
    rdd_training_approach: str = option(
        "direct",
        one_of(APPROACHES),
        '"export" writes the rows to Parquet files once, for all fits; "direct" does not',
        when='Use "export" if the rows are expensive to compute and several fits read the rows, or'
        " if Spark would compute different rows the next time.",
        local=False,
    )
    export_directory: str | None = option(
        None,
        path("must be None or a URL", accepts="a path or URL, or None"),
        "URL of the directory for exported rows; None: the default filesystem's temporary"
        " directory",
        when="Set ``export_directory`` if the default filesystem is local to each machine, because"
        " all executors must reach the directory. ``export_directory`` needs"
        ' ``rdd_training_approach="export"``.',
        local=False,
    )
    batch_memory_bytes: int = option(
        512 << 20,
        whole(
            MEMORY_MIN_BYTES,
            BYTES_MAX,
            unit="bytes",
            remedy=" bytes, as a rule 512 MiB (536870912)",
        ),
        "memory for a worker's rows; a worker writes further rows to local disk",
        when="Raise ``batch_memory_bytes`` to keep more rows in memory, or if a worker's rows take"
        " more than about 60 times this size. Lower ``batch_memory_bytes`` if containers are short"
        " of memory.",
    )
    rng_seed: int = option(
        0,
        whole(0),
        "seed for the placement of rows on workers and for the order of rows in each epoch",
        when="Set another ``rng_seed`` to repeat a fit with another placement and order of the"
        " rows.",
    )
    start_timeout: float = option(
        60.0,
        seconds(),
        "seconds within which executors must register. With SharedTrainingMaster, ``min_workers``"
        " workers must also join within this time after the first task has started",
        when="Raise ``start_timeout`` if executors register late, for example on a busy cluster, or"
        " if workers take long to start and to import the libraries of the model.",
        local_rounds=False,
    )
    checkpoint_directory: str | None = option(
        None,
        path(),
        "directory for checkpoints (docs/checkpoints.md): a path, or a URL of a filesystem that"
        " fsspec supports; None: no checkpoints are written",
        when="Set ``checkpoint_directory`` for a fit that must survive the end of the driver"
        " program, on storage that outlives the machine. If you run the same program again, the fit"
        " resumes from the newest complete checkpoint.",
    )
    checkpoint_every: str = option(
        "5 min",
        custom(
            _check_interval,
            "such as '5 min', '2 epochs' or '500 updates'",
            accepts='a number and a unit: "s", "min", "h", "epochs" or "updates"',
        ),
        'interval between checkpoints, such as "5 min", "2 epochs" or "500 updates"; in averaging,'
        " a round counts as an update",
        when="Shorten the interval to lose less progress if the driver program fails. Lengthen the"
        " interval if checkpoints are large: each checkpoint contains the parameters and an"
        " optimizer state.",
    )
    keep_last: int = option(
        3,
        whole(1, COUNT_MAX, unit="checkpoints", remedy=", as a rule 3"),
        "checkpoints to keep; older checkpoints are deleted",
        when="Lower ``keep_last`` if storage is short: the directory needs room for ``keep_last`` +"
        " 1 files. Raise ``keep_last`` to be able to return to older states with"
        " ``restore(path)``.",
    )
    resume: bool = option(
        True,
        flag(),
        "whether a fit continues from the newest checkpoint; ``False``: start over and keep the old"
        " checkpoints",
        when="Set ``resume=False`` to train from the beginning without deleting the existing"
        " checkpoints.",
    )
    collect_training_stats: bool = option(
        False,
        flag(),
        "whether the summary reports how many seconds each worker spent on each activity",
        when="Set ``collect_training_stats=True`` to find out on which activity slow workers spend"
        " their time.",
    )
    given: frozenset[str] = given_field()

    def check(self) -> None:
        """Raise UsageError if an option is invalid or conflicts with another option."""
        check_options(self)
        exports = self.export_directory is None or self.rdd_training_approach == "export"
        hint = "nothing is exported unless rdd_training_approach='export'"
        require(exports, "export_directory", self.export_directory, hint)
