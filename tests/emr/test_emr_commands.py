"""Tests that run conf/emr's commands in a separate environment without a node of EMR.

Stand-ins of `sudo` and `aws` record their arguments, and that of `aws` copies files; pip is real.
Other tests call the real `aws` with a server that checks EMR's and EC2's rules (moto).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMR = ROOT / "conf/emr"
MACHINE = "/usr/local/bin:/usr/bin:/bin"

SUDO = """#!/bin/bash
echo "sudo $*" >>"$SAID"
case $1 in
    tee) sed 's/^/  /' >>"$SAID" ;;
    install) mkdir -p "${@: -1}" ;;
esac
"""
AWS = """#!/bin/bash
echo "aws $*" >>"$SAID"
case "$1 $2" in
    "s3 cp") [[ $5 == s3://* ]] || cp "$BUCKET/${4##*/}" "$5" ;;
    "s3 sync") mkdir -p "$5"; cp "$BUCKET"/*.whl "$5" ;;
    "emr create-cluster")
        for word; do case $word in file://*) cat "${word#file://}" >>"$SAID.json"; esac; done
        echo '{"ClusterId": "j-1"}' ;;
esac
"""


class Node:
    """A machine without sparkstrom: a PATH with stand-ins, and the calls that they recorded."""

    def __init__(self, folder: Path, *stubs: str) -> None:
        self.bin, self.bucket, self.said = folder / "bin", folder / "bucket", folder / "said"
        for path in (self.bin, self.bucket):
            path.mkdir()
        for name in stubs:
            (self.bin / name).write_text({"sudo": SUDO, "aws": AWS}[name])
            (self.bin / name).chmod(0o755)
        self.environment = {
            "PATH": f"{self.bin}:{MACHINE}",
            "HOME": str(folder),
            "BUCKET": str(self.bucket),
            "SAID": str(self.said),
        } | {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "https_proxy"))}

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(EMR / script), *arguments],
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, "sudo", "aws")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a copy of the tree, without the checkout's folder build/."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for name in ("sparkstrom", "native"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), str(copy)], check=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_bootstrap_action_makes_environment_with_aeron(
    node: Node, wheel: Path, tmp_path: Path
) -> None:
    """bootstrap.sh sets UDP buffer sizes and makes an environment that loads Aeron's library."""
    shutil.copy(wheel, node.bucket)
    home = tmp_path / "opt/sparkstrom"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (node.bin / python).symlink_to(os.path.realpath(sys.executable))
    options = ["--package", f"s3://b/{wheel.name}", "--home", str(home), "--python", python]
    done = node.run("bootstrap.sh", *options, "--", "packaging")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("sparkstrom ")
    said = node.lines()
    assert "  net.core.rmem_max = 4194304" in said
    assert "  net.core.wmem_max = 4194304" in said
    assert "sudo sysctl --quiet --load /etc/sysctl.d/90-sparkstrom.conf" in said
    assert not any("dnf" in line for line in said)  # this Python exists already
    code = """
import json, sys, packaging, pandas, sparkstrom
from sparkstrom.transport.aeron.library import load_library
print(json.dumps([sys.prefix, sparkstrom.__file__, load_library().path]))
"""
    command = [str(home / "bin/python"), "-c", code]
    found = subprocess.run(command, env=node.environment, cwd="/", capture_output=True, check=True)
    assert all(path.startswith(str(home)) for path in json.loads(found.stdout))
    # Containers run as another user.
    assert all(path.stat().st_mode & 0o055 == 0o055 for path in (home, home / "bin/sparkstrom"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--package wants the wheel"),
        (("--package",), "--package wants a value"),
        (("--packet", "x"), "--packet is not an option"),
    ],
)
def test_bootstrap_action_rejects_wrong_arguments(node: Node, arguments, words: str) -> None:
    done = node.run("bootstrap.sh", *arguments)
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr
    assert not node.said.exists()


def test_bootstrap_action_rejects_unsupported_processor(node: Node) -> None:
    (node.bin / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (node.bin / "uname").chmod(0o755)
    done = node.run("bootstrap.sh", "--package", "s3://b/x.whl")
    assert done.returncode == 1
    assert "this node is aarch64" in done.stderr


def test_bootstrap_action_installs_missing_python(node: Node) -> None:
    """bootstrap.sh installs a missing Python with dnf."""
    done = node.run("bootstrap.sh", "--package", "s3://b/x.whl", "--python", "python3.99")
    assert done.returncode != 0  # the stand-in of sudo installs nothing
    assert "sudo dnf install --quiet --assumeyes python3.99" in node.lines()


@pytest.mark.parametrize(
    ("release", "label", "python"),
    [("emr-7", "emr-7.13.0", "python3.11"), ("emr-spark-8", "emr-spark-8.0.0", "python3.12")],
)
def test_create_cluster_uploads_files_and_requests_cluster(
    node: Node, tmp_path: Path, release: str, label: str, python: str
) -> None:
    """create-cluster.sh uploads three files and requests a cluster that uses them."""
    wheel, program = tmp_path / "sparkstrom-9-py3-none-any.whl", tmp_path / "train.py"
    wheel.touch()
    program.touch()
    call = ["create-cluster.sh", release, "s3://b/f/", str(wheel), str(program)]
    done = node.run(*call, "--ec2-attributes", "SubnetId=subnet-1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ClusterId": "j-1"}
    *uploads, asked = node.lines()
    assert [line.split()[-1] for line in uploads] == [
        "s3://b/f/bootstrap.sh",
        "s3://b/f/sparkstrom-9-py3-none-any.whl",
        "s3://b/f/train.py",
    ]
    assert f"--release-label {label} " in asked
    assert asked.endswith("--auto-terminate --ec2-attributes SubnetId=subnet-1")
    sent = Path(f"{node.said}.json").read_text()
    for word in (
        '"s3://b/f/bootstrap.sh"',
        '"s3://b/f/sparkstrom-9-py3-none-any.whl"',
        f'"{python}"',
        '"s3://b/f/train.py"',
    ):
        assert word in sent
    for left in ("FOLDER", "WHEEL", "PYTHON", "PROGRAM"):
        assert left not in sent.replace("PYSPARK_PYTHON", "").replace("PYSPARK_DRIVER_PYTHON", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("emr-6", "s3://b", "/etc/hostname", "/etc/hostname"), "emr-6 is neither"),
        (("emr-7", "bucket", "/etc/hostname", "/etc/hostname"), "not a folder of S3"),
        (("emr-7", "s3://b", "/no/such.whl", "/etc/hostname"), "no file /no/such.whl"),
        (("emr-7",), "wants a release"),
    ],
)
def test_create_cluster_rejects_wrong_arguments(node: Node, arguments, words: str) -> None:
    done = node.run("create-cluster.sh", *arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not node.said.exists()


SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A machine with AWS' command line tool from PyPI in its own environment, and a moto server."""
    pytest.importorskip("moto")
    folder = tmp_path_factory.mktemp("aws")
    home = folder / "venv"
    venv.create(home)
    command = [sys.executable, str(ROOT / "scripts/install.py"), str(home / "bin/python")]
    subprocess.run([*command, "awscli>=1.44,<2"], check=True, timeout=280)
    node = Node(folder)
    (node.bin / "aws").symlink_to(home / "bin/aws")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        node.environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield node
        server.kill()


def client(node: Node, service: str):
    """Return a client of the server in this process, because `aws` takes 0.7 s per call."""
    import boto3

    environment = node.environment
    return boto3.client(
        service,
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment["AWS_DEFAULT_REGION"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("fleets", ["instance-fleets.json", "instance-fleets-spot.json"])
def test_aws_cli_accepts_cluster_request(aws: Node, tmp_path: Path, fleets: str) -> None:
    """The real `aws` accepts create-cluster.sh's options, and the cluster has its configuration."""
    wheel, program = tmp_path / "sparkstrom-9-py3-none-any.whl", tmp_path / "train.py"
    wheel.write_text("wheel")
    program.write_text("print()")
    emr, s3 = client(aws, "emr"), client(aws, "s3")
    s3.create_bucket(Bucket="bucket")
    call = ["create-cluster.sh", "emr-7", "s3://bucket/f", str(wheel), str(program)]
    done = aws.run(*call, "--instance-fleets", f"file://{EMR / fleets}")
    assert done.returncode == 0, done.stderr
    name = json.loads(done.stdout)["ClusterId"]
    cluster = emr.describe_cluster(ClusterId=name)["Cluster"]
    assert cluster["ReleaseLabel"] == "emr-7.13.0"
    assert [entry["Classification"] for entry in cluster["Configurations"]] == [
        "spark-defaults",
        "spark-env",
        "yarn-site",
    ]
    actions = emr.list_bootstrap_actions(ClusterId=name)["BootstrapActions"]
    assert [action["Name"] for action in actions] == ["sparkstrom"]
    steps = emr.list_steps(ClusterId=name)["Steps"]
    assert steps[0]["Config"]["Args"][-1] == "s3://bucket/f/train.py"
    listed = s3.list_objects_v2(Bucket="bucket")["Contents"]
    assert {entry["Key"] for entry in listed} >= {"f/bootstrap.sh", f"f/{wheel.name}", "f/train.py"}


@pytest.mark.slow
def test_open_udp_adds_rule_to_security_group(aws: Node) -> None:
    """open-udp.sh opens UDP ports 40123 to 40186 within a security group."""
    ec2 = client(aws, "ec2")
    group = ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    dry = aws.run("open-udp.sh", group, "--dry-run")
    assert "DryRunOperation" in dry.stderr  # it would have been allowed
    done = aws.run("open-udp.sh", group)
    assert done.returncode == 0, done.stderr
    (found,) = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    (rule,) = found["IpPermissions"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("udp", 40123, 40186)
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group]
