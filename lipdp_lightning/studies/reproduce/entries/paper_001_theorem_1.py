"""Reproduces paper 001, theorem 1: how the bound on the gradient grows with the Lipschitz constant and the depth."""

from __future__ import annotations

import math

from lipdp_lightning.studies.reproduce.entry import Cell, Claim, Entry, Options, Row, Rows
from lipdp_lightning.studies.reproduce.output import Output
from lipdp_lightning.studies.reproduce.summary import number

CONSTANTS, DEPTHS, BIASES, SIZES = (0.5, 0.9, 1.0, 1.1, 1.5), (1, 2, 4, 8, 16, 32, 64), (0.0, 1.0), (1.0, 100.0)


def cells(options: Options) -> list[Cell]:
    depths = DEPTHS[:4] if options.quick else DEPTHS
    return [{"K": k, "D": d, "bias": b, "input": x} for k in CONSTANTS for b in BIASES for x in SIZES for d in depths]


def run(cell: Cell) -> Row:
    from lipdp_lightning.studies.bound_growth import growth, printed

    values = number(cell["K"]), int(number(cell["D"])), number(cell["bias"]), number(cell["input"])
    found = growth(*values)
    return {
        "bound": found.bound,
        "measured": found.measured,
        "printed": printed(*values),
        "certified_epsilon": None,
        "delta": None,
        "adjacency": None,
    }


def _of(rows: Rows, constant: float, bias: float, size: float) -> Rows:
    return [r for r in rows if (r["K"], r["bias"], r["input"]) == (constant, bias, size)]


def _ratio(rows: Rows, constant: float, bias: float, size: float) -> tuple[float, float]:
    """Returns bound over printed growth at the least and the largest depth."""
    found = _of(rows, constant, bias, size)
    return tuple(number(r["bound"]) / number(r["printed"]) for r in (found[0], found[-1]))  # type: ignore[return-value]


def _exponent(rows: Rows, bias: float) -> float:
    """Returns the power of the depth with which the bound grows at K = 1, from the last two depths."""
    one, two = _of(rows, 1.0, bias, 1.0)[-2:]
    return math.log2(number(two["bound"]) / number(one["bound"]))


def finish(rows: Rows, out: Output) -> str:
    from lipdp_lightning.studies.reproduce.drawing import lines

    for bias in BIASES:
        curves = [(f"K = {k:g}", _of(rows, k, bias, 1.0), "D", "bound") for k in CONSTANTS]
        figure = lines(f"Bound on the gradient, biases of norm {bias:g}", "depth D", "bound", curves)
        out.figure(
            figure, f"growth of the bound with depth for several Lipschitz constants, bias {bias:g}", f"bias-{bias:g}"
        )
    tight = [number(r["measured"]) / number(r["bound"]) for r in rows if r["bias"] == 0]
    product = [_ratio(rows, 1.0, 0.0, size) for size in SIZES]
    root = _ratio(rows, 1.5, 0.0, 1.0)
    return (
        f"At K = 1 the bound grows with the depth to the power {_exponent(rows, 0.0):.2f} without biases and "
        f"{_exponent(rows, 1.0):.2f} with them, as the theorem says for one input norm. Without biases a worst "
        f"input reaches "
        f"{100 * min(tight):.1f} to {100 * max(tight):.1f} % of the bound: it is the network's gradient that "
        f"grows, and not only "
        f"its bound. Over what the theorem prints, the bound is {product[0][0]:.3g} at the least and "
        f"{product[0][1]:.3g} at the "
        f"largest depth for inputs of norm {SIZES[0]:g}, and {product[1][0]:.3g} and {product[1][1]:.3g} for norm "
        f"{SIZES[1]:g}: "
        "the terms X and sqrt(D) multiply and do not add. At K = 1.5 that ratio goes from "
        f"{root[0]:.3g} to {root[1]:.3g}, by the root of the depth, which the theorem leaves out."
    )


ENTRY = Entry(
    name="paper-001-theorem-1",
    title="Growth of the bound in K and D",
    source="001 theorem 1",
    expected_time="10 s",
    cells=cells,
    run=run,
    finish=finish,
    claims=(
        Claim("power of D at K = 1, without biases", "0.5", lambda rows: f"{_exponent(rows, 0.0):.2f}"),
        Claim("power of D at K = 1, with biases", "1.5", lambda rows: f"{_exponent(rows, 1.0):.2f}"),
    ),
)
