"""Run the threads of a fit, which connect protocol, transport and training.

The controller has one thread, and a worker has one for its node and one for its trainer. They hold
the parameters (``theta``), the optimizer states and the queues of messages.
"""
