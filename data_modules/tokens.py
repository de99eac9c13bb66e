"""Serves sentences as the numbers of their tokens, by a vocabulary that was declared before any of them was read.

A row holds `length` integers: 0 stands for padding, 1 for the boundary between two sentences, and words have the
numbers from 2 on. A row depends on its own text and on the vocabulary alone. What is longer is cut.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, Protocol

import torch

from lipdp_lightning.data_modules.base import PrivateDataModule, Rows, box_norm
from lipdp_lightning.data_modules.found_files import data_root, find_file, read_text, refusal
from lipdp_lightning.data_modules.text import SNIPPETS_SHIP_IN, MovieSnippets, SNLIParts, gold_pairs, read_snippets

PADDING, BOUNDARY, FIRST_WORD = 0, 1, 2
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")


def words_of(text: str) -> list[str]:
    """Returns words with their apostrophes, numbers, and every other sign by itself, in lower case."""
    return _WORD.findall(text.lower())


class Tokenizer(Protocol):
    """Gives each word a number from FIRST_WORD to `vocabulary` - 1, whatever the other words are."""

    vocabulary: int

    def number(self, word: str) -> int: ...


class HashedTokens:
    """Numbers words by a public hash, so that words may share a number and no file is needed."""

    def __init__(self, vocabulary: int = 4096) -> None:
        if vocabulary <= FIRST_WORD:
            raise refusal(f"HashedTokens({vocabulary}) has no number for a word", "4096")
        self.vocabulary = vocabulary

    def number(self, word: str) -> int:
        digest = blake2b(word.encode(), digest_size=8).digest()
        return FIRST_WORD + int.from_bytes(digest, "big") % (self.vocabulary - FIRST_WORD)


class VocabularyTokens:
    """Numbers the words of a published list, one in a line; all others share the last number.

    Args:
        file: a path below the data root. The list must have been made without the private texts.
        root: the data folder; LIPDP_DATA by default.
    """

    def __init__(self, file: str, root: str | None = None) -> None:
        path = find_file(data_root(root), file, "a published list of words, one in a line")
        words = read_text(path).lower().split()
        self._numbers = {word: FIRST_WORD + place for place, word in enumerate(dict.fromkeys(words))}
        self.vocabulary = FIRST_WORD + len(self._numbers) + 1

    def number(self, word: str) -> int:
        return self._numbers.get(word, self.vocabulary - 1)


def tokens_of(tokenizer: Tokenizer, sentences: Sequence[str], length: int) -> list[int]:
    """Returns the row of one or two sentences, each of which is cut to its equal part of the row."""
    room = length // len(sentences)
    row: list[int] = []
    for place, sentence in enumerate(sentences):
        boundary = [BOUNDARY] * (place > 0)
        row += (boundary + [tokenizer.number(word) for word in words_of(sentence)])[:room]
    return row + [PADDING] * (length - len(row))


class TokenText(PrivateDataModule):
    """Rows of tokens; a subclass reads texts and labels.

    Args:
        length: the number of tokens of a row.
        tokenizer: numbers the words; by default a public hash.
        root: the data folder; LIPDP_DATA by default.
        test_fraction: the share of the rows that is set aside for the test, by a hash of each row.
        validation_fraction, eval_batch_size: as in PrivateDataModule.
    """

    task = "classification"

    def __init__(
        self,
        length: int = 32,
        tokenizer: Tokenizer | None = None,
        root: str | None = None,
        test_fraction: float = 0.0,
        validation_fraction: float | None = None,
        eval_batch_size: int = 1024,
    ) -> None:
        super().__init__(validation_fraction, None, eval_batch_size)
        self.tokenizer: Tokenizer = HashedTokens() if tokenizer is None else tokenizer
        self.root, self.test_fraction = root, test_fraction
        self.vocabulary = self.tokenizer.vocabulary
        self.input_shape = (length,)
        self.input_bound = box_norm((length,), 0, self.vocabulary - 1)

    def declarations(self) -> list[str]:
        kind = type(self.tokenizer).__name__
        return [f"{self.input_shape[0]} tokens of a vocabulary of {self.vocabulary}, by {kind}; 0 is padding"]

    def _rows(self, texts: Sequence[Sequence[str]], labels: Sequence[int]) -> Rows:
        rows = [tokens_of(self.tokenizer, sentences, self.input_shape[0]) for sentences in texts]
        return torch.tensor(rows).reshape(-1, *self.input_shape), torch.tensor(labels)


class MovieTokens(TokenText):
    """The sentences of :class:`MovieSnippets` as tokens: film reviews, negative, neither or positive."""

    num_classes = 3
    declared_size = MovieSnippets.declared_size

    def load_train(self) -> Rows:
        texts, labels = read_snippets(find_file(data_root(self.root), MovieSnippets.file, SNIPPETS_SHIP_IN))
        return self._rows([(text,) for text in texts], labels)


class SNLITokens(SNLIParts, TokenText):
    """The pairs of :class:`SNLI` as tokens: the premise, a boundary, and the hypothesis.

    Args:
        declared_size: the number of training pairs with a gold label, announced beforehand.
        limit: the number of lines of the training file to read, a public number; `declared_size` must be given with it.
        length, tokenizer, root, validation_fraction, eval_batch_size: as in TokenText.
    """

    num_classes = 3

    def __init__(
        self,
        length: int = 48,
        tokenizer: Tokenizer | None = None,
        root: str | None = None,
        declared_size: int | None = None,
        limit: int | None = None,
        validation_fraction: float | None = None,
        eval_batch_size: int = 1024,
    ) -> None:
        super().__init__(length, tokenizer, root, 0.0, validation_fraction, eval_batch_size)
        self._read_at_most(limit, declared_size)

    def _pairs(self, part: Literal["train", "dev", "test"], limit: int | None = None) -> Rows:
        found = gold_pairs(self.root, part, limit)
        return self._rows([(first, second) for first, second, _ in found], [label for _, _, label in found])


_FILLERS = "the film a story this plot its cast and scene with music an actor of camera ending in script director on"
_PRAISE = "good great fine warm clever bright moving lovely superb witty"
_BLAME = "bad dull poor cold stupid grim boring ugly awful silly"


class GeneratedReviews(TokenText):
    """Made-up sentences of ten words: one praises or blames, and in one of four sentences the word before it is `not`.

    The class is what is meant. A model that adds up words, whatever stands beside them, is right in three sentences of
    four. Nothing here was written by a person.
    """

    num_classes = 2
    declared_size = 20_000

    def load_train(self) -> Rows:
        return self._made(0, self.declared_size)

    def load_test(self) -> Rows:
        return self._made(1, 2000)

    def _made(self, seed: int, number: int) -> Rows:
        draw, fillers, choice = random.Random(seed), _FILLERS.split(), (_BLAME.split(), _PRAISE.split())
        texts, labels = [], []
        for _ in range(number):
            praise, negated = draw.random() < 0.5, draw.random() < 0.25
            words = draw.choices(fillers, k=8)
            said = [*(["not"] if negated else []), draw.choice(choice[praise])]
            place = draw.randrange(9)
            texts.append((" ".join(words[:place] + said + words[place:]),))
            labels.append(int(praise != negated))
        return self._rows(texts, labels)
