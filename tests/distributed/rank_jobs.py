"""What one rank does in a test: a job takes the world it runs in and plain options, and returns plain values."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import rank_mutants
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_runs import SECRET, Blobs, Crash, fit, make_module, make_network, make_plan, weights
from torch import Tensor, nn

from lipdp_lightning.adoption.engine import Engine
from lipdp_lightning.augmentations import HorizontalFlip, ShiftedCrop
from lipdp_lightning.callbacks import (
    AugmentationMultiplicity,
    ParameterAveraging,
    PrivacyAccountant,
    PrivacyReport,
    ResumeCheckpoint,
    RunFiles,
)
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.layers.contribution import Contribution
from lipdp_lightning.mechanism import reductions as overlap_module
from lipdp_lightning.mechanism.reductions import Overlap
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.digests import PendingDigest
from lipdp_lightning.privacy.sampling import poisson_sample
from lipdp_lightning.training import PrivateModule, PrivateStrategy, context, private_steps
from lipdp_lightning.training.private_steps import PrivateSteps
from lipdp_lightning.training.run_directory import RunDirectory
from lipdp_lightning.training.views import Views

DOUBLE = {"precision": "64-true"}
SCALINGS: dict[str, dict[str, Any]] = {
    "joint": {"scaling": "joint"},
    "layerwise": {"scaling": "layerwise", "allocation": "equal"},
    "worst_case": {"scaling": "worst_case", "allocation": "optimal"},
    # the radius query cannot be without noise: with very little, the worlds agree up to it
    "radius": {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 1e-9},
    "exact": {"scaling": "exact", "radius": 0.1},
    "loss clip": {"scaling": "joint", "loss_clip": 0.3},
    "clip_flat": {"scaling": "clip_flat", "clipping": "local", "clip_norm": 0.3, "max_norm": None},
    "clip_ghost": {"scaling": "clip_ghost", "clipping": "automatic", "clip_norm": 0.3, "max_norm": None},
}


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    nodes: int = 1

    def trainer_options(self, **options: Any) -> dict[str, Any]:
        return {"devices": self.size // self.nodes, "num_nodes": self.nodes, **options}

    def fit(self, plan: Any, *callbacks: Callback, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
        chosen = self.trainer_options(**(trainer or {}))
        if options.get("strategy_kind", PrivateStrategy) is PrivateStrategy:
            return fit(plan, *callbacks, trainer_options=chosen, **options)
        with patch("lipdp_lightning.training.model_checks.STRATEGY_METHODS", ()):  # which would refuse mutants at once
            return fit(plan, *callbacks, trainer_options=chosen, **options)


def dropout_module(**options: Any) -> PrivateModule:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Dropout(0.4), nn.Linear(8, 3))
    return make_module(network=network, **options)


def physical(chunks: int, size: int, expected: int) -> int:
    """The physical batch size that cuts a step into that many micro-batches."""
    return -(-expected // (size * chunks))


# ---- without noise


def final_weights(
    world: World, scaling: str = "joint", precision: str = "64-true", chunks: int = 1, dropout: bool = False,
    mode: str = "distributed", mutant: str = "", folder: str = "", crash: int | None = None, steps: int | None = None,
    expected: int = 20, planned: int = 12, noise: float = 0.0, optimizer: str = "SGD",
) -> dict[str, Any]:  # fmt: skip
    """Weights after training; with a folder, the run is kept there and continued from there."""
    plan = make_plan(**SCALINGS[scaling], noise_multiplier=noise, expected_batch_size=expected, steps=planned)
    module = (dropout_module if dropout else make_module)()
    if optimizer != "SGD":
        module._make_optimizer = lambda parameters: getattr(torch.optim, optimizer)(parameters, lr=0.01)
    strategy = rank_mutants.STRATEGIES[mutant]
    recorder = Released()
    callbacks: list[Callback] = [recorder]
    options: dict[str, Any] = {}
    directory = None
    if folder:
        directory = Path(folder)
        directory.mkdir(exist_ok=True)
        last = directory / "checkpoints" / "last.ckpt"
        options = {"directory": directory, "checkpoint": last if last.exists() else None}
        callbacks += [PrivacyAccountant(), ResumeCheckpoint(directory / "checkpoints", every_n_steps=3)]
    if crash is not None:
        callbacks.insert(0, Crash(crash))
    chosen = {"precision": precision} | ({} if steps is None else {"max_steps": steps})
    size = None if chunks == 1 else physical(chunks, world.size, expected)
    try:
        _, trainer = world.fit(
            plan, *callbacks, module=module, trainer=chosen, strategy_kind=strategy, noise_mode=mode,
            physical_batch_size=size, **options,
        )  # fmt: skip
    except InterruptedError:
        return {"crashed": True, "released": recorder.digests}
    run: PrivateStrategy = trainer.strategy
    assert run.chunks == chunks and run.world_size == world.size
    return {
        "weights": weights(module).tolist(),
        "largest": max(run.mechanism.sensitivities().values()),
        "step": trainer.global_step,
        "branches": run.branches.count,
        "spent": run.branches.spent(trainer.global_step),
        "limit": run.branches.limit(),
        "secret": hashlib.sha256(run._secret).hexdigest(),
        "released": recorder.digests,
        "held": sum(v.numel() for own in trainer.optimizers[0].state.values() for v in own.values()),
    }


class Released(Callback):
    """Step -> digest of what the optimizer was given."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        flat = torch.cat([p.grad.flatten() for p in pl_module.parameters() if p.grad is not None])
        self.digests[str(trainer.global_step)] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def overlapped(
    world: World, overlap: bool = True, bucket: int = 1, loop: bool = False, noise: float = 1.0, repeats: bool = False,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Weights where bits do not repeat, and the numbers of gradients that were taken when each sum began."""
    taken, begun = [0], list[tuple[int, int]]()
    true_begin, true_take = PrivateSteps._begin_all_reduce, Overlap._take

    def begin(strategy: Any, total: Tensor) -> Any:
        begun.append((total.numel(), taken[0]))
        return true_begin(strategy, total)

    def take(own: Any, number: int, parameter: nn.Parameter) -> None:
        taken[0] += 1
        true_take(own, number, parameter)
        assert parameter.grad is None, "a later hook would find a gradient without noise"

    with contextlib.ExitStack() as patches:
        for module in (context, private_steps):
            patches.enter_context(patch.object(module, "can_repeat", lambda _: repeats))
        patches.enter_context(patch("os.urandom", bytes))  # a part of the context, on which the noise depends
        patches.enter_context(patch.object(PrivateSteps, "_begin_all_reduce", begin))
        patches.enter_context(patch.object(Overlap, "_take", take))
        patches.enter_context(patch.object(overlap_module, "BUCKET", bucket))
        if not overlap:
            patches.enter_context(patch.object(Mechanism, "may_overlap", False))
        found = loop_weights(world, noise) if loop else final_weights(world, noise=noise, **options)
    return found | {"begun": begun, "taken": taken[0]}


# ---- the sample


class Ids(Callback):
    """The rows of every micro-batch, by step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[int]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((trainer.global_step, batch[2].tolist()))


def sample(world: World, expected: float, chunks: int, mutant: str = "") -> dict[str, Any]:
    """Which rows this rank has seen in every micro-batch, and the exact global samples."""
    plan, ids = make_plan(expected_batch_size=expected), Ids()
    kind = rank_mutants.fixed_chunks(rank_mutants.STRATEGIES[mutant], chunks)
    _, trainer = world.fit(plan, ids, strategy_kind=kind)
    secret = trainer.strategy._secret
    exact = [poisson_sample(secret, step, 60, plan.sample_rate).tolist() for step in range(plan.steps)]
    return {"rows": ids.rows, "exact": exact, "step": trainer.global_step, "fixed": secret == SECRET}


# ---- noise


def noise(
    world: World, path: str, mode: str = "distributed", chunks: int = 1, mutant: str = "", seed: int = 0,
    expected: int = 20,
) -> Any:  # fmt: skip
    """Write what this rank adds and what is released, minus the same without noise, at weights that never change."""
    runs = [_recorded(world, sigma, mode, chunks, mutant, seed, expected) for sigma in (0.0, 1.0)]
    (plain, _), (noisy, mechanism) = runs
    assert isinstance(mechanism, Mechanism)
    size = plain[1][0].numel()
    own = [b[:size] - a[:size] for a, b in zip(plain[0], noisy[0], strict=True)]
    groups = mechanism.certificate.groups
    np.savez(
        f"{path}.{world.rank}.npz",
        own=torch.stack(own).numpy() if own else np.zeros((0, size)),
        released=torch.stack([b - a for a, b in zip(plain[1], noisy[1], strict=True)]).numpy(),
        sizes=[group.numel for group in groups],
        deviations=[mechanism.deviations()[group.name] for group in groups],
    )
    return {"steps": len(noisy[1])}


def _recorded(world: World, sigma: float, mode: str, chunks: int, mutant: str, seed: int, expected: int) -> Any:
    plan = make_plan(noise_multiplier=sigma, steps=6, expected_batch_size=expected)
    torch.manual_seed(0)
    module = make_module(rate=0.0, network=nn.Sequential(nn.Linear(6, 1000), MaxMin(), nn.Linear(1000, 7)))
    size = None if chunks == 1 else physical(chunks, world.size, expected)
    kind = rank_mutants.recording(rank_mutants.STRATEGIES[mutant])
    sums = Sums(plan.expected_batch_size)
    _, trainer = world.fit(
        plan, sums, module=module, strategy_kind=kind, noise_mode=mode, physical_batch_size=size,
        fixed_secret=bytes([seed]) + SECRET[1:], trainer=DOUBLE,
    )  # fmt: skip
    strategy = trainer.strategy
    return (strategy.sent, sums.released), strategy.mechanism


class Sums(Callback):
    """The released sum of every step, in the mechanism's order of parameters."""

    def __init__(self, divisor: float) -> None:
        self._divisor = divisor
        self.released: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = dict(pl_module.network.named_parameters())
        groups = trainer.strategy.mechanism.certificate.groups
        parameters = [named[n] for group in groups for n in group.parameters]
        released = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.double().flatten() for gradient in released])
        if trainer.strategy.mechanism.owners:  # each rank has its share alone
            torch.distributed.all_reduce(flat)
        self.released.append(flat * self._divisor)


# ---- agreement of the ranks


class Digests(Callback):
    """The digests and the parameters of every step, as this rank has them."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.states: list[str] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.digests.append(trainer.strategy.mechanism.digest.hex())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.states.append(_hash(pl_module))


def _hash(module: nn.Module) -> str:
    tensors = [*module.parameters(), *module.buffers()]
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def agreement(
    world: World, mode: str, scaling: str = "joint", projection: str = "clip", precision: str = "32-true"
) -> Any:
    """Ranks that start from other weights and other buffers, without a fixed secret."""
    torch.manual_seed(world.rank)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 2), MaxMin(), nn.Conv2d(4, 4, (1, 2)), MaxMin(), nn.Flatten(), nn.Linear(4, 3)
    )  # fmt: skip
    network[0].register_buffer("extra", torch.full((3,), float(world.rank)))
    network.to(memory_format=torch.channels_last)
    assert not network[2].weight.is_contiguous()
    plan = make_plan(
        **SCALINGS[scaling] | ({"radius_noise_multiplier": 5.0} if scaling == "radius" else {}), projection=projection
    )
    module = make_module(rate=0.7, network=network)
    before, digests = _hash(module), Digests()
    _, trainer = world.fit(
        plan, digests, module=module, data=Pictures(), noise_mode=mode, fixed_secret=None, checksum_every_n_steps=1,
        trainer={"precision": precision},
    )  # fmt: skip
    strategy = trainer.strategy
    return {
        "before": before, "states": digests.states, "digests": digests.digests, "keys": strategy.dropout_key(0),
        "secret": hashlib.sha256(strategy._secret).hexdigest(), "buffer": network[0].extra.tolist(),
        "radii": strategy.mechanism.state(), "deviations": strategy.mechanism.deviations(),
    }  # fmt: skip


class Pictures(Blobs):
    """The same rows as images of 2 x 3."""

    input_shape = (1, 2, 3)

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super()._rows(count, seed)
        return x.reshape(-1, 1, 2, 3), y


def metrics(world: World) -> dict[str, float]:
    """Held-out metrics, in training and after it, and the training loss logged on request."""
    module = make_module(log_nonprivate=True)
    _, trainer = world.fit(
        make_plan(noise_multiplier=0.0), module=module,
        trainer=DOUBLE | {"limit_val_batches": None, "check_val_every_n_epoch": 1},
    )  # fmt: skip
    logged = {f"fit {k}": float(v) for k, v in trainer.callback_metrics.items()}
    after = trainer.validate(module, datamodule=Blobs(), verbose=False)[0]
    return logged | {k: float(v) for k, v in after.items()}


def mixed(world: World, dtype: str = "bf16-mixed") -> dict[str, Any]:
    """One step in bfloat16: its certificate's type, and whether the sum of gradients kept more bits than a bfloat16."""
    sums, plan = Sums(20), make_plan(noise_multiplier=0.0, steps=3)
    module, trainer = world.fit(plan, sums, trainer={"precision": dtype})
    total = sums.released[0].float()
    return {
        "compute": str(trainer.strategy.mechanism._certifier._compute_dtype),
        "rounded": float((total == total.bfloat16().float()).double().mean()),
        "first": total.tolist(),
        "weights": weights(module).tolist(),
        "parameters": str(next(module.parameters()).dtype),
    }


# ---- files


def files(world: World, folder: str) -> list[str]:
    """The files that this rank opens for writing during a complete run with report, checkpoints and records."""
    opened: list[str] = []
    root = Path(folder)

    def watch(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | Path):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & 3 and str(arguments[0]).startswith(folder):
                opened.append(str(arguments[0]))
        elif event in ("os.mkdir", "os.rename", "os.remove") and str(arguments[0]).startswith(folder):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    run = RunDirectory(root)
    if world.rank == 0:
        root.mkdir()
    plan = make_plan(dataset_size=60)
    keeper = ResumeCheckpoint(root / "checkpoints", every_n_steps=4)
    callbacks = [PrivacyAccountant(), keeper, PrivacyReport(root), RunFiles(run)]
    if world.rank == 0:
        run.claim(plan.digest().hex(), plan.to_dict(), "")
    world.fit(plan, *callbacks, directory=root, trainer={"limit_val_batches": None})
    return sorted(set(opened))


# ---- failures


class Absent(Blobs):
    def load_train(self) -> tuple[Tensor, Tensor]:
        raise FileNotFoundError("blobs.csv is not there. HINT: copy it to every node.")


class Changed(Blobs):
    def load_train(self) -> tuple[Tensor, Tensor]:
        x, y = super().load_train()
        x[17, 2] += 1e-6
        return x, y


class Drift(Callback):
    """Changes a weight on one rank, by one bit."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 4 and trainer.global_rank == self.rank:
            with torch.no_grad():
                weight = next(pl_module.parameters())
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


def refusals(world: World, folder: str) -> dict[str, str]:
    """Set-ups that one rank alone finds wrong: what every rank says, and in the end a run that works."""
    from lipdp_lightning.privacy.branches import Branches

    said: dict[str, str] = {}
    last = world.rank == world.size - 1

    def attempt(name: str, *callbacks: Callback, plan: Any = None, **options: Any) -> None:
        started = time.monotonic()
        try:
            world.fit(plan or make_plan(), *callbacks, **options)
            said[name] = "trained"
        except ValueError as error:
            said[name] = str(error)
        assert time.monotonic() - started < 20, f"{name}: a rank was waited for"

    ledger = Path(folder) / "ledger.json"
    if world.rank == 0:
        ledger.parent.mkdir()
        ledger.write_text('{"plan": "another", "branches": []}')
    attempt("data absent on the last rank", data=Absent() if last else Blobs())
    attempt("data absent on rank 0", data=Blobs() if world.rank else Absent())
    attempt("a row changed on the last rank", data=Changed() if last else Blobs())
    attempt("another plan on the last rank", plan=make_plan(delta=2e-3 if last else 1e-3))
    attempt("another rate on the last rank", module=make_module(rate=0.2 if last else 0.1))
    attempt("another network on the last rank", module=dropout_module() if last else None)
    attempt("a ledger of another plan", branches=Branches(ledger if world.rank == 0 else None))
    attempt("batch_max", plan=make_plan(scaling="batch_max"))
    attempt("drift", Drift(world.size - 1), checksum_every_n_steps=2)
    attempt("drift unseen", Drift(world.size - 1), checksum_every_n_steps=None)
    attempt("nothing wrong")
    kept = Path(folder) / "checkpoints"
    attempt("stopped", ResumeCheckpoint(kept), trainer={"max_steps": 5})
    attempt("a checkpoint that only rank 0 sees", checkpoint=None if world.rank else kept / "last.ckpt")
    return said


def late_failure(world: World, folder: str) -> None:
    """Rank 0 cannot keep its record in the middle of the run."""
    directory = Path(folder)
    directory.mkdir(exist_ok=True)

    class Full(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_rank == 0 and trainer.global_step == 5:
                raise OSError("no space left on device")

    world.fit(make_plan(), Full(), directory=directory)


class Slow(Callback):
    """Marks a step in a file, and takes its time."""

    def __init__(self, directory: Path, step: int) -> None:
        self.mark, self.step = directory / "reached", step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.is_global_zero:
            self.mark.touch()
        if trainer.global_step >= self.step:
            time.sleep(0.1)


def killed(
    world: World, folder: str, slow: int | None = None, precision: str = "32-true", chunks: int = 1
) -> dict[str, Any]:
    """A run of 40 steps that keeps a checkpoint every 4; with ``slow`` it waits at that step to be killed."""
    directory = Path(folder)
    directory.mkdir(exist_ok=True)
    last = directory / "checkpoints" / "last.ckpt"
    callbacks: list[Callback] = [ResumeCheckpoint(directory / "checkpoints", every_n_steps=4)]
    callbacks += [] if slow is None else [Slow(directory, slow)]
    module, trainer = world.fit(
        make_plan(steps=40), *callbacks, directory=directory, checkpoint=last if last.exists() else None,
        physical_batch_size=None if chunks == 1 else physical(chunks, world.size, 20), trainer={"precision": precision},
    )  # fmt: skip
    branches = trainer.strategy.branches
    return {
        "weights": weights(module).tolist(), "step": trainer.global_step, "branches": branches.count,
        "spent": branches.spent(trainer.global_step),
    }  # fmt: skip


class LateChange(Blobs):
    """Rows that one rank alone changes, in a way that is seen in its sum only."""

    changed = False

    def transform_batch(self, x: Tensor) -> Tensor:
        x = super().transform_batch(x)
        return x * 1.001 if self.changed else x


def refused_by_the_record(world: World, folder: str, changed_on: int) -> str:
    """The words of this rank where a step that is on record would be released again from another sum."""
    last, data = Path(folder) / "checkpoints" / "last.ckpt", LateChange()
    keeper = ResumeCheckpoint(last.parent, every_n_steps=3)
    with contextlib.suppress(InterruptedError):
        world.fit(make_plan(), keeper, Crash(5), data=LateChange(), directory=Path(folder))
    data.changed = world.rank == changed_on
    try:
        world.fit(make_plan(), ResumeCheckpoint(last.parent), data=data, directory=Path(folder), checkpoint=last)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def replayed(world: World, folder: str, mode: str, changed_on: int | None = None, mutant: str = "") -> list[float]:
    """The release of step 3, which a checkpoint of a run without records repeats after a crash."""
    last = Path(folder) / "last.ckpt"
    released, data = Sums(20), LateChange()
    data.changed = world.rank == changed_on
    if mutant:
        Mechanism._contribution = lambda *of_sums: PendingDigest([b"any sum"])  # type: ignore[method-assign]
    continued = last.exists()
    with contextlib.suppress(InterruptedError):
        world.fit(
            make_plan(steps=40), released, Crash(5), ResumeCheckpoint(Path(folder), every_n_steps=3), data=data,
            checkpoint=last if continued else None, noise_mode=mode, fixed_secret=SECRET,
        )  # fmt: skip
    return released.released[0 if continued else 3].tolist()


def sharded(world: World) -> dict[str, str]:
    """Strategies other than the private one."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from small_runs import make_trainer

    said = {}
    for strategy in (DDPStrategy(), ModelParallelStrategy(data_parallel_size=world.size, tensor_parallel_size=1)):
        trainer = make_trainer(strategy, **world.trainer_options())
        try:
            trainer.fit(make_module(), datamodule=Blobs())
        except ValueError as error:
            said[type(strategy).__name__] = str(error)
    return said


# ---- views, averages, standardised kernels


class RowKeyedViews(Views):
    """Broken on purpose: views are drawn by the place of a row in its micro-batch."""

    def expand(self, x: Tensor, y: Tensor, ids: Tensor, key: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().expand(x, y, torch.arange(len(ids)), key)


def split_an_example(world: World, gathered: Any) -> None:
    """Broken on purpose: on the second of two ranks, exact factors are those of single views."""
    if world.rank == 1:
        Contribution.norms = lambda self, views: gathered(self, 1).unflatten(0, (-1, views)).amax(1)  # type: ignore


def kit(
    world: World,
    chunks: int = 1,
    noise: float = 0.0,
    row_keyed: bool = False,
    scaling: str = "joint",
    single_views: bool = False,
) -> dict[str, Any]:
    """Weights and their average after training with everything of the kit that ranks could disagree on."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 2), MaxMin(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8, 3))
    plan = make_plan(noise_multiplier=noise, standardize="mean_and_variance", **SCALINGS[scaling])
    if single_views:
        split_an_example(world, Contribution.norms)
    multiplicity = AugmentationMultiplicity(4, [ShiftedCrop(1, "zeros"), HorizontalFlip()])
    if row_keyed:
        multiplicity.views = RowKeyedViews(4, multiplicity.views.augmentations)
    averaging = ParameterAveraging()
    module, trainer = world.fit(
        plan, multiplicity, averaging, module=make_module(network=network), data=Pictures(), trainer=DOUBLE,
        physical_batch_size=None if chunks == 1 else 4 * physical(chunks, world.size, 20),
    )  # fmt: skip
    assert trainer.strategy.chunks == chunks
    average = torch.cat([values.flatten() for values in averaging.weights().values()])
    kernel = network[0].weight.detach().flatten(1)
    return {
        "weights": weights(module).tolist(), "average": average.tolist(), "mean": float(kernel.mean(1).abs().max()),
        "largest": max(trainer.strategy.mechanism.sensitivities().values()), "certificate": averaging.certificate(),
    }  # fmt: skip


# ---- statistics released before the first step


def statistics(world: World, folder: str = "") -> dict[str, Any]:
    """What each rank uses, and whether it looked at the rows for a release."""
    from statistic_runs import mean_session

    directory = Path(folder) if folder else None
    _, trainer, data = mean_session(directory, trainer=world.trainer_options(), fixed_secret=None)
    used = {label: value.tolist() for label, value in data.used.items()}
    return {"used": used, "looks": data.looks, "step": trainer.global_step}


# ---- calibration on held-out rows


class Uneven(Blobs):
    """41 validation rows, so that two ranks count 21 and 20."""

    def load_validation(self) -> tuple[Tensor, Tensor]:
        return self._rows(41, 2)


def calibration(world: World) -> dict[str, Any]:
    """Sums of very unequal shares of fixed rows, and the results of a run whose ranks evaluate together."""
    from lipdp_lightning.calibration import CalibrationSums
    from lipdp_lightning.callbacks import CalibrationMetrics, TemperatureScaling

    callback, scaling = CalibrationMetrics(directory=""), TemperatureScaling(public_data=Uneven())
    module, trainer = world.fit(
        make_plan(noise_multiplier=0.0), callback, scaling, data=Uneven(), trainer=DOUBLE | {"limit_val_batches": 1.0}
    )
    seen = callback.results["validation"]
    (after,) = trainer.validate(module, datamodule=Uneven(), verbose=False)
    generator = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(500, 3, generator=generator), torch.randint(3, (500,), generator=generator)
    share = slice(None) if world.size == 1 else (slice(None, 3), slice(3, None))[world.rank]
    metric = CalibrationSums(3)
    metric.update(logits[share], labels[share])
    sums = {name: value.tolist() for name, value in metric.compute().items()}
    return {"sums": sums, "seen": seen, "logged": after, "temperature": module.output_temperature}


# ---- neighbouring data sets


def neighbours(world: World, folder: str, broken: str = "", mode: str = "distributed", **plan: Any) -> dict[str, Any]:
    """What a run on a data set and one without a row, given what the first released, differ in as this rank sees it."""

    from broken_runs import BROKEN
    from neighbouring_runs import compared, pair_plan

    chosen = BROKEN.get(broken)
    plan |= {} if chosen is None else chosen.plan
    options = {} if chosen is None else dict(chosen.options)
    options |= {"noise_mode": mode, "trainer": world.trainer_options()}
    with patch("lipdp_lightning.training.model_checks.FIXED_METHODS", ()):  # which would refuse some at once
        found = compared(Path(folder), pair_plan(**plan), **options)
    return {"faults": found.faults, "moved": found.moved, "says": "" if chosen is None else chosen.says}


# ---- a loop of torch


def loop_weights(world: World, noise: float = 0.0, mode: str = "distributed", crash: int | None = None,
                 folder: str = "") -> dict[str, Any]:  # fmt: skip
    """Weights after a plain loop over an Engine's steps."""
    if world.size > 1:
        torch.distributed.init_process_group("gloo", rank=world.rank, world_size=world.size)
    try:
        network = make_network(seed=world.rank)  # rank 0's weights are taken
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = make_plan(noise_multiplier=noise, max_norm=1.0)
            engine = Engine(
                network, plan, Blobs(), loss="cross_entropy", input_bound=1.0, precision="64-true", noise_mode=mode,
                fixed_secret=SECRET, run_dir=folder or None, save_every_n_steps=3,
            )  # fmt: skip
        engine.keep(optimizer=optimizer)
        for step in engine:
            optimizer.step()
            if step.number == crash:
                return {"crashed": True}
        engine.close()
        assert engine.mechanism is not None
        return {"weights": weights(network).tolist(), "largest": max(engine.mechanism.sensitivities().values()),
                "world": engine.world_size}  # fmt: skip
    finally:
        if world.size > 1:
            torch.distributed.destroy_process_group()


# ---- a project


def project_weights(
    world: World, scaling: str = "joint", noise: float = 0.0, mode: str = "distributed", crash: int | None = None,
    folder: str = "", missing_on: int | None = None, steps: int = 12, hidden: int = 8,
) -> dict[str, Any]:  # fmt: skip
    """Weights of an ordinary project that privatize() has made private, after its own Trainer's fit."""
    from small_projects import Project, all_weights, fit, held_out, loader, privatize, rows

    plan = make_plan(**SCALINGS[scaling], noise_multiplier=noise, max_norm=None, steps=steps)
    x, y = rows()
    data = loader(x[1:], y[1:]) if world.rank == missing_on else loader()
    project = Project(hidden)
    private = privatize(project, data, plan=plan, input_bound=1.0, noise_mode=mode, run_dir=folder or None)
    callbacks = [] if crash is None else [Crash(crash)]
    try:
        trainer = fit(private, *callbacks, held_out=held_out(), **world.trainer_options(), precision="64-true")
    except InterruptedError:
        return {"crashed": True}
    run = trainer.strategy
    assert isinstance(run, PrivateStrategy) and run.mechanism is not None
    return {"weights": all_weights(private.module).tolist(), "step": trainer.global_step, "world": run.world_size,
            "largest": max(run.mechanism.sensitivities().values())}  # fmt: skip


def project_from_epochs_end(world: World, folder: str, step: int | None = None) -> dict[str, Any]:
    """Weights of a project that saves at the end of each epoch, or continues from such a checkpoint after `step`."""
    from small_projects import all_weights, fit, held_out, privatize

    keeper = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
    private = privatize(plan=make_plan(**SCALINGS["exact"], max_norm=None), physical_batch_size=5)
    options = world.trainer_options() | {"enable_checkpointing": step is None}
    trainer = fit(
        private, *([keeper] if step is None else []), held_out=held_out(), **options,
        checkpoint=None if step is None else Path(folder) / f"step={step}.ckpt",
    )  # fmt: skip
    return {"weights": all_weights(private.module).tolist(), "step": trainer.global_step}
