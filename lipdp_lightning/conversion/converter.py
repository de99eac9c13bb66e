"""Turns an ordinary model of torch, torchvision or timm into one that can be certified, with a report."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..bounds.certifier import CertificationError, certify
from ..bounds.graph import Problem
from ..bounds.losses import Loss, as_loss
from ..layers import ScaledLayer
from .chain import calls_of, evaluation, last_modules
from .conversion_report import Change, ConversionReport
from .head_trained import HeadTrained
from .limited_norms import limit_norms
from .substitutes import NormOptions, fold_scale, substitute_of

EXAMPLES = 4
"""Number of made-up inputs that a conversion is tried on."""

_TRAINED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)


class Conversion(NamedTuple):
    """The converted copy of a model, and the report of what was done."""

    network: nn.Module
    report: ConversionReport


def convert(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    *,
    train: str = "all",
    blocks: int = 1,
    alpha: float = 0.1,
    batch_norm: str = "groups",
    max_norm: float | None = None,
    input_bound: float | None = None,
    loss: Loss | nn.Module | str = "cross_entropy",
) -> Conversion:
    """Returns a copy of a model that can be certified, as far as possible, and a report; the model is left alone.

    Normalisations get a floor under their divisor and are computed for each example by itself. Dropout that is keyed by
    rows is removed. Weights and names stay. Parameters of anything but dense layers and convolutions become constants.
    What has no substitute stays as it is and is among the refusals of the report: attention, gates such as
    squeeze-and-excitation, class tokens.

    Args:
        model: The model. Its weights must be public, such as those that were trained on other people's data.
        input_shape: The shape of one example; by default the one that timm's model names.
        train: 'all' converts the whole model. 'last' freezes all but the last modules, which are converted and read the
            frozen features through a ball (see ``layers.FrozenFeatures``), so that the frozen part may compute
            anything.
        blocks: With train='last', the number of blocks that are trained beside the head; 0 trains the head alone. A
            model may offer fewer, as only modules that are called in a row up to the output can be cut off.
        alpha: The floor of the normalisations: each has Lipschitz constant 1/alpha.
        batch_norm: 'groups' normalises groups of each example's channels; 'running' keeps the running statistics as
            constants, which leaves the outputs as they were and normalises nothing.
        max_norm: Scales the weights of trained layers with a larger norm down to it; None leaves them.
        input_bound: The largest norm of an example; by default that of entries of size 1.
        loss: The loss that the certificate is for.

    Raises:
        ValueError: If an option is unknown, no shape is known, or there is nothing to cut off.

    Example::

        network, report = lipdp_lightning.convert(timm.create_model("resnet18", num_classes=10), (3, 32, 32))
        print(report)
    """
    options = NormOptions(alpha, batch_norm)
    _check(train, blocks, max_norm)
    certified_loss = as_loss(loss)
    shape = _shape_of(model, input_shape)
    bound = math.sqrt(math.prod(shape)) if input_bound is None else float(input_bound)
    x = made_up_inputs(model, shape, bound)
    network = copy.deepcopy(model)
    before = _outputs(network, x)
    if train == "all":
        changes = tuple(_convert(network, x, options))
        network, renamed, kept = _unwrapped(network), dict[str, str](), None
    else:
        network, changes, renamed, kept = _cut(network, x, blocks, options)
    if max_norm is not None:
        changes = (*changes, *_limited(network, shape, certified_loss, max_norm))
    try:
        after = _outputs(network, x)
    except Exception as error:  # a forward of any kind may rely on what a module was
        raise ValueError(
            f"convert: {type(model).__name__} no longer runs with its modules replaced ({error}). "
            "HINT: use train='last', which leaves most of them as they are."
        ) from error
    report = ConversionReport(
        changes=changes,
        moved=float((after - before).norm() / before.norm().clamp_min(1e-12)),
        refusals=_refusals(network, shape, bound, certified_loss),
        blocks=kept,
        trained=tuple(name for name, p in network.named_parameters() if p.requires_grad),
        renamed=renamed,
        input_shape=shape,
        input_bound=bound,
    )
    return Conversion(network, report)


def made_up_inputs(model: nn.Module, shape: tuple[int, ...], bound: float) -> Tensor:
    """Returns random examples within the ball; they have nothing to do with any data."""
    like = next(iter(model.parameters()), torch.zeros(()))
    x = torch.randn((EXAMPLES, *shape), generator=torch.Generator().manual_seed(0)).to(like)
    size = x.flatten(1).norm(dim=1).reshape(-1, *(1,) * len(shape))
    return x * (bound / size).clamp_max(1.0)


def _check(train: str, blocks: int, max_norm: float | None) -> None:
    problems = []
    if train not in ("all", "last"):
        problems.append(f"train={train!r} is unknown. HINT: use 'all', or 'last' for the last blocks and the head")
    if blocks < 0:
        problems.append(f"blocks={blocks} is negative. HINT: 0 trains the head alone")
    if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
        problems.append(f"max_norm={max_norm} is not positive. HINT: use 1.0, or None to keep the weights")
    if problems:
        raise ValueError("convert: " + "; ".join(problems) + ".")


def _shape_of(model: nn.Module, given: Sequence[int] | None) -> tuple[int, ...]:
    named: Any = getattr(model, "default_cfg", None)
    found = given if given is not None else (named or {}).get("input_size")
    if found is None:
        raise ValueError(
            f"convert: {type(model).__name__} does not say what it reads. HINT: give the shape of one example, "
            "convert(model, (3, 32, 32))."
        )
    return tuple(int(n) for n in found)


def _outputs(network: nn.Module, x: Tensor) -> Tensor:
    with evaluation(network):
        return torch.as_tensor(network(x)).detach().clone()


def _convert(network: nn.Module, x: Tensor, options: NormOptions, at: str = "") -> list[Change]:
    """Replaces modules of the network in place, freezes what is not measured, and returns what was done."""
    calls, _ = calls_of(nn.Sequential(network), x)
    shapes = {path.removeprefix("0").removeprefix("."): tuple(c.given.tensor.shape[1:]) for path, c in calls.items()}
    changes, replaced = [], dict[int, nn.Module]()
    for path, module in list(network.named_modules()):
        found = substitute_of(module, shapes[path], options) if path in shapes else None
        name = f"{at}.{path}" if at and path else at or path
        if found is not None:
            replaced[id(module)] = found[0]
            changes.append(Change(name, type(module).__name__, found[1], found[2]))
        else:
            changes += _own_change(name, module)
    _swap(network, replaced)
    return changes


def _swap(network: nn.Module, replaced: dict[int, nn.Module]) -> None:
    for parent in [*network.modules(), *(m for fresh in replaced.values() for m in fresh.modules())]:
        for name, child in list(parent._modules.items()):
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    if id(network) in replaced:
        network._modules[_WHOLE] = replaced[id(network)]


_WHOLE = "the whole model became"


def _unwrapped(network: nn.Module) -> nn.Module:
    whole = network._modules.get(_WHOLE)
    return network if whole is None else whole


def _own_change(path: str, module: Any) -> list[Change]:
    """Returns what became of a module that was not replaced, if it holds parameters or was changed."""
    kind, changes = type(module).__name__, []
    if fold_scale(module):
        changes.append(Change(path, kind, "its scale became part of mlp.fc2", "this changes no output"))
    held = [p for p in module._parameters.values() if p is not None]
    if getattr(module, "inplace", False) is True:
        module.inplace = False
    if isinstance(getattr(module, "drop_rate", None), float) and module.drop_rate > 0:
        module.drop_rate = 0.0
        changes.append(Change(path, kind, "drop_rate set to 0", "functional dropout is keyed by the row in the batch"))
    if held and _measured(module):
        changes.append(Change(path, kind, "kept", "dense layers and convolutions are certified as they are"))
    elif held:
        for parameter in held:
            parameter.requires_grad_(False)
        changes.append(
            Change(path, kind, "parameters frozen", "no layer measures each example's part of their gradient")
        )
    return changes


def _measured(module: nn.Module) -> bool:
    """Returns whether each example's part of the gradient of the module's parameters can be measured."""
    return type(module) in _TRAINED or isinstance(module, ScaledLayer)


def _limited(network: nn.Module, shape: tuple[int, ...], loss: Loss, largest: float) -> list[Change]:
    return [
        Change(name, "weight", f"scaled down to norm {largest:g}", "max_norm limits it")
        for name in limit_norms(network, shape, loss, largest)
    ]


def _cut(
    network: nn.Module, x: Tensor, blocks: int, options: NormOptions
) -> tuple[nn.Module, tuple[Change, ...], dict[str, str], int]:
    """Cuts the last modules off, and returns them behind the frozen rest, with what was done, the original names and
    the number of blocks.
    """
    originals = {id(t): name for name, t in _tensors(network)}
    row = last_modules(network, x)
    weighty = [i for i, path in enumerate(row) if any(map(_measured, network.get_submodule(path).modules()))]
    if not weighty:
        raise ValueError(
            f"convert: the output of {type(network).__name__} is not that of modules called in a row, so that there is "
            "no head to cut off. HINT: make the model without its classifier and train a head on "
            "lipdp_lightning.layers.FrozenFeatures(model), or on models.TimmHead for a model of timm."
        )
    kept = min(blocks, len(weighty) - 1)
    first = weighty[-1 - kept]
    tail = [(path, network.get_submodule(path)) for path in row[first:]]
    for path, _ in tail:
        network.set_submodule(path, nn.Identity())
    features = _outputs(network, x)
    size = float(features.flatten(1).norm(dim=1).max())
    bound = float(f"{1.05 * size:.2g}") if math.isfinite(size) and size > 0 else 1.0
    what = f"frozen, its output of shape {tuple(features.shape[1:])} clipped to norm {bound:g}"
    changes = [Change("", type(network).__name__, what, "only the modules below are trained")]
    made, value = [], features
    for path, module in tail:
        then = _outputs(module, value)
        changes += _convert(module, value, options, at=path)
        made.append((path, _unwrapped(module)))
        value = then
    joined = HeadTrained(network, made, bound)
    names = {name: originals[id(t)] for name, t in _tensors(joined) if id(t) in originals}
    return joined, tuple(changes), names, kept


def _tensors(network: nn.Module) -> list[tuple[str, Tensor]]:
    return [*network.named_parameters(), *network.named_buffers()]


def _refusals(network: nn.Module, shape: tuple[int, ...], bound: float, loss: Loss) -> tuple[Problem, ...]:
    if not any(p.requires_grad for p in network.parameters()):
        hint = "convert(model, train='last'), or a head on lipdp_lightning.layers.FrozenFeatures"
        return (Problem(type(network).__name__, "nothing in it can be trained", hint),)
    try:
        certify(network, shape, bound, loss)
    except CertificationError as error:
        return error.problems
    return ()
