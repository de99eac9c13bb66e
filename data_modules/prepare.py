"""Turns what a data module loads into what it trains and evaluates on: checks, the privacy unit, held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import InMemoryRows
from lipdp_lightning.data_modules.row_checks import check_declared_size, check_rows
from lipdp_lightning.data_modules.splits import checked_split, hashed_split
from lipdp_lightning.data_modules.units import Groups

if TYPE_CHECKING:
    from lipdp_lightning.data_modules.base import PrivateDataModule

TEST_SALT = "lipdp test"

Rows = tuple[Tensor, Tensor]
GroupedRows = tuple[Tensor, Tensor, Sequence[str]]
Prepared = tuple[InMemoryRows, InMemoryRows | None, InMemoryRows | None, Groups | None]


def prepare(module: PrivateDataModule) -> Prepared:
    """Returns training, validation and test rows, and the groups to draw from if groups are drawn.

    The excess rows of a group are dropped first, and a side is chosen for what is left. Both look at one row or one
    group at a time, so that adding or removing a unit moves no other.
    """
    loaded = module.load_train()
    x, y = _checked(module, "training", loaded)
    groups = _groups(module, loaded, x, y)
    counted = None if groups is None else _counted(module, groups)
    sampled = groups if module.samples_groups else None
    rows = len(x) if counted is None else int(counted.sum())
    drawn = "rows" if sampled is None else "groups"
    found = rows if sampled is None else len(sampled)
    check_declared_size(module.where("training"), found, module.declared_size, drawn)
    side = _held_out(module, x, y, groups) if module.validation_fraction > 0 else None
    aside = _set_aside(module, x, groups)
    free = _all_of(counted, None if aside is None else ~aside)
    test = _test(module) if aside is None else _subset(module, x, y, _all_of(counted, aside))
    used = _all_of(free, None if side is None else ~side)
    train = _subset(module, x, y, used)
    if side is not None:
        validation: InMemoryRows | None = _subset(module, x, y, _all_of(free, side))
    elif (published := module.load_validation()) is not None:
        validation = InMemoryRows(*_checked(module, "validation", published))
    else:
        validation = test
    if sampled is not None:
        assert used is not None
        sampled = Groups([sampled.names[code] for code in sampled.codes[used.numpy()]], train)
    return train, validation, test, sampled


def _test(module: PrivateDataModule) -> InMemoryRows | None:
    published = module.load_test()
    return None if published is None else InMemoryRows(*_checked(module, "test", published))


def _set_aside(module: PrivateDataModule, x: Tensor, groups: Groups | None) -> Tensor | None:
    """Returns the mask of the rows kept for the test, chosen like the validation rows and independently of them."""
    if not module.test_fraction:
        return None
    if groups is None:
        return hashed_split(x, module.test_fraction, TEST_SALT)
    return groups.held_out(module.test_fraction, TEST_SALT)


def _checked(module: PrivateDataModule, part: str, rows: Rows | GroupedRows) -> Rows:
    x, y = rows[0], rows[1]
    check_rows(
        module.where(part),
        x,
        y,
        input_shape=module.input_shape,
        task=module.task,
        num_classes=module.num_classes,
        target_bound=module.target_bound,
        vocabulary=module.vocabulary,
    )
    return x.contiguous(), y.contiguous()


def _groups(module: PrivateDataModule, loaded: Rows | GroupedRows, x: Tensor, y: Tensor) -> Groups | None:
    if (module.grouping is None) != (len(loaded) == 2):
        raise refusal(
            f"{type(module).__name__} declares {'no' if module.grouping is None else 'a'} grouping, and load_train "
            f"returns {len(loaded)} parts",
            "declare a grouping and return (x, y, groups), or do neither",
        )
    if len(loaded) == 2:
        return None
    names = [str(name) for name in loaded[2]]
    if len(names) != len(x):
        raise refusal(f"{module.where('training')}: there is not one group for each row", "one group for each row")
    return Groups(names, InMemoryRows(x, y))


def _counted(module: PrivateDataModule, groups: Groups) -> Tensor:
    assert module.grouping is not None
    return groups.kept(module.grouping, module.where("training"))


def _all_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first & second


def _subset(module: PrivateDataModule, x: Tensor, y: Tensor, mask: Tensor | None) -> InMemoryRows:
    if mask is None:
        return InMemoryRows(x, y)
    return InMemoryRows(x, y, mask.nonzero()[:, 0]) if module.mapped else InMemoryRows(x[mask], y[mask])


def _held_out(module: PrivateDataModule, x: Tensor, y: Tensor, groups: Groups | None) -> Tensor:
    """Returns the mask of the rows to hold out, decided row by row or group by group."""
    share, name = module.validation_fraction, type(module).__name__
    if module.split is not None:
        mask = checked_split(x, y, module.split)
    else:
        mask = hashed_split(x, share, module.salt) if groups is None else groups.held_out(share, module.salt)
    if groups is not None and not groups.are_whole(mask):
        raise refusal(
            f"{name}: the split puts rows of one group on both sides", "decide from the group, or leave the split out"
        )
    held_out, kept = int(mask.sum()), int((~mask).sum())
    # N follows from the declared share, which a custom split must keep to within four standard deviations
    slack = 0.05 * share * len(x) + 4 * math.sqrt(len(x) * share * (1 - share))
    if not held_out or not kept or (module.split and abs(held_out - share * len(x)) > slack):
        found = "no row" if not held_out else "every row" if not kept else "another share of the rows"
        raise refusal(
            f"{name}: the split holds out {found}, and the declared share is {share:g}",
            "set validation_fraction to the share the split holds out",
        )
    return mask
