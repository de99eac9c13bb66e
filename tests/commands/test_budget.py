"""`lipdp budget` from its arguments to its output."""

import json

import pytest

from lipdp_lightning.cli import main
from lipdp_lightning.commands.budget_question import compute_budget

REFERENCE = "--dataset-size 60000 --batch-size 256 --steps 14062 --delta 1e-5"
SMALL = "--dataset-size 1000 --batch-size 100 --epochs 5 --delta 1e-5 --accountant rdp"
KEYS = [
    "epsilon",
    "epsilon_lower",
    "epsilon_upper",
    "delta",
    "noise_multiplier",
    "sample_rate",
    "steps",
    "adjacency",
    "accountant",
]


def budget(arguments):
    return main(["budget", *arguments.split()])


def answer(capsys, arguments):
    assert budget(f"{arguments} --json") == 0
    return json.loads(capsys.readouterr().out)


def test_reference_case_by_default_is_pld_and_add_remove(capsys):
    row = answer(capsys, f"{REFERENCE} --noise-multiplier 1.1")
    assert list(row) == KEYS
    assert row["epsilon"] == row["epsilon_upper"] == pytest.approx(2.382, abs=1e-3)
    assert (row["accountant"], row["adjacency"], row["steps"]) == ("pld", "add_remove", 14062)


def test_reference_case_by_prv(capsys):
    row = answer(capsys, f"{REFERENCE} --noise-multiplier 1.1 --accountant prv")
    assert row["epsilon"] == row["epsilon_upper"] == pytest.approx(2.392, abs=1e-3)
    assert row["epsilon_lower"] == pytest.approx(2.372, abs=1e-3)
    assert (row["accountant"], row["adjacency"], row["steps"]) == ("prv", "add_remove", 14062)
    assert row["sample_rate"] == 256 / 60000


@pytest.mark.parametrize(
    ("options", "epsilon"),
    [
        ("--accountant pld", 2.382),
        ("--accountant rdp", 2.597),
        ("--accountant pld --adjacency replace_one", 4.222),
        ("--accountant rdp --adjacency replace_one", 4.222),
    ],
)
def test_reference_case_elsewhere(capsys, options, epsilon):
    row = answer(capsys, f"{REFERENCE} --noise-multiplier 1.1 {options}")
    assert row["epsilon"] == pytest.approx(epsilon, abs=1e-3)


def test_several_values_make_a_list_in_order(capsys):
    rows = answer(capsys, f"{SMALL} --noise-multiplier 0.7 1 3")
    assert [row["noise_multiplier"] for row in rows] == [0.7, 1.0, 3.0]
    epsilons = [row["epsilon"] for row in rows]
    assert epsilons == sorted(epsilons, reverse=True) and epsilons[0] > epsilons[-1]
    assert all(row["steps"] == 50 for row in rows)


def test_calibrated_noise_spends_the_budget(capsys):
    rows = answer(capsys, f"{SMALL} --epsilon 1 3 8")
    for target, row in zip((1, 3, 8), rows, strict=True):
        assert 0.99 * target < row["epsilon"] <= target
        again = answer(capsys, f"{SMALL} --noise-multiplier {row['noise_multiplier']!r}")
        assert again == row
    assert rows[0]["noise_multiplier"] > rows[1]["noise_multiplier"] > rows[2]["noise_multiplier"]


def test_epochs_become_steps_rounded_up(capsys):
    row = answer(
        capsys, "--dataset-size 1000 --batch-size 30 --epochs 1 --delta 1e-5 --noise-multiplier 1 --accountant rdp"
    )
    assert row["steps"] == 34


def test_table_says_relation_and_accountant(capsys):
    assert budget(f"{SMALL} --epsilon 1 3 --adjacency replace_one") == 0
    out = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in out[:3]}) == 1  # aligned
    text = "\n".join(out)
    assert "replace one: neighbours differ by the content" in text
    assert "pld: privacy loss distributions" in text and "Poisson" in text
    assert "whichever accountant is named" in text
    assert "add/remove" not in text
    assert budget(f"{SMALL} --epsilon 1 3") == 0
    text = capsys.readouterr().out
    assert "rdp: Renyi DP" in text and "whichever" not in text


def test_fallback_is_told_on_stderr_and_in_the_json(capsys):
    assert (
        budget(
            "--dataset-size 100000 --batch-size 100 --steps 1000000 --delta 1e-6 --noise-multiplier 1 --json "
            "--accountant prv"
        )
        == 0
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out)["accountant"] == "pld"
    assert "warning: prv failed" in captured.err and "grid" in captured.err


def test_delta_of_one_over_n_is_warned_about(capsys):
    assert budget(f"{SMALL} --noise-multiplier 1".replace("1e-5", "1e-3")) == 0
    assert "permits publishing one record" in capsys.readouterr().err
    assert budget(f"{SMALL} --noise-multiplier 1") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (f"{SMALL}", "epsilon and noise multiplier"),
        (f"{SMALL} --noise-multiplier -1", "noise multiplier -1.0"),
        (f"{SMALL} --epsilon 0", "epsilon 0.0"),
        (f"{SMALL} --epsilon nan", "epsilon nan"),
        (f"{SMALL} --epsilon 1 --adjacency swap", "adjacency 'swap'"),
        (f"{SMALL} --epsilon 1".replace("rdp", "moments"), "accountant 'moments'"),
        (f"{SMALL} --epsilon 1".replace("--epochs 5", ""), "epochs and steps"),
        (f"{SMALL} --epsilon 1".replace("--epochs 5", "--steps 0"), "0 steps"),
        (f"{SMALL} --epsilon 1".replace("--epochs 5", "--epochs inf"), "inf epochs"),
        (f"{SMALL} --epsilon 1".replace("size 100 ", "size 2000 "), "exceeds the dataset size"),
        (f"{SMALL} --epsilon 1".replace("size 1000 ", "size 0 "), "dataset size 0"),
        (f"{SMALL} --epsilon 1".replace("1e-5", "1"), "delta 1.0"),
        (f"{SMALL} --epsilon 1e-12", "out of reach"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_hint(capsys, arguments, word):
    assert budget(arguments) == 2
    captured = capsys.readouterr()
    assert word in captured.err and "HINT:" in captured.err and captured.out == ""


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError) as caught:
        compute_budget(0, -1, 2.0, accountant="x", adjacency="y")
    assert str(caught.value).count("HINT:") == 7


@pytest.mark.parametrize(
    "arguments", [f"{SMALL} --epsilon x", f"{SMALL} --epsilon 1 --noise-multiplier 1", "--delta 1e-5"]
)
def test_what_argparse_refuses_is_exit_code_2(capsys, arguments):
    assert budget(arguments) == 2
    assert "HINT" in capsys.readouterr().err


def test_statistics_before_the_first_step_are_paid_for(capsys):
    """At full batches exactly: one Gaussian mechanism whose inverse squares add up."""
    full = "--dataset-size 1000 --batch-size 1000 --steps 30 --delta 1e-5 --accountant pld"
    spent = answer(capsys, f"{full} --noise-multiplier 20 --statistics 10 5")["epsilon"]
    joined = (30 / 20**2 + 1 / 10**2 + 1 / 5**2) ** -0.5
    alone = answer(capsys, f"{full.replace('--steps 30', '--steps 1')} --noise-multiplier {joined}")["epsilon"]
    assert spent == pytest.approx(alone, rel=1e-4)
    needed = answer(capsys, f"{full} --epsilon {spent} --statistics 10 5")
    assert needed["noise_multiplier"] == pytest.approx(20, rel=2e-3) and needed["epsilon"] <= spent
    assert budget(f"{full} --epsilon 1 --statistics 0") == 2
    assert "statistic's noise 0.0" in capsys.readouterr().err
