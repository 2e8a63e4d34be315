"""What is refused, in one sentence that says what to do: options of `fp8_compile`, and requests of torch that a compiled model
cannot meet."""

import pytest
import torch

from fp8pass import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, fp8_compile
from fp8pass.errors import Fp8Error, OptionError, RecipeError, RuleError, UnsupportedError
from tests.support.cases import each, rest
from tests.support.models import mlp
from tests.support.training import train

OPTIONS = [
    ({"backend": "inducter"}, "Did you mean 'inductor'"),
    ({"step": "automatic"}, "Did you mean 'auto'"),
    ({"weight_copies": "saved"}, r"weight_copies is 'saved'. Did you mean 'save'\?"),
    ({"weight_copies": "remade"}, r"Did you mean 'recompute'\? Use one of 'auto', 'save', 'recompute', 'cache'"),
    ({"weight_copies": 1}, "weight_copies is 1. Use one of"),
    ({"backend": "aot_eager", "mode": "max-autotune"}, "generates no code"),
    ({"options": {"max_autotun": True}}, "max_autotun"),
    ({"mode": "max-autotune", "options": {"max_autotune": True}}, "takes one of the two"),
    ({"options": "max_autotune"}, "options is 'max_autotune', a str; use a dict"),
    ({"dynamic": "maybe"}, "dynamic is 'maybe'; use True, False or None"),
    ({"fullgraph": "yes"}, "fullgraph is 'yes'; use True or False"),
    ({"fullgraph": None}, "fullgraph is None; use True or False"),
    ({"in_place": 1}, "in_place is 1; use True or False"),
    ({"amax_reduction_group": "world"}, "amax_reduction_group is 'world', a str; pass a ProcessGroup"),
    ({"select": "al"}, r"select is 'al'\. Did you mean 'all'"),
    ({"strict": "yes"}, "strict is 'yes'"),
    *(({"min_speedup": value}, "min_speedup") for value in [-1.0, 0.0, "fast", True, float("nan"), float("inf")]),
    ({"release_frozen": True, "weight_copies": "save"}, r"release_frozen=True and weight_copies='save'.*use 'auto' or 'cache'"),
    ({"release_frozen": True, "mode": "reduce-overhead"}, "CUDA graphs"),
    ({"release_frozen": 1}, "release_frozen"),
    ({"fsdp_gather": "fp8", "mode": "reduce-overhead"}, "fsdp_gather='fp8' with CUDA graphs"),
    ({"fsdp_gather": "fp4"}, r"fsdp_gather is 'fp4'\. Did you mean 'fp8'"),
    ({"saved_activations": "int8"}, "'int8'"),
    ({"saved_activations": True}, "True"),
    ({"recipe": None}, "saved_activations='fp8'"),
    ({"recipe": None, "saved_activations": "fp8", "match": "vllm"}, "'vllm'"),
    ({"recipe": "rowwise", "match": "vlm"}, r"match is 'vlm'. Did you mean 'vllm'"),
    ({"recipe": "rowwise", "match": "vllm", "min_speedup": 1.0}, r"min_speedup=1.0 and match='vllm'"),
    *(
        ({"backend": backend, "options": options}, message)  # words in the wrong place
        for backend in ("aot_eager", "inductor")
        for options, message in (
            ({"in_place": True}, r"is an argument of fp8_compile itself; write fp8_compile\(model, ..., in_place=True\)"),
            ({"rules": None}, "rules is an argument of fp8_compile itself"),
            ({"use_aoti": True}, "use_aoti.*leave it out"),
            ({"guard_filter_fn": len, "fullgraph": True}, "fullgraph=True"),
        )
    ),
    *(({"recipe": r, "options": {"cpp_wrapper": True}}, r"cpp_wrapper.*190551.*leave it out") for r in ("delayed", "current")),
]

SAVED = "saved_activations='fp8'"
RULES = [
    *(({"rules": rules}, message) for rules, message in (
        ({"a:outptu": None}, "Did you mean 'output'"),
        ({"": None}, "not a module path"),
        ({3: None}, "not a module path"),
        ([("a", None)], "use a dict"),
        ({"a": "curent"}, r"the rule 'a': no recipe is called 'curent'. Did you mean 'current'\?.*or None"),
        ({"a": 3}, "the rule 'a': recipe is 3"),
        ({"a": DelayedScaling}, r"the rule 'a': .*write DelayedScaling\(\)"),
    )),
    *(({"schedule": schedule}, message) for schedule, message in (
        ([(1, {})], "schedule is a list; use a dict"),
        ({0: {}}, "the step 0; use a positive int"),
        ({-5: {}}, "the step -5"),
        ({True: {}}, "the step True"),
        ({"10": {}}, "the step '10'"),
        ({10: None}, "at step 10: the rules are None; use a dict"),
        ({10: {"*:wgrad": None}}, r"at step 10: .*grad_weight"),
        ({10: {"a": "delayd"}}, "at step 10: the rule 'a': .*delayed"),
    )),
    ({"rules": {"*:saved": None}}, SAVED),
    ({"schedule": {5: {"*:saved": None}}}, SAVED),
    ({"saved_activations": "fp8", "rules": {"*:save": None}}, "'saved'"),
]  # fmt: skip

#: A recipe and an engine.
MATCHES = [
    ("delayed", "vllm", "takes no scales from earlier steps"),
    ("current", "deepgemm", "no such online quantization"),
    ("delayed", "vllm-per-tensor", "takes no scales from earlier steps"),
    ("rowwise", "vllm-per-tensor", "Recipes: .current."),
    ("mxfp8", "deepgemm", "no such online quantization"),
    ("blockwise", "vllm", "use_f32_scales.*weights twice"),
    ("rowwise", "deepgemm", "Recipes: 'blockwise'"),
    ("blockwise", "hf", "a kernel that is not part of transformers"),
    (Float8RowwiseScaling(amax_epsilon=1e-3), "vllm", "leave amax_epsilon at 0.0"),
    (Float8CurrentScaling(amax_epsilon=1e-3), "vllm", "leave amax_epsilon at 0.0"),
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_batches_of_gradients_are_refused_with_the_way_out(backend):
    compiled, x = make(backend=backend), torch.randn(16, 64, requires_grad=True)
    y = compiled(x)
    with pytest.raises(UnsupportedError, match=r"is_grads_batched=True.*once per gradient") as error:
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)
    assert isinstance(error.value, Fp8Error)
    with pytest.raises(UnsupportedError, match="vectorize=True"):
        torch.autograd.functional.jacobian(compiled, x.detach()[:2], vectorize=True)
    each = [torch.autograd.grad(compiled(x), x, g)[0] for g in torch.randn(2, *y.shape)]
    assert all(g.isfinite().all() for g in each)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_nan_asserts_are_refused_where_a_graph_has_fp8_values(recipe):
    compiled = fp8_compile(mlp(), recipe, options={"nan_asserts": True})
    with pytest.raises(UnsupportedError, match="leave nan_asserts off"):
        compiled(torch.randn(16, 64)).sum().backward()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_cpp_wrapper_is_refused(recipe):
    """It would end the process: torch passes a list of one tensor wrongly."""
    compiled = fp8_compile(mlp(), recipe)
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(Exception, match=r"190551.*TORCHINDUCTOR_CPP_WRAPPER=0"):
        compiled(torch.randn(16, 64))


def by_name(model, recipe, options, **own):
    return torch.compile(model, backend="fp8pass", options={"recipe": recipe, **own, **options})


@pytest.mark.parametrize(
    ("compile_model", "given"),
    [
        *((compile_model, {"backend": "aot_eager"}) for compile_model in (fp8_compile, by_name)),
        (fp8_compile, {"backend": "aot_eager", "in_place": True}),
        *rest([(fp8_compile, {}), (fp8_compile, {"in_place": True})]),
    ],
)
def test_guard_filter_fn_is_torch_compiles(compile_model, given):
    seen = []

    def keep(guards):
        seen.extend(guards)
        return [True] * len(guards)

    options = {"guard_filter_fn": keep, **({} if "backend" in given else {"epilogue_fusion": False})}
    before = dict(options)
    train(compile_model(mlp(), "current", options=options, **given), torch.randn(16, 64))
    assert seen
    assert options == before, "the dict stays as it was, for the next model"


@pytest.mark.parametrize("in_place", [False, True])
def test_export_names_what_to_export_instead(in_place):
    compiled, x = make(in_place=in_place), torch.randn(16, 64)
    with pytest.raises(UnsupportedError, match=r"torch\.export\.export\(model, args\)"):
        torch.export.export(compiled, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.export\.export\(model, args\)"):
        torch.export.export(compiled, (x,), strict=True)
    compiled(x).sum().backward()
