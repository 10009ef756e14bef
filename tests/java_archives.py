"""Start the suite's JVMs faster, by class data sharing and without the optimizing compiler.

A driver and two executors take 33 s of processor time to start and stop: each loads some ten
thousand classes and compiles them twice. With an archive of the loaded classes (JDK 13 and later)
and the first compiler alone they take 11 s. ``python -m tests.java_archives`` makes the archives on
first use and prints the value of SPARK_SUBMIT_OPTS that uses them. The suite also runs without.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ARCHIVES = ("driver", "executor")  # their class paths differ, so each has its own archive
# A JVM whose class path does not begin like the archive's loads its classes normally, without a
# warning.
QUIET = "-Xlog:disable -Xlog:all=error:stderr"
OPTIONS = f"{QUIET} -XX:TieredStopAtLevel=1"
RUN_LIMIT_S = 300.0


def submit_options(driver: str, executor: str) -> str:
    """Return SPARK_SUBMIT_OPTS that give these options to drivers, also on YARN, and executors."""
    options = {
        "executor.defaultJavaOptions": f"{OPTIONS} {executor}",
        "driver.defaultJavaOptions": f"{OPTIONS} {driver}",
        "yarn.am.extraJavaOptions": f"{OPTIONS} {driver}",
    }
    properties = [f"'-Dspark.{name}={value}'" for name, value in options.items()]
    return " ".join([OPTIONS, driver, *properties])


def archives_directory() -> Path:
    """Return the directory for this version of Java and Spark and this user."""
    import pyspark

    java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr
    key = f"{java} {pyspark.__version__} {Path(pyspark.__file__).parent} {os.getuid()}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "sparkstrom-tests" / hashlib.sha256(key.encode()).hexdigest()[:16]


def java_processes(parent: int) -> Iterator[tuple[int, str]]:
    """Yield the id and the command line of each JVM below the process ``parent``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # the process has ended
            if int(stat[stat.rindex(")") + 2 :].split()[1]) == parent:
                if "java" in command.partition(" ")[0]:
                    yield int(entry.name), command
                yield from java_processes(int(entry.name))


def dump(directory: Path) -> None:
    """Run some typical jobs, and write archives of the classes that their JVMs loaded."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local-cluster[1,2,1024]").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    numbers = spark.sparkContext.parallelize(range(100), 2)
    assert numbers.mapPartitions(lambda part: [sum(part)]).sum() == 4950
    frame = spark.createDataFrame([(i, [1.0] * 4) for i in range(50)], "i long, x array<double>")
    shuffled = frame.repartition(2).where("i >= 10")
    assert shuffled.rdd.map(lambda row: row.i).count() == 40
    assert shuffled.mapInArrow(lambda batches: batches, frame.schema).count() == 40
    shuffled.write.parquet(str(directory / "rows"))
    for pid, command in java_processes(os.getpid()):
        name = "executor" if "CoarseGrainedExecutorBackend" in command else "driver"
        made = str(directory / f"{name}.jsa")
        subprocess.run(["jcmd", str(pid), "VM.cds", "dynamic_dump", made], check=True)
    spark.stop()


def make_archives(directory: Path) -> None:
    """Make the archives in a new directory and rename it when it is complete."""
    new = directory.with_name(f"{directory.name}.{os.getpid()}")
    new.mkdir(parents=True)
    record = "-XX:+RecordDynamicDumpInfo"
    environment = dict(os.environ, SPARK_SUBMIT_OPTS=submit_options(record, record))
    try:
        subprocess.run(
            [sys.executable, "-m", __spec__.name, str(new)],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=RUN_LIMIT_S,
        )
        if all((new / f"{name}.jsa").exists() for name in ARCHIVES):
            new.rename(directory)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def main() -> None:
    if len(sys.argv) > 1:
        dump(Path(sys.argv[1]))
        return
    directory = archives_directory()
    if not directory.exists():
        make_archives(directory)
    print(submit_options(*(f"-XX:SharedArchiveFile={directory}/{name}.jsa" for name in ARCHIVES)))


if __name__ == "__main__":
    main()
