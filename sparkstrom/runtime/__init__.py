"""Run a fit's processes: threads that connect protocol, transport and training, and what they hold.

The controller has one thread, and a worker has one for its node and one for its trainer. They hold
the parameters (``theta``), the optimizer states and the queues of messages.
"""
