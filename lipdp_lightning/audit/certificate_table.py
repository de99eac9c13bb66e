"""Prints a certificate, and the attack on it if there was one, as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ..bounds.certificate import CERTIFIED_SCALINGS, Certificate
from ..report.tables import render_table
from .ratios import AttackReport


def certificate_table(certificate: Certificate, report: AttackReport | None = None) -> str:
    """Returns the sensitivity of every group and the bounds of every node; with a report, the share of each that was
    attained.
    """
    attacked = {g.name: g for g in report.groups} if report else {}
    nodes = {n.name: n for n in report.nodes} if report else {}
    head = ["group", "uses", "numbers", "worst_case", "layerwise"]
    rows = []
    for group in certificate.groups:
        row = [group.name, str(len(group.uses)), str(group.numel), _number(group.worst_case), _number(group.layerwise)]
        if group.name in attacked:
            found = attacked[group.name]
            row += [_share(found.worst_case), _share(found.layerwise)]
        rows.append(row)
    lines = [render_table(head + ["attained", "attained"] * bool(report), rows), ""]
    head = ["node", "operation", "shape", "forward", "cotangent"]
    rows = []
    for node in certificate.nodes:
        shape = "x".join(map(str, node.shape)) or "1"
        row = [node.name, node.operation, shape, _number(node.forward), _number(node.cotangent)]
        if node.name in nodes:
            row += [_share(nodes[node.name].forward), _share(nodes[node.name].cotangent)]
        rows.append(row)
    lines += [render_table(head + ["attained", "attained"] * bool(report), rows), ""]
    lines.append(f"input bound {_number(certificate.input_bound)}, loss gradient {_number(certificate.loss_lipschitz)}")
    if report is not None:
        lines.append(_verdict(report))
    return "\n".join(lines)


def certificate_json(certificate: Certificate, report: AttackReport | None = None) -> str:
    """Returns certificate and attack as strict JSON."""
    return json.dumps(certificate_content(certificate, report), indent=2, allow_nan=False)


def certificate_content(certificate: Certificate, report: AttackReport | None = None) -> dict[str, Any]:
    """Returns plain data for JSON; an infinite bound becomes the text "inf", which no reader takes for a number."""
    bounds = asdict(certificate)
    for group, bound in zip(bounds["groups"], certificate.groups, strict=True):
        group["sensitivity"] = {scaling: bound.sensitivity(scaling) for scaling in CERTIFIED_SCALINGS}
    content = {"certificate": bounds, "attack": None if report is None else report.as_dict()}
    plain: dict[str, Any] = _strict(content)
    return plain


def _verdict(report: AttackReport) -> str:
    false = report.violations()
    if not false:
        return (
            f"attack: no bound exceeded; the tightest is {report.worst.claim}, attained to {_share(report.worst.ratio)}"
        )
    listed = "\n".join(f"  {f.claim}: {f.ratio:.6g} times its bound" for f in false)
    return f"attack: {len(false)} bounds are FALSE\n{listed}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "inf"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
