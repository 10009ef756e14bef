"""Training on Spark. Importing this package imports no pyspark: its modules do so when needed."""
