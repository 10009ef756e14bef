"""Run the threads of a fit, which connect protocol, transport and training.

The controller, which numbers updates, has one thread. A worker has one for its trainer and one for
its node, which exchanges messages. The threads use the modules for parameters (``theta``),
optimizer states and queues of messages.
"""
