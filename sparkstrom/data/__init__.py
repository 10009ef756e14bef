"""A worker's rows: records, blocks of rows, a bounded store, and minibatches. No Spark in here."""
