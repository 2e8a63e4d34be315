"""From a model to compiled graphs: Dynamo's graph gets state placeholders, and at run time the state of the right instance.

`instances.py`     which module instance a call belongs to, and the names of its modules
`placeholders.py`  the state as inputs of a copy of Dynamo's graph
`session.py`       what one `fp8_compile` owns: rules, stores, compiled graphs, step boundaries
`binding.py`       the run-time half of a compiled graph
`recompute.py`     recomputation under activation checkpointing
`backend.py`       the torch.compile backend
"""
