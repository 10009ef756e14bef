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


def page(name: str) -> str:
    """Return a page's text on one line, without emphasis, to search it for figures."""
    path = ROOT / name if "/" in name or name == "README.md" else ROOT / f"docs/{name}.md"
    return " ".join(path.read_text().replace("**", "").split())


@cache
def record(pattern: str) -> str:
    """Return the only figure in the record of convergence that matches a regular expression."""
    (found,) = {*re.findall(pattern, RECORD.read_text())}
    return found


def planned(n_params: int, optimizer: str = "adam") -> int:
    """Return the bytes that ``sparkstrom plan`` computes for a worker with torch."""
    footprint = ModelFootprint(n_params, optimizer)
    return sum_parts(estimate_worker_parts(footprint, SharedTrainingMaster()))


def bytes_per_parameter(optimizer: str) -> int:
    return (planned(MANY, optimizer) - planned(0, optimizer)) // MANY


def memory_of_many() -> str:
    return f"{planned(MANY) / 1e9:.1f} GB in all for 100 million"


def pythons() -> list[str]:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [found[1] for each in classifiers if (found := re.search(r":: (3\.\d+)$", each))]


def sparks() -> list[str]:
    """Return the oldest and newest tested Spark versions, without patch levels."""
    found = re.findall(r"^\| 3\.\d+\.\d+ \| (\d+\.\d+)\.\d+ \|", page_lines("compatibility"), re.M)
    return sorted({*found}, key=lambda version: [*map(int, version.split("."))])


def page_lines(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "tuning", "faq"])
def test_how_much_smaller_updates_are(name: str) -> None:
    ratio = record(r"\| sparkstrom \((\d+ to \d+)\) \|")
    assert f"{ratio} times smaller" in page(name)


@pytest.mark.parametrize("name", ["README.md", "faq"])
def test_what_a_large_model_takes(name: str) -> None:
    text = page(name)
    assert f"up to {bytes_per_parameter('adam')} bytes per parameter with Adam" in text
    assert memory_of_many() in text


def test_operations_has_the_plans_bytes_per_parameter() -> None:
    adam, sgd = bytes_per_parameter("adam"), bytes_per_parameter("sgd")
    assert f"with Adam {adam} per parameter, with SGD {sgd} |" in page("operations")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("README.md", "--params 19210 --workers 16 --workers-per-node 4"),
        ("conf/spark-defaults.conf", "--params 19210 --workers 16 --workers-per-node 4"),
        ("quickstart", "--params 85002 --workers 16 --workers-per-node 4 --library dense"),
        ("yarn", "--params 19210 --workers 8 --workers-per-node 2"),
    ],
)
def test_overheads_are_the_plans(
    name: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has both values of memoryOverhead that ``sparkstrom plan`` prints."""
    assert main(["plan", *arguments.split()]) == 0
    printed = re.findall(r"spark\.\w+\.memoryOverhead=\d+m", capsys.readouterr().out)
    assert len(printed) == 2
    assert all(each in page(name).replace("memoryOverhead ", "memoryOverhead=") for each in printed)


def test_times_beside_torch_distributor() -> None:
    ours = record(r"\| (5\.\d s) and 0\.36 MB between workers;")
    theirs = record(r"TorchDistributor (\d\.\d s) and 38 MB")
    assert f"| {ours}, 0.36 MB | {theirs}, 38 MB (computed) |" in page("README.md")
    assert f"it took {ours}, TorchDistributor {theirs}" in page("faq")


def test_times_on_a_slow_link() -> None:
    dense = record(r"DDP dense (\d+ s \(projected\))")
    other = record(r"in seven runs\); SparseLoCo (\d+ s), 31 MB;")
    assert f"SparseLoCo took {other} and dense DDP {dense}" in page("faq")


@pytest.mark.parametrize("name", ["README.md", "faq", "compatibility"])
def test_versions_of_spark(name: str) -> None:
    assert f"Spark {sparks()[0]} to {sparks()[-1]}" in page(name).replace("[", "")


@pytest.mark.parametrize("name", ["README.md", "quickstart", "faq", "compatibility", "yarn"])
def test_versions_of_python(name: str) -> None:
    assert f"CPython {pythons()[0]} to {pythons()[-1]}" in page(name)


@pytest.mark.parametrize("name", ["operations", "local", "yarn", "emr"])
def test_the_lease(name: str) -> None:
    """The page has the default of ``lease_s``."""
    assert f"`lease_s` ({VoidConfiguration().lease_s:g} s)" in page(name)


@pytest.mark.parametrize("name", ["faq", "operations", "emr", "kubernetes", "standalone"])
def test_the_ports_of_a_host(name: str) -> None:
    """The page has the range of ports that the plan gives a host."""
    first, last = 40123, 40123 + PORTS_PER_HOST - 1
    ports = (f"{first} to {last}", f"port_range=({first}, {last})", f"{first}-{last}")
    assert any(each in page(name) for each in ports)


def rows(text: str) -> dict[str, list[str]]:
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
def test_the_readmes_table_is_an_excerpt_of_the_one_in_tuning(
    begins: str, begins_there: str
) -> None:
    here, there = rows((ROOT / "README.md").read_text()), rows(page_lines("tuning"))
    (one,) = [figures for first, figures in here.items() if first.startswith(begins)]
    (other,) = [figures for first, figures in there.items() if first.startswith(begins_there)]
    assert one == other


def test_the_first_fits_compilation() -> None:
    """README and quickstart have the same time for compiling the kernels."""
    (seconds,) = re.findall(r"compiles kernels for about (\d+) s", page("README.md"))
    assert f"compiles kernels for about {seconds} s" in page("quickstart")
