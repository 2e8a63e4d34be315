"""The rewrite of one graph: discover what is there, plan a decision per GEMM, apply the plan, verify the result.

`discover.py`  graph -> GEMM sites               reads only
`plan.py`      sites x rules -> a Plan           pure
`apply.py`     Plan -> edits of the graph        edits the graph
`gather.py`    FP8 instead of high precision through all-gathers
`parallel.py`  when scales are equal on several ranks
`verify.py`    invariants of the rewritten graph raises InvariantError
`runner.py`    these in order, with copies for inspection
"""
