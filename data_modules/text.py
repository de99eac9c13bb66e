"""Serves sentences as frozen embeddings: an example depends on its own text and on public constants alone.

The embeddings are computed when the rows are read and are not trained. No vocabulary, frequency or mean is taken from
the private texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows
from lipdp_lightning.data_modules.found_files import data_root, find_file, read_bytes, read_text, refusal
from lipdp_lightning.data_modules.poisson import OnDevice
from lipdp_lightning.data_modules.splits import Split

_WORD = re.compile(r"[a-z]+|[0-9]+|[!?]")
# "word":[0.1,...] in a JSON object, or a line "word 0.1 ..." of GloVe's text format
_ENTRY = {
    ".json": re.compile(rb'"((?:[^"\\]|\\.)+)":\[([-+0-9.eE,]+)\]'),
    ".txt": re.compile(rb"^(\S+)((?: [-+0-9.eE]+)+)\r?$", re.MULTILINE),
}
_SMALLEST_NORM = 1e-12


class Encoder(Protocol):
    """Embeds each text by itself."""

    dimension: int

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Returns one float32 row per text."""


class HashedWords:
    """Hashes words and pairs of words into ``dimension`` places with signs: an embedding that needs no file."""

    def __init__(self, dimension: int = 4096, longest: int = 2) -> None:
        if dimension < 2 or longest < 1:
            raise refusal(
                f"HashedWords({dimension}, {longest}): nothing is left of a text", "use 4096 places and pairs of words"
            )
        self.dimension, self.longest = dimension, longest

    def encode(self, texts: Sequence[str]) -> Tensor:
        from sklearn.feature_extraction.text import HashingVectorizer

        hashed = HashingVectorizer(n_features=self.dimension, ngram_range=(1, self.longest), norm=None)
        return torch.from_numpy(hashed.transform(texts).toarray().astype(np.float32))


class WordVectors:
    """Averages the unit vectors of a text's words, from published vectors; unknown words are left out.

    Args:
        file: a path below the data root, in GloVe's text format (`.txt`, plain or gzipped) or a JSON object of word to
            list.
        dimension: how many numbers of each entry are used.
        root: the data folder; LIPDP_DATA by default.
    """

    def __init__(
        self, file: str = "text/word_vectors/glove.6B.100d.txt", dimension: int = 100, root: str | None = None
    ) -> None:
        if Path(file).suffix not in _ENTRY:
            raise refusal(f"word vectors in {file}: the format is unknown", "give a .txt file of GloVe, or .json")
        self.file, self.dimension, self.root = file, dimension, root

    def encode(self, texts: Sequence[str]) -> Tensor:
        words = [_WORD.findall(text.lower()) for text in texts]
        known = self._vectors({word for row in words for word in row})
        rows = torch.zeros(len(texts), self.dimension)
        for place, row in enumerate(words):
            found = [known[word] for word in row if word in known]
            if found:
                rows[place] = torch.from_numpy(np.mean(found, axis=0))
        return rows

    def _vectors(self, wanted: set[str]) -> dict[str, np.ndarray]:
        """Returns the vectors of the words that occur; which other words are in the file has no effect."""
        path = find_file(data_root(self.root), self.file, "see docs/results_calibration.md for where vectors ship")
        found = {}
        for match in _ENTRY[Path(self.file).suffix].finditer(read_bytes(path)):
            word = match.group(1).decode("utf-8", "replace")
            if word in wanted:
                numbers = np.array(match.group(2).replace(b",", b" ").split()[: self.dimension], dtype=np.float32)
                if len(numbers) != self.dimension:
                    raise refusal(f"{path}: {word!r} has {len(numbers)} numbers", f"dimension={len(numbers)}")
                found[word] = numbers / max(float(np.linalg.norm(numbers)), _SMALLEST_NORM)
        if wanted and not found:
            raise refusal(
                f"{path} has a vector for none of the words", "give vectors of the texts' language, in lower case"
            )
        return found


class SentenceEmbeddings:
    """Runs a frozen model of the package sentence-transformers, by name, from the local cache or a folder.

    Texts are encoded one at a time. Together they would be faster, but padded to the longest of them: a text's
    embedding would then depend in its last bits on its neighbours, which the guarantee does not cover.
    """

    def __init__(self, name: str = "all-MiniLM-L6-v2", dimension: int = 384, batch_size: int = 1) -> None:
        self.name, self.dimension, self.batch_size = name, dimension, batch_size

    def encode(self, texts: Sequence[str]) -> Tensor:
        try:
            package: Any = import_module("sentence_transformers")
        except ImportError:
            hint = "install sentence-transformers and fetch the model, or use HashedWords or WordVectors"
            raise refusal(f"{self.name} needs the package sentence-transformers", hint) from None
        model = package.SentenceTransformer(self.name)
        rows = model.encode(list(texts), batch_size=self.batch_size)
        return torch.as_tensor(np.asarray(rows, dtype=np.float32))


class EmbeddedText(PrivateDataModule):
    """Texts through a frozen encoder, each row scaled to norm 1; a text without a known word becomes the zero row."""

    task = "classification"
    num_classes = 3
    input_bound = 1.0
    parts = 1  # number of blocks of the encoder's dimension in a row

    def __init__(
        self,
        encoder: Encoder | None = None,
        root: str | None = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        split: Split | None = None,
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        super().__init__(validation_fraction, split, eval_batch_size, on_device)
        self.encoder: Encoder = HashedWords() if encoder is None else encoder
        self.root, self.test_fraction = root, test_fraction
        self.input_shape = (self.parts * self.encoder.dimension,)

    def declarations(self) -> list[str]:
        return [f"texts through the frozen encoder {type(self.encoder).__name__}, each row of norm 1"]

    def _encoded(self, texts: Sequence[str]) -> Tensor:
        rows = self.encoder.encode(texts)
        if tuple(rows.shape) != (len(texts), self.encoder.dimension):
            given = f"{type(self.encoder).__name__} gave rows of shape {tuple(rows.shape)} for {len(texts)} texts"
            raise refusal(given, f"declare dimension={rows.shape[-1]}")
        return unit_rows(rows)


def unit_rows(rows: Tensor) -> Tensor:
    """Scales each row to norm 1; zero rows and entries that are not finite become zero."""
    finite = torch.nan_to_num(rows.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return finite / torch.linalg.vector_norm(finite, dim=1, keepdim=True).clamp_min(_SMALLEST_NORM)


class MovieSnippets(EmbeddedText):
    """10,605 sentences of film reviews with the mean of twenty raters' sentiment (Hutto and Gilbert 2014).

    The classes are negative, neither and positive, by the public thresholds -0.5 and 0.5 on the scale from -4 to 4. The
    file is `movieReviewSnippets_GroundTruth.txt` of the archive `hutto_ICWSM_2014.tar.gz`, which the source package of
    vaderSentiment 2.5 holds.
    """

    declared_size = 10_605
    file = "text/icwsm2014/movieReviewSnippets_GroundTruth.txt"

    def load_train(self) -> Rows:
        texts, labels = read_snippets(find_file(data_root(self.root), self.file, SNIPPETS_SHIP_IN))
        return self._encoded(texts), torch.tensor(labels)


SNIPPETS_SHIP_IN = "it is in the source package of vaderSentiment 2.5"


def read_snippets(path: Path) -> tuple[list[str], list[int]]:
    """Returns the sentences of the file of :class:`MovieSnippets`, and their classes."""
    texts, labels = [], []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split("\t")
        try:
            rating = float(fields[1])
        except (IndexError, ValueError):
            raise refusal(f"{path}, line {number} is not number, rating, text", "fetch the file again") from None
        texts.append("\t".join(fields[2:]))
        labels.append(0 if rating < -0.5 else 2 if rating > 0.5 else 1)
    return texts, labels


SNLI_LABELS = {"entailment": 0, "neutral": 1, "contradiction": 2}


class SNLIParts:
    """The parts of SNLI and the number of its training pairs, for modules that make rows of pairs of sentences."""

    declared_size = 549_367
    limit: int | None

    def _read_at_most(self, limit: int | None, declared_size: int | None) -> None:
        """Keeps how many lines of the training file are read, and the number of pairs that they hold."""
        if limit is not None and declared_size is None:
            raise refusal(f"limit={limit} without a declared size", "give declared_size=, about 0.9986 of the lines")
        self.limit = limit
        if declared_size is not None:
            self.declared_size = declared_size

    def load_train(self) -> Rows:
        return self._pairs("train", self.limit)

    def load_validation(self) -> Rows:
        return self._pairs("dev")

    def load_test(self) -> Rows:
        return self._pairs("test")

    def _pairs(self, part: Literal["train", "dev", "test"], limit: int | None = None) -> Rows:
        raise NotImplementedError


class SNLI(SNLIParts, EmbeddedText):
    """Stanford Natural Language Inference 1.0, pairs of sentences (Bowman et al. 2015).

    Pairs without a gold label, which is an item's own property, are left out. A pair with embeddings u and v of norm 1
    becomes (u, v, |u - v|, u v), scaled to norm 1. The files `snli_1.0_train.jsonl`, `snli_1.0_dev.jsonl` and
    `snli_1.0_test.jsonl` lie below `text/snli`.

    Args:
        limit: the number of lines of the training file to read, a public number; `declared_size` must be given with it.
    """

    parts = 4

    def __init__(
        self,
        encoder: Encoder | None = None,
        root: str | None = None,
        declared_size: int | None = None,
        limit: int | None = None,
        validation_fraction: float | None = None,
        eval_batch_size: int = 1024,
    ) -> None:
        super().__init__(encoder, root, 0.0, validation_fraction, None, eval_batch_size)
        self._read_at_most(limit, declared_size)

    def _pairs(self, part: Literal["train", "dev", "test"], limit: int | None = None) -> Rows:
        found = gold_pairs(self.root, part, limit)
        first = self._encoded([sentence for sentence, _, _ in found])
        second = self._encoded([sentence for _, sentence, _ in found])
        rows = torch.cat([first, second, (first - second).abs(), first * second], dim=1)
        return unit_rows(rows), torch.tensor([label for _, _, label in found])


def gold_pairs(
    root: str | None, part: Literal["train", "dev", "test"], limit: int | None = None
) -> list[tuple[str, str, int]]:
    """Returns the pairs of a part of SNLI that have a gold label, as premise, hypothesis and class."""
    path = find_file(data_root(root), f"text/snli/snli_1.0_{part}.jsonl", "unpack snli_1.0.zip there")
    found = []
    for number, line in enumerate(read_text(path).splitlines()[:limit], start=1):
        try:
            pair = json.loads(line)
            label = SNLI_LABELS.get(pair["gold_label"])
            texts = str(pair["sentence1"]), str(pair["sentence2"])
        except (ValueError, KeyError, TypeError):
            raise refusal(f"{path}, line {number} is not a pair of SNLI 1.0", "fetch the file again") from None
        if label is not None:
            found.append((*texts, label))
    if not found:
        raise refusal(f"{path} has no pair with a gold label", "fetch the file again")
    return found
