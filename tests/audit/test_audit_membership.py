"""Membership inference against models that remember, and against one that cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.audit.membership import (
    Attack,
    coin_masks,
    confidence,
    likelihood_ratio_attack,
    logistic_attack,
    loss_attack,
    membership_attacks,
    membership_finding,
)
from lipdp_lightning.bounds.losses import CrossEntropy

ROWS, CLASSES = 400, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rows() -> tuple[Tensor, Tensor]:
    """Labels that are pure noise can only be learned by heart."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 60, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def learns_by_heart(mask: Tensor) -> nn.Module:
    x, y = rows()
    torch.manual_seed(int(mask.long().sum()))
    net = nn.Linear(60, CLASSES)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[mask]), y[mask]).backward()
        optimizer.step()
    return net.double()


def untrained(mask: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(60, CLASSES).double()


def test_a_model_that_remembers_is_attacked_and_an_untrained_one_is_not() -> None:
    x, y = rows()
    attacks = membership_attacks(learns_by_heart, CrossEntropy(), x.double(), y, shadow_models=6)
    assert [a.name for a in attacks] == ["loss threshold", "logistic regression on logits", "likelihood ratio (LiRA)"]
    assert all(a.auc > 0.6 for a in attacks)
    assert attacks[2].auc > attacks[0].auc  # shadow models know how hard each record is
    found = membership_finding(attacks, lambda delta: 0.5, 0.01)
    assert found.violated and found.epsilon_lower > 0.5
    assert not membership_finding(attacks, lambda delta: 50.0, 0.01).violated
    blind = membership_attacks(untrained, CrossEntropy(), x.double(), y, shadow_models=2)
    assert all(abs(a.auc - 0.5) < 0.12 for a in blind)
    assert membership_finding(blind, lambda delta: 0.01, 0.01).epsilon_lower == 0.0


def test_rates_are_those_of_the_definition() -> None:
    members = np.arange(4000) < 2000
    scores = np.where(members, 1.0, 0.0)
    scores[2000] = 2.0  # one false positive above all members: 1 of 2000 is below 0.1 %
    attack = Attack.of("toy", scores, members)
    assert attack.true_positive_at_rate == 1.0
    scores[2001:2003] = 2.0
    assert Attack.of("toy", scores, members).true_positive_at_rate == 0.0
    assert Attack.of("toy", scores, members).auc == pytest.approx(1 - 3 / 2000)


def test_the_logistic_attack_scores_only_what_it_was_not_told() -> None:
    """Random memberships cannot be learned; an attack scored on what it was fitted to would seem to succeed."""
    x, y = rows()
    members = np.random.default_rng(1).random(ROWS) < 0.5
    assert abs(logistic_attack(untrained(torch.ones(ROWS)), x.double(), y, members).auc - 0.5) < 0.12


def test_memberships_are_fair_and_independent_coins() -> None:
    first, second = coin_masks(10_000, 2)
    assert abs(first.mean() - 0.5) < 0.02 and abs((first == second).mean() - 0.5) < 0.02


def test_a_few_shadow_models_suffice_for_the_likelihood_ratio() -> None:
    x, y = rows()
    masks = coin_masks(ROWS, 3, seed=4)
    models = [learns_by_heart(torch.from_numpy(m)) for m in masks]
    shadows = list(zip(models[1:], masks[1:], strict=True))
    attack = likelihood_ratio_attack(models[0], shadows, CrossEntropy(), x.double(), y, masks[0])
    assert np.isfinite(attack.scores).all() and attack.auc > 0.65
    losses = CrossEntropy().per_example(models[0](x.double()), y)
    assert np.allclose(confidence(models[0], CrossEntropy(), x.double(), y),
                       (-losses - torch.log(-torch.expm1(-losses.clamp_min(1e-9)))).detach().numpy())  # fmt: skip
    assert loss_attack(models[0], CrossEntropy(), x.double(), y, masks[0]).auc > 0.65
