"""Takes the step of DP-SGD in jax, as jax_privacy and optax do: gradients of all examples by vmap, compiled by XLA."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..extras import require
from ..models import MLP, ConvNet
from .contenders import CLIP_NORM, NOISE_MULTIPLIER, UPDATE_SIZE, Job, Step
from .networks import TorchMaxMin

Apply = Callable[[Iterator[Any], Any], Any]
"""Takes the weights that are left, in the order of ``parameters()``, and one example without a batch axis."""


def _linear(module: nn.Linear) -> Apply:
    def apply(weights: Iterator[Any], x: Any) -> Any:
        y = next(weights) @ x
        return y if module.bias is None else y + next(weights)

    return apply


def _convolution(module: nn.Conv2d) -> Apply:
    import jax

    padding = [(int(p), int(p)) for p in module.padding]

    def apply(weights: Iterator[Any], x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x[None], next(weights), module.stride, padding, rhs_dilation=module.dilation,
            feature_group_count=module.groups, dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )[0]  # fmt: skip
        return y if module.bias is None else y + next(weights)[:, None, None]

    return apply


def _max_min(module: TorchMaxMin) -> Apply:
    import jax.numpy as jnp

    def apply(weights: Iterator[Any], x: Any) -> Any:
        pairs = x.reshape(-1, 2, *x.shape[1:])
        first, second = pairs[:, 0], pairs[:, 1]
        return jnp.stack((jnp.maximum(first, second), jnp.minimum(first, second)), 1).reshape(x.shape)

    return apply


def _flatten(module: nn.Flatten) -> Apply:
    return lambda weights, x: x.reshape(-1)


def _in_order(module: nn.Module) -> Apply:
    layers = [translated(child) for child in module.children()]

    def apply(weights: Iterator[Any], x: Any) -> Any:
        for layer in layers:
            x = layer(weights, x)
        return x

    return apply


TRANSLATIONS: dict[type[nn.Module], Callable[[Any], Apply]] = {
    nn.Linear: _linear, nn.Conv2d: _convolution, TorchMaxMin: _max_min, nn.Flatten: _flatten, nn.Sequential: _in_order,
    MLP: _in_order, ConvNet: _in_order,
}  # fmt: skip


def translated(module: nn.Module) -> Apply:
    """Returns the module as a function of jax.

    Raises:
        ValueError: If a layer has no translation.
    """
    if type(module) not in TRANSLATIONS:
        known = ", ".join(kind.__name__ for kind in TRANSLATIONS)
        raise ValueError(
            f"contender jax cannot run the layer {type(module).__name__}. HINT: its networks are made of {known}."
        )
    return TRANSLATIONS[type(module)](module)


def clipped_sums(network: Apply, weights: list[Any], x: Any, y: Any) -> list[Any]:
    """Returns the sum over examples of the gradients of the cross-entropy, each clipped to CLIP_NORM as a whole."""
    import jax
    import jax.numpy as jnp

    def loss(weights: list[Any], x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(network(iter(weights), x))[y]

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, x, y)
    squares = sum(jnp.sum(g.reshape(len(x), -1) ** 2, 1) for g in gradients)
    factors = jnp.minimum(1.0, CLIP_NORM / (jnp.sqrt(squares) + 1e-6))
    return [jnp.tensordot(factors, g, 1) for g in gradients]


def weights_of(model: nn.Module) -> list[Any]:
    """Returns the network's parameters in jax, in their order."""
    import jax.numpy as jnp

    return [jnp.asarray(parameter.detach().numpy()) for parameter in model.parameters()]


def jax_step(job: Job, model: nn.Module) -> Step:
    """Returns one step of DP-SGD that XLA compiles as a whole; its weights stay in jax.

    Raises:
        ValueError: If jax is not installed, or if the network has a layer without a translation.
    """
    require("jax", "contender jax")
    import jax
    import jax.numpy as jnp

    network, weights = translated(model), weights_of(model)
    keys = (jax.random.fold_in(jax.random.key(0), step) for step in itertools.count())
    rate: Any = None

    @jax.jit
    def update(weights: list[Any], x: Any, y: Any, key: Any, rate: Any) -> tuple[list[Any], Any]:
        sums = clipped_sums(network, weights, x, y)
        noise = [jax.random.normal(own, s.shape) for s, own in zip(sums, jax.random.split(key, len(sums)), strict=True)]
        deviation = NOISE_MULTIPLIER * CLIP_NORM
        released = [(s + deviation * z) / job.batch_size for s, z in zip(sums, noise, strict=True)]
        norms = (jnp.sqrt(sum(jnp.sum(t**2) for t in tensors)) for tensors in (weights, released))
        moved = [w - rate * g for w, g in zip(weights, released, strict=True)]
        return moved, UPDATE_SIZE * next(norms) / jnp.maximum(next(norms), 1e-12)

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal weights, rate
        # the first step does not move, and sets the rate of the others, as for every contender
        weights, found = update(weights, x.numpy(), y.numpy(), next(keys), 0.0 if rate is None else rate)
        rate = found if rate is None else rate
        for weight in weights:
            weight.block_until_ready()

    return step
