"""What every layer may use: the error tree, identities, the clock."""
