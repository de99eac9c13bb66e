"""The processes of a run: DDP without its reducer, agreement among ranks, and errors that all ranks must raise."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from .launcher import Launcher

Result = TypeVar("Result")
# messages of gloo, NCCL and the store of torch.distributed if the other side of a connection is gone
_GONE = re.compile(
    r"connection (closed|reset|refused|was likely closed)|closed by peer|broken pipe|gloo|nccl|tcpstore|socket|"
    r"timed out|remote process",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, seen from one of them; a single process sends nothing."""

    rank: int
    world_size: int
    device: torch.device

    def gather(self, own: bytes) -> list[bytes]:
        """Returns every rank's bytes, in rank order; all must be of one length."""
        if self.world_size == 1:
            return [own]
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self.device)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(received, sent)
        return [bytes(tensor.tolist()) for tensor in received]

    def gather_objects(self, own: Any) -> list[Any]:
        """Returns every rank's object, in rank order."""
        if self.world_size == 1:
            return [own]
        received: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(received, own)
        return received

    def agree(self, own: bytes) -> bytes:
        """Returns one digest of all ranks' bytes, the same on every rank."""
        return own if self.world_size == 1 else hashlib.sha256(b"".join(self.gather(own))).digest()

    def voted(self, *votes: bool) -> list[bool]:
        """Returns for each vote whether any rank has cast it; all ranks must call this at the same point."""
        if self.world_size == 1:
            return list(votes)
        counts = torch.tensor([int(vote) for vote in votes], device=self.device)
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX)
        return [bool(count) for count in counts.tolist()]

    def from_first(self, action: Callable[[], Result]) -> Result:
        """Returns the result of ``action`` on rank 0; if it fails there, every rank raises instead of waiting."""
        result: Any = None
        problem: Exception | None = None
        if self.rank == 0:
            try:
                result = action()
            except Exception as error:
                if self.world_size == 1:
                    raise
                problem = error
        if self.world_size == 1:
            return result
        sent = [(result, None if problem is None else str(problem))]
        torch.distributed.broadcast_object_list(sent, src=0)
        if problem is not None:
            raise problem
        received, message = sent[0]
        if message is not None:
            raise ValueError(f"rank 0 could not go on: {message}")
        return result if self.rank == 0 else received

    def first_does(self, action: Callable[[], None]) -> None:
        """Lets rank 0 act, at the cost of one small all-reduce; if the action fails, every rank raises."""
        problem: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                if self.world_size == 1:
                    raise
                problem = error
        if self.voted(problem is not None)[0]:
            self.raise_together(problem)

    def raise_together(self, problem: Exception | None) -> None:
        """Raises an error on every rank if any of them has a problem."""
        if self.world_size == 1:
            if problem is not None:
                raise problem
            return
        found = self.gather_objects(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        for rank, message in enumerate(found):
            if message is not None:
                raise ValueError(f"rank {rank} cannot go on: {message}")

    def check_equal(self, own: Mapping[str, bytes]) -> None:
        """Refuses ranks whose digests of the named values differ."""
        everyone = self.gather_objects(dict(own))
        for name, value in everyone[0].items():
            others = [rank for rank, digests in enumerate(everyone) if digests[name] != value]
            if others:
                raise ValueError(
                    f"rank {_listed(others)} and rank 0 differ in {name}; their sums would not be those of one "
                    "mechanism. HINT: start every process with the same configuration, data files and software."
                )

    def check_in_step(self, step: int, checksum: bytes) -> None:
        """Refuses to continue if the weights or bounds of ranks are no longer the same."""
        everyone = self.gather(checksum)
        others = [rank for rank, found in enumerate(everyone) if found != everyone[0]]
        if others:
            raise ValueError(
                f"before step {step} the weights, buffers or certified norms of rank {_listed(others)} are not "
                "those of rank 0: the ranks have drifted apart, and their sums no longer belong to one model. "
                "HINT: look for a callback or a layer that changes weights on some ranks only; use one kind of "
                "processor and accelerator, and torch.use_deterministic_algorithms(True). The last checkpoint holds "
                "rank 0's weights."
            )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def lost_process(error: BaseException) -> str | None:
    """Returns the message of a collective operation that has lost a process, in one line; None for another error."""
    distributed = isinstance(error, torch.distributed.DistError) if hasattr(torch.distributed, "DistError") else False
    text = " ".join(str(error).split())
    if not distributed and not (type(error) is RuntimeError and _GONE.search(text)):
        return None
    return text[:200]


class ProcessStrategy(DDPStrategy):
    """Starts and connects processes as DDP does, and leaves gradients to the one sum of a private step."""

    @property
    def connected(self) -> lightning.LightningModule:
        """The module that is trained or evaluated."""
        assert self.lightning_module is not None, "the Strategy has no module yet"
        return self.lightning_module

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return Ranks(self.global_rank, self.world_size, self.root_device)

    def _configure_launcher(self) -> None:
        """Starts no processes for a run of one, so that notebooks and interactive sessions can train."""
        environment = self.cluster_environment
        started_outside = environment is not None and environment.creates_processes_externally
        if started_outside or self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()
            if environment is not None and self._start_method == "popen":
                self._launcher = Launcher(environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Connects the processes; a single one needs no process group, with its port and threads."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup_evaluation(self, trainer: lightning.Trainer) -> None:
        """Runs the part of setup that an evaluation needs."""
        if self.world_size > 1:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Copies rank 0's weights to all ranks, without a reducer: gradients are summed once, with their noise."""
        for tensor in (*self.connected.parameters(), *self.connected.buffers()):
            self._from_first(tensor.data)

    def _from_first(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            dense = tensor.contiguous()  # collectives need contiguous memory, unlike channels_last
            torch.distributed.broadcast(dense, src=0)
            tensor.copy_(dense)

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns an optimizer's state with the parts of all ranks, on rank 0; the others keep their own part."""
        parts: list[Any] = [None] * self.world_size
        torch.distributed.gather_object(state["state"], parts if self.is_global_zero else None)
        merged = {number: own for part in parts for number, own in (part or {}).items()}
        return state | {"state": merged} if self.is_global_zero else state
