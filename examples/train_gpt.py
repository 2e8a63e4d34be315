"""Train a plain GPT twice, in high precision and in FP8, on the same bytes in the same order, and compare.

    python examples/train_gpt.py --recipe delayed --steps 300 --out out/delayed

The model below is ordinary PyTorch and knows nothing of FP8. Both copies start from the same weights and see the same
batches; one is compiled by `torch.compile`, the other by `fp8_compile`. The text is what every machine has: the source
files of Python's standard library, read as bytes. OUT/loss.png shows both curves, OUT/result.json has the figures.
"""

import argparse
import copy
import json
import math
import statistics
import sysconfig
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F

import fp8pass

VOCABULARY = 256  # bytes


# ---- The model: nothing here is about FP8 ----


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x):
        x = x + self.attn(self.norm_attn(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, tie: bool):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.layers:  # the residual stream sums 2 * layers branches
            for branch_end in (block.attn.out, block.mlp.down):
                branch_end.weight.data /= math.sqrt(2 * layers)
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# ---- The text ----


def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and bytes held out: every tenth source file of the standard library's top folder."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = b"".join(path.read_bytes() for path in files[::10])
    train = b"".join(path.read_bytes() for i, path in enumerate(files) if i % 10)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))


def batches(text: torch.Tensor, args: argparse.Namespace, seed: int):
    """Endless (tokens, targets), each [batch, context] int64; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
        window = text[begins + torch.arange(args.context + 1)].long().to(args.device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


# ---- Training ----


@dataclass
class Run:
    """One of the two copies in training, and what was measured."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float = math.nan

    def step(self, tokens, targets, autocast, lr: float) -> None:
        begin = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with autocast:
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def evaluate(self, held_out, autocast) -> None:
        with autocast:
            self.held_out = statistics.fmean(self.model(*batch).item() for batch in held_out)

    def milliseconds(self) -> float:
        """Median step time; the first steps, which compile, do not count."""
        return 1e3 * statistics.median(self.seconds[3:] or self.seconds)

    def final_loss(self) -> float:
        """Mean over the last tenth of the steps: one batch's loss is mostly noise."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of --lr."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (args.steps - warmup)))


def train(runs: list[Run], args: argparse.Namespace, console: Console) -> None:
    """Step both copies through the same batches, side by side, then evaluate both on the held-out text."""
    text, held_out_text = standard_library()
    autocast = torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    columns = (TextColumn("{task.description:>14}"), TextColumn("{task.fields[status]}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars = [progress.add_task(run.name, total=args.steps, status="waiting") for run in runs]
        for step, (tokens, targets) in enumerate(islice(batches(text, args, args.seed), args.steps)):
            for run, bar in zip(runs, bars, strict=True):
                if step == 0:
                    progress.update(bar, status="compiling")
                run.step(tokens, targets, autocast, learning_rate(step, args))
                if step == 0:
                    console.print(f"{run.name:>14}: compiled, with its first step, in {run.seconds[0]:.0f} s")
                progress.update(bar, advance=1, status=f"loss {run.losses[-1]:.4f} {1e3 * run.seconds[-1]:7.1f} ms/step")
    held_out = list(islice(batches(held_out_text, args, args.seed), args.eval_batches))
    for run in runs:
        run.evaluate(held_out, autocast)


def plot(runs: list[Run], path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    for run, style in zip(runs, ({"color": "0.6", "lw": 3}, {"color": "tab:red", "lw": 1}), strict=True):
        top.plot(run.losses, label=run.name, **style)
    top.set(title=title, ylabel="loss, nats per byte")
    top.legend()
    bottom.plot([100 * (b / a - 1) for a, b in zip(*(run.losses for run in runs), strict=True)], color="tab:red", lw=1)
    bottom.axhline(0, color="0.6", lw=1)
    bottom.set(xlabel="step", ylabel="difference, %")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---- The command line ----


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    recipes = ("delayed", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    parser.add_argument("--recipe", default="delayed", choices=recipes)
    sizes = {"steps": 300, "layers": 4, "width": 128, "heads": 4, "context": 128, "batch": 8, "eval-batches": 20, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tie", action="store_true", help="one weight for embedding and head")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="bfloat16: under autocast")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt"))
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def main(argv: list[str] | None = None) -> dict:
    args, console = parse(argv), Console()
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context, args.tie).to(args.device)
    twin = copy.deepcopy(model)
    fp8 = fp8pass.fp8_compile(model, recipe=args.recipe, backend=args.backend)
    compiled = {f"{args.dtype} twin": torch.compile(twin, backend=args.backend), f"FP8 {args.recipe}": fp8}
    runs = [Run(name, m, torch.optim.AdamW(m.parameters(), args.lr, (0.9, 0.95))) for name, m in compiled.items()]
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters; the first step of each copy compiles it")
    if torch.device(args.device).type == "cpu":
        console.print("On a CPU FP8 is emulated: its casts are extra work and its GEMMs run in float32, so it is slower.")
    train(runs, args, console)

    high, low = runs
    gemms = fp8pass.inspect(fp8).gemms
    result = {
        "options": {name: str(value) for name, value in vars(args).items()},
        "torch": torch.__version__,
        "final_loss": {run.name: run.final_loss() for run in runs},
        "held_out_loss": {run.name: run.held_out for run in runs},
        "difference_percent": 100 * (low.final_loss() / high.final_loss() - 1),
        "held_out_difference_percent": 100 * (low.held_out / high.held_out - 1),
        "milliseconds_per_step": {run.name: run.milliseconds() for run in runs},
        "gemms": len(gemms),
        "gemms_in_fp8": sum(gemm.quantized for gemm in gemms),
        "state_tensors": len(fp8pass.state(fp8).tensors),
        "losses": {run.name: run.losses for run in runs},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    plot(runs, args.out / "loss.png", f"GPT, {args.layers} layers of width {args.width}, FP8 {args.recipe}")

    console.print(str(fp8pass.inspect(fp8)), markup=False, highlight=False, soft_wrap=True)
    for run in runs:
        console.print(f"{run.name:>14}: final loss {run.final_loss():.4f}, held out {run.held_out:.4f}")
    final, held_out = result["difference_percent"], result["held_out_difference_percent"]
    console.print(f"    difference: final loss {final:+.2f} %, held out {held_out:+.2f} %")
    console.print(f"   loss curves: {args.out / 'loss.png'}", soft_wrap=True)
    return result


if __name__ == "__main__":
    main()
