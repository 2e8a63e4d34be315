"""A small transformer without attention, its batches, and the ways to spread it over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

VOCABULARY, WIDTH, TOKENS, BATCH = 32, 32, 16, 4


class Block(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(bias) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def seeded(bias: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(bias)


def loss_of(model, step: int, shard: int = 0, num_shards: int = 1):
    """Loss on a shard's part of the step's batch: the next token is the token plus 3."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator).chunk(num_shards)[shard]
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), (tokens.flatten() + 3) % VOCABULARY)


def tensor_parallel(model: Net, mesh, sequence: bool, **options) -> None:
    """Megatron's plan; with `sequence` activations between the linears are sharded along the tokens.
    options: of all modules but the head."""
    into = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), **options)
    out = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate(), **options)
    plan = {"layers.*.gate": into, "layers.*.up": into, "layers.*.down": out}
    if sequence:
        plan |= {
            "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **options),
            "layers.*.norm": SequenceParallel(**options),
            "norm": SequenceParallel(**options),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)


class Gathered:
    """A Parameter that is read: gathered from all ranks, and its gradient scattered over them, as SimpleFSDP does."""

    def __init__(self, name, dtype):
        self.name, self.dtype = name, dtype

    def __get__(self, module, owner):
        sharded = module._parameters[self.name]
        whole = sharded.redistribute(placements=[Replicate()], forward_dtype=self.dtype, backward_dtype=torch.float32)
        return whole.to_local(grad_placements=[Partial()])


def simple_fsdp(model: nn.Module, mesh, dtype=None) -> nn.Module:
    """Shard every Parameter along its rows; each module gathers its own where it reads them."""
    for module in list(model.modules()):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in names:
            module.register_parameter(name, nn.Parameter(distribute_tensor(module._parameters[name], mesh, [Shard(0)])))
        if names:
            base = type(module)
            module.__class__ = type(f"Gathering{base.__name__}", (base,), {name: Gathered(name, dtype) for name in names})
    return model


def spread(model: Net, kind: str, compile_):
    """The model spread over the ranks and compiled: (what to call, which shard of the batch, of how many)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if kind.startswith("ddp"):
        torch._dynamo.config.optimize_ddp = kind == "ddp"
        dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # so that the small model has several buckets, as a large one has
        return compile_(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)), rank, size
    if kind in ("tp", "sp of DTensors"):  # torch needs them between modules where ranks do not divide the tokens
        options = {} if kind == "tp" else {"use_local_output": False}
        tensor_parallel(model, init_device_mesh("cpu", (size,)), kind != "tp", **options)
        return compile_(model), 0, 1
    if kind == "fsdp":
        mesh, shard, shards = init_device_mesh("cpu", (size,)), rank, size
    else:  # two by two
        both = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
        tensor_parallel(model, both["model"], sequence=False)
        mesh, shard, shards = both["data"], both["data"].get_local_rank(), 2
    for i, layer in enumerate(model.layers):
        if kind.endswith("block"):
            model.layers[i] = compile_(layer)
        fully_shard(model.layers[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return (model if kind.endswith("block") else compile_(model)), shard, shards


def train(model, parameters, steps: range, shard: int, num_shards: int, optimizer=None) -> list[float]:
    """Losses, averaged over the shards."""
    optimizer = optimizer or torch.optim.Adam(parameters, lr=1e-3)
    losses = []
    for step in steps:
        loss = loss_of(model, step, shard, num_shards)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if num_shards > 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        losses.append(value.item())
    return losses
