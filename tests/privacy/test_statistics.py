"""Statistics released before the first step: lipdp_lightning/privacy/statistics.py, and what the plan makes of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from lipdp_lightning.accounting.accountants import Spending, epsilon_of
from lipdp_lightning.privacy import statistics
from lipdp_lightning.privacy.keys import derive_key
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.privacy.statistics import Statistics, Terms, bounded_sum, noisy_mean

SECRET, OTHER = bytes(range(16)), bytes(range(1, 17))
TWO = (("first mean", 10.0), ("second mean", 4.0))
KEY = derive_key(SECRET, "a test")


def plan(**options: Any) -> PrivacyPlan:
    chosen: dict[str, Any] = {
        "dataset_size": 1000, "expected_batch_size": 100, "steps": 50, "noise_multiplier": 2.0, "delta": 1e-5,
        "accountant": "rdp", "preliminary": TWO,
    } | options  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PrivacyPlan.from_dict(chosen)


def rows(count: int = 300, dimension: int = 40, seed: int = 0) -> Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed))


def terms(data: Tensor, piece: int = 64) -> Terms:
    return Terms(data.shape[1], data.split(piece))


# ---- sensitivity

WORST = {
    "large": torch.full((40,), 1e30),
    "the largest float": torch.full((40,), torch.finfo(torch.float32).max),
    "on the sphere": torch.nn.functional.one_hot(torch.tensor(3), 40).float(),
    "just outside": torch.full((40,), 1.0001 / math.sqrt(40)),
    "tiny": torch.full((40,), 1e-30),
    "not a number": torch.full((40,), math.nan),
    "infinite": torch.tensor([math.inf, -math.inf] * 20),
    "one infinite entry": torch.cat([torch.tensor([math.inf]), torch.ones(39)]),
}


def largest_shift(total: Callable[[Tensor], Tensor]) -> float:
    """How far one record, anywhere among the others, can move the sum."""
    data, shifts = rows(), []
    for record in WORST.values():
        for place in (0, 150, 300):
            with_it = torch.cat([data[:place], record.unsqueeze(0), data[place:]])
            shifts.append(float((total(with_it) - total(data)).norm()))
    return max(s if math.isfinite(s) else math.inf for s in shifts)


def test_one_record_moves_the_sum_by_at_most_one() -> None:
    shift = largest_shift(lambda data: bounded_sum(terms(data)))
    assert 0.999 < shift <= 1.0


def test_sums_without_the_unit_ball_fail_the_same_check() -> None:
    assert largest_shift(lambda data: data.double().sum(0)) > 1
    # a mean over the rows that exist, in units of one row, moves with the number of rows as well
    skewed = torch.ones(40, dtype=torch.float64)
    assert largest_shift(lambda data: 300 * (bounded_sum(terms(data)) + 300 * skewed) / len(data)) > 1


def test_the_sum_is_exact_whatever_the_order_and_the_pieces() -> None:
    data = rows(2000)
    shuffled = data[torch.randperm(2000, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(bounded_sum(terms(data, 64)), bounded_sum(terms(shuffled, 7)))
    exact = (data.double() / data.double().norm(dim=1, keepdim=True)).sum(0)
    assert float((bounded_sum(terms(data)) - exact).abs().max()) < 1e-2  # rows as long as the radius allows
    assert torch.equal(bounded_sum(Terms(40, [])), torch.zeros(40, dtype=torch.float64))


def test_the_divisor_is_the_declared_size() -> None:
    data = rows(300)
    quiet = [noisy_mean(terms(part), 1e-9, 1000, KEY) * 1000 for part in (data, data[:150])]
    assert torch.allclose(quiet[0], bounded_sum(terms(data)), atol=1e-6)
    assert torch.allclose(quiet[1], bounded_sum(terms(data[:150])), atol=1e-6)


def test_rows_of_another_shape_and_a_statistic_without_noise_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dimension 5.*\nHINT"):
        bounded_sum(Terms(5, [rows()]))
    with pytest.raises(ValueError, match=r"is not private.\nHINT"):
        noisy_mean(terms(rows()), 0.0, 1000, KEY)


# ---- noise


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_has_its_deviation_in_every_coordinate(secure: bool) -> None:
    data = torch.zeros(10, 20_000)
    noise = noisy_mean(terms(data), 3.0, 7, KEY, secure) * 7
    assert stats.kstest(noise.numpy() / 3.0, "norm").pvalue > 1e-3


def released_noise(store: Statistics) -> list[Tensor]:
    """The noise of both statistics of a plan, in units of their deviations."""
    empty = Terms(5000, [torch.zeros(1, 5000)])
    values = store.settle(plan(), lambda _: empty, None, False, SECRET)
    return [values[label] * 1000 / level for label, level in TWO]


def correlation(pair: list[Tensor]) -> float:
    return abs(float(np.corrcoef(pair[0].numpy(), pair[1].numpy())[0, 1]))


def test_two_statistics_have_independent_noise() -> None:
    assert correlation(released_noise(Statistics())) < 0.07


def test_one_draw_for_two_statistics_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_key", lambda secret, plan, index: derive_key(secret, "statistic", plan.digest()))
    assert correlation(released_noise(Statistics())) > 0.99


def test_another_secret_is_another_release() -> None:
    first, second = (Statistics().settle(plan(), lambda _: terms(rows()), None, False, s) for s in (SECRET, OTHER))
    assert not torch.equal(first["first mean"], second["first mean"])


# ---- released once


class Counted:
    """Says how often the private rows were looked at."""

    def __init__(self) -> None:
        self.releases = 0

    def __call__(self, label: str) -> Terms:
        self.releases += 1
        return terms(rows())


class Forgetful(Statistics):
    """The broken variant: computes the statistics anew in every session."""

    def settle(self, plan: Any, terms: Any, saved: Any, started: bool, secret: bytes) -> dict[str, Tensor]:
        return Statistics().settle(plan, terms, None, False, secret)


def releases_of(kind: type[Statistics], path: Path) -> tuple[int, int]:
    """(number of looks at the rows, number of different values) of a run that is started once and continued twice."""
    source, seen = Counted(), set()
    for session, secret in enumerate((SECRET, OTHER, SECRET[::-1])):
        values = kind(path).settle(plan(), source, None, session > 0, secret)
        seen.add(tuple(value.numpy().tobytes() for value in values.values()))
    return source.releases, len(seen)


def test_a_run_releases_its_statistics_once(tmp_path: Path) -> None:
    assert releases_of(Statistics, tmp_path / "statistics.npz") == (2, 1)


def test_statistics_computed_anew_fail_the_same_check(tmp_path: Path) -> None:
    assert releases_of(Forgetful, tmp_path / "statistics.npz") == (6, 3)


def settle(path: Path | None, saved: Mapping[str, Tensor] | None = None, started: bool = True, **options: Any) -> Any:
    return Statistics(path).settle(plan(**options), Counted(), saved, started, OTHER)


def test_lost_statistics_are_not_released_again(tmp_path: Path) -> None:
    file = tmp_path / "statistics.npz"
    kept = settle(file, started=False)
    file.unlink()
    with pytest.raises(ValueError, match=r"are lost.*missing.*nobody accounts for.\nHINT"):
        settle(file)
    with pytest.raises(ValueError, match="are lost"):
        settle(None)
    again = settle(file, saved=kept)  # a checkpoint has them: the same values, and the file is back
    assert all(torch.equal(again[label], kept[label]) for label in kept)
    assert all(torch.equal(value, kept[label]) for label, value in settle(file).items())


def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path) -> None:
    settle(tmp_path / "a.npz", started=False)
    elsewhere = Statistics().settle(plan(), Counted(), None, False, SECRET)
    with pytest.raises(ValueError, match=r"second release that this run's ledger does not count.\nHINT"):
        settle(tmp_path / "a.npz", saved=elsewhere)
    with pytest.raises(ValueError, match=r"has released first mean, and its plan says first mean, second mean"):
        settle(None, saved={"first mean": elsewhere["first mean"]})


@pytest.mark.parametrize("damage", ["truncated", "another file", "another plan", "not finite"])
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "statistics.npz"
    settle(file, started=False)
    options: dict[str, Any] = {}
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "another file":
        np.savez(file, x=np.zeros(3))
    elif damage == "another plan":
        options = {"noise_multiplier": 2.1}
    else:
        broken = {label: torch.full((4,), math.nan, dtype=torch.float64) for label, _ in TWO}
        statistics._write(file, broken, plan())
    for started in (False, True):
        with pytest.raises(ValueError, match="HINT"):
            settle(file, started=started, **options)


def test_a_plan_without_statistics_looks_at_nothing(tmp_path: Path) -> None:
    source = Counted()
    assert Statistics(tmp_path / "s.npz").settle(plan(preliminary=()), source, None, False, SECRET) == {}
    assert source.releases == 0 and not (tmp_path / "s.npz").exists()


# ---- accounting


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exactly, for a Gaussian mechanism (Balle and Wang 2018)."""

    def excess(epsilon: float) -> float:
        tail = stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
        return float(tail) - delta

    return float(optimize.brentq(excess, 0, 100))


def accounts_for_everything(made: PrivacyPlan) -> bool:
    """Against the closed form: full batches and statistics are one Gaussian mechanism."""
    mu = math.sqrt(made.steps / made.noise_multiplier**2 + sum(1 / level**2 for _, level in TWO))
    claimed = epsilon_of("pld", made.events(), made.delta).epsilon
    truth = gaussian_epsilon(mu, made.delta)
    return truth * (1 - 1e-6) <= claimed <= truth * 1.01


class Forgotten(PrivacyPlan):
    """The broken variant: what comes before the first step is in the plan and not in the ledger."""

    def preliminary_events(self) -> Any:
        return ()


FULL = {"expected_batch_size": 1000, "noise_multiplier": 9.0, "accountant": "pld"}


def test_statistics_are_accounted_for_with_the_steps() -> None:
    assert accounts_for_everything(plan(**FULL))


def test_a_ledger_without_them_fails_the_same_check() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not accounts_for_everything(Forgotten.from_dict(plan(**FULL).to_dict()))


@pytest.mark.parametrize("accountant", ["pld", "prv", "rdp"])
@pytest.mark.parametrize("batch", [1000, 50])
def test_noise_is_calibrated_to_statistics_and_steps_together(accountant: str, batch: int) -> None:
    options = {"dataset_size": 1000, "expected_batch_size": batch, "steps": 30, "delta": 1e-5, "epsilon": 2.0}
    made, alone = (
        PrivacyPlan.create(**options, accountant=accountant, preliminary=preliminary) for preliminary in (TWO, ())
    )
    bound = epsilon_of(accountant, made.events(), made.delta).epsilon
    assert 1.95 < bound <= 2.0 and made.noise_multiplier > 1.002 * alone.noise_multiplier


def test_statistics_that_spend_the_whole_budget_are_refused() -> None:
    with pytest.raises(ValueError, match=r"next to the statistics.*\nHINT: choose more noise for the statistics"):
        PrivacyPlan.create(
            dataset_size=1000, expected_batch_size=50, steps=30, delta=1e-5, epsilon=1.0, accountant="rdp",
            preliminary=(("mean", 1.0),),
        )  # fmt: skip


def test_a_group_pays_for_its_rows_in_the_statistics_too() -> None:
    options = FULL | {"noise_multiplier": 20.0}
    one, three = (plan(unit="group", max_examples_per_unit=rows, **options) for rows in (1, 3))
    quiet = plan(unit="group", max_examples_per_unit=3, preliminary=(), **options)
    epsilons = [
        epsilon_of("pld", p.events(), p.delta, p.adjacency, p.max_examples_per_unit).epsilon
        for p in (one, quiet, three)
    ]
    assert 3 * epsilons[0] < epsilons[2] and epsilons[1] < epsilons[2]


def test_statistics_count_from_the_start() -> None:
    made = plan(**FULL)
    spent = Spending(made)
    mu = math.sqrt(sum(1 / level**2 for _, level in TWO))
    for steps, exact in ((0, mu), (10, math.hypot(mu, math.sqrt(10) / 9))):
        assert spent.shown(steps) >= spent.exactly(steps).epsilon * (1 - 1e-9) >= 0.999 * gaussian_epsilon(exact, 1e-5)
    assert spent.shown(0) < spent.shown(1)
    assert Spending(plan(preliminary=(), **FULL)).shown(0) == 0.0


def test_the_plan_keeps_them_in_its_digest_and_refuses_nonsense() -> None:
    made = plan()
    assert PrivacyPlan.from_dict(made.to_dict()) == made
    digests = {p.digest() for p in (made, plan(preliminary=TWO[:1]), plan(preliminary=TWO[::-1]), plan(preliminary=()))}
    assert len(digests) == 4
    for wrong in ((("mean", 0.0),), (("mean", -1.0),), ((3,),), (("mean", 10.0), ("mean", 5.0)), (("", 10.0),)):
        with pytest.raises(ValueError, match="HINT"):
            plan(preliminary=wrong)
