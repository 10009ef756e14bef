"""Simulate fits in virtual time: the real protocol, under random faults that a seed repeats."""
