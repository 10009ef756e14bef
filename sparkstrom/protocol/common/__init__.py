"""Parts of the protocol that master and workers share, such as events, children and topology."""
