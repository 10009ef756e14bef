"""Where the controller is to run: what the option says, whom it suits, which ports are left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.driver.cluster import Slots, workers_for
from sparkstrom.spark.driver.controller_choice import ControllerChoice, parse_controller
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import ports_beside
from sparkstrom.spark.executor.reaching import WayToController
from sparkstrom.spark.executor.task_place import ExecutorName, executor_name
from sparkstrom.transport.addresses import Listed
from sparkstrom.transport.aeron.processes import find_executor

LISTED = [Listed("lo", "127.0.0.1"), Listed("eth0", "10.1.2.3"), Listed("eth1", "fd00::7")]


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
def test_what_it_may_say(text: str, choice: ControllerChoice) -> None:
    assert parse_controller(text) == choice
    assert VoidConfiguration(controller=text).controller == text
    assert choice.apart == (choice.word != "driver")


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "node7:", "node7:0", "node7:70000", "node7:x", "[fd00::7", "[::1]:", 7]
)
def test_what_it_may_not_say(text: Any) -> None:
    with pytest.raises(UsageError, match="controller="):
        VoidConfiguration(controller=text)


def test_it_comes_from_sparks_configuration() -> None:
    conf = {"spark.sparkstrom.controller": "executor"}
    assert resolve(SharedTrainingMaster(), conf, {}).void.controller == "executor"


def test_an_address_of_the_driver_is_none_of_an_executors() -> None:
    with pytest.raises(UsageError, match=r"controller_address='h'.*controller='executor'"):
        VoidConfiguration(controller="executor", controller_address="h")
    VoidConfiguration(controller="driver", controller_address="h")


def test_whom_it_suits() -> None:
    def suits(text: str) -> bool:
        return parse_controller(text).suits(("node7", "vm"), LISTED)

    assert suits("executor")
    assert suits("node7")
    assert suits("vm:40123")
    assert suits("10.1.2.3")
    assert suits("[fd00:0::7]:40123")  # the same address, written otherwise
    assert suits("localhost")  # by name service
    assert not suits("10.1.2.4")
    assert not suits("no-such-host.invalid")
    assert parse_controller("[fd00:0::7]").address_among(LISTED) == "fd00::7"
    assert parse_controller("node7").address_among(LISTED) is None


def test_its_port() -> None:
    void = VoidConfiguration(port_range=(50000, 50003))
    assert parse_controller("executor").ports(void.controller_ports()) == range(50000, 50004)
    assert parse_controller("node7:40123").ports(void.controller_ports()) == range(40123, 40124)
    assert parse_controller("executor").ports(None) is None


def test_workers_leave_it_its_port() -> None:
    here, ports = "10.1.2.3", range(50000, 50004)
    assert ports_beside(ports, here, Endpoint(here, 50003)) == range(50000, 50003)
    assert ports_beside(ports, here, Endpoint(here, 50000)) == range(50001, 50004)
    assert ports_beside(ports, here, Endpoint(here, 50001)) == range(50002, 50004)
    assert ports_beside(ports, here, Endpoint("10.1.2.4", 50003)) == ports  # another host's
    assert ports_beside(ports, here, Endpoint(here, 40123)) == ports
    assert ports_beside(None, here, Endpoint(here, 50003)) is None


def test_workers_wait_for_one_that_has_not_been_heard_of() -> None:
    """One that has been answers at once, wherever it is: a blocked host is told within 10 s."""
    coming, there = (
        WayToController(1, Endpoint("10.1.2.3", 9), VoidConfiguration(), 1, 0, answers)
        for answers in (False, True)
    )
    assert there.patience_s < 5
    assert coming.patience_s > 5 * there.patience_s


def master(controller: str, workers: int = -1) -> SharedTrainingMaster:
    void = VoidConfiguration(controller=controller)
    return SharedTrainingMaster(void=void, workers_per_node=workers)


def test_it_has_one_of_the_slots() -> None:
    assert workers_for(Slots(2, 3), master("driver")) == 6
    assert workers_for(Slots(2, 3), master("executor")) == 5
    assert workers_for(Slots(2, 3), master("node7", 2)) == 4
    with pytest.raises(UsageError, match=r"'executor' needs one slot more: 6 workers.* 6 task"):
        workers_for(Slots(2, 3), master("executor", 3))
    with pytest.raises(UsageError, match="needs one slot more: 1 workers"):
        workers_for(Slots(1, 1), master("executor"))


def test_an_executor_is_known_by_what_spark_started_it_with(tmp_path: Path) -> None:
    words = "java\0-cp\0x\0--executor-id\0" + "12\0--hostname\0node7\0--cores\0" + "4\0"
    pid = find_executor().pid  # no JVM here: this process stands for itself
    (tmp_path / str(pid)).mkdir()
    stat = (Path("/proc") / str(pid) / "stat").read_text()
    (tmp_path / str(pid) / "stat").write_text(stat)
    (tmp_path / str(pid) / "cmdline").write_text(words)
    assert executor_name(tmp_path) == ExecutorName("12", "node7")
    (tmp_path / str(pid) / "cmdline").write_text("java\0org.apache.spark.deploy.SparkSubmit\0")
    assert executor_name(tmp_path) == ExecutorName("driver", "")
