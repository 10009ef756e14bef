"""The jars of Hadoop's daemons, from a given directory, or downloaded and verified.

Four of them (42 MB) are not part of pyspark; all others are. Hadoop's jars must all have the same
version, so these four need pyspark 4.0, which contains Hadoop 3.4.1.
"""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pyspark

PYSPARK = Path(pyspark.__file__).parent
VARIABLE = "SPARKSTROM_YARN_JARS"
CALLED_IN = "SPARKSTROM_CALLED_IN"  # the user's directory; scripts/yarn-cluster changes to another
REPOSITORY = "https://repo1.maven.org/maven2"
TIMEOUT_S = 60.0  # without a received byte

PINNED = {
    "org/apache/hadoop/hadoop-client-minicluster/3.4.1/hadoop-client-minicluster-3.4.1.jar": (
        "5b90be54a39d856f237a4530e25f62aea4b67c180c73b5cfb1aff35c502b2d29"
    ),
    "org/bouncycastle/bcpkix-jdk18on/1.80/bcpkix-jdk18on-1.80.jar": (
        "4f4ba6a92617ea19dc183f0fa5db492eee426fdde2a0a2d6c94777ffd1af6413"
    ),
    "org/bouncycastle/bcutil-jdk18on/1.80/bcutil-jdk18on-1.80.jar": (
        "22eca687f7955411f456af33e6ea8e68fc73cd80cb8b32aa5f7a8b1827d7c678"
    ),
    "javax/xml/bind/jaxb-api/2.3.1/jaxb-api-2.3.1.jar": (
        "88b955a0df57880a26a74708bc34f74dcaf8ebf4e78843a28b50eae945732b06"
    ),
}

# The jars that the daemons need. The ResourceManager creates a certificate (Bouncy Castle), and its
# shaded classes use javax.xml.bind, which Java 11 removed from the JDK.
NEEDED = (
    "hadoop-client-minicluster-*.jar",
    "hadoop-client-api-*.jar",
    "hadoop-client-runtime-*.jar",
    "slf4j-api-*.jar",
    "jcl-over-slf4j-*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "log4j-1.2-api-*.jar",
    "log4j-slf4j2-impl-*.jar",
    "bcprov-jdk18on-*.jar",
    "bcpkix-jdk18on-*.jar",
    "bcutil-jdk18on-*.jar",
    "jaxb-api-2.*.jar",
)


def whole(path: str | Path, environ: Mapping[str, str]) -> Path:
    """Return an absolute path; a relative one is relative to the directory of the script's user."""
    return Path(environ.get(CALLED_IN, ""), path).absolute()


def jar_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the jars, and download them if needed; RuntimeError on failure."""
    if named := environ.get(VARIABLE):
        return whole(named, environ)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return fetch(PINNED, cache / "sparkstrom/yarn-jars", REPOSITORY)


def fetch(pinned: Mapping[str, str], target: Path, repository: str) -> Path:
    """Download the files that are not in ``target``; raise RuntimeError if a sha256 differs.

    pinned  path in the repository -> sha256
    """
    target.mkdir(parents=True, exist_ok=True)
    for path, wanted in pinned.items():
        file = target / Path(path).name
        if file.exists() and digest(file.read_bytes()) == wanted:
            continue
        content = _got(f"{repository}/{path}")
        if digest(content) != wanted:
            raise RuntimeError(
                f"{repository}/{path} has sha256 {digest(content)}, not {wanted}: it is not used;"
                f" put the right file into a directory and name that in {VARIABLE}"
            )
        draft = file.with_suffix(f".{os.getpid()}.part")
        draft.write_bytes(content)
        draft.replace(file)
    return target


def digest(content: bytes) -> str:
    """Return the sha256 as sha256sum prints it."""
    return hashlib.sha256(content).hexdigest()


def _got(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise RuntimeError(
            f"{url} cannot be fetched ({error}): fetch it elsewhere, put it into a directory and"
            f" name that in {VARIABLE}"
        ) from error


def classpath(jars: Path) -> list[str]:
    """Return the daemons' class path; RuntimeError if a jar is missing or has another version."""
    jars = jars.absolute()  # the daemons have other working directories
    found = []
    for pattern in NEEDED:
        hits = [hit for folder in (jars, PYSPARK / "jars") for hit in sorted(folder.glob(pattern))]
        if not hits:
            raise RuntimeError(f"no {pattern} in {jars} or {PYSPARK / 'jars'}")
        found.append(str(hits[0]))
    if len({Path(jar).stem.rpartition("-")[2] for jar in found[:3]}) > 1:
        raise RuntimeError(
            f"{', '.join(Path(jar).name for jar in found[:3])} must be of one version: use pyspark"
            f" 4.0, or name a directory with the other minicluster in {VARIABLE}"
        )
    return found
