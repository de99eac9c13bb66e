"""Mutations of what privacy rests on, and the test that each is caught by.

CAUGHT names, for each mutation, the test in which a check passes for the code and fails for the mutation. Those
that no other file has are below: a check is a function of the class or function under test, applied to both.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_step import (
    Harness,
    Noiseless,
    drawn_otherwise,
    influential_examples,
    linear,
    mahalanobis,
    make_plan,
    mlp,
    random_batch,
    strongest,
    with_example,
)  # fmt: skip
from torch import Tensor, nn

from lipdp_lightning.bounds.identity import TrustedHook
from lipdp_lightning.bounds.losses import CrossEntropy
from lipdp_lightning.layers import ScaledLinear, scale_cotangent
from lipdp_lightning.mechanism import step as mechanism_module
from lipdp_lightning.mechanism.allocation import NoiseBudget
from lipdp_lightning.mechanism.noise import Place, StepNoise, Sum
from lipdp_lightning.mechanism.radii import Radius
from lipdp_lightning.mechanism.reductions import Reduce
from lipdp_lightning.mechanism.scaling import Joint, StepNumbers
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.sampling import poisson_sample

TESTS = Path(__file__).parent
TOLERANCE = 1 + 1e-5
CLASSES = 5

CAUGHT: dict[str, dict[str, str]] = {
    "test_mutations.py": {
        "division by the drawn sample": "test_the_scale_of_a_release_is_public",
        "an empty sample is skipped": "test_an_empty_sample_is_a_step",
        "N is read from the data": "test_the_presence_of_one_record_does_not_move_the_others",
        "mean loss": "test_losses_are_summed",
        "no multiplication by the micro-batches": "test_losses_are_summed",
        "layerwise factor on the cotangent passed on": "test_the_cotangent_passed_on_is_not_scaled",
        "joint factor without squares": "test_joint_factors_cover_all_groups_together",
        "uses of a layer are not added in the joint factor": "test_uses_of_one_layer_add",
        "an unmeasured use is left out of the joint factor": "test_uses_without_their_layer_count",
        "a reused layer votes once": "test_votes_are_covered_by_their_noise",
        "noise in float32": "test_noise_and_sum_are_added_in_float64",
        "noise key without the state": "test_a_changed_continuation_draws_fresh_noise",
        "noise after the reduction on every rank": "test_ranks_share_the_variance_of_one",
    },
    "audit/test_broken_certificates.py": {
        "uses of a layer are not added in the certificate": "test_root_of_squares_for_a_reused_layer_is_caught",
        "power iteration": "test_power_iteration_is_caught",
        "bias forgotten in the forward bound": "test_the_bias_left_out_of_the_forward_bound_is_caught",
        "bias forgotten in the gradient": "test_the_bias_left_out_of_the_gradient_is_caught",
        "kappa forgotten": "test_kappa_left_out_is_caught",
        "torus of the bare image": "test_a_torus_of_the_images_own_size_is_caught",
        "users instead of slots": "test_users_in_place_of_slots_are_caught",
        "a layer's own norm in its bound": "test_the_thesis_cotangent_bound_with_the_layers_own_norm_is_caught",
        "a false loss constant": "test_a_false_loss_constant_is_caught",
    },
    "bounds/test_losses.py": {
        "a mean over the batch is accepted as a loss": "test_losses_without_a_bound_are_refused_with_the_fix",
    },
    "bounds/test_disguises.py": {
        "a step runs the network's own forward": "test_a_disguised_network_is_refused_or_trains_as_it_was_certified",
        "writes into views are not followed": "test_a_disguised_network_is_refused_or_trains_as_it_was_certified",
        "hooks that only look are not called": (
            "test_what_runs_in_a_step_is_the_graph_and_the_hooks_that_only_look_see_it"
        ),
    },
    "bounds/test_rounded_reads.py": {
        "repeated reads of a max pool are exact": "test_the_rounding_of_repeated_reads_is_paid_for",
    },
    "mechanism/test_deep_changes.py": {
        "new members of layers' classes are not counted": "test_an_edit_between_steps_is_refused_or_changes_nothing",
        "code of torch's functions is not compared": "test_an_edit_between_steps_is_refused_or_changes_nothing",
        "what a loss calls is not compared": (
            "test_an_edit_between_certificate_and_forward_is_refused_or_changes_nothing"
        ),
    },
    "training/test_deep_steps.py": {
        "hooks receive the loss with its graph": (
            "test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was"
        ),
        "hooks attached within a step are not counted": (
            "test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was"
        ),
        "the precision plugin runs the backward pass": (
            "test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was"
        ),
        "methods of the mechanism are not compared": (
            "test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was"
        ),
        "methods are not compared before the backward pass": (
            "test_a_step_that_is_changed_from_around_it_is_refused_or_released_as_it_was"
        ),
    },
    "data_modules/test_data_splits.py": {
        "a random split that re-deals the records": "test_a_split_that_moves_other_records_is_refused",
    },
    "layers/test_dropout.py": {
        "dropout keyed by row": "test_the_sum_moves_by_one_example_at_most",
    },
    "layers/test_functions.py": {
        "torch sums the weight of a user's layer": "test_one_row_moves_the_sum_of_an_own_layer_as_its_refusal_says",
    },
    "layers/test_scaled.py": {
        "the norm of the input without its bias": "test_a_norm_without_bias_patches_or_groups_would_be_exceeded",
    },
    "callbacks/test_parameter_averaging.py": {
        "an average copied into weights that a step is taken at": (
            "test_weights_that_are_copied_in_place_are_noticed_within_a_step"
        ),
    },
    "distributed/test_distributed_kit.py": {
        "exact factors of single views on one rank": (
            "test_exact_norms_of_single_views_on_one_rank_fail_the_same_check"
        ),
        "views drawn by the row of the batch": "test_views_drawn_by_the_row_fail_the_same_check",
    },
    "mechanism/test_allocation.py": {
        "joint factor per group": "test_joint_thresholds_hold_as_a_whole",
        "no root of the number of groups": "test_broken_allocations_fail_the_joint_condition",
    },
    "layers/test_exact_norms.py": {
        "exact norm from half the positions or without bias": "test_half_the_positions_or_no_bias_fail_the_same_check",
        "exact norm without its margin": "test_cancelling_positions_leave_rounding_that_the_norm_pays_for",
    },
    "mechanism/test_exact.py": {
        "one use of a tied layer not measured": "test_broken_factors_fail_the_check_that_the_exact_ones_pass",
        "exact factor of the whole batch": "test_broken_factors_fail_the_check_that_the_exact_ones_pass",
        "largest group in place of all groups": "test_broken_factors_fail_the_check_that_the_exact_ones_pass",
        "micro-batches measured together": "test_micro_batches_that_pile_up_share_factors",
    },
    "mechanism/test_mechanism.py": {
        "gradients of a thawed layer pass without noise": "test_what_is_trained_may_not_change_after_set_up",
        "certificate of new weights for old gradients": "test_certificate_of_new_weights_for_old_gradients_is_caught",
    },
    "mechanism/test_noise.py": {
        "every piece of noise begins at the first position": "test_a_broken_release_fails_the_same_check",
        "one stream of noise for all parameters": "test_a_broken_release_fails_the_same_check",
        "noise with the deviation of the next sum": "test_a_broken_release_fails_the_same_check",
        "a release that is not on its grid": "test_a_broken_release_fails_the_same_check",
        "sums that are kept apart are left out": "test_a_broken_release_fails_the_same_check",
        "one sum is left without noise": "test_a_broken_release_fails_the_same_check",
        "one sum is released twice": "test_a_broken_release_fails_the_same_check",
        "noise on one rank only, same noise on all ranks": "test_broken_splits_over_ranks_fail_the_variance_check",
        "one draw for all groups or all steps": "test_shared_noise_fails_the_independence_check",
        "32-bit seeds": "test_keys_are_used_in_full_unlike_seeds_of_32_bits",
    },
    "mechanism/test_released_sum.py": {
        "scaling by the batch maximum": "test_scaling_by_the_batch_maximum_fails_and_by_the_example_passes",
        "scale first, then clip": "test_scaling_before_clipping_breaks_the_bound",
        "clip radius not multiplied back": "test_a_radius_that_is_not_multiplied_back_breaks_the_bound",
    },
    "mechanism/test_view_sums.py": {
        "gradient not divided by the views": "test_a_gradient_that_is_not_divided_by_the_views_breaks_the_bound",
        "loss divided by the views before a clip": "test_a_loss_divided_by_the_views_breaks_the_bound_of_a_clip",
    },
    "norms/test_follow.py": {
        "kappa forgotten between exact norms": "test_following_a_kernel_without_kappa_fails_the_same_check",
        "the change of a weight bounded from below": "test_a_change_bounded_from_below_fails_the_same_check",
    },
    "norms/test_strips.py": {
        "the largest strip of a change alone": "test_the_largest_strip_alone_is_no_bound",
    },
    "kernels/test_gpu_kernels.py": {
        "products rounded before a sum on a GPU": "test_products_that_are_rounded_by_themselves_are_noticed",
        "a compiler that fuses further": "test_fusing_further_is_noticed",
    },
    "kernels/test_multilinear.py": {
        "a hash whose key leaves out half of the bits": "test_without_half_of_the_key_a_difference_is_hidden",
    },
    "gpu/test_counts.py": {
        "noise of another deviation on a GPU": "test_noise_of_another_deviation_fails_the_comparison",
    },
    "gpu/test_doctor_on_a_gpu.py": {
        "a GPU whose noise, hash or products are wrong": "test_a_fault_of_the_device_is_found",
    },
    "kernels/test_arithmetic.py": {
        "TF32 switched off in two spellings": "test_what_was_set_before_by_one_spelling_alone_is_not_enough",
    },
    "privacy/test_grid.py": {
        "sums without the grid": "test_without_the_grid_many_coordinates_prove_it",
    },
    "training/test_replayed_sums.py": {
        "noise keyed by the state alone": "test_noise_keyed_by_the_state_alone_fails_the_same_check",
    },
    "distributed/test_distributed_noise.py": {
        "the sum of one rank left out of the key": "test_another_sum_on_one_rank_draws_other_noise_on_all",
    },
    "training/test_reserved_steps.py": {
        "a step is reserved after it": "test_a_late_reservation_fails_the_same_check",
    },
    "mechanism/test_step_reuse.py": {
        "norms of biases are those of set-up": "test_bounds_follow_biases_that_grow",
    },
    "tuning/test_tuning_interruptions.py": {
        "the best trial is chosen before it is on record": ("test_a_comparison_before_the_record_fails_the_same_check"),
    },
    "audit/test_paired_runs.py": {
        "a metric of the batch is logged": "test_what_follows_private_data_without_noise_is_found",
        "the factor of the largest row of a batch": "test_what_follows_private_data_without_noise_is_found",
        "noise by the drawn sample": "test_what_follows_private_data_without_noise_is_found",
        "a mean that no ledger counts": "test_what_follows_private_data_without_noise_is_found",
        "empty batches are skipped": "test_what_follows_private_data_without_noise_is_found",
        "a learning rate by the batch": "test_what_follows_private_data_without_noise_is_found",
        "shorter steps from empty batches": "test_what_follows_private_data_without_noise_is_found",
        "a bias without noise": "test_what_follows_private_data_without_noise_is_found",
        "a buffer that follows the data": "test_what_follows_private_data_without_noise_is_found",
        "random numbers by the batch": "test_what_follows_private_data_without_noise_is_found",
        "an eighth of the noise": "test_what_follows_private_data_without_noise_is_found",
        "the end of training follows the data": "test_what_follows_private_data_without_noise_is_found",
        "an error that follows the data": "test_what_follows_private_data_without_noise_is_found",
        "a file of the drawn rows": "test_what_follows_private_data_without_noise_is_found",
    },
    "audit/test_paper_estimators.py": {
        "a lower bound at a cut that is free": "test_broken_bounds_fail_the_same_check",
        "a lower bound of counted errors": "test_broken_bounds_fail_the_same_check",
    },
    "accounting/test_accountants.py": {
        "half the noise for replace-one": "test_halving_the_noise_is_not_replace_one",
        "delta of the group not multiplied": "test_group_of_two_needs_the_factor_of_delta",
    },
    "privacy/test_branches.py": {
        "steps not reserved, other branches not counted, secret kept": "test_broken_records_are_short",
    },
    "accounting/test_events.py": {
        "queries on one sample as separate events": "test_queries_on_one_sample_are_one_event",
    },
    "privacy/test_statistics.py": {
        "one draw of noise for two statistics": "test_one_draw_for_two_statistics_fails_the_same_check",
        "a statistic that no ledger counts": "test_a_ledger_without_them_fails_the_same_check",
        "a statistic computed anew on resume": "test_statistics_computed_anew_fail_the_same_check",
        "a statistic of rows outside the unit ball": "test_sums_without_the_unit_ball_fail_the_same_check",
    },
    "privacy/test_sampling.py": {
        "an empty sample is drawn again": "test_resampling_empty_samples_is_rejected",
        "fixed-size batches": "test_fixed_size_batches_are_rejected",
        "shuffled epochs": "test_a_shuffled_epoch_is_rejected",
        "each rank samples for itself": "test_per_rank_independent_sampling_is_rejected",
    },
    "accounting/test_spending.py": {
        "epsilon of the step before": "test_broken_displays_fail_the_same_check",
    },
    "test_counterexamples.py": {
        "noise key without the bounds": "test_one_draw_at_two_scales_reveals_the_sum",
    },
}


@pytest.mark.parametrize("file", CAUGHT)
def test_the_tests_of_the_table_exist(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(CAUGHT[file].values()) <= defined


def test_there_are_at_least_75_mutations() -> None:
    names = [name for mutations in CAUGHT.values() for name in mutations]
    assert len(names) == len(set(names)) >= 75


EMPTY = tuple(t[:0] for t in random_batch(2, (12,), CLASSES))


def harness_of(network: nn.Module, kind: type[Mechanism] = Noiseless, **plan: Any) -> Harness:
    options = {"place": plan.pop("place")} if "place" in plan else {}
    options |= {name: plan.pop(name) for name in ("secret", "grid") if name in plan}
    return Harness(network, (12,), make_plan(**{"max_norm": None} | plan), kind=kind, **options)


def seeded(build: Callable[[], nn.Module], gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    network = build()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(gain)
    return network


def flat(released: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(released.values()))


def is_covered(harness: Harness, size: int = 6) -> bool:
    """The released sum of neighbouring batches moves by no more than the noise covers; adversarial example."""
    example = strongest(harness, influential_examples(harness, CLASSES))
    batch = random_batch(size, (12,), CLASSES)
    moved = mahalanobis(
        harness.release(with_example(batch, *example)), harness.release(batch), harness.mechanism.deviations()
    )
    harness.mechanism.close()
    return moved * harness.plan.noise_multiplier**2 <= TOLERANCE


# ---- the sum and its divisor


class DividesByTheDrawn(Mechanism):
    def divisor(self) -> float:
        return float(max(1, self._drawn))


def scale_is_public(kind: type[Mechanism]) -> bool:
    """Noise over divisor has the planned deviation, whatever the sample."""
    for size in (0, 3, 40):
        build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 500))  # noqa: E731
        harness = harness_of(seeded(build), kind, noise_multiplier=1000.0)
        released = flat(harness.release(random_batch(40, (12,), CLASSES) if size == 40 else EMPTY))
        harness.mechanism.close()
        if abs((released * 20 / harness.mechanism.deviations()["1"]).std().item() - 1) > 0.05:
            return False
    return True


def test_the_scale_of_a_release_is_public() -> None:
    assert scale_is_public(Mechanism)
    assert not scale_is_public(DividesByTheDrawn)


class SkipsEmptySamples(Mechanism):
    def privatize_(self, step: int, reduce: Any = None) -> None:
        if self._drawn == 0:
            return
        super().privatize_(step, reduce)


def empty_sample_is_noise(kind: type[Mechanism]) -> bool:
    harness = harness_of(seeded(mlp), kind)
    released = harness.release(EMPTY)
    deviations = harness.mechanism.deviations()
    harness.mechanism.close()
    return all(abs((v * 20 / deviations[n]).std().item() - 1) < 0.3 for n, v in released.items())


def test_an_empty_sample_is_a_step() -> None:
    assert empty_sample_is_noise(Mechanism)
    assert not empty_sample_is_noise(SkipsEmptySamples)


def drawn_by_the_plan(step: int, rows: int) -> Tensor:
    return poisson_sample(bytes(16), step, rows, 300 / 10_000)


def drawn_by_the_rows(step: int, rows: int) -> Tensor:
    return poisson_sample(bytes(16), step, rows, 300 / rows)


def others_are_drawn_alike(draw: Callable[[int, int], Tensor]) -> bool:
    """With a tenth of the records gone, the rest are in the same samples."""
    return all(torch.equal(draw(step, 9_000), (whole := draw(step, 10_000))[whole < 9_000]) for step in range(20))


def test_the_presence_of_one_record_does_not_move_the_others() -> None:
    assert others_are_drawn_alike(drawn_by_the_plan)
    assert not others_are_drawn_alike(drawn_by_the_rows)


class MeanOverTheBatch(CrossEntropy):
    """A mean, brought to the scale of the sum that is expected."""

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().per_example(logits, target) * 20 / max(1, len(logits))


def test_losses_are_summed() -> None:
    assert is_covered(harness_of(seeded(linear, 20), scaling="layerwise"))
    mean = harness_of(seeded(linear, 20), scaling="layerwise")
    mean.module.loss = MeanOverTheBatch()
    assert not is_covered(mean)

    def released(factor: float) -> Tensor:
        harness = Harness(seeded(mlp), (12,), make_plan(), chunks=4)
        # what the module multiplies back
        harness.module.trainer.accumulate_grad_batches = factor
        return flat(harness.release(random_batch(9, (12,), CLASSES)))

    whole = flat(Harness(seeded(mlp), (12,), make_plan()).release(random_batch(9, (12,), CLASSES)))
    assert torch.allclose(released(4), whole, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(released(1), whole, rtol=1e-4, atol=1e-6)


# ---- factors


def small_inputs_without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, CLASSES, bias=False))


def test_the_cotangent_passed_on_is_not_scaled() -> None:
    """A layer whose input is small divides by a small norm: passed on, its factor lifts all earlier layers."""

    def harness() -> Harness:
        network = seeded(small_inputs_without_bias)
        with torch.no_grad():
            network[1].weight.mul_(0.02)
            network[3].weight.mul_(3)
        return harness_of(network, scaling="layerwise")

    sound, mutated = harness(), harness()

    def scales_what_it_passes_on(layer: ScaledLinear, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (scale_cotangent(inputs[0], 1 / layer.example_norms(inputs[0]).detach().clamp_min(1e-6)),)

    mutated.module.network[3].register_forward_pre_hook(TrustedHook(scales_what_it_passes_on))
    x, y = torch.ones(12), torch.tensor(0)

    def covered(h: Harness) -> bool:
        moved = mahalanobis(
            h.release(with_example(EMPTY, x, y)), h.release(EMPTY), h.mechanism.deviations()
        )  # fmt: skip
        h.mechanism.close()
        return moved * h.plan.noise_multiplier**2 <= TOLERANCE

    assert covered(sound)
    assert not covered(mutated)


class SumsWithoutSquares(Joint):
    """One factor for the mean of the groups' ratios in place of the root of their squares."""

    def _factors(self, rows: int, device: torch.device) -> Tensor:
        total = torch.stack(weighted_norms(self, rows)).sum(0) + sum(self._constants)
        return len(self._constants) / total.clamp_min(1e-12)


class SquaresEachUse(Joint):
    """Root of squares over the uses of a layer, where the gradients of the uses add."""

    def _factors(self, rows: int, device: torch.device) -> Tensor:
        squares = torch.stack(weighted_norms(self, rows)).square().sum(0) + math.fsum(
            constant**2 for constant in self._constants
        )
        return squares.sqrt().clamp_min(1e-12).reciprocal()


def weighted_norms(scaling: Joint, rows: int) -> list[Tensor]:
    """Returns l_u n_iu / tau_k of every use that is measured."""
    return [norms * weight for norms, (_, weight) in zip(scaling._measured(rows), scaling._terms, strict=True)]


class LeavesOutWhatItCannotMeasure(Joint):
    def begin(self, numbers: StepNumbers) -> None:
        super().begin(numbers)
        self._constants = [0.0] * len(self._constants)


def joint_is_covered(monkeypatch: pytest.MonkeyPatch, kind: type[Joint], build: Callable[[], nn.Module]) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(
            mechanism_module, "scaling_of",
            lambda plan, step, certificate, views, _: kind(NoiseBudget.of(plan, views), plan.influence.floor),
        )  # fmt: skip
        return is_covered(harness_of(seeded(build, 4), scaling="joint", loss_clip=0.05))


def test_joint_factors_cover_all_groups_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_is_covered(monkeypatch, Joint, mlp)
    assert not joint_is_covered(monkeypatch, SumsWithoutSquares, mlp)


class TwiceInParallel(nn.Module):
    """Both uses see the same input and the same cotangent: their gradients are equal, and add."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x)


def test_uses_of_one_layer_add(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_is_covered(monkeypatch, Joint, TwiceInParallel)
    assert not joint_is_covered(monkeypatch, SquaresEachUse, TwiceInParallel)


class WithoutItsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.measured = nn.Linear(12, CLASSES)
        self.plain = nn.Parameter(torch.randn(CLASSES, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.measured(x) + nn.functional.linear(x, self.plain)


def test_uses_without_their_layer_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joint_is_covered(monkeypatch, Joint, WithoutItsLayer)
    assert not joint_is_covered(monkeypatch, LeavesOutWhatItCannotMeasure, WithoutItsLayer)


class VotesOnce(Noiseless):
    def numbers(self) -> StepNumbers:
        numbers, radius = super().numbers(), self.scaling
        assert isinstance(radius, Radius)
        radius.votes_of_one = lambda certificate: dict.fromkeys(numbers.votes, 1)  # type: ignore[method-assign]
        return radius.numbers(self.certificate)


def votes_are_covered(kind: type[Noiseless]) -> bool:
    plan = {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 3.0}
    harness = harness_of(seeded(TwiceInParallel), kind, **plan)
    x, y = torch.ones(12) / 4, torch.tensor(0)
    harness.release(EMPTY, 0)
    none = harness.mechanism.votes
    harness.release(with_example(EMPTY, x, y), 1)
    assert none is not None and isinstance(harness.mechanism.scaling, Radius)
    moved = (harness.mechanism.votes - none).norm().item()
    deviation = harness.mechanism.numbers().vote_deviation
    harness.mechanism.close()
    return moved / deviation <= 1 / 3.0 + 1e-9


def test_votes_are_covered_by_their_noise() -> None:
    assert votes_are_covered(Noiseless)
    assert not votes_are_covered(VotesOnce)


# ---- noise


class NoiseInFloat32(Mechanism):
    def _release(self, sums: Sequence[Sum], noise: StepNoise, reduce: Reduce | None) -> None:
        with drawn_otherwise(lambda draw, number, start, count: draw(number, start, count).float().double()):
            super()._release(sums, noise, reduce)

    def _sums(self, numbers: StepNumbers) -> list[Sum]:
        return [
            replace(one, deviation=2.0 ** round(math.log2(one.deviation))) if one.deviation else one
            for one in super()._sums(numbers)
        ]


def noise_has_all_its_bits(kind: type[Mechanism]) -> bool:
    """What is handed to the reduction has the low bits that 24-bit mantissas lack."""
    seen: list[Tensor] = []
    harness = harness_of(seeded(mlp), kind, grid=False)  # a grid would leave few bits of either
    harness.mechanism.begin_step(0)
    harness.mechanism.privatize_(0, lambda total: seen.append(total.clone()))
    harness.mechanism.close()
    return seen[0].dtype == torch.float64 and (seen[0] != seen[0].float().double()).float().mean().item() > 0.99


def test_noise_and_sum_are_added_in_float64() -> None:
    assert noise_has_all_its_bits(Mechanism)
    assert not noise_has_all_its_bits(NoiseInFloat32)


def continuations_are_apart(monkeypatch: pytest.MonkeyPatch, digest: Callable[..., bytes] | None = None) -> bool:
    """Two learning rates from one checkpoint: the second steps must not publish the difference of two true sums."""
    with monkeypatch.context() as patch:
        if digest is not None:
            patch.setattr(mechanism_module, "digest_of", digest)
        batch = random_batch(20, (12,), CLASSES)
        outcome = []
        for rate in (0.1, 0.2):
            released, exact = (
                second_step(harness_of(seeded(linear), kind, scaling="layerwise"), batch, rate, noise_from_first)
                for kind, noise_from_first in ((Mechanism, None), (Noiseless, rate))
            )
            outcome.append((released, exact))
        (a, true_a), (b, true_b) = outcome
        residual = (a - b) * 20 - (true_a - true_b)
        deviation = harness_of(seeded(linear), scaling="layerwise").mechanism.deviations()["1"]
        return residual.std().item() > 0.5 * math.sqrt(2) * deviation


def second_step(harness: Harness, batch: Any, rate: float, exact: float | None) -> Tensor:
    """The release of step 1 after a private step 0; ``exact`` takes the same weights and leaves out the noise."""
    network = harness.module.network
    if exact is None:
        harness.release(batch, 0)
        torch.optim.SGD(network.parameters(), rate).step()
    else:
        private = harness_of(seeded(linear), Mechanism, scaling="layerwise")
        private.release(batch, 0)
        torch.optim.SGD(private.module.parameters(), rate).step()
        network.load_state_dict(private.module.network.state_dict())
        private.mechanism.close()
    released = flat(harness.release(batch, 1))
    harness.mechanism.close()
    return released


def test_a_changed_continuation_draws_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert continuations_are_apart(monkeypatch)
    assert not continuations_are_apart(monkeypatch, lambda *state: bytes(32))


class NoiseAfterTheReduction(Mechanism):
    """Each rank adds the full noise to a sum that is then reduced: more noise than is planned, and slower training."""

    def _noise_of(self, step: int) -> StepNoise:
        return replace(super()._noise_of(step), share=1.0)


class NoiseOfOneRank(Mechanism):
    def _noise_of(self, step: int) -> StepNoise:
        noise = super()._noise_of(step)
        return noise if self.place.rank == 0 else replace(noise, share=0.0)


def ranks_share_the_noise(kind: type[Mechanism]) -> bool:
    """Four ranks without examples: the reduced release has the deviation that the plan names."""
    totals: list[Tensor] = []
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 500))  # noqa: E731
    for rank in range(4):
        harness = harness_of(seeded(build), kind, place=Place(rank, 4))
        harness.mechanism.begin_step(0)
        harness.mechanism.privatize_(0, lambda total: totals.append(total.clone()))
        deviation = harness.mechanism.deviations()["1"]
        harness.mechanism.close()
    shares = all(abs(t.std().item() / deviation - 0.5) < 0.05 for t in totals)
    return shares and abs(torch.stack(totals).sum(0).std().item() / deviation - 1) < 0.05


def test_ranks_share_the_variance_of_one() -> None:
    assert ranks_share_the_noise(Mechanism)
    assert not ranks_share_the_noise(NoiseAfterTheReduction)
    assert not ranks_share_the_noise(NoiseOfOneRank)
