"""State machines of the master and of the workers: events in, effects out, without I/O or threads.

The same code runs in the simulator (virtual time, seeded faults) and over Aeron.
``protocol.common.stages`` introduces the terms: commit, edge, lease, origin, tree.
"""
