"""One object per operation: its reference is the specification, and everything else is attached to it.

    cast = operation(reference.cast, checks=[check_matrix])     the schema is inferred from the reference's signature

    @cast.fake                                                  shapes and dtypes, for tracing
    def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    cast.lazy_provider(runs_kernels, "lowering.tensorwise.kernels")      who computes it where

Fakes and checks name the arguments that they need, by the reference's names; providers have its whole signature. In all of
them `**options` may stand for the keyword-only arguments, and in providers `*operands` for the others. What does not fit raises
at import. Operations are registered under `torch.ops.lowering`, so that graphs can hold them; none has an autograd formula,
because the graphs that hold them are differentiated already, nor a forward-mode derivative: a tangent is refused, not dropped.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

#: The arguments that `*operands` and `**options` stand for.
_REST_OF: dict[Any, Any] = {
    inspect.Parameter.VAR_POSITIONAL: inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_KEYWORD: inspect.Parameter.KEYWORD_ONLY,
}

_TAGS = (torch.Tag.pt2_compliant_tag,)

#: The positions of arguments in the reference's signature, and their names.
Places = Sequence[tuple[int, str]]


class Operation(Generic[P, R]):
    """An operation as a graph holds it (`overload`), and as Python calls it: with the signature of its reference. reference: a
    function of tensors in plain torch, on any device, with types that `torch.library.infer_schema` knows. mutates: names of the
    arguments that it writes to; they have no other result. checks: functions of some of the arguments, by name, that raise for
    values outside of the specification; they run before the computation, not in tracing. sizes: names of the int arguments that
    are sizes of tensors, which may be symbolic. indexed: names of the arguments, a scalar tensor or a list of them, that may
    also be given as vectors with positions in them, which the operation takes as `<name>_index` (-1: a scalar of the list). A
    graph that reads many elements of one vector needs no node for each."""

    def __init__(
        self,
        namespace: Namespace,
        reference: Callable[P, R],
        mutates: Sequence[str] = (),
        checks: Iterable[Callable[..., object]] = (),
        sizes: Sequence[str] = (),
        indexed: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.has_fake = False
        self._namespace = namespace
        parameters = inspect.signature(reference).parameters
        self._parameters = [(p.name, p.kind, p.default) for p in parameters.values()]
        self._positions = {name: position for position, name in enumerate(parameters)}
        self._defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
        self._checks = [self._with_places(check, "check") for check in checks]
        self._providers: list[tuple[Callable[[torch.device], bool], Callable[[], Callable[..., Any]]]] = []
        """Per provider a test for its devices, and a function that returns it, which the first call imports."""
        self._require_known(indexed, "`indexed`")
        self.indexed = {name: self._positions[name] for name in indexed}  # Position of each indexed argument.
        self.index_names = frozenset(f"{name}_index" for name in indexed)  # The names of the arguments that hold positions.
        # A SymInt is a size; the other ints of our operations are constants of the graph that holds them.
        schema = torch.library.infer_schema(reference, mutates_args=tuple(mutates)).replace("SymInt", "int")
        for size in sizes:
            schema = schema.replace(f"int {size}", f"SymInt {size}")
        for name in indexed:
            kind = "int[]?" if f"Tensor[] {name}" in schema else "int?"
            keyword_only = "" if "*, " in schema else "*, "
            schema = schema.replace(") ->", f", {keyword_only}{kind} {name}_index=None) ->")
        namespace.library.define(self.name + schema, tags=_TAGS)
        namespace.library.impl(self.name, self._run, "CompositeExplicitAutograd")
        self.overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace.name), self.name).default
        if schema.endswith("-> ()"):
            self.fake(_nothing)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the registered operation, which checks its arguments. Members of an enum become their values: a graph that
        held the member could not be printed as code."""
        values = {name: value.value if isinstance(value, enum.Enum) else value for name, value in kwargs.items()}
        if has_tangent((*args, *kwargs.values())):
            raise NotImplementedError(
                f"lowering.{self.name} has no forward-mode derivative: an argument carries a tangent, which the result"
                " would lose. Detach it, or differentiate the high-precision computation"
            )
        try:
            return self.overload(*args, **values)
        except RuntimeError as error:
            if type(error) is RuntimeError:  # torch's, of types for example: a check says it better
                try:
                    self._check(*self.picked(args, values))
                except Exception as refused:
                    raise refused from None
            raise

    def __repr__(self) -> str:
        return f"<operation {self._namespace.name}::{self.name}>"

    def fake(self, function: F) -> F:
        """Attach the shape function: of the arguments that it names, reading no data. Once."""
        if self.has_fake:
            raise ValueError(f"{self.name} has a fake already; attach {function.__qualname__} to another operation")
        shape_of, places = self._with_places(function, "fake")

        def shape_function(*args: Any, **kwargs: Any) -> Any:
            return shape_of(*self._values(places, args, kwargs))

        torch.library.register_fake(f"{self._namespace.name}::{self.name}", shape_function, lib=self._namespace.library)
        self.has_fake = True
        return function

    def provider(self, runs_on: Callable[[torch.device], bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Attach a function that computes the operation on devices that `runs_on` accepts; the first accepted wins."""

        def attach(function: Callable[P, R]) -> Callable[P, R]:
            self._require_signature(function)
            self._providers.append((runs_on, lambda: function))
            return function

        return attach

    def lazy_provider(
        self,
        runs_on: Callable[[torch.device], bool],
        module: str,
        wrap: Callable[[Callable[P, R], Callable[P, R]], Callable[P, R]] | None = None,
    ) -> None:
        """Attach the function of the operation's name in a module that is imported when it is first needed. wrap: makes of the
        function and of the reference the one that is called."""
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"{module}, which is to provide {self.name}, does not exist")

        @functools.cache
        def load() -> Callable[..., Any]:
            function = getattr(importlib.import_module(module), self.name)
            self._require_signature(function)
            return function if wrap is None else wrap(function, self.reference)

        self._providers.append((runs_on, load))

    def implementation(self, device: torch.device) -> Callable[P, R]:
        """The function that computes the operation on `device`: a provider's, or the reference."""
        for runs_on, load in self._providers:
            if runs_on(device):
                return load()
        return self.reference

    def implementations(self) -> list[Callable[P, R]]:
        """Every function that may compute the operation, the reference last. Imports all of them."""
        return [*(load() for _, load in self._providers), self.reference]

    def picked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pick: Callable[[Any, int], Any] = operator.getitem
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the reference takes them: `pick(vector, position)` for each indexed one, and no positions."""
        if self.index_names.isdisjoint(kwargs):
            return tuple(args), dict(kwargs)
        given, options = list(args), dict(kwargs)
        for name, position in self.indexed.items():
            index = options.pop(f"{name}_index", None)
            if index is not None:
                value = given[position] if position < len(given) else options[name]
                is_list = isinstance(value, (list, tuple))
                pairs = zip(value, index, strict=True) if is_list else [(value, index)]
                picked = [x if i < 0 else pick(x, i) for x, i in pairs]
                found = picked if is_list else picked[0]
                if position < len(given):
                    given[position] = found
                else:
                    options[name] = found
        return tuple(given), options

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.index_names.isdisjoint(kwargs):
            args, kwargs = self.picked(args, kwargs)
        self._check(args, kwargs)
        return self.implementation(_device_of(args, kwargs))(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for check, places in self._checks:
            check(*self._values(places, args, kwargs))

    def _values(self, places: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments at these places, defaults included."""
        num_given, defaults = len(args), self._defaults
        return [
            args[position] if position < num_given else kwargs[name] if name in kwargs else defaults[name]
            for position, name in places
        ]

    def _with_places(self, function: Callable[..., Any], role: str) -> tuple[Callable[..., Any], Places]:
        """`function` as one of positional arguments, which a call passes fastest, and where these are found."""
        parameters = inspect.signature(function).parameters.values()
        names: list[str] = []
        for parameter in parameters:
            rest = _REST_OF.get(parameter.kind)
            names += [parameter.name] if rest is None else [name for name, kind, _ in self._parameters if kind is rest]
        self._require_known(names, f"the {role} {function.__qualname__}")
        places = [(self._positions[name], name) for name in names]
        if all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
            return function, places
        return lambda *values: function(**dict(zip(names, values, strict=True))), places

    def _require_known(self, names: Iterable[str], asking: str) -> None:
        unknown = [name for name in names if name not in self._positions]
        if unknown:
            raise TypeError(
                f"{asking} of {self.name} requests {', '.join(unknown)}; its arguments are {', '.join(self._positions)}"
            )

    def _require_signature(self, function: Callable[..., Any]) -> None:
        signature = inspect.signature(function)
        given = signature.parameters.values()
        open_kinds = {_REST_OF[p.kind] for p in given if p.kind in _REST_OF}
        own = [(p.name, p.kind, p.default) for p in given if p.kind not in _REST_OF]
        if own != [p for p in self._parameters if p in own or p[1] not in open_kinds]:
            raise TypeError(
                f"a provider of {self.name} needs the parameters of its reference, {inspect.signature(self.reference)};"
                f" {function.__module__}.{function.__qualname__} has {signature}"
            )


class Namespace:
    """The operations of `torch.ops.<name>`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.library = torch.library.Library(name, "DEF")
        self.operations: dict[str, Operation[..., Any]] = {}

    def operation(self, reference: Callable[P, R], **options: Any) -> Operation[P, R]:
        """Register the operation that `reference` specifies. options: those of `Operation`, by name."""
        made = Operation(self, reference, **options)
        self.operations[made.name] = made
        return made

    def find(self, target: Any) -> Operation[..., Any] | None:
        """The operation that a node of a graph calls; None if its target is none of these."""
        if getattr(target, "namespace", None) != self.name:
            return None
        return self.operations[target.overloadpacket.__name__]

    def require_fakes(self) -> None:
        """Raise where an operation has results and nothing tells their shapes: it could not be traced."""
        missing = [name for name, operation in self.operations.items() if not operation.has_fake]
        if missing:
            raise RuntimeError(f"without a fake: {', '.join(missing)}; attach one with @{missing[0]}.fake")


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor."""
    first = args[0] if args else None
    if isinstance(first, list) and first:
        first = first[0]
    if isinstance(first, torch.Tensor):  # almost always, and every launch comes by here
        return first.device
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0].device
    return torch.device("cpu")


def _nothing() -> None:
    """The shape function of operations that only write to their arguments."""


NAMESPACE = Namespace("lowering")
operation = NAMESPACE.operation


def has_tangent(values: Iterable[object]) -> bool:
    """True if a tensor among the values, or in lists of them, carries the tangent of a level of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    for value in values:
        if isinstance(value, (list, tuple)):
            found = has_tangent(value)
        else:
            found = isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None
        if found:
            return True
    return False
