"""Provide what every other package may import, such as errors, ids, clocks, units and options."""
