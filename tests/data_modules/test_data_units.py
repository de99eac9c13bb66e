"""A group of rows as the unit of privacy: what one group more or less changes, and what the plan then says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.poisson import InMemoryRows
from lipdp_lightning.data_modules.units import Grouping, Groups
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training.settings import PrivacySettings

Table = tuple[Tensor, Tensor, list[str]]


def table(seed: int, groups: int = 30) -> Table:
    random = np.random.default_rng(seed)
    names = [f"p{g}" for g in range(groups) for _ in range(int(random.integers(1, 8)))]
    order = random.permutation(len(names))
    x = torch.from_numpy(random.integers(0, 3, (len(names), 4)).astype(np.float32))  # repeated rows happen
    return x, torch.from_numpy(random.integers(0, 2, len(names))), [names[i] for i in order]


def module(rows: Table, sampling: str = "rows", excess: str = "drop", **attributes: Any) -> PrivateDataModule:
    declared = {"input_shape": (4,), "task": "binary", "num_classes": 2, "heldout_share": 0.3}
    kind = type("Visits", (PrivateDataModule,), declared | {"load_train": lambda self: rows} | attributes)
    made: PrivateDataModule = kind()
    made.grouping = Grouping("patient", 3, sampling, excess)
    counts = np.unique(rows[2], return_counts=True)[1]
    made.declared_size = len(counts) if sampling == "groups" else int(np.minimum(counts, 3).sum())
    return made


def without(rows: Table, group: str) -> Table:
    stays = torch.tensor([name != group for name in rows[2]])
    return rows[0][stays], rows[1][stays], [name for name in rows[2] if name != group]


def multiset(x: Tensor, y: Tensor) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for row, label in zip(x.numpy(), y.numpy(), strict=True):
        key = row.tobytes() + label.tobytes()
        found[key] = found.get(key, 0) + 1
    return found


def changed(before: dict[bytes, int], after: dict[bytes, int]) -> int:
    return sum(abs(before.get(key, 0) - after.get(key, 0)) for key in {*before, *after})


def trained_on(rows: Table) -> dict[bytes, int]:
    made = module(rows)
    made.setup()
    assert made._train is not None
    return multiset(made._train.x, made._train.y)


def by_position(rows: Table) -> dict[bytes, int]:
    """Broken: a quota for the whole file, so that a group's rows decide about rows that come later."""
    seen: dict[str, int] = {}
    kept, quota = [], 80
    for index, name in enumerate(rows[2]):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] <= 3 and index < quota:
            kept.append(index)
    return multiset(rows[0][kept], rows[1][kept])


def largest_change(keep: Callable[[Table], dict[bytes, int]]) -> int:
    """Over removals of one whole group: the rows of the training set that differ."""
    worst = 0
    for seed in range(3):
        rows = table(seed)
        whole = keep(rows)
        worst = max([worst, *(changed(whole, keep(without(rows, name))) for name in sorted(set(rows[2])))])
    return worst


def test_one_group_more_or_less_changes_at_most_the_declared_number_of_rows() -> None:
    assert largest_change(trained_on) == 3
    assert largest_change(by_position) > 3


def test_the_kept_rows_do_not_depend_on_the_order_of_the_file() -> None:
    x, y, names = table(4)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    shuffled = (x[order], y[order], [names[i] for i in order])
    assert trained_on((x, y, names)) == trained_on(shuffled)


def test_all_rows_of_a_group_lie_on_one_side() -> None:
    rows = table(5)
    marked = (torch.arange(len(rows[2]), dtype=torch.float32), *rows[1:])
    made = module((marked[0][:, None].expand(-1, 4).contiguous(), rows[1], rows[2]))
    made.setup()
    sides = [{rows[2][int(i)] for i in part.x[:, 0]} for part in (made._train, made._validation) if part is not None]
    assert len(sides) == 2 and sides[0] and sides[1] and not sides[0] & sides[1]
    for part in (made._train, made._validation):
        assert part is not None
        assert max(np.unique([rows[2][int(i)] for i in part.x[:, 0]], return_counts=True)[1]) == 3
    made = module(rows)
    made.validation_fraction, made.split = 0.5, lambda x, y: torch.arange(len(x)) % 2 == 0
    with pytest.raises(ValueError, match="the split"):
        made.setup()


def test_too_many_rows_are_refused_where_the_declaration_says_so() -> None:
    with pytest.raises(ValueError, match=r"a patient has more rows than the 3 that are declared\nHINT"):
        module(table(0), excess="refuse").setup()


def test_a_drawn_group_stands_for_one_of_its_rows_and_all_of_them_get_their_turn() -> None:
    x, y, names = table(1)
    groups = Groups(names, InMemoryRows(x, y))
    drawn = torch.arange(len(groups))
    seen: list[set[int]] = [set() for _ in drawn]
    for step in range(7):
        rows = groups.rows_at(drawn, step)
        assert [names[row] for row in rows] == groups.names, "one row of each drawn group"
        for group, row in zip(drawn.tolist(), rows.tolist(), strict=True):
            seen[group].add(row)
    assert [len(rows) for rows in seen] == groups.counts.tolist()
    assert len(groups.rows_at(torch.tensor([], dtype=torch.int64), 3)) == 0


def test_a_group_more_or_less_changes_one_row_of_a_step_that_draws_groups() -> None:
    """The sample is drawn per group, so the other groups' draws are the same in both data sets."""
    rows, worst = table(2), 0
    for gone in sorted(set(rows[2]))[:8]:
        batches = []
        for data in (rows, without(rows, gone)):
            made = module(data, "groups", heldout_share=0.0)
            made.setup()
            assert made._groups is not None and made.rows == len(set(data[2]))
            places = {str(name): place for place, name in enumerate(made._groups.names)}
            drawn = torch.tensor([places[name] for name in sorted(set(data[2])) if name[-1] in "02468"])
            made.bind(lambda step, chunk, drawn=drawn: drawn, 1, 1, lambda: 5)
            ((x, y, ids),) = list(made.train_dataloader())
            assert len(ids) == len(drawn)
            batches.append(multiset(x, y))
        worst = max(worst, changed(*batches))
    assert worst == 1


def test_the_plan_is_made_for_the_unit_that_the_data_declares() -> None:
    by_rows, by_groups = module(table(0)), module(table(0), "groups")
    assert (by_rows.unit, by_rows.max_examples_per_unit) == ("group", 3)
    assert (by_groups.unit, by_groups.max_examples_per_unit) == ("group", 1)
    options: dict[str, Any] = {"noise_multiplier": 4.0, "steps": 20, "batch_size": 10, "delta": 1e-4}
    settings = PrivacySettings(**options)
    plans = [settings.of_unit(m.unit, m.max_examples_per_unit).plan(1000) for m in (by_rows, by_groups)]
    assert [(p.unit, p.max_examples_per_unit) for p in plans] == [("group", 3), ("group", 1)]
    with pytest.raises(ValueError, match=r"max_examples_per_unit is 2, and the data module bounds a group to 3"):
        PrivacySettings(**options, max_examples_per_unit=2).of_unit("group", 3)
    assert settings.plan(1000).unit == "example"


def test_protecting_three_rows_costs_more_than_protecting_one() -> None:
    from lipdp_lightning.accounting.accountants import epsilon_of

    plan = PrivacyPlan.create(dataset_size=1000, expected_batch_size=10, steps=20, noise_multiplier=4.0, delta=1e-4)
    one, three = (epsilon_of("pld", plan.events(), 1e-4, max_examples_per_unit=m).epsilon for m in (1, 3))
    assert three > 2.5 * one


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"max_rows": True}, {"sampling": "pairs"}, {"excess": "keep"}])
def test_impossible_declarations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"group 'patient'.*\nHINT"):
        Grouping(**{"column": "patient", "max_rows": 3} | options)


def test_a_grouping_without_groups_and_groups_without_one_are_refused() -> None:
    x, y, names = table(0)
    with pytest.raises(ValueError, match="declares a grouping, and load_train returns 2 parts"):
        module((x, y, names), load_train=lambda self: (x, y)).setup()
    made = module((x, y, names))
    made.grouping = None
    with pytest.raises(ValueError, match="declares no grouping, and load_train returns 3 parts"):
        made.setup()


def test_the_description_states_the_unit() -> None:
    text = module(table(0)).describe()
    assert "unit of privacy: all rows of one patient, at most 3; the others are left out" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "unit, refused", [({}, True), ({"unit": "group", "max_examples_per_unit": 2}, True), (None, False)]
)
def test_training_under_a_plan_for_another_unit_is_refused(unit: dict[str, Any] | None, refused: bool) -> None:
    import lightning

    from lipdp_lightning.training import PrivateModule, PrivateStrategy

    data = module(table(0), heldout_share=0.0)
    declared = {"unit": data.unit, "max_examples_per_unit": data.max_examples_per_unit}
    options: dict[str, Any] = {"expected_batch_size": 10, "steps": 2, "noise_multiplier": 4.0, "delta": 1e-3}
    plan = PrivacyPlan.create(dataset_size=data.dataset_size, **options, **(declared if unit is None else unit))
    strategy = PrivateStrategy(plan)
    trainer = lightning.Trainer(
        strategy=strategy, max_steps=2, max_epochs=-1, use_distributed_sampler=False, accelerator="cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    network = PrivateModule(torch.nn.Sequential(torch.nn.Linear(4, 1)), loss="binary_cross_entropy")
    if refused:
        with pytest.raises(ValueError, match="declares one group of at most 3: the epsilon would be for another unit"):
            strategy.check(trainer, network, data)
    else:
        strategy.check(trainer, network, data)
