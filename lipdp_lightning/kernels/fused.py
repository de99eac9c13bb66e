"""Runs a definition in torch as the kernels that torch compiles from it, where it works on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Fused:
    """A definition in torch's operations, which a GPU runs in one pass over memory, or in few.

    On other devices, and from then on where the compiler fails, the definition runs as it is written. Gradients do not
    flow through it: it is for the two directions of an ``autograd.Function``, each of which has a definition.

    Args:
        definition: A function whose first argument is a tensor.
    """

    def __init__(self, definition: Callable[..., Any]) -> None:
        self._definition = definition
        self._compiled: Any = None
        self._failed = False

    def __call__(self, x: Tensor, *more: Any) -> Any:
        if not x.is_cuda or self._failed:
            return self._definition(x, *more)
        try:
            if self._compiled is None:  # for all sizes at once: those of Poisson samples differ from step to step
                self._compiled = torch.compile(self._definition, dynamic=True, fullgraph=True)
            return self._compiled(x, *more)
        except Exception as error:
            found = self._definition(x, *more)  # raises if it was not the compiler that failed
            self._failed = True
            name, reason = getattr(self._definition, "__name__", "a definition"), " ".join(str(error).split())[:200]
            warnings.warn(
                f"torch.compile failed for {name} ({type(error).__name__}: {reason}); it runs as torch's own "
                "operations, with the same results and more passes over memory. HINT: run `lipdp doctor`.",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            return found
