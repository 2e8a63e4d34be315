"""From a model to compiled graphs: Dynamo's graph gets state placeholders, and at run time the state of the right instance.

`instances.py`  which module instance a call belongs to, and the names of its modules
`session.py`    what one `fp8_compile` owns: rules, stores, compiled graphs, step boundaries
`recompute.py`  recomputation under activation checkpointing
`backend.py`    the torch.compile backend
"""
