"""Train on Spark. Importing this package does not import pyspark; its modules do when needed."""
