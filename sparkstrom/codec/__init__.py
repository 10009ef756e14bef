"""Messages of the protocol, and their encoding as bytes: headers, payloads, encrypted frames."""
