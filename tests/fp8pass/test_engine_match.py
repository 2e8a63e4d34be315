"""`match`: operands of forward GEMMs against quantizers written from each engine's formula, byte for byte; and the weights that
have one scale together because vLLM fuses their projections.

References: NumPy. vLLM's are written from csrc/quantization/w8a8/fp8/common.cu, with the groups of `packed_modules_mapping` by
name.
"""

import copy
import types

import numpy as np
import pytest
import torch
from torch import nn

from fp8pass import Float8BlockScaling, fp8_compile, inspect, state, state_dict_fp8
from fp8pass.errors import ReleasedWeightError, StaleWeightError
from fp8pass.scales.exchanges import CHECKED_CALLS
from tests.support.models import LlamaBlock
from tests.support.moe import MoE
from tests.support.operands import recorded
from tests.support.training import assert_equal, assert_trains_as, step

F = np.float32
ops = torch.ops.lowering
ENGINES = ("vllm", "vllm-per-tensor")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
F32 = Float8BlockScaling(use_f32_scales=True)


# -- the engines' quantizers: of a matrix, its E4M3 bytes and scales


def to_e4m3(x):
    return torch.from_numpy(np.clip(x, F(-448), F(448))).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def numbers(tensor):
    return tensor.detach().float().numpy()


def dynamic_per_token(x):
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / F(448), F(1) / (F(448) * F(512)))
    return to_e4m3(x / scale), scale


def dynamic_per_tensor(x, amax=None):
    """scaled_fp8_quant(x, scale=None): of a fused weight the amax is that of all of its parts."""
    scale = (np.abs(x).max() if amax is None else amax) / F(448)
    return to_e4m3(x * (F(1) / scale)), scale


def transformers_per_row(x):
    amax = np.abs(x).max(1, keepdims=True)
    scale = np.where(amax > 0, amax, F(1)) / F(448)
    return to_e4m3(x / scale), scale


def blocks_of(x, height):
    """The amax of each block, and what repeats a value of each for every element."""
    rows, columns = x.shape
    padded = np.pad(np.abs(x), ((0, -rows % height), (0, -columns % 128)))
    amax = padded.reshape(padded.shape[0] // height, height, -1, 128).max(axis=(1, 3))
    return amax, lambda v: v.repeat(height, 0).repeat(128, 1)[:rows, :columns]


def vllm_group(x):
    amax, spread = blocks_of(x, 1)
    scale = np.maximum(amax, F(1e-10)) / F(448)
    return to_e4m3(x / spread(scale)), scale


def deepgemm(height, ue8m0=False):
    def quantize(x):
        amax, spread = blocks_of(x, height)
        scale = np.maximum(amax, F(1e-4)) / F(448)
        if ue8m0:
            scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(F)
        return to_e4m3(x * spread(F(1) / scale)), scale

    return quantize


#: (engine, recipe) -> quantizers of inputs and of weights.
CASES = {
    "vllm per token": ("vllm", "rowwise", dynamic_per_token, dynamic_per_token),
    "vllm blocks": ("vllm", F32, vllm_group, deepgemm(128)),
    "deepgemm float32": ("deepgemm", F32, deepgemm(1), deepgemm(128)),
    "deepgemm ue8m0": ("deepgemm", "blockwise", deepgemm(1, ue8m0=True), deepgemm(128, ue8m0=True)),
    "hf": ("hf", "rowwise", transformers_per_row, transformers_per_row),
    "vllm": ("vllm", "current", dynamic_per_token, dynamic_per_tensor),
    "vllm per tensor": ("vllm-per-tensor", "current", dynamic_per_tensor, dynamic_per_tensor),
}


def weight_scales(linears):
    """The amax that scales each weight under current scaling: of all that vLLM fuses with it."""
    amaxes = {name: np.abs(numbers(linear.weight)).max() for name, linear in linears.items()}

    def group(name):
        parent, _, own = name.rpartition(".")
        return parent, next((g for g in FUSED if own in g), own)

    return {name: max(amax for n, amax in amaxes.items() if group(n) == group(name)) for name in amaxes}


def quantized_weights(case, linears):
    _, recipe, _, quantize = CASES[case]
    amaxes = weight_scales(linears)
    return {n: quantize(numbers(m.weight), *([amaxes[n]] if recipe == "current" else ())) for n, m in linears.items()}


# -- models


_given: dict[str, torch.Tensor] = {}


@torch.library.custom_op("tests::as_read", mutates_args=())
def as_read(x: torch.Tensor, names: str) -> torch.Tensor:
    """The input of linears of these names in bfloat16, as an engine's quantizer gets it: a barrier that the pass cannot look
    through."""
    _given.update(dict.fromkeys(names.split(), x.reshape(-1, x.shape[-1]).clone()))
    return x.clone()


as_read.register_fake(lambda x, names: torch.empty_like(x))


def with_barriers(linears, run):
    """Put one barrier in front of all linears that read one tensor; returns the hooks, and the linears in the order of their
    runs."""
    runs, held = [], {}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, name=name: runs.append((name, args[0]))) for name, m in linears.items()
    ]
    run()
    for hook in hooks:
        hook.remove()

    def read(names, is_first):
        def hook(_, args):
            if is_first:
                held[names] = as_read(args[0], names)
            return (held[names],)

        return hook

    hooks = []
    for name, x in runs:
        names = [other for other, y in runs if y is x]
        hooks.append(linears[name].register_forward_pre_hook(read(" ".join(names), name == names[0])))
    return hooks, {name: linears[name] for name, _ in runs}


def forward_gemms(model, inputs, case, has_barriers=True):
    """A compiled model, the operands of its FP8 GEMMs, its linears in the order of their runs, and what each was given."""
    engine, recipe, *_ = CASES[case]
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    torch._dynamo.reset()
    _given.clear()
    hooks = []
    if has_barriers:
        hooks, linears = with_barriers(linears, lambda: model(**inputs))
    compiled = fp8_compile(model, recipe, match=engine, backend="aot_eager")
    with torch.no_grad(), recorded() as gemms:
        compiled(**inputs)
    for hook in hooks:
        hook.remove()
    assert len(gemms) == len(linears)
    return compiled, gemms, linears, dict(_given)


def assert_same(data, scale, wanted):
    q, expected = wanted
    rows, columns = q.shape
    assert np.array_equal(data.view(torch.uint8).numpy()[:rows, :columns], q)
    assert scale.dtype is torch.float32
    assert np.array_equal(scale.numpy(), expected)


def bits(value):
    return value.contiguous().flatten().view(torch.uint8).tolist() if isinstance(value, torch.Tensor) else value


def check(model, inputs, case):
    """All forward GEMMs. With a barrier in front of each linear, operands are what the formula makes of its input and weight;
    without barriers they are the same. Returns the compiled model."""
    _, recipe, quantize, _ = CASES[case]
    is_blocked = recipe is F32 or recipe == "blockwise"
    _, gemms, linears, given = forward_gemms(model, inputs, case)
    compiled, plain, *_ = forward_gemms(model, inputs, case, has_barriers=False)
    weights = quantized_weights(case, linears)
    for gemm, name, other in zip(gemms, linears, plain, strict=True):
        assert given[name].dtype == torch.bfloat16
        x, weight = quantize(numbers(given[name])), weights[name]
        scale_a, scale_b = gemm.scale_a, gemm.scale_b
        if is_blocked:
            scale_a, scale_b = scale_a[:, : len(x[0])].t(), scale_b[:, : weight[1].shape[1]]
        elif scale_a.dim():
            scale_a, scale_b = scale_a[: len(x[0])], scale_b[: len(weight[0])] if scale_b.dim() else scale_b
        assert_same(gemm.a, scale_a, x)
        assert_same(gemm.b, scale_b, weight)
        assert {key: bits(value) for key, value in vars(other).items()} == {key: bits(v) for key, v in vars(gemm).items()}
    return compiled


@pytest.mark.parametrize("case", CASES)
def test_forward_operands_are_the_engines(case):
    model = nn.Sequential(LlamaBlock(128, 256), nn.Linear(128, 200)).bfloat16()
    x = torch.randn(2, 24, 128, dtype=torch.bfloat16)
    x[0, 3] = 0
    x[1, 5] *= 1e-4
    compiled = check(model, {"input": x}, case)
    text = str(inspect(compiled))
    assert f"match='{CASES[case][0]}': operands of forward GEMMs in FP8 equal the engine's. Attention, the KV cache" in text
    assert_exported(compiled, quantized_weights(case, {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}))


def assert_exported(compiled, expected, fmt="compressed-tensors"):
    tensors = dict(state_dict_fp8(compiled, fmt))
    for name, (q, scale) in expected.items():
        assert_same(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].squeeze(), (q, scale.squeeze()))


def zoo_model(name):
    """A model of transformers in bfloat16, and its inputs."""
    pytest.importorskip("transformers")
    from tests.zoo.models import TRANSFORMERS

    torch.manual_seed(0)
    case = TRANSFORMERS[name]()
    return case.model.bfloat16().eval(), case.inputs


#: Two engines each, and for the models that vLLM fuses projections of the recipe that shows it.
MODELS = {
    "llama": ("vllm per token", "deepgemm float32"),
    "gemma2": ("vllm blocks", "deepgemm ue8m0"),
    "opt": ("deepgemm float32", "hf"),
    "qwen3": ("vllm",),
    "phi": ("vllm",),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    model, inputs = zoo_model(name)
    for case in MODELS[name]:
        compiled = check(model, inputs, case)
    if case == "vllm":
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        shared = {g.module.rpartition(".")[2] for g in inspect(compiled).gemms if g.shares_scale}
        assert shared == {part for group in FUSED for part in group if any(n.endswith(part) for n in linears)}


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_transformers_makes_of_weights_when_it_loads_them(scale_fmt):
    """FineGrainedFP8Config quantizes weights as blockwise scaling does without `match`."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    torch.manual_seed(0)
    config = FineGrainedFP8Config(weight_block_size=[128, 128], scale_fmt=scale_fmt)
    quantizer = integration.Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    model = nn.Sequential(nn.Linear(256, 384, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight.mul_(torch.exp2(torch.randint(-8, 8, (384, 1))))
        model[0].weight[:128, :128] = 0
        compiled = fp8_compile(model, F32 if scale_fmt == "float" else "blockwise", backend="aot_eager")
        compiled(torch.randn(32, 256, dtype=torch.bfloat16))
    expected = quantizer.convert({"0.weight": model[0].weight.detach()})
    found = dict(state_dict_fp8(compiled, "fp8"))
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.equal(found[n].view(torch.uint8), expected[n].view(torch.uint8))] == []


# -- weights that share a scale


class Attention(nn.Module):
    """Ragged k and v, a fused projection, names that no engine fuses, and k and v of another input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(64, 40)
        self.qkv_proj = nn.Linear(64, 144)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.cross = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q_proj", "k_proj", "v_proj")})

    def forward(self, x, memory):
        own = [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.qkv_proj(x), self.first(x), self.second(x)]
        return torch.cat([*own, self.cross["q_proj"](x), self.cross["k_proj"](memory), self.cross["v_proj"](memory)], -1)


def attention(engine="vllm", model_class=Attention, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = model_class().bfloat16()
    compiled = fp8_compile(model, "current", match=engine, backend="aot_eager", **options)
    return model, compiled, (torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_released", [False, True])
def test_which_weights_share_a_scale_and_exports_have_it(engine, is_released):
    model, compiled, inputs = attention(engine, release_frozen=is_released)
    model.requires_grad_(not is_released)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    pair = {n: linears.pop(n) for n in ("cross.k_proj", "cross.v_proj")}  # of another input than q
    expected = quantized_weights("vllm", linears) | quantized_weights("vllm", pair)
    with torch.no_grad(), recorded() as gemms:
        compiled(*inputs)
    names = ["q_proj", "k_proj", "v_proj", "qkv_proj", "first", "second", "cross.q_proj", "cross.k_proj", "cross.v_proj"]
    assert [gemm.scale_b.item() for gemm in gemms] == [expected[name][1] for name in names]
    (line,) = [x for x in inspect(compiled).remarks() if x.startswith("Weights that share a scale")]
    assert line.endswith(": {q_proj,k_proj,v_proj}, cross.{k_proj,v_proj}.")
    for fmt in ("compressed-tensors", "fp8"):
        assert_exported(compiled, expected, fmt)


def test_a_rule_takes_a_weight_out_of_its_group():
    model, compiled, inputs = attention(rules={"v_proj": None})
    with torch.no_grad():
        model.v_proj.weight.mul_(100)
        with recorded() as gemms:
            compiled(*inputs)
    q, k = gemms[:2]
    assert q.scale_b == k.scale_b < np.abs(numbers(model.v_proj.weight)).max() / 4480


class Short(Attention):
    def forward(self, x, memory):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.first(memory)], -1)


@pytest.mark.parametrize(
    ("engine", "frozen", "options"),
    [
        ("vllm", (), {"weight_copies": "cache"}),
        ("vllm", ("k_proj", "first"), {"release_frozen": True}),
        ("vllm-per-tensor", ("weight",), {"release_frozen": True}),
    ],
)
def test_kept_copies_are_those_of_a_cast_at_each_call(engine, frozen, options):
    """Weights that share a scale are kept all or none; frozen ones give their values back together."""

    def train(**options):
        model, compiled, inputs = attention(engine, Short, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), []
        for i in range(4):
            found.append(step(compiled, model, *inputs, loss=lambda out: out.float().square().sum()))
            if i % 2:
                optimizer.step()
        return found, compiled

    expected, _ = train(weight_copies="save")
    found, compiled = train(**options)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    report = inspect(compiled)
    reasons = {n: str(r.reason) for n, r in report.released.items()}
    if frozen == ("weight",):
        assert reasons == dict.fromkeys(("q_proj.weight", "k_proj.weight", "first.weight"), "None")
    elif frozen:
        reason = "readers: amaxes of a compiled graph reads it in high precision"
        assert reasons == {"first.weight": "None", "k_proj.weight": reason}
        assert "1 weight is quantized at each call: scales: it shares its scale with a weight that is cast" in str(report)
    else:
        assert {(w.module, w.kept) for g in report.graphs for w in g.kept} == {(n, True) for n in ("q_proj", "k_proj", "first")}


def fresh(model):
    return fp8_compile(copy.deepcopy(model), "current", match="vllm", backend="aot_eager", weight_copies="save")


def test_a_change_of_one_weight_changes_the_scale_of_all():
    """Also one without a trace, which is found by one of the next calls."""
    for options in ({}, {"weight_copies": "cache"}):
        model, compiled, inputs = attention(**options)
        with torch.no_grad():
            before = compiled(*inputs)
            if options:
                model.k_proj.weight.data.mul_(8)
                with pytest.raises(StaleWeightError, match="k_proj"):  # noqa: PT012
                    for _ in range(CHECKED_CALLS + 1):
                        compiled(*inputs)
            else:
                model.k_proj.weight.mul_(8)
            with recorded() as gemms:
                after = compiled(*inputs)
            if not options:
                assert {gemm.scale_b.item() for gemm in gemms[:3]} == {np.abs(numbers(model.k_proj.weight)).max() / F(448)}
            assert torch.equal(fresh(model)(*inputs), after)
            assert not torch.equal(after, before)


def test_released_weights_change_together():
    model, compiled, inputs = attention(release_frozen=True)
    model.requires_grad_(False)
    values = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        out = compiled(*inputs)
        assert all(r.reason is None for r in inspect(compiled).released.values())
        model.k_proj.weight.data = values["k_proj.weight"] * 8
        with pytest.raises(ReleasedWeightError, match="shares its scale with a weight that was released"):
            compiled(*inputs)
        model.load_state_dict(values)
        assert torch.equal(compiled(*inputs), out)
        state(compiled).restore_weights()
        assert torch.equal(compiled(*inputs), out)


def test_experts_have_one_scale_each_and_their_inputs_one():
    model, x = MoE().bfloat16(), torch.randn(24, 64).bfloat16()
    compiled = fp8_compile(model, "current", match="vllm", backend="aot_eager")
    with torch.no_grad(), recorded() as gemms:
        compiled(x)
    up, down = gemms
    _, wanted = dynamic_per_tensor(numbers(x))
    assert up.scale_a.item() == wanted
    for gemm, weight in ((up, model.up), (down, model.down)):
        for i, wanted in enumerate(map(dynamic_per_tensor, numbers(weight))):
            assert_same(gemm.b[i], gemm.scale_b.reshape(-1)[i], wanted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_adapters_of_peft_do_not_hide_the_names():
    peft = pytest.importorskip("peft")
    model, inputs = zoo_model("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    compiled = fp8_compile(model, "current", match="vllm", backend="aot_eager")
    with torch.no_grad():
        compiled(**inputs)
    shared = [g.module.partition("layers.0.")[2] for g in inspect(compiled).gemms if g.shares_scale]
    assert {"self_attn.q_proj.base_layer", "self_attn.v_proj.base_layer", "mlp.gate_proj", "mlp.up_proj"} <= set(shared)


@pytest.mark.parametrize(("recipe", "backend"), [("current", "aot_eager"), ("current", "inductor"), ("rowwise", "aot_eager")])
def test_training_follows_high_precision(recipe, backend):
    """Backward GEMMs keep the recipe's quantization."""
    model = (Attention if backend == "aot_eager" else Short)()
    compiled = fp8_compile(model, recipe, match="vllm", backend=backend)
    assert_trains_as(compiled, model, torch.randn(32, 64), torch.randn(32, 64))
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    kind = "tensor-wise" if recipe == "current" else "row-wise"
    assert {(g.a_scaling, g.b_scaling) for g in gemms if g.role != "output"} == {(kind, kind)}
