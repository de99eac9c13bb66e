"""Which products may use a GPU's tensor cores, and that no other does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend import KERNELS, pretended_gpu, to_gpu
from private_step import NETWORKS, Harness, make_plan, random_batch
from steps import module_to_gpu
from torch import nn

from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.kernels.numeric_environment import arithmetic_problems, require_exact_arithmetic
from lipdp_lightning.layers import contribution, make_private, scaled
from lipdp_lightning.layers.contribution import weighted_gradients
from lipdp_lightning.layers.scaled import reports_of
from lipdp_lightning.mechanism.allocation import sum_margin
from lipdp_lightning.mechanism.step import Mechanism

SHAPE, TRAINS = NETWORKS["convnet"][1], (True, True)


def certifier(network: nn.Module, kind: torch.dtype = torch.float32, tf32: bool = False) -> Certifier:
    from lipdp_lightning.norms.follow import Follower

    return Certifier(network, SHAPE, 1.0, "cross_entropy", norms=Follower(), compute_dtype=kind, tf32=tf32)


def network() -> nn.Module:
    torch.manual_seed(0)
    return make_private(NETWORKS["convnet"][0]())


KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "float32": ({}, False),
    "TF32 was asked for": ({"tf32": True}, True),
    "bfloat16": ({"kind": torch.bfloat16}, True),
    "float64": ({"kind": torch.float64, "tf32": True}, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_noise_pays_for_tensor_cores_where_they_may_be_used(name: str) -> None:
    options, expected = KINDS[name]
    for scaling in ("joint", "layerwise", "worst_case", "exact"):
        plan = make_plan(scaling=scaling, **({"radius": 1.0} if scaling == "exact" else {}))
        model = network()
        mechanism = Mechanism(model, certifier(model, **options), plan, bytes(16))
        budget = mechanism.scaling.budget
        used = expected and scaling != "exact"  # whose positions may cancel, so that rounded factors weigh more
        assert budget.tensor_cores == used
        assert budget.margin(0) == sum_margin(budget.expected_batch_size, used)
        assert all(m.tensor_cores == used for m in model.modules() if hasattr(m, "tensor_cores"))
        mechanism.close()
        assert not any(getattr(m, "tensor_cores", False) for m in model.modules())


class Switches:
    """Notes the switches of TF32 while sums over the batch are formed, and at all other products."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sums: list[tuple[bool, bool]] = []
        self.others: list[tuple[bool, bool]] = []
        product, backward = contribution._product, contribution.conv_gradient

        def noted(*given: Any) -> Any:
            self.sums.append(self._now())
            return product(*given)

        def to_input(*given: Any, which: int) -> Any:
            (self.others if which == 0 else []).append(self._now())
            return backward(*given, which=which)

        patch.setattr(contribution, "_product", noted)
        patch.setattr(contribution, "conv_gradient", to_input)
        patch.setattr(scaled, "conv_gradient", to_input)

    @staticmethod
    def _now() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("scaling", ["joint", "layerwise", "exact"])
@pytest.mark.parametrize("allowed", [False, True])
def test_sums_over_the_batch_use_them_and_nothing_else_does(
    allowed: bool, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_exact_arithmetic()
    plan = make_plan(scaling=scaling, **({"radius": 1.0} if scaling == "exact" else {}))
    with pretended_gpu(monkeypatch):
        harness = Harness(module_to_gpu(NETWORKS["convnet"][0]()), SHAPE, plan)
        module_to_gpu(harness.module)
        for layer in harness.module.modules():
            if hasattr(layer, "tensor_cores"):
                layer.tensor_cores = allowed
        harness.mechanism.scaling._attached = [(m, reports_of(m)) for m, _ in harness.mechanism.scaling._attached]
        switches = Switches(monkeypatch)
        harness.mechanism.begin_step(0)
        harness.accumulate(tuple(to_gpu(part, counted=False) for part in random_batch(6, SHAPE, 5)), 0)
        harness.mechanism.privatize_(0)
    used = allowed and scaling != "exact"
    assert switches.sums == [] if scaling == "joint" and not allowed else set(switches.sums) == {(used, used)}
    assert set(switches.others) <= {(False, False)}
    assert arithmetic_problems() == []


def test_exact_norms_and_their_sums_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors of a micro-batch are known to the device alone: no layer asks the host about them."""
    plan = make_plan(scaling="exact", radius=1.0)
    with pretended_gpu(monkeypatch) as counts:
        harness = Harness(module_to_gpu(NETWORKS["convnet"][0]()), SHAPE, plan)
        module_to_gpu(harness.module)
        batch = tuple(to_gpu(part, counted=False) for part in random_batch(6, SHAPE, 5))
        harness.mechanism.begin_step(0)
        counts.clear()
        harness.accumulate(batch, 0)
        harness.mechanism.scaling.take_sums()
        assert (counts.waits, counts.to_host, counts.to_device) == (0, 0, 0)


@pytest.mark.parametrize("rows", [4, 64])
def test_tensor_cores_sum_by_one_kernel_however_long_the_sum(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And others in pieces, each of which is launched."""
    torch.manual_seed(0)
    options = [1, 1], [1, 1], [1, 1], 1
    x, d, weight = torch.randn(rows, 3, 32, 32), torch.randn(rows, 5, 32, 32), torch.randn(5, 3, 3, 3)
    exact, _ = weighted_gradients(x.bfloat16().double(), d.bfloat16().double(), weight.double(), None, TRAINS, options)
    launched = {}
    with pretended_gpu(monkeypatch) as counts:
        for kind in (torch.bfloat16, torch.float32):
            given = [to_gpu(t, counted=False) for t in (x.to(kind), d.to(kind), weight)]
            counts.clear()
            found = weighted_gradients(*given, None, TRAINS, options, tensor_cores=kind == torch.bfloat16)
            launched[kind] = counts.launches
            if kind == torch.bfloat16:
                assert all(f.dtype == torch.float32 for f in found)
                torch.testing.assert_close(found[0].inner.double(), exact, rtol=1e-6, atol=1e-5)
                torch.testing.assert_close(found[1].inner, d.bfloat16().float().sum((0, 2, 3)), rtol=1e-4, atol=1e-3)
    assert launched[torch.bfloat16] == 4
    assert launched[torch.float32] > rows // 16


@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
@pytest.mark.parametrize("weighed", [False, True])
def test_the_kernel_is_given_factors_as_they_are_or_in_float32(
    kinds: tuple[torch.dtype, ...], weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor of an example that was rounded to bfloat16 would be beyond the margin."""
    torch.manual_seed(0)
    x, d, weight = torch.randn(6, 7).to(kinds[0]), torch.randn(6, 5).to(kinds[1]), torch.randn(5, 7)
    factor = torch.rand(6) if weighed else None
    exact, bias = weighted_gradients(x.double(), d.double(), weight.double(), factor, TRAINS, None)
    with pretended_gpu(monkeypatch), monkeypatch.context() as noting:
        given: list[tuple[torch.dtype, ...]] = []
        true = KERNELS.weight_gradient
        noting.setattr(KERNELS, "weight_gradient", lambda *a: (given.append((a[1].dtype, a[0].dtype)), true(*a))[1])
        own = [to_gpu(t, counted=False) for t in (x, d, weight)]
        found = weighted_gradients(*own, None if factor is None else to_gpu(factor), TRAINS, None, tensor_cores=True)
    assert given == [(torch.float32,) * 2 if weighed else kinds]
    for one, other in zip(found, (exact, bias), strict=True):
        torch.testing.assert_close(one.inner.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", ["groups", "no tensor cores"])
def test_what_the_kernel_is_not_for_goes_to_torch(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("the kernel was called")

    groups = 2 if given == "groups" else 1
    x, d = torch.randn(4, 6, 8, 8).bfloat16(), torch.randn(4, 4, 8, 8).bfloat16()
    weight, options = torch.randn(4, 6 // groups, 3, 3), ([1, 1], [1, 1], [1, 1], groups)
    with pretended_gpu(monkeypatch), monkeypatch.context() as patched:
        patched.setattr(KERNELS, "weight_gradient", refused)
        own = [to_gpu(x), to_gpu(d), to_gpu(weight)]
        cores = given != "no tensor cores"
        assert weighted_gradients(*own, None, TRAINS, options, tensor_cores=cores)[0] is not None
