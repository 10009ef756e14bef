"""Run a Spark Connect server until stdin ends; print its port. Usage: MASTER [KEY=VALUE ...]"""

from __future__ import annotations

import sys

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

SETTINGS = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.port": "0",
    "spark.sql.artifact.isolation.enabled": "true",
    "spark.sql.artifact.isolation.alwaysApplyClassloader": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "ERROR",
}


def main() -> None:
    conf = SparkConf().setMaster(sys.argv[1]).setAppName("a server of Spark Connect")
    conf.setAll([*SETTINGS.items(), *(tuple(each.split("=", 1)) for each in sys.argv[2:])])
    context = SparkContext(conf=conf)
    SparkSession(context)
    service = context._jvm.org.apache.spark.sql.connect.service
    print(getattr(getattr(service, "SparkConnectService$"), "MODULE$").localPort(), flush=True)
    sys.stdin.read()
    context.stop()


if __name__ == "__main__":
    main()
