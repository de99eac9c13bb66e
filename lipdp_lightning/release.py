"""Reads the file that `lipdp export` writes: weights and facts as plain values, and the model on request."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bound_text import upper_text
from .files import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from .training.module import PrivateModule

FORMAT = 1
_KINDS: dict[str, type | tuple[type, ...]] = {
    "state_dict": dict, "weights": str, "temperature": (int, float), "statistics": dict, "plan": dict,
    "certificate": list, "privacy_report": dict, "config": str,
}  # fmt: skip


@dataclass(frozen=True)
class Release:
    """The published part of a run: its weights, what they are an average of, and what is known of their privacy.

    ``config`` is the text of the run's configuration, ``privacy_report`` the content of its JSON report, and
    ``statistics`` are those with which the inputs were prepared in training. Class scores are divided by
    ``temperature``.
    """

    state_dict: Mapping[str, Tensor]
    weights: str
    temperature: float
    statistics: Mapping[str, Any]
    plan: Mapping[str, Any]
    certificate: list[Any]
    privacy_report: Mapping[str, Any]
    config: str
    path: Path

    @property
    def epsilon(self) -> float | None:
        """The guarantee of the run, or None if it has none."""
        found = self.privacy_report.get("epsilon")
        return None if found is None else float(found)

    def __repr__(self) -> str:
        return f"<Release {self.path}: {described(self.state_dict, self.weights, self.privacy_report)}>"

    def module(self, *, trust_config: bool = False) -> PrivateModule:
        """Returns the model in evaluation mode, made of the group ``model`` of the stored configuration.

        It bounds its inputs as in training, and its :meth:`predict_step` divides class scores by the temperature.

        Args:
            trust_config: Whether to create what the configuration names even if that is code outside this package and
                torch. Who wrote the file chooses that code.

        Raises:
            ValueError: If the configuration names foreign code, or does not fit the weights.
        """
        from .experiment.foreign_code import known_code_only
        from .experiment.stored_model import stored_model

        with known_code_only(self.config, self.path, trusted=trust_config):
            module = stored_model(self.config, self.path)
        own = {name: tuple(value.shape) for name, value in module.network.state_dict().items()}
        here = {name: tuple(value.shape) for name, value in self.state_dict.items()}
        if own != here:
            names = sorted(name for name in {*own, *here} if own.get(name) != here.get(name))
            raise ValueError(
                f"{self.path} holds weights of another network than its configuration describes: {len(names)} tensors "
                f"differ, such as {names[0]}. HINT: export the run again, with the version that trained it."
            )
        module.network.load_state_dict(dict(self.state_dict))
        module.output_temperature = float(self.temperature)
        return module.eval()

    def data(self, options: Sequence[str] = (), *, trust_config: bool = False) -> Any:
        """Returns the data module of the stored configuration; no row is read yet.

        Args:
            options: Options that override keys of the configuration, as on a command line.
            trust_config: As in :meth:`module`.
        """
        from .experiment.experiment import parse_experiment
        from .experiment.foreign_code import known_code_only, refuse_projects

        refuse_projects(self.config, self.path)
        with known_code_only(self.config, self.path, trusted=trust_config):
            data = parse_experiment(["--config", self.config, *options], None, "off").datamodule
        if self.statistics:
            data.use_statistics(dict(self.statistics))
        return data

    def predict(self, table: Any, *, trust_config: bool = False) -> dict[str, Any]:
        """Returns predictions for new rows as columns by name, like a file of `lipdp predict --table`.

        Args:
            table: The path of a CSV or Parquet file, or a DataFrame, with the columns of the schema that the model was
                trained on. No label is needed, or read.
            trust_config: As in :meth:`module`.
        """
        from .experiment.predicted_rows import predicted_table

        return predicted_table(self.module(trust_config=trust_config), self.data(trust_config=trust_config), table)


def described(tensors: Mapping[str, Any], weights: str, report: Mapping[str, Any]) -> str:
    """Returns a line about a release: how many tensors, what they are an average of, and the guarantee."""
    from .training.averaging import LAST_WEIGHTS

    epsilon, delta = report.get("epsilon"), upper_text(report.get("delta", float("nan")))
    guarantee = "no epsilon is guaranteed" if epsilon is None else f"epsilon {upper_text(epsilon)} at delta {delta}"
    return f"{len(tensors)} tensors,{'' if weights == LAST_WEIGHTS else f' {weights},'} {guarantee}"


def load_release(path: str | Path) -> Release:
    """Returns the content of a file of `lipdp export`; only plain values are read, and no code of the file runs.

    Example::

        release = lipdp_lightning.load_release("model.pt")
        model = release.module()
        model(torch.zeros(1, 1, 8, 8))
        release.predict("new.csv")  # of a model for tables

    Raises:
        ValueError: If it is another file, or holds anything but plain values.
    """
    import torch

    from .training.checkpoint_files import parsed_archive

    hint = "HINT: name a file that `lipdp export` has written."
    try:
        content = parsed_archive(io.BytesIO(read_bytes(Path(path))))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path} cannot be read: {reason}. {hint}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or type(content.get("format")) is not int:
        raise ValueError(f"{path} is not a release of a model, or one of another version. {hint}")
    wrong = [name for name, kind in _KINDS.items() if not isinstance(content.get(name), kind)]
    tensors = content.get("state_dict")
    if isinstance(tensors, dict) and not all(
        type(k) is str and isinstance(v, torch.Tensor) for k, v in tensors.items()
    ):
        wrong.append("state_dict")
    if not wrong and not (
        isinstance(content["temperature"], int | float) and 0 < content["temperature"] < float("inf")
    ):
        wrong.append("temperature")
    if wrong:
        raise ValueError(
            f"{path} is not a release of a model: {', '.join(wrong)} is missing or of another type. {hint}"
        )
    return Release(**{name: content[name] for name in _KINDS}, path=Path(path))
