"""Write and read checkpoints of a running fit, and saved models, as atomically written files."""
