"""Messages as values, and as bytes: headers, payloads, sealing, chunks."""
