"""The certificate of a network: bounds at every node, and the sensitivity of every parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

CERTIFIED_SCALINGS = ("worst_case", "layerwise", "joint", "radius")


@dataclass(frozen=True)
class NodeBound:
    """The bounds of one node: ``forward`` on one example's output norm, ``cotangent`` on ||d loss / d output||."""

    name: str
    operation: str
    forward: float
    lipschitz: tuple[float, ...]
    cotangent: float
    shape: tuple[int, ...]


@dataclass(frozen=True)
class UseBound:
    """The bound of one use of a group's parameters.

    Guarantee: for every example, ||gradient of this use|| <= cotangent_bound * gradient_factor. A ``scalable`` use
    belongs to a layer that can measure n_ik and scale its parameter gradient by example.
    """

    node: str
    module: str
    cotangent_bound: float
    gradient_factor: float
    input_bound: float
    lipschitz: float
    scalable: bool


@dataclass(frozen=True)
class GroupBound:
    """The bound of a layer's parameters together.

    The bounds of several uses add: their gradients may point in one direction, so a root of squares would be too small.
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    uses: tuple[UseBound, ...]

    @cached_property
    def worst_case(self) -> float:
        """Delta_k of unscaled gradients: the sum of l * n over the uses."""
        return sum(u.cotangent_bound * u.gradient_factor for u in self.uses)

    @cached_property
    def layerwise(self) -> float:
        """Delta_k of gradients divided by the example's own n_ik: the sum of l, or of l * n for unscalable uses."""
        return sum(u.cotangent_bound * (1.0 if u.scalable else u.gradient_factor) for u in self.uses)

    def sensitivity(self, scaling: str) -> float:
        """Returns Delta_k under the scaling of this name."""
        if scaling in ("layerwise", "radius"):
            return self.layerwise
        # joint keeps the worst case per group; its scalar couples the groups (see mechanism.scaling)
        if scaling in ("worst_case", "joint"):
            return self.worst_case
        if scaling == "batch_max":
            # thesis Algorithm 8, line 5, as printed, uses the layer's own norm; the result is no bound
            return sum(u.cotangent_bound * u.lipschitz for u in self.uses)
        raise ValueError(f"scaling={scaling!r} is unknown. HINT: use one of {', '.join(CERTIFIED_SCALINGS)}.")


@dataclass(frozen=True)
class Certificate:
    """Upper bounds for the present weights, which hold for every example of input norm at most ``input_bound``."""

    nodes: tuple[NodeBound, ...]
    groups: tuple[GroupBound, ...]
    loss_lipschitz: float
    input_bound: float
    output: str

    def sensitivities(self, scaling: str) -> dict[str, float]:
        """Returns Delta_k of every group: one example changes its summed gradient by at most this, in the l2 norm."""
        return {group.name: group.sensitivity(scaling) for group in self.groups}

    def sizes(self) -> dict[str, int]:
        """Returns the number of parameters of every group."""
        return {group.name: group.numel for group in self.groups}

    def group(self, name: str) -> GroupBound:
        """Returns the group of this name."""
        return next(g for g in self.groups if g.name == name)

    def node(self, name: str) -> NodeBound:
        """Returns the node of this name."""
        return next(n for n in self.nodes if n.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        plain = asdict(self)
        for group, bound in zip(plain["groups"], self.groups, strict=True):
            group["sensitivity"] = {s: bound.sensitivity(s) for s in CERTIFIED_SCALINGS}
        return plain


Use = tuple[tuple[Tensor, ...], UseBound]


@dataclass(frozen=True)
class _Group:
    name: str
    labels: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    uses: tuple[int, ...]


class Groups:
    """Sorts parameters into groups: those that are used together, or share a tensor, are in one group.

    A group is named after its first parameter's layer. The groups are computed anew only if uses read other tensors
    than the last time.

    Args:
        named: The model's parameters, in its order.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self._read: list[tuple[Tensor, ...]] = []  # kept alive, so that no other tensor can get the id of one
        self._identities: list[tuple[int, ...]] = []
        self._groups: list[_Group] = []

    def of(self, uses: Sequence[Use]) -> tuple[GroupBound, ...]:
        """Returns the groups with the bounds of their uses, in the order of the model's parameters."""
        identities = [tuple(map(id, parameters)) for parameters, _ in uses]
        if identities != self._identities:
            self._read = [parameters for parameters, _ in uses]
            self._groups, self._identities = _work_out(self._read, self._named), identities
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
