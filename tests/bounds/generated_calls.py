"""Calls of every operation that has a rule, generated from its signature: arguments take unusual values in turn."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rule_checks import Forward
from torch import Tensor, nn

from lipdp_lightning.bounds.registry import Target, function_rule, module_rule, registered

SHAPES = ((2, 4), (4,), (4, 4, 4), (2, 3))


@dataclass(frozen=True)
class Made:
    """An argument that is made from the model and the input when forward runs."""

    name: str
    make: Callable[[Any, Any], Any]

    def __repr__(self) -> str:
        return self.name


BATCH = Made("batch", lambda m, x: x.shape[0])
SELDOM = Made("1 + batch // 4", lambda m, x: 1 + x.shape[0] // 4)
SIZE = Made("(batch, -1)", lambda m, x: (x.shape[0], -1))
SELF = Made("x", lambda m, x: x)
FLIPPED = Made("x flipped", lambda m, x: x.flip(1))
FIRST = Made("first entries", lambda m, x: x[:, :1])
BUFFER = Made("buffer", lambda m, x: m.scale)
SCALAR = Made("scalar buffer", lambda m, x: m.scalar)
FROZEN = Made("frozen parameter", lambda m, x: m.frozen)
WEIGHT = Made("weight", lambda m, x: m.weight)
KERNEL1 = Made("kernel 1d", lambda m, x: m.kernel1)
KERNEL2 = Made("kernel 2d", lambda m, x: m.kernel2)
ADJOINT2 = Made("kernel 2d of four channels", lambda m, x: m.adjoint2)
MODULE = Made("module", lambda m, x: nn.Flatten())
LISTED = Made("public list", lambda m, x: m.listed)
PAIR = Made("[x, -x]", lambda m, x: [x, -x])
TRIPLE = Made("(x, x, 2 x)", lambda m, x: (x, x, 2 * x))

_NUMBERS = (BATCH, SELDOM, SCALAR, "1", None, math.nan)
_DIMS = (1, -1, 2, (1,), (1, 2), (-1, 1), 0, (), [], (0,), (0, 1), (1, -3), -2, -3, 3, -4, (1, 1), 1.0, True, *_NUMBERS)
_FACTORS = (2.0, 3, -3, 0, 0.25, 1e-3, -1e4, math.inf, 1e-300, True, 3j, *_NUMBERS)
_OPERANDS = (3.0, SELF, FLIPPED, FIRST, BUFFER, FROZEN, 2, -3, 0, 1e-3, 1e-300, math.inf, 3j, *_NUMBERS)
_COUNTS = (1, 2, 3, (1,), (2, 1), 0, -1, 7, (), 2.0, *_NUMBERS)
_SIDES = (
    1, (1, 2), (0, 0), (2, 1, 0, 1), (-1, 2), (2, -1), (-3, 2), (-1, 2, 1, -2), (1, 1, 1, 1, 1, 1), (), (1,), 5, -1, 0,
    (1.0, 1.0), (1, BATCH), "same", "valid", *_NUMBERS,
)  # fmt: skip
_FLAGS = (False, True, None, "yes")
_FURTHER = (0, 1, (0,), (0, 1), (1, 0), (1, 1, 1), -1, (-1, 0), 2, (2, 1), 7, (), 0.0, 1.0, (0, BATCH), *_NUMBERS)
_SIZES = (SIZE, (-1, 2, 2), (-1, 4, 1), (-1, 1, 4), (2, 2), (BATCH, 8), (4, -1), (-1, BATCH, 1), (SELDOM, -1), (),
          (-1,), (BATCH, SELDOM, -1), -1, (BATCH, 2, 4), (2, -1, 1))  # fmt: skip

# what an argument of this name is given; the first value that certifies serves while the others vary
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("other", "b"), _OPERANDS),
    **dict.fromkeys(("alpha", "negative_slope", "beta", "threshold", "lambd", "temperature", "scale", "offset", "angle",
                     "input_scale", "min_val", "max_val", "min_value", "max_value", "min", "max"), _FACTORS),
    **dict.fromkeys(("dim", "dims", "dim0", "dim1", "axis", "axis0", "axis1", "start_dim", "end_dim", "source",
                     "destination"), _DIMS),
    **dict.fromkeys(("kernel_size", "stride", "dilation", "groups", "output_size", "upscale_factor", "downscale_factor",
                     "chunks", "split_size", "split_size_or_sections", "sections", "indices", "group_size", "shifts",
                     "tensor_indices_or_sections", "split_sizes", "channels"), _COUNTS),
    "rounding_mode": (None, "floor", "trunc"),
    **dict.fromkeys(("padding", "pad"), _SIDES), "output_padding": _FURTHER,
    **dict.fromkeys(("inplace", "keepdim", "ceil_mode", "count_include_pad", "return_indices", "half_to_float",
                     "implicit", "copy", "non_blocking"), _FLAGS),
    **dict.fromkeys(("size", "shape"), (*_SIZES, (-1, 4, 3), (-1, 3, 4))),
    **dict.fromkeys(("sizes", "unflattened_size"), ((2, 1), (-1, 1), (2, -1), (-1, SELDOM), *_SIZES)),
    "repeats": ((1, 2, 1), (1, 3), (2, 1, 1), (1, SELDOM, 1), (1, 0, 1), (1, -1, 1), *_SIZES),
    "tensors": (PAIR, TRIPLE, SELF, (SELF,), (SELF, BUFFER), (SELF, 2 * torch.ones(1)), ()),
    "value": (0.0, 3.0, -3, None, math.nan, math.inf, BATCH, SCALAR, SELF, "1"),
    "mode": ("constant", "circular", "reflect", "replicate", "zeros", None, "normalize", "clip", "nearest",
             "nearest-exact", "linear", "bilinear", "bicubic", "area"),
    "scale_factor": (2.0, (1.5, 3), 0.7, 0, (2, BATCH), *_NUMBERS),
    **dict.fromkeys(("align_corners", "recompute_scale_factor", "antialias"), _FLAGS),
    "equation": ("bi,i->bi", "bi,i->b", "b,i->bi", "bi,b->bi", "ib,i->ib", "ij,i->ij", "...i,i->...i", "bi,i",
                 "bi,ib->b"),
    **dict.fromkeys(("start", "length"), (1, 0, 2, -1, 9, True, 1.0, *_NUMBERS)),
    "num_parameters": (1, 2, 0), "init": _FACTORS,
    "key": (SELF, FLIPPED, BUFFER, 2.0), "attn_mask": (None, BUFFER, SELF), "dropout_p": (0.0, 0.5, 1.0, BATCH),
    **dict.fromkeys(("is_causal", "enable_gqa"), _FLAGS),
    "padding_mode": ("zeros", "circular", "reflect", "replicate", "constant"),
    "approximate": ("none", "tanh", "other", None),
    "divisor_override": (None, 1, 5, -2, 0, BATCH),
    "dtype": (torch.float64, None, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.bool),
    "memory_format": (torch.contiguous_format, torch.preserve_format, torch.channels_last),
    "device": ("cpu", None), "layout": (torch.strided, None), "pin_memory": (False, None),
    "p": (0.5, 0.0, 1.0), "radius": (1.0, 1e-3), "bound": (1.0, 1e-3),
    "weight": (WEIGHT, KERNEL1, KERNEL2, ADJOINT2, FROZEN, SELF, 2.0), "bias": (None, FROZEN, SELF, BUFFER),
    "extractor": (nn.Flatten().eval(), nn.Identity().eval(), nn.Tanh().eval()),
    "index": ((slice(None), 0), (Ellipsis, slice(1, None)), (slice(None), slice(None, None, 2)), (slice(None), None),
              0, slice(1, None), (Ellipsis, None), (slice(None), slice(None, BATCH)), (slice(None), SELDOM),
              (slice(None), [0, 0, 1]), (slice(None), True), (slice(None), SCALAR), (), None, Ellipsis,
              (slice(None), slice(None), 1), (Ellipsis, 0, 0), (Ellipsis, 0, 0, 0), (slice(0, 2),),
              1, -1, LISTED, (slice(None), LISTED), (LISTED, LISTED), (Ellipsis, LISTED, None),
              (slice(None), [[0, 1], [1, 1]]), (slice(None), [True, False])),
    **dict.fromkeys(("in_features", "in_channels", "out_features", "out_channels"), (4, 2)),
}  # fmt: skip
# arguments that are another way to give one above, name dimensions, or take random numbers
LEFT_OUT = frozenset({"self", "input", "x", "query", "tensor", "a", "out", "generator", "names", "_stacklevel",
                      "color_space"})  # fmt: skip


def targets() -> list[Target]:
    """Every operation with a rule of the library, modules included; a user's own rules are theirs to test."""
    return [t for t in registered() if rule_of(t).__module__.startswith("lipdp_lightning")]


def rule_of(target: Target) -> Any:
    """The rule that answers for an operation."""
    return module_rule(target) if isinstance(target, type) else function_rule(target)


def name_of(target: Target) -> str:
    return f".{target}" if isinstance(target, str) else getattr(target, "__name__", str(target))


def arguments_of(target: Target) -> dict[str, bool]:
    """The names of the arguments beside the input, and whether each may be left out."""
    if isinstance(target, type):
        plain = target.__init__ in (nn.Module.__init__, nn.Identity.__init__)
        return {} if plain else _from_signature(target.__init__)
    if target is torch.einsum:
        return {"equation": False, "other": False}
    if getattr(target, "__module__", "") in ("_operator", "builtins") and target not in (abs,):
        return {"index": False} if target is operator.getitem else _unary_or_binary(str(target.__name__))
    try:
        assert not isinstance(target, str)
        return _from_signature(target)
    except (AssertionError, ValueError, TypeError):
        name = target if isinstance(target, str) else target.__name__
        return _from_schemas(name)


def _unary_or_binary(name: str) -> dict[str, bool]:
    return {} if name in ("neg", "pos", "abs") else {"other": False}


def _from_signature(function: Any) -> dict[str, bool]:
    found = inspect.signature(function).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        raise ValueError("it hands its arguments on")
    return {p.name: p.default is not p.empty for p in found if p.name not in LEFT_OUT}


def _from_schemas(name: str) -> dict[str, bool]:
    """The union over the overloads that take a tensor; an argument that one of them leaves out may be left out."""
    plain = name.strip("_") if name.startswith("__") else name
    plain = {"radd": "add", "rmul": "mul", "truediv": "div", "fn": "max_pool2d"}.get(plain, plain)
    overloads = [s.arguments for s in torch._C._jit_get_schemas_for_operator(f"aten::{plain}")]
    overloads = [o for o in overloads if str(o[0].type) in ("Tensor", "List[Tensor]")]
    needed = [{a.name for a in o if not a.has_default_value()} for o in overloads]
    found = {a.name: a for o in overloads for a in o if a.name not in LEFT_OUT and "Dimname" not in str(a.type)}
    return {name: not all(name in n for n in needed) for name in found}


@dataclass(frozen=True)
class Call:
    """One call; the first ``positional`` arguments are given by position, the others by name."""

    target: Target
    shape: tuple[int, ...]
    arguments: tuple[tuple[str, Any], ...]
    positional: int

    def __str__(self) -> str:
        given = [f"{v!r}" if i < self.positional else f"{k}={v!r}" for i, (k, v) in enumerate(self.arguments)]
        return f"{name_of(self.target)}({', '.join(given)}) on {self.shape}"

    def model(self) -> nn.Module:
        if isinstance(self.target, type):
            torch.manual_seed(0)
            return nn.Sequential(self.target(**dict(self.arguments)))
        return _with_tensors(Forward(self._forward))

    def _forward(self, m: Any, x: Any) -> Any:
        given = {name: _made(value, m, x) for name, value in self.arguments}
        writes = (
            name_of(self.target).endswith("_")
            or name_of(self.target) in ("iadd", "isub", "imul", "itruediv")
            or given.get("inplace")
        )
        of = 1.0 * x if writes else x
        first = () if "tensors" in given else (of,)
        function = getattr(of, self.target) if isinstance(self.target, str) else self.target
        first = () if isinstance(self.target, str) else first
        named = dict(list(given.items())[self.positional :])
        if self.target is torch.einsum:
            return function(given["equation"], of, given["other"])
        out = function(*first, *list(given.values())[: self.positional], **named)
        return out[0] if _gives_tuple(self.target) else out


def _gives_tuple(target: Target) -> bool:
    return name_of(target).strip(".") in ("chunk", "split", "unbind", "tensor_split")


def _made(value: Any, m: Any, x: Any) -> Any:
    if isinstance(value, Made):
        return value.make(m, x)
    if isinstance(value, slice):
        return slice(*(_made(v, m, x) for v in (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return type(value)(_made(v, m, x) for v in value)
    return value


def _with_tensors(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    model.register_buffer("scalar", torch.tensor(2.0, dtype=torch.float64))
    model.register_buffer("listed", torch.tensor([1, 0, 1, 1]))
    model.weight, model.kernel1, model.kernel2, model.adjoint2 = (
        nn.Parameter(w, requires_grad=False) for w in (draw(3, 4), draw(2, 2, 2), draw(2, 4, 2, 2), draw(4, 2, 2, 2))
    )
    return model


def base_call(target: Target, accepted: Callable[[Call], bool]) -> Call | None:
    """A call that certifies: the first values of the required arguments for which one does."""
    every = arguments_of(target)
    needed = [name for name, optional in every.items() if not optional]
    others = [name for name in every if name not in needed]
    for names in (needed, needed + others[:1], needed + others[:2]):
        for shape in SHAPES:
            for values in itertools.islice(itertools.product(*(VALUES[name] for name in names)), 60):
                positional = 0 if isinstance(target, type) else len(needed)
                call = Call(target, shape, tuple(zip(names, values, strict=True)), positional)
                if _runs(call) and accepted(call):
                    return call
    return None


def _runs(call: Call) -> bool:
    """Whether torch itself takes the call, which costs a hundredth of a certificate to find out."""
    try:
        call.model().double()(torch.ones(3, *call.shape, dtype=torch.float64))
    except Exception:
        return False
    return True


def variations(base: Call) -> Iterator[Call]:
    """Each argument in turn with each of its values: as in the base call, by name, and by position."""
    given, order = dict(base.arguments), list(arguments_of(base.target))
    for place, name in enumerate(order):
        for value in VALUES[name]:
            yield from _forms(base, {**given, name: value})
            if not isinstance(base.target, type):
                before = {n: given.get(n, VALUES[n][0]) for n in order[:place]}
                yield Call(base.target, base.shape, tuple({**before, name: value}.items()), place + 1)


def _forms(base: Call, arguments: dict[str, Any]) -> Iterator[Call]:
    for positional in {0, base.positional}:
        yield Call(base.target, base.shape, tuple(arguments.items()), positional)


def pairs(base: Call) -> Iterator[Call]:
    """Two arguments at a time."""
    given = dict(base.arguments)
    for first, second in itertools.combinations(arguments_of(base.target), 2):
        for values in itertools.product(VALUES[first][:9], VALUES[second][:9]):
            yield from _forms(base, {**given, first: values[0], second: values[1]})
