"""Joins protocol, transport, codec and clock: the threads of a worker and of the master."""
