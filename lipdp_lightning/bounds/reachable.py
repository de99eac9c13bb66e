"""Everything that a network's forward pass can reach: what it holds, and what its code reads by name."""

from __future__ import annotations

import dis
import sys
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HELD = ("_parameters", "_buffers", "_modules")
_CALLED = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
# attributes that torch keeps on a module for its state_dict and that no forward pass reads
_APART = frozenset({
    "training", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook",
})  # fmt: skip
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, tuple, frozenset)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)
CODE_NAMES = ("__code__", "__defaults__", "__kwdefaults__")


class TrustedHook:
    """A module hook whose author vouches that it leaves the bounds of outputs and gradients as they are.

    Any other hook is refused, since no rule bounds what it does. A hook that only reads may be added at any time. A
    hook that a network has when it is certified may not be removed.

    Args:
        function: The function that is called as the hook.

    Example::

        network[0].register_forward_hook(TrustedHook(lambda module, inputs, output: sizes.append(len(output))))
    """

    looks_only = True  # a hook that changes values, as a cotangent clip does, is part of what is certified

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


Labelled = Iterator[tuple[str, object]]


class Reachable:
    """Everything that an identity compares, in one order: callables that read it, and a label for each thing read."""

    def __init__(self, hooks: tuple[object, ...] | None) -> None:
        self.hooks: list[object] = []
        self._only = hooks
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Iterable[Any]] = []
        self.reads: list[Callable[[], Iterable[object]]] = []  # each reads several things at once
        self.members: list[Callable[[], object]] = []  # each reads one thing: a global, a member of a class
        self.hooks_and_parts: list[Mapping[str, Any]] = []  # modules hold these under names that are read, too
        self.objects: list[object] = []
        self.functions: list[types.FunctionType] = []
        self.attributes: list[dict[str, Any]] = []
        self.sized: list[tuple[Mapping[str, Any], tuple[str, ...]]] = []
        self.tensors: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.arrays: list[Any] = []
        self.unsteady: list[str] = []
        self._labels: list[Callable[[], Labelled]] = []
        self._seen: dict[int, object] = {}

    def labelled(self) -> Labelled:
        """Yields each label once; the second thing of the same label is labelled "... (2)", and so on."""
        counts: Counter[str] = Counter()
        for of in self._labels:
            for label, thing in of():
                counts[label] += 1
                yield (label if counts[label] == 1 else f"{label} ({counts[label]})"), thing

    def network(self, network: nn.Module) -> None:
        for name in GLOBAL_HOOKS:
            self._mapping(f"a hook for all modules ({name}, {{}})", getattr(torch_modules, name))
        self.reads.append(partial(itemgetter(*_CALLED), nn.Module.__dict__))
        self._labels.append(lambda: ((f"torch.nn.Module.{n}", nn.Module.__dict__[n]) for n in _CALLED))
        for _, module in network.named_modules():
            self._new(module)  # an attribute may name it, too; it is labelled by its path
        for path, module in network.named_modules():
            self._module(path or "the network", module)

    def value(self, label: str, value: Any) -> None:
        """Takes up a value that a network holds, and its members if they can be replaced."""
        if is_unsteady(value):
            self.unsteady.append(label)
        if isinstance(value, types.FunctionType | types.MethodType):
            function: Any = getattr(value, "__func__", value)
            if _written_by_users(function):
                self._function(label, function)
            return
        if isinstance(value, _OPAQUE) or (isinstance(value, PLAIN) and type(value) is not tuple):
            return
        if not self._new(value):
            return
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if not isinstance(value, nn.Parameter):
                self.constants.append(value)
        elif isinstance(value, nn.Module):
            self._module(label, value)
        elif isinstance(value, tuple):
            self._each(f"a member of {label}", value)
        elif isinstance(value, Mapping):
            self._mapping(f"{label}[{{!r}}]", value)
            self._each(f"a member of {label}", list(value.values()))
        elif isinstance(value, list | set | deque):
            self.sequences.append(value)
            self._labels.append(lambda: ((f"{label}[{i}]", v) for i, v in enumerate(value)))
            self._each(f"a member of {label}", list(value))
        elif isinstance(value, np.ndarray | np.generic | bytearray):
            self.arrays.append(value)
        elif isinstance(value, partial):
            self._each(f"a part of {label}", (value.func, value.args, value.keywords))
        else:
            self._object(label, value)

    def _each(self, label: str, values: Iterable[Any]) -> None:
        for value in values:
            self.value(label, value)

    def _new(self, thing: object) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True

    def _mapping(self, label: str, mapping: Mapping[Any, Any]) -> None:
        """Takes up a mapping; ``label`` is a format string with a place for the key."""
        self.mappings.append(mapping)
        self._labels.append(lambda: ((label.format(key), value) for key, value in mapping.items()))

    def _module(self, path: str, module: nn.Module) -> None:
        attributes, engine = module.__dict__, set_in_steps(type(module))
        self._class_of(path, module)
        names = [n for n in attributes if n not in _APART and n not in engine]
        self.reads.append(_read(names, attributes))
        self._labels.append(lambda: ((f"{path}.{n}", attributes[n]) for n in attributes if n not in {*_APART, *engine}))
        self.sized.append((attributes, engine))
        self.attributes.append(attributes)
        self.hooks_and_parts += [attributes[name] for name in (*_HELD, *MODULE_HOOKS)]
        for name, label in zip(_HELD, (f"{path}.{{}}", f"buffer {path}.{{}}", f"{path}.{{}}"), strict=True):
            self._mapping(label, attributes[name])
        for name in MODULE_HOOKS:
            self._mapping(f"{path}.{name}, {{}}", attributes[name])
            for hook in attributes[name].values():
                if self._only is None or any(hook is one for one in self._only):
                    self.hooks.append(hook)
                    self._hook(f"a hook of {path}", hook)
        self.tensors += [t for n in _HELD[:2] for t in attributes[n].values() if t is not None and self._new(t)]
        for name in names:
            if name not in (*_HELD, *MODULE_HOOKS):
                self.value(f"{path}.{name}", attributes[name])

    def _hook(self, label: str, hook: object) -> None:
        """Takes up what a trusted hook holds, except for its function, for which its author vouches."""
        if isinstance(hook, TrustedHook) and self._new(hook):
            self._mapping(f"{label}.{{}}", vars(hook))
            for name, value in vars(hook).items():
                if name != "function":
                    self.value(f"{label}.{name}", value)

    def _class_of(self, label: str, thing: object) -> None:
        self.objects.append(thing)
        self._labels.append(lambda: iter([(f"the class of {label}", thing.__class__)]))
        for base in type(thing).__mro__:
            if base in (nn.Module, object):
                break
            self._class(base, type(thing))

    def _class(self, kind: type, of: type) -> None:
        """Takes up a class's own attributes and, if users wrote it, the globals and closures that its methods read."""
        if not self._new(kind):
            return
        label, members = kind.__qualname__, dict(kind.__dict__)
        self.sized.append((kind.__dict__, ()))
        self._labels.append(lambda: ((f"{label}.{name}", value) for name, value in kind.__dict__.items()))
        plain = {name for name in members if not name.startswith("__")} | may_be_called(kind)
        called = sorted(methods_called(of) & members.keys() if issubclass(kind, nn.Module) else plain)
        if called:
            self.reads.append(_read(called, kind.__dict__))
        if not _written_by_users(kind):
            forward = members.get("forward")
            if isinstance(forward, types.FunctionType):
                self._code(f"{label}.forward", forward)
            return
        for name in called:
            value = members[name]
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            function = function.fget if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                self._function(f"{label}.{name}", function)
            elif not name.startswith("__"):
                self.value(f"{label}.{name}", value)

    def _function(self, label: str, function: types.FunctionType) -> None:
        """Takes up a function that users wrote: code, closure, defaults, and the globals that it reads."""
        if not self._new(function):
            return
        self._code(label, function)
        if function.__closure__:
            self.reads.append(partial(cell_contents, function))
            self._labels.append(
                lambda: ((f"what {label} closes over [{i}]", c) for i, c in enumerate(cell_contents(function)))
            )
        self._each(f"what {label} closes over", cell_contents(function))
        self._each(f"a default of {label}", (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        for namespace, name in reachable_names(function):
            where = f"{name}, which {label} reads,"
            self.members.append(partial(namespace.get, name))
            self._labels.append(lambda of=namespace, n=name, w=where: iter([(w, of.get(n))]))  # type: ignore[misc]
            self.value(where, namespace[name])

    def _code(self, label: str, function: types.FunctionType) -> None:
        self.functions.append(function)
        self._labels.append(lambda: ((f"{label}.{n}", getattr(function, n)) for n in CODE_NAMES))

    def _object(self, label: str, value: Any) -> None:
        """Takes up an object of another class: the class, and the attributes unless an installed package defines it."""
        self._class_of(label, value)
        if hasattr(value, "__dict__") and not _is_foreign(type(value)):
            self.value(label, vars(value))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and not name.startswith("__"):
                    self.members.append(partial(getattr, value, name, None))
                    self._labels.append(lambda n=name: iter([(f"{label}.{n}", getattr(value, n, None))]))  # type: ignore[misc]


def _read(names: Iterable[str], mapping: Mapping[str, Any]) -> Callable[[], Iterable[object]]:
    """Returns a callable that reads these names.

    It reads the first one twice, since ``itemgetter`` with a single name does not return a tuple.
    """
    listed = list(names)
    return partial(itemgetter(listed[0], *listed), mapping)


def set_in_steps(kind: type) -> tuple[str, ...]:
    """Returns the attributes that the library's own layers are given in every step, which their mechanisms watch."""
    declared = [base.__dict__.get("set_in_steps", ()) for base in kind.__mro__ if not _written_by_users(base)]
    return tuple(chain.from_iterable(declared))


# objects of these packages are compared by identity alone; ``types`` is left out because of SimpleNamespace
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "lightning", "torchmetrics", "wandb"}) - {"types"}
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _is_foreign(thing: Any) -> bool:
    """Returns whether it comes from Python, torch or an installed package, whose state and caches are not followed."""
    package = str(getattr(thing, "__module__", "")).partition(".")[0]
    return package in _FOREIGN or _is_installed(package)


@lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _INSTALLED)


def _written_by_users(thing: Any) -> bool:
    return not _is_foreign(thing) and not str(getattr(thing, "__module__", "")).startswith("lipdp_lightning.")


# ---- what code reads by name


def reachable_names(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each name that the code reads, and where: globals, imports, and attributes of modules that it names."""
    loaded = set(_instructions(function.__code__))
    names = {name for _, name in loaded}
    for operation, name in sorted(loaded):
        space = sys.modules if operation == "IMPORT_NAME" else function.__globals__
        if operation in _LOADS and name in space:
            yield space, name
            if isinstance(space[name], types.ModuleType):
                yield from ((vars(space[name]), attribute) for attribute in sorted(names & vars(space[name]).keys()))


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")


def _instructions(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yields the operations on names in the code, and in the functions and comprehensions that it defines."""
    yield from ((one.opname, one.argval) for one in dis.get_instructions(code) if one.opcode in dis.hasname)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def is_unsteady(value: Any) -> bool:
    """Returns whether a value gives a new result at every call, which no comparison of the network would show."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in _UNSTEADY
    if isinstance(value, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        source = value if owner is None or isinstance(owner, types.ModuleType) else type(owner)
        return str(source.__module__) in _UNSTEADY
    return isinstance(value, Iterator) or type(value).__module__ in ("random", "numpy.random._generator")


_UNSTEADY = frozenset({"time", "datetime", "_datetime", "random", "secrets", "uuid"})


def cell_contents(function: Any) -> tuple[object, ...]:
    """Returns the values that a function closes over; a variable that is not assigned yet gives none."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return tuple(found)


# these methods build, edit, copy or show an object, and are no part of a forward pass
_ASIDE = frozenset({
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__dir__", "__eq__", "__hash__",
    "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__add__", "__iadd__", "__mul__", "__rmul__",
    "__imul__",
})  # fmt: skip


def may_be_called(kind: type) -> set[str]:
    """Returns the names on a class that are called without being named in code, as ``__iter__`` is by a loop."""
    functions = {name for name, value in vars(kind).items() if isinstance(value, types.FunctionType)}
    return {name for name in functions if name.startswith("__")} - _ASIDE


def methods_called(kind: type) -> set[str]:
    """Returns the names on a module's class that its forward pass may read, directly or through other methods."""
    members = {name: value for base in reversed(kind.__mro__) for name, value in base.__dict__.items()}
    found: set[str] = set()
    open_names = {"forward", "__call__", "__getattr__"} & members.keys()
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:  # Python calls these without naming them
        open_names |= may_be_called(base)
    while open_names:
        name = open_names.pop()
        found.add(name)
        value = members[name]
        function = getattr(value, "__func__", getattr(value, "fget", value))
        code = getattr(function, "__code__", None)
        if code is not None and members[name] not in (nn.Module.__call__, nn.Module.__getattr__):
            open_names |= ({called for _, called in _instructions(code)} & members.keys()) - found
    return found
