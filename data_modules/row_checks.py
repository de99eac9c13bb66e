"""Checks rows and declarations in set-up, before any step is taken, and reports all problems at once.

A refusal tells the owner of the data what is wrong with a row. It is a message about private rows and outside the
guarantee: fix the file before training, and do not publish the message.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipdp_lightning.data_modules.found_files import refusal
from lipdp_lightning.data_modules.poisson import slices

TASKS = ("classification", "regression", "binary")


def _first(bad: Tensor) -> tuple[int, tuple[int, ...], int]:
    """Returns row and column of the first True entry, and the number of rows that have one."""
    flat = bad.reshape(len(bad), -1)
    row = int(flat.any(dim=1).nonzero()[0])
    column = int(flat[row].nonzero()[0])
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(column), bad.shape[1:])) if bad.dim() > 1 else ()
    return row, position, int(flat.any(dim=1).sum())


def _features(x: Tensor, input_shape: tuple[int, ...], vocabulary: int | None) -> Iterator[str]:
    if vocabulary is not None:
        yield from _tokens(x, vocabulary)
    elif x.dtype not in (torch.float32, torch.uint8):
        yield f"features are {x.dtype}; they must be float32, uint8 for images, or int64 with a declared vocabulary"
    if tuple(x.shape[1:]) != tuple(input_shape):
        yield f"rows have shape {tuple(x.shape[1:])} and input_shape declares {tuple(input_shape)}"
    found, count = None, 0
    for rows in slices(len(x), x) if x.is_floating_point() else ():
        bad = ~torch.isfinite(x[rows])
        if bool(bad.any()):
            row, position, more = _first(bad)
            found, count = found or (rows.start + row, position), count + more
    if found is not None:
        row, position = found
        column = position[0] if len(position) == 1 else position
        yield f"row {row}, column {column} is {x[(row, *position)].item()} ({count} such rows)"


def _tokens(x: Tensor, vocabulary: int) -> Iterator[str]:
    if x.dtype != torch.int64:
        yield f"tokens are {x.dtype}; they must be int64"
        return
    bad = (x < 0) | (x >= vocabulary)
    if bool(bad.any()):
        row, position, count = _first(bad)
        token = x[(row, *position)].item()
        yield f"row {row} has token {token}, not one of the {vocabulary} declared ({count} such rows)"


def _labels(y: Tensor, task: str, num_classes: int | None, target_bound: float | None) -> Iterator[str]:
    if task == "regression":
        if not y.is_floating_point():
            yield f"regression targets are {y.dtype}; they must be float32"
        bound = float(target_bound or 0.0)
        bad = ~(y.abs() <= bound)  # written so that NaN is bad
        expected = f"within the declared [-{bound:g}, {bound:g}]"
    else:
        classes = 2 if task == "binary" else int(num_classes or 0)
        if y.dim() != 1 or (task == "classification" and y.dtype != torch.int64):
            yield f"labels are {y.dtype} of shape {tuple(y.shape)}; they must be one int64 per row"
        bad = ~((y >= 0) & (y < classes) & (y == y.round() if y.is_floating_point() else True))
        expected = f"one of the {classes} declared classes 0 to {classes - 1}"
    if bool(bad.any()):
        row, position, count = _first(bad)
        yield f"row {row} has label {y[(row, *position)].item()}, not {expected} ({count} such rows)"


def check_rows(
    name: str,
    x: Tensor,
    y: Tensor,
    *,
    input_shape: tuple[int, ...],
    task: str,
    num_classes: int | None,
    target_bound: float | None,
    vocabulary: int | None = None,
) -> None:
    """Raises one ValueError that lists every way in which the rows break what was declared."""
    problems: list[str] = []
    if len(x) == 0:
        problems.append("there are no rows")
    if len(x) != len(y):
        problems.append("features and labels have different numbers of rows")
    problems += _features(x, input_shape, vocabulary)
    problems += _labels(y, task, num_classes, target_bound)
    if problems:
        raise refusal(
            f"{name}: " + "; ".join(problems),
            "correct the file, or what the data module declares; nothing is repaired silently",
        )


def check_declarations(
    name: str,
    *,
    task: object,
    num_classes: int | None,
    target_bound: float | None,
    declared_size: object,
    validation_fraction: float,
    test_fraction: float = 0.0,
) -> None:
    """Raises one ValueError that lists every missing or impossible declaration of a data module."""
    problems: list[str] = []
    if task not in TASKS:
        problems.append(f"task is {task!r}, not one of {', '.join(TASKS)}")
    if task == "classification" and (num_classes is None or num_classes < 2):
        problems.append(f"num_classes is {num_classes}, a classification task needs at least 2")
    if task == "regression" and not (target_bound is not None and 0 < target_bound < float("inf")):
        problems.append(f"target_bound is {target_bound}, a regression task needs a finite declared bound")
    if not isinstance(declared_size, int) or declared_size < 1:
        problems.append(f"declared_size is {declared_size!r}, not a positive integer")
    for part, share in (("validation", validation_fraction), ("test", test_fraction)):
        if not 0 <= share < 1:
            problems.append(f"{part}_fraction is {share}, not in [0, 1)")
    if problems:
        raise refusal(f"{name}: " + "; ".join(problems), "declare these as attributes of the data module class")


def check_declared_size(name: str, found: int, declared: int, what: str = "rows") -> None:
    """Checks that N, a public constant, differs from the number of rows (or groups) by no more than 5 %."""
    if abs(found - declared) > 0.05 * declared:
        # the number itself stays out: a size that is copied from here into a declaration is private
        raise refusal(
            f"{name}: {declared} {what} are declared and {'more' if found > declared else 'fewer'} exist, "
            "by more than 5 %",
            f"declare the number of {what} announced for the study: the sample rate and the update divide by it",
        )
