"""The identity of a network: everything that tracing reads from it and a certificate depends on, compared cheaply."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .reachable import PLAIN, Reachable, TrustedHook, code_of

__all__ = ["NetworkIdentity", "TrustedHook"]

_class_of, _code_of = attrgetter("__class__"), attrgetter("__code__")
_OF_PICKLING = (".__slotnames__", ".__annotations__", ".__doc__")  # Python adds these to classes of copied objects


class NetworkIdentity:
    """The types, hooks, attributes, constants, code, tensors and modes of a network at the time of construction.

    The values of parameters and buffers are not part of it, since every certificate reads them anew. Whatever is
    compared is compared by identity, and is kept alive here, so that no other object can get its id.

    Every step compares twice, before the certificate and before the release. The first comparison finds changes since
    the previous step, even if a callback undoes them before the release. The second one finds changes since the first.
    A change between the two that is undone in time could only be made by code that runs between them:

    * the network's own forward pass, which a rehearsal compares with the graph;
    * a trusted hook, for which its author vouches;
    * hooks of the trainer before the backward pass. This pass follows a graph that is recorded already and reads
      nothing of the network but weights that autograd has saved, whose versions and digest are compared before the
      release, too.
    """

    def __init__(self, network: nn.Module, *others: object, hooks: tuple[object, ...] | None = None) -> None:
        """Takes up the network as it is now.

        Args:
            network: The network.
            others: Objects beside the network that the certificate has read, such as the loss.
            hooks: The trusted hooks whose attributes are compared, too; None stands for all.
        """
        self._network, self._others = network, others
        found = Reachable(hooks)
        for other in others:
            found.value(type(other).__name__, other)
        found.network(network)
        self.unsteady = tuple(dict.fromkeys(found.unsteady))
        self._labels = found.labelled()
        self._hooks = tuple(found.hooks)
        self._constants = tuple((t, t.detach().clone()) for t in found.constants)
        self._arrays = tuple((a, bytes(a)) for a in found.arrays)
        self._attributes = tuple(found.attributes)
        self._modes = modes_of(network, self._attributes)
        self._tensors = tuple(found.tensors)
        self._flags = list(map(kept_flags, self._tensors))
        self._accumulators = accumulators(t for t in self._tensors if t.requires_grad and t.is_leaf)
        self._compare_with(found)

    @classmethod
    def of(cls, network: nn.Module, *others: object) -> NetworkIdentity:
        """Returns the identity of a network as it is now, and of other objects that the certificate has read."""
        return cls(network, *others)

    def _compare_with(self, found: Reachable) -> None:
        """Prepares the comparison of every step with the things found, in their order."""
        self._found = found
        self._reads, self._objects, self._functions = [p.read for p in found.parts], found.objects, found.functions
        self._installed, self._classes, self._members = found.installed, found.classes, list(map(len, found.classes))
        now = self._now()
        self._lengths, self._items = list(map(len, now)), list(chain.from_iterable(now))
        self._empty = found.empty
        self._sized = found.sized
        self._sizes, self._counts = self._number_of_attributes()

    def _now(self) -> list[Collection[object]]:
        """Returns everything that is compared, as it is now."""
        code, installed = chain.from_iterable(map(code_of, self._functions)), map(_code_of, self._installed)
        return [*[read() for read in self._reads], list(map(_class_of, self._objects)), list(code), list(installed)]

    def differences(self) -> list[str]:
        """Returns a text for every change; the list is empty while the network is the one that was certified."""
        return [] if self._same() else self._in_words()

    def _same(self) -> bool:
        """Returns whether nothing has changed; it runs in every step, and reads no names."""
        try:
            now = self._now()
        except Exception:  # an attribute was deleted
            return False
        return (
            list(map(len, now)) == self._lengths
            and all(map(is_, chain.from_iterable(now), self._items))
            and not any(self._empty)
            and list(map(len, self._classes)) == self._members
            and list(map(flags_of, self._tensors)) == self._flags
            and not any(gc.get_referents(*self._accumulators))
            and self._sizes_as_certified()
            and self._modes_as_certified()
            and self._contents_as_certified()
            and not (
                torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() and modes_of_operations()
            )
        )

    def _number_of_attributes(self) -> tuple[list[int], list[int]]:
        """Returns how many attributes each module has, with and without those that the library sets at every step."""
        sizes = [len(attributes) for attributes, _ in self._sized]
        return sizes, [len(a) - sum(map(a.__contains__, names)) for a, names in self._sized]

    def _sizes_as_certified(self) -> bool:
        """Returns whether modules have as many attributes as before, not counting those set in steps."""
        if [len(attributes) for attributes in self._attributes] == self._sizes:
            return True
        sizes, counts = self._number_of_attributes()
        if counts == self._counts:
            self._sizes = sizes  # the mechanism has set or removed its own attributes
        return counts == self._counts

    def _modes_as_certified(self) -> bool:
        """Returns whether the modules are in modes that were traced: those of train() or eval(), or the first ones."""
        return [d["training"] for d in self._attributes] in self._modes

    def _contents_as_certified(self) -> bool:
        return all([_equal(t, kept) for t, kept in self._constants]) and all([bytes(a) == b for a, b in self._arrays])

    def _in_words(self) -> list[str]:
        now = NetworkIdentity(self._network, *self._others, hooks=self._hooks)
        words = modes_of_operations()
        for label in dict.fromkeys([*self._labels, *now._labels]):
            if label.endswith(_OF_PICKLING):
                continue
            if label not in now._labels:
                words.append(f"{label} was removed")
            elif label not in self._labels:
                added = now._labels[label]
                if not (isinstance(added, TrustedHook) and added.looks_only):
                    words.append(f"{label} was added")
            elif not alike(self._labels[label], now._labels[label]):
                words.append(f"{label} is another than it was")
        words += changed_tensors(self._network, self._tensors, self._flags)
        words += [f"the constant tensor of shape {tuple(t.shape)} was changed" for t, k in self._constants
                  if not _equal(t, k)]  # fmt: skip
        words += ["a constant array was changed" for a, b in self._arrays if bytes(a) != b]
        if any(gc.get_referents(*self._accumulators)):
            words.append("a hook was attached to the autograd node that adds to a parameter's grad")
        if not self._modes_as_certified():
            words += other_modes(self._network, self._modes[0])
        same_number = len(now._items) == len(self._items)
        if not words and same_number and not all(map(alike, self._items, now._items)):
            words.append("what it holds is in another order")
        if not words:  # new objects mean the same: equal numbers, or hooks that only read
            self._compare_with(now._found)
        return list(dict.fromkeys(words))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


# ---- modes and tensors of a network in the course of a run, and what has changed about them, in words

flags_of = attrgetter("requires_grad", "shape", "dtype", "__class__", "_backward_hooks", "_post_accumulate_grad_hooks")


def kept_flags(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what ``flags_of`` reads, with copies of the dicts of hooks, since torch changes these in place."""
    *flags, one, other = flags_of(tensor)
    return (*flags, *(h if h is None else dict(h) for h in (one, other)))


def alike(a: object, b: object) -> bool:
    """Returns whether two values are the same object, or equal plain values."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple) and type(a) is tuple:
        return len(a) == len(b) and all(map(alike, a, b))
    return type(a) in PLAIN and a == b


def changed_tensors(network: nn.Module, tensors: tuple[Tensor, ...], before: list[Any]) -> list[str]:
    """Returns a text for every tensor whose flags are not those of before."""
    names = {id(t): n for n, t in chain(network.named_parameters(), network.named_buffers())}
    words = []
    for tensor, old in zip(tensors, before, strict=True):
        name, now = names.get(id(tensor), "a tensor"), flags_of(tensor)
        if now[0] != old[0]:
            words.append(f"{name} was {'unfrozen' if now[0] else 'frozen'}")
        words += [f"{name} has another {what}" for what, a, b in zip(("shape", "dtype", "class"), now[1:4], old[1:4],
                                                                      strict=True) if a != b]  # fmt: skip
        if now[4:] != old[4:]:
            words.append(f"a hook was attached to {name}")
    return words


def accumulators(parameters: Iterable[Tensor]) -> list[Any]:
    """Returns the autograd nodes that add to the parameters' ``grad``.

    Python's garbage collector shows the hooks of a node, but only while no recorded graph shares it: in set-up and at
    the begin of a step, and not within a step. A node that is kept stays the one that passes use.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters]  # type: ignore[union-attr]


def modes_of_operations() -> list[str]:
    """Returns a text for every mode of torch that is active and may change what operations compute."""
    words = []
    if torch._C._len_torch_function_stack():
        modes = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
        words += [f"{type(mode).__name__} is active, which may change every operation" for mode in modes]
    if torch._C._len_torch_dispatch_stack():
        words.append("a TorchDispatchMode is active, which may change every operation")
    return words


@contextmanager
def training_mode(model: nn.Module, mode: bool) -> Iterator[None]:
    """Puts every module into one mode for the block, and each back into its own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(mode)
        yield
    finally:
        for module, training in before:
            module.training = training


def modes_of(network: nn.Module, attributes: Iterable[dict[str, Any]]) -> list[list[bool]]:
    """Returns the modes of the modules after ``train()``, after ``eval()``, and at present."""
    read: Callable[[dict[str, Any]], bool] = itemgetter("training")
    present, found = list(map(read, attributes)), []
    for mode in (True, False):
        with training_mode(network, mode):
            found.append(list(map(read, attributes)))
    return [*found, present]


def other_modes(network: nn.Module, training: list[bool]) -> list[str]:
    """Returns a text for every module that is not in the mode in which it was certified."""
    pairs = zip(network.named_modules(), training, strict=False)
    changed = [(path or "the network", module.training) for (path, module), mode in pairs if module.training != mode]
    return [
        f"{path} is {'in training' if now else 'trained in eval'} mode, as it was not when the network was certified"
        for path, now in changed
    ]
