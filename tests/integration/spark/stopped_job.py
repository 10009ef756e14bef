"""A program that fits and stops Spark; it prints which media drivers ran before and afterwards.

Media drivers stay in the POSIX session of the process that started them, so this program's media
drivers are those of its own session.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork, Sgd

OURS = re.compile(rb"/sparkstrom-\d+-[0-9a-f]{16}-(driver|\d+-\d+)")


def media_drivers() -> list[str]:
    """Return the roles ("driver" or a number) of the media drivers in this POSIX session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == os.getsid(0):
                match = OURS.search((entry / "cmdline").read_bytes())
                found += [match[1].decode().split("-")[0]] if match else []
        except OSError:
            continue
    return sorted(found)


class Looking:
    """A listener that records the largest list of media drivers during the fit."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_iteration(self, event: object) -> None:
        self.seen = max(self.seen, media_drivers(), key=len)


def main() -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    chance = np.random.default_rng(0)
    rows = [(x, int(x.argmax() % 4)) for x in chance.random((256, 8), np.float32)]
    model = DenseNetwork([8, 16, 4], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, SharedTrainingMaster(), progress=False)
    looking = Looking()
    data = spark.sparkContext.parallelize(rows)
    network.fit(data, 20, listeners=[looking], run_log="")
    after_fit = media_drivers()
    spark.stop()
    began_s = time.monotonic()  # stop() does not wait until the executors have ended
    while (after_stop := media_drivers()) and time.monotonic() - began_s < 30:
        time.sleep(0.01)
    gone_s = time.monotonic() - began_s
    refused = []
    for call in (
        lambda: network.fit(data, run_log=""),
        lambda: network.predict(data),
        lambda: network.evaluate(data),
        lambda: SparkNetwork(spark, model),
    ):
        try:
            call()
        except UsageError as error:
            refused.append(str(error))
    with network:  # close() succeeds, although files for a next fit went with the executors
        assert network._may_have_files
    assert not network._may_have_files
    assert network.predict(np.stack([x for x, _ in rows])).shape == (256, 4)
    print(json.dumps([looking.seen, after_fit, after_stop, gone_s, refused]), flush=True)


if __name__ == "__main__":
    main()
