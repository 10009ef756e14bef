"""The machines of master and node: events in, effects out; no I/O, clock, thread or chance.

The same code runs under the simulator (virtual time, seeded faults) and over Aeron.
"""
