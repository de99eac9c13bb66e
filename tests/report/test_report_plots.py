"""The plots: true to the facts, sensible with little data, without global state."""

from __future__ import annotations

import gc
import html
import io
import json
import math
import re
import subprocess
import sys
import weakref
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from report_examples import empty, healthy, layer_groups, not_private, stopped_early

from lipdp_lightning.report.figure_style import COLOURS, DARK_COLOURS, figure_to_png, figure_to_svg, shorten
from lipdp_lightning.report.plots import all_figures, epsilon_against_steps, metric_against_epsilon
from lipdp_lightning.report.plots_layers import noise_and_signal, sensitivities, weight_norms


def texts(figure: Figure) -> str:
    found = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
    return " | ".join(found)


def curve(figure: Figure) -> tuple[list[float], list[float]]:
    line = figure.axes[0].lines[0]
    return list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))


def test_the_metric_is_drawn_against_the_epsilon_of_its_step() -> None:
    facts = healthy()
    xs, ys = curve(metric_against_epsilon(facts))
    assert xs == [row["epsilon"] for row in facts.history]
    assert ys == [row["val_accuracy"] for row in facts.history]


def test_without_a_certificate_the_metric_is_drawn_against_steps() -> None:
    facts = not_private()
    figure = metric_against_epsilon(facts)
    assert curve(figure)[0] == [row["step"] for row in facts.history]
    assert "epsilon" not in texts(figure)
    assert "no epsilon to show" in texts(epsilon_against_steps(facts))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_short_history_still_makes_sense(rows: int) -> None:
    facts = healthy(history=healthy().history[:rows], metrics={}, metric_sources={})
    figure = metric_against_epsilon(facts)
    if rows == 0:
        assert "no validation was run" in texts(figure)
    else:
        assert len(curve(figure)[0]) == rows and "no validation" not in texts(figure)
    for drawn in all_figures(facts).values():
        assert len(figure_to_png(drawn)) > 1000


def test_a_final_metric_without_history_is_one_point() -> None:
    xs, ys = curve(metric_against_epsilon(healthy(history=[])))
    assert (xs, ys) == ([2.39185], [0.9709])


def test_undefined_values_are_left_out_of_curves() -> None:
    rows = [
        {"step": 1, "epsilon": 0.5, "val_accuracy": math.nan},
        {"step": 2, "epsilon": math.inf, "val_accuracy": 0.4},
        {"step": 3, "epsilon": 0.7, "val_accuracy": 0.5},
        {"step": 4, "epsilon": None, "val_accuracy": "bad"},
        {"step": 5, "epsilon": np.float32(0.75), "val_accuracy": np.float32(0.625)},
    ]
    assert curve(metric_against_epsilon(healthy(history=rows))) == ([0.7, 0.75], [0.5, 0.625])


def test_a_long_history_keeps_both_ends() -> None:
    rows = [{"step": s, "epsilon": s / 1000, "val_accuracy": 0.5} for s in range(1, 14001)]
    xs, _ = curve(metric_against_epsilon(healthy(history=rows)))
    assert len(xs) <= 400 and (xs[0], xs[-1]) == (0.001, 14.0)


def test_the_budget_line_is_the_guarantee_of_the_plan() -> None:
    figure = epsilon_against_steps(stopped_early())
    levels = [line.get_ydata() for line in figure.axes[0].lines if line.get_label() == "guarantee"]
    assert [set(map(float, level)) for level in levels] == [{2.39185}]
    assert "stopped" in texts(figure) and "stopped" not in texts(epsilon_against_steps(healthy()))


def test_two_points_are_not_joined_to_a_curve() -> None:
    figure = epsilon_against_steps(healthy(history=[]))
    assert figure.axes[0].lines[0].get_linestyle() == "None"
    assert epsilon_against_steps(healthy()).axes[0].lines[0].get_linestyle() == "-"


def test_bars_of_sensitivities_end_at_their_values_on_a_logarithmic_axis() -> None:
    axes = sensitivities(healthy()).axes[0]
    assert axes.get_xscale() == "log"
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert ends == pytest.approx([group["delta"] for group in layer_groups()])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "stem.conv" and len(labels) == 6
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first layer is on top


def test_noise_and_the_largest_signal_per_coordinate() -> None:
    axes = noise_and_signal(healthy()).axes[0]
    points = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    groups = layer_groups()
    assert points["noise, standard deviation"] == [group["noise_std"] for group in groups]
    expected = [256 * group["delta"] / math.sqrt(group["parameters"]) for group in groups]
    assert points["largest possible sum, expected batch"] == pytest.approx(expected)


def test_a_measured_signal_replaces_the_largest_possible_one() -> None:
    groups = [{**group, "signal": 0.5} for group in layer_groups()]
    points = {
        line.get_label(): list(line.get_xdata()) for line in noise_and_signal(healthy(groups=groups)).axes[0].lines
    }
    assert points["released sum, root mean square"] == [0.5] * 6


def test_layers_on_their_bound_are_counted() -> None:
    assert "3 of 5 layers" in texts(weight_norms(healthy()))
    freed = [{**group, "on_boundary": False} for group in layer_groups()]
    assert "0 of 5 layers" in texts(weight_norms(healthy(groups=freed)))


def test_layer_plots_without_layers_say_so() -> None:
    facts = empty()
    assert "no layer has a sensitivity" in texts(sensitivities(facts))
    assert "no noise was added" in texts(noise_and_signal(facts))
    assert "no weight norms" in texts(weight_norms(facts))


def test_a_deep_network_is_cut_and_says_so() -> None:
    groups = [{"name": f"layer{i}", "delta": 1.0 + i, "parameters": 3} for i in range(200)]
    figure = sensitivities(healthy(groups=groups))
    assert len(figure.axes[0].patches) == 60 and "first 60 of 200 layers" in texts(figure)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["$x", "a$b$c", "$\\frac{$", "\\frac{1}{", "€ \x1b[31m\n", "長い名前" * 20])
def test_names_are_never_read_as_formulas(name: str) -> None:
    group: dict[str, Any] = {**layer_groups()[0], "name": name}
    rows = [{"step": s, "epsilon": s / 3, name: s} for s in (1, 2, 3)]
    facts = healthy(groups=[group], history=rows, primary_metric=name, metrics={})
    for figure in all_figures(facts).values():
        figure.savefig(io.BytesIO(), format="svg")


def test_long_names_keep_their_ends() -> None:
    short = shorten("stage1.block0.residual.branch.conv1")
    assert len(short) == 24 and short.startswith("stage1…") and short.endswith("branch.conv1")


def test_colours_are_distinct_and_readable_in_both_schemes() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colours in (COLOURS, DARK_COLOURS):
        values = vars(colours)
        assert len(set(values.values())) == len(values)
        for role, least in (("ink", 7.0), ("muted", 4.5), ("first", 3.0), ("second", 3.0)):
            high, low = sorted((luminance(values[role]), luminance(colours.surface)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, role


def settings() -> dict[str, Any]:
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}


def test_figures_are_freed_and_settings_kept() -> None:
    # reading the entry of the backend would make matplotlib choose one and load pyplot
    before = settings()
    references = [weakref.ref(figure) for figure in all_figures(healthy()).values()]
    gc.collect()
    assert len(references) == 6 and all(reference() is None for reference in references)
    assert settings() == before


def test_pyplot_is_never_loaded() -> None:
    program = (
        "import sys, matplotlib\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings()\n"
        "from report_examples import healthy\n"
        "from lipdp_lightning.report.render_html import render_html\n"
        "render_html(healthy())\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "assert settings() == before\n"
    )
    folder = __file__.rsplit("/", 1)[0]
    result = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def tips(figure: Figure) -> list[list[Any]]:
    svg = figure_to_svg(figure, name="a", alt="A plot.")
    found = re.search(r'data-tips="([^"]*)"', svg)
    return [] if found is None else json.loads(html.unescape(found.group(1)))


def test_the_places_of_named_points_are_those_of_the_drawn_curve() -> None:
    figure = metric_against_epsilon(healthy())
    svg = figure_to_svg(figure, name="a", alt="A plot.")
    drawn = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*fill: var\(--plot-first\)', svg)
    named = [(x, y) for x, y, _ in tips(figure)]
    assert len(named) >= 12
    for x, y in named:
        assert min(math.hypot(x - float(a), y - float(b)) for a, b in drawn) < 0.2


def test_a_named_epsilon_is_not_below_the_one_drawn() -> None:
    facts = healthy(history=[{"step": 1, "epsilon": 1.00011, "val_accuracy": 0.5}] * 3)
    assert {text.split(",")[0] for *_, text in tips(metric_against_epsilon(facts))} == {"epsilon spent 1.001"}
    assert "val_accuracy" not in str(tips(metric_against_epsilon(facts)))
    assert all("validation accuracy 50 %" in text for *_, text in tips(metric_against_epsilon(facts)))


def test_names_of_points_are_text_and_few() -> None:
    hostile = '"><script>\x1b[2J'
    rows = [{"step": s, "epsilon": s / 9000, f"acc {hostile}": 0.1} for s in range(9000)]
    found = tips(metric_against_epsilon(healthy(history=rows, metrics={}, primary_metric=f"acc {hostile}")))
    assert 60 <= len(found) <= 121 and all(text.isprintable() for *_, text in found)
