"""A temperature after training: fitted on public rows, or chosen on private ones and entered into the ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SECRET, Blobs, BlobsWithValidation, fit, make_module, make_plan
from test_calibration_metrics import NoHeldOut, Numbers, regression_module

from lipdp_lightning.accounting.accountants import Spending
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.calibration import fit_temperature
from lipdp_lightning.callbacks import CalibrationMetrics, ParameterAveraging, PrivacyReport, TemperatureScaling


class Loud(BlobsWithValidation):
    """Many held-out rows, some of them with wrong labels."""

    def load_validation(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self._rows(300, 2)
        return x, torch.where(torch.arange(300) % 3 == 0, (y + torch.arange(300) // 3) % 3, y)


def cold_module() -> Any:
    """Class scores are its outputs times four."""
    return make_module(rate=0.05, loss=CrossEntropy(temperature=0.25))


class Facts(PrivacyReport):
    """A report without a history of epsilon and without pages, which take most of a small run's time."""

    def write(self, trainer: Any, module: Any, metrics: dict[str, float] | None = None, *, final: bool = True) -> None:
        self.facts = self._facts(trainer, module, {})

    def on_validation_end(self, *_: Any) -> None: ...


def run(
    directory: Path, scaling: TemperatureScaling, *others: Any, report: Any = None, data: Any = None, **options: Any
) -> Any:
    report = Facts(directory, publish=False) if report is None else report
    given = {"module": cold_module(), "data": Loud() if data is None else data} | options
    return fit(make_plan(), *others, scaling, report, **given)


def test_a_private_temperature_is_a_line_of_the_ledger_and_its_epsilon_is_added(tmp_path: Path) -> None:
    scaling = TemperatureScaling(epsilon=0.5, fixed_secret=SECRET)
    module, _ = run(tmp_path, scaling, report=PrivacyReport(tmp_path))
    training = Spending(make_plan()).guarantee().epsilon
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["epsilon"] == pytest.approx(training + 0.5, rel=1e-12)
    assert report["epsilon_taken"] == report["epsilon_upper"] == report["epsilon"]
    assert [row["label"] for row in report["ledger"]] == ["gradient", "temperature, on held-out rows"]
    assert report["ledger"][1]["epsilon"] == 0.5 and "permute-and-flip" in report["ledger"][1]["mechanism"]
    notes = " ".join(report["notes"])
    assert "costs epsilon 0.5, which is added to that of training" in notes and "fixed for a test" in notes
    stored = json.loads((tmp_path / "temperature.json").read_text())
    assert stored == scaling.content and stored["release"]["adjacency"] == "add_remove"
    assert module.output_temperature == stored["temperature"] in scaling.temperatures
    markdown = (tmp_path / "privacy_report.md").read_text()
    assert "temperature, on held-out rows" in markdown and "training rows and held-out rows" in markdown


def test_with_much_budget_it_is_the_best_of_the_grid_for_the_weights_that_are_evaluated(tmp_path: Path) -> None:
    averaging, metrics = ParameterAveraging(kind="polyak"), CalibrationMetrics(directory="")
    scaling = TemperatureScaling(epsilon=1e5, largest_loss=1e3)
    module, trainer = run(tmp_path, scaling, averaging, metrics, trainer_options={"limit_val_batches": 1.0})
    x, y = Loud().load_validation()
    with torch.no_grad(), averaging.averaged(module):
        best = fit_temperature(module.eval()(x).double() / 0.25, y)
    assert best < 0.7 and abs(math.log(module.output_temperature / best)) <= math.log(2) / 8
    (after,) = trainer.validate(module, datamodule=Loud(), verbose=False)
    assert after["validation/nll"] < after["validation/nll_without_temperature"]
    assert after["validation/ece"] < after["validation/ece_without_temperature"]
    assert after["validation/loss"] == pytest.approx(after["validation/nll"], abs=1e-5)
    predicted = trainer.predict(module, datamodule=Loud())[0]
    with torch.no_grad(), averaging.averaged(module):
        assert torch.allclose(predicted * module.output_temperature, module(Loud().load_test()[0]), atol=1e-5)


def test_public_rows_cost_nothing(tmp_path: Path) -> None:
    report = Facts(tmp_path, publish=False)
    module, _ = run(tmp_path, TemperatureScaling(public_data=Loud()), report=report, data=BlobsWithValidation())
    x, y = Loud().load_test()
    with torch.no_grad():
        assert module.output_temperature == pytest.approx(
            fit_temperature(module.eval()(x).double() / 0.25, y), rel=1e-4
        )
    facts = report.facts
    assert facts.epsilon == Spending(make_plan()).guarantee().epsilon and len(facts.ledger) == 1
    assert "30 held-out rows of Loud, stated to be public" in " ".join(facts.notes)


def test_an_unfinished_run_has_planned_it_and_released_nothing(tmp_path: Path) -> None:
    report, options = Facts(tmp_path, publish=False), {"max_steps": 6}
    module, _ = run(tmp_path, TemperatureScaling(epsilon=0.5), report=report, trainer_options=options)
    facts, spending = report.facts, Spending(make_plan())
    assert facts.epsilon == spending.guarantee().epsilon + 0.5
    assert facts.epsilon_taken == spending.exactly(6).epsilon and len(facts.ledger) == 1
    assert module.output_temperature == 1.0 and not (tmp_path / "temperature.json").exists()


def test_what_was_released_is_charged_whatever_the_configuration_says_later(tmp_path: Path) -> None:
    """A crash after the release, and a continuation under another setting, or without the callback."""
    writer = Facts(tmp_path, publish=False)
    module, trainer = run(tmp_path, TemperatureScaling(epsilon=0.5), report=writer)
    for others in ([], [TemperatureScaling(epsilon=0.001)]):
        trainer.callbacks = [writer, *others]
        for callback in others:
            callback.on_train_end(trainer, module)
            assert callback.content == json.loads((tmp_path / "temperature.json").read_text())
        writer.write(trainer, module)
        assert writer.facts.epsilon == Spending(make_plan()).guarantee().epsilon + 0.5
    with pytest.raises(ValueError, match="earlier run"):
        run(tmp_path, TemperatureScaling(epsilon=0.5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "public_data or epsilon"), ({"epsilon": 1.0, "public_data": Blobs()}, "not both"),
        ({"epsilon": 0.0}, "0.0"),
        ({"epsilon": 1.0, "temperatures": [0]}, "positive"), ({"epsilon": 1.0, "largest_loss": -1.0}, "largest_loss"),
    ],
)  # fmt: skip
def test_a_temperature_nobody_pays_for_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){says}.*HINT|HINT.*{says}"):
        TemperatureScaling(**options)


def test_what_cannot_be_chosen_or_booked_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no held-out rows"):
        run(tmp_path, TemperatureScaling(epsilon=1.0), data=NoHeldOut(), trainer_options={})
    with pytest.raises(ValueError, match="for classes"):
        run(tmp_path, TemperatureScaling(epsilon=1.0), data=Numbers(), module=regression_module())
    with pytest.raises(ValueError, match=r"without a PrivacyReport.*HINT"):
        fit(make_plan(), TemperatureScaling(epsilon=1.0, directory=tmp_path), data=Loud())
    assert list(tmp_path.iterdir()) == []
