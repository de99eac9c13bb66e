"""The data sets that ship with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipdp_lightning.data_modules.embedded import (
    Digits,
    EmbeddedBreastCancer,
    EmbeddedDiabetes,
    EmbeddedTable,
    EmbeddedWine,
)

ALL = [Digits, EmbeddedBreastCancer, EmbeddedDiabetes, EmbeddedWine]


@pytest.mark.parametrize("kind", ALL)
def test_set_up_and_declared_norm(kind: type) -> None:
    module = kind()
    module.setup()
    x = module.transform_batch(module._train.x).double()
    assert module.rows + len(module._validation) == module.declared_size
    assert x.flatten(1).norm(dim=1).max() <= module.input_bound
    assert x.shape[1:] == module.input_shape


def test_digits_keep_bytes_and_scale_by_a_sixteenth() -> None:
    module = Digits()
    module.setup()
    assert module._train.x.dtype == torch.uint8  # type: ignore[union-attr]
    transformed = module.transform_batch(module._train.x)  # type: ignore[union-attr]
    assert transformed.min() == 0 and transformed.max() == 1


@pytest.mark.parametrize("kind", [EmbeddedBreastCancer, EmbeddedDiabetes, EmbeddedWine])
def test_a_row_is_encoded_by_itself(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling by ranges found in the data would move the other rows when an extreme row is removed."""
    whole, _ = kind().load_train()
    bunch = kind().load()
    extreme = int(np.argmax(bunch.data[:, 0]))
    bunch.data, bunch.target = np.delete(bunch.data, extreme, 0), np.delete(bunch.target, extreme, 0)
    monkeypatch.setattr(kind, "load", lambda self: bunch)
    fewer, _ = kind().load_train()
    assert torch.equal(fewer, torch.cat([whole[:extreme], whole[extreme + 1 :]]))


def test_encoding_by_the_data_range_fails_that_check() -> None:
    data = EmbeddedWine().load().data[:, 0]
    fitted = (data - data.min()) / (data.max() - data.min())
    fewer = np.delete(data, np.argmax(data))
    refitted = (fewer - fewer.min()) / (fewer.max() - fewer.min())
    assert not np.array_equal(refitted, np.delete(fitted, np.argmax(data)))


def test_diabetes_is_a_regression_within_its_declared_target_range() -> None:
    module = EmbeddedDiabetes(validation_fraction=0.0)
    module.setup()
    raw = module.load().target
    back = (module._train.y.double().numpy() + 1) / 2 * 400  # type: ignore[union-attr]
    assert np.abs(back - raw).max() < 1e-4 and module.num_outputs == 1


def test_other_feature_names_are_refused() -> None:
    class Other(EmbeddedWine):
        ranges = {**EmbeddedWine.ranges, "colour": (0.0, 1.0)}  # noqa: RUF012

    with pytest.raises(ValueError, match=r"names the features.*\nHINT"):
        Other().setup()
    with pytest.raises(NotImplementedError):
        EmbeddedTable().load()
