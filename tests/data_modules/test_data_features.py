"""Features of another data module's rows: cached, never mixed up, and centred by a released mean only."""

from __future__ import annotations

import json
import stat
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.data_modules import Digits, Features
from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.poisson import loader
from lipdp_lightning.data_modules.splits import hashed_split
from lipdp_lightning.features import FeatureExtractor, Scattering
from lipdp_lightning.privacy.statistics import bounded_sum


class Lifted(FeatureExtractor):
    """abs(x W) for a fixed random W; counts the rows it has seen."""

    def __init__(self, input_shape: tuple[int, ...] = (5,), outputs: int = 7, seed: int = 0) -> None:
        super().__init__(input_shape)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("matrix", torch.randn(*input_shape, outputs, generator=generator))
        self.seen = 0
        self.freeze()

    def extract(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return (x @ self.matrix.to(x.dtype)).abs()

    def settings(self) -> dict[str, Any]:
        return {}


class Mixing(Lifted):
    """Subtracts the batch's mean: one row changes the features of all."""

    def extract(self, x: Tensor) -> Tensor:
        return super().extract(x - x.mean(0))


class Normalising(Lifted):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def extract(self, x: Tensor) -> Tensor:
        return super().extract(x)


class Points(PrivateDataModule):
    """Bytes, of which 80 rows are for training and 20 for testing."""

    input_shape = (5,)
    task = "classification"
    num_classes = 2
    declared_size = 80
    scale = 1 / 255

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.seed = seed

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (count, 5), generator=generator).to(torch.uint8), torch.arange(count) % 2

    def load_train(self) -> tuple[Tensor, Tensor]:
        return self._rows(80, self.seed)

    def load_test(self) -> tuple[Tensor, Tensor]:
        return self._rows(20, 1000)


def features(folder: Path, extractor: Any = None, data: Any = None, **options: Any) -> Features:
    return Features(data or Points(), extractor or Lifted(), cache_dir=str(folder), **options)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def rows_of(module: Features) -> Tensor:
    return module._ready().x


def test_rows_are_unit_features_in_the_order_of_the_data(tmp_path: Path) -> None:
    module = features(tmp_path)
    x, y = Points().load_train()
    torch.testing.assert_close(rows_of(module), unit(Lifted()(x.float() / 255)))
    assert torch.equal(module._ready().y, y)
    assert module.dataset_size == 80 and module.input_shape == (7,) and module.input_bound == 1.0
    ((test_x, test_y, _),) = list(module.test_dataloader())
    torch.testing.assert_close(test_x, unit(Lifted()(Points().load_test()[0].float() / 255)))
    assert len(test_y) == 20 and module.num_classes == 2


def test_blocks_are_joined_by_their_weights(tmp_path: Path) -> None:
    blocks = [Lifted(), Lifted(outputs=3, seed=1)]
    module = features(tmp_path, blocks, weights=[3.0, 1.0])
    first, second = rows_of(module).split([7, 3], dim=1)
    for part, share in ((first, 0.75), (second, 0.25)):
        torch.testing.assert_close(part.norm(dim=1).square(), torch.full((80,), share))
    assert module.input_shape == (10,)


def test_images_keep_their_shape(tmp_path: Path) -> None:
    module = Features(Digits(), Scattering((1, 8, 8), J=2), cache_dir=str(tmp_path))
    assert module.input_shape == (81, 2, 2) and rows_of(module).shape[1:] == (81, 2, 2)


def test_held_out_rows_are_chosen_by_the_content_of_the_raw_rows(tmp_path: Path) -> None:
    module = features(tmp_path, data=Points(validation_fraction=0.25))
    x, _ = Points().load_train()
    side = hashed_split(x, 0.25)
    torch.testing.assert_close(rows_of(module), unit(Lifted()(x[~side].float() / 255)))
    ((held_out, _, _),) = list(module.val_dataloader())
    torch.testing.assert_close(held_out, unit(Lifted()(x[side].float() / 255)))
    assert module.dataset_size == 60


# ---- the cache


def test_features_are_computed_once(tmp_path: Path) -> None:
    first, second = Lifted(), Lifted()
    one = rows_of(features(tmp_path, first))
    probes = second.seen
    again = features(tmp_path, second)
    assert torch.equal(rows_of(again), one) and first.seen > 100
    assert second.seen - probes < 20  # whether it mixes rows is tried on a few of noise
    assert again.fingerprint() == features(tmp_path).fingerprint()


def test_the_cache_is_its_owners_alone(tmp_path: Path) -> None:
    rows_of(features(tmp_path / "cache"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("change", ["another seed", "another class", "other rows", "another scale"])
def test_what_belongs_to_something_else_is_not_found(tmp_path: Path, change: str) -> None:
    rows_of(features(tmp_path))
    files = len(list(tmp_path.glob("*.npy")))
    made: dict[str, tuple[FeatureExtractor, PrivateDataModule]] = {
        "another seed": (Lifted(seed=5), Points()),
        "another class": (type("Other", (Lifted,), {})(), Points()),
        "other rows": (Lifted(), Points(seed=1)),
        "another scale": (Lifted(), type("Scaled", (Points,), {"scale": 2 / 255})()),
    }
    extractor, data = made[change]
    module = features(tmp_path, extractor, data)
    expected = unit(extractor(data.transform_batch(data.load_train()[0])))
    torch.testing.assert_close(rows_of(module), expected)
    assert len(list(tmp_path.glob("*.npy"))) > files


def one_of(folder: Path, suffix: str) -> Path:
    return max(folder.glob(f"*.{suffix}"), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    data = one_of(folder, "npy")
    data.write_bytes(data.read_bytes()[:-40])


def flip_a_bit(folder: Path) -> None:
    data = one_of(folder, "npy")
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(bytes(content))


def remove(folder: Path) -> None:
    one_of(folder, "npy").unlink()


def swap(folder: Path) -> None:
    """The files of another extractor, under the names of this one."""
    other = folder / "other"
    rows_of(features(other, Lifted(seed=9)))
    names = sorted(path.stem for path in folder.glob("*.npy"))
    for name, source in zip(names, sorted(path.stem for path in other.glob("*.npy")), strict=True):
        for suffix in ("npy", "json"):
            (other / f"{source}.{suffix}").rename(folder / f"{name}.{suffix}")


def other_rows(folder: Path) -> None:
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"source": "0" * 64}))


def half_a_description(folder: Path) -> None:
    path = one_of(folder, "json")
    path.write_text(path.read_text()[:50])


def another_array(folder: Path) -> None:
    np.save(one_of(folder, "npy"), np.zeros((80, 7)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "truncated|changed"), (flip_a_bit, "changed"), (remove, "missing"), (swap, "another extractor"),
        (other_rows, "other rows"), (half_a_description, "another extractor"), (another_array, "float64"),
    ],
)  # fmt: skip
def test_a_cache_that_does_not_hold_what_it_should_is_refused(tmp_path: Path, damage: Any, words: str) -> None:
    rows_of(features(tmp_path))
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"(?s)({words}).*HINT: delete"):
        rows_of(features(tmp_path))


def test_code_that_has_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class, settings and weights are the same, and the features are not."""
    rows_of(features(tmp_path))
    before = Lifted.extract
    monkeypatch.setattr(Lifted, "extract", lambda self, x: before(self, x).sqrt())
    with pytest.raises(ValueError, match=r"other features than when it was written.*HINT: delete"):
        rows_of(features(tmp_path))


def test_an_interrupted_computation_leaves_nothing_to_trust(tmp_path: Path) -> None:
    class Failing(Lifted):
        def extract(self, x: Tensor) -> Tensor:
            if self.seen > 40:
                raise KeyboardInterrupt
            return super().extract(x)

    with pytest.raises(KeyboardInterrupt):
        rows_of(features(tmp_path, Failing(), batch_size=10))
    assert not list(tmp_path.glob("*.npy")) and not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*.part"))


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"feature cache.*HINT"):
        rows_of(features(tmp_path / "file" / "cache"))


# ---- extractors that are refused


def test_an_extractor_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would change the features of all\nHINT"):
        rows_of(features(tmp_path, Mixing()))


def test_a_backbone_in_training_mode_or_with_trained_parameters_is_refused(tmp_path: Path) -> None:
    backbone = Normalising()
    with pytest.raises(ValueError, match=r"are trained(?s:.)*training mode"):
        rows_of(features(tmp_path, backbone))
    backbone.requires_grad_(False)
    with pytest.raises(ValueError, match=r"training mode.*HINT"):
        rows_of(features(tmp_path, backbone))
    backbone.norm.eval()
    assert rows_of(features(tmp_path, backbone)).shape == (80, 7)


def test_impossible_options_are_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        features(tmp_path, [Lifted((4,)), Lifted()], private_mean=[10.0], weights=[1.0, -1.0], batch_size=0)
    for words in ("takes rows of shape (4,)", "1 noise multipliers for 2", "weights [1.0, -1.0]", "batch_size 0"):
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="needs noise"):
        features(tmp_path, private_mean=0.0)
    with pytest.raises(ValueError, match="releases statistics of its own"):
        features(tmp_path, data=features(tmp_path, Lifted(), private_mean=1.0), extractor=Lifted((7,)))


# ---- private means


def test_rows_wait_for_the_released_means(tmp_path: Path) -> None:
    module = features(tmp_path, [Lifted(), Lifted(outputs=3, seed=1)], private_mean=[10.0, 4.0])
    labels = ("mean of Lifted features 1", "mean of Lifted features 2")
    assert module.preliminary == tuple(zip(labels, (10.0, 4.0), strict=True))
    for attempt in (module.val_dataloader, module.test_dataloader, module.fingerprint):
        with pytest.raises(ValueError, match="have not been released"):
            attempt()
    means = {labels[0]: torch.full((7,), 0.3, dtype=torch.float64), labels[1]: torch.zeros(3, dtype=torch.float64)}
    module.use_statistics(means)
    x = Points().load_train()[0].float() / 255
    expected = unit(unit(Lifted()(x)) - 0.3) / 2**0.5
    torch.testing.assert_close(rows_of(module)[:, :7], expected)
    one = module.fingerprint()
    module.use_statistics({**means, labels[0]: torch.full((7,), 0.2, dtype=torch.float64)})
    assert module.fingerprint() != one  # other rows for the noise key
    with pytest.raises(ValueError, match="not those of its extractors"):
        module.use_statistics({labels[0]: means[labels[0]]})


def test_rows_with_other_means_are_gone_before_new_ones_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings on one data module hold one set of rows, although the first trainer still has its loaders."""
    module = features(tmp_path, private_mean=10.0)
    label = module.labels[0]
    module.use_statistics({label: torch.zeros(7, dtype=torch.float64)})
    rows = weakref.ref(module._ready())
    trainer: dict[str, Any] = {"loader": loader(module._ready(), [])}
    trainer["module"] = {"trainer": trainer}
    del trainer
    alive, join = [], Features._joined

    def joined(self: Features, blocks: Any) -> Tensor:
        alive.append(rows() is not None)
        return join(self, blocks)

    monkeypatch.setattr(Features, "_joined", joined)
    module.use_statistics({label: torch.ones(7, dtype=torch.float64)})
    assert alive == [False, False]  # for the training rows and the test rows


def test_the_terms_of_a_mean_are_the_training_rows_alone(tmp_path: Path) -> None:
    data = Points(validation_fraction=0.25)
    module = features(tmp_path, data=data, private_mean=10.0)
    terms = module.statistic_terms("mean of Lifted features 1")
    x = Points().load_train()[0]
    kept = x[~hashed_split(x, 0.25)].float() / 255
    torch.testing.assert_close(bounded_sum(terms).float(), unit(Lifted()(kept)).sum(0), rtol=1e-4, atol=1e-4)
    assert terms.dimension == 7


def test_a_record_moves_the_sum_behind_the_mean_by_at_most_one(tmp_path: Path) -> None:
    """The whole path, from raw rows to the sum: without one record, or with another value of it."""

    class Without(Points):
        def load_train(self) -> tuple[Tensor, Tensor]:
            x, y = super().load_train()
            return x[1:], y[1:]

    sums = [
        bounded_sum(features(tmp_path, data=data, private_mean=10.0).statistic_terms("mean of Lifted features 1"))
        for data in (Points(), Without())
    ]
    assert 0.99 < float((sums[0] - sums[1]).norm()) <= 1.0


def test_groups_that_are_drawn_as_one_row_have_no_private_mean(tmp_path: Path) -> None:
    class Grouped(Points):
        @property
        def samples_groups(self) -> bool:
            return True

    with pytest.raises(ValueError, match="sums all rows of a group"):
        features(tmp_path, data=Grouped(), private_mean=10.0)


def test_what_is_declared_and_what_is_estimated_is_described(tmp_path: Path) -> None:
    text = features(tmp_path, private_mean=10.0).describe()
    assert "mean of Lifted features 1: estimated with noise" in text and "features of Points" in text
    assert "nothing was estimated" in features(tmp_path).describe()
