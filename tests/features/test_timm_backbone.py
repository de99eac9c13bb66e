"""Frozen timm backbones: the same features as timm's own preparation gives, and clear refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from lipdp_lightning.features import TimmFeatures

TINY = "test_resnet"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub's client asks once and not five times when it is told that there is no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A whole classifier's weights, its running statistics away from their initial values."""
    torch.manual_seed(1)
    model = timm.create_model(TINY)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    path = tmp_path_factory.mktemp("weights") / "backbone.pth"
    torch.save(model.state_dict(), path)
    return str(path)


@pytest.mark.parametrize("value_range", [(0.0, 1.0), (-1.0, 3.0)])
def test_features_are_those_of_timm_with_its_own_size_and_constants(
    checkpoint: str, value_range: tuple[float, float]
) -> None:
    low, high = value_range
    extractor = TimmFeatures(TINY, input_shape=(3, 24, 20), input_range=value_range, checkpoint_path=checkpoint)
    reference = timm.create_model(TINY).eval()
    reference.load_state_dict(torch.load(checkpoint, weights_only=True))
    config = timm.data.resolve_model_data_config(reference)
    x = torch.rand(2, 3, 24, 20)
    resized = F.interpolate(
        x, config["input_size"][1:], mode=config["interpolation"], antialias=True, align_corners=False
    )
    mean, deviation = (torch.tensor(config[name]).reshape(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected = reference.forward_head(reference.forward_features((resized - mean) / deviation), pre_logits=True)
    found = extractor(low + (high - low) * x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert extractor.feature_shape == expected.shape[1:] and not found.requires_grad
    torch.testing.assert_close(extractor(low + (high - low) * x[1:]), found[1:], rtol=1e-4, atol=1e-5)


def test_grey_images_are_repeated_on_all_channels() -> None:
    grey = TimmFeatures(TINY, False, (1, 16, 16), image_size=16)
    colour = TimmFeatures(TINY, False, (3, 16, 16), image_size=16)
    colour.backbone.load_state_dict(grey.backbone.state_dict())
    x = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)))


def test_identity_follows_the_weights_and_the_preparation(checkpoint: str) -> None:
    options = {"input_shape": (3, 16, 16), "image_size": 16}
    first = TimmFeatures(TINY, checkpoint_path=checkpoint, **options)
    again = TimmFeatures(TINY, checkpoint_path=checkpoint, **options)
    assert first.identity() == again.identity()
    others = [
        TimmFeatures(TINY, False, **options),
        TimmFeatures(TINY, checkpoint_path=checkpoint, input_shape=(3, 16, 16), image_size=32),
        TimmFeatures(TINY, checkpoint_path=checkpoint, input_range=(0, 2), **options),
    ]
    statistics = TimmFeatures(TINY, checkpoint_path=checkpoint, **options)
    next(m for m in statistics.modules() if isinstance(m, nn.BatchNorm2d)).running_var.mul_(2)
    assert len({e.identity() for e in (first, *others, statistics)}) == 5


def test_training_mode_trained_parameters_and_batch_statistics_are_refused() -> None:
    x = torch.rand(2, 3, 16, 16)
    extractor = TimmFeatures(TINY, False, (3, 16, 16), image_size=16)
    nn.Sequential(extractor).train()  # what a Trainer does to the network around it
    before = {k: v.clone() for k, v in extractor.state_dict().items()}
    extractor(x)
    assert all(torch.equal(v, before[k]) for k, v in extractor.state_dict().items())

    extractor.backbone.train()
    with pytest.raises(ValueError, match=r"training mode .*HINT: call \.eval\(\)"):
        extractor(x)
    extractor.backbone.eval()
    norm = next(m for m in extractor.modules() if isinstance(m, nn.BatchNorm2d))
    norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"trained .*HINT: freeze"):
        extractor(x)
    norm.weight.requires_grad_(False)
    norm.running_mean = norm.running_var = None  # statistics of the batch, also in evaluation mode
    with pytest.raises(ValueError, match="mixes examples"):
        extractor(x)


def test_dropout_inside_a_backbone_is_gone() -> None:
    extractor = TimmFeatures("test_vit", False, (3, 16, 16))
    assert not any(isinstance(m, nn.Dropout) for m in extractor.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "rezznet18"}, r"no model 'rezznet18'.*HINT: did you mean .*resnet18"),
        ({"name": "zzzzzzzz"}, "HINT: timm.list_models"),
        ({"name": "resnet18.nonsense"}, r"HINT: weights of this model: resnet18\.a1_in1k"),
        ({"name": TINY, "pretrained": True}, r"cannot load .*HINT: .*checkpoint_path="),
        ({"name": TINY, "pretrained": False, "input_shape": (5, 16, 16)}, "takes 3 channels.*HINT"),
        ({"name": TINY, "pretrained": False, "input_range": (1, 1)}, "HINT"),
        ({"name": "test_vit", "pretrained": False, "image_size": 50}, r"\(50, 50\).*HINT"),
        ({"name": TINY, "checkpoint_path": "nowhere.pth"}, "is not a file.*HINT"),
    ],
)
def test_what_cannot_be_loaded_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimmFeatures(**options)


def test_a_file_of_another_network_is_refused(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"another network than test_vit.*HINT"):
        TimmFeatures("test_vit", checkpoint_path=checkpoint)
    part = tmp_path / "part.pth"
    state = torch.load(checkpoint, weights_only=True)
    torch.save({k: v for k, v in state.items() if not k.endswith("running_var")}, part)
    with pytest.raises(ValueError, match=r"tensors are missing .*running_var"):
        TimmFeatures(TINY, checkpoint_path=str(part))
    part.write_bytes(b"not a file of weights")
    with pytest.raises(ValueError, match=r"does not load.*HINT"):
        TimmFeatures(TINY, checkpoint_path=str(part))
