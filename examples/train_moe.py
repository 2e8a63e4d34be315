"""Train a small mixture of experts twice, in float32 and in FP8, on the same bytes in the same order, and compare.

    python examples/train_moe.py --recipe delayed --steps 300 --out out/moe

The model below is ordinary PyTorch. Its experts are batches of weights, multiplied by `torch._grouped_mm`: tokens are sorted by
expert, and one GEMM has a group of rows for each. `fp8_compile` turns it into an FP8 GEMM with a scale per expert; the routers
stay in high precision. torch traces the grouped GEMM in bfloat16 alone, so the twin in float32 runs eagerly, expert by expert.
OUT/result.json has the figures.
"""

import argparse
import copy
import json
import math
import statistics
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fp8pass

VOCABULARY = 256  # bytes


# ---- The model: nothing here is about FP8 ----


class Experts(nn.Module):
    """SwiGLU experts: the weights of all of them are one Parameter per layer, [experts, out, in]."""

    def __init__(self, width: int, hidden: int, experts: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.one_by_one = False

    def forward(self, x, ends):
        """x [rows, width] is sorted by expert; ends [experts] int32 says where the rows of each end."""
        gate, up = self.multiply(x, self.gate_up, ends).chunk(2, dim=-1)
        return self.multiply(F.silu(gate) * up, self.down, ends)

    def multiply(self, x, weights, ends):
        if not self.one_by_one:
            weights = weights.bfloat16().transpose(-2, -1)
            return torch._grouped_mm(x.bfloat16(), weights, ends).to(x.dtype)
        bounds = [0, *ends.tolist()]
        groups = zip(weights, bounds, bounds[1:], strict=False)
        return torch.cat([x[begin:end] @ weight.t() for weight, begin, end in groups])


class MoE(nn.Module):
    """Every token goes to the `top_k` experts that its router likes best."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.top_k, self.num_experts = top_k, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, hidden, experts)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(self.top_k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(expert.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        rows = self.experts(tokens[order // self.top_k], counts.cumsum(0, dtype=torch.int32))
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        by_token = rows[back].view(-1, self.top_k, rows.shape[-1])
        return (by_token * weights.unsqueeze(-1).to(rows.dtype)).sum(dim=1).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_moe = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = MoE(width, hidden, experts, top_k)

    def attention(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x):
        x = x + self.attention(self.norm_attn(x))
        return x + self.moe(self.norm_moe(x))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        sizes = (args.width, args.heads, args.hidden, args.experts, args.top_k)
        self.layers = nn.ModuleList(Block(*sizes) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)
        self.head = nn.Linear(args.width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# ---- Training ----


def standard_library() -> torch.Tensor:
    """The source files of the standard library's top folder, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(text: torch.Tensor, args: argparse.Namespace):
    """Endless (tokens, targets), each [batch, context] int64; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        begins = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
        window = text[begins + torch.arange(args.context + 1)].long().to(args.device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def train(models: dict[str, nn.Module], args: argparse.Namespace, console: Console) -> dict[str, list[float]]:
    """Step all models through the same batches; their losses."""
    optimizers = {name: torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95)) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step, batch in enumerate(islice(batches(standard_library(), args), args.steps)):
        lr = args.lr * min(1, (step + 1) / max(1, args.steps // 10))
        for name, model in models.items():
            for group in optimizers[name].param_groups:
                group["lr"] = lr
            loss = model(*batch)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss.item())  # waits for the device
        if step % 20 == 0 or step == args.steps - 1:
            console.print(f"step {step:4d}  " + "  ".join(f"{name} {losses[name][-1]:.4f}" for name in models))
    return losses


# ---- The command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--recipe", default="delayed", choices=("delayed", "current", "blockwise", "rowwise", "mxfp8"))
    sizes = {"steps": 300, "layers": 2, "width": 128, "heads": 4, "hidden": 96, "experts": 8, "top-k": 2}
    for name, default in {**sizes, "context": 128, "batch": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--out", type=Path, default=Path("out/train_moe"))
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k {args.top_k} is not between 1 and --experts {args.experts}")
    return args


def main(argv: list[str] | None = None) -> dict:
    args, console = parse(argv), Console()
    torch.manual_seed(args.seed)
    model = Model(args).to(args.device)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, Experts):
            module.one_by_one = True
    fp8 = fp8pass.fp8_compile(model, recipe=args.recipe, backend=args.backend)
    names = ("float32", f"FP8 {args.recipe}")
    losses = train(dict(zip(names, (twin, fp8), strict=True)), args, console)

    final = {name: statistics.fmean(losses[name][-max(1, args.steps // 10) :]) for name in names}
    gemms = fp8pass.inspect(fp8).gemms
    grouped = [gemm for gemm in gemms if gemm.groups != 1]
    scales = {name: fp8pass.state(fp8).scale(name).numel() for name in fp8pass.state(fp8).tensors}
    result = {
        "options": {name: str(value) for name, value in vars(args).items()},
        "torch": torch.__version__,
        "final_loss": final,
        "difference_percent": 100 * (final[names[1]] / final[names[0]] - 1),
        "gemms": len(gemms),
        "gemms_in_fp8": sum(gemm.quantized for gemm in gemms),
        "grouped_gemms": len(grouped),
        "grouped_gemms_in_fp8": sum(gemm.quantized for gemm in grouped),
        "scales": scales,
        "losses": losses,
    }
    assert all(map(math.isfinite, losses[names[1]])), "the loss is not finite"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    console.print(str(fp8pass.inspect(fp8)), markup=False, highlight=False, soft_wrap=True)
    for name in names:
        console.print(f"{name:>14}: final loss {final[name]:.4f}")
    console.print(f"    difference: {result['difference_percent']:+.2f} %")
    return result


if __name__ == "__main__":
    main()
