"""From raw sources to batches of tokens."""
