"""The master's machine: admission, the one order, placement, phases."""
