"""Parameter groups: what one example moves together, and how its uses are counted."""

from __future__ import annotations

from torch import Tensor

from .certificate import GroupBound, UseBound


def grouped(uses: list[tuple[tuple[Tensor, ...], UseBound]], names: dict[int, str]) -> tuple[GroupBound, ...]:
    """Parameters that are used together, or share a tensor, are one group, named after its first parameter's layer."""
    members: list[tuple[dict[int, Tensor], list[UseBound]]] = []
    for parameters, use in uses:
        merged, together = {id(p): p for p in parameters}, [use]
        for other in [m for m in members if merged.keys() & m[0].keys()]:
            members.remove(other)
            merged = {**other[0], **merged}
            together = other[1] + together
        members.append((merged, together))
    order = {key: i for i, key in enumerate(names)}
    groups = []
    for tensors, together in members:
        keys = sorted(tensors, key=lambda k: order.get(k, len(order)))
        labels = tuple(names.get(k, "?") for k in keys)
        name = labels[0].rpartition(".")[0] or labels[0]
        groups.append((order.get(keys[0], 0), name, labels, sum(tensors[k].numel() for k in keys), tuple(together)))
    groups.sort(key=lambda g: g[0])
    taken = [g[1] for g in groups]
    return tuple(
        GroupBound(labels[0] if taken.count(name) > 1 else name, labels, numel, together)
        for _, name, labels, numel, together in groups
    )
