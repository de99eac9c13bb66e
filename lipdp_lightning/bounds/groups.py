"""Parameter groups: what one example moves together, and how its uses are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from .certificate import GroupBound, UseBound

Use = tuple[tuple[Tensor, ...], UseBound]


@dataclass(frozen=True)
class _Group:
    name: str
    labels: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    uses: tuple[int, ...]


class Groups:
    """Parameters that are used together, or share a tensor, are one group, named after its first parameter's layer.

    Which ones do is worked out when uses read other tensors than the last time, or the model holds others.
    """

    def __init__(self) -> None:
        self._read: list[tuple[Tensor, ...]] = []  # alive here: none of another identity can take their place
        self._identities: tuple[list[int], list[int]] = [], []
        self._named: Mapping[str, Tensor] = {}
        self._groups: list[_Group] = []

    def of(self, uses: Sequence[Use], named: Mapping[str, Tensor]) -> tuple[GroupBound, ...]:
        """``named``: the model's parameters, in its order; another object if they are others than the last time."""
        read = [parameters for parameters, _ in uses]
        identities = list(map(len, read)), list(map(id, chain.from_iterable(read)))
        if named is not self._named or identities != self._identities:
            self._read, self._named, self._groups = read, named, _work_out(read, named)
            self._identities = identities
        return tuple([
            GroupBound(g.name, g.labels, sum([t.numel() for t in g.tensors]), tuple([uses[i][1] for i in g.uses]))
            for g in self._groups
        ])  # fmt: skip


def _work_out(read: Sequence[tuple[Tensor, ...]], named: Mapping[str, Tensor]) -> list[_Group]:
    names = {id(tensor): name for name, tensor in named.items()}
    order = {key: i for i, key in enumerate(names)}
    members: list[tuple[dict[int, Tensor], list[int]]] = []
    for index, parameters in enumerate(read):
        merged, together = {id(p): p for p in parameters}, [index]
        for other in [m for m in members if merged.keys() & m[0].keys()]:
            members.remove(other)
            merged = {**other[0], **merged}
            together = other[1] + together
        members.append((merged, together))
    groups = []
    for tensors, together in members:
        keys = sorted(tensors, key=lambda k: order.get(k, len(order)))
        labels = tuple(names.get(k, "?") for k in keys)
        name = labels[0].rpartition(".")[0] or labels[0]
        held = tuple(tensors[k] for k in keys)
        groups.append((order.get(keys[0], 0), _Group(name, labels, held, tuple(together))))
    groups.sort(key=lambda g: g[0])
    taken = [g.name for _, g in groups]
    return [_Group(g.labels[0] if taken.count(g.name) > 1 else g.name, g.labels, g.tensors, g.uses) for _, g in groups]
