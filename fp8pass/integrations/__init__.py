"""Callbacks and converters for training frameworks. Each file imports its framework, and is imported by its users alone."""
