"""Groups rows that belong together: the patient, the household, the institution whose rows are protected as one.

Two ways lead to a guarantee for a whole group.

* `sampling: rows`. Every row is drawn on its own, and a group has at most `max_rows` of them. Adding or removing a
  group changes at most that many rows, and the accountant applies the group property of that order
  (`max_examples_per_unit` of the plan).
* `sampling: groups`. Every GROUP is drawn with the plan's rate, and stands at a step for one of its rows, in turn. A
  group adds one example's gradient to a step or nothing, so the accounting is that of single examples: with a group for
  a row and the number of groups for N, nothing is lost to the group property. The row follows from the step and from
  the group alone. If it were random, the step's output would be a mixture, over the choice, of pairs that are each
  dominated by the same subsampled Gaussian, and so is a mixture.

Which rows of a large group are kept is decided by hashes of those rows within the group: no other group is looked at,
and the order of the file does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import InMemoryRows, slices


@dataclass(frozen=True)
class Grouping:
    """Declares which column names the group, and how many of its rows may count.

    Args:
        column: the column whose value is the group of a row.
        max_rows: the number of rows of one group that count, a public constant.
        sampling: `rows` or `groups`; see the head of this module.
        excess: `drop` the rows beyond `max_rows` by the rule above, or `refuse` the file.
    """

    column: str
    max_rows: int
    sampling: str = "rows"
    excess: str = "drop"

    def __post_init__(self) -> None:
        problems = []
        if isinstance(self.max_rows, bool) or not isinstance(self.max_rows, int) or self.max_rows < 1:
            problems.append(f"max_rows is {self.max_rows!r}, not a positive whole number")
        if self.sampling not in ("rows", "groups"):
            problems.append(f"sampling is {self.sampling!r}, not rows or groups")
        if self.excess not in ("drop", "refuse"):
            problems.append(f"excess is {self.excess!r}, not drop or refuse")
        if problems:
            raise refusal(f"group {self.column!r}: " + "; ".join(problems), "declare what one unit may have")

    @property
    def rows_per_unit(self) -> int:
        """The number of examples that one unit may add to one step, which the plan accounts for."""
        return self.max_rows if self.sampling == "rows" else 1

    def describe(self) -> str:
        rest = "the others are left out, by a hash within the group" if self.excess == "drop" else "more are refused"
        drawn = "rows are drawn one by one" if self.sampling == "rows" else "groups are drawn, each stands for one row"
        return f"unit of privacy: all rows of one {self.column}, at most {self.max_rows}; {rest}; {drawn}"


class Groups:
    """The group of every row, and the places of its rows in an order that follows from their content.

    Args:
        names: the group of each row.
        rows: the rows; their content orders the rows of a group.
    """

    def __init__(self, names: Sequence[str], rows: InMemoryRows) -> None:
        self.names = sorted(set(names))
        code = {name: place for place, name in enumerate(self.names)}
        self.codes = np.array([code[name] for name in names], dtype=np.int64)
        self.counts = np.bincount(self.codes, minlength=len(self.names))
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        # rows of a group are ordered by a hash; a row that is alone in its group needs none
        place = np.zeros(len(self.codes), dtype=np.uint64)
        shared = np.flatnonzero(self.counts[self.codes] > 1)
        place[shared] = _hashes(rows, shared)
        self.order = np.lexsort((place, self.codes))

    def __len__(self) -> int:
        return len(self.names)

    def kept(self, grouping: Grouping, where: str) -> Tensor:
        """Returns the mask of the rows that count: the first `max_rows` of each group in the order of their hashes."""
        large = np.flatnonzero(self.counts > grouping.max_rows)
        if len(large) and grouping.excess == "refuse":
            raise refusal(
                f"{where}: a {grouping.column} has more rows than the {grouping.max_rows} that are declared",
                "use a larger max_rows, or excess: drop",
            )
        rank = np.arange(len(self.order)) - np.repeat(self.starts, self.counts)
        mask = np.zeros(len(self.order), dtype=bool)
        mask[self.order[rank < grouping.max_rows]] = True
        return torch.from_numpy(mask)

    def held_out(self, fraction: float, salt: str = "lipdp") -> Tensor:
        """Returns the mask of the rows whose group is held out: about `fraction` of the groups, chosen by
        their names.
        """
        chosen = hashed_names(self.names, fraction, salt)
        return torch.from_numpy(np.array(chosen, dtype=bool)[self.codes])

    def are_whole(self, mask: Tensor) -> bool:
        """Returns whether a mask of rows tears no group apart."""
        marked = np.bincount(self.codes, weights=mask.numpy(), minlength=len(self.names))
        return bool(((marked == 0) | (marked == self.counts)).all())

    def rows_at(self, drawn: Tensor, step: int) -> Tensor:
        """Returns the row that stands for each drawn group at a step; its rows take turns, each group at its
        own phase.
        """
        groups = drawn.numpy()
        place = (step + self._phases()[groups]) % self.counts[groups]
        return torch.from_numpy(self.order[self.starts[groups] + place])

    def _phases(self) -> np.ndarray:
        if not hasattr(self, "_phase"):
            self._phase = np.array([_hash(name.encode(), b"phase") % 2**31 for name in self.names], dtype=np.int64)
        return self._phase


def hashed_names(names: Sequence[str], fraction: float, salt: str = "lipdp") -> list[bool]:
    """Returns for each name whether it is held out, a function of that name alone, true for about `fraction`
    of them.
    """
    threshold = int(fraction * 2.0**64)
    return [_hash(name.encode(), salt.encode()) < threshold for name in names]


def _hash(content: bytes, salt: bytes = b"") -> int:
    return int.from_bytes(blake2b(content, digest_size=8, key=salt[:64]).digest(), "big")


def _hashes(rows: InMemoryRows, which: np.ndarray) -> np.ndarray:
    """Returns a hash of each row's features and label, computed some rows at a time."""
    found = np.empty(len(which), dtype=np.uint64)
    for part in slices(len(which), rows.x):
        x, y, _ = rows[torch.from_numpy(which[part])]
        numbers = zip(x.numpy(), y.numpy(), strict=True)
        found[part] = [_hash(features.tobytes() + label.tobytes()) for features, label in numbers]
    return found
