"""Simulate fits in virtual time: run the real protocol under random faults drawn from a seed."""
