"""When products in float32 can be trusted."""

from __future__ import annotations

import pytest
import torch

from lipdp_lightning.norms import strips
from lipdp_lightning.norms.strips import float32_products_are_exact_to_rounding

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_reduced_precision_is_noticed(precision: str) -> None:
    assert float32_products_are_exact_to_rounding(CPU)
    torch.set_float32_matmul_precision(precision)
    try:
        assert not float32_products_are_exact_to_rounding(CPU)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert float32_products_are_exact_to_rounding(CPU)


@pytest.mark.parametrize("disagreeing", [False, True])
def test_older_interface_is_enough_to_lose_trust(disagreeing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def precision() -> str:
        if disagreeing:
            raise RuntimeError("mix of the legacy and new APIs")
        return "high"

    monkeypatch.setattr(torch, "get_float32_matmul_precision", precision)
    assert not float32_products_are_exact_to_rounding(CPU)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one interface only")
@pytest.mark.parametrize("interface", ["general", "mkldnn", "cuda"])
def test_reduced_precision_is_noticed_through_the_newer_interfaces(interface: str) -> None:
    holders = {
        "general": torch.backends,
        "mkldnn": torch.backends.mkldnn.matmul,
        "cuda": torch.backends.cuda.matmul,
    }
    holder = holders[interface]
    before = holder.fp32_precision
    holder.fp32_precision = "tf32"
    try:
        assert not float32_products_are_exact_to_rounding(CPU)
    finally:
        holder.fp32_precision = before
    assert float32_products_are_exact_to_rounding(CPU)


@pytest.mark.parametrize("name", strips._ONEDNN_MODES)
def test_reduced_precision_is_noticed_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "BF16")
    assert not float32_products_are_exact_to_rounding(CPU)
    monkeypatch.setenv(name, "strict")
    assert float32_products_are_exact_to_rounding(CPU)


def test_unknown_devices_are_not_trusted() -> None:
    assert not float32_products_are_exact_to_rounding(torch.device("meta"))
