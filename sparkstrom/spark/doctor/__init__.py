"""The command `sparkstrom doctor`, which checks whether training would work on a cluster."""
