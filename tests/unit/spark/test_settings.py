"""Tests of sources of options: constructor, then Spark's configuration, environment, default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import AutoThreshold, FixedThreshold, TargetSparsityThreshold
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.resolution import local_ip, resolve
from sparkstrom.spark.network import make_application

CONF = {"spark.sparkstrom.lease_s": "7", "spark.executor.memory": "2g"}
ENVIRONMENT = {"SPARKSTROM_LEASE_S": "5", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("void", "conf", "env", "lease_s"),
    [
        (VoidConfiguration(lease_s=10.0), CONF, ENVIRONMENT, 10.0),
        (VoidConfiguration(), CONF, ENVIRONMENT, 7.0),
        (VoidConfiguration(), {}, ENVIRONMENT, 5.0),
        (VoidConfiguration(), {}, {}, 10.0),
    ],
)
def test_option_sources_have_fixed_precedence(
    void: VoidConfiguration, conf: dict[str, str], env: dict[str, str], lease_s: float
) -> None:
    """The first source that has the option decides: constructor, configuration, environment."""
    assert resolve(SharedTrainingMaster(void), conf, env).void.lease_s == lease_s


def make_session(context: Any, **options: str) -> Any:
    """Return a fake SparkSession with these options, as they are read through Py4J."""
    pairs = [
        SimpleNamespace(_1=lambda k=k: k.replace("_", ".", 2), _2=lambda v=v: v)
        for k, v in options.items()
    ]
    scala_map = SimpleNamespace(
        iterator=lambda: SimpleNamespace(hasNext=lambda: bool(pairs), next=lambda: pairs.pop())
    )
    conf = SimpleNamespace(_jconf=SimpleNamespace(getAll=lambda: scala_map))
    return SimpleNamespace(sparkContext=context, conf=conf)


def test_session_options_override_context_options() -> None:
    """Options of a running session override those of its context; other keys are ignored."""
    context = SimpleNamespace(getConf=lambda: SimpleNamespace(getAll=CONF.items))
    session = make_session(
        context, spark_sparkstrom_lease_s="9", spark_sparkstrom_leases="1", spark_sql_shuffle="5"
    )
    assert make_application(context).conf() == CONF
    assert make_application(session).conf() == CONF | {
        "spark.sparkstrom.lease_s": "9",
        "spark.sparkstrom.leases": "1",  # unknown, so the network refuses it
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("batch_size_per_worker", "64", 64),
        ("workers_per_node", "-1", -1),
        ("start_timeout", "1.5", 1.5),
        ("train_on", "replica", "replica"),
        ("max_lead", "none", None),
        ("max_lead", "12", 12),
        ("publish_every", "auto", "auto"),
        ("publish_every", "4", 4),
        ("collect_training_stats", "true", True),
        ("encoding_debug_mode", "False", False),
        ("threshold", "FixedThreshold(1e-3)", FixedThreshold(1e-3)),
        ("threshold", "TargetSparsityThreshold(2e-3)", TargetSparsityThreshold(2e-3)),
        ("residual_post_processor", "ResidualClipping(4.0, 3)", ResidualClipping(4.0, 3)),
        ("threshold", "auto", "auto"),
        ("threshold", "AutoThreshold(1e-4, levels=1)", AutoThreshold(1e-4, levels=1)),
        ("residual_post_processor", "none", None),
    ],
)
def test_configuration_and_environment_parse_values_equally(
    name: str, text: str, value: object
) -> None:
    """The configuration and the environment write an option's value in the same way."""
    from_conf = resolve(SharedTrainingMaster(), {f"spark.sparkstrom.{name}": text}, {})
    from_env = resolve(SharedTrainingMaster(), {}, {f"SPARKSTROM_{name.upper()}": text})
    assert getattr(from_conf, name) == value
    assert from_env == from_conf


def test_port_range_is_parsed_from_dash_notation() -> None:
    master = resolve(SharedTrainingMaster(), {"spark.sparkstrom.port_range": "40123-40186"}, {})
    assert master.void.port_range == (40123, 40186)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("lease_s", "ten", "is not a number"),
        ("lease_s", "-1", "seconds above 0"),
        ("batch_size_per_worker", "1.5", "whole number"),
        ("publish_every", "often", "is not a number"),
        ("publish_every", "0", "or 'auto'"),
        ("batch_size_per_worker", "auto", "is not a number"),
        ("collect_training_stats", "yes", "True or False"),
        ("port_range", "40123:40186", "write 40123-40186"),
        ("threshold", "1e-3", "like AdaptiveThreshold(1e-3)"),
        ("threshold", "open('/etc/passwd')", "must be one of"),
        ("threshold", "FixedThreshold(exit())", "must be one of"),
        ("threshold", "FixedThreshold(1, 2, 3, 4)", "argument"),
        ("threshold", "ResidualClipping(5.0, 5)", "or a threshold algorithm"),
        ("threshold", "FixedThreshold(", "must be one of"),
    ],
)
def test_unreadable_option_value_is_refused_with_reason(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        resolve(SharedTrainingMaster(), {f"spark.sparkstrom.{name}": text}, {})
    assert words in str(caught.value)


def test_unknown_key_error_suggests_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no option leases; did you mean lease_s\?"):
        resolve(SharedTrainingMaster(), {"spark.sparkstrom.leases": "7"}, {})


def test_unsupported_dl4j_key_is_refused_with_explanation() -> None:
    """An option of DL4J without a meaning here is refused with an explanation."""
    with pytest.raises(UsageError, match="takes no stream_id: stream ids are agreed"):
        resolve(SharedTrainingMaster(), {"spark.sparkstrom.stream_id": "7"}, {})


def test_rejects_contradiction_of_configuration_and_constructor() -> None:
    """Options of two sources that contradict each other are refused."""
    with pytest.raises(UsageError, match="publish_every"):
        resolve(SharedTrainingMaster(max_lead=2), {"spark.sparkstrom.publish_every": "5"}, {})


def test_resolving_options_twice_changes_nothing() -> None:
    once = resolve(SharedTrainingMaster(), CONF, ENVIRONMENT)
    assert resolve(once, {"spark.sparkstrom.lease_s": "99"}, {}) == once


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, None),
        ({"DL4J_VOID_IP": " 10.0.0.4\n", "SPARKSTROM_LOCAL_IP": " "}, "10.0.0.4"),
        ({"SPARKSTROM_LOCAL_IP": "10.0.0.5", "DL4J_VOID_IP": ""}, "10.0.0.5"),
        ({"SPARKSTROM_LOCAL_IP": "10.0.0.4", "DL4J_VOID_IP": "10.0.0.4"}, "10.0.0.4"),
    ],
)
def test_local_ip_reads_either_environment_variable(
    env: dict[str, str], address: str | None
) -> None:
    """Either environment variable may name the address to bind; an empty value is ignored."""
    assert local_ip(env) == address


@pytest.mark.parametrize("wrong", ["localhost", "10.0.0.0/16", "10.0.0.5:40123"])
def test_invalid_ip_address_error_names_variable(wrong: str) -> None:
    with pytest.raises(UsageError, match=f"DL4J_VOID_IP='{wrong}' on .* is not an IP address"):
        local_ip({"DL4J_VOID_IP": wrong})


def test_rejects_two_different_addresses_for_one_host() -> None:
    with pytest.raises(UsageError, match=r"SPARKSTROM_LOCAL_IP=10\.0\.0\.5 but DL4J_VOID_IP="):
        local_ip({"SPARKSTROM_LOCAL_IP": "10.0.0.5", "DL4J_VOID_IP": "10.0.0.4"})


@pytest.mark.parametrize("quote", ['"', "'"])
def test_quotes_around_option_values_are_removed(quote: str) -> None:
    """Files such as spark-defaults.conf keep quotes; a directory's name does not contain them."""
    texts = {"checkpoint_directory": "/data/ck", "controller": "auto", "checkpoint_every": "5 min"}
    conf = {f"spark.sparkstrom.{name}": f"{quote}{text}{quote}" for name, text in texts.items()}
    quoted = resolve(SharedTrainingMaster(), conf | {"spark.sparkstrom.lease_s": '"7"'}, {})
    assert (quoted.checkpoint_directory, quoted.void.controller) == ("/data/ck", "auto")
    assert (quoted.checkpoint_every, quoted.void.lease_s) == ("5 min", 7.0)
    whole = resolve(SharedTrainingMaster(), {"spark.sparkstrom.layer_multipliers": "{'a': 2}"}, {})
    assert whole.layer_multipliers == {"a": 2}
