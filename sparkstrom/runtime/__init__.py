"""Threads that run the protocol over a transport.

These are the controller's thread, and a worker's threads for its node and its trainer.
"""
