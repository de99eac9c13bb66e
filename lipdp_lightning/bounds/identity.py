"""Who a network is: everything that tracing reads from it and a certificate depends on, compared cheaply."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from .reachable import cell_contents, methods_called, reachable_names

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HELD = ("_parameters", "_buffers", "_modules")
_OF_PICKLING = (".__slotnames__", ".__annotations__", ".__doc__")  # added to classes whose objects are copied
_CALLED = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
# what torch keeps on a module for its state_dict, which no forward pass reads
_APART = frozenset({
    "training", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook",
})  # fmt: skip
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, tuple, frozenset)
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)
_CODE_NAMES = ("__code__", "__defaults__", "__kwdefaults__")
_CODE = attrgetter(*_CODE_NAMES)
_flags = attrgetter("requires_grad", "shape", "_backward_hooks")


class TrustedHook:
    """A module hook whose author answers for it: it leaves the bounds of outputs and gradients as they are.

    Any other hook is refused, since no rule bounds what it does. One that only looks may be added at any time; one
    that a network has when it is certified may not be removed.

    Args:
        function: called as the hook.
    """

    looks_only = True  # if not, it is part of what is certified, as a cotangent clip is

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class NetworkIdentity:
    """Types, hooks, attributes, constants, code, tensors and modes of a network, as they were when this was made.

    What the values of parameters and buffers are does not matter: a certificate reads them anew. All that is compared
    by identity is kept alive here, so that nothing else can take its place.
    """

    def __init__(self, network: nn.Module, *others: object, hooks: tuple[object, ...] | None = None) -> None:
        """``others``: objects beside the network that the certificate has read, such as the loss.

        ``hooks``: those to look into, where not all of them.
        """
        self._network, self._others = network, others
        found = _Found(hooks)
        found.network(network)
        for other in others:
            found.value(type(other).__name__, other)
        self._labels = dict(found.labelled())
        self._hooks = tuple(found.hooks)
        self._constants = tuple((t, t.detach().clone()) for t in found.constants)
        self._arrays = tuple((a, bytes(a)) for a in found.arrays)
        self._attributes = tuple(found.attributes)
        self._modes = modes_of(network, self._attributes)
        self._reads, self._sized = tuple(found.reads), tuple(found.sized)
        self._lengths = [len(sized) for sized in self._sized]
        self._items = tuple(chain.from_iterable([read() for read in self._reads]))
        self._engine = tuple(found.engine)
        self._counts = _counts(self._engine)
        self._tensors = tuple(found.tensors)
        self._flags = list(map(_flags, self._tensors))

    def _compare_with(self, other: NetworkIdentity) -> None:
        """Compare with objects that are others and mean the same: equal numbers, and hooks that only look."""
        self._reads, self._sized, self._lengths = other._reads, other._sized, other._lengths
        self._items, self._engine, self._counts = other._items, other._engine, other._counts

    @classmethod
    def of(cls, network: nn.Module, *others: object) -> NetworkIdentity:
        """The identity of a network as it is now."""
        return cls(network, *others)

    def differences(self) -> list[str]:
        """What is another than it was, in words; empty while the network is the one that was certified."""
        return [] if self._same() else self._in_words()

    def _same(self) -> bool:
        """The comparison of every step: flat, and without a walk over names."""
        if list(map(len, self._sized)) != self._lengths or _counts(self._engine) != self._counts:
            return False
        try:
            items = chain.from_iterable([read() for read in self._reads])
        except KeyError:  # an attribute was deleted
            return False
        if not all(map(is_, items, self._items)) or list(map(_flags, self._tensors)) != self._flags:
            return False
        if any([getattr(t, "_post_accumulate_grad_hooks", None) for t in self._tensors]):
            return False
        return self._modes_as_certified() and self._contents_as_certified()

    def _modes_as_certified(self) -> bool:
        """As train() and eval() leave them, or as they were: the modes that the network has been traced in."""
        return [d["training"] for d in self._attributes] in self._modes

    def _contents_as_certified(self) -> bool:
        return all([_equal(t, kept) for t, kept in self._constants]) and all([bytes(a) == b for a, b in self._arrays])

    def _in_words(self) -> list[str]:
        now = NetworkIdentity(self._network, *self._others, hooks=self._hooks)
        words = []
        for label in dict.fromkeys([*self._labels, *now._labels]):
            if label.endswith(_OF_PICKLING):
                continue
            if label not in now._labels:
                words.append(f"{label} was removed")
            elif label not in self._labels:
                added = now._labels[label]
                if not (isinstance(added, TrustedHook) and added.looks_only):
                    words.append(f"{label} was added")
            elif not _alike(self._labels[label], now._labels[label]):
                words.append(f"{label} is another than it was")
        words += _changed_tensors(self._network, self._tensors, self._flags)
        words += [f"the constant tensor of shape {tuple(t.shape)} was changed" for t, k in self._constants
                  if not _equal(t, k)]  # fmt: skip
        words += ["a constant array was changed" for a, b in self._arrays if bytes(a) != b]
        if not self._modes_as_certified():
            words += _other_modes(self._network, self._modes[0])
        if not words and len(now._items) == len(self._items) and not all(map(_alike, self._items, now._items)):
            words.append("something that it holds is another than it was")
        if not words:
            self._compare_with(now)  # at the next step without the way through names
        return list(dict.fromkeys(words))


def _counts(engine: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]) -> list[int]:
    """How many attributes a module has beside those that the library sets at every step."""
    return [len(d) - sum(map(d.__contains__, names)) for d, names in engine]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _alike(a: object, b: object) -> bool:
    """The same object, or a plain value that is equal."""
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)


def _changed_tensors(network: nn.Module, tensors: tuple[Tensor, ...], before: list[Any]) -> list[str]:
    names = {id(t): n for n, t in chain(network.named_parameters(), network.named_buffers())}
    words = []
    for tensor, old in zip(tensors, before, strict=True):
        name, now = names.get(id(tensor), "a tensor"), _flags(tensor)
        if now[0] != old[0]:
            words.append(f"{name} was {'unfrozen' if now[0] else 'frozen'}")
        if now[1] != old[1]:
            words.append(f"{name} has another shape")
        if now[2] != old[2] or getattr(tensor, "_post_accumulate_grad_hooks", None):
            words.append(f"a hook was attached to {name}")
    return words


def set_in_steps(kind: type) -> tuple[str, ...]:
    """The attributes that the library's own layers are given in every step, and that their mechanisms watch."""
    declared = [base.__dict__.get("set_in_steps", ()) for base in kind.__mro__ if not _written_by_users(base)]
    return tuple(chain.from_iterable(declared))


def modes_of(network: nn.Module, attributes: Iterable[dict[str, Any]]) -> list[list[bool]]:
    """The modes of modules as ``train()`` leaves them, as ``eval()`` does, and as they are."""
    before = [(module, module.training) for module in network.modules()]
    read = itemgetter("training")
    present, found = list(map(read, attributes)), []
    try:
        for mode in (True, False):
            network.train(mode)
            found.append(list(map(read, attributes)))
    finally:
        for module, training in before:
            module.training = training
    return [*found, present]


def _other_modes(network: nn.Module, training: list[bool]) -> list[str]:
    pairs = zip(network.named_modules(), training, strict=False)
    changed = [(path or "the network", module.training) for (path, module), mode in pairs if module.training != mode]
    return [
        f"{path} is {'in training' if now else 'trained in eval'} mode, as it was not when the network was certified"
        for path, now in changed
    ]


class _Found:
    """Everything to compare, in one order: ways to read it, and a label for each thing read."""

    def __init__(self, hooks: tuple[object, ...] | None) -> None:
        self.hooks: list[object] = []
        self._only = hooks
        self.reads: list[Callable[[], Iterable[object]]] = []
        self.sized: list[Any] = []
        self.attributes: list[dict[str, Any]] = []
        self.engine: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.tensors: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.arrays: list[Any] = []
        self._labels: list[Callable[[], Iterator[tuple[str, object]]]] = []
        self._seen: dict[int, object] = {}
        self._of_classes: list[object] = []

    def labelled(self) -> Iterator[tuple[str, object]]:
        """Each label once: a further thing of the same label has its number behind it."""
        counts: Counter[str] = Counter()
        for of in self._labels:
            for label, thing in of():
                counts[label] += 1
                yield (label if counts[label] == 1 else f"{label} ({counts[label]})"), thing

    def _mapping(self, label: Callable[[Any], str], mapping: Mapping[Any, Any]) -> None:
        self.reads.append(mapping.values)
        self.sized.append(mapping)
        self._labels.append(lambda: ((label(key), value) for key, value in mapping.items()))

    def network(self, network: nn.Module) -> None:
        for name in GLOBAL_HOOKS:
            hooks = getattr(torch_modules, name)
            self._mapping(lambda key, name=name: f"a hook for all modules ({name}, {key})", hooks)  # type: ignore[misc]
        self.reads.append(partial(itemgetter(*_CALLED), nn.Module.__dict__))
        self._labels.append(lambda: ((f"torch.nn.Module.{n}", nn.Module.__dict__[n]) for n in _CALLED))
        self.reads.append(lambda: [thing.__class__ for thing in self._of_classes])
        for _, module in network.named_modules():
            self._new(module)  # or one that an attribute names, too, would be taken up under that name
        for path, module in network.named_modules():
            self._module(path or "the network", module)

    def _class_of(self, label: str, thing: object) -> None:
        self._of_classes.append(thing)
        self._labels.append(lambda: iter([(f"the class of {label}", thing.__class__)]))
        for base in type(thing).__mro__:
            if base in (nn.Module, object):
                break
            self._class(base, type(thing))

    def _module(self, path: str, module: nn.Module) -> None:
        kind, attributes = type(module), module.__dict__
        self._class_of(path, module)
        engine = set_in_steps(kind)
        names = [n for n in attributes if n not in _APART and n not in engine]
        self.reads.append(partial(itemgetter(*names), attributes))
        self._labels.append(lambda: ((f"{path}.{n}", attributes[n]) for n in attributes if n not in {*_APART, *engine}))
        if engine:
            self.engine.append((attributes, engine))
        else:
            self.sized.append(attributes)
        self.attributes.append(attributes)
        for name in (*_HELD, *MODULE_HOOKS):
            what = "" if name in _HELD else f"{name}, "
            self._mapping(lambda key, what=what: f"{path}.{what}{key}", attributes[name])  # type: ignore[misc]
        for name in MODULE_HOOKS:
            for hook in attributes[name].values():
                if self._only is None or any(hook is one for one in self._only):
                    self.hooks.append(hook)
                    self._hook(f"a hook of {path}", hook)
        self.tensors += [t for n in _HELD[:2] for t in attributes[n].values() if t is not None and self._new(t)]
        for name in names:
            if name not in (*_HELD, *MODULE_HOOKS):
                self.value(f"{path}.{name}", attributes[name])

    def _hook(self, label: str, hook: object) -> None:
        """What a hook holds; what its function does is its author's matter."""
        if isinstance(hook, TrustedHook) and self._new(hook):
            self._mapping(lambda key: f"{label}.{key}", vars(hook))
            for name, value in vars(hook).items():
                if name != "function":
                    self.value(f"{label}.{name}", value)

    def _new(self, thing: object) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen[id(thing)] = thing
        return True

    def _class(self, kind: type, of: type) -> None:
        """A class's own attributes; of one that users wrote, what its methods read of their modules and closures."""
        if not self._new(kind):
            return
        self._mapping(lambda key: f"{kind.__qualname__}.{key}", kind.__dict__)
        forward = kind.__dict__.get("forward")
        if not _written_by_users(kind):
            if isinstance(forward, types.FunctionType):
                self._code(f"{kind.__qualname__}.forward", forward)
            return
        called = methods_called(of) if issubclass(kind, nn.Module) else set(kind.__dict__)
        for name, value in list(kind.__dict__.items()):
            if name not in called:
                continue
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            function = function.fget if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                self._function(f"{kind.__qualname__}.{name}", function)
            elif not name.startswith("__"):
                self.value(f"{kind.__qualname__}.{name}", value)

    def _function(self, label: str, function: types.FunctionType) -> None:
        if not self._new(function):
            return
        self._code(label, function)
        self.reads.append(partial(cell_contents, function))
        self._labels.append(
            lambda: ((f"what {label} closes over [{i}]", c) for i, c in enumerate(cell_contents(function)))
        )
        for content in cell_contents(function):
            self.value(f"what {label} closes over", content)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(f"a default of {label}", value)
        for namespace, name in reachable_names(function):
            where = f"{name}, which {label} reads,"
            self.reads.append(lambda of=namespace, n=name: (of.get(n),))  # type: ignore[misc]
            self._labels.append(lambda of=namespace, n=name, w=where: iter([(w, of.get(n))]))  # type: ignore[misc]
            self.value(where, namespace[name])

    def _code(self, label: str, function: types.FunctionType) -> None:
        self.reads.append(partial(_CODE, function))
        self._labels.append(lambda: ((f"{label}.{n}", getattr(function, n)) for n in _CODE_NAMES))

    def value(self, label: str, value: Any) -> None:
        """A value that a network holds: its members too, where they can be replaced."""
        if isinstance(value, types.FunctionType | types.MethodType):
            function: Any = getattr(value, "__func__", value)
            if _written_by_users(function):
                self._function(label, function)
            return
        if isinstance(value, _OPAQUE) or (isinstance(value, _PLAIN) and type(value) is not tuple):
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
            for member in value:
                self.value(f"a member of {label}", member)
        else:
            self._mutable(label, value)

    def _mutable(self, label: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._mapping(lambda key: f"{label}[{key!r}]", value)
            for member in list(value.values()):
                self.value(f"a member of {label}", member)
        elif isinstance(value, list | set | deque):
            self.reads.append(value.__iter__)
            self.sized.append(value)
            self._labels.append(lambda: ((f"{label}[{i}]", v) for i, v in enumerate(value)))
            for member in list(value):
                self.value(f"a member of {label}", member)
        elif isinstance(value, np.ndarray | np.generic | bytearray):
            self.arrays.append(value)
        else:
            self._object(label, value)

    def _object(self, label: str, value: Any) -> None:
        """An object of another class: its class and its attributes, where users wrote it or it is a loss or a hook."""
        if isinstance(value, partial):
            for member in (value.func, value.args, value.keywords):
                self.value(f"a part of {label}", member)
            return
        self._class_of(label, value)
        if hasattr(value, "__dict__") and not _is_foreign(type(value)):
            self.value(label, vars(value))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and not name.startswith("__"):
                    self.reads.append(lambda n=name: (getattr(value, n, None),))  # type: ignore[misc]
                    self._labels.append(lambda n=name: iter([(f"{label}.{n}", getattr(value, n, None))]))  # type: ignore[misc]


# whose objects are compared by identity alone; of ``types``, SimpleNamespace is looked into
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "lightning", "torchmetrics", "wandb"}) - {"types"}


def _is_foreign(thing: Any) -> bool:
    """Whether it comes from Python, torch or an installed package, whose own state and caches are not followed."""
    package = str(getattr(thing, "__module__", "")).partition(".")[0]
    return package in _FOREIGN or _is_installed(package)


@lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(place) for place in _INSTALLED)


_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _written_by_users(thing: Any) -> bool:
    return not _is_foreign(thing) and not str(getattr(thing, "__module__", "")).startswith("lipdp_lightning.")
