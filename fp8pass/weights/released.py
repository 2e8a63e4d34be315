"""Parameters without values: released ones, of which FP8 copies alone are left, and those that FSDP2 has gathered in FP8.

NOTE [released Parameters] A released Parameter is the same object, with shape, dtype and device, and no bytes. Reading one
raises an error. The FP8 copies, of which the values can be made again, are held by the Parameter itself: they live as long as
it does, whatever becomes of the compiled model. They are in a record that refers to the Parameter, a cycle that the garbage
collector takes; weak references are to the record: NOTE [no weak references to Parameters] in `parameters.py`. Between calls of
compiled models that hold it, its class is `ReleasedParameter`, which lets through what reads no values. During a call it is an
nn.Parameter, because Dynamo guards on the class: what runs eagerly within a call is refused by the storage, where torch's build
can do that (`CAN_REFUSE`), else nothing is released there.

NOTE [withheld values] While FSDP2 has gathered the FP8 copies of a Parameter alone, compiled graphs read these, and the values
that they stand for are not the Parameter's own. So it has none, and where torch's build can refuse every access to a storage,
no memory either: reading it raises an error. Builds without CUDA cannot refuse: there it is NaN. Between FSDP2's frees and
gathers it has its usual memory again, because a gather may come without our hooks, which other shards do not have.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from fp8pass.errors import ReleasedWeightError
from fp8pass.inputs import listen

#: Lets every access to the bytes of a storage raise an error. Builds of torch without CUDA do not have it.
_set_message: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
CAN_REFUSE = _set_message is not None

MESSAGE = (
    "this Parameter has no values: fp8_compile(release_frozen=True) keeps only FP8 copies of it, for the compiled model. To"
    " read or train it: fp8pass.state(compiled).restore_weights(), which gives it their values, rounded to FP8. To change it:"
    " load_state_dict, or p.data = values. To save the model: fp8pass.export_fp8 or state_dict_fp8, or adapters alone"
)
WITHHELD = (
    "this Parameter has no values now: fp8_compile(fsdp_gather='fp8') gathered only its FP8 copies, for the compiled graphs."
    " Read it between steps. To read it in a hook of its module, register the hook before the first forward: then the module's"
    " Parameters are gathered in high precision. Where its module ran eagerly at the recompile limit, raise"
    " torch._dynamo.config.recompile_limit. Otherwise leave fsdp_gather out"
)

#: Reads no values; nor do names that begin with "is_", but for `_READING`.
# fmt: off
_HARMLESS = frozenset({
    "shape", "dtype", "device", "layout", "requires_grad", "requires_grad_", "grad", "grad_fn", "grad_dtype", "ndim",
    "size", "stride", "dim", "numel", "nelement", "element_size", "itemsize", "nbytes", "storage_offset", "get_device",
    "untyped_storage", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "register_hook",
    "register_post_accumulate_grad_hook", "__len__", "_has_compatible_shallow_copy_type", "empty_like", "zeros_like",
    "ones_like", "rand_like", "randn_like",
})
# fmt: on
_READING = frozenset({"is_nonzero", "is_pinned", "is_set_to", "is_shared"})
_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}


def is_released(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has elements and no bytes."""
    return type(tensor) is ReleasedParameter or (tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and device without content, of a class of torch's own."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _without_bytes(tensor: torch.Tensor, message: str) -> torch.Tensor:
    """A tensor like this one without bytes. Reading them raises an error with the message, where torch's build can do that."""
    empty = empty_like(tensor)
    empty.untyped_storage().resize_(0)
    if _set_message is not None:
        _set_message(empty.untyped_storage()._cdata, message)
    return empty


# -- released Parameters


class _Refusing:
    """Lets through what reads no values of a released tensor; everything else raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if name in ("__get__", "__set__", "__delete__"):
            own = str(getattr(getattr(func, "__self__", None), "__name__", ""))
            name = own if name == "__get__" or own != "data" else "data="
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data=" or (name == "copy_" and isinstance(first, ReleasedParameter)):
                return _assigned(cast(nn.Parameter, first), func, args, kwargs)
            if name == "module_load" and isinstance(first, ReleasedParameter):
                return _loaded(first, *args[1:], **kwargs)
            if name in _HARMLESS or (name.startswith("is_") and name not in _READING):
                return func(*args, **kwargs)
            if name in ("detach", "data", "alias") and isinstance(first, torch.Tensor):
                return func(*args, **kwargs).as_subclass(ReleasedTensor)
            if isinstance(first, torch.Tensor) and _moves_nowhere(name, first, args[1:], kwargs):
                return first
        raise ReleasedWeightError(f"{name}: {MESSAGE}")

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}, no values)"


class ReleasedTensor(_Refusing, torch.Tensor):  # type: ignore[misc]
    """An entry of `state_dict()` for a released Parameter, and its `.data`."""


class ReleasedParameter(_Refusing, nn.Parameter):  # type: ignore[misc]
    """A Parameter without values, between calls of compiled models."""


def _assigned(parameter: nn.Parameter, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a released Parameter other values: `p.data = values`, or `p.copy_(values)`, as load_state_dict does."""
    source = args[1]
    if isinstance(source, torch.Tensor) and is_released(source):
        if func.__name__ == "copy_" or source.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            raise ReleasedWeightError(f"{func.__name__}: {MESSAGE}")
        return None  # its own, as `module.to` assigns it
    if func.__name__ == "copy_":
        parameter.data = empty_like(parameter)
    result = func(*args, **kwargs)
    _forget(parameter)
    return result


def _loaded(tensor: torch.Tensor, values: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """The tensor with which load_state_dict exchanges a released one, where it exchanges tensors instead of writing to them."""
    if is_released(values):
        raise ReleasedWeightError(f"module_load: {MESSAGE}")
    return values.detach() if assign else empty_like(tensor).copy_(values)


def _moves_nowhere(name: str, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    """Tell whether it is a conversion to the dtype and the device that the tensor has."""
    if name == "to" and not (args and isinstance(args[0], torch.Tensor)):
        parsed: Any = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        device, dtype, _, memory_format = parsed
        is_copy = bool(kwargs.get("copy")) or memory_format is not None
    elif name in _DTYPES or name in ("cpu", "cuda"):
        given = args[0] if args else kwargs.get("device")
        device = torch.empty(0, device=name if given is None else given).device if name in ("cpu", "cuda") else None
        dtype, is_copy = _DTYPES.get(name), False
    else:
        return False
    is_here = device is None or device == tensor.device or (device.index is None and device.type == tensor.device.type)
    return is_here and dtype in (None, tensor.dtype) and not is_copy


#: Attributes of Parameters: the record of a released one; of one that FSDP2 gathers in FP8, the memory that FSDP2 allocates,
#: gathers into and frees, with memory of no bytes where reading that raises, and whether it has no values now.
_COPIES, _MEMORY, _WITHHELD = "_fp8pass_copies", "_fp8pass_memory", "_fp8pass_is_withheld"


@dataclasses.dataclass(eq=False)
class ReleasedRecord:
    """The copies that a released Parameter holds."""

    parameter: nn.Parameter
    copies: tuple[Any, ...]
    num_calls: int = 0  # Calls that run now of models that hold it.


_all: weakref.WeakSet[ReleasedRecord] = weakref.WeakSet()  # The records of the released Parameters of all compiled models.
_new: list[ReleasedRecord] = []  # Those of no model of a call that runs, nn.Parameters until all calls have ended.
_num_changes = 0
_num_calls = 0
_is_used = False
_lock = threading.Lock()


def note_use() -> None:
    """Take note of a compiled model that may release Parameters, from now on."""
    global _is_used
    _is_used = True


def is_used() -> bool:
    """Tell whether Parameters may be released in this process, now or later: where not, calls need not look for any."""
    return _is_used


def release(parameter: nn.Parameter, copies: Iterable[Any]) -> None:
    """Give the storage of a Parameter back, in a call; it holds these copies from now on. Tensors that share the storage keep
    it."""
    global _num_changes
    parameter.data = _without_bytes(parameter, MESSAGE)
    record = ReleasedRecord(parameter, tuple(copies))
    setattr(parameter, _COPIES, record)
    _all.add(record)
    _new.append(record)
    _num_changes += 1


def copies_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """The copies that a released Parameter holds; empty for Parameters with values."""
    record: ReleasedRecord | None = getattr(parameter, _COPIES, None) if is_released(parameter) else None
    return () if record is None else record.copies


def restore(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a released Parameter have values again."""
    _forget(parameter)
    parameter.data = values


def _forget(parameter: nn.Parameter) -> None:
    cast(Any, parameter).__class__ = nn.Parameter
    _all.discard(parameter.__dict__.pop(_COPIES, None))


def any_released() -> bool:
    """Tell whether any Parameter has given its values back."""
    return _is_used and len(_all) > 0


def records() -> list[ReleasedRecord]:
    """The records of the released Parameters of all compiled models."""
    return list(_all)


def num_changes() -> int:
    """A number that is raised whenever a model may hold other released Parameters than before."""
    return _num_changes


def begin_call(records: Sequence[ReleasedRecord]) -> None:
    """Let the guards of a call find nn.Parameters in its model."""
    global _num_calls
    if _all:
        listen([_before_tracing])
    with _lock:
        _num_calls += 1
        for record in records:
            record.num_calls += 1
            if is_released(record.parameter):
                cast(Any, record.parameter).__class__ = nn.Parameter


def _before_tracing(_: Any) -> None:
    """Let Dynamo find nn.Parameters in other models, too, in a call: this one may have got a Parameter of theirs."""
    global _num_changes
    with _lock:
        others = [r for r in list(_all) if type(r.parameter) is ReleasedParameter] if _num_calls else []
        for record in others:
            cast(Any, record.parameter).__class__ = nn.Parameter
        _new.extend(others)
        _num_changes += bool(others)


def end_call(records: Sequence[ReleasedRecord]) -> None:
    """Restore the refusing class of Parameters whose last call has ended."""
    global _num_calls
    with _lock:
        _num_calls -= 1
        for record in records:
            record.num_calls -= 1
        ended = [record for record in records if not record.num_calls]
        if not _num_calls:
            ended += _new
            _new.clear()
        for record in ended:
            if is_released(record.parameter):
                cast(Any, record.parameter).__class__ = ReleasedParameter
            else:
                _all.discard(record)  # which another tensor has, if the two were exchanged
                _forget(record.parameter)


# -- Parameters that FSDP2 gathers in FP8


def withhold(parameter: torch.Tensor) -> None:
    """Refuse every read of a gathered Parameter: see NOTE [withheld values]."""
    if not hasattr(parameter, _MEMORY):
        nothing = _without_bytes(parameter, WITHHELD) if CAN_REFUSE else None
        setattr(parameter, _MEMORY, (parameter.detach(), nothing))
    setattr(parameter, _WITHHELD, True)
    _, nothing = getattr(parameter, _MEMORY)
    if nothing is not None:
        parameter.data = nothing
    else:
        write(parameter, torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device))


def is_withheld(parameter: torch.Tensor) -> bool:
    """Tell whether only FP8 copies of a Parameter are gathered now."""
    return bool(getattr(parameter, _WITHHELD, False))


def give_back(parameter: torch.Tensor) -> None:
    """Let a Parameter have the memory again that FSDP2 gathers it into, allocated or not."""
    if is_withheld(parameter):
        setattr(parameter, _WITHHELD, False)
        own, nothing = getattr(parameter, _MEMORY)
        if nothing is not None:
            parameter.data = own


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy as FSDP2 does: a backward that saved the target is meant to find the new values."""
    autograd: Any = torch.autograd
    with autograd._unsafe_preserve_version_counter(target):
        target.copy_(values)
