"""Public import path for ``each_batch``, which trains on each micro-batch of Structured Streaming.

Use it as ``stream.writeStream.foreachBatch(each_batch(network)).start()``; see docs/streams.md.
"""

from sparkstrom.spark.network import each_batch

__all__ = ["each_batch"]
