"""Renders ``report.html``, one file with its style, script and plots inside, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lipdp_lightning.extras import is_installed
from lipdp_lightning.report import words
from lipdp_lightning.report.calibration_summary import calibration_words, result_table
from lipdp_lightning.report.contents import (
    layer_table,
    ledger_table,
    metric_table,
    plan_facts_table,
    release_table,
    version_table,
)
from lipdp_lightning.report.drawn import Drawn
from lipdp_lightning.report.formats import format_bound, format_number
from lipdp_lightning.report.majority import Majority
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.pages import render_page
from lipdp_lightning.report.plots import LAYER_PLOTS, TRAINING_PLOTS, Plot, epsilon_against_steps
from lipdp_lightning.report.plots_calibration import calibration_alt, calibration_figures
from lipdp_lightning.report.render_markdown import CONFIG_NOTE

__all__ = ["render_html"]

CALIBRATION_CAPTIONS = {
    "reliability": "Bars below the diagonal: more confident than right. Pale bars stand for fewer than 20 rows.",
    "positives": "How often class 1 was true where this probability of it was predicted.",
    "classes": "The same for the predicted probability of each class by itself.",
    "coverage": "Points below the diagonal: intervals that are too narrow.",
}


def _steps_fact(facts: RunFacts) -> tuple[str, str, str]:
    label = "of the planned steps taken" if facts.stopped_early else "steps, as planned"
    share = 100 * facts.steps_taken / max(facts.steps_planned, 1)
    value = f"{share:.3g} %" if facts.stopped_early else f"{facts.steps_taken:,}".replace(",", "\u202f")
    detail = f"{facts.steps_taken} of {facts.steps_planned} steps, " if facts.stopped_early else ""
    detail += f"{format_number(facts.expected_batch_size)} of {facts.dataset_size} {facts.unit}s expected per step"
    return label, value, detail


def _metric_fact(facts: RunFacts, majority: Majority | None) -> tuple[str, str, str]:
    metric = words.find_primary_metric(facts)
    if metric is None or metric not in facts.metrics:
        return "accuracy", "none", "no validation was run"
    value = words.format_metric(metric, facts.metrics[metric])
    detail = f"on {words.source_words(facts, metric)}"
    return words.metric_label(metric), value, detail if majority is None else f"{detail}; {majority.beside()}"


def _plots(plots: Sequence[Plot], facts: RunFacts) -> Iterator[Drawn]:
    for plot in plots if is_installed("matplotlib") else ():
        figure = plot.draw(facts)
        if figure is not None:
            yield Drawn.of(figure, plot.name, plot.alt(facts), plot.caption_for(facts))


def _calibration(result: Mapping[str, Any], certified: bool) -> dict[str, Any]:
    """Returns words, table and diagrams of one evaluation that measured calibration."""
    stage = result["stage"]
    figures = [
        Drawn.of(
            figure, f"calibration-{stage}-{name}", calibration_alt(name, result), CALIBRATION_CAPTIONS[name],
            "wide" if name == "classes" else "",
        )
        for name, figure in calibration_figures(result).items()
    ]  # fmt: skip
    sentences = calibration_words(result, certified)
    return {"stage": stage, "words": sentences, "table": result_table(result), "figures": figures}


def render_html(facts: RunFacts) -> str:
    """Returns the whole page; without a certificate it says so first and last and shows no value of epsilon."""
    facts = facts.public()
    majority, doubtful = words.majority(facts), words.is_doubtful(facts)
    useless = majority is not None and not majority.is_beaten
    guess = words.guess_bound(facts.epsilon or 0.0, facts.delta or 0.0)
    shown = [plot for plot in TRAINING_PLOTS if facts.certified or plot.draw is not epsilon_against_steps]
    return render_page(
        "report.html",
        facts=facts,
        tone="bad" if not facts.certified else "warn" if doubtful or useless else "",
        no_guarantee=words.NO_GUARANTEE,
        bound=format_bound,
        relation=words.adjacency_words(facts),
        doubtful=doubtful,
        useless=useless,
        metric=_metric_fact(facts, majority),
        steps=_steps_fact(facts),
        guarantee=words.guarantee_sentence(facts),
        bet=words.percent_at_most(guess),
        filled=f"{max(0.0, min(100.0, 200 * (guess - 0.5))):.1f}",
        cautions=words.cautions(facts),
        plots=list(_plots(shown, facts)),
        layer_plots=list(_plots(LAYER_PLOTS, facts)) if facts.groups else [],
        layers=layer_table(facts),
        metrics=metric_table(facts),
        released=release_table(facts),
        calibration=[_calibration(result, facts.certified) for result in facts.calibration],
        plan=plan_facts_table(facts),
        ledger=ledger_table(facts),
        versions=version_table(facts),
        config_note=CONFIG_NOTE,
    )
