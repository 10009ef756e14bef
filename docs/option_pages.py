"""Write docs/options.md from the declarations of the options.

Run ``python docs/option_pages.py > docs/options.md`` after a declaration changed;
``tests/tidy/test_option_pages.py`` compares the two.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparkstrom.base.option_types import KEY, OptionType
from sparkstrom.local.wrapper_options import WrapperOptions
from sparkstrom.options.common import (
    DOC,
    LOCAL,
    LOCAL_ROUNDS,
    WHEN,
    CommonOptions,
    options_in,
)
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.options.resolution import ENVIRONMENT_PREFIX, NESTED, PREFIX

Option = dataclasses.Field[Any]

INTRODUCTION = """\
<!-- Written by docs/option_pages.py from the declarations of the options; change those. -->

# Options

This page lists all options of the training masters, of their network, and of ParallelWrapper: the
meaning of each option, when to change it, its default and its valid values. The defaults suit most
fits. [Tuning](tuning.md) says which options to change for accuracy, and [Operations](operations.md)
says which options a cluster needs.

The value of an option comes from the first of these sources that has a value:

1. the argument of the constructor, such as `VoidConfiguration(lease_s=30)`, even if the argument
   equals the default;
2. the key `spark.sparkstrom.NAME` in the configuration of the SparkSession, such as
   `spark.conf.set("spark.sparkstrom.lease_s", "30")`, or of Spark, such as
   `--conf spark.sparkstrom.lease_s=30`;
3. the variable `SPARKSTROM_NAME` in the environment of the driver program, such as
   `SPARKSTROM_LEASE_S=30`;
4. the default of the option.

The configuration and the environment are read when the `SparkNetwork` is created. Values in the
configuration and the environment are written as in Python, but strings need no quotes: `auto`,
`none`, `true`, `30`, `AdaptiveThreshold(1e-3)`, `40123-40186`. An unknown key
`spark.sparkstrom.NAME` is an error. A key that only the other training master has is ignored.
`ParallelWrapper` reads only the environment, because it has no Spark configuration.
"""
COMMON = """\
## Both training masters

`SharedTrainingMaster` and `ParameterAveragingTrainingMaster` both have the following options.
ParallelWrapper has some of the options, which [its section](#parallelwrapper) lists.
"""
SHARED = """\
## SharedTrainingMaster

`SharedTrainingMaster` trains by gradient sharing. It has the following options in addition to the
options of [both training masters](#both-training-masters).
"""
AVERAGING = """\
## ParameterAveragingTrainingMaster

`ParameterAveragingTrainingMaster` trains in rounds ([Averaging](averaging.md)). It has the
following options in addition to the options of [both training masters](#both-training-masters).
"""
VOID = """\
## VoidConfiguration

`VoidConfiguration` sets the addresses, ports and deadlines of the network of
`SharedTrainingMaster`, as in `SharedTrainingMaster(VoidConfiguration(network_mask="10.0.0.0/16"))`.
Each of its options has its own key in Spark's configuration and in the environment.
"""
WRAPPER = """\
## ParallelWrapper

ParallelWrapper trains on one machine ([Local](local.md)). It has the following options of
`SharedTrainingMaster` and `VoidConfiguration`, as arguments and in the environment:
"""
OWN = """\
The following options are ParallelWrapper's own. They can only be arguments of its constructor.
"""
# Options that have no text form, and what the page says instead of a key.
IN_CODE_ONLY = {
    NESTED: "one key for each option of [VoidConfiguration](#voidconfiguration)",
    "accumulator": "no key; a function can only be an argument of the constructor",
}
# Values that stand in a text without the double backticks that its author may set.
CODE = re.compile(
    r"``(?P<code>[^`]+)``"
    r"|(?P<value>\"[^\"]*\"|\b(?:None|True|False|HOST:PORT|HOST)\b|\b[A-Z]\w+\([^)]*\)"
    r"|\{[^}]*\}|[\w.:]+/\d+|\b[A-Z]+_[A-Z_]+\b)"
)


def page() -> str:
    """Return the text of docs/options.md."""
    common = {each.name: each for each in options_in(CommonOptions)}
    seen: set[str] = set()

    def section(owner: type, options: Iterable[Option], *, has_keys: bool = True) -> Iterator[str]:
        for option in options:
            heading = f"### `{option.name}`"
            yield f"{heading} of {owner.__name__}" if option.name in seen else heading
            yield from describe_option(option, has_keys=has_keys)
            seen.add(option.name)

    def own(master: type) -> list[Option]:
        return [each for each in options_in(master) if not is_common(each, common)]

    parts = [INTRODUCTION, COMMON, *section(CommonOptions, common.values())]
    parts += [SHARED, *section(SharedTrainingMaster, own(SharedTrainingMaster))]
    averaging = ParameterAveragingTrainingMaster
    parts += [AVERAGING, *section(averaging, own(averaging))]
    parts += [VOID, *section(VoidConfiguration, options_in(VoidConfiguration))]
    parts += [WRAPPER, shared_with_wrapper(), OWN]
    wrapper = type("ParallelWrapper", (), {})  # named without loading what trains
    parts += section(wrapper, options_in(WrapperOptions), has_keys=False)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def is_common(option: Option, common: dict[str, Option]) -> bool:
    """Return whether an option of a master is one of both masters, with the same meaning."""
    return option.name in common and option.metadata[DOC] == common[option.name].metadata[DOC]


def describe_option(option: Option, *, has_keys: bool) -> Iterator[str]:
    """Return an iterator over the paragraphs about an option, without its heading."""
    kind: OptionType = option.metadata[KEY]
    yield f"{to_markdown(option.metadata[DOC])}."
    yield f"**When to change it:** {to_markdown(option.metadata[WHEN])}"
    lines = [f"Default: {show_default(option)}", f"Values: {mark_code(kind.values)}"]
    if option.name in IN_CODE_ONLY and has_keys:
        lines.append(f"Spark configuration and environment: {IN_CODE_ONLY[option.name]}")
    elif has_keys:
        lines.append(f"Spark configuration: `{PREFIX}{option.name}`")
        lines.append(f"Environment: `{ENVIRONMENT_PREFIX}{option.name.upper()}`")
    yield "\n".join(f"- {line}" for line in lines)


def shared_with_wrapper() -> str:
    """Return two list items: the masters' options that ParallelWrapper has, by training mode."""
    options = [*options_in(SharedTrainingMaster), *options_in(VoidConfiguration)]
    lines = []
    for in_rounds in (True, False):
        names = [
            f"[`{each.name}`](#{each.name})"
            for each in options
            if each.metadata[LOCAL] and each.metadata[LOCAL_ROUNDS] == in_rounds
        ]
        modes = "in every `training_mode`" if in_rounds else "only with `SHARED_GRADIENTS`"
        lines.append(f"- {modes}: {', '.join(names)}")
    return "\n".join(lines)


def show_default(option: Option) -> str:
    """Return the default as Python code; bytes also as MiB."""
    value = option.default
    if isinstance(value, VoidConfiguration):
        return "`VoidConfiguration()`"
    if isinstance(value, enum.Enum):
        value = value.value
    shown = json.dumps(value) if isinstance(value, str) else repr(value)
    is_large = option.metadata[KEY].unit == "bytes" and value % (1 << 20) == 0
    return f"`{shown}` ({value >> 20} MiB)" if is_large else f"`{shown}`"


def mark_code(text: str) -> str:
    """Return a text of a declaration with its values and names as code in Markdown."""
    marked = CODE.sub(lambda found: f"`{found['code'] or found['value']}`", text)
    return marked.replace("'auto'", '`"auto"`')


def to_markdown(text: str) -> str:
    """Return a text of a declaration as a sentence in Markdown, with code and links."""
    linked = re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](\1.md)", mark_code(text))
    return linked[:1].upper() + linked[1:]


if __name__ == "__main__":
    sys.stdout.write(page())
