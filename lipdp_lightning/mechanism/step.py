"""One step of the private mechanism: certificate, scaling, noise, normalisation, projection.

Everything here is plain torch. The order of a step is

    begin_step -> forward and backward of all micro-batches (sum loss) -> privatize_ -> optimizer -> project_

and the certificate that calibrates the noise is that of the weights the gradients were computed at.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import SupportsBytes

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..bounds.certificate import Certificate
from ..bounds.certifier import CertificationError, Certifier
from ..kernels.loops import address_of, version_of
from ..kernels.numeric_environment import numeric_environment
from ..norms.follow import Follower
from ..privacy.digests import KeyedDigest, PendingDigest, digest_of, digests_of
from ..privacy.keys import derive_key
from ..privacy.plan import PrivacyPlan
from .noise import Place, StepNoise, Sum
from .projection import Projector
from .radii import scaling_of
from .reductions import BeginSum, Overlap, Reduce, owners_of, release_
from .scaling import Scaling, StepNumbers
from .step_errors import changed_network, changed_weights, trained_otherwise

Seal = Callable[[bytes], bytes]
"""Turns the digest of what one process is about to release into that of all, which is on record from then on."""


class Mechanism:
    """Turns the summed gradient in ``parameter.grad`` into its private release.

    Guarantee: with examples drawn by the plan's Poisson sampling, a loss summed over them, and a model that keeps each
    example's input within the certified bound, every step releases a subsampled Gaussian mechanism of the plan's noise
    multiplier, for add/remove of one example, provided the scaling is certified.

    Args:
        model: The network whose parameters are trained.
        certifier: Bounds one example's effect for the model's weights.
        plan: The plan of the run.
        secret: The key from which all noise is derived.
        place: The place of this process among those that share a step.
        context: Names what the released sum is a function of, besides the weights and the plan.
        views: The number of rows per example in the sum of gradients, each bounded by itself; their mean is released.
        grid: Whether sums are rounded to the public grid. Without it, nothing is private: False is for an audit that
            measures how far an example moves a sum, which the grid would hide.
    """

    def __init__(
        self,
        model: nn.Module,
        certifier: Certifier,
        plan: PrivacyPlan,
        secret: bytes,
        *,
        place: Place | None = None,
        context: bytes = b"",
        views: int = 1,
        grid: bool = True,
    ) -> None:
        assert views >= 1
        self.model, self.plan, self.place, self.views = model, plan, place or Place(), views
        self._certifier, self._secret, self._grid = certifier, secret, grid
        self._context = plan.digest(), context
        self._digest = KeyedDigest(derive_key(secret, "state"))
        self._contributed = KeyedDigest(derive_key(secret, "contribution"))
        named = dict(model.named_parameters())
        self._state: dict[str, Tensor] = {**named, **dict(model.named_buffers())}
        assert isinstance(certifier.norms, Follower), "training needs a Certifier with a Follower"
        self._follower = certifier.norms
        self.certificate = certifier.certify()
        certifier.refuse_sums_of_torch()
        self._identity = certifier.identity
        self._trained = [(group.name, group.parameters) for group in self.certificate.groups]
        self._influence, self._switches = plan.influence_at(0), plan.first_switched_step < math.inf
        self.scaling: Scaling = scaling_of(plan, 0, self.certificate, views, certifier.tensor_cores)
        self.scaling.attach(model)
        # the group of each parameter, in the order of the step's sums
        self._parameters = {named[n]: group.name for group in self.certificate.groups for n in group.parameters}
        self._device = next(iter(self._parameters)).device
        self._waits = self._device.type != "cpu"  # whether the host waits for a number that is computed
        shards = self.place.world_size if self.place.mode == "sharded" else 1
        owners = owners_of([p.numel() for p in self._parameters], shards)
        self.owners = dict(zip(self._parameters, owners, strict=True)) if shards > 1 else {}
        """The rank that owns each parameter; empty if every rank updates all of them."""
        self._projector = Projector(self._follower, plan, self.certificate, named)
        self._certified_versions: list[tuple[int, int]] = []
        self._attached = 0  # torch numbers all hooks on modules, tensors and nodes; those at the certificate
        self._step: int | None = None
        self._sealed, self._weights = False, PendingDigest([b""])
        self._left: tuple[PendingDigest, list[tuple[int, int]]] | None = None  # on a GPU, after the projection
        self._tracked: dict[str, float] = {}
        self._agreed: bytes | None = None
        self._numbers: StepNumbers | None = None  # those of the step that is under way
        self._overlap: Overlap | None = None
        self._drawn = 0
        self.numbers()  # shares that fit no group are refused here and not in the first step

    def close(self) -> None:
        """Detaches the scaling from the model."""
        self.scaling.detach(self.model)

    # ---- the step

    def begin_step(self, step: int, *, sealed: bool = False) -> None:
        """Certifies the present weights; calling it again within a step compares them.

        Args:
            step: The number of the step, from 0 on.
            sealed: Whether the digest that keys the noise covers the sum, too.
        """
        if self._step == step:
            self._check_unchanged("between two micro-batches")
            return
        self._weights = self._present()
        self._certify(self._weights)  # for the same weights, the bounds of the projection still hold
        if self._switches:
            self._switch(step)
        self._step, self._drawn, self._sealed, self._agreed = step, 0, sealed, None
        self._overlap = None
        self._tracked = dict(self.scaling.state())
        numbers = self._numbers = self.scaling.numbers(self.certificate)
        self.scaling.begin(numbers)

    @property
    def checksum(self) -> bytes:
        """A digest of what the present step starts from, the same on every process that shares it."""
        # bounds may lag behind the weights, and they scale both gradients and noise
        public = repr(sorted(self._tracked.items())).encode(), bounds_of(self.certificate), *self._context
        return digest_of(bytes(self._weights), *public)

    @property
    def digest(self) -> bytes:
        """Names all that the step's release is a function of, besides the secret; a seal may have added to it."""
        if self._agreed is not None:
            return self._agreed
        environment = numeric_environment(self._device)
        return digest_of(self.checksum, environment)

    def begin_pass(self, drawn: int, rows: int) -> None:
        """Begins a micro-batch of so many drawn examples, in so many rows; further rows are empty."""
        self.scaling.begin_pass(rows)
        self._drawn += drawn

    @contextmanager
    def own_hooks(self) -> Iterator[None]:
        """Returns the context of a pass that attaches hooks by itself, as opacus does, which clips examples."""
        before = RemovableHandle.next_id
        yield
        self._attached += RemovableHandle.next_id - before

    @property
    def may_overlap(self) -> bool:
        """Tells whether the noise is known before the step's last backward pass, which leaves all sums in ``grad``.

        In a sealed step, the noise is keyed by the sums of all processes.
        """
        shared = self.place.world_size > 1 and self.place.mode == "distributed"
        return shared and not self._sealed and self.scaling.sums_in_grad

    def overlap(
        self, step: int, begin_sum: BeginSum, complete: Callable[[nn.Parameter], None], seal: Seal | None = None
    ) -> Overlap:
        """Returns the context of the step's last backward pass, whose sums are released while it runs.

        Args:
            step: The step that ``begin_step`` began.
            begin_sum: Begins to sum a float64 tensor over processes.
            complete: Adds to a parameter's ``grad`` what earlier micro-batches have left of its sum.
            seal: The same function as for ``privatize_``, which ends the step.
        """
        assert self._step == step and self._numbers is not None and self.may_overlap
        self._check_unchanged("between forward and backward")
        if seal is not None:
            self._agreed = seal(self.digest)
        numbers = self.numbers()
        deviations = {parameter: numbers.deviations[group] for parameter, group in self._parameters.items()}
        self._overlap = Overlap(deviations, 1 / self.views, self._noise_of(step), begin_sum, complete)
        return self._overlap

    def run(self, x: Tensor) -> Tensor:
        """Returns the output of the certified graph, in place of the network's own forward pass."""
        return self._certifier.run(x)

    @torch.no_grad()
    def privatize_(self, step: int, reduce: Reduce | None = None, seal: Seal | None = None) -> None:
        """Replaces every gradient by its release, (sum over processes + noise on the public grid) / (q N), in place.

        Args:
            step: The step that ``begin_step`` began.
            reduce: Sums a float64 tensor over processes. In distributed mode, noise is added before the sum, so that no
                process ever holds a sum without noise. A process without gradients contributes zeros.
            seal: Receives a digest of the state that the step starts from and, in a sealed step, of this process's sum
                before noise under the secret; returns the digest that keys the noise, or refuses the release. What it
                returns joins the digests of all processes: a replay that differs on one of them draws fresh noise on
                each, and two releases of a sealed step with different sums have different noise. Without it, ``digest``
                keys the noise.
        """
        assert self._step == step and self._numbers is not None, f"privatize_({step}) without begin_step({step})"
        assert seal is not None or not self._sealed, "a step that is to be sealed needs a seal"
        numbers, (overlap, self._overlap) = self.numbers(), (self._overlap, None)
        if overlap is not None:
            overlap.check()
            self._attached += overlap.hooks
        sums = self._sums(numbers)
        # once more to the last bit: a write through .data changes no version
        contributed = self._contribution(sums) if self._sealed else None
        pending = [self._weights, self._digest.begin(self._state)]
        before, after, *contribution = digests_of(pending if contributed is None else [*pending, contributed])
        self._check_unchanged("between forward and privatize_", before == after)
        if overlap is not None:
            overlap.finish(sums)
        else:
            if seal is not None:
                self._agreed = seal(digest_of(self.digest, *contribution) if self._sealed else self.digest)
            self._release(sums, self._noise_of(step), reduce)
        self._learn(numbers, sums[-1].values)
        for parameter, owner in self.owners.items():
            if owner != self.place.rank:  # its sum was not released here, and its owner updates it
                parameter.grad = None
        self._step = self._numbers = None

    def project_(self) -> None:
        """Puts every layer back into its norm ball."""
        self._projector.project_()
        left = self._digest.begin(self._state)
        self._left = (left, self._versions()) if self._waits else None
        self._follower.seal(left, self._state)

    # ---- public numbers

    def divisor(self) -> float:
        """Returns what the sums of the present step are divided by."""
        return self.scaling.divisor(self._drawn)

    def numbers(self) -> StepNumbers:
        """Returns the public numbers of the step that is under way, or else those under the present certificate."""
        return self.scaling.numbers(self.certificate) if self._numbers is None else self._numbers

    def sensitivities(self) -> dict[str, float]:
        """Returns Delta_k of every group under the plan's scaling, with the margin for float32 sums."""
        return dict(self.numbers().sensitivities)

    def deviations(self) -> dict[str, float]:
        """Returns sigma_k of every group."""
        return dict(self.numbers().deviations)

    def boundary(self) -> dict[str, tuple[float, float | None]]:
        """Returns the certified norm of every projected layer, and the largest it may have."""
        return self._projector.norms()

    def refresh_certificate(self) -> Certificate:
        """Returns the certificate of the weights as they are now."""
        return self._certify()

    def state(self) -> dict[str, float]:
        """Returns what a resume needs beside the weights: released values."""
        return self.scaling.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continues from a saved ``state``."""
        self.scaling.load_state(state)

    # ---- inside

    def _sums(self, numbers: StepNumbers) -> list[Sum]:
        """Returns what the step releases: the sum of every parameter's gradients, and the sums of votes."""
        apart, votes = self.scaling.take_sums(), self.scaling.take_votes(self._device)
        # the mean over views; taken in the loss, it would come before the clips
        share, divisor = 1 / self.views, self.divisor()
        sums = []
        for parameter, group in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sums.append(Sum(parameter.grad, numbers.deviations[group], share, divisor, apart.get(parameter)))
        return [*sums, Sum(votes, numbers.vote_deviation, share)]

    def _release(self, sums: Sequence[Sum], noise: StepNoise, reduce: Reduce | None) -> None:
        replicated, owners = self.place.mode != "distributed", list(self.owners.values())
        release_(sums, noise, reduce, replicated, owners, self.place.rank)

    def _present(self) -> PendingDigest:
        """Returns the digest of the present weights.

        On a GPU, the host would wait for the digest. If nothing has counted a change since the projection, the weights
        are taken for those that it left; the release compares them to the last bit, and refuses others.
        """
        if self._left is not None and self._left[1] == self._versions():
            return self._left[0]
        return self._digest.begin(self._state)

    def _versions(self) -> list[tuple[int, int]]:
        """Returns numbers that change if torch writes to a parameter or buffer, or replaces its memory."""
        return [(version_of(tensor), address_of(tensor)) for tensor in self._state.values()]

    def _contribution(self, sums: Sequence[Sum]) -> PendingDigest:
        """Returns a digest of what this process adds to the sums, under a key of the secret; nothing of it is kept."""
        parts = {f"sum {number}": one.values for number, one in enumerate(sums)}
        parts |= {f"apart {number}": one.apart for number, one in enumerate(sums) if one.apart is not None}
        return self._contributed.begin(parts)

    def _learn(self, numbers: StepNumbers, noisy_votes: Tensor) -> None:
        self.scaling.learn(numbers, noisy_votes)

    def _noise_of(self, step: int) -> StepNoise:
        return StepNoise.of(self._secret, step, self.place, self.digest, self.plan.secure, self._grid)

    def _certify(self, state: SupportsBytes = b"") -> Certificate:
        try:
            certificate = self._certifier.certify(state)
        except CertificationError:
            self._check_identity()  # which tells what was changed
            raise
        if self._certifier.identity is not self._identity:
            self._check_trained(certificate)
            self._check_identity()
        if state:  # a step that is taken again from these weights asks for their norms again
            self._follower.seal(state, self._state)
        self.certificate = certificate
        self._certified_versions, self._attached = self._versions(), RemovableHandle.next_id
        return self.certificate

    def _switch(self, step: int) -> None:
        """Attaches the other scaling from the step on at which the plan switches."""
        due = self.plan.influence_at(step)
        if due != self._influence:
            self._influence = due
            self.scaling.detach(self.model)
            self.scaling = scaling_of(self.plan, step, self.certificate, self.views, self._certifier.tensor_cores)
            self.scaling.attach(self.model)

    def _check_trained(self, certificate: Certificate) -> None:
        """Refuses a layer thawed after set-up, which would hand its raw gradient to the optimizer."""
        trained = [(group.name, group.parameters) for group in certificate.groups]
        if trained != self._trained:
            raise trained_otherwise(sorted({name for name, _ in {*trained} ^ {*self._trained}}))

    def _check_identity(self) -> None:
        """Refuses a network that is another than the one that noise was planned for."""
        differences = self._identity.differences()
        if differences:
            raise changed_network(differences)

    def _check_unchanged(self, when: str, same_bits: bool = True) -> None:
        """Refuses any change between the certificate and the release, of the weights too."""
        self._check_identity()
        if RemovableHandle.next_id != self._attached:  # autograd's nodes do not show their hooks to Python
            raise changed_network(["a hook was attached within a step"])
        if self._certified_versions != self._versions() or not same_bits:
            raise changed_weights(when)


def bounds_of(certificate: Certificate) -> bytes:
    """Returns all numbers of the certificate that a step depends on; its names are those of the model."""
    uses = [(u.cotangent_bound, u.gradient_factor, u.input_bound) for g in certificate.groups for u in g.uses]
    return struct.pack(f"{3 * len(uses)}d", *itertools.chain.from_iterable(uses))
