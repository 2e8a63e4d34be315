"""Train a plain GPT in FP8 on several processes, with PyTorch's own parallelism, and compare with high precision.

    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel ddp
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp --recipe current
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel simple-fsdp --recipe current
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel fsdp2 --recipe current
    torchrun --nproc-per-node 2 examples/train_distributed.py --parallel tp --sequence-parallel

Without GPUs the processes talk through gloo and FP8 is emulated. The model knows nothing of FP8 and nothing of ranks; it is
spread over them as always, then compiled by `fp8_compile`. `fsdp2` is `fsdp` with weights gathered in FP8. OUT/result.json has
both loss curves; with `--checkpoint DIR` model, optimizer and FP8 state are saved by torch.distributed.checkpoint in the end,
and read in the beginning if there.
"""

import argparse
import contextlib
import json
import math
import os
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import fp8pass

VOCABULARY = 256  # bytes


# ---------------------------------------------------------------- the model: nothing here is about FP8 or ranks


class Attention(nn.Module):
    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.head_width = head_width
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.norm_attn, self.attn = nn.LayerNorm(width), Attention(width, head_width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attn(self.norm_attn(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, head_width: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, head_width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------- parallelism: PyTorch's own


def tensor_parallel(model: GPT, mesh: DeviceMesh, sequence: bool) -> None:
    """Linears are split over the ranks; with `sequence` also the tokens between them, gathered in FP8 where it can be."""
    shards = Shard(1) if sequence else Replicate()
    into, out = ColwiseParallel(input_layouts=shards), RowwiseParallel(output_layouts=shards)
    for block in model.layers:
        plan = {"attn.q": into, "attn.k": into, "attn.v": into, "attn.out": out, "up": into, "down": out}
        if sequence:
            plan |= {"norm_attn": SequenceParallel(), "norm_mlp": SequenceParallel()}
        parallelize_module(block, mesh, plan)
    if sequence:
        enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model, mesh, {"layers.0": enter, "norm": SequenceParallel()})
        parallelize_module(model.head, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))


class Gathered:
    """A Parameter where it is read: gathered from all ranks; its gradient is scattered over them."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module, owner):
        whole = module._parameters[self.name].redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def simple_fsdp(model: GPT, mesh: DeviceMesh) -> None:
    """Fully sharded Parameters whose gathers are part of the graph, as in SimpleFSDP: they travel in FP8 where they can."""
    for module in model.modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in parameters.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        if parameters:
            base = type(module)
            module.__class__ = type(base.__name__, (base,), {name: Gathered(name) for name in parameters})


def spread(model: GPT, args: argparse.Namespace, compile_) -> tuple[nn.Module, int]:
    """What to call, and over how many ranks the batch is split."""
    size = dist.get_world_size()
    mesh = init_device_mesh(args.device, (size,))
    if args.parallel == "ddp":
        return compile_(nn.parallel.DistributedDataParallel(model)), size
    if args.parallel == "simple-fsdp":
        simple_fsdp(model, mesh)
        return compile_(model), size
    if args.parallel == "tp":
        tensor_parallel(model, mesh, args.sequence_parallel)
        return compile_(model), 1
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return compile_(model), size


# ---------------------------------------------------------------- training


def batches(args: argparse.Namespace, shard: int, num_shards: int):
    """This rank's part of endless (tokens, targets): the standard library's sources as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        begins = torch.randint(len(text) - args.context - 1, (args.batch, 1), generator=generator)
        window = text[begins + torch.arange(args.context + 1)].long().chunk(num_shards)[shard].to(args.device)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def train(name: str, recipe: str | None, args: argparse.Namespace, console: Console) -> tuple[list[float], nn.Module]:
    """Losses over the global batch, and what was compiled."""
    torch.manual_seed(args.seed)
    torch._dynamo.reset()
    model = GPT(args.layers, args.width, args.head_width, args.context).to(args.device)
    compile_ = partial(torch.compile, backend=args.backend)
    if recipe is not None:
        gather = "fp8" if args.parallel == "fsdp2" else None
        compile_ = partial(fp8pass.fp8_compile, recipe=recipe, backend=args.backend, fsdp_gather=gather)
    compiled, num_shards = spread(model, args, compile_)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if recipe is not None and args.checkpoint and args.checkpoint.exists():
        load(model, optimizer, compiled, args.checkpoint)
    bf16 = torch.autocast(args.device, torch.bfloat16) if args.dtype == "bfloat16" else contextlib.nullcontext()
    losses = []
    data = batches(args, dist.get_rank() % num_shards, num_shards)
    for step, (tokens, targets) in zip(range(args.steps), data, strict=False):
        with bf16:
            logits = compiled(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step % max(1, args.steps // 10) == 0 or step == args.steps - 1:
            console.print(f"{name}: step {step:4}  loss {losses[-1]:.4f}")
    if recipe is not None and args.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "fp8": fp8pass.state(compiled)}, checkpoint_id=args.checkpoint)
    return losses, compiled


def load(model: GPT, optimizer: torch.optim.Optimizer, compiled: nn.Module, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    fp8pass.state(compiled).load_checkpoint(folder)


# ---------------------------------------------------------------- the command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp", "fsdp2", "simple-fsdp", "tp"))
    parser.add_argument("--sequence-parallel", action="store_true", help="with tp: tokens are split between the linears")
    parser.add_argument("--recipe", default="delayed", choices=("delayed", "current", "blockwise", "rowwise", "mxfp8"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--head-width", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="bfloat16: under autocast")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/train_distributed"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict:
    args = parse(argv)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    console = Console(quiet=dist.get_rank() != 0)
    high, _ = train("high precision", None, args, console)
    low, compiled = train(f"FP8 {args.recipe}", args.recipe, args, console)
    last = max(1, args.steps // 10)
    result = {
        "options": {name: str(value) for name, value in vars(args).items()},
        "num_ranks": dist.get_world_size(),
        "difference_percent": 100 * (math.fsum(low[-last:]) / math.fsum(high[-last:]) - 1),
        "losses": {"high precision": high, "fp8": low},
        "gathers": [gather for graph in fp8pass.inspect(compiled).to_dict()["graphs"] for gather in graph["gathers"]],
    }
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps(result, indent=1))
    console.print(str(fp8pass.inspect(compiled)), markup=False, highlight=False, soft_wrap=True)
    console.print(f"difference of the losses of the last {last} steps: {result['difference_percent']:+.2f} %")
    return result


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
