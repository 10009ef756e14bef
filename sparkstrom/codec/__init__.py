"""Define the protocol's messages and encode them as bytes: headers, payloads, encrypted frames."""
