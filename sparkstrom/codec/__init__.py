"""Define the protocol's messages and encode them as bytes: headers, payloads, encrypted frames.

Optimizer states and DL4J's layouts of updates have modules of their own.
"""
