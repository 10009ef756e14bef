"""The protocol's machines in virtual time, under faults drawn from a seed."""
