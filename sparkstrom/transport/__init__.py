"""Send bytes between processes, over Aeron or encrypted over TCP, and test UDP connections."""
