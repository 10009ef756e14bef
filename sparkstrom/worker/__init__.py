"""A worker's process, on Spark or on one machine: its job, network, rows and training task."""
