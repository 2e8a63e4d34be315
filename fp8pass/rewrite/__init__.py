"""The rewrite of one graph: discover what is there, plan everything, apply the plan, verify the result."""
