"""A loop over private steps keeps the ledger, refuses what changes a step, and continues bit for bit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_projects import all_weights, loader, rows
from small_runs import SECRET, Blobs, make_network, make_plan
from torch import Tensor, nn

import lipdp_lightning
from lipdp_lightning.adoption.engine import Engine
from lipdp_lightning.training.private_steps import PrivateSteps
from lipdp_lightning.training.step_record import StepRecord

EXACT: dict[str, Any] = {"scaling": "exact", "radius": 1.0, "max_norm": None}


def engine(network: nn.Module | None = None, data: Any = None, **options: Any) -> Engine:
    chosen = {"loss": "cross_entropy", "plan": make_plan(**EXACT), "fixed_secret": SECRET} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(make_network() if network is None else network, data=rows() if data is None else data, **chosen)


def spread(private: Engine) -> float:
    """Returns the standard deviation of what the first weight's gradient holds."""
    gradient = private.network[0].weight.grad  # type: ignore[index]
    return 0.0 if gradient is None else float(gradient.std())


def loop(run_dir: Path | None = None, stop: int | None = None, rate: float = 0.1, **options: Any) -> Tensor:
    """Trains to the end, or up to a step; the process then seems to die, with nothing closed."""
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    private = engine(network, run_dir=run_dir, **options)
    private.keep(optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = rate
    for step in private:
        optimizer.step()
        if step.number == stop:
            private._directory and private._directory.release()  # the lock of a process that is gone
            return all_weights(network)
    private.close()
    return all_weights(network)


def test_arrays_of_numpy_are_rows() -> None:
    x, y = rows()
    private = engine(data=(x.double().numpy(), y.numpy()))
    assert private.data.made_up_batch(2)[0].dtype == torch.float32  # type: ignore[index]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_network()

    def forward(self, x: Tensor) -> Any:
        return self.net(x), x


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.LSTM(4, 3)), r"LSTM"),
        (Twice(), r"the network returns a tuple, and a loss takes one tensor of outputs\. HINT"),
    ],
)
def test_a_network_that_returns_several_values_is_refused(network: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine(network)


def test_the_body_finds_releases_and_the_loop_ends_with_the_plan() -> None:
    private = engine(plan=make_plan(**EXACT, noise_multiplier=50.0))
    steps = []
    for step in private:
        assert spread(private) > 1.5
        steps.append(step)
    assert [s.number for s in steps] == list(range(12)) and steps[-1].planned == len(private) == 12
    assert 0 < steps[0].epsilon <= steps[-1].epsilon <= private.epsilon
    with pytest.raises(StopIteration):
        next(private)


def test_an_interrupted_loop_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole")
    loop(tmp_path / "parts", stop=7, save_every_n_steps=3)
    assert torch.equal(loop(tmp_path / "parts"), whole)
    for name in ("whole", "parts"):
        ledger = json.loads((tmp_path / name / "ledger.json").read_text())
        assert [(b["start"], b["reached"]) for b in ledger["branches"]] == [(0, 12)], ledger
    with pytest.raises(ValueError, match=r"is finished.*HINT"):
        loop(tmp_path / "parts")


def test_a_step_is_in_the_ledger_before_it_is_taken(tmp_path: Path) -> None:
    private = engine(run_dir=tmp_path / "run")
    next(private)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert ledger["branches"][0]["reached"] >= 1
    assert len((tmp_path / "run" / "steps.txt").read_text().splitlines()) == 1


def test_a_late_reservation_fails_the_same_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp_lightning.privacy.branches.Branches.reserve", lambda self, step: None)
    private = engine(run_dir=tmp_path / "run")
    next(private)
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["branches"][0]["reached"] == 0


def test_a_step_that_is_repeated_from_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(**EXACT, steps=120)
    loop(tmp_path / "run", stop=5, plan=plan)  # the only checkpoint is that of the start
    with pytest.raises(ValueError, match=r"step 1 of this run was released before.*HINT"):
        loop(tmp_path / "run", rate=0.2, plan=plan)
    loop(tmp_path / "run", rate=0.2, plan=plan)  # the next start takes a new secret, and both branches count
    branches = json.loads((tmp_path / "run" / "ledger.json").read_text())["branches"]
    assert len(branches) == 2 and sum(b["reached"] - b["start"] for b in branches) <= 120
    monkeypatch.setattr(StepRecord, "take", lambda *_, **__: None)
    loop(tmp_path / "broken", stop=5, plan=plan)
    loop(tmp_path / "broken", rate=0.2, plan=plan)  # without the record, a second release on one sample would pass


def test_steps_cannot_be_counted_back() -> None:
    private = engine()
    optimizer = torch.optim.SGD(private.network.parameters(), lr=0.1)
    for step in private:
        optimizer.step()
        if step.number == 3:
            break
    private._finish()
    private._steps_done = 1
    with pytest.raises(ValueError, match=r"step 1 of this run was released before"):
        next(private)


CHANGES: dict[str, Callable[[Engine], Any]] = {
    "loss": lambda e: setattr(e.module, "loss", type(e.module.loss)(temperature=0.1)),
    "bound": lambda e: setattr(e.module.bounded_input, "bound", 1e6),
    "network": lambda e: setattr(e.module, "network", make_network()),
    "layer": lambda e: e.network.add_module("1", nn.Identity()),
    "gradient hook": lambda e: e.network[0].weight.register_hook(lambda g: None),  # type: ignore[index]
    "accumulation hook": lambda e: e.network[0].weight.register_post_accumulate_grad_hook(print),  # type: ignore[index]
    "module hook": lambda e: e.network[0].register_full_backward_hook(print),  # type: ignore[index]
    "release": lambda e: setattr(e, "_release", lambda: None),
    "sampler": lambda e: setattr(e, "_draw", lambda rows: None),
    "step": lambda e: setattr(e, "_take_step", lambda: None),
    "batch": lambda e: setattr(e, "_next_batch", lambda: rows()),
    "plan": lambda e: setattr(e, "plan", make_plan(**EXACT, noise_multiplier=0.1)),
    "frozen": lambda e: e.network[0].weight.requires_grad_(False),  # type: ignore[index]
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_the_body_releases_nothing(name: str) -> None:
    private = engine()
    next(private)
    released = [None if p.grad is None else p.grad.clone() for p in private.network.parameters()]
    CHANGES[name](private)
    with pytest.raises((ValueError, AssertionError), match=r"changed after set-up|without noise|\(x, y, ids\)"):
        next(private)
    for parameter, before in zip(private.network.parameters(), released, strict=True):
        assert parameter.grad is None or (before is not None and torch.equal(parameter.grad, before))


def test_subclasses_cannot_replace_the_step() -> None:
    class Raw(Engine):
        def _release(self) -> None: ...

    with pytest.raises(ValueError, match=r"Raw\._release is not PrivateStrategy's.*HINT"):
        Raw(make_network(), make_plan(**EXACT), rows(), loss="cross_entropy")


def test_an_engine_that_does_not_release_fails_the_check_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateSteps, "_release", lambda self: None)
    private = engine(plan=make_plan(**EXACT, noise_multiplier=50.0))
    next(private)
    assert spread(private) < 1.5


def test_all_problems_of_a_set_up_are_given_at_once() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"(?s)BatchNorm1d.*HINT"):
        engine(network)
    hooked = make_network()
    hooked[0].weight.register_hook(lambda g: None)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"(?s)noise_mode='loud'.*HINT.*backward hook.*HINT"):
        engine(hooked, noise_mode="loud")
    with pytest.raises(ValueError, match=r"noise_mode='sharded' leaves each process a share.*HINT.*PrivateStrategy"):
        engine(noise_mode="sharded")
    with pytest.raises(ValueError, match=r"precision='16-mixed' scales the loss.*HINT"):
        engine(precision="16-mixed")
    with pytest.raises(ValueError, match=r"N = 60 and the data module declares 59.*HINT"):
        data = Blobs()
        data.declared_size = 59
        engine(data=data)


def test_errors_about_rows_are_withheld() -> None:
    class Leaky(Blobs):
        def transform_batch(self, x: Tensor) -> Tensor:
            if len(x) > 8:
                raise ValueError(f"a row begins with {float(x[0, 0])}")
            return x

    private = engine(data=Leaky())
    with pytest.raises(ValueError, match="its message may hold sizes or values of private rows and is withheld"):
        list(private)
    with pytest.raises(ValueError, match=r"may have been released in part.*HINT"):
        next(private)


def test_what_has_a_state_must_be_kept_again(tmp_path: Path) -> None:
    loop(tmp_path / "run", stop=5, save_every_n_steps=2)
    forgetful = engine(run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"the states of optimizer are not.*HINT"):
        next(forgetful)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_run(precision: str) -> None:
    network = make_network()
    for _ in engine(network, precision=precision):
        pass
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("data", [Blobs(), loader(), loader().dataset], ids=["module", "loader", "dataset"])
def test_rows_are_given_in_several_forms(data: Any) -> None:
    assert len(list(engine(data=data))) == 12


def test_a_finished_loop_is_reported(tmp_path: Path) -> None:
    with engine(run_dir=tmp_path / "run") as private:
        for _ in private:
            pass
        paths = private.report({"test/accuracy": 0.5})
    facts = json.loads(Path(paths["privacy_report.json"]).read_text())
    assert facts["steps_taken"] == 12 and facts["metrics"] == {"test/accuracy": 0.5}
    assert facts["epsilon"] >= private.epsilon * (1 - 1e-6)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_the_package_names_both_entrances_and_stays_light() -> None:
    import subprocess
    import sys

    code = "import sys, lipdp_lightning; assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert lipdp_lightning.Engine is Engine
    with pytest.raises(AttributeError):
        _ = lipdp_lightning.nothing  # type: ignore[attr-defined]
