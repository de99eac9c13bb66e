"""The frozen embedding of tokens: rows within norm 1, padding is zero, and whatever arrives is read as a token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lipdp_lightning.bounds import certify
from lipdp_lightning.features import TokenEmbedding
from lipdp_lightning.layers import BoundedInput, FrozenFeatures


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_no_row_is_longer_than_one_and_no_example_longer_than_its_bound(share: float) -> None:
    embedding = TokenEmbedding(6, 50, 8, share)
    ids = torch.randint(0, 50, (40, 6)).float()
    rows = embedding(ids)
    assert rows.shape == (40, 7, 8) and float(rows.norm(dim=2).max()) <= 1 + 1e-6
    assert float(rows.flatten(1).norm(dim=1).max()) <= embedding.largest_norm * (1 + 1e-6)
    assert embedding.largest_norm == pytest.approx(math.sqrt(7))
    assert float(rows[:, 0].norm(dim=1).min()) == pytest.approx(1.0, rel=1e-5)  # the class token


def test_padding_is_zero_and_places_tell_equal_tokens_apart() -> None:
    rows = TokenEmbedding(3, 50, 8)(torch.tensor([[4.0, 4.0, 0.0]]))[0]
    assert float(rows[3].norm()) == 0.0 and not torch.equal(rows[1], rows[2])
    alike = TokenEmbedding(3, 50, 8, 0.0)(torch.tensor([[4.0, 4.0, 0.0]]))[0]
    assert torch.equal(alike[1], alike[2])


def test_whatever_arrives_is_read_as_the_nearest_token() -> None:
    embedding = TokenEmbedding(6, 50, 8)
    odd = torch.tensor([[3.4, -7.0, 1e9, math.inf, math.nan, -math.inf]])
    assert torch.equal(embedding(odd), embedding(torch.tensor([[3.0, 0.0, 49.0, 49.0, 0.0, 0.0]])))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_tokens_pass_a_bounded_input_unchanged_even_the_largest(kind: torch.dtype) -> None:
    vocabulary = 2**20
    bound = math.sqrt(6) * (vocabulary - 1)
    ids = torch.full((1, 6), vocabulary - 1)
    assert torch.equal(BoundedInput(bound)(ids.to(kind)).round().long(), ids)
    assert torch.equal(BoundedInput(bound)(ids).round().long(), ids)


def test_the_ball_does_not_shorten_an_example_that_is_within_it() -> None:
    embedding = TokenEmbedding(6, 50, 8)
    ids = torch.randint(0, 50, (40, 6)).float()
    torch.testing.assert_close(FrozenFeatures(embedding, embedding.largest_norm, "clip")(ids), embedding(ids))
    certificate = certify(FrozenFeatures(embedding, embedding.largest_norm, "clip"), (6,), 1e3, "l1")
    assert certificate.node(certificate.output).forward == pytest.approx(math.sqrt(7), rel=1e-4)


def test_rows_of_a_file_are_scaled_together_and_padding_stays_zero(tmp_path: Path) -> None:
    rows = torch.zeros(4, 2)
    rows[1], rows[2], rows[0] = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), torch.tensor([9.0, 0.0])
    torch.save(rows, tmp_path / "rows.pt")
    found = TokenEmbedding(2, 4, 2, 0.0, str(tmp_path / "rows.pt"))(torch.tensor([[1.0, 2.0]]))[0, 1:]
    torch.testing.assert_close(found, rows[1:3] / 9)
    with pytest.raises(ValueError, match="does not hold finite rows"):
        TokenEmbedding(2, 5, 2, 0.0, str(tmp_path / "rows.pt"))


def test_seeds_and_settings_tell_embeddings_apart() -> None:
    first = TokenEmbedding(3, 50, 8)
    assert first.identity() == TokenEmbedding(3, 50, 8).identity()
    assert first.identity() != TokenEmbedding(3, 50, 8, seed=1).identity() != TokenEmbedding(3, 50, 8, 0.1).identity()


@pytest.mark.parametrize("arguments", [(3, 1), (3, 2**25), (3, 5, 0), (3, 5, 4, 1.0)])
def test_nothing_is_embedded_by_nonsense(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        TokenEmbedding(*arguments)
