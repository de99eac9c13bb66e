"""The plan: exact round trips, all problems at once, and the events that the accountant counts."""

import dataclasses
import json
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp_lightning.accounting.accountants import epsilon_of
from lipdp_lightning.privacy.plan import DeltaWarning, NonCertifiedWarning, PrivacyPlan
from lipdp_lightning.privacy.plan_parts import (
    FLAT,
    Automatic,
    BatchMaximum,
    CertifiedBounds,
    ClippedExamples,
    Constraint,
    CustomShares,
    ExampleNorms,
    NormBalls,
    PublicRadius,
    Shares,
    Switch,
    TrackedRadius,
    Unlimited,
)

BASE = dict(dataset_size=1000, expected_batch_size=100, steps=50, noise_multiplier=1.1, delta=1e-5)


def plan(**changes):
    return PrivacyPlan.from_dict({**BASE, **changes})


positive = st.floats(1e-6, 1e6)
tables = st.lists(st.tuples(st.text(max_size=5), positive), max_size=3).map(tuple)
plans = st.builds(
    plan,
    expected_batch_size=st.floats(0.5, 1000),
    steps=st.integers(1, 10**7),
    noise_multiplier=positive,
    delta=st.floats(1e-12, 9e-4),
    adjacency=st.sampled_from(["add_remove", "replace_one"]),
    accountant=st.sampled_from(["prv", "pld", "rdp"]),
    scaling=st.sampled_from(["worst_case", "layerwise", "joint"]),
    projection=st.sampled_from(["clip", "clip_singular", "fixed", "bjorck", "frobenius"]),
    max_norm=st.none() | positive | tables.filter(len),
    free_layers=st.lists(st.text(max_size=4), max_size=2).map(tuple),
    input_bound=st.none() | positive,
    loss_clip=st.none() | positive,
    cotangent_clip=tables,
    secure=st.booleans(),
)


@settings(deadline=None, max_examples=100)
@given(plans)
def test_round_trip_is_exact_also_through_json(original):
    copy = PrivacyPlan.from_dict(json.loads(json.dumps(original.to_dict())))
    assert copy == original and copy.digest() == original.digest()


def test_every_field_is_in_the_digest():
    other = dict(
        dataset_size=1001,
        expected_batch_size=99,
        steps=51,
        noise_multiplier=1.2,
        delta=1e-6,
        adjacency="replace_one",
        accountant="rdp",
        scaling="layerwise",
        projection="fixed",
        max_norm=2.0,
        free_layers=("head",),
        standardize="mean",
        input_bound=1.0,
        loss_clip=1.0,
        cotangent_clip=(("a", 1.0),),
        scaling_floor=1e-3,
        secure=True,
        allow_noncertified=True,
        unit="group",
        preliminary=(("mean", 10.0),),
    )
    variants = [plan(**{name: value}) for name, value in other.items()]
    variants += [
        plan(unit="group", max_examples_per_unit=2),
        plan(allocation="global"),
        plan(allocation="custom", group_weights=(("a", 1.0),)),
        plan(scaling="radius", radius=1.0),
        plan(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=9.0),
        plan(scaling="clip_flat", clipping="local", clip_norm=1.0),
        plan(scaling="clip_flat", clipping="global", clip_norm=1.0),
        plan(scaling="clip_flat", clipping="local", clip_norm=2.0),
        plan(scaling="worst_case", switch_at=0.5, switch_to="joint"),
        plan(scaling="worst_case", switch_at=0.6, switch_to="joint"),
        plan(scaling="worst_case", switch_at=0.5, switch_to="layerwise"),
    ]
    digests = {variant.digest() for variant in [plan(), *variants]}
    assert len(digests) == len(variants) + 1
    covered = set(other) | {
        "max_examples_per_unit",
        "allocation",
        "group_weights",
        "radius",
        "radius_quantile",
        "radius_noise_multiplier",
        "clipping",
        "clip_norm",
        "switch_at",
        "switch_to",
        "sampling",  # has one value only
    }
    assert covered == set(plan().to_dict())


def test_digest_ignores_how_a_value_was_written():
    lists = plan(max_norm=[["a", 1]], free_layers=["b"], expected_batch_size=100.0, cotangent_clip={"c": 2})
    tuples = plan(max_norm=(("a", 1.0),), free_layers=("b",), cotangent_clip=(("c", 2.0),))
    assert lists == tuples and lists.digest() == tuples.digest() and len(lists.digest()) == 32
    hash(lists)


def test_the_plan_is_frozen():
    balls = plan(scaling="joint").constraint.balls
    for value, name in ((plan(), "steps"), (plan().influence, "name"), (balls, "max_norm")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 3)


FORMS = [  # flat options, the parts they make, and how the digest begins, which other versions have written to disk
    (
        dict(scaling="joint"),
        dict(influence=CertifiedBounds(), shares=Shares(), constraint=Constraint(NormBalls())),
        "a0e74492d9e4f977",
    ),
    (dict(), dict(), "0c49dee97afa0587"),
    (
        dict(radius=2, allocation="equal", max_norm=None),
        dict(influence=Automatic(2.0), shares=Shares("equal"), constraint=Constraint(None)),
        "95cd601aea664cf1",
    ),
    (
        dict(projection="bjorck", scaling_floor=1e-3),
        dict(influence=Automatic(floor=1e-3), constraint=Constraint(NormBalls("bjorck"))),
        "cc3635b50ff37936",
    ),
    (
        dict(scaling="worst_case", allocation="equal", scaling_floor=1e-3, max_norm=[["a", 1]]),
        dict(
            influence=CertifiedBounds("worst_case", 1e-3),
            shares=Shares("equal"),
            constraint=Constraint(NormBalls("clip", (("a", 1.0),))),
        ),
        "691fe888747edc8f",
    ),
    (
        dict(scaling="layerwise", switch_at=0.5, switch_to="joint", projection="bjorck", free_layers=["head"]),
        dict(
            influence=CertifiedBounds("layerwise", switch=Switch(0.5, "joint")),
            constraint=Constraint(NormBalls("bjorck"), ("head",)),
        ),
        "87883f080d4b9847",
    ),
    (
        dict(scaling="radius", radius=2, standardize="mean"),
        dict(influence=ExampleNorms("radius", PublicRadius(2.0)), constraint=Constraint(NormBalls(), (), "mean")),
        "3ce1abcba7c64ff3",
    ),
    (
        dict(scaling="exact", radius_quantile=0.5, radius_noise_multiplier=9, scaling_floor=1e-3),
        dict(influence=ExampleNorms("exact", TrackedRadius(0.5, 9.0), 1e-3)),
        "a50f1328c7d8550c",
    ),
    (
        dict(scaling="exact_layerwise", radius=1.0, allocation="custom", group_weights={"a": 2}),
        dict(influence=ExampleNorms("exact_layerwise", PublicRadius(1.0)), shares=CustomShares((("a", 2.0),))),
        "0456d6671bc510c0",
    ),
    (
        dict(scaling="clip_ghost", clipping="automatic", clip_norm=0.5, max_norm=None),
        dict(influence=ClippedExamples("clip_ghost", "automatic", 0.5), constraint=Constraint(None)),
        "8fa277006a29ba48",
    ),
    (
        dict(
            scaling="clip_flat", clipping="local", clip_norm=1, switch_at=0.9, switch_to="global", allocation="global"
        ),
        dict(influence=ClippedExamples("clip_flat", "local", 1.0, Switch(0.9, "global")), shares=Shares("global")),
        "d3526e0c5056b9d1",
    ),
    (
        dict(scaling="batch_max", allow_noncertified=True),
        dict(influence=BatchMaximum(), allow_noncertified=True),
        "efeb827b04f1c092",
    ),
    (
        dict(scaling="none", allow_noncertified=True, noise_multiplier=0),
        dict(influence=Unlimited(), allow_noncertified=True, noise_multiplier=0),
        "7d0ab4c3ccd960c6",
    ),
]


@pytest.mark.parametrize(("options", "parts", "digest"), FORMS)
@pytest.mark.filterwarnings("ignore::lipdp_lightning.privacy.plan.NonCertifiedWarning")
def test_flat_options_and_parts_make_one_plan_whose_digest_stays(options, parts, digest):
    flat, made = plan(**options), PrivacyPlan(**{**BASE, **parts})
    assert flat == made and hash(flat) == hash(made)
    assert flat.digest().hex()[:16] == made.digest().hex()[:16] == digest
    assert PrivacyPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert {name: getattr(made, name) for name in parts} == parts
    assert set(FLAT) < set(made.to_dict())


def test_parts_are_checked_like_options():
    for influence, word in (
        (ExampleNorms("exact", PublicRadius(-1.0)), "radius -1.0"),
        (ExampleNorms("joint", PublicRadius(1.0)), "would ignore it"),
        (CertifiedBounds("exact"), "needs a public radius"),
        (CertifiedBounds("batch_max"), "allow_noncertified"),
        (CertifiedBounds("joint", switch=Switch(2.0, "radius")), "cannot switch"),
        (ClippedExamples("clip_flat", "soft", 1.0), "clipping 'soft'"),
        (BatchMaximum(), "allow_noncertified"),
    ):
        with pytest.raises(ValueError, match="HINT") as caught:
            PrivacyPlan(**BASE, influence=influence)
        assert word in str(caught.value)


def test_what_is_in_force_at_a_step_has_no_switch():
    bounds = plan(scaling="layerwise", switch_at=0.5, switch_to="joint", scaling_floor=1e-3)
    assert bounds.first_switched_step == 25
    assert [bounds.influence_at(step) for step in (0, 24)] == [CertifiedBounds("layerwise", 1e-3)] * 2
    assert [bounds.influence_at(step) for step in (25, 49)] == [CertifiedBounds("joint", 1e-3)] * 2
    clipped = plan(scaling="clip_flat", clipping="local", clip_norm=2.0, switch_at=0.9, switch_to="global")
    assert [clipped.influence_at(step).clipping for step in (44, 45)] == ["local", "global"]
    assert plan().first_switched_step == math.inf and plan().influence_at(49) == plan().influence


def test_from_dict_refuses_unknown_and_missing_keys():
    with pytest.raises(ValueError, match=r"noise_multiplyer.*\n?HINT"):
        PrivacyPlan.from_dict({**BASE, "noise_multiplyer": 3})
    with pytest.raises(ValueError, match="delta"):
        PrivacyPlan.from_dict({k: v for k, v in BASE.items() if k != "delta"})


WRONG = [
    ("dataset_size", 0, "dataset_size"),
    ("dataset_size", 10.5, "dataset_size"),
    ("expected_batch_size", 0, "expected_batch_size"),
    ("expected_batch_size", 1001, "sample rate"),
    ("steps", 0, "steps"),
    ("steps", True, "steps"),
    ("noise_multiplier", -1.0, "noise_multiplier"),
    ("noise_multiplier", math.nan, "noise_multiplier"),
    ("noise_multiplier", 0.0, "allow_noncertified"),
    ("delta", 0.0, "delta"),
    ("delta", 1.0, "delta"),
    ("adjacency", "replace", "adjacency"),
    ("accountant", "gdp", "accountant"),
    ("unit", "user", "unit"),
    ("max_examples_per_unit", 2, "unit='group'"),
    ("scaling", "none", "scaling"),
    ("scaling", "batch_max", "allow_noncertified"),
    ("scaling", "radius", "radius"),
    ("allocation", "custom", "group_weights"),
    ("group_weights", (("a", 1.0),), "allocation"),
    ("projection", "none", "projection"),
    ("max_norm", -1.0, "max_norm"),
    ("max_norm", (("a", -1.0),), "max_norm"),
    ("max_norm", (), "max_norm"),
    ("free_layers", "head", "free_layers"),
    ("input_bound", 0.0, "input_bound"),
    ("loss_clip", math.inf, "loss_clip"),
    ("cotangent_clip", (("a", 0.0),), "cotangent_clip"),
    ("cotangent_clip", "a", "cotangent_clip"),
    ("radius_quantile", 0.5, "scaling='radius'"),
    ("switch_to", "joint", "'auto' cannot switch"),
    ("radius", -1.0, "radius"),
    ("max_norm", "none", "max_norm"),
    ("scaling_floor", 0.0, "scaling_floor"),
    ("secure", "yes", "secure"),
    ("sampling", "shuffle", "independently"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_wrong_values_are_refused_with_a_hint(name, value, text):
    with pytest.raises(ValueError, match="HINT") as caught:
        plan(**{name: value})
    assert text in str(caught.value)


def test_all_problems_come_in_one_error():
    with pytest.raises(ValueError) as caught:
        plan(dataset_size=-1, steps=0, delta=3.0, adjacency="x", sampling="shuffle", loss_clip=-1.0)
    message = str(caught.value)
    for word in ("dataset_size", "steps", "delta", "adjacency", "sampling", "loss_clip"):
        assert word in message
    assert message.count("HINT:") >= 6


@pytest.mark.parametrize(
    "options",
    [
        dict(radius=1.0, radius_quantile=0.5, radius_noise_multiplier=5.0),
        dict(radius_quantile=0.5),
        dict(radius_noise_multiplier=5.0),
        dict(radius_quantile=1.5, radius_noise_multiplier=5.0),
        dict(radius_quantile=0.5, radius_noise_multiplier=0.0),
    ],
)
def test_radius_is_public_or_tracked_with_noise(options):
    with pytest.raises(ValueError, match="radius"):
        plan(scaling="radius", **options)


def test_delta_of_one_over_n_warns_and_less_does_not():
    with pytest.warns(DeltaWarning, match="publishing one record"):
        plan(delta=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(delta=9.9e-4)
    with pytest.warns(DeltaWarning):
        created = PrivacyPlan.create(dataset_size=1000, expected_batch_size=10, steps=5, noise_multiplier=1)
    assert created.delta == 1e-3


def test_batch_max_and_no_noise_are_not_certified():
    assert plan().certified
    for options in (dict(scaling="batch_max"), dict(noise_multiplier=0.0)):
        with pytest.warns(NonCertifiedWarning, match="not private"):
            assert not plan(allow_noncertified=True, **options).certified


def test_events_count_the_planned_steps():
    (event,) = plan().events()
    assert (event.mechanism, event.noise_multiplier, event.sample_rate, event.count) == (
        "subsampled_gaussian",
        1.1,
        0.1,
        50,
    )
    assert plan(expected_batch_size=1000).events()[0].mechanism == "gaussian"
    assert plan().step_event().count == 1


def test_a_tracked_radius_joins_the_step():
    tracked = plan(scaling="radius", radius_quantile=0.5, radius_noise_multiplier=2.0)
    (event,) = tracked.events()
    assert event.noise_multiplier == pytest.approx(1 / math.sqrt(1 / 1.1**2 + 1 / 4))
    assert event.count == 50 and event.noise_multiplier < 1.1
    assert plan(scaling="radius", radius=1.0).events()[0].noise_multiplier == 1.1


def create(**options):
    merged = {**dict(dataset_size=1000, expected_batch_size=10, epochs=2, delta=1e-5, accountant="rdp"), **options}
    return PrivacyPlan.create(**{k: v for k, v in merged.items() if v is not ...})


def spent(made):
    return epsilon_of(made.accountant, made.events(), made.delta, made.adjacency).epsilon


def test_create_calibrates():
    made = create(epsilon=2.0)
    assert made.steps == 200
    assert 1.99 < spent(made) <= 2.0
    assert 1.99 < spent(create(epsilon=2.0, adjacency="replace_one")) <= 2.0


def test_create_calibrates_the_joined_step():
    made = create(epsilon=2.0, scaling="radius", radius_quantile=0.5, radius_noise_multiplier=5.0)
    assert 1.99 < spent(made) <= 2.0
    assert made.noise_multiplier > create(epsilon=2.0).noise_multiplier
    with pytest.raises(ValueError, match="nothing is left for the gradient"):
        create(epsilon=2.0, scaling="radius", radius_quantile=0.5, radius_noise_multiplier=0.3)


def test_create_lists_all_problems():
    with pytest.raises(ValueError) as caught:
        create(epsilon=2.0, noise_multiplier=1.0, steps=3, sampling="shuffle", colour=1)
    for word in ("epsilon and noise_multiplier", "epochs and steps", "sampling", "colour"):
        assert word in str(caught.value)
    for options in (dict(epsilon=-1.0), dict(epsilon=1.0, epochs=-2), dict(epsilon=1.0, dataset_size=0)):
        with pytest.raises(ValueError, match="HINT"):
            create(**options)
