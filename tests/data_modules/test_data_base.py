"""The base data module: declarations, checks, the private size and the loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule, box_norm


class Grid(PrivateDataModule):
    """100 rows whose first feature is the row number over 100."""

    input_shape = (3,)
    task = "classification"
    num_classes = 4
    declared_size = 100
    rows_that_exist = 100

    def load_train(self) -> tuple[Tensor, Tensor]:
        n = self.rows_that_exist
        x = torch.stack([torch.arange(n) / 100, torch.ones(n), torch.zeros(n)], dim=1)
        return x, torch.arange(n) % 4

    def load_test(self) -> tuple[Tensor, Tensor]:
        x, y = self.load_train()
        return x[:10] + 5, y[:10]


def bound(module: PrivateDataModule, batches: dict[tuple[int, int], list[int]], **options: Any) -> PrivateDataModule:
    module.bind(lambda step, chunk: torch.tensor(batches.get((step, chunk), []), dtype=torch.int64), **options)
    return module


def variant(**attributes: Any) -> PrivateDataModule:
    return type("Variant", (Grid,), attributes)()


def test_batches_are_the_rows_drawn_in_the_order_of_the_plan() -> None:
    plan = {(0, 0): [3, 97], (0, 1): [5], (1, 1): [0, 1, 2]}
    module = bound(Grid(), plan, steps_per_epoch=2, chunks=2, start_step=lambda: 0)
    batches = list(module.train_dataloader())
    assert [ids.tolist() for _, _, ids in batches] == [[3, 97], [5], [], [0, 1, 2]]
    assert all(type(batch) is tuple for batch in batches)
    x, y = module.load_train()
    for got_x, got_y, ids in batches:
        assert torch.equal(got_x, x[ids]) and torch.equal(got_y, y[ids])
        assert isinstance(got_x, Tensor) and got_x.shape[1:] == (3,)
    assert len(module.train_dataloader()) == 4


def test_an_empty_sample_is_a_batch_of_no_rows_with_the_right_shapes_and_types() -> None:
    module = bound(Grid(), {}, steps_per_epoch=1, chunks=1, start_step=lambda: 0)
    ((x, y, ids),) = list(module.train_dataloader())
    assert x.shape == (0, 3) and x.dtype == torch.float32
    assert y.shape == (0,) and y.dtype == torch.int64
    assert ids.shape == (0,) and ids.dtype == torch.int64


def test_training_without_the_plans_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no sampler.*\nHINT: .*bind"):
        Grid().train_dataloader()


@pytest.mark.parametrize("rows, refused", [(100, False), (95, False), (105, False), (94, True), (106, True)])
def test_declared_size_may_differ_by_five_percent_and_stays_the_constant_of_the_plan(rows: int, refused: bool) -> None:
    module = variant(rows_that_exist=rows)
    if refused:
        word = "more" if rows > 100 else "fewer"
        with pytest.raises(ValueError, match=rf"100 rows are declared and {word} exist.*\nHINT"):
            module.setup()
        return
    module.setup()
    assert module.rows == rows
    # neighbouring data sets must share N; a module that returned len(train) would fail here
    assert module.dataset_size == 100


def test_size_of_the_plan_follows_from_declarations_alone() -> None:
    few, many = variant(rows_that_exist=96), variant(rows_that_exist=104)
    for module in (few, many):
        module.validation_fraction = 0.25
        module.setup()
    assert few.dataset_size == many.dataset_size == 75
    assert few.rows != many.rows


def test_published_rows_are_validation_rows_unless_a_share_is_held_out() -> None:
    plain = Grid()
    assert sum(len(x) for x, _, _ in plain.val_dataloader()) == 10
    held = Grid(validation_fraction=0.3)
    validation = torch.cat([x for x, _, _ in held.val_dataloader()])
    assert len(validation) + held.rows == 100 and len(validation) != 10
    assert (validation[:, 0] < 5).all(), "held-out rows come from the training file"
    assert torch.cat([x for x, _, _ in held.test_dataloader()])[:, 0].min() >= 5


def test_without_held_out_rows_validation_is_empty_and_test_is_refused() -> None:
    module = variant(load_test=lambda self: None)
    assert module.val_dataloader() == []
    with pytest.raises(ValueError, match=r"no held-out rows.*\nHINT"):
        module.test_dataloader()


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_without_rows_is_refused_at_once(size: int) -> None:
    with pytest.raises(ValueError, match=rf"eval_batch_size is {size}.*\nHINT"):
        Grid(eval_batch_size=size)


def test_sequential_batches_cover_every_row_once_in_order() -> None:
    module = Grid(eval_batch_size=4)
    batches = list(module.val_dataloader())
    assert [len(x) for x, _, _ in batches] == [4, 4, 2] and len(module.val_dataloader()) == 3
    assert torch.cat([ids for _, _, ids in batches]).tolist() == list(range(10))
    assert torch.equal(torch.cat([x for x, _, _ in batches]), module.load_test()[0])


def rows(x: Any = None, y: Any = None) -> Any:
    x = torch.zeros(100, 3) if x is None else x
    y = torch.zeros(100, dtype=torch.int64) if y is None else y
    return lambda self: (x, y)


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


BAD_ROWS = {
    "nan": (rows(changed(torch.zeros(100, 3), (17, 2), float("nan"))), r"row 17, column 2 is nan"),
    "inf": (rows(changed(torch.zeros(100, 3), (4, 0), float("inf"))), r"row 4, column 0 is inf"),
    "label_high": (rows(y=changed(torch.zeros(100).long(), 8, 4)), r"row 8 has label 4, not one of the 4"),
    "label_low": (rows(y=changed(torch.zeros(100).long(), 9, -1)), r"row 9 has label -1"),
    "float64": (rows(torch.zeros(100, 3, dtype=torch.float64)), r"features are torch.float64"),
    "shape": (rows(torch.zeros(100, 4)), r"shape \(4,\) and input_shape declares \(3,\)"),
    "lengths": (rows(y=torch.zeros(99).long()), r"features and labels have different numbers of rows"),
    "float_labels": (rows(y=torch.zeros(100)), r"labels are torch.float32"),
    "no_rows": (rows(torch.zeros(0, 3), torch.zeros(0).long()), r"there are no rows"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused_in_set_up_with_row_and_column(name: str) -> None:
    load, message = BAD_ROWS[name]
    with pytest.raises(ValueError, match=message + r"[^\n]*\nHINT: "):
        variant(load_train=load).setup()


def test_all_problems_of_the_rows_are_told_at_once() -> None:
    x = changed(torch.zeros(100, 4), (1, 1), float("nan"))
    with pytest.raises(ValueError) as caught:
        variant(load_train=rows(x, changed(torch.zeros(100).long(), 3, 9))).setup()
    message = str(caught.value)
    assert all(part in message for part in ("input_shape", "row 1, column 1 is nan", "row 3 has label 9"))


def test_bad_test_rows_are_refused_too() -> None:
    load = rows(torch.zeros(5, 3), changed(torch.zeros(5).long(), 2, 7))
    with pytest.raises(ValueError, match="test rows: row 2 has label 7"):
        variant(load_test=load).setup()


@pytest.mark.parametrize("value, accepted", [(1.0, True), (-1.0, True), (1.01, False), (float("nan"), False)])
def test_regression_targets_stay_within_the_declared_bound(value: float, accepted: bool) -> None:
    y = changed(torch.zeros(100), 6, value)
    module = variant(task="regression", target_bound=1.0, load_train=rows(y=y), load_test=lambda self: None)
    if accepted:
        module.setup()
    else:
        with pytest.raises(ValueError, match=r"row 6 has label .*within the declared \[-1, 1\]"):
            module.setup()


@pytest.mark.parametrize("value, accepted", [(1.0, True), (0.5, False), (2.0, False)])
def test_binary_labels_are_zero_or_one(value: float, accepted: bool) -> None:
    module = variant(task="binary", load_train=rows(y=changed(torch.zeros(100), 6, value)), load_test=lambda self: None)
    if accepted:
        module.setup()
    else:
        with pytest.raises(ValueError, match="row 6 has label"):
            module.setup()


def test_missing_declarations_are_told_all_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        variant(task="ranking", declared_size=0).setup()
    assert "task is 'ranking'" in str(caught.value) and "declared_size is 0" in str(caught.value)
    with pytest.raises(ValueError, match="target_bound is None"):
        variant(task="regression").setup()
    with pytest.raises(ValueError, match=r"validation_fraction is 1\.5"):
        Grid(validation_fraction=1.5).setup()


def test_fingerprint_depends_on_every_value_type_and_public_constant() -> None:
    reference = Grid().fingerprint()
    assert len(reference) == 32 and reference == Grid().fingerprint()
    x, y = Grid().load_train()
    others = [
        variant(load_train=rows(changed(x, (50, 2), 1e-30), y)),
        variant(load_train=rows(x, changed(y, 99, 0))),
        variant(load_train=rows(x[:99], y[:99])),
        variant(load_train=rows(x.flip(0), y)),
        variant(scale=2.0),
    ]
    prints = [module.fingerprint() for module in others]
    assert len({reference, *prints}) == 6


def test_fingerprint_is_computed_once() -> None:
    module = Grid()
    first = module.fingerprint()
    module._train.x.zero_()  # type: ignore[union-attr]
    assert module.fingerprint() == first


def test_bytes_become_floats_by_public_constants_and_floats_pass_unchanged() -> None:
    module = variant(scale=2 / 255, offset=-1.0)
    pixels = torch.tensor([[0, 255, 51]], dtype=torch.uint8)
    once = module.transform_batch(pixels)
    assert torch.allclose(once, torch.tensor([[-1.0, 1.0, -0.6]]), atol=1e-6, rtol=0)
    # a second application, by a training step that also calls it, must not normalise again
    assert module.transform_batch(once) is once
    x, y, ids = module.on_after_batch_transfer((pixels, torch.tensor([1]), torch.tensor([0])), 0)
    assert torch.equal(x, once) and y.tolist() == [1] and ids.tolist() == [0]


def test_description_names_the_declarations_and_no_count_of_rows() -> None:
    module = variant(rows_that_exist=97, input_bound=box_norm((3,), 0.0, 1.0))
    module.setup()
    text = module.describe()
    assert "100 rows declared, N = 100" in text and "nothing was estimated from private data" in text
    assert "97" not in text, "the number of rows that exist is private"
    assert text == variant(rows_that_exist=103, input_bound=box_norm((3,), 0.0, 1.0)).describe()


def test_box_norm_is_attained_at_the_worst_corner() -> None:
    assert box_norm((3, 4), -2.0, 1.0) == pytest.approx(float(torch.full((3, 4), -2.0).norm()))


def test_test_rows_set_aside_are_the_same_with_and_without_validation_rows() -> None:
    whole, nested = Grid(), Grid(validation_fraction=0.25)
    for module in (whole, nested):
        module.test_fraction, module.declared_size = 0.3, 100
        module.setup()
        assert module.dataset_size == round(70 * (1 - module.validation_fraction))
    parts = [{float(x) for x in part.x[:, 0]} for part in (nested._train, nested._validation, nested._test) if part]
    assert len(parts) == 3 and sum(map(len, parts)) == 100 and len(set().union(*parts)) == 100
    assert {float(x) for x in whole._test.x[:, 0]} == parts[2]  # type: ignore[union-attr]
    assert 10 < len(parts[1]) < 30 and 20 < len(parts[2]) < 45
