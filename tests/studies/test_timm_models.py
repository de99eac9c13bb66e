"""The converter on architectures of timm: lipdp_lightning/studies/timm_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lipdp_lightning.studies.timm_models import ARCHITECTURES, FORMS, main, try_architecture

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "name, form",
    [
        ("test_resnet", "converted, norms limited"),
        ("test_efficientnet", "last block"),
        ("test_convnext", "converted"),
        ("test_vit", "head on a frozen backbone"),
    ],
)
def test_small_architectures_train_in_the_form_that_they_allow(name: str, form: str) -> None:
    outcome = try_architecture(name)
    assert outcome.form == form, str(outcome)
    assert 0 < outcome.trained <= outcome.parameters


def test_the_list_has_28_and_the_page_says_the_form_of_at_least_20() -> None:
    page = (ROOT / "docs/convert.md").read_text(encoding="utf-8")
    assert len(ARCHITECTURES) == 28
    assert len([name for name in ARCHITECTURES if f"| `{name}` |" in page]) >= 20


@pytest.mark.slow
def test_twenty_of_28_architectures_train_privately(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    *rows, last = capsys.readouterr().out.strip().splitlines()
    page = (ROOT / "docs/convert.md").read_text(encoding="utf-8")
    assert len(rows) == 28 and int(last.split()[0]) >= 20
    for row in rows:
        name = row.split()[0]
        found = max((form for form in FORMS if f" {form} " in row), key=len)
        for line in [line for line in page.splitlines() if f"| `{name}` |" in line]:
            assert line.split("|")[2].strip() == found, row
