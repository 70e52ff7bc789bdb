"""An operator that runs under ``torch.no_grad()``, as it did in the forward that was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..torch_state.private import OpOverload, schema_of


@dataclass(frozen=True)
class WithoutGrad:
    """Stands for ``operator`` in a program: the same kernels, as arguments still say that they require grad."""

    operator: OpOverload

    @property
    def __name__(self) -> str:
        return str(self.operator.__name__)

    @property
    def overloadpacket(self) -> Any:
        return self.operator.overloadpacket

    @property
    def _schema(self) -> Any:
        return schema_of(self.operator)

    @property
    def tags(self) -> list[torch.Tag]:
        return self.operator.tags

    def __str__(self) -> str:
        return str(self.operator)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            return self.operator(*args, **keywords)
