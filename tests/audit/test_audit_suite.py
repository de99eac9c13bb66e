"""The suite as a whole: correct configurations raise no alarm, seed after seed; thesis Algorithm 8 is caught."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from gallery import mlp, plan_of
from test_audit_canaries import Rows

from lipdp_lightning.audit.audit_page import audit_json, render_audit, terminal_text
from lipdp_lightning.audit.findings import Curve, Finding, PlotData
from lipdp_lightning.audit.suite import AuditReport, Effort, Questions, run_audit
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.training import PrivateModule

SMALL = Effort("small", restarts=2, attack_steps=3, climbs=2, trials=60, input_trials=30)
OPTIONS = {
    "joint": {"scaling": "joint", "allocation": "optimal"},
    "layerwise": {"scaling": "layerwise"},
    "worst_case": {"scaling": "worst_case", "allocation": "global", "loss_clip": 0.2},
    "radius": {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 5.0},
    "dpsgd": {"scaling": "clip_flat", "clipping": "local", "clip_norm": 0.5, "allocation": "global"},
    "switch": {"scaling": "joint", "switch_to": "layerwise", "switch_at": 0.5},
    "statistics": {"scaling": "joint", "preliminary": (("mean", 10.0),)},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def audited(options: dict[str, object], seed: int = 0, effort: Effort = SMALL) -> AuditReport:
    plan = plan_of(**{"expected_batch_size": 100, "steps": 12} | options)
    return run_audit(PrivateModule(mlp()), plan, Rows(), effort=effort, seed=seed, title="small")


@pytest.mark.slow
def test_twenty_seeds_of_correct_runs_raise_no_alarm() -> None:
    """At 99.9 % for each suite; one false alarm in twenty suites has probability 2 %."""
    for seed in range(20):
        name = list(OPTIONS)[seed % len(OPTIONS)]
        report = audited(OPTIONS[name], seed)
        assert not report.violations, (name, seed, [f.statement for f in report.violations])


def test_algorithm_8_is_caught_with_the_measured_factors() -> None:
    plan = plan_of(expected_batch_size=100, steps=12, scaling="batch_max", allow_noncertified=True)
    questions = Questions(PrivateModule(mlp()), plan, Rows(), SMALL, 0, Mechanism)
    asked = questions.exact() | questions.statistical()
    found = {name: asked[name](1e-4) for name in ("neighbours", "scaling", "composition", "depth")}
    questions.close()
    assert all(f.violated for f in found.values())
    assert found["neighbours"].factor > 2
    # two layers, and up to eight, each with the noise of one
    assert found["composition"].factor == pytest.approx(math.sqrt(2), rel=0.05)
    assert found["depth"].factor == pytest.approx(math.sqrt(8), rel=0.1)


def test_the_page_loads_nothing_and_says_what_was_found() -> None:
    plots = (PlotData("Title", "x", "y", (Curve("<script>", [1, 2], [1, math.inf], "points"),)),)
    findings = (
        Finding("one", "Is <b> escaped?", "pass", "It is.", factor=0.5, plots=plots),
        Finding("two", "Is it caught?", "violation", "By a factor.", factor=2.5, p_value=1e-9, alpha=1e-4),
    )
    report = AuditReport("a & b", "quick", 0.999, plan_of(), 2.00004, findings, 1.0, 0)
    page = render_audit(report)
    assert "VIOLATION" in page and "a &amp; b" in page and "&lt;b&gt;" in page and page.count("<script") == 1
    assert not re.search(r'(src|href)="(?!#)', page) and "@import" not in page
    assert "2.001" in page  # an epsilon is rounded up
    content = json.loads(audit_json(report))
    assert content["violations"] == ["two"] and content["verdict"] == "violation"
    assert content["findings"][0]["plots"][0]["curves"][0]["y"] == [1, "inf"]
    assert "1 of 2 checks are violated: two; the largest measured factor is 2.5 (two)" in terminal_text(report)
    passed = AuditReport("fine", "quick", 0.999, plan_of(), 2.0, findings[:1], 1.0, 0)
    assert "VIOLATION" not in render_audit(passed) and "No violation" in terminal_text(passed)


def test_what_claims_nothing_is_not_audited() -> None:
    with pytest.raises(ValueError, match="nothing to audit"):
        audited({"noise_multiplier": 0.0, "allow_noncertified": True})
    with pytest.raises(ValueError, match="confidence"):
        run_audit(PrivateModule(mlp()), plan_of(), Rows(), confidence=1.0)
