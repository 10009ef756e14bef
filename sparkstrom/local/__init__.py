"""Train with worker processes on one machine, without Spark or a JVM: see ``ParallelWrapper``."""
