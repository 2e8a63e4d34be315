"""Values as text that is the same in every process: options and graphs, and the code of users' own recipes.

A user's function goes by its bytecode, its defaults, and the values of all names that the code reads outside of itself, which
are followed in the same way; a class by its methods, its attributes and its bases. Functions and classes of fp8pass, torch,
Triton and the pure part of Python's library go by name.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Packages that a key has the versions or sources of: their classes and functions go by name.
_KNOWN = frozenset({"fp8pass", "lowering", "torch", "triton"})
#: Modules of Python whose functions give equal results for equal arguments, in every process.
_PURE = _names(
    "_operator abc bisect builtins collections copy dataclasses decimal enum fnmatch fractions functools itertools math numbers"
    " operator re statistics string types typing"
)
#: Builtin functions that read what is around them.
_IMPURE = _names("__import__ open input eval exec compile globals locals vars dir id hash breakpoint")
#: The beginnings of torch's builtin functions that read settings, draw numbers or return uninitialized memory.
_IMPURE_OF_TORCH = ("_", "bernoulli", "empty", "get_", "is_", "multinomial", "normal", "poisson", "rand")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
#: Attributes of classes that decide nothing, or follow from the fields of a dataclass.
_SKIPPED = _names(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __slots__ __abstractmethods__ _abc_impl __annotations__"
    " __annotate_func__ __annotations_cache__ __orig_bases__ __parameters__ __dataclass_fields__ __dataclass_params__"
    " __match_args__ __static_attributes__ __firstlineno__"
)
#: Methods that `dataclass` generates, besides `__init__`.
_GENERATED = _names("__eq__ __hash__ __lt__ __le__ __gt__ __ge__ __setattr__ __delattr__")


class Uncacheable(Exception):
    """A value that decides a rewrite has no text that is the same in every process; the text of the error is the reason."""


def words(value: object) -> str:
    """A value as text: equal for equal values, in every process, and for no others. Raises Uncacheable."""
    return _Text().of(value)


class _Text:
    """A text that is being written. A class or function that has been begun goes by its number, which ends cycles."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[int, object]] = {}

    def of(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind in (list, tuple, torch.Size):
            return f"{kind.__name__}[{', '.join(map(self.of, value))}]"
        if kind in (set, frozenset):
            return f"set{sorted(map(self.of, value))}"
        if kind in (dict, types.MappingProxyType):
            return f"{{{', '.join(f'{self.of(k)}: {self.of(v)}' for k, v in value.items())}}}"
        if isinstance(value, enum.Enum):
            return f"{self.of(kind)}.{value.name}"
        if isinstance(value, _SYMBOLS):
            return f"{kind.__name__} {value}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return f"operation {value}"
        if isinstance(value, dist.ProcessGroup):
            return f"ranks {dist.get_process_group_ranks(value)}"
        if isinstance(value, (type, types.FunctionType, types.MethodType, functools.partial)):
            return self._once(value)
        if isinstance(value, _BUILTINS):
            return self._builtin(value)
        if dataclasses.is_dataclass(value):
            return f"{self.of(kind)}{self.of({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})}"
        raise Uncacheable(f"{_said(value)} has no text that is the same in every process")

    # -- code

    def _once(self, value: Any) -> str:
        known = self._begun.get(id(value))
        if known is not None:
            return f"#{known[0]}"
        self._begun[id(value)] = len(self._begun), value
        if isinstance(value, functools.partial):
            return f"partial {self.of([value.func, value.args, value.keywords])}"
        if isinstance(value, types.MethodType):
            return f"method {self.of([value.__func__, value.__self__])}"
        if isinstance(value, type):
            return _name(value) if _root(value.__module__) in _KNOWN | _PURE else self._class(value)
        root = _root(value.__globals__.get("__name__"))
        if root == "torch":
            raise Uncacheable(f"{_said(value)}, which it calls, may return something else in another process")
        if root in _KNOWN | _PURE:
            return f"{_name(value)} {self.of(cells(value))}"
        return self._function(value)

    def _builtin(self, value: Any) -> str:
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        if isinstance(owner, types.ModuleType) or owner is None:
            module = value.__module__ or "torch"  # torch's own have none
        else:
            module = (owner if isinstance(owner, type) else type(owner)).__module__
        is_impure = module == "builtins" and value.__qualname__ in _IMPURE
        is_impure |= _root(module) == "torch" and value.__name__.startswith(_IMPURE_OF_TORCH)
        if _root(module) not in _KNOWN | _PURE or is_impure:
            raise Uncacheable(f"{_said(value)}, which it calls, may return something else in another process")
        return f"builtin {module}.{value.__qualname__}"

    def _class(self, value: type) -> str:
        """A user's class: its attributes, and its bases."""
        is_generated = dataclasses.is_dataclass(value) and "__dataclass_params__" in vars(value)
        own = {
            name: self._member(held)
            for name, held in vars(value).items()
            if name not in _SKIPPED and not (is_generated and _follows_from_fields(value, name, held))
        }
        fields = [(f.name, _default(f)) for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        return f"class {value.__qualname__} {self.of([value.__bases__, fields])} {own}"

    def _member(self, held: Any) -> str:
        if isinstance(held, (staticmethod, classmethod)):
            return f"{type(held).__name__} {self.of(held.__func__)}"
        if isinstance(held, property):
            return f"property {self.of([held.fget, held.fset, held.fdel])}"
        if isinstance(held, functools.cached_property):
            return f"cached_property {self.of(held.func)}"
        if isinstance(held, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return "slot"
        return self.of(held)

    def _function(self, value: types.FunctionType) -> str:
        """A user's function: its code, its defaults, and the values of what the code names outside of itself."""
        named = dict(_read_by(value.__code__, value.__globals__))
        attributes = {k: v for k, v in vars(value).items() if k != "__wrapped__"}
        about = [value.__defaults__, value.__kwdefaults__, cells(value), named, attributes]
        return f"function {self._code(value.__code__)} {self.of(about)}"

    def _code(self, code: types.CodeType) -> str:
        constants = [self._code(c) if isinstance(c, types.CodeType) else self.of(c) for c in code.co_consts]
        arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return repr((code.co_code.hex(), constants, arguments, names, code.co_exceptiontable.hex()))


def cells(function: types.FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that a function reads, with their values."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs}


def _read_by(code: types.CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global names that code reads, with attributes of modules followed to what is no module, and their values."""
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME" and _root(instruction.argval) not in (_KNOWN | _PURE) - {"torch", "triton"}:
            raise Uncacheable(f"{code.co_qualname} imports {instruction.argval} when it runs: import it at the top of its file")
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        name = instruction.argval
        value = variables.get(name, getattr(builtins, name, None))
        for following in instructions[i + 1 :]:
            if not isinstance(value, types.ModuleType) or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            name, value = f"{name}.{following.argval}", getattr(value, following.argval, None)
        if isinstance(value, types.ModuleType):
            raise Uncacheable(f"{code.co_qualname} passes the module {value.__name__} on, so its use is not known")
        yield name, value
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _read_by(constant, variables)


def _follows_from_fields(cls: type, name: str, held: Any) -> bool:
    """True for a method that `dataclass` generated."""
    if name == "__init__":
        return bool(vars(cls)["__dataclass_params__"].init)
    return name in _GENERATED and isinstance(held, types.FunctionType) and held.__code__.co_filename == "<string>"


def _default(field: dataclasses.Field[Any]) -> Any:
    missing = dataclasses.MISSING
    return [None if found is missing else [found] for found in (field.default, field.default_factory)]


def _root(module: object) -> str:
    return str(module).partition(".")[0]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _said(value: Any) -> str:
    """A value in the words of a reason, without addresses."""
    if isinstance(value, (type, types.FunctionType, *_BUILTINS)):
        return f"{value.__module__}.{value.__qualname__}" if value.__module__ else value.__qualname__
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
