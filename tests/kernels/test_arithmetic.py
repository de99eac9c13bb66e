"""Switches that let products round further: lipdp_lightning/kernels/numeric_environment.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import pytest
import torch

from lipdp_lightning.kernels import numeric_environment as arithmetic
from lipdp_lightning.kernels.numeric_environment import (
    arithmetic_problems,
    check_exact_arithmetic,
    require_exact_arithmetic,
)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in arithmetic._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    require_exact_arithmetic()
    yield
    require_exact_arithmetic()


def switch(path: str, value: object) -> Callable[[], object]:
    *parents, name = path.split(".")
    holder = attrgetter(".".join(parents))(torch.backends) if parents else torch.backends
    return lambda: setattr(holder, name, value)


SPELLINGS: dict[str, Callable[[], object]] = {
    **{path: switch(path, "tf32" if wanted == "ieee" else True) for path, _, _, wanted in arithmetic._switches()},
    "bfloat16 products on a CPU": switch("mkldnn.matmul.fp32_precision", "bf16"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "attention": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
    "the default of every backend": lambda: [switch(path, "none")() for path in arithmetic._IEEE],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_noticed_and_set_back(spelling: str) -> None:
    assert arithmetic_problems() == []
    SPELLINGS[spelling]()
    problems = arithmetic_problems()
    assert problems and all("HINT: " in problem for problem in problems)
    with pytest.raises(ValueError, match="not that of the certificate"):
        check_exact_arithmetic()
    require_exact_arithmetic()
    assert arithmetic_problems() == []


def test_no_spelling_of_this_version_is_missing() -> None:
    """A new version of torch may have another place of the same name."""
    found = set()
    for name, module in vars(torch.backends).items():
        for place in (name, *(f"{name}.{part}" for part in ("matmul", "conv", "rnn"))):
            holder = getattr(module, place.partition(".")[2], None) if "." in place else module
            for attribute in ("fp32_precision", "allow_tf32"):
                try:
                    if holder is not None and isinstance(getattr(holder, attribute), str | bool):
                        found.add(f"{place}.{attribute}")
                except (AttributeError, RuntimeError):
                    continue
    assert {"cuda.matmul.fp32_precision", "cudnn.allow_tf32", "mkldnn.conv.fp32_precision"} <= found
    assert {place for place in found if not place.startswith("miopen")} <= {*arithmetic._IEEE, *arithmetic._OFF}


@pytest.mark.parametrize("name", arithmetic._ENVIRONMENT)
def test_a_variable_that_libraries_read_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wrong in (("1" if "TF32" in name else "BF16", True), ("0" if "TF32" in name else "strict", False)):
        monkeypatch.setenv(name, value)
        assert bool(arithmetic_problems()) is wrong
        assert all("before the program starts" in problem for problem in arithmetic_problems())


def test_what_was_set_before_by_one_spelling_alone_is_not_enough() -> None:
    """What set-up once did: the general default, chosen afterwards or before, still reached the convolutions."""
    for path in arithmetic._IEEE:
        switch(path, "none")()
    torch.backends.fp32_precision = "tf32"
    torch.set_float32_matmul_precision("highest")
    assert torch.backends.mkldnn.conv.fp32_precision == "tf32" and arithmetic_problems()
