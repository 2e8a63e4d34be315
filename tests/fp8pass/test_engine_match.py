"""`match`: operands of forward GEMMs against quantizers written from each engine's formula, byte for byte."""

import types

import numpy as np
import pytest
import torch
from torch import nn

from fp8pass import Float8BlockScaling, Float8RowwiseScaling, export_fp8, fp8_compile, inspect, state_dict_fp8
from fp8pass.errors import OptionError, RecipeError
from lowering.operation import NAMESPACE
from tests.fp8pass.test_vllm_fused_projections import dynamic_per_token, forward_gemms, to_e4m3, zoo_model
from tests.support.models import LlamaBlock
from tests.support.operands import recorded

F = np.float32


def blocks_of(x: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The amax of each block, and the same repeated for every element."""
    rows, columns = x.shape
    padded = np.pad(np.abs(x), ((0, -rows % height), (0, -columns % width)))
    amax = padded.reshape(padded.shape[0] // height, height, -1, width).max(axis=(1, 3))
    return amax, lambda v: v.repeat(height, 0).repeat(width, 1)[:rows, :columns]


def transformers_per_row(x):
    amax = np.abs(x).max(1, keepdims=True)
    scale = np.where(amax > 0, amax, F(1)) / F(448)
    return to_e4m3(x / scale), scale


def vllm_group(x):
    amax, spread = blocks_of(x, 1, 128)
    scale = np.maximum(amax, F(1e-10)) / F(448)
    return to_e4m3(x / spread(scale)), scale


def deepgemm(height):
    def quantize(x):
        amax, spread = blocks_of(x, height, 128)
        scale = np.maximum(amax, F(1e-4)) / F(448)
        return to_e4m3(x * spread(F(1) / scale)), scale

    return quantize


def deepgemm_ue8m0(height):
    def quantize(x):
        amax, spread = blocks_of(x, height, 128)
        scale = np.exp2(np.ceil(np.log2((np.maximum(amax, F(1e-4)) / F(448)).astype(np.float64)))).astype(F)
        return to_e4m3(x * spread(F(1) / scale)), scale

    return quantize


F32 = Float8BlockScaling(use_f32_scales=True)
#: (engine, recipe) -> reference quantizers of inputs and of weights.
CASES = {
    "vllm per token": ("vllm", "rowwise", dynamic_per_token, dynamic_per_token),
    "vllm blocks": ("vllm", F32, vllm_group, deepgemm(128)),
    "deepgemm float32": ("deepgemm", F32, deepgemm(1), deepgemm(128)),
    "deepgemm ue8m0": ("deepgemm", "blockwise", deepgemm_ue8m0(1), deepgemm_ue8m0(128)),
    "hf": ("hf", "rowwise", transformers_per_row, transformers_per_row),
}


def compact(scale: torch.Tensor, data: torch.Tensor, shape: tuple[int, ...], blocks: bool, is_input: bool) -> np.ndarray:
    """A GEMM's scales, without their padding, in the shape of the reference's."""
    if not blocks:
        return scale[: shape[0]].numpy()
    return (scale[:, : shape[0]].t() if is_input else scale[:, : shape[1]]).numpy()


@pytest.mark.parametrize("case", CASES)
def test_forward_operands_are_the_engines(case):
    engine, recipe, of_input, of_weight = CASES[case]
    model = nn.Sequential(LlamaBlock(128, 256), nn.Linear(128, 200)).bfloat16()
    compiled = fp8_compile(model, recipe, match=engine, backend="aot_eager")
    x = torch.randn(2, 24, 128, dtype=torch.bfloat16)
    x[0, 3] = 0
    x[1, 5] *= 1e-4
    compiled(x).float().square().mean().backward()
    casts = []

    def recording(implementation):
        def of_device(device):
            run = implementation(device)

            def record(xs, *args, **options):
                casts.extend(t.clone() for t in xs)
                return run(xs, *args, **options)

            return record

        return of_device

    with pytest.MonkeyPatch.context() as patch:
        for name, operation in NAMESPACE.operations.items():
            if name.startswith(("cast_rowwise", "cast_blockwise")):
                patch.setattr(operation, "implementation", recording(operation.implementation))
        with torch.no_grad(), recorded() as gemms:
            compiled(x)
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    read = [t for t in casts if t.dim() == 2 and not any(t.shape == w.shape and torch.equal(t, w) for w in weights)]
    assert len(gemms) == len(weights)
    blocks = "Block" in type(recipe).__name__ or recipe == "blockwise"
    for gemm in gemms:
        found = 0
        for sources, quantize, data, scale, is_input in (
            (read, of_input, gemm.a, gemm.scale_a, True),
            (weights, of_weight, gemm.b, gemm.scale_b, False),
        ):
            for source in sources:
                q, expected = quantize(source.detach().float().numpy())
                rows, columns = q.shape
                if data.shape[0] < rows or data.shape[1] < columns:
                    continue
                is_same = np.array_equal(data.view(torch.uint8).numpy()[:rows, :columns], q)
                if is_same and np.array_equal(compact(scale, data, expected.shape, blocks, is_input), expected):
                    found += 1
                    break
        assert found == 2, gemm.name
    text = str(inspect(compiled))
    assert f"match='{engine}': operands of forward GEMMs in FP8 equal the engine's. Attention, the KV cache" in text


MODELS = ["llama", "gemma2", "opt"]  # of the others: test_vllm_fused_projections.py


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    """All forward GEMMs of a model, for two engines each. With a barrier in front of each linear, operands are what the formula
    makes of its input and weight; without barriers they are the same."""
    case, linears = zoo_model(name)
    cases, first, wrong = list(CASES.values()), MODELS.index(name), []
    for engine, recipe, of_input, of_weight in (cases[first % len(cases)], cases[(first + 2) % len(cases)]):
        _, gemms, linears, given = forward_gemms(case, linears, recipe, engine)
        blocks = not isinstance(recipe, str) or recipe == "blockwise"
        for gemm, (of, linear) in zip(gemms, linears.items(), strict=True):
            assert given[of].dtype == torch.bfloat16
            for source, quantize, data, scale, is_input in (
                (given[of], of_input, gemm.a, gemm.scale_a, True),
                (linear.weight, of_weight, gemm.b, gemm.scale_b, False),
            ):
                q, expected = quantize(source.detach().float().numpy())
                rows, columns = q.shape
                is_same = np.array_equal(data.view(torch.uint8).numpy()[:rows, :columns], q)
                if not (is_same and np.array_equal(compact(scale, data, expected.shape, blocks, is_input), expected)):
                    wrong.append((engine, of, "input" if is_input else "weight"))
    _, plain, *_ = forward_gemms(case, linears, recipe, engine, has_barriers=False)
    fields = [(vars(a), vars(b)) for a, b in zip(plain, gemms, strict=True)]
    wrong += [key for a, b in fields for key in a if not torch.equal(bytes_of(a[key]), bytes_of(b[key]))]
    assert wrong == []


def bytes_of(x: object) -> torch.Tensor:
    """A field of a recorded GEMM, to compare."""
    return x.contiguous().view(torch.uint8) if isinstance(x, torch.Tensor) else torch.tensor(0)


def test_hf_against_the_installed_function():
    """transformers' own quantizer of its FP8 linear gives the bytes of our inputs and of exported weights."""
    integration = pytest.importorskip("transformers.integrations.compressed_tensors")
    case, linears = zoo_model("llama")
    _, gemms, linears, given = forward_gemms(case, linears, "rowwise", "hf")
    for gemm, (name, linear) in zip(gemms, linears.items(), strict=True):
        for source, data, scale in ((given[name], gemm.a, gemm.scale_a), (linear.weight, gemm.b, gemm.scale_b)):
            q, expected = integration.quantize_fp8_per_row(source.detach())
            rows, columns = q.shape
            assert torch.equal(data[:rows, :columns].view(torch.uint8), q.view(torch.uint8))
            assert torch.equal(scale[:rows, 0], expected)


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


def test_exports_are_the_matched_weights(tmp_path):
    for recipe, engine, quantize in (("rowwise", "vllm", dynamic_per_token), (F32, "deepgemm", deepgemm(128))):
        model = nn.Sequential(nn.Linear(200, 192), nn.Linear(192, 128)).bfloat16()
        compiled = fp8_compile(model, recipe, match=engine, backend="aot_eager")
        with torch.no_grad():
            compiled(torch.randn(32, 200, dtype=torch.bfloat16))
        tensors = dict(state_dict_fp8(compiled))
        q, scale = quantize(model[0].weight.detach().float().numpy())
        assert np.array_equal(tensors["0.weight"].view(torch.uint8).numpy(), q)
        assert np.array_equal(tensors["0.weight_scale"].numpy(), scale)
        export_fp8(compiled, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "engine", "why"),
    [
        ("delayed", "vllm", "takes no scales from earlier steps"),
        ("current", "deepgemm", "no such online quantization"),
        ("delayed", "vllm-per-tensor", "takes no scales from earlier steps"),
        ("rowwise", "vllm-per-tensor", "Recipes: .current."),
        ("mxfp8", "deepgemm", "no such online quantization"),
        ("blockwise", "vllm", "use_f32_scales.*weights twice"),
        ("rowwise", "deepgemm", "Recipes: 'blockwise'"),
        ("blockwise", "hf", "a kernel that is not part of transformers"),
        (Float8RowwiseScaling(amax_epsilon=1e-3), "vllm", "leave amax_epsilon at 0.0"),
        (Float8BlockScaling(w_block_scaling_dim=1), "deepgemm", "match='deepgemm' needs w_block_scaling_dim=2"),
    ],
)
def test_refusals(recipe, engine, why):
    with pytest.raises(RecipeError, match=why):
        fp8_compile(nn.Linear(64, 64), recipe, match=engine)


def test_wrong_words():
    with pytest.raises(OptionError, match=r"match is 'vlm'. Did you mean 'vllm'"):
        fp8_compile(nn.Linear(64, 64), "rowwise", match="vlm")
    with pytest.raises(OptionError, match=r"min_speedup=1.0 and match='vllm'"):
        fp8_compile(nn.Linear(64, 64), "rowwise", match="vllm", min_speedup=1.0)
