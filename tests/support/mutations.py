"""The changes that `verify` does not notice: one argument of one inserted node at a time is changed before it runs.

    python -m tests.support.mutations            # the score, by recipe, and the changes that pass unseen
    python -m tests.support.mutations --all      # no sampling: every argument of every node, all models and recipes
    python -m tests.support.mutations --write    # to tests/fp8pass/unseen_mutations.json, for the test; reasons stay

A rewritten graph that differs from the plan is a defect of a pass. Each change here is such a defect, made on purpose: `verify`
notices it if it raises. The list of unseen changes may only shrink; a change that is seen leaves it. None of them changes what
a graph computes; each has a reason why.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8pass import MXFP8BlockScaling
from fp8pass.recipes import as_recipe
from fp8pass.recipes.engines import matching
from fp8pass.rewrite.runner import PASSES, Work
from fp8pass.schemes.emitter import FIRST_STEP
from lowering.formats import Granularity
from tests.emulation.cases import Ragged
from tests.support.joint import trace, two_ranks
from tests.support.models import LlamaBlock, Net, mlp
from tests.support.moe import MoE
from tests.support.rewritten_models import Batched, Gathering, SortedExperts, Tied, wide

UNSEEN = pathlib.Path(__file__).parent.parent / "fp8pass" / "unseen_mutations.json"
RECIPES = ("delayed", "first step", "current", "blockwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8 squares")
PER_KEY = 2
"""The number of nodes of a graph that are changed in one argument, of those with the same target: the first and the last."""


# -- graphs


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its input, and options of `fp8_compile`; `changes` are options of the recipe."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    engine: Any = None
    """The inference engine that the recipe matches, where it has one."""
    trains: bool = True
    num_ranks: int = 1
    keeps: bool = False
    """True if copies of weights are inputs of the graph where they can be."""


class GatheredTwice(nn.Module):
    """A linear whose Parameters are shards, which forward gathers, and backward again."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = {"use_reentrant": False, "context_fn": _again}
        return F.linear(x, *(checkpoint(self.whole, shard, **again) for shard in self.linear.parameters()))

    def whole(self, shard: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        return all_gather_tensor_autograd(shard, 0, torch.distributed.group.WORLD)


def projections(inputs: int, outputs: int) -> Net:
    """q, k and v of one input, whose weights engines fuse."""
    parts = {name: nn.Linear(inputs, outputs) for name in ("q_proj", "k_proj", "v_proj")}
    return Net(lambda self, x: torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x), **parts)


class Checkpointed(Ragged):
    """A model that backward computes again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _sharded() -> nn.Module:
    """A block whose weights FSDP2 gathers in one piece, before its graph begins."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    linears = {name: nn.Linear(256, 256, bias=False) for name in ("up", "down")}
    block = Net(lambda self, x: self.down(F.gelu(self.up(x))), **linears)
    return fully_shard(nn.Sequential(fully_shard(block, mesh=mesh)), mesh=mesh)


def _again() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


_BF16 = torch.bfloat16
MODELS = {
    "mlp": Model(lambda: mlp(128, 256, 128), (128, 128), options={"weight_copies": "save"}),
    "llama": Model(lambda: LlamaBlock(32, 48, 2), (1, 32, 32), _BF16, options={"weight_copies": "recompute"}),
    "ragged": Model(Ragged, (33, 50)),  # whose padding matters
    "tied": Model(Tied, (48, 32)),
    "experts": Model(lambda: SortedExperts(40, 24), (61, 40), _BF16),
    "moe": Model(lambda: MoE(32, 48, 3), (20, 32), _BF16),
    "gather": Model(lambda: Gathering(nn.Linear(256, 48)), (128, 256), num_ranks=2),
    "ragged gather": Model(lambda: Gathering(nn.Linear(40, 20)), (16, 40), num_ranks=2),
    "batched": Model(Batched, (3, 16, 32)),
    "wide": Model(wide, (16, 48), trains=False),
    "inference": Model(mlp, (33, 64), trains=False),
    "high precision": Model(mlp, (33, 64), changes={"backward_override": "high_precision"}),
    "dequantized": Model(Ragged, (33, 50), changes={"backward_override": "dequantized"}),
    "two recipes": Model(mlp, (33, 64), options={"rules": {"2": "current", "0:grad_weight": None}}),
    "parameters": Model(lambda: GatheredTwice(384, 256), (16, 384), _BF16, num_ranks=2),
    "cached": Model(Ragged, (33, 50), options={"weight_copies": "cache"}, keeps=True),
    "cached experts": Model(lambda: MoE(32, 48, 3), (20, 32), _BF16, options={"weight_copies": "cache"}, keeps=True),
    "released": Model(lambda: Ragged().requires_grad_(False), (33, 50), options={"release_frozen": True}, keeps=True),
    "released batch": Model(lambda: Batched().requires_grad_(False), (3, 16, 32), options={"release_frozen": True}, keeps=True),
    "sharded": Model(_sharded, (48, 256), options={"fsdp_gather": "fp8"}, num_ranks=2, keeps=True),
    "fused": Model(lambda: projections(48, 40), (33, 48), engine="vllm"),
    "checkpointed": Model(Checkpointed, (33, 50)),
}


#: Padding, experts and gathers are every recipe's own: these models run under all of them, the others by turns.
_WITH_ALL = ("ragged", "experts", "gather", "parameters")


def pairs() -> list[tuple[str, str]]:
    """(model, recipe), recipe by recipe: each model under three recipes or more."""
    found = {(model, RECIPES[(i + 3 * turn) % len(RECIPES)]) for i, model in enumerate(MODELS) for turn in range(3)}
    found |= set(itertools.product(_WITH_ALL, RECIPES))
    return [pair for r in RECIPES for pair in itertools.product(MODELS, [r]) if pair in found and recipe_of(*pair) is not None]


def recipe_of(model: str, recipe: str) -> Any:
    """The recipe with the model's changes; None where it has no such options."""
    made: Any = MXFP8BlockScaling(enable_2d_quantization=True)
    if recipe != "mxfp8 squares":
        made = as_recipe("delayed" if recipe == "first step" else recipe)
    changes, engine = MODELS[model].changes, MODELS[model].engine
    if engine is not None:
        return matching(made, engine) if recipe in ("current", "rowwise") else None
    if changes and (made.keeps_state or recipe == "rowwise_with_gw_hp"):
        return None
    return dataclasses.replace(made, **changes)


@contextlib.contextmanager
def rewritten(model: str, recipe: str) -> Iterator[Work]:
    """The graph of a model with everything done that comes before `verify`."""
    case = MODELS[model]
    with two_ranks() if case.num_ranks > 1 else contextlib.nullcontext():
        torch.manual_seed(0)
        x = torch.randn(case.shape).to(case.dtype).requires_grad_(case.trains)
        options = {"recipe": recipe_of(model, recipe), "trains": case.trains, "keeps": case.keeps, **case.options}
        joint = trace(case.build().to(case.dtype), x, **options)
        if recipe == "first step":
            first = dataclasses.replace(joint.options, variants=frozenset({FIRST_STEP}))
            joint = dataclasses.replace(joint, options=first)
        names = [name for name, _ in PASSES]
        yield joint.run(names[names.index("verify") - 1])


def verify(work: Work) -> None:
    """The pass of this name."""
    dict(PASSES)["verify"](work)


# -- changes


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One argument of one node with another value."""

    node: fx.Node
    argument: str
    """Its name in the operation's schema."""
    position: int | str
    value: Any

    @property
    def key(self) -> str:
        """Its name in the list of unseen changes."""
        return f"{operation(self.node)}.{self.argument}"

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The graph has the change within."""
        args, kwargs = self.node.args, self.node.kwargs
        if isinstance(self.position, int):
            self.node.update_arg(self.position, self.value)
        else:
            self.node.update_kwarg(self.position, self.value)
        try:
            yield
        finally:
            self.node.args, self.node.kwargs = args, kwargs

    def __str__(self) -> str:
        before = self.node.args[self.position] if isinstance(self.position, int) else self.node.kwargs[self.position]
        return f"{self.node.name} ({self.key}): {before} -> {self.value}"


def operation(node: fx.Node) -> str:
    """A short name of what a node calls."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def mutations(work: Work, per_key: int | None = PER_KEY) -> list[Mutation]:
    """The changes of a graph: all of them, or for each target and argument those of the first and the last nodes."""
    order = {node: i for i, node in enumerate(work.graph.nodes)}
    pool: dict[Any, list[fx.Node]] = {}
    for node in order:
        pool.setdefault(_form(node), []).append(node)
    found: dict[tuple[str, int], list[Mutation]] = {}
    for node in order:
        if node.op != "call_function" or node in work.known:
            continue
        for name, position, value in _arguments(node):
            others = list(_others(value, node, pool, order))
            for i, other in enumerate(others):
                mutation = Mutation(node, name, position, other)
                found.setdefault((mutation.key, i), []).append(mutation)
    if per_key is None:
        return list(itertools.chain(*found.values()))
    first = (per_key + 1) // 2
    return [m for all_ in found.values() for m in (all_ if len(all_) <= per_key else all_[:first] + all_[first - per_key :])]


def _arguments(node: fx.Node) -> Iterator[tuple[str, int | str, Any]]:
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    for i, value in enumerate(node.args):
        yield names[i] if i < len(names) else str(i), i, value
    for name, value in node.kwargs.items():
        yield name, name, value


def _form(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _others(value: Any, node: fx.Node, pool: dict[Any, list[fx.Node]], order: dict[fx.Node, int]) -> Iterator[Any]:
    """Other values that an argument may be given by mistake."""
    if isinstance(value, fx.Node):
        if (other := _other_node(value, node, pool, order)) is not None:
            yield other
    elif isinstance(value, (list, tuple)):
        yield from _other_lists(list(value), node, pool, order)
    elif (other := _other_constant(value)) is not None:
        yield other


def _other_node(value: fx.Node, node: fx.Node, pool: dict[Any, list[fx.Node]], order: dict[fx.Node, int]) -> fx.Node | None:
    """The nearest earlier node of the same shape and dtype."""
    alike = pool[form] if (form := _form(value)) is not None else []
    return next((n for n in reversed(alike) if order[n] < order[node] and n is not value), None)


def _other_lists(value: list[Any], node: fx.Node, pool: dict[Any, list[fx.Node]], order: dict[fx.Node, int]) -> Iterator[Any]:
    if value[::-1] != value:
        yield value[::-1]
    if len(value) > 1:
        yield value[:-1]
    if value:
        for first in _others(value[0], node, pool, order):
            yield [first, *value[1:]]


_DTYPES = {
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.float8_e5m2: torch.float8_e4m3fn,
    torch.float32: torch.float16,
    torch.bfloat16: torch.float16,
    torch.float16: torch.bfloat16,
}
_WORDS = {
    Granularity.BLOCK_1X128.value: Granularity.BLOCK_128X128.value,
    Granularity.BLOCK_128X128.value: Granularity.BLOCK_1X128.value,
    "auto": "reference",
}


def _other_constant(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + (1 if isinstance(value, int) else 0.5)
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value)
    return _WORDS.get(value) if isinstance(value, str) else None


# -- counting


@dataclasses.dataclass
class Score:
    """The outcome of the changes of graphs under one recipe."""

    seen: int = 0
    unseen: Counter[str] = dataclasses.field(default_factory=Counter)
    """Operation and argument -> changes that `verify` did not notice."""
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    harmless: Counter[str] = dataclasses.field(default_factory=Counter)
    """Of the unseen changes, those that change no result."""

    def try_all(self, work: Work, title: str, per_key: int | None = PER_KEY) -> None:
        """Make each change of a graph in turn. The graph is left as it was."""
        verify(work)
        results = _results(work.graph)
        for mutation in mutations(work, per_key):
            with mutation.made():
                try:
                    verify(work)
                except Exception:  # an error of any kind ends the compilation
                    self.seen += 1
                    continue
                self.unseen[mutation.key] += 1
                self.harmless[mutation.key] += _equal(results, _results(work.graph))
            self.examples.setdefault(mutation.key, f"{title}: {mutation}")
        verify(work)


def score(cases: list[tuple[str, str]], per_key: int | None = PER_KEY) -> dict[str, Score]:
    """Recipe -> what became of the changes of its graphs."""
    found: dict[str, Score] = {}
    for model, recipe in cases:
        with rewritten(model, recipe) as work:
            found.setdefault(recipe, Score()).try_all(work, f"{model}, {recipe}", per_key)
    return found


def _results(graph: fx.Graph) -> list[Any] | str:
    """The results of a graph for random inputs, or the error."""
    torch.manual_seed(1)
    inputs = [_random(node.meta["val"], 1 + i / 8) for i, node in enumerate(graph.find_nodes(op="placeholder"))]
    try:
        out = _AlikeRanks(fx.GraphModule({}, graph)).run(*inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [*torch.utils._pytree.tree_leaves(out), *(i for i in inputs if isinstance(i, torch.Tensor))]


class _AlikeRanks(fx.Interpreter):
    """All ranks have the same. torch 2.11's process group without other ranks leaves what they would send uninitialized."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        collectives = torch.ops._c10d_functional
        if target == collectives.all_gather_into_tensor.default:
            return torch.cat([args[0]] * args[1])
        if target == collectives.reduce_scatter_tensor.default:
            return args[0].chunk(args[2])[0] * args[2]
        return super().call_function(target, args, kwargs)


def _random(value: Any, size: float) -> Any:
    """Sizes differ, so that no amax equals another by chance."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.rand(tuple(value.shape)).add(0.5).mul(size).to(value.dtype)
    is_tensor = isinstance(value, torch.Tensor)
    return torch.arange(value.numel()).view(tuple(value.shape)).to(value.dtype) if is_tensor else value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return all(x.equal(y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@dataclasses.dataclass(frozen=True)
class Unseen:
    """An entry of the list."""

    recipes: list[str]
    """Recipes in whose graphs a change passes unseen."""
    reason: str
    """Why it changes no result; empty until someone has written it."""


def read_unseen() -> dict[str, Unseen]:
    """The list, by operation and argument."""
    return {key: Unseen(**entry) for key, entry in json.loads(UNSEEN.read_text()).items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in ("all", "write"):
        parser.add_argument(f"--{option}", action="store_true")
    given = parser.parse_args()
    if given.all and given.write:
        parser.error("the list is of the sample")
    warnings.simplefilter("ignore")
    every = [pair for pair in itertools.product(MODELS, RECIPES) if recipe_of(*pair) is not None]
    scores = score(every if given.all else pairs(), None if given.all else PER_KEY)
    for recipe, found in scores.items():
        unseen = found.unseen.total()
        print(f"{recipe}: {found.seen + unseen} changes, {unseen} unseen, {found.harmless.total()} change nothing")
        for key, count in sorted(found.unseen.items()):
            print(f"    {count:3} {key}   {found.examples[key]}")
    seen, unseen = sum(s.seen for s in scores.values()), sum(s.unseen.total() for s in scores.values())
    print(f"{seen} of {seen + unseen} changes are seen, {seen / (seen + unseen):.1%}")
    if given.write:
        known = read_unseen()
        keys = sorted({key for found in scores.values() for key in found.unseen})
        entries = {
            key: Unseen([r for r, found in scores.items() if key in found.unseen], known[key].reason if key in known else "")
            for key in keys
        }
        UNSEEN.write_text(json.dumps({key: vars(entry) for key, entry in entries.items()}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
