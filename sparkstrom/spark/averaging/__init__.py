"""Training in synchronous rounds, each a Spark job: parameter averaging, and DiLoCo."""
