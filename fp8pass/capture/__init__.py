"""From a model to compiled graphs: Dynamo's graph gets state placeholders, and at run time the state of the right instance.

`backend.py`       the torch.compile backend: compiles Dynamo's graphs with the pass inside
`placeholders.py`  the state as inputs of a graph
`forms.py`         the forms of a graph: other rules, other steps
`binding.py`       the run-time half of a compiled graph: finds the instance of a call and appends its state
`instances.py`     which module instance a call belongs to, and the names of its modules
`regions.py`       nested compile regions, written out at each call
`surroundings.py`  what is known of the model around a graph, which may be a part of it
`settings.py`      what decides about a graph besides the graph itself
`session.py`       what one `fp8_compile` owns: rules, stores, clock, compiled graphs
`nested.py`        a compiled module within a compiled module, and the modules beside it
`parts.py`         the parts of a model that were compiled one by one
`clock.py`         when a step of training ends
`manual_steps.py`  manual steps that nobody makes
`ranks.py`         one comparison of how ranks compile the model that they train together
`recompute.py`     recomputation under activation checkpointing
`dry.py`           passes by which torch finds out shapes, which are no training
`saved_tensors.py` calls of graphs under hooks on saved tensors
`frames.py`        what Dynamo made of Python frames: which it left eager, and why
`eager.py`         which modules ran eagerly in calls of a compiled model
`refusals.py`      what torch asks of compiled graphs that they refuse
"""
