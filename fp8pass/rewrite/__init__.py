"""The rewrite of one graph: discover what is there, plan everything, apply the plan, verify the result.

`discover.py`   graph -> GEMM sites; reads only
`roles.py`      which forward GEMM a gradient GEMM belongs to; pure
`select.py`     GEMMs that stay in high precision unless a rule names them
`heads.py`      which GEMMs make the logits that a graph returns
`routing.py`    which GEMMs decide what rows are taken
`plan.py`       sites x rules -> a Plan; reads only
`fused.py`      the part of the plan about weights that share a scale, as engines fuse their projections
`speedup.py`    the part of the plan about expected speed-ups
`gathers.py`    the part of the plan about quantized all-gathers
`weights.py`    the part about weights whose copies are kept between calls
`recompute.py`  the part about copies that backward makes itself
`launches.py`   the part about casts: which copies and which tensors share a launch
`epilogues.py`  the part about products: what a GEMM adds, and where padding is cut off
`simplify.py`   edits that leave results as they are, before the plan is applied
`apply.py`      Plan -> edits of the graph
`reductions.py` amax reductions of Parameters as one
`wire.py`       the other gathers of Parameters as bytes, beside those in FP8
`watch.py`      operations that measure, for steps that are measured
`fold.py`       vectors and positions in the place of their elements
`verify.py`     the rewritten graph against plan and hardware; raises InvariantError
`verify_casts.py` the part about casts: what they read, how they scale
`verify_moves.py` the part about what lies between casts and GEMMs
`verify_prepared.py` what is done to a partitioned graph before Inductor compiles it
`report.py`     what a rewrite leaves behind
`runner.py`     these as an explicit list of passes
"""
