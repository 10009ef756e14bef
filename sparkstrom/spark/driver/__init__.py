"""What runs in the driver program: options, the network, one fit, its summary."""
