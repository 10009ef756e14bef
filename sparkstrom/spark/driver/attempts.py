"""Attempts: what a driver says that its cluster has started a second time.

In YARN's cluster mode the driver is in the ApplicationMaster; where that dies YARN starts another,
on any node. Spark writes the number of the attempt into its configuration. With checkpoints the
second one goes on, as any program that is run again; here are the reasons why it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkstrom.spark.driver.common_options import CommonOptions

ATTEMPT = "spark.app.attempt.id"  # Spark's own; there in cluster mode only

ANEW = "this is attempt {attempt} of {application}, and it trains from the beginning: {reason}"
UNSAVED = (
    "the one before saved nothing; give checkpoint_directory=... on a file system that every node"
    " reaches, such as hdfs:///runs/7, and the next attempt goes on from the newest checkpoint"
)
UNWANTED = (
    "resume=False says so; without it, an attempt goes on from the newest checkpoint in {url}"
)
EMPTY = (
    "there is no checkpoint in checkpoint_directory={url!r}: the one before ended before the first"
    " was written (checkpoint_every={every!r})"
)
ELSEWHERE = (
    ", or ran on another node, whose files this one does not see; give checkpoint_directory=... on"
    " a file system that every node reaches, such as hdfs:///runs/7"
)


def begins_anew(conf: Mapping[str, str], master: CommonOptions) -> list[str]:
    """A warning where this is a later attempt, which has found no checkpoint; else none."""
    attempt = conf.get(ATTEMPT, "")
    if not attempt.isdecimal() or int(attempt) < 2:
        return []
    application = conf.get("spark.app.id", "the application")
    return [ANEW.format(attempt=attempt, application=application, reason=_reason(master))]


def _reason(master: CommonOptions) -> str:
    url = master.checkpoint_directory
    if url is None:
        return UNSAVED
    if not master.resume:
        return UNWANTED.format(url=url)
    is_local = "://" not in url or url.startswith("file://")
    empty = EMPTY.format(url=url, every=master.checkpoint_every)
    return empty + (ELSEWHERE if is_local else "")
