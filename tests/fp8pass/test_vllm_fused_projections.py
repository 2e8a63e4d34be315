"""`match="vllm"` with current scaling: operands of forward GEMMs against vLLM's per-tensor quantization, byte for byte, and the
weights that have one scale together because vLLM fuses their projections.

References: NumPy, written from vLLM's csrc/quantization/w8a8/fp8/common.cu, with the groups of `packed_modules_mapping` by
name.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fp8pass import fp8_compile, inspect, state, state_dict_fp8
from fp8pass.errors import InvariantError, RecipeError, ReleasedWeightError, StaleWeightError
from fp8pass.recipes.engines import EngineCurrentScaling
from fp8pass.rewrite.verify import verify
from fp8pass.weights.cache import CHECKED_CALLS
from tests.support.joint import calls, trace
from tests.support.moe import MoE
from tests.support.operands import recorded

F = np.float32
ops = torch.ops.lowering
ENGINES = ("vllm", "vllm-per-tensor")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


def weight_scales(linears):
    """The amax that scales each weight: of all that vLLM fuses with it."""
    amaxes = {name: np.abs(numbers(linear.weight)).max() for name, linear in linears.items()}

    def group(name):
        parent, _, own = name.rpartition(".")
        return parent, next((g for g in FUSED if own in g), own)

    return {name: max(amax for n, amax in amaxes.items() if group(n) == group(name)) for name in amaxes}


def wrong_operands(gemms, linears, given, engine):
    """The operands that are not what vLLM makes of the inputs that linears were given, and of their weights."""
    scales, found = weight_scales(linears), []
    assert len(gemms) == len(linears)
    for gemm, (name, linear) in zip(gemms, linears.items(), strict=True):
        quantize = dynamic_per_token if engine == "vllm" else dynamic_per_tensor
        for operand, data, scale, (q, wanted) in (
            ("input", gemm.a, gemm.scale_a, quantize(numbers(given[name]))),
            ("weight", gemm.b, gemm.scale_b, dynamic_per_tensor(numbers(linear.weight), scales[name])),
        ):
            rows, columns = q.shape
            is_same = np.array_equal(data.view(torch.uint8).numpy()[:rows, :columns], q)
            held = scale.numpy()[:rows] if scale.dim() else scale.numpy()
            if not (is_same and held.dtype == F and np.array_equal(held, wanted)):
                found.append((name, operand))
    return found


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
    readers: dict[int, list[str]] = {}
    alive, order = [], []

    def note(name):
        def hook(_, args):
            alive.append(args[0])
            order.append(name)
            readers.setdefault(id(args[0]), []).append(name)

        return hook

    hooks = [linear.register_forward_pre_hook(note(name)) for name, linear in linears.items()]
    run()
    for hook in hooks:
        hook.remove()
    held = {}

    def read(names, is_first):
        def hook(_, args):
            if is_first:
                held[names] = as_read(args[0], names)
            return (held[names],)

        return hook

    groups = [" ".join(names) for names in readers.values()]
    place = {name: (names, names.split()[0] == name) for names in groups for name in names.split()}
    hooks = [linear.register_forward_pre_hook(read(*place[name])) for name, linear in linears.items()]
    return hooks, {name: linears[name] for name in order}


MODELS = ["qwen3", "phi"]  # of the others: test_engine_match.py


def forward_gemms(case, linears, recipe, engine, has_barriers=True):
    """A compiled model, the operands of its FP8 GEMMs, its linears in the order of their runs, and what each was given."""
    torch._dynamo.reset()
    _given.clear()
    hooks = []
    if has_barriers:
        hooks, linears = with_barriers(linears, lambda: case.model(**case.inputs))
    compiled = fp8_compile(case.model, recipe, match=engine, backend="aot_eager")
    with torch.no_grad(), recorded() as gemms:
        compiled(**case.inputs)
    for hook in hooks:
        hook.remove()
    assert len(gemms) == len(linears)
    return compiled, gemms, linears, dict(_given)


def zoo_model(name):
    """A model of transformers in bfloat16, and its linears but the head, by name."""
    pytest.importorskip("transformers")
    from tests.zoo.models import TRANSFORMERS

    torch.manual_seed(0)
    case = TRANSFORMERS[name]()
    model = case.model.bfloat16().eval()
    return case, {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    """All forward GEMMs; without barriers in front of linears, operands are the same."""
    case, linears = zoo_model(name)
    _, gemms, linears, given = forward_gemms(case, linears, "current", "vllm")
    compiled, plain, *_ = forward_gemms(case, linears, "current", "vllm", has_barriers=False)
    assert wrong_operands(gemms, linears, given, "vllm") == wrong_operands(plain, linears, given, "vllm") == []
    shared = {g.module.rpartition(".")[2] for g in inspect(compiled).gemms if g.shares_scale}
    assert shared == {part for group in FUSED for part in group if any(n.endswith(part) for n in linears)}


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
def test_which_weights_share_a_scale(engine):
    model, compiled, inputs = attention(engine)
    with torch.no_grad(), recorded() as gemms:
        compiled(*inputs)
    amaxes = {n: numbers(m.weight).__abs__().max() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = ["q_proj", "k_proj", "v_proj", "qkv_proj", "first", "second", "cross.q_proj", "cross.k_proj", "cross.v_proj"]
    together = dict.fromkeys(names[:3], names[:3]) | dict.fromkeys(names[7:], names[7:])
    for name, gemm in zip(names, gemms, strict=True):
        assert gemm.scale_b.item() == max(amaxes[n] for n in together.get(name, [name])) / F(448), name
    (line,) = [x for x in inspect(compiled).remarks() if x.startswith("Weights that share a scale")]
    assert line.endswith(": {q_proj,k_proj,v_proj}, cross.{k_proj,v_proj}.")


def test_a_rule_takes_a_weight_out_of_its_group():
    model, compiled, inputs = attention(rules={"v_proj": None})
    with torch.no_grad():
        model.v_proj.weight.mul_(100)
        with recorded() as gemms:
            compiled(*inputs)
    q, k = gemms[:2]
    assert q.scale_b == k.scale_b < numbers(model.v_proj.weight).__abs__().max() / 4480


class Short(Attention):
    """Less to compile."""

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
        model, compiled, (x, memory) = attention(engine, Short, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        found = []
        for _ in range(2):
            for _ in range(2):
                x = x.detach().requires_grad_()
                out = compiled(x, memory)
                out.float().square().sum().backward()
                found += [out.detach(), x.grad]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return found, compiled

    expected, _ = train(weight_copies="save")
    found, compiled = train(**options)
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []
    report = inspect(compiled)
    reasons = {n: str(r.reason) for n, r in report.released.items()}
    if frozen == ("weight",):
        assert reasons == dict.fromkeys(("q_proj.weight", "k_proj.weight", "first.weight"), "None")
    elif frozen:
        reason = "readers: multi_amax of a compiled graph reads it in high precision"
        assert reasons == {"first.weight": "None", "k_proj.weight": reason}
        assert "1 weight is quantized at each call: scales: it shares its scale with a weight that is cast" in str(report)
    else:
        assert {(w.module, w.kept) for g in report.graphs for w in g.kept} == {(n, True) for n in ("q_proj", "k_proj", "first")}


def test_a_change_of_one_weight_changes_the_scale_of_all():
    model, compiled, inputs = attention()
    with torch.no_grad():
        before = compiled(*inputs)
        model.k_proj.weight.mul_(8)
        with recorded() as gemms:
            after = compiled(*inputs)
        assert {gemm.scale_b.item() for gemm in gemms[:3]} == {numbers(model.k_proj.weight).__abs__().max() / F(448)}
        fresh = fp8_compile(copy.deepcopy(model), "current", match="vllm", backend="aot_eager", weight_copies="save")
        assert torch.equal(fresh(*inputs), after)
        assert not torch.equal(after, before)


def test_a_write_without_a_trace_makes_all_copies_of_one_scale_anew():
    model, compiled, inputs = attention(weight_copies="cache")
    with torch.no_grad():
        compiled(*inputs)
        model.k_proj.weight.data.mul_(8)
        with pytest.raises(StaleWeightError, match="k_proj"):  # noqa: PT012 (one of these calls finds it)
            for _ in range(CHECKED_CALLS + 1):
                compiled(*inputs)
        after = compiled(*inputs)
        fresh = fp8_compile(copy.deepcopy(model), "current", match="vllm", backend="aot_eager", weight_copies="save")
        assert torch.equal(fresh(*inputs), after)


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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_released", [False, True])
def test_exports_have_the_shared_scales(engine, is_released):
    model, compiled, inputs = attention(engine, release_frozen=is_released)
    model.requires_grad_(not is_released)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    pair = {n: linears.pop(n) for n in ("cross.k_proj", "cross.v_proj")}  # of another input than q
    scales = weight_scales(linears) | weight_scales(pair)
    linears |= pair
    expected = {n: dynamic_per_tensor(numbers(m.weight), scales[n]) for n, m in linears.items()}
    with torch.no_grad():
        compiled(*inputs)
    for fmt in ("compressed-tensors", "fp8"):
        tensors = dict(state_dict_fp8(compiled, fmt))
        for name, (q, scale) in expected.items():
            assert np.array_equal(tensors[f"{name}.weight"].view(torch.uint8).numpy(), q)
            assert tensors[f"{name}.weight_scale"].numpy() == scale


def test_experts_have_one_scale_each_and_their_inputs_one():
    model, x = MoE(), torch.randn(24, 64).bfloat16()
    model = model.bfloat16()
    compiled = fp8_compile(model, "current", match="vllm", backend="aot_eager")
    with torch.no_grad(), recorded() as gemms:
        compiled(x)
    up, down = gemms
    _, wanted = dynamic_per_tensor(numbers(x))
    assert up.scale_a.item() == wanted
    for gemm, weight in ((up, model.up), (down, model.down)):
        for i, (q, scale) in enumerate(map(dynamic_per_tensor, numbers(weight))):
            rows, columns = q.shape
            assert np.array_equal(gemm.b[i].view(torch.uint8).numpy()[:rows, :columns], q)
            assert gemm.scale_b.reshape(-1)[i].item() == scale


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_adapters_of_peft_do_not_hide_the_names():
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    from tests.zoo.models import TRANSFORMERS

    case = TRANSFORMERS["llama"]()
    model = peft.get_peft_model(case.model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    compiled = fp8_compile(model, "current", match="vllm", backend="aot_eager")
    with torch.no_grad():
        compiled(**case.inputs)
    shared = [g.module.partition("layers.0.")[2] for g in inspect(compiled).gemms if g.shares_scale]
    assert {"self_attn.q_proj.base_layer", "self_attn.v_proj.base_layer", "mlp.gate_proj", "mlp.up_proj"} <= set(shared)


@pytest.mark.parametrize(("recipe", "backend"), [("current", "aot_eager"), ("current", "inductor"), ("rowwise", "aot_eager")])
def test_training_follows_high_precision(recipe, backend):
    """Backward GEMMs keep the recipe's quantization."""

    def losses(compile_):
        torch.manual_seed(0)
        model, memory = (Attention if backend == "aot_eager" else Short)(), torch.randn(32, 64)
        run, optimizer = compile_(model), torch.optim.Adam(model.parameters(), lr=1e-3)
        found = []
        for _ in range(4):
            loss = (run(memory, memory) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, run

    plain, _ = losses(lambda model: model)
    low, compiled = losses(lambda model: fp8_compile(model, recipe, match="vllm", backend=backend))
    assert low == pytest.approx(plain, rel=0.01)
    gemms = inspect(compiled).gemms
    assert all(g.quantized for g in gemms)
    kind = "tensor-wise" if recipe == "current" else "row-wise"
    assert {(g.a_scaling, g.b_scaling) for g in gemms if g.role != "output"} == {(kind, kind)}


@pytest.mark.parametrize("engine", ENGINES)
def test_verification_asks_for_every_weight_of_a_group(engine):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 48)

        def forward(self, x):
            return self.gate_proj(x), self.up_proj(x)

    def applied():
        work = trace(Named(), torch.randn(16, 32), recipe=EngineCurrentScaling(match=engine)).run("apply")
        verify(work.graph, work.plan, work.applied, work.known)
        (largest,) = calls(work.graph, torch.ops.aten.amax.default)
        (amaxes,) = largest.all_input_nodes
        return work, amaxes

    for change in (lambda xs: [xs[0], xs[0]], lambda xs: xs[::-1]):
        work, amaxes = applied()
        amaxes.update_arg(0, change(amaxes.args[0]))
        with pytest.raises(InvariantError, match=r"b has (primals|amax)"):
            verify(work.graph, work.plan, work.applied, work.known)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"amax_epsilon": 1e-3}, "leave amax_epsilon at 0.0"), ({"use_power_2_scales": True}, "needs use_power_2_scales=False")],
)
def test_options_that_contradict_the_engine(options, why):
    from fp8pass import Float8CurrentScaling

    with pytest.raises(RecipeError, match=why):
        fp8_compile(nn.Linear(64, 64), Float8CurrentScaling(**options), match="vllm")
