"""What can be read off a graph: matrix values, where a node comes from, GEMM sites, readable copies."""
