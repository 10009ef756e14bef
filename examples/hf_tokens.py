"""Train a Hugging Face model that computes its own loss: spark-submit examples/hf_tokens.py

A small BERT with random initial weights learns which of two tokens is more frequent in a sequence.
"""

import sys
from functools import partial

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

import numpy as np
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from transformers import BertConfig, BertForSequenceClassification

from sparkstrom import SparkNetwork
from sparkstrom.models.torch import TorchModel

ACCURACY_WANTED = 0.9
PAD, FIRST, SECOND, LONGEST = 0, 1, 2, 12
COLUMNS = {"input_ids": "tokens", "attention_mask": "mask"}


def make_module() -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LONGEST,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_rows(count: int) -> list[tuple[list[int], int]]:
    chance, rows = np.random.default_rng(0), []
    while len(rows) < count:
        tokens = chance.integers(1, 8, chance.integers(5, LONGEST + 1)).tolist()
        if tokens.count(FIRST) != tokens.count(SECOND):
            rows.append((tokens, int(tokens.count(SECOND) > tokens.count(FIRST))))
    return rows


def main() -> int:
    spark = SparkSession.builder.appName("tokens with Hugging Face").getOrCreate()
    frame = spark.createDataFrame(make_rows(2000), "words array<int>, answer int")
    padding = sql.array_repeat(sql.lit(PAD), LONGEST)
    padded = sql.slice(sql.concat("words", padding), 1, LONGEST)  # all rows need the same shape
    frame = frame.withColumn("tokens", padded)
    frame = frame.withColumn("mask", sql.transform("tokens", lambda t: (t != PAD).cast("int")))
    train, held_out = frame.randomSplit([0.9, 0.1], seed=1)

    optimizer = partial(torch.optim.Adam, lr=5e-3)
    model = TorchModel(make_module(), lambda out, _: out.loss, optimizer, outputs="logits")
    network = SparkNetwork(spark, model)
    summary = network.fit(train, epochs=6, features=COLUMNS | {"labels": "answer"}, label=None)

    found = network.evaluate(held_out, features=COLUMNS, label="answer")
    scored = network.predict(held_out, features=COLUMNS, output={"logits": "scores"})
    print(scored.select("words", "answer", "scores").first())
    network.close()
    spark.stop()
    assert found.classification is not None
    accuracy = found.classification.accuracy
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    return 0 if summary.replicas_equal and accuracy >= ACCURACY_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
