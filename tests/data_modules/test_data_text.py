"""Texts through frozen encoders: each text by itself, published formats, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.text import SNLI, HashedWords, MovieSnippets, SentenceEmbeddings, WordVectors

LINES = [
    "1\t2.5\tA great film .", "2\t-2.5\tA bad film .", "3\t0.1\tA film .", "4\t1.5\tgreat great film",
    "5\t-1.0\tbad , bad film", "6\t0.6\tfilm film great", "7\t-0.6\tbad", "8\t0.4\tzzz qqq",
]  # fmt: skip
VECTORS = {"great": [1.0, 0.0, 0.0], "bad": [0.0, 2.0, 0.0], "film": [0.0, 0.0, 3.0]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    for name in ("icwsm2014", "word_vectors", "snli"):
        (folder / name).mkdir(parents=True)
    (folder / "icwsm2014/movieReviewSnippets_GroundTruth.txt").write_text("\n".join(LINES))
    lines = [f"{word} {' '.join(map(str, v))}" for word, v in VECTORS.items()]
    (folder / "word_vectors/glove.txt").write_text("\n".join(lines) + "\n")
    packed = {"words": list(VECTORS), "vectors": {word: [*v, 9.5, 7] for word, v in VECTORS.items()}}
    (folder / "word_vectors/packed.json").write_text(json.dumps(packed, separators=(",", ":")))
    pairs = [
        ("entailment", "A great film", "great film"), ("-", "bad", "film"), ("neutral", "film", "bad film"),
        ("contradiction", "great", "bad"),
    ]  # fmt: skip
    text = "\n".join(json.dumps({"gold_label": g, "sentence1": a, "sentence2": b}) for g, a, b in pairs)
    for part in ("train", "dev", "test"):
        (folder / f"snli/snli_1.0_{part}.jsonl").write_text(text + "\n")
    return tmp_path


class Snippets(MovieSnippets):
    declared_size = len(LINES)


@pytest.mark.parametrize("file", ["text/word_vectors/glove.txt", "text/word_vectors/packed.json"])
def test_word_vectors_of_both_formats_are_means_of_unit_vectors(root: Path, file: str) -> None:
    encoder = WordVectors(file, 3, str(root))
    rows = encoder.encode(["A GREAT film!", "bad", "unknown words"])
    torch.testing.assert_close(rows, torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("kind", ["hashed", "vectors"])
def test_a_text_is_embedded_by_itself(root: Path, kind: str) -> None:
    """Removing texts leaves the others' rows as they are, bit for bit; a vocabulary of the data would not."""
    encoder = HashedWords(64) if kind == "hashed" else WordVectors("text/word_vectors/glove.txt", 3, str(root))
    texts = [line.split("\t")[2] for line in LINES]
    together = encoder.encode(texts)
    assert torch.equal(together[[0, 3]], encoder.encode([texts[0], texts[3]]))
    assert not torch.equal(encoder.encode(["great bad"]), encoder.encode(["great film"]))


def test_snippets_are_rows_of_norm_one_in_three_classes(root: Path) -> None:
    data = Snippets(WordVectors("text/word_vectors/glove.txt", 3, str(root)), str(root), validation_fraction=0.0)
    x, y = data.load_train()
    assert y.tolist() == [2, 0, 1, 2, 0, 2, 0, 1]
    norms = x.norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([1.0] * 7 + [0.0]))  # the last has no known word
    data.setup()
    assert data.rows == len(LINES) and data.input_shape == (3,) and "WordVectors" in data.describe()


def test_snli_reads_pairs_with_a_gold_label(root: Path) -> None:
    data = SNLI(WordVectors("text/word_vectors/glove.txt", 3, str(root)), str(root), declared_size=3)
    data.setup()
    x, y = data.load_train()
    assert y.tolist() == [0, 1, 2] and data.input_shape == (12,)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(3))
    u, v = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    whole = torch.cat([u, v, (u - v).abs(), u * v])
    torch.testing.assert_close(x[2], whole / whole.norm())
    few = SNLI(HashedWords(16), str(root), declared_size=1, limit=2)
    assert len(few.load_train()[1]) == 1 and len(few.load_test()[1]) == 3


class Wide(HashedWords):
    def encode(self, texts: object) -> Tensor:
        return torch.zeros(len(texts), 5)  # type: ignore[arg-type]


def test_what_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="sentence-transformers"):
        SentenceEmbeddings().encode(["a"])
    with pytest.raises(ValueError, match="format is unknown"):
        WordVectors("vectors.bin")
    with pytest.raises(ValueError, match="has 3 numbers"):
        WordVectors("text/word_vectors/glove.txt", 4, str(root)).encode(["film"])
    with pytest.raises(ValueError, match="none of the words"):
        WordVectors("text/word_vectors/glove.txt", 3, str(root)).encode(["unknown"])
    with pytest.raises(ValueError, match="declare dimension=5"):
        Snippets(Wide(64), str(root)).load_train()
    with pytest.raises(ValueError, match="without a declared size"):
        SNLI(limit=10)
    file = root / Snippets.file
    file.write_text("no tabs\n")
    with pytest.raises(ValueError, match="line 1"):
        Snippets(HashedWords(8), str(root)).load_train()
    (root / "text/snli/snli_1.0_train.jsonl").write_text('{"gold_label": "neutral"}\n')
    with pytest.raises(ValueError, match="not a pair"):
        SNLI(HashedWords(8), str(root)).load_train()
