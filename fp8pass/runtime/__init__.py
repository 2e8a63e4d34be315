"""From a model to compiled graphs, and from a call to the graph and the inputs that it needs."""
