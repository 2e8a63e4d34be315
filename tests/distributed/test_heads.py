"""DDP cuts a graph into buckets: their results are activations, and a model of bytes is as wide as its vocabulary."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8pass import fp8_compile, inspect
from tests.distributed.support import run_on_ranks
from tests.support.selection import BYTES, FORMS_OF_BYTES, Bytes, sentence

BUCKET_BYTES = (1, 4 * BYTES * BYTES + 1)


def marked(rank, widths):
    """What is taken for a head, and the number of graphs, by form of the model and size of the buckets."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    found = {}
    for name, form in FORMS_OF_BYTES.items():
        for num_bytes in BUCKET_BYTES:
            torch._dynamo.reset()
            model = DistributedDataParallel(Bytes(*widths, **form))
            model.bucket_bytes_cap = num_bytes
            compiled = fp8_compile(model, "current", backend="aot_eager")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled(sentence(BYTES)).sum().backward()
            seen = inspect(compiled)
            found[name, num_bytes] = {g.module for g in seen.gemms if g.looks_like_head}, len(seen.graphs)
    return found


@pytest.mark.parametrize("widths", [(BYTES, BYTES), (32, BYTES)])
def test_a_bucket_that_ends_at_a_layer_as_wide_as_the_vocabulary_has_no_head(widths):
    (found,) = run_on_ranks(marked, 1, widths)
    assert {form: heads for form, (heads, _) in found.items()} == {form: {"head"} for form in found}
    assert all(num_graphs > 1 for _, num_graphs in found.values())
