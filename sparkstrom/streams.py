"""Streams: a network that learns from each micro-batch of Structured Streaming.

``stream.writeStream.foreachBatch(each_batch(network)).start()``: see docs/streams.md.
"""

from sparkstrom.spark.driver.micro_batches import each_batch

__all__ = ["each_batch"]
