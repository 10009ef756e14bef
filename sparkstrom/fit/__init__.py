"""Run one fit from the driver program, on Spark or on one machine. Nothing here imports pyspark."""
