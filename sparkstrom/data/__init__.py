"""Pack rows as bytes (records), store these in bounded memory, and make minibatches of them."""
