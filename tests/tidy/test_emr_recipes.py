"""Tests of conf/emr: valid JSON for EMR, sizes from ``sparkstrom plan``, containers that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.units import mib, parse_bytes
from sparkstrom.cli.main import main
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.resolution import resolve

ROOT = Path(__file__).parents[2]
EMR = ROOT / "conf/emr"
PLANNED = "plan --params 5000000 --workers 16 --workers-per-node 4"  # the command in docs/emr.md
INSTANCE_MIB = 16_384  # of m5.xlarge and the fleets' other instances
ALLOCATION_MIB = 1024  # YARN's default: containers are multiples of it


def load_emr_file(name: str) -> Any:
    return json.loads((EMR / name).read_text())


def load_classifications() -> dict[str, dict[str, str]]:
    return {
        entry["Classification"]: entry["Properties"]
        for entry in load_emr_file("configurations.json")
    }


def check_classifications(configurations: list[dict[str, Any]]) -> None:
    """Check that these are EMR's classifications with properties of type str, at any depth."""
    for entry in configurations:
        assert entry.keys() <= {"Classification", "Properties", "Configurations"}
        assert isinstance(entry["Classification"], str)
        assert all(isinstance(value, str) for value in entry["Properties"].values()), entry
        check_classifications(entry.get("Configurations", []))


def test_configurations_have_form_of_emr_classifications() -> None:
    check_classifications(load_emr_file("configurations.json"))
    assert load_classifications().keys() == {"spark-defaults", "spark-env", "yarn-site"}
    (exported,) = [
        e for e in load_emr_file("configurations.json") if e["Classification"] == "spark-env"
    ]
    assert [inner["Classification"] for inner in exported["Configurations"]] == ["export"]


@pytest.mark.parametrize("fleets", ["instance-fleets.json", "instance-fleets-spot.json"])
def test_emr_request_of_files_is_valid_for_botocore(fleets: str) -> None:
    """botocore's description of RunJobFlow, from which AWS generates its SDKs, is the reference."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import ParamValidator

    actions, steps = load_emr_file("bootstrap-actions.json"), load_emr_file("steps.json")
    request = {
        "Name": "sparkstrom",
        "Configurations": load_emr_file("configurations.json"),
        "Instances": {"InstanceFleets": load_emr_file(fleets)},
        "BootstrapActions": [
            {
                "Name": action["Name"],
                "ScriptBootstrapAction": {"Path": action["Path"], "Args": action["Args"]},
            }
            for action in actions
        ],
        "Steps": [
            {
                "Name": step["Name"],
                "ActionOnFailure": step["ActionOnFailure"],
                "HadoopJarStep": {"Jar": step["Jar"], "Args": step["Args"]},
            }
            for step in steps
        ],
    }
    shape = session.get_service_model("emr").operation_model("RunJobFlow").input_shape
    assert ParamValidator().validate(request, shape).generate_report() == ""
    ingress = session.get_service_model("ec2").operation_model("AuthorizeSecurityGroupIngress")
    rule = {"GroupId": "GROUP", "IpPermissions": load_emr_file("udp-rule.json")}
    assert ParamValidator().validate(rule, ingress.input_shape).generate_report() == ""


def test_configured_sizes_equal_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes in the configuration equal those of the planned command."""
    assert main([*PLANNED.split(), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["conf"]
    expected = dict(line.removeprefix("--conf ").split("=", 1) for line in planned)
    found = load_classifications()["spark-defaults"]
    assert {key: found.get(key) for key in expected if key in found} == {
        key: value for key, value in expected.items() if key in found
    }
    assert expected.keys() - found.keys() == {"spark.sparkstrom.mesh_build_mode"}  # the default


@pytest.mark.parametrize("page", ["emr", "kubernetes", "standalone"])
def test_page_has_plan_command_and_its_sizes(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has the command, and the sizes that it prints."""
    text = (ROOT / f"docs/{page}.md").read_text()
    assert f"sparkstrom {PLANNED}" in text
    assert main([*PLANNED.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    if page == "standalone":  # without an enforced overhead
        assert f"{mib(plan['executor_overhead_bytes']):,} MiB" in text
    else:
        overheads = [line for line in plan["conf"] if "memoryOverhead" in line]
        assert len(overheads) == 2
        assert all(line in text for line in overheads)
    if page != "emr":
        for where in ("executor", "driver"):
            assert f"{mib(plan['shared_memory_bytes'][where])} MiB" in text


def test_network_policy_opens_ports_of_documented_command() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "docs/kubernetes.md").read_text()
    policy = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    (rule,) = policy["spec"]["ingress"]
    (udp,) = [port for port in rule["ports"] if port["protocol"] == "UDP"]
    assert f"port_range={udp['port']}-{udp['endPort']}" in text
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def container_mib(who: str) -> int:
    found = load_classifications()["spark-defaults"]
    size = sum(parse_bytes(found[f"spark.{who}.{part}"]) for part in ("memory", "memoryOverhead"))
    return -(-(size >> 20) // ALLOCATION_MIB) * ALLOCATION_MIB


def test_executor_and_application_master_fit_one_instance() -> None:
    yarn = load_classifications()["yarn-site"]
    room = int(yarn["yarn.nodemanager.resource.memory-mb"])
    assert container_mib("executor") + container_mib("driver") <= room < INSTANCE_MIB
    assert container_mib("executor") <= int(yarn["yarn.scheduler.maximum-allocation-mb"])
    cores = int(load_classifications()["spark-defaults"]["spark.executor.cores"])
    assert cores + 1 <= int(yarn["yarn.nodemanager.resource.cpu-vcores"])


@pytest.mark.parametrize("fleets", ["instance-fleets.json", "instance-fleets-spot.json"])
def test_fleet_has_one_instance_per_executor(fleets: str) -> None:
    workers = [fleet for fleet in load_emr_file(fleets) if fleet["InstanceFleetType"] != "MASTER"]
    targets = ("TargetOnDemandCapacity", "TargetSpotCapacity")
    instances = sum(fleet.get(target, 0) for fleet in workers for target in targets)
    assert str(instances) == load_classifications()["spark-defaults"]["spark.executor.instances"]
    kinds = [
        each["InstanceType"]
        for fleet in load_emr_file(fleets)
        for each in fleet["InstanceTypeConfigs"]
    ]
    assert [kind for kind in kinds if kind.partition(".")[0].endswith(("g", "gd"))] == []  # arm64


def test_udp_rule_opens_configured_ports() -> None:
    void = resolve(SharedTrainingMaster(), load_classifications()["spark-defaults"], {}).void
    (rule,) = load_emr_file("udp-rule.json")
    assert rule["IpProtocol"] == "udp"
    assert (rule["FromPort"], rule["ToPort"]) == void.port_range
    assert rule["FromPort"] <= (void.unicast_port or 0) <= rule["ToPort"]


def test_all_python_paths_equal_bootstrap_action_path() -> None:
    words = (EMR / "bootstrap.sh").read_text()
    home = next(w for w in words.split() if w.startswith("home=")).removeprefix("home=")
    exported = load_emr_file("configurations.json")[1]["Configurations"][0]["Properties"]
    paths = [*exported.values()]
    paths += [
        v for k, v in load_classifications()["spark-defaults"].items() if "python" in k.lower()
    ]
    assert len(paths) == 6
    assert set(paths) == {f"{home}/bin/python"}
