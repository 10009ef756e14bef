"""What runs in a worker's process, on Spark or on one machine: its network, rows and training."""
