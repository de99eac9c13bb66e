"""The identity of a network: everything that tracing reads from it and a certificate depends on, compared cheaply."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .reachable import CODE_NAMES, PLAIN, Reachable, TrustedHook

__all__ = ["NetworkIdentity", "TrustedHook", "modes_of", "training_mode"]

_OF_PICKLING = (".__slotnames__", ".__annotations__", ".__doc__")  # Python adds these to classes of copied objects
# objects of these types equal nothing but themselves, or the same text, so that comparing two lists suffices for them;
# all others are compared by identity, too
_EQUAL_ONLY_TO_ITSELF = (types.FunctionType, types.BuiltinFunctionType, str, type(None), property, staticmethod,
                         classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)  # fmt: skip
_code_of, _class_of = attrgetter(*CODE_NAMES), attrgetter("__class__")
_flags = attrgetter("requires_grad", "shape", "_backward_hooks", "_post_accumulate_grad_hooks")


class NetworkIdentity:
    """The types, hooks, attributes, constants, code, tensors and modes of a network at the time of construction.

    The values of parameters and buffers are not part of it, since every certificate reads them anew. Whatever is
    compared by identity is kept alive here, so that no other object can get its id.

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
        found.network(network)
        for other in others:
            found.value(type(other).__name__, other)
        self.unsteady = tuple(dict.fromkeys(found.unsteady))
        self._labels = dict(found.labelled())
        self._hooks = tuple(found.hooks)
        self._constants = tuple((t, t.detach().clone()) for t in found.constants)
        self._arrays = tuple((a, bytes(a)) for a in found.arrays)
        self._attributes = tuple(found.attributes)
        self._modes = modes_of(network, self._attributes)
        self._tensors = tuple(found.tensors)
        self._flags = list(map(_kept_flags, self._tensors))
        self._compare_with(found)

    @classmethod
    def of(cls, network: nn.Module, *others: object) -> NetworkIdentity:
        """Returns the identity of a network as it is now, and of other objects that the certificate has read."""
        return cls(network, *others)

    def _compare_with(self, found: Reachable) -> None:
        """Prepares the comparison of every step with the things found, in their order."""
        self._found = found
        self._sequences: tuple[Callable[[], Iterable[object]], ...] = (
            *chain.from_iterable((m.__iter__, m.values) for m in found.mappings if m),
            *(s.__iter__ for s in found.sequences),
            *found.reads,
        )
        items = self._now()
        weak = [place for place, item in enumerate(items) if type(item) not in _EQUAL_ONLY_TO_ITSELF]
        own = {id(d) for d in found.hooks_and_parts if not d}
        self._by_identity = itemgetter(*(place for place in weak if id(items[place]) not in own), 0)
        self._items = [{} if id(item) in own else item for item in items]
        self._identical = self._by_identity(self._items)
        self._empty = tuple(m for m in found.mappings if not m and id(m) not in own)
        self._sized = tuple(mapping for mapping, _ in found.sized)
        self._sizes, self._counts = list(map(len, self._sized)), _counts(found.sized)

    def _now(self) -> list[object]:
        """Returns everything that is compared, as it is now."""
        found = self._found
        return [
            *chain.from_iterable([read() for read in self._sequences]),
            *map(_class_of, found.objects),
            *[one() for one in found.members],
            *chain.from_iterable(map(_code_of, found.functions)),
        ]

    def differences(self) -> list[str]:
        """Returns a text for every change; the list is empty while the network is the one that was certified."""
        return [] if self._same() else self._in_words()

    def _same(self) -> bool:
        """Returns whether nothing has changed, by comparing flat lists; it runs in every step and reads no names."""
        try:
            items = self._now()
            if items != self._items:  # Python compares identical objects without calling their __eq__
                return False
        except Exception:  # an attribute was deleted, or a new value cannot be compared
            return False
        return (
            all(map(is_, self._by_identity(items), self._identical))
            and not any(self._empty)
            and self._sizes_as_certified()
            and list(map(_flags, self._tensors)) == self._flags
            and self._modes_as_certified()
            and self._contents_as_certified()
        )

    def _sizes_as_certified(self) -> bool:
        """Returns whether classes and modules have as many attributes as before, not counting those set in steps."""
        sizes = list(map(len, self._sized))
        if sizes != self._sizes and _counts(self._found.sized) == self._counts:
            self._sizes = sizes  # the mechanism has set or removed its own attributes
        return sizes == self._sizes

    def _modes_as_certified(self) -> bool:
        """Returns whether the modules are in modes that were traced: those of train() or eval(), or the first ones."""
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
        same_length = len(now._identical) == len(self._identical)
        if not words and same_length and not all(map(_alike, self._identical, now._identical)):
            words.append("something that it holds is another than it was")
        if not words:  # new objects mean the same: equal numbers, or hooks that only read
            self._compare_with(now._found)
        return list(dict.fromkeys(words))


def _counts(sized: list[tuple[Mapping[str, Any], tuple[str, ...]]]) -> list[int]:
    """Returns the number of attributes of each class and module, without those that the library sets at every step."""
    return [len(mapping) - sum(map(mapping.__contains__, names)) for mapping, names in sized]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _alike(a: object, b: object) -> bool:
    """Returns whether two values are the same object, or equal plain values."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


def _kept_flags(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what ``_flags`` reads, with copies of the dicts of hooks, since torch changes these in place."""
    needs_gradient, shape, *hooks = _flags(tensor)
    return (needs_gradient, shape, *(h if h is None else dict(h) for h in hooks))


def _changed_tensors(network: nn.Module, tensors: tuple[Tensor, ...], before: list[Any]) -> list[str]:
    names = {id(t): n for n, t in chain(network.named_parameters(), network.named_buffers())}
    words = []
    for tensor, old in zip(tensors, before, strict=True):
        name, now = names.get(id(tensor), "a tensor"), _flags(tensor)
        if now[0] != old[0]:
            words.append(f"{name} was {'unfrozen' if now[0] else 'frozen'}")
        if now[1] != old[1]:
            words.append(f"{name} has another shape")
        if now[2:] != old[2:]:
            words.append(f"a hook was attached to {name}")
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
    read = itemgetter("training")
    present, found = list(map(read, attributes)), []
    for mode in (True, False):
        with training_mode(network, mode):
            found.append(list(map(read, attributes)))
    return [*found, present]


def _other_modes(network: nn.Module, training: list[bool]) -> list[str]:
    pairs = zip(network.named_modules(), training, strict=False)
    changed = [(path or "the network", module.training) for (path, module), mode in pairs if module.training != mode]
    return [
        f"{path} is {'in training' if now else 'trained in eval'} mode, as it was not when the network was certified"
        for path, now in changed
    ]
