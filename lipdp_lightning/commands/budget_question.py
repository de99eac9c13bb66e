"""Computes the answer of `lipdp budget`: the epsilon of a noise multiplier, or the noise for a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lipdp_lightning.accounting.accountants import ACCOUNTANTS, ADD_REMOVE, ADJACENCIES, REPLACE_ONE
from lipdp_lightning.accounting.events import GAUSSIAN, LARGEST, SMALLEST, SMALLEST_DELTA, LedgerEntry, size_problems
from lipdp_lightning.bound_text import lower_text, upper_text
from lipdp_lightning.budget.calibrate import calibrate_noise, privacy_bound, steps_for_epochs

RELATIONS = {
    "add_remove": "add/remove one: neighbours differ by the presence of one example",
    "replace_one": "replace one: neighbours differ by the content of one example",
}
MEANINGS = {
    "prv": "numerical composition: the upper end of its bracket, if PLD does not contradict it",
    "pld": "privacy loss distributions, rounded so that epsilon is an upper bound",
    "rdp": "Renyi DP: a looser upper bound",
}


@dataclass(frozen=True)
class BudgetRow:
    """One line of the answer; `accountant` is the one that answered, which may be a fallback."""

    epsilon: float
    epsilon_lower: float
    epsilon_upper: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    adjacency: str
    accountant: str


def compute_budget(
    dataset_size: int,
    batch_size: float,
    delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    epsilons: Sequence[float] = (),
    noise_multipliers: Sequence[float] = (),
    accountant: str = "pld",
    adjacency: str = ADD_REMOVE,
    statistics: Sequence[float] = (),
) -> list[BudgetRow]:
    """Returns one row for each epsilon (the noise is calibrated) or for each noise multiplier (epsilon is computed).

    Args:
        dataset_size: the declared number of rows.
        batch_size: the expected size of the Poisson sample.
        delta: the delta of the guarantee.
        epochs: passes over the data, steps = ceil(epochs * dataset_size / batch_size); or give ``steps``.
        steps: the number of steps.
        epsilons: budgets; or give ``noise_multipliers``.
        noise_multipliers: noise levels.
        accountant: `pld`, `prv` or `rdp`.
        adjacency: `add_remove` or `replace_one`.
        statistics: noise multipliers of statistics of all rows that are released before the first step.

    Raises:
        ValueError: if the question has problems; it lists all of them, each with a HINT.
    """
    problems = [
        *_problems_of_run(dataset_size, batch_size, delta, epochs, steps),
        *_problems_of_query(epsilons, noise_multipliers, accountant, adjacency, statistics),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    sample_rate = batch_size / dataset_size
    if steps is None:
        assert epochs is not None
        steps = steps_for_epochs(epochs, dataset_size, batch_size)
    before = [LedgerEntry(GAUSSIAN, level, 1.0, 1, "statistic") for level in statistics]
    known = (delta, sample_rate, steps, accountant, adjacency)
    found = [(level, privacy_bound(level, *known, preliminary=before)) for level in noise_multipliers]
    found += [calibrate_noise(epsilon, *known, preliminary=before) for epsilon in epsilons]
    return [
        BudgetRow(b.epsilon, b.lower, b.upper, delta, level, sample_rate, steps, adjacency, b.accountant)
        for level, b in found
    ]


def _problems_of_run(
    dataset_size: int, batch_size: float, delta: float, epochs: float | None, steps: int | None
) -> list[str]:
    problems = []
    if dataset_size < 1:
        problems.append(f"dataset size {dataset_size} is not positive.\nHINT: give --dataset-size 60000")
    if not (batch_size > 0 and math.isfinite(batch_size)):
        problems.append(f"batch size {batch_size} is not positive.\nHINT: give --batch-size 256")
    elif batch_size > dataset_size >= 1:
        problems.append(
            f"batch size {batch_size} exceeds the dataset size {dataset_size}: examples would be drawn with a "
            "probability above 1.\nHINT: --batch-size is the EXPECTED size of a Poisson sample, at most N."
        )
    if not (delta < 1 and delta >= SMALLEST_DELTA):
        problems.append(f"delta {delta} is not in (0, 1).\nHINT: use one below 1/N, for example --delta 1e-6")
    if (epochs is None) == (steps is None):
        problems.append("epochs and steps: exactly one is needed.\nHINT: give --epochs 60, or --steps 14000")
    elif epochs is not None and not (epochs > 0 and math.isfinite(epochs)):
        problems.append(f"{epochs} epochs are not a positive number.\nHINT: give --epochs 60")
    elif steps is not None and steps < 1:
        problems.append(f"{steps} steps are not a positive number.\nHINT: give --steps 14000")
    if not problems:
        taken = steps if epochs is None else steps_for_epochs(epochs, dataset_size, batch_size)
        problems += [f"{text}\nHINT: {hint}" for text, hint in size_problems(dataset_size, batch_size, taken or 1)]
    return problems


def _problems_of_query(
    epsilons: Sequence[float],
    noise_multipliers: Sequence[float],
    accountant: str,
    adjacency: str,
    statistics: Sequence[float],
) -> list[str]:
    problems = []
    if bool(epsilons) == bool(noise_multipliers):
        problems.append(
            "epsilon and noise multiplier: exactly one is needed, the other follows.\n"
            "HINT: give --epsilon 3, or --noise-multiplier 1.1; several values make a table."
        )
    given = (("epsilon", epsilons), ("noise multiplier", noise_multipliers), ("statistic's noise", statistics))
    for name, values in given:
        wrong = [value for value in values if not (value > 0 and math.isfinite(value))]
        if wrong:
            problems.append(f"{name} {wrong[0]} is not a positive finite number.\nHINT: usual values are 0.5 to 10.")
        elif wrong := [value for value in values if not SMALLEST <= value <= LARGEST]:
            problems.append(
                f"{name} {wrong[0]} is outside [{SMALLEST:.0e}, {LARGEST:.0e}].\nHINT: usual values are 0.5 to 10."
            )
    if accountant not in ACCOUNTANTS:
        problems.append(f"accountant {accountant!r} is unknown.\nHINT: use one of {', '.join(ACCOUNTANTS)}")
    if adjacency not in ADJACENCIES:
        problems.append(f"adjacency {adjacency!r} is unknown.\nHINT: use one of {', '.join(ADJACENCIES)}")
    return problems


def format_table(rows: Sequence[BudgetRow]) -> str:
    """Returns the rows as text in aligned columns, followed by an explanation of the numbers."""
    header = ("epsilon", "bracket", "delta", "noise multiplier", "sample rate", "steps", "accountant")
    cells = [header] + [
        (
            upper_text(row.epsilon),
            f"[{lower_text(row.epsilon_lower)}, {upper_text(row.epsilon_upper)}]"
            if row.epsilon_lower > 0
            else "upper bound",
            upper_text(row.delta),
            upper_text(row.noise_multiplier, 5),
            upper_text(row.sample_rate),
            str(row.steps),
            row.accountant,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines += ["", f"adjacency   {RELATIONS[rows[0].adjacency]}"]
    lines += [f"accountant  {name}: {MEANINGS[name]}" for name in dict.fromkeys(row.accountant for row in rows)]
    if rows[0].adjacency == REPLACE_ONE:
        lines.append(
            "            pld answers for replace_one, whichever accountant is named: only it has a form for it"
        )
    lines.append("sampling    Poisson: each example is drawn independently at each step; shuffling is not covered")
    return "\n".join(lines)
