"""DDP cuts a graph into buckets: their results are activations, and a model of bytes is as wide as its vocabulary."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8pass import fp8_compile, inspect
from tests.distributed.support import on_ranks
from tests.support.selection import BYTES, FORMS_OF_BYTES, Bytes, sentence

BUCKET_BYTES = (1, 4 * BYTES * BYTES + 1)


@pytest.mark.parametrize("widths", [(BYTES, BYTES), (32, BYTES)])
@on_ranks(1)
def test_a_bucket_that_ends_at_a_layer_as_wide_as_the_vocabulary_has_no_head(rank, widths):
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    for name, form in FORMS_OF_BYTES.items():
        for num_bytes in BUCKET_BYTES:
            torch._dynamo.reset()
            model = DistributedDataParallel(Bytes(*widths, **form))
            model.bucket_bytes_cap = num_bytes
            compiled = fp8_compile(model, "current", backend="aot_eager")
            compiled(sentence(BYTES)).sum().backward()
            found = inspect(compiled)
            assert {g.module for g in found.gemms if g.looks_like_head} == {"head"}, name
            assert len(found.graphs) > 1
