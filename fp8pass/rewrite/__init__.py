"""The rewrite of one graph: discover what is there, plan a decision per GEMM, apply the plan, verify the result.

`discover.py`          graph -> GEMM sites; reads only
`plan.py`              sites x rules -> a Plan; pure
`remake.py`            which FP8 copies backward makes itself; reads only
`insertion.py`         nodes inserted with their metadata
`apply.py`             Plan -> edits of the graph
`parallel.py`          when scales are equal on several ranks
`moves.py`             ops that put elements elsewhere and leave them as they are
`gather.py`            FP8 instead of high precision through all-gathers
`gather_blockwise.py`  the same for blockwise scaling
`group.py`             casts that stand ready together become one launch
`verify.py`            invariants of the rewritten graph; raises InvariantError
`report.py`            what a rewrite leaves behind
`runner.py`            these in order, with copies for inspection
"""
