"""A training step that does more than a certified loss of a network is refused before any row is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_projects import Project, loader, privatize, rows
from torch import Tensor, nn

from lipdp_lightning.adoption import faithful_copy

Step = Callable[[Project, Tensor, Tensor], Any]


def project_with(step: Step, **parts: nn.Module) -> Project:
    """Returns a project with another training step."""

    class Changed(Project):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, *batch)

    return Changed()


def by_the_batch(m: Project, x: Tensor, y: Tensor) -> Tensor:
    """Trains on other logits if the labels of the batch are large."""
    return F.cross_entropy(m(x), y) if int(y.sum()) < 20 else F.cross_entropy(-m(x), y)


def by_itself(m: Project, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), y)
    loss.backward(retain_graph=True)
    return loss


def with_a_gradient_penalty(m: Project, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), y)
    (gradient,) = torch.autograd.grad(loss, [m.net[0].weight], create_graph=True)  # type: ignore[index]
    return loss + gradient.square().sum()


def in_place(m: Project, x: Tensor, y: Tensor) -> Tensor:
    x.sub_(x.mean(0))
    return F.cross_entropy(m(x), y)


HIDDEN: dict[str, tuple[Step, str]] = {
    "a penalty on weights": (
        lambda m, x, y: F.cross_entropy(m(x), y) + m.net[0].weight.norm(), "something else than the value"),
    "a statistic of the batch": (
        lambda m, x, y: F.cross_entropy(m(x), y) * (1 + x.std(0).mean()), "something else than the value"),
    "two losses": (
        lambda m, x, y: F.cross_entropy(m(x), y) + F.cross_entropy(m(-x), y), "something else than the value"),
    "normalised by the batch": (
        lambda m, x, y: F.cross_entropy(m(x - x.mean(0)), y), "training_step changes it on the way"),
    "outputs mixed": (
        lambda m, x, y: F.cross_entropy(m(x) - m(x).mean(0), y), "training_step changes it on the way"),
    "targets mixed": (
        lambda m, x, y: F.cross_entropy(m(x), y.roll(1)), "are not a tensor of the batch"),
    "rows left out": (
        lambda m, x, y: F.cross_entropy(m(x[1:]), y[1:]), "training_step changes it on the way"),
    "in place": (in_place, "changes its batch in place"),
    "by the batch": (by_the_batch, "decides by the values of the batch"),
    "by itself": (by_itself, "a backward pass of its own"),
    "a gradient penalty": (with_a_gradient_penalty, "something else than the value"),
    "no loss function": (lambda m, x, y: m(x).square().sum(), "calls no loss function of torch"),
    "no loss": (lambda m, x, y: [F.cross_entropy(m(x), y)], "returns no loss"),
    "a trainer": (lambda m, x, y: m.trainer.global_step, "training_step fails on a batch of made-up rows"),
    "log-probabilities of another dimension": (
        lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=0), y), "of the certified loss is"),
    "log-probabilities of other outputs": (
        lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=1) * 2, y), "training_step changes it on the way"),
    "squared error": (
        lambda m, x, y: F.mse_loss(m.last(m(x)), y[:, None].float()), "MSELoss has no Lipschitz constant"),
    "probabilities": (
        lambda m, x, y: F.binary_cross_entropy(m.last(m(x)), y[:, None].float()), "no Lipschitz constant in them"),
    "weights of the batch": (
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 3.0])), "divides by the weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_step_that_does_more_is_refused(name: str) -> None:
    step, reason = HIDDEN[name]
    with pytest.raises(ValueError, match=rf"(?s){reason}.*HINT"):
        privatize(project_with(step, last=nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())))


def test_without_the_comparison_a_decision_by_the_batch_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithful_copy, "_compare", lambda *_: None)
    privatize(project_with(by_the_batch))


def test_without_a_look_at_what_is_returned_a_penalty_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithful_copy, "_last_loss", lambda step, told: step.losses[-1])
    monkeypatch.setattr(faithful_copy, "_compare", lambda *_: None)
    privatize(project_with(HIDDEN["a penalty on weights"][0]))


def test_the_comparison_alone_finds_penalties_on_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithful_copy, "_last_loss", lambda step, told: step.losses[-1])
    with pytest.raises(ValueError, match=r"the gradients of net\.0\.weight differ"):
        privatize(project_with(HIDDEN["a penalty on weights"][0]))


EQUAL: dict[str, Step] = {
    "a dictionary": lambda m, x, y: {"loss": F.cross_entropy(m(x), y), "logits": m(x).detach()},
    "a sum": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    "a mean of single losses": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").mean(),
    "log-probabilities": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=1), y),
    "label smoothing": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "forward by its name": lambda m, x, y: F.cross_entropy(m.forward(x), y),
    "a part": lambda m, x, y: F.cross_entropy(m.net(x), y),
    "a reshape": lambda m, x, y: F.cross_entropy(m(x.reshape(len(x), -1)), y),
    "parts one by one": lambda m, x, y: F.cross_entropy(m.net[2](m.net[1](m.net[0](x))), y),  # type: ignore[index]
}


@pytest.mark.parametrize("name", EQUAL)
def test_other_forms_of_one_loss_lead_to_one_step(name: str) -> None:
    private = privatize(project_with(EQUAL[name]))
    x, y = rows()
    logits = private.module.network(x)
    torch.testing.assert_close(logits, private.module.project(x))
    assert private.module.loss.per_example(logits, y).shape == (60,)


def test_a_loss_that_is_told_replaces_the_steps_own() -> None:
    private = privatize(project_with(HIDDEN["a penalty on weights"][0]), loss="hinge")
    assert "MulticlassHinge(margin=1.0), which was given" in private.notes[0]


def test_parts_keep_the_names_that_they_have_in_the_project() -> None:
    step = EQUAL["parts one by one"]
    names = [name for name, _ in privatize(project_with(step)).module.network.named_parameters()]
    assert [name.rpartition(".")[0] for name in names[::2]] == ["net_0", "net_2"]
    twice = project_with(lambda m, x, y: F.cross_entropy(m.append(m.append(m(x))), y), append=nn.Tanh())
    assert list(privatize(twice).module.network._modules) == ["net", "append_", "append__"]


def test_a_key_that_is_not_known_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(ValueError, match=r"does not know epsilom\. HINT: did you mean epsilon\?"):
        privatize(Project(), epsilom=3, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"does not know banana\. HINT: help"):
        privatize(Project(), banana=3, noise_multiplier=1.0)


def test_all_reasons_are_given_at_once() -> None:
    class Wrong(Project):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("loss", outputs["loss"])

        def optimizer_step(self, *arguments: Any, **options: Any) -> None: ...

    with pytest.raises(ValueError) as caught:
        privatize(Wrong(), loader(collate_fn=list), size=None, epsilon=-1)
    text = str(caught.value)
    reasons = ("on_train_batch_end", "optimizer_step", "collate_fn", "number of training rows is declared")
    assert all(reason in text for reason in reasons), text
    assert all("HINT" in line for line in text.splitlines()[1:])


@pytest.mark.parametrize(
    "data, reason",
    [
        (lambda: loader(shuffle=False, sampler=torch.utils.data.WeightedRandomSampler(torch.ones(60), 60)), "draws by"),
        (lambda: iter(()), "cannot be drawn one by one"),
        (lambda: loader(y=torch.full((60,), 7)), "is not one of the network's 3 classes"),
        (lambda: loader(x=torch.zeros(10, 6), y=torch.zeros(10).long()), "by more than 5 %"),
    ],
)
def test_data_that_the_sampler_cannot_draw_from_is_refused(data: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){reason}.*HINT"):
        privatize(data=data()).data.setup("fit")


def test_networks_without_a_certificate_are_refused_with_every_reason() -> None:
    class Normalised(Project):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.LogSoftmax(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.nll_loss(self(x), y)

    with pytest.raises(ValueError, match=r"(?s)BatchNorm1d.*HINT.*LogSoftmax.*HINT"):
        privatize(Normalised())


def test_the_given_module_stays_as_it_is() -> None:
    project = Project()
    before = {name: (value.clone(), type(value)) for name, value in project.state_dict().items()}
    private = privatize(project)
    assert private.module.project is not project and type(project.net[0]) is nn.Linear  # type: ignore[index]
    assert all(torch.equal(project.state_dict()[name], value) for name, (value, _) in before.items())
    assert list(private.module.state_dict()) == list(before)
