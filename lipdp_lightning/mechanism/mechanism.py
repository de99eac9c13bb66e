"""One step of the private mechanism: certificate, scaling, noise, normalisation, projection.

Everything here is plain torch. The order of a step is

    begin_step -> forward and backward of all micro-batches (sum loss) -> privatize_ -> optimizer -> project_

and the certificate that calibrates the noise is that of the weights the gradients were computed at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ..bounds.certificate import Certificate
from ..bounds.certifier import Certifier
from ..layers import compile_loops
from ..norms.follow import Follower
from ..privacy.normals import numeric_environment
from ..privacy.plan import PrivacyPlan
from ..privacy.randomness import KeyedDigest, derive_key, state_digest
from .allocation import Allocation, allocate, joint_thresholds
from .choice import make_scaling, scaling_at
from .noise import NoiseSource
from .noisy_sums import NoisySums
from .place import Agree, Reduce
from .place import Place as Place
from .projection import Projector
from .scaling import BatchMax, Radii, joint_loop, quantile_step
from .watched import WatchedTensors, bounds_of, versions_of

_NOISE_THREADS = 16  # at most


def sum_margin(expected_batch_size: float) -> float:
    """What float32 rounding adds to a sensitivity: in norms and factors, and in the sum over the batch.

    The sum is stored at its own size, up to batch times a sensitivity, hence up to 2^-24 of that off, with an
    example and without it.
    """
    return 1.0 + 2.0**-16 + 2.0**-23 * expected_batch_size


class Mechanism:
    """Turns the summed gradient in ``parameter.grad`` into its private release.

    Guarantee: with examples drawn by the plan's Poisson sampling, a loss summed over them, and a model that
    keeps each example's input within the certified bound, every step releases a subsampled
    Gaussian mechanism of the plan's noise multiplier, for add/remove of one example, provided the
    scaling is certified.
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
    ) -> None:
        """``views``: rows per example in the sum of gradients, each bounded by itself; their mean is released."""
        assert views >= 1
        self.model, self.plan, self.place, self.views = model, plan, place or Place(), views
        self._certifier = certifier
        self._allocation = cast(Allocation, plan.allocation)  # checked by the plan
        self._context = plan.digest(), context
        self._state = KeyedDigest(derive_key(secret, "state"))
        self._watched = WatchedTensors(model)
        self.certificate = certifier.certify()
        self.scaling = make_scaling(plan, self.certificate)
        self.scaling.views = views
        self.scaling.attach(model)
        named = dict(model.named_parameters())
        self._trained = [(group.name, group.parameters) for group in self.certificate.groups]
        self._numels = {group.name: group.numel for group in self.certificate.groups}
        trained = [named[n] for group in self.certificate.groups for n in group.parameters]
        self._device = trained[0].device
        self._no_votes = torch.zeros(0, dtype=torch.float64, device=self._device)
        if self._device.type == "cpu":
            # loops are compiled here and not in the first step
            compile_loops()
            joint_loop()
        threads = min(_NOISE_THREADS, torch.get_num_threads())
        self.sums = NoisySums(trained, NoiseSource(secret, secure=plan.secure, threads=threads), self.place)
        assert isinstance(certifier.norms, Follower), "training needs a Certifier with a Follower"
        self._follower = certifier.norms
        self._projector = Projector(self._follower, plan, self.certificate, named)
        self._shared_out: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._certified_versions: list[int] = []
        self._step: int | None = None
        self._drawn = 0
        self.checksum = b""
        self.digest = b""
        self.deviations()  # shares that fit no group are refused here and not in the first step

    def close(self) -> None:
        """Detach from the model and end the noise thread."""
        self.sums.close()
        self.scaling.detach(self.model)

    # ---- the step

    def begin_step(self, step: int, agree: Agree | None = None) -> None:
        """Certify the present weights and start drawing the step's noise; idempotent within a step.

        ``checksum`` is then the same on every process that shares the step. ``digest`` names all that the
        step's release is a function of, besides the secret: ``agree`` turns the digests of all processes into one,
        so that a replay with a change on any of them draws fresh noise on each, and replicated noise is one draw.
        """
        if self._step == step:
            assert self._certified_versions == self._versions(), "the weights changed between two micro-batches"
            return
        self._step = step
        named = self._watched.named()
        weights = self._weights_digest(named)
        self._certify(named, weights)  # for the same weights, the bounds of the projection still hold
        self._check_trained()
        self.scaling = scaling_at(step, self.scaling, self.plan, self.certificate, self.model)
        self.scaling.begin(self.certificate, self._joint_thresholds())
        self._drawn = 0
        # bounds may lag behind the weights, and they scale both gradients and noise
        public = *self._context, bounds_of(self.certificate)
        self.checksum = state_digest(self._radii(), weights, *public)
        own = state_digest({}, self.checksum, numeric_environment())
        self.digest = own if agree is None else agree(own)
        self.sums.begin(step, self._sizes(), self.digest, self._deviations_with_votes())

    def count_examples(self, drawn: int) -> None:
        """Begin a micro-batch. batch_max alone reads how many examples it holds, and divides by it, as printed."""
        self.scaling.settle()
        self._drawn += drawn

    def refresh_certificate(self) -> Certificate:
        """The certificate of the weights as they are now."""
        return self._certify(self._watched.named())

    def _certify(self, named: Mapping[str, Tensor], digest: bytes = b"") -> Certificate:
        self.certificate = self._certifier.certify(digest)
        self._certified_versions = versions_of(named)
        return self.certificate

    @torch.no_grad()
    def privatize_(self, step: int, reduce: Reduce | None = None) -> None:
        """grad <- (sum over all ranks of grad + noise) / (q N), in place.

        ``reduce`` sums a float64 tensor over ranks. In distributed mode the noise is added before it, so no
        process ever holds an un-noised sum; a rank without gradients contributes zeros.
        """
        assert self._step == step, f"privatize_({step}) without begin_step({step})"
        assert self._certified_versions == self._versions(), "the weights changed between forward and privatize_"
        deviations, divisor = self._deviations_with_votes(), self._divisor()
        apart = self.scaling.take_sums()  # the examples vote here at the latest
        votes = self._take_votes()
        # the mean over views; taken in the loss, it would come before the clips
        self._update_radii(self.sums.release_(deviations, apart, votes, 1 / self.views, divisor, reduce))
        self._step = None

    def project_(self) -> None:
        """Put every layer back into its norm ball."""
        self._projector.project_()
        if self._device.type == "cpu":  # elsewhere a digest is slow
            named = self._watched.named()
            self._follower.seal(self._weights_digest(named), named)

    # ---- public numbers of the present step

    def sensitivities(self) -> dict[str, float]:
        """Delta_k of every group under the plan's scaling, with the margin for float32 sums."""
        # views are rows that are added, too
        margin = sum_margin((self.plan.expected_batch_size + self.scaling.partial_sums) * self.views)
        if self.scaling.joint:
            thresholds = self._joint_thresholds()
            margin *= self.scaling.reach(self.certificate, thresholds)
            return {name: value * margin for name, value in thresholds.items()}
        return {name: value * margin for name, value in self.scaling.sensitivities(self.certificate).items()}

    def deviations(self) -> dict[str, float]:
        """sigma_k of every group."""
        sensitivities, sigma = self.sensitivities(), self.plan.noise_multiplier
        if sigma == 0:
            return dict.fromkeys(sensitivities, 0.0)
        if self.scaling.joint or isinstance(self.scaling, BatchMax):
            # joint: sigma tau_k, sound as a whole; batch_max: sigma Delta_k on each layer, as printed
            return {name: sigma * value for name, value in sensitivities.items()}
        return allocate(sensitivities, self._numels, sigma, self._allocation, weights=self._weights())

    def boundary(self) -> dict[str, tuple[float, float | None]]:
        """Certified norm of every projected layer, and the largest it may have."""
        return self._projector.norms()

    def state(self) -> dict[str, float]:
        """What a resume needs beside the weights: the tracked radii, which are released values."""
        return dict(self.scaling.radii) if isinstance(self.scaling, Radii) else {}

    def load_state(self, state: Mapping[str, float]) -> None:
        if isinstance(self.scaling, Radii):
            self.scaling.radii.update(state)

    # ---- inside

    def _check_trained(self) -> None:
        """A layer thawed after set-up would hand its raw gradient to the optimizer."""
        trained = [(group.name, group.parameters) for group in self.certificate.groups]
        if trained != self._trained:
            changed = ", ".join(sorted({name for name, _ in {*trained} ^ {*self._trained}}))
            raise ValueError(
                f"{changed}: what is trained changed after set-up, and noise is drawn for the layers "
                "trained then. HINT: freeze or thaw layers before training starts, and use one run for each phase."
            )

    def _joint_thresholds(self) -> dict[str, float]:
        reference = self.scaling.reference(self.certificate)
        if reference != self._shared_out[0]:
            thresholds = joint_thresholds(reference, self._numels, self._allocation, weights=self._weights())
            self._shared_out = reference, thresholds
        return self._shared_out[1]

    def _weights(self) -> dict[str, float] | None:
        if self._allocation != "custom":
            return None
        total = math.fsum(weight for _, weight in self.plan.group_weights)
        return {pattern: weight / total for pattern, weight in self.plan.group_weights}

    def _votes(self) -> list[str]:
        return sorted(self.scaling.radii) if isinstance(self.scaling, Radii) and self.scaling.counting else []

    def _votes_of_one(self) -> list[int]:
        """How often one example votes on each radius."""
        assert isinstance(self.scaling, Radii)
        cast_once = self.scaling.votes_of_one(self.certificate)
        return [cast_once[path] for path in self._votes()]

    def _sizes(self) -> list[int]:
        return [group.numel for group in self.certificate.groups] + [1] * len(self._votes())

    def _deviations_with_votes(self) -> list[float]:
        by_name = self.deviations()
        votes = self._votes()
        vote_deviation = 0.0
        if votes:
            # every vote of an example moves its entry by 1/2
            assert self.plan.radius_noise_multiplier is not None
            vote_deviation = self.plan.radius_noise_multiplier * math.hypot(*self._votes_of_one()) / 2
        return [by_name[group.name] for group in self.certificate.groups] + [vote_deviation] * len(votes)

    def _take_votes(self) -> Tensor:
        """The sums of votes of this step, float64; of a radius without votes, zero."""
        names = self._votes()
        if not names:
            return self._no_votes
        sums = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        assert isinstance(self.scaling, Radii)
        for i, path in enumerate(names):
            votes = self.scaling.below.get(path)
            if votes is not None:
                sums[i] += votes
        self.scaling.below = {}
        return sums

    def _update_radii(self, sums: Tensor) -> None:
        """Radii of the next step from the noisy votes; post-processing of this release."""
        votes = self._votes()
        if not votes:
            return
        assert isinstance(self.scaling, Radii) and self.plan.radius_quantile is not None
        shares = (sums / self.plan.expected_batch_size).tolist()
        for path, balance, uses in zip(votes, shares, self._votes_of_one(), strict=True):
            share = balance / uses + 0.5
            self.scaling.radii[path] = quantile_step(self.scaling.radii[path], share, self.plan.radius_quantile)

    def _divisor(self) -> float:
        if isinstance(self.scaling, BatchMax):
            return float(max(1, self._drawn))
        return float(self.plan.expected_batch_size)

    def _weights_digest(self, named: Mapping[str, Tensor]) -> bytes:
        return self._state.of(named)

    def _radii(self) -> dict[str, Tensor]:
        radii = self.scaling.radii if isinstance(self.scaling, Radii) else {}
        return {path: torch.tensor(radius, dtype=torch.float64) for path, radius in radii.items()}

    def _versions(self) -> list[int]:
        return self._watched.versions()
