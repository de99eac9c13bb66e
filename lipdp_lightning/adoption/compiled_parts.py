"""Parts of a project that are wrapped by torch.compile, which are unwrapped and compiled in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning
from torch import nn
from torch._dynamo import OptimizedModule

from .faithful_copy import independent_copy


@dataclass(frozen=True)
class Uncompiled:
    """An independent copy of a project without the wrappers of torch.compile.

    A wrapper hides what is in it from the certificate, while a module that is compiled in place is found as it is.

    Attributes:
        project: The copy.
        whole: What compiles a function as the project as a whole was compiled; None if it was not.
        parts: The parts that were compiled, each with what compiles a function in the same way.
    """

    project: Any
    whole: Callable[[Any], Any] | None
    parts: tuple[tuple[nn.Module, Callable[[Any], Any]], ...]

    @classmethod
    def of(cls, project: Any) -> Uncompiled:
        """Copies a project, and takes off the wrappers in the copy."""
        whole = None
        if isinstance(project, OptimizedModule):
            whole, project = project.dynamo_ctx, project._orig_mod
        if not isinstance(project, lightning.LightningModule):
            return cls(project, whole, ())
        project, parts = independent_copy(project), []
        for parent in list(project.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, OptimizedModule):
                    setattr(parent, name, child._orig_mod)
                    parts.append((child._orig_mod, child.dynamo_ctx))
        return cls(project, whole, tuple(parts))

    def compile(self, network: nn.Module) -> None:
        """Compiles in place what was compiled before; of the project as a whole, the network."""
        chosen = [*self.parts] if self.whole is None else [(network, self.whole)]
        for part, compiled in chosen:
            part._compiled_call_impl = compiled(part._call_impl)  # what nn.Module.compile does
