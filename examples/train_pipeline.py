"""Train a model whose layers are spread over ranks as the stages of a pipeline, in FP8.

    torchrun --nproc-per-node 2 examples/train_pipeline.py --recipe delayed --steps 20

Each rank compiles its own stage. A step of delayed scaling is a whole schedule, not a micro-batch, so the step is ended by
hand; and stages have different modules, so each keeps its own amaxes: `reduce_amax=False`. With data parallelism besides, pass
the group of the ranks that have the same stage as `amax_reduction_group` instead.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import fp8pass

BATCH, MICROBATCHES = 64, 4


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(argv: list[str] | None = None) -> list[float]:
    """Losses of all steps; on ranks other than the last, none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="delayed", choices=("delayed", "current", "blockwise", "rowwise"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    stage_module = nn.Sequential(Block(args.width), Block(args.width)).to(device)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3)

    recipe = fp8pass.DelayedScaling(reduce_amax=False) if args.recipe == "delayed" else args.recipe
    fp8pass.fp8_compile(stage_module, recipe, step="manual", backend=args.backend, in_place=True)

    # A microbatch as the stage gets it and as it passes it on. Without them the stage finds out by a pass of its own.
    rows = BATCH // MICROBATCHES
    given = torch.empty(rows, args.width, device=device, requires_grad=rank > 0)
    result = torch.empty(rows, args.width, device=device, requires_grad=True)
    stage = PipelineStage(stage_module, rank, ranks, torch.device(device), input_args=(given,), output_args=(result,))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=F.mse_loss)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, args.width, generator=generator).to(device)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        if rank == ranks - 1:
            parts: list[torch.Tensor] = []
            schedule.step(*((x,) if rank == 0 else ()), target=x.roll(1, 0), losses=parts)
            losses.append(torch.stack(parts).mean().item())
        else:
            schedule.step(*((x,) if rank == 0 else ()))
        optimizer.step()
        fp8pass.state(stage_module).step()
    found = fp8pass.inspect(stage_module).gemms
    print(f"rank {rank}: {sum(g.quantized for g in found)} of {len(found)} GEMMs in FP8")
    if losses:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
