"""The certificate of a network: bounds at every node, and the sensitivity of every parameter group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

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


Use = tuple[tuple[Tensor, ...], UseBound]


def grouped(uses: Iterable[Use], named: Mapping[str, Tensor]) -> tuple[GroupBound, ...]:
    """Returns the bounds of groups, in the order of the model's parameters.

    Parameters that are used together, or share a tensor with others, are in one group, which is named after the layer
    of its first parameter.

    Args:
        uses: The tensors of each use, and its bound.
        named: The model's parameters, in its order.
    """
    of_tensor: dict[int, list[Use]] = {}  # by the id of a tensor, all uses of its group
    for use in uses:
        earlier = {id(found): found for tensor in use[0] if (found := of_tensor.get(id(tensor))) is not None}
        together = [*(other for found in earlier.values() for other in found), use]
        of_tensor.update({id(tensor): together for tensors, _ in together for tensor in tensors})
    order = {id(tensor): (place, name) for place, (name, tensor) in enumerate(named.items())}
    groups = []
    for together in {id(group): group for group in of_tensor.values()}.values():
        held = {id(tensor): tensor for tensors, _ in together for tensor in tensors}
        placed = sorted([order.get(key, (len(order), "?")) for key in held])
        labels = tuple([name for _, name in placed])
        size, bounds = sum([tensor.numel() for tensor in held.values()]), tuple([bound for _, bound in together])
        groups.append((placed[0], GroupBound(labels[0].rpartition(".")[0] or labels[0], labels, size, bounds)))
    groups.sort(key=lambda group: group[0])
    taken = [group.name for _, group in groups]
    return tuple([
        replace(group, name=group.parameters[0]) if taken.count(group.name) > 1 else group for _, group in groups
    ])  # fmt: skip
