"""Grouped GEMMs, one per expert in one launch, and the columnwise copies of rows in groups."""
