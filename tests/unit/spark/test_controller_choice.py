"""Tests of the option ``controller``: its values, the hosts that match it, and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import ControllerChoice, VoidConfiguration, parse_controller
from sparkstrom.options.resolution import resolve
from sparkstrom.planning.memory import ModelFootprint
from sparkstrom.spark.controller.controller_placement import order_executors
from sparkstrom.spark.executor_slots import count_workers
from sparkstrom.spark.fit_strategies import strategy_for
from sparkstrom.transport.aeron.driver_directories import find_executor_process
from sparkstrom.transport.bind_address import InterfaceAddress
from sparkstrom.worker.network_setup import (
    ControllerRoute,
    exclude_controller_port,
    require_ports_on_one_host,
)
from sparkstrom.worker.task_environment import ExecutorInfo, read_executor_info

LISTED = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "10.1.2.3"),
    InterfaceAddress("eth1", "fd00::7"),
]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("driver", ControllerChoice("driver")),
        (" executor ", ControllerChoice("executor")),
        ("node7", ControllerChoice("", "node7")),
        ("node7:40123", ControllerChoice("", "node7", 40123)),
        ("10.1.2.3", ControllerChoice("", "10.1.2.3")),
        ("fd00::7", ControllerChoice("", "fd00::7")),
        ("[fd00::7]", ControllerChoice("", "fd00::7")),
        ("[fd00::7]:40123", ControllerChoice("", "fd00::7", 40123)),
    ],
)
def test_controller_accepts_role_or_host_with_port(text: str, choice: ControllerChoice) -> None:
    """The controller runs in the driver, on any executor, or on a named host and port."""
    assert parse_controller(text) == choice
    assert VoidConfiguration(controller=text).controller == text
    assert choice.is_in_task == (choice.word != "driver")


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "node7:", "node7:0", "node7:70000", "node7:x", "[fd00::7", "[::1]:", 7]
)
def test_rejects_invalid_controller(text: Any) -> None:
    """Text that is not a host with an optional port is refused."""
    with pytest.raises(UsageError, match="controller="):
        VoidConfiguration(controller=text)


@pytest.mark.parametrize("text", ["Driver", "EXECUTOR", " Auto "])
def test_rejects_controller_role_in_capitals(text: str) -> None:
    """A choice in capital letters is refused, and not taken as the name of a host."""
    with pytest.raises(UsageError, match=f'write "{text.strip().lower()}"'):
        VoidConfiguration(controller=text)


def test_controller_is_read_from_spark_configuration() -> None:
    """The option can be set in Spark's configuration."""
    conf = {"spark.sparkstrom.controller": "executor"}
    assert resolve(SharedTrainingMaster(), conf, {}).void.controller == "executor"


def test_rejects_controller_address_for_controller_on_executor() -> None:
    """controller_address is refused if the controller runs on an executor."""
    with pytest.raises(UsageError, match=r"controller_address='h'.*controller='executor'"):
        VoidConfiguration(controller="executor", controller_address="h")
    VoidConfiguration(controller="driver", controller_address="h")


def test_controller_matches_host_by_name_or_address() -> None:
    """A host matches by its names, its addresses, or an address from the name service."""

    def suits(text: str) -> bool:
        return parse_controller(text).matches_host(("node7", "vm"), LISTED)

    assert suits("executor")
    assert suits("node7")
    assert suits("vm:40123")
    assert suits("10.1.2.3")
    assert suits("[fd00:0::7]:40123")  # the same address in another notation
    assert suits("localhost")  # resolved by the name service
    assert not suits("10.1.2.4")
    assert not suits("no-such-host.invalid")
    assert parse_controller("[fd00:0::7]").find_address(LISTED) == "fd00::7"
    assert parse_controller("node7").find_address(LISTED) is None


def test_controller_port_precedes_port_range() -> None:
    """A port in ``controller`` takes precedence over port_range."""
    void = VoidConfiguration(port_range=(50000, 50003))
    assert parse_controller("executor").ports(void.controller_ports()) == range(50000, 50004)
    assert parse_controller("node7:40123").ports(void.controller_ports()) == range(40123, 40124)
    assert parse_controller("executor").ports(None) is None


def test_workers_do_not_use_controller_port() -> None:
    """Workers on the controller's host do not use its port."""
    here, ports = "10.1.2.3", range(50000, 50004)
    assert exclude_controller_port(ports, here, Endpoint(here, 50003)) == range(50000, 50003)
    assert exclude_controller_port(ports, here, Endpoint(here, 50000)) == range(50001, 50004)
    assert exclude_controller_port(ports, here, Endpoint(here, 50001)) == range(50002, 50004)
    assert (
        exclude_controller_port(ports, here, Endpoint("10.1.2.4", 50003)) == ports
    )  # the controller is on another host
    assert exclude_controller_port(ports, here, Endpoint(here, 40123)) == ports
    assert exclude_controller_port(None, here, Endpoint(here, 50003)) is None


ONE_PORT: list[dict[str, Any]] = [
    {"unicast_port": 65535},
    {"port_range": (40123, 40123)},
    {"unicast_port": 40123, "port_range": (40123, 40123)},
]


@pytest.mark.parametrize("options", ONE_PORT)
def test_rejects_ports_without_one_left_for_workers(options: dict[str, Any]) -> None:
    """It is an error if workers on the controller's host have no port left."""
    here, void = "10.1.2.3", VoidConfiguration(**options)
    (port,) = void.executor_ports() or ()
    with pytest.raises(SetupError, match=f"port {port}: .* set port_range to at least two more"):
        exclude_controller_port(void.executor_ports(), here, Endpoint(here, port))
    with pytest.raises(UsageError, match=f"port {port}: "):
        require_ports_on_one_host(void)
    local: Any = strategy_for(SharedTrainingMaster(void=void))
    with pytest.raises(UsageError, match=f"port {port}: "):
        local.check(None, {"spark.master": "local[2]"}, 2, ModelFootprint(1))
    require_ports_on_one_host(VoidConfiguration(unicast_port=1, port_range=(2, 2)))
    require_ports_on_one_host(VoidConfiguration(unicast_port=65534))


def test_workers_wait_longer_for_starting_controller() -> None:
    """A controller that may still be starting is waited for longer than one that runs."""
    coming, there = (
        ControllerRoute(1, Endpoint("10.1.2.3", 9), VoidConfiguration(), 1, 0, answers)
        for answers in (False, True)
    )
    assert there.patience_s < 5
    assert coming.patience_s > 5 * there.patience_s


def master(controller: str, workers: int = -1) -> SharedTrainingMaster:
    void = VoidConfiguration(controller=controller)
    return SharedTrainingMaster(void=void, workers_per_node=workers)


def test_controller_on_executor_takes_one_slot() -> None:
    """A controller on an executor takes one task slot."""
    assert count_workers(TaskSlots(2, 3), strategy_for(master("driver"))) == 6
    assert count_workers(TaskSlots(2, 3), strategy_for(master("executor"))) == 5
    assert count_workers(TaskSlots(2, 3), strategy_for(master("node7", 2))) == 4
    with pytest.raises(UsageError, match=r"'executor' needs one slot more: 6 workers.* 6 task"):
        count_workers(TaskSlots(2, 3), strategy_for(master("executor", 3)))
    with pytest.raises(UsageError, match="needs one slot more: 1 workers"):
        count_workers(TaskSlots(1, 1), strategy_for(master("executor")))


def test_executor_order_starts_with_one_per_host() -> None:
    """Before, 64 executors of the first hosts were asked, whether a host has one or many."""
    names = [(f"{host}.{n}", f"10.0.0.{host}") for host in range(3) for n in range(2)]
    order = [name for name, _ in order_executors(names, "10.0.0.1")]
    assert order == ["1.0", "1.1", "0.0", "2.0", "0.1", "2.1"]


def test_executor_info_is_read_from_jvm_command_line(tmp_path: Path) -> None:
    """Id, host and cores of an executor are read from its JVM's command line."""
    words = "java\0-cp\0x\0--executor-id\0" + "12\0--hostname\0node7\0--cores\0" + "4\0"
    pid = find_executor_process().pid  # without a JVM, this is the test's own process
    (tmp_path / str(pid)).mkdir()
    stat = (Path("/proc") / str(pid) / "stat").read_text()
    (tmp_path / str(pid) / "stat").write_text(stat)
    (tmp_path / str(pid) / "cmdline").write_text(words)
    assert read_executor_info(tmp_path) == ExecutorInfo("12", "node7", 4)
    (tmp_path / str(pid) / "cmdline").write_text("java\0org.apache.spark.deploy.SparkSubmit\0")
    assert read_executor_info(tmp_path) == ExecutorInfo("driver", "", 1)
