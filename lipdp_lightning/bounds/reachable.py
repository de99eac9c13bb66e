"""Everything that a network's forward pass can reach: what it holds, and what its code reads by name."""

from __future__ import annotations

import builtins
import dis
import sys
import sysconfig
import types
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

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
# values of exactly these types hold nothing that can be replaced
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), range, slice, torch.dtype, torch.device,
         torch.Size, torch.memory_format, torch.layout)  # fmt: skip
_HERE = "\0"  # the place of a name in a label
_SEQUENCES = (list, tuple, set, frozenset, deque)
_ARRAYS = (np.ndarray, np.generic, bytearray, memoryview, array)
# objects of Python's own that hold what users wrote, and the attributes in which they hold it
_WRAPPERS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (types.MethodType, ("__func__", "__self__")),
    (types.BuiltinMethodType, ("__self__",)),
    (types.MethodWrapperType, ("__self__",)),
    (staticmethod, ("__func__",)),
    (classmethod, ("__func__",)),
    (property, ("fget",)),
    (cached_property, ("func",)),
    (type(lru_cache(repr)), ("__wrapped__",)),
    (partial, ("func", "args", "keywords")),
    (partialmethod, ("func", "args", "keywords")),
)


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


class Part(NamedTuple):
    """Things that are compared: a callable that reads them, always in the same order, and a label for each."""

    read: Callable[[], Collection[object]]
    labels: Collection[str]


class Reachable:
    """Everything that an identity compares, found by following what a network holds and what its code names."""

    def __init__(self, hooks: tuple[object, ...] | None) -> None:
        self.parts: list[Part] = []
        self.empty: list[Collection[Any]] = []  # containers that held nothing
        self.attributes: list[dict[str, Any]] = []  # of each module
        self.sized: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.tensors: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.arrays: list[Any] = []
        self.hooks: list[object] = []
        self.unsteady: list[str] = []
        self._only = hooks
        self._seen: dict[int, object] = {}
        self.objects: list[object] = []  # their classes are compared
        self.classes: list[Mapping[str, Any]] = []  # the numbers of their members are compared
        self.functions: list[types.FunctionType] = []  # their code and defaults are compared
        self.installed: list[types.FunctionType] = []  # their code is compared
        self._labels: list[tuple[list[str], Callable[[], Iterable[object]]]] = []
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # modules, and names that are read there
        self._names: set[str] = set()  # all that followed code names
        self._methods: list[tuple[str, str, Any]] = []  # name, label and value of methods that nothing has named yet

    def labelled(self) -> dict[str, object]:
        """Returns what is read now by its label; the second thing of the same label is labelled "... (2)"."""
        counts: Counter[str] = Counter()
        found = {}
        for labels, read in (*((part.labels, part.read) for part in self.parts), *self._labels):
            for label, thing in zip(labels, read(), strict=False):
                counts[label] += 1
                found[label if counts[label] == 1 else f"{label} ({counts[label]})"] = thing
        return found

    def network(self, network: nn.Module) -> None:
        """Takes up a network with all modules that it holds."""
        for name in GLOBAL_HOOKS:
            self._mapping(f"a hook for all modules ({name}, {_HERE})", getattr(torch_modules, name))
        self._read(_CALLED, nn.Module.__dict__, f"torch.nn.Module.{_HERE}")
        for _, module in network.named_modules():
            self._new(module)  # an attribute may name it, too; it is labelled by its path
        for path, module in network.named_modules():
            self._module(path or "the network", module)
        self._follow_named_methods()
        for space, names in self._spaces.values():
            self._read(names, space, f"{_HERE} of {space.get('__name__', 'a module')}")

    def value(self, label: str, value: Any) -> None:
        """Takes up a value that a network holds, and its members if they can be replaced."""
        if is_unsteady(value):
            self.unsteady.append(label)
        wrapped = next((names for kind, names in _WRAPPERS if isinstance(value, kind)), ())
        if type(value) in PLAIN or isinstance(value, types.ModuleType) or not self._new(value):
            return
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if not isinstance(value, nn.Parameter):
                self.constants.append(value)
        elif isinstance(value, nn.Module):
            self._module(label, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(label, value)
        elif wrapped:
            self._read_each(wrapped, label, value)
        elif isinstance(value, weakref.ref):
            self.value(f"what {label} refers to", value())
        elif isinstance(value, _ARRAYS):
            self.arrays.append(value)
        else:
            self._container(label, value)
            self._object(label, value)

    def _container(self, label: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._mapping(f"{label}[{_HERE}]", value, repr)
            self._keys(value)
            self._each(f"a member of {label}", list(value.values()))
        elif isinstance(value, _SEQUENCES):
            members = tuple(value)
            if not isinstance(value, tuple | frozenset):  # the others are read anew each time
                self.parts.append(Part(partial(tuple, value), [f"{label}[{i}]" for i in range(len(members))]))
            self._each(f"a member of {label}", members)

    def _each(self, label: str, values: Iterable[Any]) -> None:
        for value in values:
            self.value(label, value)

    def _new(self, thing: object) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True

    def _read(self, names: Iterable[str], mapping: Mapping[str, Any], label: str) -> None:
        """Reads names in a mapping; their labels have the name in place of ``_HERE``."""
        listed = list(names)
        if listed:  # a second name, since itemgetter with one name does not return a tuple
            listed = listed if len(listed) > 1 else 2 * listed
            self.parts.append(
                Part(partial(itemgetter(*listed), mapping), [label.replace(_HERE, name) for name in listed])
            )

    def _read_each(self, names: tuple[str, ...], label: str, thing: object) -> None:
        for name in names:
            self.parts.append(Part(lambda get=attrgetter(name): (get(thing),), [f"{label}.{name}"]))  # type: ignore[misc]
            self.value(f"{label}.{name}", getattr(thing, name))

    def _mapping(self, label: str, mapping: Mapping[Any, Any], show: Callable[[Any], str] = str) -> None:
        """Reads the values of a mapping; their labels show the key in place of ``_HERE``."""
        if mapping:
            self.parts.append(Part(mapping.values, [label.replace(_HERE, show(key)) for key in mapping]))
        else:
            self.empty.append(mapping)

    def _keys(self, mapping: Mapping[Any, Any]) -> None:
        """Reads the keys of a mapping in their order, without labels: those of its values contain them."""
        if mapping:
            self.parts.append(Part(mapping.keys, ()))

    def _module(self, path: str, module: nn.Module) -> None:
        attributes, engine = module.__dict__, set_in_steps(type(module))
        self._class_of(path, module)
        names = [n for n in attributes if n not in _APART and n not in engine]
        self._read(names, attributes, f"{path}.{_HERE}")
        self.sized.append((attributes, engine))
        self.attributes.append(attributes)
        for name, label in zip(_HELD, (f"{path}.{_HERE}", f"buffer {path}.{_HERE}", f"{path}.{_HERE}"), strict=True):
            self._mapping(label, attributes[name])
            self._keys(attributes[name])
        for name in MODULE_HOOKS:
            self._mapping(f"{path}.{name}, {_HERE}", attributes[name])
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
            self._mapping(f"{label}.{_HERE}", vars(hook))
            for name, value in vars(hook).items():
                if name != "function":
                    self.value(f"{label}.{name}", value)

    def _class_of(self, label: str, thing: object) -> None:
        if type(thing).__module__ != "builtins":  # no attribute of such a class can be replaced
            self.objects.append(thing)
            self._labels.append(([f"the class of {label}"], lambda: (type(thing),)))
            self._class(type(thing))

    def _class(self, kind: type) -> None:
        """Takes up a class and its bases; what methods do is followed if users wrote them and some code names them."""
        for base in [*kind.__mro__, *type.mro(type(kind))]:
            if base is nn.Module or base.__module__ == "builtins" or not self._new(base):
                continue
            label, members = base.__qualname__, dict(base.__dict__)
            if _written_by_users(base):
                self.parts.append(Part(base.__dict__.values, [f"{label}.{name}" for name in members]))
                self._keys(base.__dict__)
                self._methods += [(name, f"{label}.{name}", value) for name, value in members.items()]
                continue
            self.classes.append(base.__dict__)
            self._labels.append(([f"{label}.{name}" for name in members], base.__dict__.values))
            kept = {name: member for name, member in members.items() if name not in _ASIDE}
            self._read(kept, base.__dict__, f"{label}.{_HERE}")
            for name in kept if _package(base) == "lipdp_lightning" else kept.keys() & {"forward"}:
                self._runs(f"{label}.{name}", kept[name])

    def _runs(self, label: str, function: object) -> None:
        """Takes up a function of an installed package that layers or losses run, and what it names."""
        if not isinstance(function, types.FunctionType) or not self._new(function):
            return
        self.installed.append(function)
        self._labels.append(([f"the code of {label}"], lambda: [function.__code__]))
        if _package(function) == "lipdp_lightning" or "." in label:
            reads = [one for one in reachable_names(function, set()) if one[0] is not vars(builtins)]
            for name, named in self._globals(reads):
                self._runs(name, named)

    def _follow_named_methods(self) -> None:
        """Follows methods by name until nothing is new; values in classes are followed in any case."""
        while True:
            named = [m for m in self._methods if m[0] in self._names or _may_be_called(*m[::2])]
            if not named:
                return
            self._methods = [m for m in self._methods if not any(m is one for one in named)]
            for _, label, value in named:
                self.value(label, value)

    def _function(self, label: str, function: types.FunctionType) -> None:
        """Takes up a function that users wrote: code, closure, defaults, attributes, and the globals that it reads."""
        if not _written_by_users(function):
            return
        self._code(label, function)
        if function.__closure__:
            contents = cell_contents(function)
            labels = [f"what {label} closes over [{i}]" for i in range(len(contents))]
            self.parts.append(Part(partial(cell_contents, function), labels))
            self._each(f"what {label} closes over", contents)
        self._each(f"a default of {label}", (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        self.value(f"an attribute of {label}", vars(function))
        for name, value in self._globals(reachable_names(function, self._names)):
            self.value(f"{name}, which {label} reads,", value)

    def _globals(self, named: Iterable[tuple[dict[str, Any], str]]) -> list[tuple[str, object]]:
        """Reads what a function names in modules, and returns it by name."""
        found = []
        for space, name in named:
            self._spaces.setdefault(id(space), (space, {}))[1][name] = None
            found.append((name, space[name]))
        return found

    def _code(self, label: str, function: types.FunctionType) -> None:
        self.functions.append(function)
        self._labels.append(([f"{label}.{name}" for name in _CODE], partial(code_of, function)))

    def _object(self, label: str, value: Any) -> None:
        """Takes up an object of another class: the class, and the attributes unless an installed package defines it."""
        self._class_of(label, value)
        if hasattr(value, "__dict__") and not _is_foreign(type(value)):
            self.value(label, vars(value))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else tuple(slots)
            self._read_each(tuple(n for n in names if hasattr(value, n) and not n.startswith("__")), label, value)


_CODE = ("__code__", "__defaults__", "__kwdefaults__")
code_of = attrgetter(*_CODE)


def set_in_steps(kind: type) -> tuple[str, ...]:
    """Returns the attributes that the library's own layers are given in every step, which their mechanisms watch."""
    declared = [base.__dict__.get("set_in_steps", ()) for base in kind.__mro__ if not _written_by_users(base)]
    return tuple(chain.from_iterable(declared))


# what these packages define is not followed, and their objects are compared by identity alone; the objects of two of
# them are containers of what users hold
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "lightning", "torchmetrics", "wandb"})
_CONTAINERS = ("types", "collections")
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _is_foreign(thing: Any) -> bool:
    """Returns whether it comes from Python, torch or an installed package, whose state and caches are not followed."""
    package = _package(thing)
    return (package in _FOREIGN and package not in _CONTAINERS) or _is_installed(package)


@lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _INSTALLED)


def _written_by_users(thing: Any) -> bool:
    package = _package(thing)
    return package not in _FOREIGN and package != "lipdp_lightning" and not _is_installed(package)


# ---- what code reads by name


def reachable_names(function: types.FunctionType, named: set[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each name that the code reads, and where: globals, builtins, imports, and attributes of modules.

    A text in the code counts as a name, since ``getattr`` may use it.

    Args:
        function: The function.
        named: A set to which all names in the code are added.
    """
    loaded = _instructions(function.__code__)
    names = {name for _, name in loaded}
    named |= names
    seen: set[int] = set()
    for operation, name in sorted(loaded):
        spaces = (sys.modules,) if operation == "IMPORT_NAME" else (function.__globals__, vars(builtins))
        space = next((space for space in spaces if name in space), None)
        if operation in _LOADS and space is not None:
            yield from _in_modules(space, name, names, seen)


def _in_modules(
    space: dict[str, Any], name: str, names: set[str], seen: set[int]
) -> Iterator[tuple[dict[str, Any], str]]:
    yield space, name
    module = space[name]
    if isinstance(module, types.ModuleType) and id(module) not in seen:
        seen.add(id(module))
        for attribute in sorted(names & vars(module).keys()):
            yield from _in_modules(vars(module), attribute, names, seen)


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")


@lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """Returns the operations on names in the code, and in the functions and comprehensions that it defines."""
    texts = frozenset(("text", constant) for constant in code.co_consts if isinstance(constant, str))
    inside = (_instructions(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return texts.union(((i.opname, i.argval) for i in dis.get_instructions(code) if i.opcode in dis.hasname), *inside)


def is_unsteady(value: Any) -> bool:
    """Returns whether a value need not give the same result at every call, which no comparison would show."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in _UNSTEADY
    if isinstance(value, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        source = value if owner is None or isinstance(owner, types.ModuleType) else type(owner)
        package, name = str(source.__module__), getattr(value, "__name__", "")
        tells = package.partition(".")[0] in ("torch", "builtins") and name in _TELLS_SURROUNDINGS
        return tells or package in (*_UNSTEADY, "sys")
    kinds = ("random", "numpy.random._generator")
    return isinstance(value, Iterator | ContextVar) or type(value).__module__ in kinds


# clocks, sources of random numbers, files, the environment, other threads, the stack of callers
_UNSTEADY = frozenset({
    "time", "datetime", "_datetime", "random", "secrets", "uuid", "os", "posix", "nt", "io", "_io", "pathlib", "socket",
    "subprocess", "threading", "_thread", "multiprocessing", "inspect", "traceback", "gc", "importlib",
})  # fmt: skip
# functions of torch and of Python that tell where a call comes from, or read what no name in the code shows
_TELLS_SURROUNDINGS = frozenset({
    "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled", "get_autocast_dtype",
    "is_inference_mode_enabled", "is_compiling", "is_dynamo_compiling", "is_exporting", "is_fx_tracing",
    "is_fx_symbolic_tracing", "is_tracing", "is_scripting", "initial_seed", "get_rng_state", "get_num_threads",
    "eval", "exec", "globals", "locals", "__import__", "input", "id", "open", "breakpoint",
})  # fmt: skip


def cell_contents(function: Any) -> tuple[object, ...]:
    """Returns the values that a function closes over; a variable that is not assigned yet gives none."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return tuple(found)


# these members of classes build, edit, copy or show an object, and are no part of a forward pass
_ASIDE = frozenset({
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__repr__", "__dir__", "__eq__", "__hash__",
    "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__add__", "__iadd__", "__mul__", "__rmul__",
    "__imul__", "__doc__", "__module__", "__annotations__", "__constants__", "__parameters__", "__orig_bases__",
    "__dict__", "__weakref__", "__slotnames__", "__static_attributes__", "__firstlineno__", "__match_args__",
    "__dataclass_fields__", "__dataclass_params__", "__replace__", "__abstractmethods__", "_abc_impl",
    "extra_repr", "reset_parameters", "report_to", "reports", "append", "extend", "insert", "pop",
})  # fmt: skip


def _may_be_called(name: str, value: object) -> bool:
    """Returns whether forward may read a member of a class without naming it, as a loop calls ``__iter__``."""
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if name.startswith("__"):
        return isinstance(function, types.FunctionType) and name not in _ASIDE
    return name == "forward" or not isinstance(function, types.FunctionType)
