"""The three accountants against closed forms, brute force, each other, and the mistakes they must not make."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy import integrate, optimize, stats
from scipy.special import log_ndtr, ndtr

from lipdp_lightning.accounting import privacy_curves as curves
from lipdp_lightning.accounting.accountants import (
    ACCOUNTANTS,
    AccountantFallbackWarning,
    answer_by,
    epsilon_of,
    solve_group,
)
from lipdp_lightning.accounting.events import LedgerEntry
from lipdp_lightning.accounting.privacy_curves import ADD, REMOVE, REPLACE, PldCurve, PrvCurve, RdpCurve, collect

RATE, STEPS, DELTA = 256 / 60000, 14062, 1e-5


def entry(noise, rate, steps, label=""):
    return LedgerEntry("subsampled_gaussian", noise, rate, steps, label)


def epsilon(name, noise, rate, steps, delta=DELTA, adjacency="add_remove", rows=1):
    return epsilon_of(name, [entry(noise, rate, steps)], delta, adjacency, rows).epsilon


def gaussian_delta(mu, eps):
    """Balle and Wang 2018: the exact curve of a Gaussian whose means are mu standard deviations apart."""
    return ndtr(mu / 2 - eps / mu) - np.exp(eps + log_ndtr(-mu / 2 - eps / mu))


def gaussian_epsilon(mu, delta):
    # far below any delta asked for at the upper end, and still representable
    return optimize.brentq(lambda e: gaussian_delta(mu, e) - delta, 0, mu**2 / 2 + 20 * mu, xtol=1e-12)


def mixture(rate, noise, shift, x):
    return (1 - rate) * stats.norm.pdf(x, 0, noise) + rate * stats.norm.pdf(x, shift, noise)


def hockey_stick(p, q, eps, noise):
    """Brute force on a line: integral of (p - exp(eps) q)+."""
    x = np.linspace(-4 - 12 * noise, 4 + 12 * noise, 200_001)
    return integrate.simpson(np.maximum(p(x) - math.exp(eps) * q(x), 0), x=x)


# --- reference case -------------------------------------------------------------------------------------


def test_reference_case_add_remove():
    assert epsilon("pld", 1.1, RATE, STEPS) == pytest.approx(2.382, abs=1e-3)
    assert epsilon("rdp", 1.1, RATE, STEPS) == pytest.approx(2.597, abs=1e-3)
    prv = epsilon_of("prv", [entry(1.1, RATE, STEPS)], DELTA)
    assert prv.lower == pytest.approx(2.372, abs=1e-3)
    assert prv.epsilon == prv.upper == pytest.approx(2.392, abs=1e-3)
    assert prv.lower <= epsilon("pld", 1.1, RATE, STEPS) <= prv.upper


def test_reference_case_replace_one():
    assert epsilon("pld", 1.1, RATE, STEPS, adjacency="replace_one") == pytest.approx(4.22, abs=0.01)
    # a replacement counted as a group of two
    assert solve_group(PldCurve([(1.1, RATE, STEPS)], REMOVE), 2, DELTA) == pytest.approx(5.528, abs=1e-3)


@pytest.mark.parametrize("name", ["prv", "rdp"])
@pytest.mark.parametrize(("noise", "rate", "steps", "rows"), [(1.1, RATE, STEPS, 1), (2.0, 0.01, 100, 3)])
def test_a_replacement_is_not_counted_as_two_examples_whatever_accountant_is_named(name, noise, rate, steps, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epsilon_of(name, [entry(noise, rate, steps)], DELTA, "replace_one", rows)
    tight = epsilon_of("pld", [entry(noise, rate, steps)], DELTA, "replace_one", rows)
    assert (found.epsilon, found.accountant) == (tight.epsilon, "pld")
    assert f"{name} knows add/remove only" in found.note


# --- against truth --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize(("noise", "steps"), [(5.0, 100), (0.7, 1), (40.0, 10_000)])
def test_unsampled_gaussian_is_bounded_by_its_closed_form(name, noise, steps):
    truth = gaussian_epsilon(math.sqrt(steps) / noise, DELTA)
    bound = epsilon_of(name, [LedgerEntry("gaussian", noise, 1.0, steps)], DELTA)
    assert truth <= bound.epsilon * (1 + 1e-6)
    assert bound.lower <= truth
    assert bound.epsilon < truth * (1.2 if name == "rdp" else 1.02)


def test_unsampled_gaussian_replace_one_doubles_the_shift():
    bound = epsilon_of("pld", [LedgerEntry("gaussian", 5.0, 1.0, 100)], DELTA, "replace_one")
    truth = gaussian_epsilon(2 * 10 / 5, DELTA)
    assert truth <= bound.epsilon <= truth * 1.001


@pytest.mark.parametrize("direction", [REMOVE, ADD, REPLACE])
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.9), (0.6, 0.2), (3.0, 0.01)])
def test_one_step_against_brute_force(direction, noise, rate):
    curve = PldCurve([(noise, rate, 1)], direction)
    upper, lower = {REMOVE: (1, 0), ADD: (0, 1), REPLACE: (1, -1)}[direction]
    for eps in (0.0, 0.01, 0.5, 2.0):
        truth = hockey_stick(
            lambda x: mixture(rate, noise, upper, x), lambda x: mixture(rate, noise, lower, x), eps, noise
        )
        assert truth - 1e-9 <= curve.delta_at(eps) <= truth * 1.01 + 1e-6


def test_replace_pair_dominates_all_gradients_in_the_plane():
    """Any two contributions of norm at most 1, at any angle, against the pair the accountant uses."""
    noise, rate, eps = 1.0, 0.5, 0.4
    grid = np.linspace(-8, 8, 321)
    x, y = np.meshgrid(grid, grid)
    cell = (grid[1] - grid[0]) ** 2

    def density(g):
        base = np.exp(-(x**2 + y**2) / (2 * noise**2))
        shifted = np.exp(-((x - g[0]) ** 2 + (y - g[1]) ** 2) / (2 * noise**2))
        return ((1 - rate) * base + rate * shifted) / (2 * math.pi * noise**2)

    def spent(norm, other, angle):
        p, q = density((norm, 0.0)), density((other * math.cos(angle), other * math.sin(angle)))
        return float(np.maximum(p - math.exp(eps) * q, 0).sum() * cell)

    claimed = PldCurve([(noise, rate, 1)], REPLACE).delta_at(eps)
    found = [
        spent(norm, other, angle)
        for norm in (0.0, 0.5, 1.0)
        for other in (0.0, 0.5, 1.0)
        for angle in np.linspace(0, math.pi, 7)
    ]
    worst = spent(1.0, 1.0, math.pi)
    assert max(found) == worst
    assert worst == pytest.approx(claimed, abs=1e-5)  # quadrature on the grid
    assert max(found) > PldCurve([(noise, rate, 1)], REMOVE).delta_at(eps)  # add/remove would not cover it


def test_halving_the_noise_is_not_replace_one():
    releases = [(1.0, 0.9, 2)]
    truth = PldCurve(releases, REPLACE).delta_at(0.01)
    claimed = max(PldCurve([(0.5, 0.9, 2)], d).delta_at(0.01) for d in (REMOVE, ADD))
    assert truth == pytest.approx(0.7752, abs=1e-4)
    assert claimed == pytest.approx(0.7699, abs=1e-4)


@pytest.mark.parametrize("direction", [REMOVE, REPLACE])
def test_pld_agrees_with_the_library_end_to_end(direction):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.privacy_accountant import NeighboringRelation

    relation = NeighboringRelation.REPLACE_ONE if direction == REPLACE else NeighboringRelation.ADD_OR_REMOVE_ONE
    library = PLDAccountant(relation)
    library.compose(SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(0.8)), 500))
    library.compose(GaussianDpEvent(6.0), 3)
    adjacency = "replace_one" if direction == REPLACE else "add_remove"
    ledger = [entry(0.8, 0.02, 500), LedgerEntry("gaussian", 6.0, 1.0, 3)]
    ours = epsilon_of("pld", ledger, DELTA, adjacency).epsilon
    assert ours == pytest.approx(library.get_epsilon(DELTA), rel=2e-3)


def test_rounding_allowance_is_needed_and_enough():
    """1e4 Gaussians of multiplier 100 are one of multiplier 1. Far in its tail a pessimistic PLD is too optimistic."""
    from dp_accounting.pld import privacy_loss_distribution

    tail = np.arange(5.0, 9.0, 0.25)
    truth = gaussian_delta(1.0, tail)
    library = privacy_loss_distribution.from_gaussian_mechanism(100.0).self_compose(10**4)
    assert any(library.get_delta_for_epsilon(float(e)) < t for e, t in zip(tail, truth, strict=True))
    curve = PldCurve([(100.0, 1.0, 10**4)], REMOVE)
    assert all(curve.delta_at(e) >= t for e, t in zip(tail, truth, strict=True))
    assert curve.delta_at(5.0) < 1.05 * truth[0]


# --- against each other ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "rate", "steps"), [(0.6, 0.01, 300), (2.0, 0.05, 2000), (1.0, 0.9, 10)])
def test_the_three_agree_in_order(noise, rate, steps):
    rdp, pld = epsilon("rdp", noise, rate, steps), epsilon("pld", noise, rate, steps)
    prv = epsilon_of("prv", [entry(noise, rate, steps)], DELTA)
    assert prv.accountant == "prv"
    assert prv.lower <= pld <= prv.upper < rdp
    assert rdp < 1.35 * pld


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_heterogeneous_ledgers(adjacency):
    ledger = [entry(1.0, 0.01, 300), entry(2.0, 0.05, 200), LedgerEntry("gaussian", 8.0, 1.0, 2), entry(1.0, 0.01, 100)]
    bounds = {name: epsilon_of(name, ledger, DELTA, adjacency) for name in ACCOUNTANTS}
    if adjacency == "add_remove":
        assert {name: bound.accountant for name, bound in bounds.items()} == {n: n for n in ACCOUNTANTS}
        assert bounds["pld"].epsilon <= bounds["prv"].epsilon * 1.001 < bounds["rdp"].epsilon
        assert bounds["prv"].lower <= bounds["pld"].epsilon
    else:
        assert {(bound.accountant, bound.epsilon) for bound in bounds.values()} == {("pld", bounds["pld"].epsilon)}
        assert bounds["pld"].epsilon < answer_by("rdp", collect(ledger), DELTA, adjacency, 1).epsilon
    less = epsilon_of("pld", ledger[:2], DELTA, adjacency).epsilon
    assert less < bounds["pld"].epsilon
    merged = [entry(1.0, 0.01, 400), entry(2.0, 0.05, 200), LedgerEntry("gaussian", 8 / math.sqrt(2), 1.0, 1)]
    assert epsilon_of("pld", merged, DELTA, adjacency).epsilon == pytest.approx(bounds["pld"].epsilon)


def test_collect_joins_what_may_be_joined():
    ledger = [entry(3.0, 1.0, 1), entry(1.0, 0.1, 2, "a"), LedgerEntry("gaussian", 4.0, 1.0, 1), entry(1.0, 0.1, 3)]
    assert collect(ledger) == [(1.0, 0.1, 5), (pytest.approx(2.4), 1.0, 1)]


def test_add_direction_never_exceeds_remove_here_but_is_computed():
    """Not proven in general for compositions; PRV would rely on it."""
    for eps in (0.5, 1.0, 2.0):
        remove, add = (PldCurve([(1.0, 0.05, 500)], d).delta_at(eps) for d in (REMOVE, ADD))
        assert 0 < add < remove


@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_monotone(name):
    noises = [epsilon(name, s, 0.01, 1000) for s in (0.5, 0.7, 1.0, 2.0, 5.0, 50.0)]
    steps = [epsilon(name, 1.0, 0.01, n) for n in (1, 10, 100, 1000, 10_000)]
    rates = [epsilon(name, 1.0, q, 100) for q in (0.001, 0.01, 0.1, 0.5, 1.0)]
    deltas = [epsilon(name, 1.0, 0.01, 1000, d) for d in (1e-3, 1e-5, 1e-7, 1e-9)]
    assert noises == sorted(noises, reverse=True)
    for values in (steps, rates, deltas):
        assert values == sorted(values) and values[0] < values[-1]


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_replace_one_is_never_less(name, adjacency):
    assert epsilon(name, 1.0, 0.02, 200, adjacency="replace_one") > epsilon(name, 1.0, 0.02, 200)


# --- groups ---------------------------------------------------------------------------------------------


def group_delta(noise, rate, rows, eps):
    """Truth for one step: all rows of the unit add up, each sampled by itself (a binomial mixture)."""
    weights = stats.binom.pmf(np.arange(rows + 1), rows, rate)

    def with_unit(x):
        return sum(w * stats.norm.pdf(x, k, noise) for k, w in enumerate(weights))

    return hockey_stick(with_unit, lambda x: stats.norm.pdf(x, 0, noise), eps, noise)


@pytest.mark.parametrize("name", ["pld", "rdp"])
@pytest.mark.parametrize(("noise", "rate", "rows"), [(2.0, 0.5, 3), (1.0, 0.05, 2), (4.0, 1.0, 4)])
def test_group_bound_holds_and_the_naive_one_does_not(name, noise, rate, rows):
    delta = 1e-3
    sound = epsilon(name, noise, rate, 1, delta, rows=rows)
    assert group_delta(noise, rate, rows, sound) <= delta
    unchanged_delta = rows * epsilon("pld", noise, rate, 1, delta)  # (m eps, delta), forgetting delta's factor
    assert sound > unchanged_delta
    assert group_delta(noise, rate, rows, epsilon("pld", noise, rate, 1, delta)) > delta  # as if one row


def test_group_of_two_needs_the_factor_of_delta():
    delta = 1e-3
    naive = 2 * epsilon("pld", 4.0, 1.0, 1, delta)
    assert group_delta(4.0, 1.0, 2, naive) > delta


def test_group_of_rows_under_replace_one():
    one, three = (epsilon("pld", 2.0, 0.01, 100, adjacency="replace_one", rows=m) for m in (1, 3))
    assert three > 3 * one
    assert epsilon("pld", 2.0, 0.01, 100, rows=3) < three


# --- edges ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_nothing_released_costs_nothing_and_no_noise_costs_everything(name):
    assert epsilon_of(name, [], DELTA).epsilon == 0
    assert epsilon(name, 1.0, 0.1, 0) == 0
    assert epsilon(name, 0.0, 0.1, 1) == math.inf


@pytest.mark.parametrize("steps", [100_000, 1_000_000])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_pld_and_rdp_at_many_steps(steps, adjacency):
    pld = epsilon("pld", 1.0, 1e-3, steps, adjacency=adjacency)
    rdp = answer_by("rdp", [(1.0, 1e-3, steps)], DELTA, adjacency, 1).epsilon
    # central limit: the chi-square divergence of one step, of N(1) and N(0), or of N(1) and N(-1), times rate^2
    divergence = math.expm1(1) if adjacency == "add_remove" else 2 * (math.e - 1 / math.e)
    limit = gaussian_epsilon(1e-3 * math.sqrt(steps * divergence), DELTA)
    assert limit * 0.95 < pld < rdp
    assert pld < 1.2 * limit


def test_prv_falls_back_with_the_reason_before_it_allocates():
    with pytest.warns(AccountantFallbackWarning, match=r"1000000 steps.*grid of .* points: epsilon is from pld"):
        bound = epsilon_of("prv", [entry(1.0, 1e-3, 10**6)], DELTA)
    assert bound.accountant == "pld" and "grid" in bound.note
    assert bound.epsilon == epsilon("pld", 1.0, 1e-3, 10**6)


def test_prv_falls_back_when_the_library_gives_up():
    with pytest.warns(AccountantFallbackWarning, match="prv failed"):
        bound = epsilon_of("prv", [entry(0.1, 0.5, 10)], DELTA)
    assert bound.accountant == "pld" and 500 < bound.epsilon < 600


@pytest.mark.slow
def test_prv_at_a_hundred_thousand_steps():
    bound = epsilon_of("prv", [entry(1.1, RATE, 100_000)], DELTA)
    assert bound.accountant == "prv"
    tight = epsilon("pld", 1.1, RATE, 100_000)
    assert bound.lower <= tight <= bound.upper
    assert bound.upper - bound.lower < 2 * 0.01 * tight  # an error of at most 1 % on each side


def test_deltas_beyond_double_precision_go_to_rdp():
    with pytest.warns(AccountantFallbackWarning, match="pld failed.*numerical error"):
        bound = epsilon_of("pld", [entry(1.0, 0.01, 1000)], 1e-12)
    assert bound.accountant == "rdp" and 3 < bound.epsilon < 5


@pytest.mark.parametrize(
    ("noise", "rate", "steps"), [(1e6, 0.01, 1000), (0.02, 0.01, 10), (1.0, 1e-9, 10), (500.0, 0.5, 10**5)]
)
@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_extremes_are_finite_and_not_negative(name, noise, rate, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccountantFallbackWarning)
        value = epsilon(name, noise, rate, steps)
    assert 0 <= value < 1e6


def test_rdp_matches_opacus():
    from opacus.accountants import RDPAccountant

    library = RDPAccountant()
    library.history = [(1.1, RATE, STEPS), (2.0, 0.01, 100)]
    ours = epsilon_of("rdp", [entry(1.1, RATE, STEPS), entry(2.0, 0.01, 100)], DELTA).epsilon
    assert ours <= library.get_epsilon(DELTA) * (1 + 1e-5)  # the precision of the search for epsilon
    assert ours == pytest.approx(library.get_epsilon(DELTA), rel=0.01)


def test_rdp_conversion_is_inverted_exactly():
    curve = RdpCurve([(1.0, 0.01, 1000)])
    eps = solve_group(curve, 1, DELTA)
    assert DELTA * 0.999 < curve.delta_at(eps) <= DELTA


def test_prv_curve_covers_its_bracket():
    curve = PrvCurve([(1.0, 0.02, 200)], DELTA, 1.0)
    lower, upper = curve.bracket(DELTA)
    assert lower < upper
    assert curve.delta_at(upper) == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize(
    ("delta", "adjacency", "rows"),
    [(0.0, "add_remove", 1), (1.0, "add_remove", 1), (1e-5, "other", 1), (1e-5, "add_remove", 0)],
)
def test_bad_questions_are_refused(delta, adjacency, rows):
    with pytest.raises(ValueError, match="HINT"):
        epsilon_of("pld", [entry(1.0, 0.1, 1)], delta, adjacency, rows)
    with pytest.raises(ValueError, match="HINT"):
        epsilon_of("moments", [entry(1.0, 0.1, 1)], DELTA)


def test_notes_name_the_relation():
    note = epsilon_of("rdp", [entry(1.0, 0.1, 1)], DELTA, "add_remove", 3).note
    assert "add or remove one group of at most 3 examples" in note and "group of 3" in note
    note = epsilon_of("pld", [entry(1.0, 0.1, 1)], DELTA, "replace_one", 3).note
    assert "replace one group of at most 3 examples" in note and "group of 3" in note
    note = answer_by("rdp", [(1.0, 0.1, 1)], DELTA, "replace_one", 3).note
    assert "replace one group of at most 3 examples" in note and "group of 6" in note


def test_where_pld_cannot_answer_for_a_replacement_a_sound_bound_does():
    with pytest.warns(AccountantFallbackWarning, match="pld failed"):
        bound = epsilon_of("rdp", [entry(1.0, 0.01, 1000)], 1e-13, "replace_one")
    assert bound.accountant == "rdp" and "group of 2" in bound.note
    assert bound.epsilon > epsilon("rdp", 1.0, 0.01, 1000, 1e-13)


def test_plans_and_ledgers_load_without_the_libraries():
    code = (
        "import sys, lipdp_lightning.privacy.plan\n"
        "import lipdp_lightning.accounting.accountants, lipdp_lightning.budget.calibrate\n"
        "heavy = {'opacus', 'prv_accountant', 'dp_accounting', 'lightning', 'wandb', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_kept_of_one_release_changes_no_answer():
    """Curves of other counts are made of the same discretised release, in any order."""
    counts, answers = (1, 400, 3, 1, 50, 400), []
    for forgets in (True, False):
        found = []
        for count in counts:
            if forgets or not found:
                curves._Loss.of.cache_clear()
                curves._discretised.cache_clear()
            found.append(epsilon("pld", 1.3, 0.02, count))
        answers.append(found)
    assert answers[0] == answers[1] and answers[0][0] == answers[0][3] and answers[0][1] == answers[0][5]
    assert curves._discretised.cache_info().hits > 0
