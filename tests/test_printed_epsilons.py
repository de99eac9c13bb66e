"""No printed epsilon is smaller than the computed one: who writes one goes through lipdp_lightning/bound_text.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipdp_lightning.accounting.budget_question import BudgetRow, format_table
from lipdp_lightning.bound_text import ShownBound, lower_text, upper_text
from lipdp_lightning.callbacks.progress import PrivateProgressBar
from lipdp_lightning.commands import status
from lipdp_lightning.report.tables import plan_rows
from lipdp_lightning.studies.reproduce.entry import describe_epsilon
from lipdp_lightning.tuning.objectives import OBJECTIVES
from lipdp_lightning.tuning.search_files import _at, _value

ROOT = Path(__file__).parents[1]
PACKAGES = ("lipdp_lightning", "callbacks", "data_modules")
WRITERS = {"upper_text", "lower_text", "format_bound", "ShownBound"}
ROUNDERS = {"round", "format", "format_number", "format_cell", "_number"}
# what an epsilon goes into and does not come out of: a comparison, or a number of another kind
KEEPS = {"max", "min", "float", "ceil", "sum", "fsum", "number", "plain_value", "zip", "round"}
OTHER_KINDS = {"len", "bool", "isfinite", "calibrate_noise", "steps_for", "guess_bound"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_epsilon(node: ast.AST, tainted: set[str]) -> bool:
    """Whether the expression is, or is computed by arithmetic from, something that is called an epsilon."""
    match node:
        case ast.Name(id=name):
            return name in tainted or "epsilon" in name.lower() or name == "eps"
        case ast.Attribute(attr=name):
            return "epsilon" in name.lower()
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return "epsilon" in key.lower()
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.Await(value=value):
            return is_epsilon(value, tainted)
        case ast.BinOp(left=left, right=right):
            if isinstance(node.op, ast.Div):  # a quotient of two is a share, and an inverse falls
                return is_epsilon(left, tainted) and isinstance(right, ast.Constant)
            return is_epsilon(left, tainted) or is_epsilon(right, tainted)
        case ast.UnaryOp(operand=operand):
            return is_epsilon(operand, tainted)
        case ast.IfExp(body=body, orelse=orelse):
            return is_epsilon(body, tainted) or is_epsilon(orelse, tainted)
        case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
            return any(is_epsilon(value, tainted) for value in values)
        case ast.Call(func=func, args=args):
            called = name_of(func)
            if called in WRITERS | OTHER_KINDS:
                return False
            if called == "get" and args and isinstance(args[0], ast.Constant):
                return "epsilon" in str(args[0].value).lower()
            return "epsilon" in called.lower() or (called in KEEPS and any(is_epsilon(arg, tainted) for arg in args))
    return False


def tainted_names(nodes: list[ast.AST]) -> set[str]:
    """Variables of a function that hold an epsilon under another name."""
    pairs: list[tuple[ast.AST, ast.AST]] = []
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs += zip(targets, values, strict=False)
            case ast.Assign(targets=targets, value=value):
                pairs += [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=value) if value is not None:
                pairs.append((target, value))
            case ast.NamedExpr(target=target, value=value):
                pairs.append((target, value))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs.append((target, value))
    found: set[str] = set()
    for _ in range(3):
        found |= {t.id for t, value in pairs if isinstance(t, ast.Name) and is_epsilon(value, found)}
    return found


def rounds_an_epsilon(node: ast.AST, tainted: set[str]) -> bool:
    match node:
        case ast.FormattedValue(value=value, format_spec=ast.JoinedStr() as specification):
            parts = [str(part.value) for part in ast.walk(specification) if isinstance(part, ast.Constant)]
            return re.search(r"[efgEFG%n]", "".join(parts)) is not None and is_epsilon(value, tainted)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format"), args=args, keywords=words
        ):
            specified = re.search(r"\{[^}]*:[^}]*[efgEFG%]\}", text) is not None
            return specified and any(is_epsilon(value, tainted) for value in [*args, *(w.value for w in words)])
        case ast.Call(func=func, args=args) if name_of(func) in ROUNDERS:
            return any(is_epsilon(value, tainted) for value in args)
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
            return is_epsilon(right, tainted)
    return False


def offenders(source: str) -> Iterator[tuple[str, int, str]]:
    """Function, line and text of what rounds an epsilon to the nearest number of some digits."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in [tree, *functions]:
        nodes = list(ast.walk(scope))
        tainted = set() if scope is tree else tainted_names(nodes)
        for node in nodes:
            if rounds_an_epsilon(node, tainted):
                assert isinstance(node, ast.expr)
                yield getattr(scope, "name", "module"), node.lineno, ast.unparse(node)


def test_every_epsilon_that_is_written_is_rounded_up() -> None:
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        source = path.read_text()
        if re.search(r"epsilon|\beps\b", source, re.IGNORECASE) is None:
            continue
        found += [f"{path.relative_to(ROOT)}:{line}: {text}" for _, line, text in offenders(source)]
    hint = "\nHINT: lipdp_lightning.bound_text.upper_text, or lower_text for a lower bound."
    assert not found, "\n".join(dict.fromkeys(found)) + hint


@pytest.mark.parametrize(
    "line",
    [
        'f"epsilon {bound.epsilon:.4g}"', 'f"{epsilon:g}"', "f\"{report['epsilon']:.3f}\"", 'f"{max(0, epsilon):.2f}"',
        "round(plan.epsilon, 3)", '"%.3f" % epsilon', '"{:.3f}".format(row.epsilon)', "format(epsilon_taken, '.3g')",
        "format_number(facts.epsilon)", 'f"{math.ceil(epsilon * 1e3) / 1e3:g}"', 'f"{2 * eps:.3e}"',
    ],
)  # fmt: skip
def test_an_offender_is_found(line: str) -> None:
    assert list(offenders(f"text = {line}"))
    assert list(offenders(f"def show(epsilon):\n    return {line}"))
    renamed = line.replace("bound.epsilon", "value").replace("plan.epsilon", "value").replace("row.epsilon", "value")
    assert list(offenders(f"def show(row):\n    value = row.epsilon\n    return {renamed}"))


def test_what_is_no_epsilon_is_not_found() -> None:
    for line in ('f"{upper_text(epsilon)}"', 'f"{epsilon}"', 'f"{delta:g}"', 'f"{format_bound(facts.epsilon)}"'):
        assert not list(offenders(f"text = {line}"))


# ---- the writers


@given(st.floats(min_value=1e-12, max_value=1e12), st.integers(2, 8))
def test_bounds_are_written_on_their_safe_side(value: float, digits: int) -> None:
    kept = Decimal(f"{value:.15g}")  # behind fifteen digits are the last bits of float arithmetic
    above, below = Decimal(upper_text(value, digits)), Decimal(lower_text(value, digits))
    assert below <= kept <= above
    assert float(above - below) <= 1.0001 * value * 10.0 ** (1 - digits)


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (46.18015, "46.19", "46.18"), (2.9996, "3", "2.999"), (9.99999, "10", "9.999"), (12345.6, "12346", "12345"),
        (3.0000000000000004, "3", "3"), (0.00012345678, "0.0001235", "0.0001234"), (0.0, "0", "0"),
        (float("inf"), "inf", "inf"),
    ],
)  # fmt: skip
def test_how_bounds_are_written(value: float, above: str, below: str) -> None:
    assert (upper_text(value), lower_text(value)) == (above, below)


# a fifth digit of four and of one: to the nearest number of four digits, both are too small
HARD = 2.38241


def row(**changes: object) -> BudgetRow:
    values = {
        "epsilon": HARD, "epsilon_lower": 2.37, "epsilon_upper": HARD, "delta": 3.3513e-4, "noise_multiplier": 1.100004,
        "sample_rate": 0.0042661, "steps": 10, "adjacency": "add_remove", "accountant": "pld",
    }  # fmt: skip
    return BudgetRow(**values | changes)  # type: ignore[arg-type]


def numbers_of(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+\.?\d*(?:e[-+]\d+)?", text)]


def test_the_table_of_budget_rounds_cost_and_noise_up() -> None:
    line = format_table([row()]).splitlines()[1]
    shown, low, high, delta, noise, rate = numbers_of(line)[:6]
    assert shown >= HARD and high >= HARD and low <= 2.37
    assert delta >= 3.3513e-4 and rate >= 0.0042661
    assert noise >= 1.100004  # copied from the table, it must not spend more


def test_other_texts_round_up() -> None:
    assert dict(plan_rows({"epsilon": HARD, "epsilon_lower": HARD}))["epsilon (guarantee)"] == "2.383"
    assert dict(plan_rows({"epsilon": HARD, "epsilon_lower": HARD}))["epsilon, lower end"] == "2.382"
    assert describe_epsilon(HARD) == _value(OBJECTIVES["epsilon"], HARD) == "2.383"
    assert _at(1234.564, 1e-5).startswith("epsilon 1235 ")
    assert status._cell({"epsilon": HARD}, "epsilon") == "2.383"


def test_the_progress_bar_rounds_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar

    monkeypatch.setattr(TQDMProgressBar, "get_metrics", lambda *_: {"epsilon": HARD, "v_num": 1})
    shown = PrivateProgressBar().get_metrics(None, None)["epsilon"]  # type: ignore[arg-type]
    assert float(Tqdm.format_num(shown)) >= HARD and float(f"{shown:.4g}") >= HARD and shown == HARD
    assert float(Tqdm.format_num(HARD)) < HARD
    assert isinstance(shown, ShownBound)
