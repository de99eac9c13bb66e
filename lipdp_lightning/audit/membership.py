"""Runs membership inference: can one tell from a trained model which records it was trained on?

These attacks are evidence about typical records of one data set. They prove no bound on epsilon, unless membership was
decided by independent coins: then the guesses of one run bound epsilon (Steinke et al. 2023). They read private
records, and nothing computed here is private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..bounds.losses import Loss
from .confidence import best_guesses, one_run_epsilon
from .findings import Curve, Finding, PlotData, verdict

RATE = 1e-3  # the false-positive rate at which attacks are compared
Train = Callable[[Tensor], nn.Module]  # maps a mask of the rows to train on to a model


@dataclass(frozen=True)
class Attack:
    """The scores of an attack, higher for likely members, and its ROC curve."""

    name: str
    scores: np.ndarray
    members: np.ndarray
    false_positive: np.ndarray
    true_positive: np.ndarray
    auc: float
    true_positive_at_rate: float

    @classmethod
    def of(cls, name: str, scores: np.ndarray, members: np.ndarray) -> Attack:
        from sklearn.metrics import roc_auc_score, roc_curve

        false_positive, true_positive, _ = roc_curve(members, scores)
        at_rate = float(true_positive[false_positive <= RATE].max())
        auc = float(roc_auc_score(members, scores))
        return cls(name, scores, members, false_positive, true_positive, auc, at_rate)


@torch.no_grad()
def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    return torch.cat([model(rows).detach() for rows in x.split(1024)]).double()


def loss_attack(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, members: np.ndarray) -> Attack:
    """Guesses that members have the smaller loss (Yeom et al. 2018)."""
    return Attack.of("loss threshold", -_losses(model, loss, x, y), members)


def _losses(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> np.ndarray:
    return loss.per_example(outputs_of(model, x), y).detach().double().numpy()


def logistic_attack(model: nn.Module, x: Tensor, y: Tensor, members: np.ndarray, seed: int = 0) -> Attack:
    """Fits a logistic regression on logits and labels, which is told half of the memberships (paper 003, section 5).

    It scores the other half, and then the halves are exchanged.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    logits = outputs_of(model, x).flatten(1)
    labels = y if y.is_floating_point() else nn.functional.one_hot(y.flatten(), int(y.max()) + 1)
    labels = labels.double().reshape(len(y), -1)
    features = [logits, labels]
    if not y.is_floating_point() and logits.shape[1] >= labels.shape[1]:
        features.append((logits[:, : labels.shape[1]] * labels).sum(1, keepdim=True))
    table = torch.cat(features, 1).numpy()
    half = np.random.default_rng([seed, 1]).random(len(table)) < 0.5  # these coins are independent of the memberships
    scores = np.zeros(len(table))
    for told in (half, ~half):
        regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(table[told], members[told])
        scores[~told] = regression.decision_function(table[~told])
    return Attack.of("logistic regression on logits", scores, members)


def confidence(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> np.ndarray:
    """Returns LiRA's statistic log(p / (1 - p)) for a loss -log p, and minus the loss where there is no p."""
    losses = _losses(model, loss, x, y)
    if type(loss).__name__ in ("CrossEntropy", "BinaryCrossEntropy"):
        return -losses - np.log(-np.expm1(-np.maximum(losses, 1e-9)))
    return -losses


def likelihood_ratio_attack(
    target: nn.Module, shadows: Sequence[tuple[nn.Module, np.ndarray]], loss: Loss, x: Tensor, y: Tensor,
    members: np.ndarray,
) -> Attack:  # fmt: skip
    """Runs LiRA (Carlini et al. 2022) with few shadow models: means in and out for each record, one variance
    for all.
    """
    seen = confidence(target, loss, x, y)
    stack = np.stack([confidence(model, loss, x, y) for model, _ in shadows])
    masks = np.stack([mask for _, mask in shadows])

    def moments(which: np.ndarray) -> tuple[np.ndarray, float]:
        counts = which.sum(0)
        means = np.where(counts > 0, (stack * which).sum(0) / np.maximum(counts, 1), stack.mean(0))
        residuals = (stack - means)[which & (counts > 1)]
        freedom = max(1, int((counts - 1)[counts > 1].sum()))
        return means, float(np.square(residuals).sum() / freedom) + 1e-12

    (inside, spread_in), (outside, spread_out) = moments(masks), moments(~masks)
    scores = np.square(seen - outside) / (2 * spread_out) - np.square(seen - inside) / (2 * spread_in)
    return Attack.of("likelihood ratio (LiRA)", scores, members)


def coin_masks(rows: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """Puts each record into each model's data by a fair coin of its own."""
    generator = np.random.default_rng(seed)
    return [generator.random(rows) < 0.5 for _ in range(count)]


def membership_attacks(
    train: Train, loss: Loss, x: Tensor, y: Tensor, *, shadow_models: int = 8, seed: int = 0
) -> list[Attack]:
    """Trains a target and shadow models on random halves of the rows, and runs the three attacks on the target.

    Args:
        train: returns a model trained on the rows that a mask selects.
        loss: the loss whose values the attacks compare.
        x: features of all rows.
        y: labels of all rows.
        shadow_models: the number of shadow models; LiRA needs at least two.
        seed: seed of the coins that decide memberships.
    """
    target_mask, *shadow_masks = coin_masks(len(x), 1 + shadow_models, seed)
    target = train(torch.from_numpy(target_mask))
    attacks = [loss_attack(target, loss, x, y, target_mask), logistic_attack(target, x, y, target_mask, seed)]
    if shadow_models >= 2:
        shadows = [(train(torch.from_numpy(mask)), mask) for mask in shadow_masks]
        attacks.append(likelihood_ratio_attack(target, shadows, loss, x, y, target_mask))
    return attacks


def membership_finding(attacks: Sequence[Attack], claimed_at: Callable[[float], float], alpha: float) -> Finding:
    """Reports ROC, AUC, and the epsilon that each attack's guesses prove; memberships were independent coins.

    ``claimed_at`` returns the claimed epsilon at a delta; the bound is taken where its term 2 m delta is below alpha.
    """
    share = alpha / len(attacks)
    rows: list[dict[str, Any]] = []
    violated, best, claimed = False, 0.0, 0.0
    for attack in attacks:
        count = len(attack.members)
        delta = share / (50 * count)
        claimed = claimed_at(delta)
        # the logistic scores saw half of the coins, and a bound from guesses needs scores that saw none
        lower = 0.0
        if "logistic" not in attack.name:
            guesses = best_guesses(0.5, count, delta, share)
            order = np.argsort(attack.scores, kind="stable")
            half = guesses // 2
            correct = int(attack.members[order[-half:]].sum() + (~attack.members[order[:half]]).sum())
            lower = one_run_epsilon(count, guesses, correct, delta, share)
        violated |= lower > claimed
        best = max(best, lower)
        rows.append(
            {
                "attack": attack.name,
                "auc": attack.auc,
                "tpr_at_fpr_0.001": attack.true_positive_at_rate,
                "epsilon": lower,
            }
        )
    text = "; ".join(
        f"{r['attack']}: AUC {r['auc']:.3f}, TPR {100 * r['tpr_at_fpr_0.001']:.2f} % at FPR 0.1 %" for r in rows
    )
    curves = tuple(Curve(a.name, _thinned(a.false_positive), _thinned(a.true_positive)) for a in attacks)
    plot = PlotData(
        "Membership inference", "false positive rate", "true positive rate",
        (*curves, Curve("guessing", [0.0, 1.0], [0.0, 1.0])), "Members and others of one target model.",
    )  # fmt: skip
    return Finding(
        "membership", "Can members of the training data be told from others?", verdict(violated), text + ".",
        alpha=share, epsilon_lower=best, epsilon_claimed=claimed, plots=(plot,),
        values={"attacks": rows, "records": len(attacks[0].members)},
    )  # fmt: skip


def _thinned(values: np.ndarray, most: int = 200) -> list[float]:
    keep = np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).astype(int))
    return [float(v) for v in values[keep]]
