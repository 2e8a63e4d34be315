"""What is refused, in one sentence that says what to do: options of `fp8_compile`, and requests of torch that a compiled model
cannot meet."""

import pytest
import torch

from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, fp8_compile
from fp8pass.errors import OptionError, RecipeError, RuleError, UnsupportedError
from tests.support.cases import each
from tests.support.models import mlp

SAVED = {"saved_activations": "fp8"}
OPTIONS = [
    ({"backend": "inducter"}, "Did you mean 'inductor'"),
    ({"mode": "max-autotune", "options": {"max_autotune": True}}, "takes one of the two"),
    ({"dynamic": "maybe"}, "dynamic is 'maybe'; use True, False or None"),
    *(({"options": 3}, "options is 3, a int; use a dict"), ({"mode": "fastest"}, "Unrecognized mode=fastest")),
    ({"amax_reduction_group": "world"}, "amax_reduction_group is 'world', a str; pass a ProcessGroup"),
    ({"amax_reduction_group": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "this rank is not a member of"),
    *(({"min_speedup": value}, "min_speedup") for value in [0.0, True, float("nan")]),
    ({"release_frozen": True, "weight_copies": "save"}, r"release_frozen=True and weight_copies='save'.*use 'auto' or 'cache'"),
    ({"release_frozen": True, "mode": "reduce-overhead"}, "CUDA graphs"),
    ({"fsdp_gather": "fp4"}, r"fsdp_gather is 'fp4'\. Did you mean 'fp8'"),
    ({"saved_activations": "int8"}, "'int8'"),
    (SAVED | {"options": {"post_grad_fusion_options": {"activation_quantization_aten_pass": {}}}}, "activation_quantization"),
    ({"recipe": None}, "saved_activations='fp8'"),
    ({"recipe": "rowwise", "match": "vlm"}, r"match is 'vlm'. Did you mean 'vllm'"),
    *((SAVED | {"recipe": None, "match": "vllm"}, "leave one"), ({"min_speedup": 1.0, "match": "vllm"}, "makes no choice by")),
    # words in the wrong place
    ({"options": {"in_place": True}}, r"is an argument of fp8_compile itself; write fp8_compile\(model, ..., in_place=True\)"),
    ({"backend": "aot_eager", "options": {"use_aoti": True}}, "use_aoti.*leave it out"),
    ({"backend": "aot_eager", "mode": "default"}, "mode='default' is for backend='inductor'.*Leave it out"),
    ({"options": {"cpp_wrapper": True}}, r"cpp_wrapper.*190551.*leave it out"),
]

RULES = [
    *(({"rules": rules}, message) for rules, message in (
        ({"a:outptu": None}, "Did you mean 'output'"),
        ([("a", None)], "use a dict"), ({"": None}, "the pattern '' is not a module path; use a glob"),
        ({"a": "curent"}, r"the rule 'a': no recipe is called 'curent'. Did you mean 'current'\?.*or None"),
        ({"a": DelayedScaling}, r"the rule 'a': .*write DelayedScaling\(\)"),
    )),
    *(({"schedule": schedule}, message) for schedule, message in (
        ({0: {}}, "the step 0; use a positive int"), ([], "schedule is a list; use a dict"), ({1: 3}, "at step 1: .*are 3;"),
        ({10: {"*:wgrad": None}}, r"at step 10: .*grad_weight"),
    )),
    ({"rules": {"*:saved": None}}, "saved_activations='fp8'"),
]  # fmt: skip

#: A recipe and an engine.
MATCHES = [
    *((3, None, "recipe is 3, a int; use a recipe object"), ("delayed", "vllm", "takes no scales from earlier steps")),
    ("blockwise", "vllm", "use_f32_scales.*weights twice"),
    (Float8CurrentScaling(use_power_2_scales=True), "vllm", "needs use_power_2_scales=False"),
    (Float8BlockScaling(w_block_scaling_dim=1), "deepgemm", "match='deepgemm' needs w_block_scaling_dim=2"),
]


@each(
    ("options", "message", "error"),
    [
        *((*row, OptionError) for row in OPTIONS),
        *((*row, RuleError) for row in RULES),
        *(({"recipe": recipe, "match": engine}, why, RecipeError) for recipe, engine, why in MATCHES),
    ],
)
def test_options_that_make_no_sense(options, message, error):
    with pytest.raises(error, match=message):
        fp8_compile(mlp(), **{"recipe": "delayed"} | options)


def make(**options):
    return fp8_compile(mlp(), "current", **{"backend": "aot_eager", **options})


def test_batches_of_gradients_are_refused_with_the_way_out():
    compiled, x = make(), torch.randn(16, 64, requires_grad=True)
    y = compiled(x)
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)
    with pytest.raises(UnsupportedError, match="vectorize=True"):
        torch.autograd.functional.jacobian(compiled, x.detach()[:2], vectorize=True)


def test_nan_asserts_are_refused_where_a_graph_has_fp8_values():
    compiled = fp8_compile(mlp(), "current", options={"nan_asserts": True})
    with pytest.raises(UnsupportedError, match="leave nan_asserts off"):
        compiled(torch.randn(16, 64)).sum().backward()


def test_the_cpp_wrapper_is_refused():
    """It would end the process: torch passes a list of one tensor wrongly."""
    compiled = fp8_compile(mlp(), "delayed")
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(Exception, match=r"190551.*TORCHINDUCTOR_CPP_WRAPPER=0"):
        compiled(torch.randn(16, 64))


def test_export_names_what_to_export_instead():
    compiled, x = make(in_place=True), torch.randn(16, 64)
    with pytest.raises(UnsupportedError, match=r"torch\.export\.export\(model, args\)"):
        torch.export.export(compiled, (x,), strict=False)
    compiled(x).sum().backward()
