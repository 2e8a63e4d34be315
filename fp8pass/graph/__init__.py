"""Facts that are read off a graph, and nodes that are made in it."""
