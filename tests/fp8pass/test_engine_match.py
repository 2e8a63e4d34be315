"""`match`: operands of forward GEMMs against quantizers written from each engine's formula, byte for byte; and the weights that
have one scale together because vLLM fuses their projections.

References: NumPy. vLLM's are written from csrc/quantization/w8a8/fp8/common.cu.
"""

import types

import numpy as np
import pytest
import torch
from torch import nn

from fp8pass import Float8BlockScaling, fp8_compile, inspect, state_dict_fp8
from tests.support.moe import MoE
from tests.support.operands import recorded
from tests.support.training import assert_equal, step

F = np.float32
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
    "deepgemm ue8m0": ("deepgemm", "blockwise", deepgemm(1, ue8m0=True), deepgemm(128, ue8m0=True)),
    "hf": ("hf", "rowwise", transformers_per_row, transformers_per_row),
    "vllm": ("vllm", "current", dynamic_per_token, dynamic_per_tensor),
    "vllm per tensor": ("vllm-per-tensor", "current", dynamic_per_tensor, dynamic_per_tensor),
}


class Attention(nn.Module):
    """Projections that vLLM fuses, ragged ones among them, names that no engine fuses, and k and v of another input than q."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(192, 64), nn.Linear(192, 40), nn.Linear(192, 40)
        self.qkv_proj, self.first = nn.Linear(192, 144), nn.Linear(192, 64)
        self.mlp = nn.ModuleDict({name: nn.Linear(192, 64) for name in ("gate_proj", "up_proj")})
        self.cross = nn.ModuleDict({name: nn.Linear(192, 64) for name in ("q_proj", "k_proj", "v_proj")})

    def given(self, x, memory):
        """The input of each linear, in the order of their calls. Many are rounded last, which casts would leave out."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        of_normed = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "cross.q_proj"), normed)
        of_others = {"first": x, "cross.k_proj": memory, "cross.v_proj": memory}
        return of_normed | dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), normed * x) | of_others

    def forward(self, x, memory):
        return torch.cat([self.get_submodule(name)(read) for name, read in self.given(x, memory).items()], -1)


GROUPS = (("q_proj", "k_proj", "v_proj"), ("mlp.gate_proj", "mlp.up_proj"), ("cross.k_proj", "cross.v_proj"))


def attention(engine="vllm", recipe="current", **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Attention().bfloat16()
    compiled = fp8_compile(model, recipe, match=engine, backend="aot_eager", **options)
    return model, compiled, (torch.randn(32, 192).bfloat16(), torch.randn(32, 192).bfloat16())


def quantized_weights(case, model):
    """Those of all linears, under current scaling by the amax of all that vLLM fuses with each."""
    _, recipe, _, quantize = CASES[case]
    weights = {name: numbers(module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups = {name: next((g for g in GROUPS if name in g), (name,)) for name in weights}
    amaxes = {name: max(np.abs(weights[other]).max() for other in group) for name, group in groups.items()}
    return {name: quantize(w, *([amaxes[name]] if recipe == "current" else ())) for name, w in weights.items()}


def assert_same(data, scale, wanted):
    q, expected = wanted
    rows, columns = q.shape
    assert np.array_equal(data.view(torch.uint8).numpy()[:rows, :columns], q)
    assert scale.dtype is torch.float32
    assert np.array_equal(scale.numpy(), expected)


@pytest.mark.parametrize("case", CASES)
def test_operands_of_forward_gemms_and_exports_are_the_engines(case):
    """Also of weights that are released."""
    engine, recipe, quantize, _ = CASES[case]
    is_released = engine == "vllm-per-tensor"
    model, compiled, inputs = attention(engine, recipe, release_frozen=is_released)
    model.requires_grad_(not is_released)
    inputs[0][3] = 0
    inputs[0][5] *= 1e-4
    weights = quantized_weights(case, model)
    with torch.no_grad(), recorded() as gemms:
        compiled(*inputs)
    for gemm, (name, read) in zip(gemms, model.given(*inputs).items(), strict=True):
        x, weight = quantize(numbers(read)), weights[name]
        scale_a, scale_b = gemm.scale_a, gemm.scale_b
        if recipe is F32 or recipe == "blockwise":
            scale_a, scale_b = scale_a[:, : len(x[0])].t(), scale_b[:, : weight[1].shape[1]]
        elif scale_a.dim():
            scale_a, scale_b = scale_a[: len(x[0])], scale_b[: len(weight[0])] if scale_b.dim() else scale_b
        assert_same(gemm.a, scale_a, x)
        assert_same(gemm.b, scale_b, weight)
    found = inspect(compiled)
    assert f"match='{engine}': operands of forward GEMMs in FP8 equal the engine's. Attention, the KV cache" in str(found)
    shared = [line for line in found.remarks() if line.startswith("Weights that share a scale")]
    groups = ": {q_proj,k_proj,v_proj}, mlp.{gate_proj,up_proj}, cross.{k_proj,v_proj}."
    assert [line.endswith(groups) for line in shared] == [True] * (recipe == "current")
    for fmt in ("compressed-tensors", "fp8")[: 1 + (recipe == "current")]:
        tensors = dict(state_dict_fp8(compiled, fmt))
        for name, (q, scale) in weights.items():
            assert_same(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].squeeze(), (q, scale.squeeze()))


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


def test_weights_that_share_a_scale_are_kept_all_or_none():
    """Copies are those of a cast at each call; one frozen weight of three is not released."""

    def train(**options):
        model, compiled, inputs = attention(**options)
        model.k_proj.requires_grad_(False)
        optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), []
        for _ in range(3):
            found.append(step(compiled, model, *inputs, loss=lambda out: out.float().square().sum()))
            optimizer.step()
        return found, inspect(compiled)

    expected, _ = train(weight_copies="save")
    found, report = train(release_frozen=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    assert "readers: amaxes of a compiled graph reads it" in str(report.released["k_proj.weight"].reason)
    assert "1 weight is quantized at each call: scales: it shares its scale with a weight that is cast" in str(report)


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
