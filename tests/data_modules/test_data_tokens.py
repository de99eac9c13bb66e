"""Tokens: numbered by public rules, one text at a time, and served as integers from the file to the prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lipdp_lightning.data_modules.tokens import (
    GeneratedReviews,
    HashedTokens,
    MovieTokens,
    SNLITokens,
    TokenText,
    VocabularyTokens,
    tokens_of,
    words_of,
)
from lipdp_lightning.experiment.short_training import run_once

TEXTS = ["A great film .", "It isn't a bad film!", "film " * 9, ""]
CONFIG: dict[str, Any] = {
    "model": {
        "network": {
            "class_path": "lipdp_lightning.models.Transformer",
            "init_args": {"input_shape": [8], "outputs": 3, "vocabulary": 64, "width": 8, "heads": 2, "hidden": 8},
        },
        "loss": "cross_entropy",
        "input_bound": 1e4,
    },
    "privacy": {"noise_multiplier": 1.0, "steps": 3, "batch_size": 2, "delta": 1e-3},
    "trainer": {"accelerator": "cpu", "devices": 1},
}


def snli(folder: Path) -> None:
    pairs = [("entailment", "A great film", "great film"), ("-", "bad", "film"), ("neutral", "film", "bad film")]
    pairs += [("contradiction", "great", "bad")] * 2
    (folder / "text/snli").mkdir(parents=True)
    lines = [json.dumps({"gold_label": g, "sentence1": a, "sentence2": b, "pairID": "x"}) for g, a, b in pairs]
    for part in ("train", "dev", "test"):
        (folder / f"text/snli/snli_1.0_{part}.jsonl").write_text("\n".join(lines) + "\n")


def test_words_and_signs_are_told_apart() -> None:
    assert words_of("It isn't 42% \n good!") == ["it", "isn't", "42", "%", "good", "!"]


def test_a_text_has_its_own_numbers_whatever_the_others_are() -> None:
    tokenizer = HashedTokens(64)
    rows = [tokens_of(tokenizer, [text], 8) for text in TEXTS]
    assert [tokens_of(HashedTokens(64), [text], 8) for text in reversed(TEXTS)] == rows[::-1]
    assert all(len(row) == 8 and min(row) >= 0 and max(row) < 64 for row in rows)
    assert rows[3] == [0] * 8 and rows[2] == [tokenizer.number("film")] * 8
    # numbers by first occurrence in the rows would fail: without the first text, the second has others

    def by_occurrence(texts: list[str]) -> list[list[int]]:
        known: dict[str, int] = {}
        return [[known.setdefault(word, len(known)) for word in words_of(text)] for text in texts]

    assert by_occurrence(TEXTS)[1:] != by_occurrence(TEXTS[1:])


def test_a_published_list_numbers_its_words_and_gives_all_others_the_last(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("Film\ngreat\nfilm\n")
    tokenizer = VocabularyTokens("words.txt", str(tmp_path))
    assert tokenizer.vocabulary == 5
    assert [tokenizer.number(word) for word in ("film", "great", "bad", "dull")] == [2, 3, 4, 4]


def test_pairs_share_a_row_with_a_boundary_between_them(tmp_path: Path) -> None:
    snli(tmp_path)
    data = SNLITokens(8, HashedTokens(64), str(tmp_path), declared_size=4)
    data.setup()
    x, y = data.load_train()
    number = data.tokenizer.number
    assert x.dtype == torch.int64 and y.tolist() == [0, 1, 2, 2]
    assert x[0].tolist() == [number("a"), number("great"), number("film"), 1, number("great"), number("film"), 0, 0]
    long = tokens_of(data.tokenizer, ["film " * 9, "bad " * 9], 8)
    assert long == [number("film")] * 4 + [1] + [number("bad")] * 3
    with pytest.raises(ValueError, match="without a declared size"):
        SNLITokens(limit=5)


class Given(TokenText):
    num_classes = 3
    declared_size = 4
    given: torch.Tensor

    def load_train(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.given, torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.full((4, 8), 64), "token 64, not one of the 64"),
        (torch.full((4, 8), -1), "token -1"),
        (torch.zeros(4, 8), "must be int64"),
        (torch.zeros(4, 7, dtype=torch.int64), "declares"),
    ],
    ids=["beyond", "negative", "floats", "length"],
)
def test_rows_that_are_not_tokens_of_the_vocabulary_are_refused(rows: torch.Tensor, reason: str) -> None:
    data = Given(8, HashedTokens(64))
    data.given = rows
    with pytest.raises(ValueError, match=reason):
        data.setup()


def test_integers_of_a_module_without_a_vocabulary_are_refused() -> None:
    data = Given(8, HashedTokens(64))
    data.given, data.vocabulary = torch.zeros(4, 8, dtype=torch.int64), None
    with pytest.raises(ValueError, match="int64 with a declared vocabulary"):
        data.setup()


@pytest.mark.parametrize("scaling", ["auto", "worst_case"])
def test_tokens_reach_a_private_step_through_empty_samples_too(tmp_path: Path, scaling: str) -> None:
    """At batch size 1 of 4 rows, some of 8 samples have no row."""
    snli(tmp_path)
    init = {"length": 8, "root": str(tmp_path), "declared_size": 4,
            "tokenizer": {"class_path": "data_modules.HashedTokens", "init_args": {"vocabulary": 64}}}  # fmt: skip
    config = CONFIG | {"data": {"class_path": "data_modules.SNLITokens", "init_args": init}}
    steps = {"privacy.steps": 8, "privacy.batch_size": 1, "privacy.scaling": scaling}
    result = run_once(config, steps, secret=bytes(16))
    assert result.certified and result.steps == 8 and 0 <= result.score <= 1


def test_the_snippets_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "text/icwsm2014"
    folder.mkdir(parents=True)
    (folder / "movieReviewSnippets_GroundTruth.txt").write_text("1\t2.5\tA great film .\n2\t-2.5\tA bad film .\n")
    x, y = MovieTokens(8, HashedTokens(64), str(tmp_path)).load_train()
    assert y.tolist() == [2, 0] and x.shape == (2, 8) and x[0, 0] == x[1, 0] != x[0, 1]


def test_generated_reviews_are_told_by_pairs_of_words_and_not_by_words() -> None:
    data = GeneratedReviews(12, HashedTokens(1024))
    x, y = data.load_train()
    number = data.tokenizer.number
    negated = (x == number("not")).any(1)
    praise = sum((x == number(word)).any(1).long() for word in ["good", "great", "fine", "warm", "clever"]) > 0
    assert len(x) == data.declared_size and 0.24 < negated.float().mean() < 0.26 and 0.48 < y.float().mean() < 0.52
    assert (y[praise & ~negated] == 1).float().mean() > 0.95 and (y[praise & negated] == 0).float().mean() > 0.95
    assert not torch.equal(data.load_test()[0], x[:2000])
