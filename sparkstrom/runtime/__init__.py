"""Threads that run the protocol over a transport: the controller's, and a worker's node and
trainer.
"""
