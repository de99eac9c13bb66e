"""DDP without its reducer, and without a process group where a process is alone."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from .ranks import Ranks


class ProcessStrategy(DDPStrategy):
    """Starts and connects processes as DDP does; gradients are left to the one sum of a private step."""

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.global_rank, self.world_size, self.root_device)

    def setup_distributed(self) -> None:
        """A process that is alone needs no process group, nor the port and the threads that come with one."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    def setup_evaluation(self, trainer: lightning.Trainer) -> None:
        """What setup does where nothing is trained."""
        if self.world_size > 1:
            super().setup(trainer)
            return
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """No reducer: gradients meet once, after noise. Rank 0's initial weights go to all."""
        for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
            self._from_first(tensor.data)

    def _from_first(self, tensor: Tensor) -> None:
        if self.world_size > 1:
            dense = tensor.contiguous()  # channels_last is not, and a collective wants it
            torch.distributed.broadcast(dense, src=0)
            tensor.copy_(dense)

    def _all_reduce(self, total: Tensor) -> None:
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
