"""Convert rows to records, store them in bounded memory, and make minibatches. Needs no Spark."""
