"""State machines of the master and of the workers, without I/O or threads.

They take events and return effects, which are instructions to the caller. The same code runs in the
simulator (virtual time, seeded faults) and over Aeron.
``protocol.common.stages`` introduces the terms: commit, edge, lease, origin, tree.
"""
