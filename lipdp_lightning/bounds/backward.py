"""Backward bounds over a graph with branches: the slot rule and its two refinements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from .registry import Bound

Slots = Mapping[fx.Node, Sequence[fx.Node]]  # the nodes that each node's argument slots read, with multiplicity


def _gain(bound: Bound, slots: Sequence[float]) -> float:
    """Returns the Lipschitz constant in several slots of one operation that all read the same value."""
    return math.hypot(*slots) if bound.quadrature else sum(slots)


def _from_reader(places: Sequence[int], bound: Bound, received: float) -> float:
    """Returns a bound on the cotangent that a reader, having received one, passes on to the value in these slots."""
    if received == 0:
        return 0.0
    slots = bound.slots
    gain = slots[places[0]] if len(places) == 1 else _gain(bound, [slots[place] for place in places])
    return min(received * gain, bound.cotangent_cap)


def _member(reader: fx.Node, parts: int) -> int:
    """Returns which member of a tuple the reader takes; -1 is the last one, not one more."""
    index = reader.args[1]
    assert isinstance(index, int)
    return index % parts


class CotangentWalk:
    """Computes cotangent bounds backward through one graph, which is prepared once.

    The slot rule is l_v = sum of l_u L_(u,a) over the slots (u, a) that read v. Two refinements give upper bounds, too:

    * the members of a tuple (split, chunk) receive disjoint cotangents, which combine by root of squares;
    * if every path from v to the output passes through d, then l_v <= l_d * Lip(v -> d). The constant is propagated
      forward, where the inputs of ``cat`` combine by root of squares.
    """

    def __init__(self, order: Sequence[fx.Node], slots: Slots, output: fx.Node) -> None:
        self._order = tuple(order)
        self._slots = slots
        self._output = output
        # the readers of each node, with the slots in which they read it
        self._readers: dict[fx.Node, list[tuple[fx.Node, list[int]]]] = {node: [] for node in order}
        for node in order:
            for read in dict.fromkeys(slots[node]):
                places = [i for i, other in enumerate(slots[node]) if other is read]
                self._readers[read].append((node, places))
        self._regions = self._find_regions()

    def run(
        self, bounds: Mapping[fx.Node, Bound], at_output: float, caps: Mapping[fx.Node, float]
    ) -> dict[fx.Node, float]:
        """Returns l_v of every node; ``caps`` holds nodes whose accumulated cotangent is clipped."""
        cotangent: dict[fx.Node, float] = {}
        for node in reversed(self._order):
            received = self._received(node, bounds, cotangent)
            region = self._regions.get(node)
            if region is not None:
                received = min(received, cotangent[region[-1]] * self._between(node, region, bounds))
            if node is self._output:
                received += at_output
            cotangent[node] = min(received, caps[node]) if node in caps else received
        return cotangent

    def _received(self, node: fx.Node, bounds: Mapping[fx.Node, Bound], cotangent: Mapping[fx.Node, float]) -> float:
        arriving = [
            (reader, _from_reader(places, bounds[reader], cotangent[reader])) for reader, places in self._readers[node]
        ]
        parts = len(bounds[node].parts)
        if parts == 0:
            return sum([value for _, value in arriving], 0.0)
        by_member: dict[int, float] = {}
        for reader, value in arriving:
            member = _member(reader, parts)
            by_member[member] = by_member.get(member, 0.0) + value
        return math.hypot(*by_member.values())

    def _between(self, start: fx.Node, region: Sequence[fx.Node], bounds: Mapping[fx.Node, Bound]) -> float:
        reach = {start: 1.0}
        for node in region:
            steps = [reach.get(read, 0.0) * c for read, c in zip(self._slots[node], bounds[node].slots, strict=True)]
            reach[node] = _gain(bounds[node], steps)
        return reach[region[-1]]

    def _find_regions(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Returns, for each node that several slots read, the nodes up to the first that all paths pass, and it."""
        position = {node: i for i, node in enumerate(self._order)}
        passed: dict[fx.Node, frozenset[fx.Node]] = {}
        regions = {}
        for node in reversed(self._order):
            onward = [passed[r] for r, _ in self._readers[node] if r in passed]
            if node is self._output:
                passed[node] = frozenset((node,))
            elif onward:
                common = frozenset.intersection(*onward)
                passed[node] = common | {node}
                if self._several(node) and common:
                    nearest = min(common, key=position.__getitem__)
                    span = self._order[position[node] + 1 : position[nearest] + 1]
                    regions[node] = self._reached(node, span)
        return regions

    def _several(self, node: fx.Node) -> bool:
        return sum(len(places) for _, places in self._readers[node]) > 1

    def _reached(self, start: fx.Node, span: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        reached = {start}
        for node in span:
            if reached.intersection(self._slots[node]):
                reached.add(node)
        return tuple(n for n in self._order if n in reached and n is not start)
