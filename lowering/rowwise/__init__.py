"""One scale per row of a, one per column of b: along K of each copy."""
