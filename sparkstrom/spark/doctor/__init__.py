"""Implement the command `sparkstrom doctor`: check whether training would work on a cluster."""
