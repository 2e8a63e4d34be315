"""What lies between a cast and the GEMM that reads its copy, checked: moves alone, from exactly the outputs that the plan says.

Copies travel through all-gathers, rows are taken into slots, GEMMs in high precision read dequantized values, gathers take the
place of scatters.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fp8pass.errors import InvariantError
from fp8pass.graph.calls import arguments_of, maker_of
from fp8pass.graph.cursor import is_pinned
from fp8pass.graph.gathers import Gather
from fp8pass.graph.moves import MOVES
from fp8pass.graph.permutations import Scatter
from fp8pass.graph.values import value_of
from fp8pass.schemes.copies import Cast, Copy, Quantized, padding_of
from lowering.operation import NAMESPACE

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ops = torch.ops.lowering
prims = torch.ops.prims

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_TRAVEL = MOVES | {
    aten.view.dtype,
    aten.constant_pad_nd.default,
    c10d.all_gather_into_tensor.default,
    c10d.wait_tensor.default,
}
#: What gives the scales of blocks the shape of values.
_SPREAD = MOVES | {aten.expand.default, aten.select.int}
_COLLECTIVES = (c10d.all_gather_into_tensor.default, c10d.all_reduce.default)


def check_travelled(copy: Copy, made: Quantized) -> None:
    """The data of a copy that was gathered, and its scales if they travelled too, are moved outputs of its cast."""
    ready = maker_of(made.data)[0]
    parts = {"data": made.data, "scales": made.scale_inv}
    if ready.target not in _TRAVEL:  # made ready for the GEMM after the gather
        parts = dict(zip(parts, ready.all_input_nodes, strict=True))
    else:
        _check_orientation(copy, made.data)
    if {"scale", "scales"} & arguments_of(made.maker).keys():
        del parts["scales"]  # one for all ranks
    # Operations that make both copies at once have the data and the scales of the columnwise one last.
    outputs, block = len(made.maker.meta["val"]), copy.quantization.block
    first = 2 if copy.columnwise and outputs == 4 and (block is None or block[0] != block[1]) else 0
    for i, (name, part) in enumerate(parts.items()):
        is_alone = isinstance(made.maker.meta["val"], torch.Tensor)
        wanted = (made.maker, None if is_alone else first + i)
        for leaf in leaves(part, _TRAVEL, pad_value=0 if i == 0 else 1):
            if leaf.target is ops.packed.default:
                _check_unpacked(part, leaf, made.maker, first + i)
            elif maker_of(leaf) != wanted:
                raise InvariantError(f"{part.name}, the {name} of {copy.name}, are made of {leaf.name}, no output of its cast")


def _check_unpacked(part: fx.Node, packed: fx.Node, maker: fx.Node, output: int) -> None:
    """What was cut out of the bytes of all results of a cast, which travelled together, is this one of them."""
    sizes = [value.numel() * value.element_size() for value in maker.meta["val"]]
    start = sum(sizes[:output])
    found, pending = set(), [part]
    while pending:
        node = pending.pop()
        if node.target is aten.slice.Tensor and _arrived(node.all_input_nodes[0]) is packed:
            found.add(node.args[1:])
        elif node is not packed:
            pending += node.all_input_nodes
    if packed.args != (maker,) or found != {(1, start, start + sizes[output])}:
        raise InvariantError(f"{part.name} takes {sorted(found)} of {packed.name}, no output of its cast")


def _arrived(node: fx.Node) -> fx.Node | None:
    """What each rank sent, where a node is all of it with a row per rank."""
    steps = (aten.reshape.default, c10d.wait_tensor.default, c10d.all_gather_into_tensor.default)
    for step in steps:
        if node.target is not step:
            return None
        node = node.all_input_nodes[0]
    return node


def reduced_of(amax: Any, gather: Gather) -> Any:
    """What is reduced to the largest of the gather's ranks, as bits; None where an amax is not made so."""
    for step in (aten.view.dtype, c10d.wait_tensor.default, c10d.all_reduce.default):
        if amax.target is not step or (step is c10d.all_reduce.default and amax.args[1:] != ("max", gather.group)):
            return None
        amax = amax.args[0]
    return amax


def are_of_columns(amaxes: Any, gather: Gather) -> bool:
    """Whether these are the amaxes of the columns of all ranks' shards, alone or with all Parameters' (`reductions.py`)."""
    is_part = amaxes.target is aten.slice.Tensor
    bits = reduced_of(amaxes.args[0] if is_part else amaxes, gather)
    if is_part and bits is not None:
        if bits.target is not aten.cat.default or amaxes.args[1] != 0:
            return False
        start, found = 0, None
        for one in bits.args[0]:
            end = start + value_of(one).shape[0]
            found = one if (start, end) == tuple(amaxes.args[2:]) else found
            start = end
        bits = found
    if bits is None or bits.target is not aten.view.dtype or bits.args[0].target is not ops.amax_rowwise.default:
        return False
    measured = arguments_of(bits.args[0])
    if (measured["rowwise"], measured["columnwise"], len(measured["xs"])) != (False, True, 1):
        return False
    (matrix,) = measured["xs"]
    return (matrix.all_input_nodes[0] if matrix.target is aten.reshape.default else matrix) is gather.source


def check_turned(cast: Cast, turned: Quantized, held: Quantized) -> None:
    """A copy has the bytes of the other orientation, without its padding, and one scale or the transposed scales of blocks."""
    (copy,), (layout,) = cast.copies, cast.layouts
    if held.copy.columnwise == copy.columnwise or held.quantization != copy.quantization:
        raise InvariantError(f"{turned.data.name} is turned out of {held.data.name}, which is no other orientation of it")
    _check_turned(turned.data, held.data, 1)
    padded = padding_of(copy.value, layout)
    outer, inner = (copy.value.cols, copy.value.rows) if copy.columnwise else (copy.value.rows, copy.value.cols)
    wanted = None if padded is None else (outer + padded[3], inner + padded[1])
    if tuple(value_of(turned.data).shape[-2:]) != wanted:
        raise InvariantError(f"{turned.data.name} is {list(value_of(turned.data).shape)}, the plan says {wanted}")
    is_split = copy.quantization.block is not None
    if is_split or turned.scale_inv is not held.scale_inv:
        _check_turned(turned.scale_inv, held.scale_inv, int(is_split))
    tag = str(turned.data.meta.get("partitioner_tag", ""))
    if tag and is_pinned(turned.data) != cast.is_pinned:
        raise InvariantError(f"{turned.data.name} is tagged {tag}, the plan says {cast.is_pinned=}")


def _check_turned(node: fx.Node, until: fx.Node, times: int) -> None:
    """A node is made of another by moves, among them so many transposes of the last two dimensions."""
    found, start = 0, node
    while node is not until:
        num_dims = value_of(node).dim()
        is_turn = node.target is ops.transposed_copy.default
        if node.target is aten.permute.default:
            is_turn = node.args[1] == [*range(num_dims - 2), num_dims - 1, num_dims - 2]
        elif node.target is aten.constant_pad_nd.default:
            check_padding(node, 0)
        elif node.target is aten.slice.Tensor:
            if node.args[2] != 0:
                raise InvariantError(f"{node.name} cuts off what is no padding")
        elif node.target not in (aten.clone.default, aten.view.dtype) and not is_turn:
            raise InvariantError(f"{start.name} is not moved out of {until.name}, the plan says it is")
        found += is_turn
        node = node.all_input_nodes[0]
    if found != times:
        raise InvariantError(f"{start.name} is turned {found} times, the plan says {times}")


def _check_orientation(copy: Copy, data: fx.Node) -> None:
    """The moves of the value, and then, of a columnwise copy alone, a transpose."""
    node, value, is_turned = data, copy.value, False
    while node.target in (aten.view.dtype, aten.clone.default, aten.constant_pad_nd.default):
        node = node.all_input_nodes[0]
    if copy.columnwise:
        is_turned = node.target is aten.permute.default and node.args[1] == [1, 0]
        node = node.all_input_nodes[0]
    wanted = value.root.target if value.reshape is None else aten.reshape.default
    if is_turned != copy.columnwise or not (node.target is wanted or wanted in (aten.clone.default, aten.view.dtype)):
        raise InvariantError(f"{data.name}, a {'columnwise' if copy.columnwise else 'rowwise'} {copy.name}, is not turned so")


def check_slots(copy: Copy, part: fx.Node) -> None:
    """A rowwise copy of rows in groups, or its scales: the rows of the cast's output that the slots name."""
    groups = copy.value.groups
    wanted: list[Any] = [] if groups is None or groups.index is None or copy.columnwise else [[groups.index]]
    found: list[Any] = []
    node, is_turned = part, False
    while node.target in (aten.index.Tensor, aten.view.dtype, aten.select.int, aten.permute.default):
        if node.target is aten.permute.default:
            is_turned = not is_turned
        elif node.target is aten.select.int and node.args[1:] != (0, 0):  # rows are cast as a batch of one
            raise InvariantError(f"{node.name} takes {node.args[1:]} of {node.all_input_nodes[0].name}, the plan says (0, 0)")
        elif node.target is aten.index.Tensor:
            indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
            if is_turned:  # scales that lie by blocks
                indices = indices[1:] if indices[0] is None else [None, *indices]
            found.append(indices)
        node = node.all_input_nodes[0]
    if found != wanted or is_turned:
        raise InvariantError(f"{part.name} takes the rows {found}, the plan says {wanted}")


def check_dequantized(name: str, values: fx.Node, made: Quantized) -> None:
    """Values are the data of a copy, times its own scales. name: what reads them, for errors."""
    read: Any = values.args
    if values.target is not aten.mul.Tensor or read[0].target is not prims.convert_element_type.default:
        raise InvariantError(f"{name}: {values.name} is not the product of values and scales")
    if read[0].args != (made.data, torch.float32):
        raise InvariantError(f"{name}: {read[0].name} is not {made.data.name} in float32, which the plan dequantizes")
    found: set[fx.Node] = set()
    for leaf in leaves(read[1], _SPREAD, until=made.scale_inv):
        if leaf.target is ops.scale_values_mxfp8.default:
            if leaf.args[0] is not made.data:
                raise InvariantError(f"{name}: {leaf.name} has the layout of {leaf.args[0]}, not of {made.data.name}")
            found.add(leaf.all_input_nodes[1])
        else:
            found.add(leaf)
    if found != {made.scale_inv}:
        names = ", ".join(sorted(n.name for n in found))
        raise InvariantError(f"{name}: {values.name} has the scales {names}, the plan says {made.scale_inv.name}")


def check_permuted(permuted: Mapping[fx.Node, Scatter], nodes: Collection[fx.Node], now: Mapping[fx.Node, fx.Node]) -> None:
    """Each gather in the place of a scatter reads the scatter's rows, by the inverse of its index. now: node -> what holds its
    result now."""
    for node, scatter in permuted.items():
        if node in nodes and node.args != (now.get(scatter.rows, scatter.rows), [scatter.index]):
            raise InvariantError(f"{node.name} gathers {node.args}, in the place of rows of {scatter.rows.name}")


def check_reads(inserted: Iterable[fx.Node]) -> None:
    """Collectives are read once they are done, and positions belong to vectors."""
    for node in inserted:
        is_wait = node.target is c10d.wait_tensor.default
        if any((read.target in _COLLECTIVES) != is_wait for read in node.all_input_nodes):
            raise InvariantError(f"{node.name} {'waits for' if is_wait else 'reads'} {node.all_input_nodes[0].name}")
        operation = NAMESPACE.find(node.target)
        for name, place in () if operation is None else operation.indexed.items():
            given: Any = node.kwargs.get(f"{name}_index")
            if given is None or place >= len(node.args):
                continue
            read: Any = node.args[place]
            pairs = zip(read, given, strict=True) if isinstance(given, (list, tuple)) else ((read, given),)
            for vector, index in pairs:
                if index >= 0 and not (value_of(vector).dim() == 1 and index < value_of(vector).shape[0]):
                    raise InvariantError(f"{node.name} reads position {index} of {vector.name} {value_of(vector).shape}")


def check_padding(node: fx.Node, value: float) -> None:
    """A node that pads does so at the ends, with this value."""
    amounts: Any = node.args[1]
    fill = (*node.args[2:], 0)[0]
    if any(amounts[::2]) or fill != value:
        raise InvariantError(f"{node.name} pads by {amounts} with {fill}, the plan says at the ends, with {value}")


def leaves(
    node: fx.Node, steps: Collection[Any], until: fx.Node | None = None, pad_value: float | None = None
) -> dict[fx.Node, None]:
    """What a node is made of by these steps. until: a node that ends a way, whatever it is. pad_value: see `check_padding`."""
    found: dict[fx.Node, None] = {}
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        is_output = node.target is operator.getitem and node.all_input_nodes[0].target not in _SPLITS
        if node is until or is_output or node.target not in steps:
            found[node] = None
            continue
        if node.target is aten.constant_pad_nd.default and pad_value is not None:
            check_padding(node, pad_value)
        read: Any = node.args[0]  # what follows are sizes
        pending += read if isinstance(read, (list, tuple)) else [read]
    return found
