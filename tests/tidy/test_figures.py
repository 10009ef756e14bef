"""Tests that figures on several pages equal their source: code, or a benchmark's record.

The prose of each page is its own; only its figures are compared with the source.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from sparkstrom.cli.main import main
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.planning.memory import ModelFootprint, estimate_worker_parts, sum_parts
from sparkstrom.planning.plan import PORTS_PER_HOST

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/records/convergence.md"
MANY = 100_000_000  # parameters of the pages' example for memory


def read_page(name: str) -> str:
    """Return a page's text on one line, without emphasis, to search it for figures."""
    path = ROOT / name if "/" in name or name == "README.md" else ROOT / f"docs/{name}.md"
    return " ".join(path.read_text().replace("**", "").split())


@cache
def recorded_figure(pattern: str) -> str:
    """Return the only figure in the record of convergence that matches a regular expression."""
    (found,) = {*re.findall(pattern, RECORD.read_text())}
    return found


def planned_worker_bytes(n_params: int, optimizer: str = "adam") -> int:
    """Return the bytes that ``sparkstrom plan`` computes for a worker with torch."""
    footprint = ModelFootprint(n_params, optimizer)
    return sum_parts(estimate_worker_parts(footprint, SharedTrainingMaster()))


def bytes_per_parameter(optimizer: str) -> int:
    return (planned_worker_bytes(MANY, optimizer) - planned_worker_bytes(0, optimizer)) // MANY


def memory_text_of_large_model() -> str:
    return f"{planned_worker_bytes(MANY) / 1e9:.1f} GB in all for 100 million"


def supported_python_versions() -> list[str]:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for each in classifiers if (found := re.search(r":: (3\.\d+)$", each))]


def supported_spark_versions() -> list[str]:
    """Return the oldest and newest tested Spark versions, without patch levels."""
    found = re.findall(
        r"^\| 3\.\d+\.\d+ \| (\d+\.\d+)\.\d+ \|", read_page_lines("compatibility"), re.M
    )
    return sorted({*found}, key=lambda version: [*map(int, version.split("."))])


def read_page_lines(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "tuning", "faq"])
def test_page_has_recorded_update_size_ratio(name: str) -> None:
    ratio = recorded_figure(r"\| sparkstrom \((\d+ to \d+)\) \|")
    assert f"{ratio} times smaller" in read_page(name)


@pytest.mark.parametrize("name", ["README.md", "faq"])
def test_page_has_planned_memory_of_large_model(name: str) -> None:
    text = read_page(name)
    assert f"up to {bytes_per_parameter('adam')} bytes per parameter with Adam" in text
    assert memory_text_of_large_model() in text


def test_operations_page_has_planned_bytes_per_parameter() -> None:
    adam, sgd = bytes_per_parameter("adam"), bytes_per_parameter("sgd")
    assert f"with Adam {adam} per parameter, with SGD {sgd} |" in read_page("operations")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("README.md", "--params 19210 --workers 16 --workers-per-node 4"),
        ("conf/spark-defaults.conf", "--params 19210 --workers 16 --workers-per-node 4"),
        ("quickstart", "--params 85002 --workers 16 --workers-per-node 4 --library dense"),
        ("yarn", "--params 19210 --workers 8 --workers-per-node 2"),
    ],
)
def test_page_has_planned_memory_overheads(
    name: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has both values of memoryOverhead that ``sparkstrom plan`` prints."""
    assert main(["plan", *arguments.split()]) == 0
    printed = re.findall(r"spark\.\w+\.memoryOverhead=\d+m", capsys.readouterr().out)
    assert len(printed) == 2
    assert all(
        each in read_page(name).replace("memoryOverhead ", "memoryOverhead=") for each in printed
    )


def test_pages_have_recorded_times_of_torch_distributor() -> None:
    ours = recorded_figure(r"\| (5\.\d s) and 0\.36 MB between workers;")
    theirs = recorded_figure(r"TorchDistributor (\d\.\d s) and 38 MB")
    assert f"| {ours}, 0.36 MB | {theirs}, 38 MB (computed) |" in read_page("README.md")
    assert f"it took {ours}, TorchDistributor {theirs}" in read_page("faq")


def test_faq_has_recorded_times_on_slow_link() -> None:
    dense = recorded_figure(r"DDP dense (\d+ s \(projected\))")
    other = recorded_figure(r"in seven runs\); SparseLoCo (\d+ s), 31 MB;")
    assert f"SparseLoCo took {other} and dense DDP {dense}" in read_page("faq")


@pytest.mark.parametrize("name", ["README.md", "faq", "compatibility"])
def test_page_has_tested_spark_versions(name: str) -> None:
    assert (
        f"Spark {supported_spark_versions()[0]} to {supported_spark_versions()[-1]}"
        in read_page(name).replace("[", "")
    )


@pytest.mark.parametrize("name", ["README.md", "quickstart", "faq", "compatibility", "yarn"])
def test_page_has_supported_python_versions(name: str) -> None:
    assert (
        f"CPython {supported_python_versions()[0]} to {supported_python_versions()[-1]}"
        in read_page(name)
    )


@pytest.mark.parametrize("name", ["operations", "local", "yarn", "emr"])
def test_page_has_default_lease(name: str) -> None:
    """The page has the default of ``lease_s``."""
    assert f"`lease_s` ({VoidConfiguration().lease_s:g} s)" in read_page(name)


@pytest.mark.parametrize("name", ["faq", "operations", "emr", "kubernetes", "standalone"])
def test_page_has_port_range_of_host(name: str) -> None:
    """The page has the range of ports that the plan gives a host."""
    first, last = 40123, 40123 + PORTS_PER_HOST - 1
    ports = (f"{first} to {last}", f"port_range=({first}, {last})", f"{first}-{last}")
    assert any(each in read_page(name) for each in ports)


def parse_table(text: str) -> dict[str, list[str]]:
    """Return a table's figures by the first cell of each line, without emphasis and ranges."""
    out = {}
    for line in text.splitlines():
        if line.startswith("| "):
            first, *rest = (cell.strip() for cell in line.replace("**", "").strip("| ").split("|"))
            plain = (re.sub(r"\([^)]*\)", "", cell) for cell in rest)
            figures = [" ".join(re.findall(r"-?[\d.]+", cell)) for cell in plain]
            out[first] = [each for each in figures if each]
    return out


@pytest.mark.parametrize(
    ("begins", "begins_there"),
    [
        ("shifted digits, Adam", "shifted digits, Adam ("),
        ("convolution with BatchNorm, SGD", "convolution with BatchNorm, momentum 0.9 ("),
        ("regression, SGD", "regression, momentum 0.9 ("),
        ("transformer, AdamW,", "transformer, AdamW, 1,056"),
    ],
)
def test_readme_table_rows_equal_tuning_table_rows(begins: str, begins_there: str) -> None:
    here, there = (
        parse_table((ROOT / "README.md").read_text()),
        parse_table(read_page_lines("tuning")),
    )
    (one,) = [figures for first, figures in here.items() if first.startswith(begins)]
    (other,) = [figures for first, figures in there.items() if first.startswith(begins_there)]
    assert one == other


def test_readme_and_quickstart_have_same_compilation_time() -> None:
    """README and quickstart have the same time for compiling the kernels."""
    (seconds,) = re.findall(r"compiles kernels for about (\d+) s", read_page("README.md"))
    assert f"compiles kernels for about {seconds} s" in read_page("quickstart")
