"""The package: cheap to import, every class found by name, selectable by class_path."""

from __future__ import annotations

import subprocess
import sys

import jsonargparse
import pytest

from lipdp_lightning import data_modules
from lipdp_lightning.experiment.short_names import with_full_words


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    script = "import sys, lipdp_lightning.data_modules; print('torch' in sys.modules, 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", data_modules.__all__)
def test_every_public_name_is_a_documented_class(name: str) -> None:
    kind = getattr(data_modules, name)
    assert isinstance(kind, type) and kind.__name__ == name and kind.__doc__


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Iris'"):
        _ = data_modules.Iris
    assert "Adult" in dir(data_modules)


@pytest.mark.parametrize(
    "arguments",
    [
        "--data=data_modules.Digits --data.validation_fraction=0.1",
        "--data=data_modules.Dropout --data.target=dropout --data.root=somewhere",
        "--data=data_modules.MNIST --data.eval_batch_size=10",
        "--data=data_modules.NpzArrays --data.path=a.npz --data.declared_size=5 --data.input_shape=[3] "
        "--data.task=binary --data.low=0 --data.high=1",
    ],
)
def test_a_class_path_and_its_options_are_understood(arguments: str) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(data_modules.PrivateDataModule, "data")
    words = with_full_words(arguments.split())
    module = parser.instantiate_classes(parser.parse_args(words)).data
    assert isinstance(module, data_modules.PrivateDataModule)
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args([*words, "--data.shuffle=true"])
