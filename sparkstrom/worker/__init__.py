"""Set up a worker's process, on Spark or on one machine: connect it, load its rows, and train."""
