"""State machines of the master and of worker nodes: events in, effects out, without I/O or threads.

The same code runs in the simulator (virtual time, seeded faults) and over Aeron.
"""
