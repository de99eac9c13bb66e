"""The private steps of a run: which secret they use, how each one begins, and how its sum is released."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..accounting.accountants import Spending
from ..bounds.certifier import Certifier
from ..clipping import Clipper, make_clipper
from ..kernels.numeric_environment import check_exact_arithmetic
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.noise import Place
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.branches import Branches
from ..privacy.keys import derive_key, new_secret
from ..privacy.plan import PrivacyPlan
from ..privacy.statistics import Statistics
from .automatic_scaling import settle
from .batches import Batch, padding_multiple, planned_draws, transfer_problems
from .checkpoints import Restored, settle_statistics
from .context import can_repeat, context_of
from .current_step import CurrentStep
from .model_checks import DATA_METHODS
from .module import PrivateModule
from .processes import Ranks
from .set_up import make_certifier, matching_modules, refuse, steps_per_epoch
from .step_record import StepRecord, key_of_record, name_on_record


class PrivateSteps:
    """Takes the steps of a plan in order, on one process or many; the Strategy and the Engine are such classes.

    Guarantee: a step is reserved in the ledger before it begins, put on record before it is released, and released at
    most once for one secret. What is in ``grad`` after ``_release`` is the mechanism's release.
    """

    plan: PrivacyPlan | None
    scaling_reason: str  # why the scaling was chosen, if the configuration left it open
    mechanism: Mechanism | None
    branches: Branches
    record: StepRecord
    restored: Restored
    physical_batch_size: int | None
    noise_mode: str
    checksum_every_n_steps: int | None
    fixed_secret: bytes | None
    _secret: bytes
    _branch: str
    _record_key: bytes
    _can_repeat: bool
    _begun: int  # the number of the step that is under way, or was the last one
    _spending: Spending | None
    _norms: Follower
    clipper: Clipper | None
    statistics: Statistics
    _hooks: list[Any]
    _current: CurrentStep | None
    where_rows_are: str  # in words, once the run is set up

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        raise NotImplementedError

    @property
    def rows_per_example(self) -> int:
        """The number of rows that the network receives for each example."""
        raise NotImplementedError

    @property
    def _number(self) -> int:
        """The number of the present step."""
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        """The number of micro-batches per step and process."""
        if self.physical_batch_size is None:
            return 1
        assert self.plan is not None
        rows = int(self.plan.expected_batch_size) * self.rows_per_example
        return max(1, -(-rows // (self.ranks.world_size * self.physical_batch_size)))

    @property
    def spending(self) -> Spending:
        """The plan's epsilon over the steps, which is computed once for all that show it."""
        assert self.plan is not None
        if self._spending is None:
            self._spending = Spending(self.plan)
        return self._spending

    @property
    def current(self) -> CurrentStep:
        """The step that is under way, once the run is set up."""
        assert self._current is not None, "the run is not set up for training"
        return self._current

    # ---- set-up

    def _settle(self, module: Any, data: Any) -> None:
        """Settles a scaling that is left open; what cannot be settled is refused by the check that follows."""
        if self.plan is not None and not self.plan.is_settled and isinstance(module, PrivateModule):
            with contextlib.suppress(ValueError, AttributeError):
                self.plan, self.scaling_reason = settle(self.plan, module, data)

    def _prepare_steps(self, trainer: Any, module: PrivateModule, data: Any) -> None:
        """Makes everything that the steps need, and lets the plan's sampler decide the rows of the data module."""
        plan, norms = self.plan, Follower()
        assert plan is not None
        self._norms = norms
        certifier = make_certifier(trainer, module, plan, data, norms)
        self.clipper = make_clipper(module.network, plan, self.rows_per_example)
        self._hooks = attach_cotangent_clips(module.network, matching_modules(module.network, plan.cotangent_clip))
        self.statistics = settle_statistics(self, data)
        if plan.preliminary:  # the hooks on a batch depend on the statistics
            refuse(transfer_problems(data, DATA_METHODS))
        self._can_repeat = can_repeat(self)
        self._open_branch(context_of(self, trainer, module, data))
        self.mechanism = self._make_mechanism(module, certifier, norms)
        expected = plan.expected_batch_size * self.rows_per_example / (self.ranks.world_size * self.chunks)
        module.rows_to_multiple_of = padding_multiple(module.network, expected, self.rows_per_example)
        self._current = CurrentStep(module, self, data)
        self.where_rows_are = data.place(self.ranks.device)
        data.bind(self._draw(data.rows), steps_per_epoch(plan), self.chunks, lambda: self._number)

    def _make_mechanism(self, module: PrivateModule, certifier: Certifier, norms: Follower) -> Mechanism:
        """Returns the mechanism of a run, in the state that its checkpoint has."""
        assert self.plan is not None
        mechanism = Mechanism(
            module.network, certifier, self.plan, self._secret,
            place=Place(self.ranks.rank, self.ranks.world_size, self.noise_mode),  # type: ignore[arg-type]
            context=self.branches.context, views=self.rows_per_example,
        )  # fmt: skip
        if self.restored.run is None:
            mechanism.project_()
            mechanism.refresh_certificate()  # what is printed is the certificate of what trains
        else:
            mechanism.load_state(self.restored.run.mechanism)
            norms.load_state(self.restored.norms)
        return mechanism

    def _open_branch(self, context: bytes) -> None:
        """Continues a branch or starts a new one, as rank 0 decides; all ranks use its secret."""
        assert self.plan is not None
        plan, steps = self.plan.digest().hex(), self.plan.steps

        def opened() -> Branches:
            secret, fixed = self.fixed_secret or new_secret(), self.fixed_secret is not None
            run = self.restored.run
            if run is not None:
                known = self.restored.record if self.branches.is_here(run) else None
                name, key = name_on_record(run.secret), key_of_record(run.secret)
                self.record.require(name, self.branches.taken_here(run), key, known)
            self.branches.open(run, context, plan, steps, secret, fixed)
            return self.branches

        self.branches = self.ranks.from_first(opened)
        self._secret = self.branches.secret
        self._branch, self._record_key = name_on_record(self._secret), key_of_record(self._secret)

    def _draw(self, rows: int) -> Callable[[int, int], Tensor]:
        assert self.plan is not None
        return planned_draws(self._secret, self.plan, rows, self.ranks.rank, self.ranks.world_size, self.chunks)

    def step_key(self, purpose: str, *indices: int) -> int:
        """Returns the key of a purpose at the present step, which is the same on every rank."""
        key = derive_key(self._secret, purpose, self._number, *indices)
        return int.from_bytes(key[:8], "big", signed=True)

    def dropout_key(self, layer: int) -> int:
        """Returns the key of a layer's masks at the present step."""
        return self.step_key("dropout", layer)

    # ---- the step

    def _begin_pass(self, batch: Any, number: int) -> Batch:
        """Begins the step of that number with its first micro-batch, and returns the data module's batch."""
        current = self.current
        drawn = current.opened(batch)
        check_exact_arithmetic()
        self._begun = number
        if current.between_steps:
            self._begin_step()
            current.begin(number)
        else:  # nothing may have changed since
            assert self.mechanism is not None
            self.mechanism.begin_step(number)
        return drawn

    def _backward_pass(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context of a backward pass; in a step's last one, sums over processes begin where they can."""
        mechanism = self.mechanism
        assert mechanism is not None
        if self.clipper is not None or not mechanism.may_overlap or not self.current.is_last(self.chunks):
            return contextlib.nullcontext()
        check_exact_arithmetic()
        return mechanism.overlap(self._begun, self._begin_all_reduce, self.current.complete, self._seal)

    def _end_pass(self) -> None:
        """Adds a micro-batch's gradients, and releases their sum if it is complete."""
        if self.current.add(self.chunks):
            self._release()
            self.current.mark_released()

    def _begin_step(self) -> None:
        mechanism, step = self.mechanism, self._begun
        assert mechanism is not None
        assert step < self.branches.limit(), f"step {step} is beyond the plan"
        if mechanism.place.rank == 0:
            self.branches.reserve(step)
        mechanism.begin_step(step, sealed=self._can_repeat)
        every = self.checksum_every_n_steps
        if every is not None and mechanism.place.world_size > 1 and step % every == 0:
            self.ranks.check_in_step(step, mechanism.checksum)

    def _release(self) -> None:
        """Puts the step on record, and replaces the sum by its release."""
        mechanism, step = self.mechanism, self._begun
        assert mechanism is not None
        check_exact_arithmetic()
        mechanism.privatize_(step, self._all_reduce if mechanism.place.world_size > 1 else None, self._seal)

    def _seal(self, own: bytes) -> bytes:
        """Puts one digest of what all processes are about to release on record, and returns it."""
        digest = self.ranks.agree(own)
        self._put_on_record(self._begun, digest)
        return digest

    def _put_on_record(self, step: int, digest: bytes) -> None:
        """Records what the step is about to be released from; if the record has another release, all ranks raise."""
        assert self.mechanism is not None
        deviations = self.mechanism.deviations().values()
        scales = struct.pack(f"{len(deviations)}d", *deviations)
        entry = derive_key(self._secret, "step", step, digest, scales)[:16].hex()
        self.ranks.first_does(lambda: self.record.take(self._branch, step, entry, self._record_key))

    def _all_reduce(self, total: Tensor, to: int | None = None) -> None:
        """Sums a tensor over all ranks, in place; a rank ``to`` is the only one that needs the sum."""
        if to is None:
            torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
        else:
            torch.distributed.reduce(total, dst=to, op=torch.distributed.ReduceOp.SUM)

    def _begin_all_reduce(self, total: Tensor) -> Callable[[], object]:
        """Begins to sum a tensor over all ranks, in place, and returns what waits for it."""
        work = torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    @torch.no_grad()
    def _gather(self, owners: Mapping[nn.Parameter, int]) -> None:
        """Copies every parameter from the rank that owns it to all others, by one broadcast from each rank."""
        for rank in sorted(set(owners.values())):
            for dtype in {p.dtype for p, owner in owners.items() if owner == rank}:
                held = [p for p, owner in owners.items() if owner == rank and p.dtype == dtype]
                flat = torch.cat([p.detach().reshape(-1) for p in held])
                torch.distributed.broadcast(flat, src=rank)
                if rank != self.ranks.rank:
                    for parameter, part in zip(held, flat.split_with_sizes([p.numel() for p in held]), strict=True):
                        parameter.copy_(part.view(parameter.shape))
