"""Parameters that gave their values back: same object, shape, dtype and device, and no bytes. Reading one raises an error.

NOTE [hollow Parameters] The FP8 copies, of which the values can be made again, are held by the Parameter itself: they live as
long as it does, whatever becomes of the compiled model. They are in a record that refers to the Parameter, a cycle that the
garbage collector takes; weak references are to the record: NOTE [no weak references to Parameters] in `places.py`. Between
calls of compiled models its class is `HollowParameter`, which lets through what reads no values. During a call it is an
nn.Parameter, because Dynamo guards on the class: what runs eagerly within a call is refused by the storage, where torch's build
can do that (`CAN_REFUSE`), else nothing is released there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from fp8pass.errors import ReleasedWeightError

#: Where the copies of a hollow Parameter are kept on it.
_COPIES = "_fp8pass_copies"
#: Lets every access to the bytes of a storage raise an error. Builds of torch without CUDA do not have it.
_set_message: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
CAN_REFUSE = _set_message is not None

MESSAGE = (
    "this Parameter has no values: fp8_compile(release_frozen=True) keeps FP8 copies of it alone, for the compiled model. To"
    " read or train it: fp8pass.state(compiled).restore_weights(), which gives it their values. To change it: load_state_dict,"
    " or p.data = values. To save the model: fp8pass.export_fp8 or state_dict_fp8, or adapters alone"
)

#: What reads no values, besides names that begin with "is_".
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


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements and no bytes."""
    return type(tensor) is HollowParameter or (tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0)


def _filled(parameter: nn.Parameter, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run what gives a hollow Parameter other values: `p.data = values`, or `p.copy_(values)`, as load_state_dict does."""
    source = args[1]
    if isinstance(source, torch.Tensor) and is_hollow(source):
        if func.__name__ == "copy_" or source.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
            raise ReleasedWeightError(f"{func.__name__}: {MESSAGE}")
        return None  # its own, as `module.to` assigns it
    if func.__name__ == "copy_":
        parameter.data = _empty_like(parameter)
    result = func(*args, **kwargs)
    fill(parameter)
    return result


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def without_bytes(tensor: torch.Tensor, message: str) -> torch.Tensor:
    """A tensor like this one without bytes. Reading them raises an error with the message, where torch's build can do that."""
    empty = _empty_like(tensor)
    empty.untyped_storage().resize_(0)
    if _set_message is not None:
        _set_message(empty.untyped_storage()._cdata, message)
    return empty


def _loaded(tensor: torch.Tensor, values: torch.Tensor, assign: bool = False) -> torch.Tensor:
    """What load_state_dict exchanges a hollow tensor with, where it exchanges tensors instead of writing to them."""
    if is_hollow(values):
        raise ReleasedWeightError(f"module_load: {MESSAGE}")
    return values.detach() if assign else _empty_like(tensor).copy_(values)


def _moves_nowhere(name: str, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it is a conversion to the dtype and the device that the tensor has."""
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


class Refusing:
    """Lets through what reads no values of a hollow tensor; everything else raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls for every operation on such a tensor."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if name in ("__get__", "__set__", "__delete__"):
            own = str(getattr(getattr(func, "__self__", None), "__name__", ""))
            name = own if name == "__get__" or own != "data" else "data="
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data=" or (name == "copy_" and isinstance(first, HollowParameter)):
                return _filled(cast(nn.Parameter, first), func, args, kwargs)
            if name == "module_load" and isinstance(first, HollowParameter):
                return _loaded(first, *args[1:], **kwargs)
            if name in _HARMLESS or (name.startswith("is_") and name not in _READING):
                return func(*args, **kwargs)
            if name in ("detach", "data", "alias") and isinstance(first, torch.Tensor):
                return func(*args, **kwargs).as_subclass(HollowTensor)
            if isinstance(first, torch.Tensor) and _moves_nowhere(name, first, args[1:], kwargs):
                return first
        raise ReleasedWeightError(f"{name}: {MESSAGE}")


class HollowTensor(Refusing, torch.Tensor):
    """What `state_dict()` has of a hollow Parameter, and its `.data`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return _text(self)


class HollowParameter(Refusing, nn.Parameter):
    """A Parameter without values, between calls of compiled models."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return _text(self)


def _text(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__name__}({list(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}, no values)"


def hollow(parameter: nn.Parameter, copies: Iterable[Any]) -> None:
    """Give the storage of a Parameter back; it holds these copies from now on. Tensors that share the storage keep it."""
    parameter.data = without_bytes(parameter, MESSAGE)
    record = _Record(parameter, tuple(copies))
    setattr(parameter, _COPIES, record)
    _all.add(record)


class _Record:
    """What a hollow Parameter holds."""

    def __init__(self, parameter: nn.Parameter, copies: tuple[Any, ...]):
        self.parameter, self.copies = parameter, copies


def copies_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What `hollow` was given; empty for Parameters with values."""
    record: _Record | None = getattr(parameter, _COPIES, None) if is_hollow(parameter) else None
    return () if record is None else record.copies


def all_hollow() -> list[nn.Parameter]:
    """Those of all compiled models."""
    return [record.parameter for record in list(_all) if is_hollow(record.parameter)]


def fill(parameter: nn.Parameter) -> None:
    """A Parameter has values again: it is one as others are."""
    cast(Any, parameter).__class__ = nn.Parameter
    _all.discard(parameter.__dict__.pop(_COPIES, None))


_all: weakref.WeakSet[_Record] = weakref.WeakSet()
"""Of every Parameter that gave its values back, whichever compiled model took them."""
_lock = threading.Lock()


def has_hollow() -> bool:
    """Whether any Parameter has given its values back."""
    return len(_all) > 0


_num_calls = 0


def begin_call() -> None:
    """A call of a compiled model begins, whose guards ask for nn.Parameters."""
    global _num_calls
    with _lock:
        _num_calls += 1
        if _num_calls == 1:
            for parameter in all_hollow():
                cast(Any, parameter).__class__ = nn.Parameter


def end_call() -> None:
    """It has ended."""
    global _num_calls
    with _lock:
        _num_calls -= 1
        if _num_calls == 0:
            for record in list(_all):
                if is_hollow(record.parameter):
                    cast(Any, record.parameter).__class__ = HollowParameter
                else:
                    _all.discard(record)  # which another tensor has, if the two were exchanged
                    fill(record.parameter)
