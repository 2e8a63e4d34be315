"""The rewrite of one graph: discover what is there, plan a decision per GEMM, apply the plan, verify the result.

`discover.py`  graph -> GEMM sites               reads only
`plan.py`      sites x rules -> a Plan           pure
`apply.py`     Plan -> edits of the graph        the only module that mutates it
`verify.py`    invariants of the rewritten graph raises InvariantError
`runner.py`    the four in order, with copies for inspection
"""
