"""Every configuration has a forecast, and whoever fits one that is not expected to learn is told before."""

from __future__ import annotations

from pathlib import Path

import pytest

from lipdp_lightning.experiment.short_training import prepare
from lipdp_lightning.forecast import NoForecast, forecast
from lipdp_lightning.training.automatic_scaling import settle

CONFIGS = Path(__file__).parents[2] / "configs"
LEARNS, DOES_NOT, NONE = "expected to learn", "not expected to learn", "no forecast"
# what a forecast said when it was recorded; a change that turns one of them is seen here
VERDICTS = {
    "cifar10_scattering_patches_linear": LEARNS,
    "cifar10_scattering_patches_linear_unclipped": LEARNS,
    "digits_calibration": LEARNS,
    "digits_convnet": LEARNS,
    "digits_dpsgd": NONE,
    "digits_dpsgd_mixup": NONE,
    "digits_exact": LEARNS,
    "digits_fix_lip": LEARNS,
    "digits_frozen": LEARNS,
    "digits_gabor_net": LEARNS,
    "digits_joint": LEARNS,
    "digits_layerwise": LEARNS,
    "digits_linear": LEARNS,
    "digits_lip_dp_sgd": LEARNS,
    "digits_mixer": LEARNS,
    "digits_mlp": LEARNS,
    "digits_norm_preserving": LEARNS,
    "digits_norm_preserving_mlp": LEARNS,
    "digits_published_convnet": LEARNS,
    "digits_radius": LEARNS,
    "digits_resnet": LEARNS,
    "digits_scattering": LEARNS,
    "digits_thesis_algorithm8": LEARNS,
    "digits_timm": LEARNS,
    "digits_vgg": LEARNS,
    "digits_wide_resnet": LEARNS,
    "digits_wide_resnet_bounds": DOES_NOT,
    "digits_worst_case_global": LEARNS,
    "digits_worst_case_local": LEARNS,
    "fashion_mnist_conv_eps2": LEARNS,
    "fashion_mnist_conv_eps3": LEARNS,
    "fashion_mnist_outer_products_eps2": LEARNS,
    "fashion_mnist_scattering_linear": LEARNS,
    "fashion_mnist_scattering_linear_unclipped": LEARNS,
    "generated_reviews_transformer": LEARNS,
    "mnist_scattering_linear": LEARNS,
    "mnist_scattering_linear_unclipped": LEARNS,
    "quickstart": LEARNS,
}
# the forecast of a WideResNet takes minutes: three were made, and the signals of the others follow from their noise
WIDE = {f"cifar10_wrn{size}_4_eps{epsilon}": LEARNS for size in (16, 40) for epsilon in (1, 2, 3, 4, 6, 8)}
WIDE["cifar10_wrn40_4_eps1"] = DOES_NOT
TOLD = {"digits_wide_resnet_bounds", "cifar10_wrn40_4_eps1"}  # the first line of each says so


def verdict(name: str) -> str:
    experiment = prepare(CONFIGS / f"{name}.yaml", {"trainer.accelerator": "cpu", "trainer.devices": 1}).experiment
    plan, _ = settle(experiment.plan, experiment.model, experiment.datamodule)
    try:
        found = forecast(experiment.model, plan, experiment.datamodule)
    except NoForecast as error:
        assert "opacus clips" in str(error), "a configuration without a forecast clips by opacus"
        return NONE
    if not found.learns:
        assert "HINT" in found.verdict(), "who is told that it does not learn is told what would"
    return LEARNS if found.learns else DOES_NOT


def test_every_configuration_is_on_record() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == VERDICTS.keys() | WIDE.keys()
    assert {name for name, found in (VERDICTS | WIDE).items() if found == DOES_NOT} == TOLD
    heads = {path.stem: path.read_text().partition("seed_everything")[0] for path in CONFIGS.glob("*.yaml")}
    assert {name for name, head in heads.items() if "NOT EXPECTED TO LEARN" in head} == TOLD
    assert all(heads[name].startswith("# NOT EXPECTED TO LEARN") for name in TOLD)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERDICTS)
def test_the_forecast_is_the_one_on_record(name: str) -> None:
    assert verdict(name) == VERDICTS[name]


# one that learns, one that does not, one without a forecast, and one whose data are not here
@pytest.mark.parametrize(
    "name", ["quickstart", "digits_convnet", "digits_wide_resnet_bounds", "digits_dpsgd", "mnist_scattering_linear"]
)
def test_a_few_of_them_quickly(name: str) -> None:
    assert verdict(name) == VERDICTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10_wrn16_4_eps1", "cifar10_wrn40_4_eps1"])
def test_the_smallest_budget_of_a_wide_network(name: str) -> None:
    assert verdict(name) == WIDE[name]
