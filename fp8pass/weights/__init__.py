"""FP8 copies of weights that enter graphs as inputs: kept between calls until a Parameter or its scale changes, or made anew.

`keys.py`       which copies a graph receives, as data
`quantizer.py`  the small graph that makes the copies of many weights, with the operations of the recipes' own casts
`kept.py`       the copies of one Parameter, and what tells that they are out of date
`places.py`     which Parameter is which, without a reference to it
`checks.py`     whether copies are still those of their Parameters, by content
`values.py`     what the bytes of copies stand for
`hollow.py`     Parameters that gave their values back
`releases.py`   which frozen Parameters do, and why the others do not
`cache.py`      all kept copies of a compiled model
`optimizers.py` steps of optimizers, compiled ones included
`provider.py`   the copies as inputs of graphs
`fsdp.py`       what FSDP2 does with Parameters
`gathered.py`   a weight that FSDP2 gathers in FP8
`withheld.py`   what its Parameter holds meanwhile
`blocks.py`     one with scales of blocks
`halves.py`     one whose copies for forward and backward have different scales
`gathers.py`    all of them, of a compiled model
`sharding.py`   whose content goes away between calls, so that no copy can be kept

NOTE [what is kept] With the defaults nothing is kept that anybody but us can write: graphs cast their weights, frozen or not,
in training and in evaluation. Kept are the copies of frozen Parameters that gave their values back, and, for one call, the
gathered shards of FSDP2. `weight_copies="cache"` keeps more: then what follows tells that copies are out of date, and writes
without a trace are found by content, at step boundaries (`checks.py`).

NOTE [kept copies] A copy and its scale are one object, `QuantizedWeight`, which is replaced as a whole and never written to: a
backward that is still to come reads the tensors of its own forward. Before each call of a graph its weights are compared with
what their copies were made of: the Parameter's version counter, its storage and, with delayed scaling, the scale. Copies of
weights that train are also made again after every step of an optimizer, after `state(...).step()`, and when the model
changes between training and evaluation, because a write through `.data` raises no version counter.
"""
