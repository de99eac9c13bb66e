"""The HTML page: self-contained, escaped, honest about a missing certificate."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_check import Page
from report_examples import empty, healthy, history, layer_groups, not_private, stopped_early

from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.render_html import render_html

EXAMPLES = {"healthy": healthy, "stopped": stopped_early, "not private": not_private, "empty": empty}


@pytest.fixture(scope="module", params=EXAMPLES)
def page(request: pytest.FixtureRequest) -> str:
    return render_html(EXAMPLES[request.param]())


def test_the_page_loads_nothing_and_runs_its_own_script_alone(page: str) -> None:
    assert Page(page).problems == []
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize(
    "intrusion",
    [
        '<script src="https://example.org/x.js"></script>',
        "<script>1</script>",
        '<link rel="stylesheet" href="style.css">',
        '<p onclick="x()">a</p>',
        '<p style="background: url(https://example.org/x.png)">a</p>',
        "<style>@import 'x.css';</style>",
        "<p>",
    ],
)
def test_the_check_of_a_page_sees_intrusions(intrusion: str) -> None:
    assert Page(render_html(empty()).replace("</main>", intrusion + "</main>")).problems


def test_identifiers_are_unique_and_every_reference_is_met(page: str) -> None:
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(parsed.references) <= set(parsed.ids)


def test_both_colour_schemes_are_served_and_no_colour_is_fixed_in_a_plot(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    for tag, name, value in Page(page).attributes:
        if name in {"style", "fill", "stroke"}:
            assert not re.search(r"#[0-9a-fA-F]{6}\b", value), (tag, name, value)


def test_every_plot_has_a_description(page: str) -> None:
    plots = re.findall(r"<svg[^>]*>", page)
    assert plots
    for tag in plots:
        label = re.search(r'role="img" aria-label="([^"]+)"', tag)
        assert label and len(label.group(1)) > 15


ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</pre></style></svg></title><script>1</script>",
    "&lt;script&gt; $\\frac{ {{x}} %s -->",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_string_of_the_user_becomes_markup(attack: str) -> None:
    groups = [{**layer_groups()[0], "name": attack}]
    facts: dict[str, Any] = {
        "title": attack,
        "created": attack,
        "accountant": attack,
        "allocation": attack,
        "unit": attack,
        "groups": groups,
        "metrics": {attack: 0.5, "other": attack},
        "metric_sources": {attack: "public"},
        "primary_metric": attack,
        "nonprivate_released": [f"{attack}: {attack}"],
        "versions": {attack: attack},
        "history": [{"step": s, "epsilon": s / 9, attack: 0.1 * s} for s in (1, 2, 3)],
        "ledger": [{attack: attack, "parameters": {attack: attack}}],
        "notes": [attack],
        "config": f"a: {attack}\nb: {attack}\n",
    }
    for changes in (facts, facts | {"certified": False, "not_certified_because": attack}):
        parsed = Page(render_html(healthy(**changes)))
        assert parsed.problems == []
        # the string arrives, as text, as it was
        assert attack in "".join(parsed.texts)


def test_the_check_sees_a_string_that_was_not_escaped() -> None:
    page = render_html(healthy(title=ATTACKS[0]))
    assert Page(page.replace("&lt;script&gt;", "<script>").replace("&lt;/script&gt;", "</script>")).problems


def test_a_layer_named_like_a_colour_keeps_its_name() -> None:
    group = {**layer_groups()[0], "name": '#0072b2 id="x'}
    page = render_html(healthy(groups=[group]))
    assert "".join(Page(page).texts).count('#0072b2 id="x') >= 3


def test_a_certified_page_states_the_guarantee_in_full() -> None:
    text = " ".join(Page(render_html(healthy())).texts)
    assert "2.392" in text and "1e-05" in text and "certified: true" in text
    assert "added to or removed from the training data" in text
    assert "NOT PRIVATE" not in text


def shows_epsilon(page: str) -> bool:
    """Whether any epsilon of the examples, at any precision, stands on the page."""
    values = [2.39185, 2.37188, *(row["epsilon"] for row in history(14062))]
    return any(f"{value:.4g}" in page or f"{value:.3f}" in page for value in values)


def test_a_page_without_a_certificate_says_so_and_shows_no_epsilon() -> None:
    page = render_html(not_private(ledger=[{"mechanism": "gaussian", "epsilon": 2.39185, "count": 3}]))
    text = " ".join(Page(page).texts)
    assert not shows_epsilon(page)
    assert shows_epsilon(render_html(healthy()))
    assert text.count("NOT PRIVATE") >= 3 and "certified: false" in text
    assert "certified: true" not in page and "at even odds" not in page
    assert "Epsilon against steps" not in page and "Epsilon against steps" in render_html(healthy())


def test_a_fixed_secret_takes_the_guarantee_back_in_the_headline() -> None:
    page = render_html(healthy(secret_fixed=True))
    assert "hero warn" in page and "whoever knows it can subtract the noise" in page
    assert "✓ certified: true" not in page
    assert "✓ certified: true" in render_html(healthy())


def test_stopping_early_is_explained() -> None:
    text = " ".join(Page(render_html(stopped_early())).texts)
    assert "Stopped after 4000 of 14062 planned steps" in text and "1.276" in text and "2.392" in text


def test_the_same_facts_give_the_same_page() -> None:
    assert render_html(stopped_early()) == render_html(stopped_early())


def test_the_page_does_not_grow_with_the_number_of_steps() -> None:
    def size(rows: int) -> int:
        return len(render_html(healthy(history=history(14062, rows))))

    assert size(14000) < 1.05 * size(4000)


def test_values_of_any_size_can_be_rendered() -> None:
    odd: RunFacts = healthy(
        groups=[
            {"name": "tiny", "delta": 1e-300, "noise_std": 1e-290, "parameters": 1, "weight_norm": 0.0},
            {"name": "huge", "delta": 1e250, "noise_std": 1e250, "parameters": 10**9, "weight_norm": 1e30},
            {"name": "zero", "delta": 0.0, "noise_std": 0.0, "max_norm": float("inf"), "parameters": 0},
            {"name": "unknown"},
        ],
        history=[{"step": 1, "epsilon": float("nan"), "val_accuracy": float("inf")}],
    )
    assert Page(render_html(odd)).problems == []
