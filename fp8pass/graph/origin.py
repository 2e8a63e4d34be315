"""Origins of nodes in the user's model: module path, role in differentiation, source line; and names of quantized tensors.

All of it is metadata that Dynamo and AOTAutograd leave on nodes; this is the one place that knows its form.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Literal, get_args

from torch import fx
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput, SubclassGetAttrAOTInput

_ROOT = re.compile(r"^(?:L|G)\['([^']*)'\]")
_ITEM = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]")
#: A module whose name is no identifier, where `functional_call` put plain tensors for its Parameters: innermost first.
_GETATTR = re.compile(r"getattr\(((?:(?!getattr\().)*?), '([^']*)'\)")
_CONTAINERS = re.compile(r"\.(?:__dict__|_modules|_parameters|_buffers)(?=\.|$)")
#: A method of an object belongs to it: `self.forward.__self__` is `self`, and a method in a variable is its object.
_METHODS = re.compile(r"(?:\.\w+)??(?:\._torchdynamo_inline)?\.__self__(?=\.|$)")
_PLAIN = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

#: In `meta["custom"]`: the path of the module that made a node.
MODULE_FQN = "module_fqn"


@dataclasses.dataclass(frozen=True)
class Path:
    """A dotted path below a variable of the compiled frame: `layers.0.attn` below `self`."""

    root: str
    below: str

    def __str__(self) -> str:
        return joined(self.root, self.below)


def joined(*parts: str) -> str:
    """A dotted path from its parts, of which "" is the place itself."""
    return ".".join(part for part in parts if part)


def begins(beginning: str, path: str) -> bool:
    """True if a dotted path is another one, "" included, or below it."""
    return not beginning or path == beginning or path.startswith(f"{beginning}.")


@functools.lru_cache(maxsize=8192)
def parse_path(source: str) -> Path | None:
    """The path in Dynamo's name of a module or tensor, such as "L['self']._modules['a'].weight"."""
    found = 1
    while found:
        source, found = _GETATTR.subn(r"\1.\2", source)
    match = _ROOT.match(source)
    if match is None:
        return None
    rest = _ITEM.sub(lambda m: "." + next(g for g in m.groups() if g is not None), source[match.end() :])
    return Path(match.group(1), _METHODS.sub("", _CONTAINERS.sub("", rest)).lstrip("."))


def module_path(node: fx.Node) -> Path | None:
    """The innermost module whose forward (or, for a gradient, whose forward's backward) made this node."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, *_ in reversed(list(stack.values())):
        # torch.export and make_fx name a module without a variable: "layers.0.wq".
        parsed = parse_path(path) or (Path("self", path) if _PLAIN.fullmatch(path) else None)
        if parsed is not None:
            return parsed
    module = annotated_module(node)
    return None if module is None else Path("self", module)


def maker_path(node: fx.Node) -> Path | None:
    """The module that made a node, or what the node was made of."""
    while (path := module_path(node)) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return path


def annotated_module(node: fx.Node) -> str | None:
    """The path in the user's model that `torch.fx.traceback.annotate` left on the node, as torchtitan's tracer uses it."""
    custom: Any = node.meta.get("custom") or {}
    module = custom.get(MODULE_FQN)
    return module if isinstance(module, str) and module else None


def source_line(node: fx.Node) -> str:
    """ "file:line" of the user's code that made the node, or "" where tracing kept none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""


def input_index(placeholder: fx.Node) -> int | None:
    """Position of a joint graph's placeholder among the inputs of Dynamo's graph; None for tangents, the sizes of a DTensor and
    tokens of effects, which AOTAutograd counts on their own."""
    described = placeholder.meta.get("desc")
    while isinstance(described, SubclassGetAttrAOTInput):
        described = described.base
    return described.idx if isinstance(described, PlainAOTInput) else None


def described_parameter(placeholder: fx.Node) -> str | None:
    """The Parameter or buffer that an input holds, where AOTAutograd's descriptor names it; None for every other input."""
    described = placeholder.meta.get("desc")
    while isinstance(described, SubclassGetAttrAOTInput):
        described = described.base
    return described.target if isinstance(described, (ParamAOTInput, BufferAOTInput)) else None


def is_tangent(node: fx.Node) -> bool:
    """Tell whether a placeholder is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_gradient(output: Any) -> bool:
    """Tell whether AOTAutograd's descriptor of an output says that it is a gradient; None: of an input that needs none."""
    while (base := getattr(output, "base", None)) is not None:
        output = base
    return output is None or "Grad" in type(output).__name__


def is_subgraph(graph: fx.Graph) -> bool:
    """Tell whether a graph is the branch or body of a control-flow operation: AOTAutograd describes only its own outputs."""
    return any("desc" not in output.meta for output in graph.find_nodes(op="output"))


# -- Names of quantized tensors: data with one text form, which `str` writes and `TensorName.parse` reads.


Kind = Literal["input", "weight", "grad_output", "saved"]
"""The part of an operand in its GEMM; "saved" for a value that the forward saves for the backward."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_LABEL = re.compile(rf"(?P<kind>{'|'.join(KINDS)})(?:#(?P<index>\d+))?(?:@(?P<format>float8_\w+))?(?:@recipe(?P<recipe>\d+))?")


#: A number in a path: that of a layer, or of an instance of a function's variable (`layer#1`).
NUMBER = re.compile(r"(?<![^.#])\d+(?![^.])")
#: In the path of a LoRA adapter of peft's: `q_proj.lora_A.default`.
ADAPTER = ".lora_"


def family(module: str) -> str:
    """A module's path with numbers as `*`: the same for equal layers, and a pattern that matches them all."""
    return NUMBER.sub("*", module)


@dataclasses.dataclass(frozen=True)
class TensorName:
    """A quantized tensor: the module and the kind of the GEMM operand that it is named after."""

    module: str  # Path of the module in the user's model.
    kind: Kind
    index: int = 1  # Counts the different tensors of one module and kind, from 1: a module that is called twice has two.
    format: str | None = None  # The FP8 dtype, such as "float8_e5m2", where the same tensor is also quantized to another one.
    recipe: int | None = None
    """Position of the tensor's recipe among those that keep state, where it is not the one that the rules give to the GEMM that
    the tensor is named after."""
    path: Path | None = dataclasses.field(default=None, compare=False, repr=False)
    """The module as the compiled frame names it; None where the text was parsed, and outside of any module."""

    def __str__(self) -> str:
        index = f"#{self.index}" if self.index > 1 else ""
        format_ = f"@{self.format}" if self.format else ""
        recipe = "" if self.recipe is None else f"@recipe{self.recipe}"
        return f"{self.module}:{self.kind}{index}{format_}{recipe}"

    @classmethod
    def parse(cls, text: str) -> TensorName:
        """The name that `str` wrote; raises ValueError for any other text."""
        module, colon, label = text.rpartition(":")
        match = _LABEL.fullmatch(label)
        if not colon or not module or match is None:
            raise ValueError(f"{text!r} is not the name of a quantized tensor; one looks like 'layers.0.attn.wq:input'")
        kind = next(k for k in KINDS if k == match["kind"])
        recipe = None if match["recipe"] is None else int(match["recipe"])
        return cls(module, kind, int(match["index"] or 1), match["format"], recipe)

    def placed(self, module: str) -> TensorName:
        """The name of this tensor in another instance of the module."""
        return dataclasses.replace(self, module=module)
