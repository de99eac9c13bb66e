"""Puts a project on Lightning under privacy, in three lines of its script."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch.utils.data import TensorDataset

from ..accounting.accountants import Spending
from ..bounds.graph import CertificationError
from ..bounds.losses import as_loss
from ..data_modules.base import PrivateDataModule
from ..layers import make_private
from ..privacy.plan import PrivacyPlan
from ..training.automatic_scaling import settle
from ..training.set_up import refuse
from ..training.settings import PrivacySettings
from .adopted_module import AdoptedModule, adopted, project_problems
from .compiled_parts import Uncompiled
from .faithful_copy import Understood, understand, validation_names
from .given_rows import LARGEST_ENTRY, AdoptedRows, GivenRows, classes_of
from .private_trainer import Ledger, PrivateTrainer
from .recorded_step import tensors_of


@dataclass(frozen=True)
class Privatized:
    """A project under privacy: its module, its rows, and the Trainer that takes the plan's steps.

    It unpacks to (module, data, Trainer), where Trainer is called with the options of ``lightning.Trainer``.

    Attributes:
        module: The project's module; its hooks, optimizers and held-out steps are the project's own.
        data: The training rows under the plan's sampler, and the held-out rows as they are.
        plan: The frozen plan.
        notes: What is different from the project as it was.
    """

    module: AdoptedModule
    data: PrivateDataModule
    plan: PrivacyPlan
    notes: tuple[str, ...]
    Trainer: Callable[..., PrivateTrainer]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.module, self.data, self.Trainer))

    @property
    def epsilon(self) -> float:
        """The epsilon of the planned steps, which is the guarantee; infinite if there is none."""
        return Spending(self.plan).guarantee().epsilon if self.plan.certified else math.inf


def privatize(
    module: lightning.LightningModule, data: Any, *, size: int | None = None, loss: Any = None,
    input_bound: float | None = None, plan: PrivacyPlan | None = None, run_dir: Any = None,
    log_nonprivate: bool = False, **privacy: Any,
) -> Privatized:  # fmt: skip
    """Returns a project under privacy: module, data and Trainer.

    The project keeps its layers, optimizer, schedule, held-out steps, metrics, callbacks and loggers. Its
    ``training_step`` is run on made-up rows to find the network and the loss, and never on private rows: the private
    step computes the certified loss of each example, sums it over a Poisson sample and releases the gradients' sum
    with noise. A project whose step does anything else is refused, and every reason is given at once.

    Args:
        module: A LightningModule, which is left as it is; a copy is trained.
        data: A LightningDataModule, a DataLoader, a Dataset, a pair of tensors or arrays, or a PrivateDataModule.
        size: N, the declared number of training rows; neighbouring data sets differ in their length, so it is stated
            and not counted. A PrivateDataModule declares it.
        loss: The certified loss, by name or as a Loss, in place of what ``training_step`` computes.
        input_bound: The largest norm of a row; longer rows are scaled down to it. By default, it is 10 times the root
            of the number of entries.
        plan: A plan, in place of the keys below.
        run_dir: A new or empty folder for ledger, checkpoint and report, or that of an unfinished run to continue.
        log_nonprivate: Whether to log the training loss as ``nonprivate/loss``; the report says so.
        **privacy: Keys of the ``privacy`` group of a configuration, such as epsilon, delta, epochs and batch_size.
            As with ``lipdp fit``, the scaling is chosen from the certificate unless it is given, and the reason is
            told when training starts. The batch size is that of the project's loader.

    Raises:
        ValueError: If the project cannot be trained privately; it lists all reasons, each with a HINT.

    Example::

        model, data, Trainer = lipdp_lightning.privatize(model, data, size=60000, epsilon=3, delta=1e-6, epochs=10)
        trainer = Trainer(max_epochs=10, callbacks=callbacks, logger=logger)
        trainer.fit(model, data)
    """
    problems: list[str] = []
    plain = Uncompiled.of(module)
    problems += project_problems(plain.project)
    given = _attempt(problems, lambda: _given_rows(data))
    told = None if loss is None else _attempt(problems, lambda: as_loss(loss))
    settings = _attempt(problems, lambda: _settings(privacy, data, given, plan))
    rows = _size(problems, data, size)
    if settings is not None and plan is None and rows is not None:
        plan = _attempt(problems, lambda: _plan(settings, rows, data))
    understood = None
    if given is not None and not project_problems(plain.project):
        understood = _attempt(problems, lambda: understand(plain.project, given.make_up, told))
    if understood is None or problems:
        _certify(problems, understood)
        refuse(problems)
    assert given is not None and understood is not None and plan is not None and settings is not None
    bound = input_bound or _default_bound(given, understood, data)
    plan = PrivacyPlan.from_dict(plan.to_dict() | {"input_bound": bound}) if plan.input_bound is None else plan
    held_out = tuple(validation_names(plain.project, given.make_up(3, torch.Generator().manual_seed(0), 2)))
    private = _attempt(problems, lambda: adopted(
        plain.project, understood.path.network, understood.loss, bound, log_nonprivate))  # fmt: skip
    refuse(problems)
    assert private is not None
    private.drops_ids = isinstance(data, PrivateDataModule)
    plain.compile(private.network)
    source = data if isinstance(data, PrivateDataModule) else AdoptedRows(
        given, understood.path.x, understood.path.y, plan.dataset_size, understood.loss,
        classes_of(understood.path.outputs), bound)  # fmt: skip
    open_norm = settings.leaves_norm_open
    settled, reason = _attempt(problems, lambda: settle(plan, private, source, open_norm)) or (plan, "")
    refuse(problems)
    notes = _notes(plain.project, understood, settled, bound, told is not None, log_nonprivate)
    notes += (f"the scaling is {settled.scaling!r}: {reason}",) if reason else ()
    # one ledger for all Trainers that are made from here: what one has taken, the next must leave
    ledger = Ledger(settled, settings, run_dir, f"{type(plain.project).__name__}, made private", reason)
    trainer = functools.partial(PrivateTrainer, ledger, notes, (understood.logged, held_out or None))
    return Privatized(private, source, settled, notes, trainer)


def _attempt(problems: list[str], action: Callable[[], Any]) -> Any:
    """Returns the action's result; a ValueError becomes a problem, and the result is None."""
    try:
        return action()
    except CertificationError as error:
        problems += [str(problem) for problem in error.problems]
    except ValueError as error:
        problems.append(str(error))
    return None


def _certify(problems: list[str], understood: Understood | None) -> None:
    """Adds the reasons why the network that was found has no certificate, beside the other problems."""
    if understood is not None:
        _attempt(problems, lambda: make_private(understood.path.network))


def _given_rows(data: Any) -> GivenRows:
    if not isinstance(data, PrivateDataModule):
        return GivenRows.of(data)
    data.setup("fit")
    zeros = data.made_up_batch(1)
    if zeros is None:
        raise ValueError(
            f"{type(data).__name__} changes batches in a way of its own, or releases statistics first, and a batch for "
            "training_step cannot be made up. HINT: train a PrivateModule with `lipdp fit` on this data."
        )
    return GivenRows(TensorDataset(*zeros))


def _settings(privacy: dict[str, Any], data: Any, given: GivenRows | None, plan: PrivacyPlan | None) -> PrivacySettings:
    if plan is not None and set(privacy) - {"physical_batch_size", "noise_mode", "deterministic", "tf32"}:
        raise ValueError(
            f"a plan was given, and {', '.join(sorted(privacy))} beside it. HINT: state everything in one of the two."
        )
    chosen = dict(privacy)
    if given is not None and given.batch_size is not None:
        chosen.setdefault("batch_size", given.batch_size)
    known = inspect.signature(PrivacySettings).parameters
    if unknown := [key for key in chosen if key not in known]:
        meant = [near for key in unknown for near in difflib.get_close_matches(key, known, 1)]
        hint = (
            f"did you mean {', '.join(meant)}?"
            if meant
            else "help('lipdp_lightning.training.settings') lists the keys."
        )
        raise ValueError(f"privatize() does not know {', '.join(unknown)}. HINT: {hint}")
    settings = PrivacySettings(**chosen)
    if isinstance(data, PrivateDataModule):
        return settings.of_unit(data.unit, data.max_examples_per_unit)
    return settings


def _size(problems: list[str], data: Any, size: int | None) -> int | None:
    """Returns the declared N; a problem is added if none is declared."""
    if isinstance(data, PrivateDataModule):
        if size not in (None, data.dataset_size):
            problems.append(f"size is {size}, and the data module declares {data.dataset_size}. HINT: leave size out.")
        return data.dataset_size
    if size is None or size < 1:
        problems.append(
            f"size is {size}: the number of training rows is declared, since data sets that differ in one person "
            "differ in it, and the sampling rate divides by it. HINT: give size=60000, the public number of rows."
        )
        return None
    return size


def _plan(settings: PrivacySettings, rows: int, data: Any) -> PrivacyPlan:
    return settings.plan(rows, None, getattr(data, "preliminary", ()))


def _default_bound(given: GivenRows, understood: Understood, data: Any) -> float:
    declared = getattr(data, "input_bound", None)
    entries = tensors_of(given.template())[understood.path.x][0].numel()
    return float(declared) if declared is not None else LARGEST_ENTRY * math.sqrt(entries)


def _notes(
    project: Any, understood: Understood, plan: PrivacyPlan, bound: float, told: bool, log_nonprivate: bool
) -> tuple[str, ...]:
    """Returns what is different from the project as it was, one sentence each."""
    name = type(project).__name__
    loss = repr(understood.loss)
    unit = "row" if plan.unit == "example" else plan.unit
    notes = [
        f"{name}.training_step is not run on private rows: the private step computes {loss}"
        + (", which was given," if told else ", which training_step calls,")
        + f" of each example, and releases its gradients' sum divided by {plan.expected_batch_size:g}",
        f"batches are Poisson samples of the {plan.dataset_size} declared {unit}s, of {plan.expected_batch_size:g} "
        f"{unit}s on average, in place of the loader's shuffled batches",
        f"rows of a norm above {bound:.6g} are scaled down to it in training",
    ]
    if understood.logged:
        what = ", ".join(understood.logged)
        kept = "; the training loss is logged as nonprivate/loss" if log_nonprivate else ""
        notes.append(f"what training_step logs is not logged, since it tells of private rows: {what}{kept}")
    if understood.kept:
        notes.append(f"what training_step keeps stays as it is, since it does not run: {', '.join(understood.kept)}")
    if understood.summed:
        notes.append("the loss was summed over the batch, and its gradients are divided by the declared batch size now")
    return tuple(notes)
