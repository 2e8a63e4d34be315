"""Rules for what FP8 hurts.

`blocks.py`   the last blocks of a model, found by structure
`rounding.py` what quantization does to a product of two matrices
`probe.py`    a backend of torch.compile that measures it at each GEMM
`ranks.py`    what the ranks of data-parallel training tell each other
`passes.py`   the user's step, run with the probe, on a model that is left as it was
`suggestion.py` rules and the table that they come from
`suggest.py`  effects on the loss, ranked, as rules
"""

from fp8pass.tools.search.blocks import last_blocks
from fp8pass.tools.search.suggest import suggest_rules

__all__ = ["last_blocks", "suggest_rules"]
