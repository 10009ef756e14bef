"""The master's state machine: admission, the order of commits, placement and phases."""
