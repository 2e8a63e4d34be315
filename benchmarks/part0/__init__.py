"""Part 0 of a run on a GPU: what works there and how fast it is, in two to three minutes."""
