"""Tests of VoidConfiguration: valid options, and the texts with which others are refused."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.options.network import AUTO_PLAIN_WORKERS, REFUSED, VoidConfiguration
from sparkstrom.protocol.common.topology import FLAT


def test_every_field_has_a_default() -> None:
    """Options that are left out have their declared defaults, and are not in ``given``."""
    void = VoidConfiguration()
    options = [each for each in fields(VoidConfiguration) if each.name != "given"]
    assert {each.name: getattr(void, each.name) for each in options} == {
        each.name: each.default for each in options
    }
    assert void.given == frozenset()


def test_given_lists_passed_options_even_with_default_values() -> None:
    assert VoidConfiguration(lease_s=10.0, unicast_port=40123).given == {"lease_s", "unicast_port"}


def test_given_does_not_affect_equality() -> None:
    assert VoidConfiguration(lease_s=10.0) == VoidConfiguration()


def test_configuration_survives_pickle() -> None:
    """A pickled configuration remains equal, with the same ``given``."""
    void = VoidConfiguration(port_range=(40000, 40010), network_mask="10.0.0.0/16")
    copy = pickle.loads(pickle.dumps(void))
    assert copy == void
    assert copy.given == void.given


@pytest.mark.parametrize(
    ("void", "controller", "executors"),
    [
        ({}, None, None),
        ({"unicast_port": 40123}, range(40123, 40124), range(40123, 40187)),
        ({"unicast_port": 65530}, range(65530, 65531), range(65530, 65536)),
        ({"port_range": (50000, 50003)}, range(50000, 50004), range(50000, 50004)),
        (
            {"unicast_port": 40123, "port_range": (50000, 50003)},
            range(40123, 40124),
            range(50000, 50004),
        ),
    ],
)
def test_controller_and_executor_ports_follow_options(
    void: dict[str, Any], controller: range | None, executors: range | None
) -> None:
    """unicast_port is the controller's; executors use port_range or 64 ports from unicast_port."""
    made = VoidConfiguration(**void)
    assert made.controller_ports() == controller
    assert made.executor_ports() == executors


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("unicast_port", 0, "between 1 and 65535"),
        ("unicast_port", 70000, "between 1 and 65535"),
        ("unicast_port", "40123", "between 1 and 65535"),
        ("port_range", (40010, 40000), "first must not be above last"),
        ("port_range", (1, 2, 3), "is (first, last)"),
        ("port_range", (0, 10), "between 1 and 65535"),
        ("port_range", (65000, 65536), "between 1 and 65535"),
        ("network_mask", "10.0.0.0.0/16", "write a network like 10.0.0.0/16"),
        ("network_mask", "10.0.0.0/33", "write a network like 10.0.0.0/16"),
        ("network_mask", "192.168.1.12", "such as 192.168.1.0/24"),
        ("network_mask", "fd00::7", "such as fd00::/64"),
        ("controller_address", " ", "is empty"),
        ("mesh_build_mode", "PLAIN", "one of plain, mesh, auto"),
        ("mesh_fan_out", 0, "at least 1; 8 suits most networks"),
        ("mesh_fan_out", 2.5, "at least 1"),
        ("mesh_depth", 0, "at least 1; 5 levels of 8 have 37,448 workers"),
        ("max_chunk_size", 100, "at least 1024"),
        ("lease_s", 0, "above 0"),
        ("lease_s", float("inf"), "above 0"),
        ("window_bytes", 0, "at least 1"),
        ("log_bytes", 1 << 20, "window_bytes"),
    ],
)
def test_invalid_option_error_names_value_and_remedy(
    option: str, value: object, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        VoidConfiguration(**{option: value})  # type: ignore[arg-type]
    assert f"{option}={value!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "workers", "shape"),
    [
        ({}, 100_000, FLAT),
        ({"mesh_build_mode": "auto"}, AUTO_PLAIN_WORKERS, FLAT),
        ({"mesh_build_mode": "auto"}, AUTO_PLAIN_WORKERS + 1, (8, 5)),
        ({"mesh_build_mode": "mesh"}, 1, (8, 5)),
        ({"mesh_build_mode": "mesh"}, 37_448, (8, 5)),
        ({"mesh_build_mode": "mesh", "mesh_fan_out": 2, "mesh_depth": 3}, 14, (2, 3)),
        ({"mesh_fan_out": 2, "mesh_depth": 3}, 15, FLAT),
    ],
)
def test_topology_follows_mesh_options_and_worker_count(
    options: dict[str, Any], workers: int, shape: tuple[int, int]
) -> None:
    """Fan-out and depth of the tree follow from the mesh options and the number of workers."""
    tree = VoidConfiguration(**options).topology(workers)
    assert (tree.fan_out, tree.depth_max) == shape


@pytest.mark.parametrize("mode", ["mesh", "auto"])
def test_too_small_mesh_error_names_first_worker_without_place(mode: str) -> None:
    """If the mesh is too small, the error names the first worker without a place."""
    with pytest.raises(UsageError) as caught:
        VoidConfiguration(mesh_build_mode=mode).topology(37_449)
    assert "37,448 places: worker 37449 has none" in str(caught.value)
    assert "mesh_fan_out=8 and mesh_depth=5" in str(caught.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_option_is_refused_with_reason(name: str) -> None:
    """An option that VoidConfiguration does not have is refused with a reason."""
    with pytest.raises(UsageError) as caught:
        VoidConfiguration(**{name: 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"VoidConfiguration takes no {name}: {REFUSED[name]}"


def test_misspelt_option_error_suggests_similar_name() -> None:
    """A misspelt name is refused with the most similar option."""
    with pytest.raises(UsageError, match=r"unicast_prt; did you mean unicast_port\?"):
        VoidConfiguration(unicast_prt=1)  # type: ignore[call-arg]


def test_unknown_option_error_lists_all_options() -> None:
    """A name unlike all options is refused with the list of options."""
    with pytest.raises(UsageError, match="unicast_port, port_range, network_mask"):
        VoidConfiguration(xyzzy=1)  # type: ignore[call-arg]
