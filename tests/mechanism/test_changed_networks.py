"""What trains is what was certified: a network that is changed in mid-run is refused before anything is released."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from private_step import Harness, mahalanobis, make_plan, mlp, random_batch
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import CertificationError
from lipdp_lightning.bounds.identity import NetworkIdentity
from lipdp_lightning.bounds.losses import CrossEntropy

LOUDNESS = 1.0
TABLE = [1.0]
REPEATED = 1.0
REFUSALS = (ValueError, CertificationError, AssertionError)


@dataclass
class Settings:
    gain: float = 1.0


class Network(nn.Module):
    width = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.inner = nn.Sequential(nn.LeakyReLU(0.5), nn.Dropout(0.0))
        self.register_buffer("mask", torch.ones(6))
        self.scale = 1.5
        self.gains, self.options, self.settings = [1.5, [1.0], [1.0]], {"gain": 1.5}, Settings()
        self.table = torch.ones(6)
        self.pair = {"used": 1.0, "other": 150.0}

    def __iter__(self) -> Iterator[float]:
        yield REPEATED

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.pair["used"] * max(factor for factor in self)
        x = self.inner(self.first(x)) * self.mask * self.table * self.scale
        x = x * self.gains[0] * self.gains[1][0] * self.gains[2][0]
        return self.last(x * self.options["gain"] * self.settings.gain * self.width * LOUDNESS * TABLE[0] * helper())


def helper() -> float:
    return 1.0


class Louder(Network):
    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


def harness_of(scaling: str = "worst_case", network: nn.Module | None = None, **options: Any) -> Harness:
    torch.manual_seed(0)
    radius = {"radius": 0.1} if scaling in ("radius", "exact", "exact_layerwise") else {}
    plan = make_plan(scaling=scaling, max_norm=None, **radius, **options)
    return Harness(Network() if network is None else network, (4,), plan)


BATCH = random_batch(5, (4,), 3)


def loud(module: nn.Module, *args: Any) -> Any:
    return 100 * args[-1] if isinstance(args[-1], Tensor) else tuple(100 * t for t in args[-1])


def _assigned(network: Any) -> None:
    network.load_state_dict({k: 100 * v for k, v in network.state_dict().items()}, assign=True)


def _class_forward(network: Any) -> None:
    original = Network.forward
    Network.forward = lambda self, x: 100 * original(self, x)  # type: ignore[method-assign]


def _code(network: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return 100 * self.last(self.inner(self.first(x)))

    Network.forward.__code__ = forward.__code__


def _globally(name: str) -> Callable[[Any], None]:
    return lambda network: globals().__setitem__(name, 100.0 if name.isupper() else lambda: 100.0)


def _in_data(network: Any) -> None:
    network.table.data.mul_(100)


def _names_exchanged(network: Any) -> None:
    """The values stay as they are, and in their order."""
    used, other = network.pair.pop("used"), network.pair.pop("other")
    network.pair.update(other=used, used=other)


def _hook_that_removes_itself(network: Any) -> None:
    handle = network.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(100))
    handle.remove()


EDITS: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda n: n.first.register_forward_hook(loud),
    "forward hook inside": lambda n: n.inner.register_forward_hook(loud),
    "forward hook on the root": lambda n: n.register_forward_hook(loud),
    "pre-hook on the root": lambda n: n.register_forward_pre_hook(loud),
    "hook with keywords": lambda n: n.register_forward_hook(lambda m, a, k, o: 100 * o, with_kwargs=True),
    "backward hook": lambda n: n.last.register_full_backward_hook(lambda m, i, o: None),
    "backward pre-hook": lambda n: n.last.register_full_backward_pre_hook(lambda m, o: (100 * o[0],)),
    "hook on a parameter": lambda n: n.first.weight.register_hook(lambda g: 100 * g),
    "hook after accumulation": lambda n: n.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(9)),
    "hook for several gradients": lambda n: torch.autograd.graph.register_multi_grad_hook(
        [n.first.weight, n.last.weight], lambda gradients: gradients[0].mul_(100)
    ),
    "hook that removes itself": _hook_that_removes_itself,
    "names in a dict exchanged": _names_exchanged,
    "a global that a loop reads": _globally("REPEATED"),
    "forward of the instance": lambda n: setattr(n, "forward", lambda x: 100 * Network.forward(n, x)),
    "forward of a layer": lambda n: setattr(n.first, "forward", types.MethodType(lambda s, x: 100 * x, n.first)),
    "call of the instance": lambda n: setattr(n, "_compiled_call_impl", lambda x: 100 * n.forward(x)),
    "class of the instance": lambda n: setattr(n, "__class__", Louder),
    "forward of the class": _class_forward,
    "code of forward": _code,
    "attribute of the class": lambda n: setattr(Network, "width", 100.0),
    "a global": _globally("LOUDNESS"),
    "a list elsewhere": lambda n: TABLE.__setitem__(0, 100.0),
    "a function that forward calls": _globally("helper"),
    "layer replaced": lambda n: setattr(n, "first", nn.Linear(4, 6)),
    "layer replaced by another kind": lambda n: n.inner.__setitem__(0, nn.Tanh()),
    "layer added": lambda n: n.inner.append(nn.LeakyReLU(0.5)),
    "layer removed": lambda n: n.inner.__delitem__(1),
    "state assigned": _assigned,
    "parameter replaced": lambda n: setattr(n.first, "weight", nn.Parameter(torch.ones(6, 4))),
    "parameter made a tensor": lambda n: n.first._parameters.__setitem__("weight", 2 * n.first.weight),
    "parameter frozen": lambda n: n.first.weight.requires_grad_(False),
    "buffer replaced": lambda n: setattr(n, "mask", torch.full((6,), 100.0)),
    "buffer that needs gradients": lambda n: n.mask.requires_grad_(True),
    "attribute": lambda n: setattr(n, "scale", 150.0),
    "new attribute": lambda n: setattr(n, "more", 150.0),
    "attribute deleted": lambda n: delattr(n, "scale"),
    "list": lambda n: n.gains.__setitem__(0, 150.0),
    "list in a list": lambda n: n.gains[1].__setitem__(0, 150.0),
    "another list in a list": lambda n: n.gains[2].__setitem__(0, 150.0),
    "dict": lambda n: n.options.__setitem__("gain", 150.0),
    "dataclass": lambda n: setattr(n.settings, "gain", 150.0),
    "plain tensor": lambda n: n.table.mul_(100),
    "plain tensor by its data": _in_data,
    "plain tensor replaced": lambda n: setattr(n, "table", torch.full((6,), 100.0)),
    "slope": lambda n: setattr(n.inner[0], "negative_slope", 100.0),
    "dropout": lambda n: setattr(n.inner[1], "p", 0.9),
    "mode of one module": lambda n: n.inner[1].eval(),
    "scaler of a layer": lambda n: setattr(n.first, "gradient_scaler", lambda norms: 100 * torch.ones_like(norms)),
}


@contextmanager
def _restored() -> Iterator[None]:
    """Classes and globals as they were."""
    forward, code, kept = Network.forward, Network.forward.__code__, dict(globals())
    try:
        yield
    finally:
        Network.forward, Network.width = forward, 1.0  # type: ignore[method-assign]
        forward.__code__ = code
        globals().update({name: kept[name] for name in ("LOUDNESS", "REPEATED", "helper")})
        TABLE[0] = 1.0


@pytest.mark.parametrize("name", EDITS)
def test_a_network_that_was_changed_between_steps_releases_nothing(name: str) -> None:
    harness = harness_of()
    harness.release(BATCH)
    with _restored():
        EDITS[name](harness.module.network)
        with pytest.raises(REFUSALS, match="HINT"):
            harness.release(BATCH, 1)
    harness.mechanism.close()


@pytest.mark.parametrize("name", [n for n in EDITS if n not in ("scaler of a layer",)])
def test_a_network_that_was_changed_within_a_step_releases_nothing(name: str) -> None:
    harness = harness_of()
    with _restored():
        harness.accumulate(BATCH)
        EDITS[name](harness.module.network)
        with pytest.raises(REFUSALS, match="HINT"):
            harness.mechanism.privatize_(0)
    harness.mechanism.close()


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_for_all_modules_release_nothing(kind: str) -> None:
    harness = harness_of()
    harness.release(BATCH)
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with pytest.raises(REFUSALS, match=r"hook for all modules.*HINT"):
            harness.release(BATCH, 1)
    finally:
        handle.remove()
    harness.release(BATCH, 2)
    harness.mechanism.close()


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "mask"])
def test_data_that_is_replaced_between_forward_and_release_releases_nothing(name: str) -> None:
    harness = harness_of()
    harness.accumulate(BATCH)
    tensor = dict([*harness.module.network.named_parameters(), *harness.module.network.named_buffers()])[name]
    tensor.data = tensor.data.clone()
    with pytest.raises(AssertionError, match=r"weights changed.*HINT"):
        harness.mechanism.privatize_(0)
    harness.mechanism.close()


def test_a_hook_where_one_was_before_set_up_releases_nothing() -> None:
    """torch fills the same dict again."""
    network = Network()
    network.first.weight.register_hook(lambda g: g).remove()
    harness = harness_of(network=network)
    harness.release(BATCH)
    network.first.weight.register_hook(lambda g: 100 * g)
    with pytest.raises(REFUSALS, match=r"hook.*HINT"):
        harness.release(BATCH, 1)
    harness.mechanism.close()


def test_constants_of_the_loss_may_not_change() -> None:
    harness = harness_of()
    harness.release(BATCH)
    loss = harness.module.loss
    assert isinstance(loss, CrossEntropy)
    object.__setattr__(loss, "temperature", 0.01)
    with pytest.raises(REFUSALS, match=r"temperature.*HINT"):
        harness.release(BATCH, 1)
    harness.mechanism.close()


@pytest.mark.parametrize("change", ["radius", "removed"])
def test_a_cotangent_clip_stays_as_it_was(change: str) -> None:
    harness = harness_of(cotangent_clip={"first": 0.1})
    harness.release(BATCH)
    hooks = harness.module.network.first._forward_hooks
    if change == "removed":
        hooks.clear()
    else:
        next(iter(hooks.values())).clip.radius = 100.0
    with pytest.raises(REFUSALS, match="HINT"):
        harness.release(BATCH, 1)
    harness.mechanism.close()


# ---- harmless


def _loaded(network: Any) -> None:
    network.load_state_dict({k: 3 * v for k, v in network.state_dict().items()})


def _buffer(network: Any) -> None:
    network.mask.mul_(7)


def _data(network: Any) -> None:
    network.first.weight.data = 3 * network.first.weight.data


def _evaluated(network: Any) -> None:
    network.eval()
    with torch.no_grad():
        network(torch.ones(2, 4))
    network.train()


def _averaged(network: Any) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.lerp_(2 * parameter, 0.5)


def _moved_and_back(network: Any) -> None:
    kept = network.first.weight.data
    network.first.weight.data = 0 * kept
    _evaluated(network)
    network.first.weight.data = kept


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "state loaded in place": _loaded,
    "buffer edited in place": _buffer,
    "data replaced between steps": _data,
    "evaluation between steps": _evaluated,
    "average of weights": _averaged,
    "weights shown and put back": _moved_and_back,
    "state_dict hook": lambda n: n.register_state_dict_post_hook(lambda *_: None),
    "load hook": lambda n: n.register_load_state_dict_pre_hook(lambda *_: None),
    "evaluation mode throughout": lambda n: n.eval(),
    "an equal value": lambda n: setattr(n, "scale", float("1.5")),
    "zero_grad": lambda n: n.zero_grad(),
    "a copy": lambda n: __import__("copy").deepcopy(n),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("scaling", ["worst_case", "joint", "exact"])
def test_harmless_edits_are_followed(name: str, scaling: str) -> None:
    harness = harness_of(scaling)
    harness.release(BATCH)
    HARMLESS[name](harness.module.network)
    empty = harness.release(tuple(t[:0] for t in BATCH), 1)
    for row in range(5):
        own = harness.release(tuple(t[row : row + 1] for t in BATCH), 2 + row)
        moved = mahalanobis(own, empty, harness.mechanism.deviations()) * harness.plan.noise_multiplier**2
        assert moved <= 1 + 1e-5
    harness.mechanism.close()


def test_the_check_of_a_step_walks_over_no_names() -> None:
    """Python calls are counted: a few for each module, and none for a name."""
    import sys

    network = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU())])
    identity, calls = NetworkIdentity.of(network), [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        assert identity.differences() == []
    finally:
        sys.setprofile(None)
    assert calls[0] < 60


# ---- the uses of layers


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(torch.relu(self.first(x)))))


def _under_no_grad(harness: Harness) -> None:
    with torch.no_grad():
        hidden = harness.module.network.first(BATCH[0])
    harness.module.network.last(harness.module.network.first(hidden))


def _checkpointed(harness: Harness) -> None:
    torch.utils.checkpoint.checkpoint(harness.module.network, BATCH[0], use_reentrant=False).sum().backward()


PASSES: dict[str, Callable[[Harness], Any]] = {
    "another forward pass": lambda h: h.module.network(BATCH[0]),
    "in evaluation mode": lambda h: h.module.network.eval()(BATCH[0]) is h.module.network.train(),
    "one layer": lambda h: h.module.network.last(BATCH[0]),
    "other data": lambda h: h.module.network(BATCH[0][:2]),
    "a use under no_grad": _under_no_grad,
    "checkpointing": _checkpointed,
}
SCALINGS = ("worst_case", "joint", "layerwise", "radius", "exact", "exact_layerwise")


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_uses_of_layers_that_the_certificate_does_not_have_release_nothing(scaling: str, name: str) -> None:
    harness = harness_of(scaling, Twice())
    harness.release(BATCH)
    harness.mechanism.begin_step(1)
    loss = harness.module.training_step(BATCH, 0)
    with pytest.raises(ValueError, match=r"used the layers.*HINT"):
        PASSES[name](harness)
        loss.backward()
        harness.mechanism.privatize_(1)
    harness.mechanism.close()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_pass_in_place_of_the_certified_one_releases_nothing(scaling: str) -> None:
    harness = harness_of(scaling, Twice())
    harness.mechanism.begin_step(0)
    with pytest.raises(ValueError, match=r"used the layers.*HINT"):
        _under_no_grad(harness)
        harness.mechanism.scaling.example_factor(5, torch.device("cpu"))
        harness.mechanism.privatize_(0)
    harness.mechanism.close()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_passes_without_gradients_and_between_steps_take_no_part(scaling: str) -> None:
    harness = harness_of(scaling, Twice())
    expected = harness.release(BATCH)
    harness.module.network(BATCH[0])
    harness.mechanism.begin_step(1)
    with torch.no_grad():
        harness.module.network(BATCH[0])
    again = harness.release(BATCH, 1)
    assert all(torch.equal(again[name], values) for name, values in expected.items())
    harness.mechanism.close()


@pytest.mark.parametrize("layer", [1, 3, 5])
@pytest.mark.parametrize("scaling", ["worst_case", "layerwise", "joint", "exact"])
def test_weights_that_are_written_through_data_within_a_step_release_nothing(scaling: str, layer: int) -> None:
    """Such a write changes neither a version nor an address: the backward pass takes the new weights, the noise not."""
    torch.manual_seed(0)
    options = {"radius": 0.1} if scaling == "exact" else {}
    harness = Harness(mlp(), (12,), make_plan(scaling=scaling, max_norm=1.0, **options))
    batch = random_batch(6, (12,), 5)
    harness.release(batch, 0)
    harness.module.zero_grad(set_to_none=True)
    harness.mechanism.begin_step(1)
    loss = harness.module.training_step(batch, 0)
    harness.module.network[layer].weight.data.mul_(1000)
    loss.backward()
    with pytest.raises(AssertionError, match=r"weights changed between forward and privatize_.*HINT"):
        harness.mechanism.privatize_(1)
    harness.mechanism.close()
