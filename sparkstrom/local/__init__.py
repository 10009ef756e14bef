"""One machine, without Spark and without a JVM: processes in place of tasks, the rest the same."""
