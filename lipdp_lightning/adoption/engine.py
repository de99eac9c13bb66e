"""A loop over the private steps of a plan, for plain torch without Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from torch import Tensor, nn

from ..bounds.graph import CertificationError, structural_problems
from ..bounds.identity import training_mode
from ..bounds.losses import Loss, as_loss
from ..callbacks import PrivacyReport
from ..data_modules.base import PrivateDataModule
from ..privacy.branches import Branches
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from ..training.checkpoint_files import OwnerOnlyCheckpointIO, read_checkpoint
from ..training.checkpoints import Restored, check_fits, resume_parts
from ..training.claim import claim_run
from ..training.module import PrivateModule
from ..training.private_steps import PrivateSteps
from ..training.processes import Ranks
from ..training.progress_note import ProgressNote
from ..training.run_directory import RunDirectory
from ..training.set_up import check_loop, refuse, require_exact_products
from ..training.step_record import StepRecord
from ..training.withheld import withhold
from .given_rows import LARGEST_ENTRY, AdoptedRows, GivenRows, classes_of

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")


class Stateful(Protocol):
    """An optimizer, a schedule, or whatever else has a state to continue from."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain values."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restores the state."""


@dataclass(frozen=True)
class ReleasedStep:
    """A step whose gradients are in ``grad``, with noise, divided by the declared batch size.

    Attributes:
        number: The number of the step, from 0 on.
        planned: The number of steps that the plan has.
        epsilon: An upper bound on the epsilon of the steps taken so far; infinite if nothing is guaranteed.
    """

    number: int
    planned: int
    epsilon: float


class Engine(PrivateSteps):
    """Iterates over the private steps of a plan; in the loop's body, ``grad`` holds what the step has released.

    The body steps the optimizer, moves a schedule, clips or logs gradients: all of it is computed from private values.
    Drawing the sample, the forward and the backward pass, noise, ledger and record are the Engine's. Layers are put
    back into their norm balls when the next step begins, or when the loop ends.

    With a run directory, an unfinished run in it is continued, and ``keep`` must be called before the first step with
    everything that has a state. With torch.distributed initialised, every process makes an Engine and runs the same
    loop; gradients and weights are then the same on every process.

    Args:
        network: A torch model, which is changed in place: its Linear, Conv and Dropout layers become layers that the
            mechanism can work with, with the same parameters.
        plan: The frozen plan.
        data: A PrivateDataModule; or a Dataset, a DataLoader or a pair of tensors or arrays, whose items are (x, y),
            and whose declared number is the plan's.
        loss: A certified loss, by name, as a Loss, or as a loss of torch with reduction 'none'.
        input_bound: The largest norm of a row; longer rows are scaled down to it. By default that of the plan or of
            the data module, or 10 times the root of the number of entries.
        run_dir: A new or empty folder for ledger, checkpoint and report, or that of an unfinished run to continue.
        physical_batch_size: The rows of the largest expected micro-batch per process.
        precision: '32-true', '64-true' or 'bf16-mixed'.
        noise_mode: 'distributed' or 'replicated'.
        save_every_n_steps: The number of steps between two checkpoints in the run directory.
        fixed_secret: 16 bytes, for tests alone; the report says that it was fixed.

    Raises:
        ValueError: If the set-up cannot be trained privately; it lists all reasons, each with a HINT.

    Example::

        engine = Engine(network, plan, (x, y), loss="cross_entropy")
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
        for step in engine:
            optimizer.step()
    """

    gradient_clip_val = gradient_clip_algorithm = None
    views = average = None
    lr_scheduler_configs: tuple[Any, ...] = ()
    callbacks: tuple[Any, ...] = ()
    public_context = b""
    training, rows_per_example, tf32 = True, 1, False
    checksum_every_n_steps = 100

    def __init__(
        self, network: nn.Module, plan: PrivacyPlan, data: Any, *, loss: str | Loss | nn.Module,
        input_bound: float | None = None, run_dir: Any = None, physical_batch_size: int | None = None,
        precision: str = "32-true", noise_mode: str = "distributed", save_every_n_steps: int = 100,
        fixed_secret: bytes | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.noise_mode, self.physical_batch_size = plan, noise_mode, physical_batch_size
        self.fixed_secret, self.precision, self.deterministic = fixed_secret, precision, False
        self.scaling_reason = ""
        self._directory = None if run_dir is None else RunDirectory(run_dir)
        folder = self._directory
        self.branches = Branches(None if folder is None else folder.ledger)
        self.record = StepRecord(None if folder is None else folder.steps)
        self.statistics = Statistics(None if folder is None else folder.statistics)
        self.restored, self.mechanism, self.clipper = Restored(), None, None
        self._hooks, self._current, self._secret, self._spending = [], None, b"", None
        self._kept: dict[str, Stateful] = {}
        self._batches: Iterator[Any] = iter(())
        self._steps_done, self._is_pending, self._saved_at = 0, False, -1
        self._failed = False
        self._note: ProgressNote | None = None
        self._save_every = save_every_n_steps
        self.max_steps = plan.steps
        refuse(_problems(precision, noise_mode))
        self.root_device = next(network.parameters()).device
        self.precision_plugin = _precision_plugin(precision, self.root_device)
        self.data, bound = _private_rows(data, plan, as_loss(loss), network, input_bound)
        self.module = PrivateModule(network, loss, bound)
        self.module.trainer = self  # type: ignore[assignment]  # what the private step asks of a Trainer, it finds here
        self.precision_plugin.convert_module(self.module)
        self.configured: list[dict[str, Any]] = []
        self._settle(self.module, self.data)
        self._saved = self._claim()

    # ---- what the private step asks of a Strategy and of a Trainer

    @property
    def strategy(self) -> Engine:
        """The Engine itself, where the private step looks for the Strategy."""
        return self

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not group:
            return Ranks(0, 1, self.root_device)
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), self.root_device)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.ranks.world_size

    @property
    def is_global_zero(self) -> bool:
        """True for the process that writes files."""
        return self.ranks.rank == 0

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of micro-batches per step and process, under Lightning's name."""
        return self.chunks

    @property
    def global_step(self) -> int:
        """The number of steps that are done."""
        return self._steps_done

    @property
    def _number(self) -> int:
        return self._steps_done

    # ---- the loop

    @property
    def network(self) -> nn.Module:
        """The network that is trained."""
        return self.module.network

    @property
    def epsilon(self) -> float:
        """The epsilon of the planned steps, which is the guarantee; infinite if nothing is guaranteed."""
        assert self.plan is not None
        return self.spending.guarantee().epsilon if self.plan.certified else math.inf

    def keep(self, **parts: Stateful) -> None:
        """Saves the states of optimizers and schedules with the run, and restores them if a run is continued.

        Args:
            **parts: Each part by the name under which it is saved.

        Raises:
            ValueError: If the loop has begun, or if the checkpoint holds no state of that name.
        """
        if self.mechanism is not None:
            raise ValueError("keep() was called after the first step. HINT: call it before the loop.")
        self._kept |= parts
        if self._saved is None:
            return
        missing = [name for name in parts if name not in self._saved["kept"]]
        if missing and self._saved["global_step"]:
            raise ValueError(
                f"the checkpoint holds no state of {', '.join(missing)}. HINT: give keep() the names with which the "
                "run was begun, or use a new run_dir."
            )
        for name, part in parts.items():
            if name in self._saved["kept"]:
                part.load_state_dict(self._saved["kept"][name])

    def __iter__(self) -> Engine:
        return self

    def __next__(self) -> ReleasedStep:
        """Finishes the step before, and takes the next one; it ends when the plan's steps are spent."""
        assert self.plan is not None
        if self._failed:
            raise ValueError(
                "a step of this loop has failed, and may have been released in part. HINT: make a new Engine with the "
                "same run_dir, which continues from the last checkpoint."
            )
        if self._current is None:
            self._start()
        self._finish()
        if self._steps_done >= self.branches.limit():
            self._keep_state()
            raise StopIteration
        if self._directory is not None and self._steps_done % self._save_every == 0:
            self.save()
        if self._note is not None:
            self._note.before_step(self._steps_done)
        try:
            self._take_step()
            assert self.current.is_released(self._steps_done), "the body would find gradients without noise"
        except BaseException as error:
            self._failed = True
            self._leave()
            withhold(error)  # its message may depend on rows
            raise
        self._is_pending = True
        spent = self.branches.spent(self._steps_done + 1)
        epsilon = self.spending.shown(spent) if self.plan.certified else math.inf
        return ReleasedStep(self._steps_done, self.plan.steps, epsilon)

    def __len__(self) -> int:
        """Returns the number of steps that the plan has."""
        assert self.plan is not None
        return self.plan.steps

    def _take_step(self) -> None:
        """Draws the sample, and leaves the release of its gradients' sum in ``grad``."""
        parameters = list(self.module.parameters())
        for parameter in parameters:
            parameter.grad = None
        for _ in range(self.chunks):
            shown = self.current.hand_over(self._next_batch())
            batch = self._begin_pass(shown, self._steps_done)
            with self.precision_plugin.forward_context():
                total = self.module.training_step(batch, 0) / self.chunks
            self.current.check_gradients()
            with self._backward_pass():
                total.backward()
            self._end_pass()

    def _next_batch(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.data.train_dataloader())
            batch = next(self._batches)
        batch = self.data.on_before_batch_transfer(batch, 0)
        batch = self.data.transfer_batch_to_device(batch, self.root_device, 0)
        return self.data.on_after_batch_transfer(batch, 0)

    def _finish(self) -> None:
        """Ends the step whose release the loop's body has used."""
        if not self._is_pending:
            return
        assert self.mechanism is not None
        self.mechanism.project_()
        self._is_pending, self._steps_done = False, self._steps_done + 1

    # ---- set-up, checkpoints and the end

    def _claim(self) -> dict[str, Any] | None:
        """Checks everything, takes the run directory, and returns the checkpoint to continue from."""
        plan = self.plan
        assert plan is not None

        def check() -> None:
            problem = None
            try:
                check_loop(self, self.module, self.data)
                if plan.certified:
                    self.spending.guarantee()  # raises where no accountant has a bound
            except ValueError as error:
                problem = error
            self.ranks.raise_together(problem)  # otherwise the other ranks would wait for this one

        if self._directory is None:
            check()
            return None
        path = claim_run(
            self._directory, plan, self.is_global_zero, check, lambda saved: check_fits(saved, self.network), ""
        )
        if path is None:
            return None
        saved = read_checkpoint(path)
        self.restored = Restored.of(saved)
        self.network.load_state_dict(saved["state_dict"])
        self._steps_done = saved["global_step"]
        return saved

    def _start(self) -> None:
        """Makes everything that the steps need, once all that has a state is known."""
        if self._saved is not None and (forgotten := set(self._saved["kept"]) - set(self._kept)):
            raise ValueError(
                f"the run in {self._directory and self._directory.path} is continued, and the states of "
                f"{', '.join(sorted(forgotten))} are not. HINT: engine.keep(optimizer=optimizer) before the loop."
            )
        require_exact_products(self.root_device, self.deterministic)
        for tensor in (*self.module.parameters(), *self.module.buffers()) if self.world_size > 1 else ():
            torch.distributed.broadcast(tensor.data, src=0)
        self._prepare_steps(self, self.module, self.data)
        if self._directory is not None:
            self.save()  # before the first step, so that the secret survives a crash at any moment
            self._note = ProgressNote(self._directory, self, self._steps_done) if self.is_global_zero else None

    def save(self) -> None:
        """Writes the checkpoint of the run directory, from which a run with this folder continues."""
        if self._directory is None or self.mechanism is None:
            raise ValueError(
                "there is no run to save: no run_dir was given, or the loop has not begun. HINT: Engine(run_dir=...)."
            )
        self._finish()
        if self._saved_at == self._steps_done:
            return
        parts = resume_parts(self, self._steps_done)
        state = {name: value.detach().clone() for name, value in self.network.state_dict().items()}
        kept = {name: part.state_dict() for name, part in self._kept.items()}
        if self.is_global_zero:
            content = {"state_dict": state, "kept": kept, "global_step": self._steps_done, **parts}
            if self.statistics.values:
                content["lipdp_statistics"] = dict(self.statistics.values)
            OwnerOnlyCheckpointIO().save_checkpoint(content, self._directory.checkpoint)
        self._saved_at = self._steps_done

    def _keep_state(self) -> None:
        """Writes the last checkpoint, and whether the plan's steps are spent."""
        if self._directory is None or self.mechanism is None or self.plan is None:
            return
        finished = self._steps_done >= self.branches.limit()
        if self.is_global_zero:  # first, so that the checkpoint holds no steps that were reserved and not taken
            self.branches.finish(self._steps_done)
        self._saved_at = -1
        self.save()
        if self.is_global_zero:
            status = "finished" if finished else "stopped"
            self._directory.mark(status, self.plan.digest().hex(), steps=self._steps_done)

    def close(self) -> None:
        """Saves the run and leaves its directory to others; a run that has steps left may be continued."""
        if not self._failed:  # else a step may have been released that is not counted here
            self._finish()
            self._keep_state()
        if self.mechanism is not None:
            self.mechanism.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._leave()

    def _leave(self) -> None:
        """Leaves the run directory to others."""
        if self._directory is not None:
            self._directory.release()
        self.record.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Writes the reports into the run directory, and returns their paths.

        Args:
            metrics: Metrics of held-out rows by name, such as ``test/accuracy``.
        """
        if self._directory is None or self.mechanism is None:
            raise ValueError("there is nothing to report on. HINT: Engine(run_dir=...), after the first step.")
        self._finish()
        report = PrivacyReport(self._directory.path, title=f"{type(self.network).__name__}, a loop of torch")
        report.write(self, self.module, dict(metrics or {}))  # type: ignore[arg-type]
        return dict(report.paths)


def _problems(precision: str, noise_mode: str) -> list[str]:
    problems = []
    if precision not in _PRECISIONS:
        problems.append(
            f"precision={precision!r} scales the loss by a factor that follows the data, or is unknown. "
            f"HINT: use one of {', '.join(_PRECISIONS)}."
        )
    if noise_mode == "sharded":
        problems.append(
            "noise_mode='sharded' leaves each process a share of the release, and the loop's body steps an optimizer "
            "that needs all of it. HINT: use 'distributed', or PrivateStrategy, which shards the optimizer too."
        )
    return problems


def _precision_plugin(precision: str, device: torch.device) -> Precision:
    if precision == "64-true":
        return DoublePrecision()
    return Precision() if precision == "32-true" else MixedPrecision("bf16-mixed", device.type)


def _private_rows(
    data: Any, plan: PrivacyPlan, loss: Loss, network: nn.Module, input_bound: float | None
) -> tuple[PrivateDataModule, float]:
    """Returns a data module of the rows, and the largest norm of a row."""
    bound = input_bound if input_bound is not None else plan.input_bound
    if isinstance(data, PrivateDataModule):
        return data, bound if bound is not None else data.input_bound or 1.0
    given = GivenRows.of(data)
    x = given.template()[0]
    bound = LARGEST_ENTRY * math.sqrt(x[0].numel()) if bound is None else bound
    zeros = torch.zeros_like(x, dtype=torch.float32, device=next(network.parameters()).device)
    try:
        with torch.no_grad(), training_mode(network, False):
            outputs = network(zeros)
    except Exception as error:
        raise ValueError(
            f"the network fails on a row of zeros of shape {tuple(x.shape[1:])}: {type(error).__name__}: {error}. "
            "HINT: give rows of the shape that the network takes."
        ) from None
    if not isinstance(outputs, Tensor):
        if problems := structural_problems(network):  # such as an LSTM, which has no certificate
            raise CertificationError(problems)
        raise ValueError(
            f"the network returns a {type(outputs).__name__}, and a loss takes one tensor of outputs. "
            "HINT: return the tensor alone from forward."
        )
    return AdoptedRows(given, 0, 1, plan.dataset_size, loss, classes_of(outputs), bound), bound
