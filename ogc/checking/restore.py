"""What a step changes, as it was before, to be put back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..torch_state.compare import identical
from ..torch_state.no_trace import untouched
from ..torch_state.random_state import cuda_devices
from .inputs import Arguments


class Snapshot:
    """The parameters, their gradients and the buffers of some models as they are now, copied once for many steps."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.models = models
        self.parameters = _copies(parameter for model in models for parameter in model.parameters())
        self.buffers = _copies(buffer for model in models for buffer in model.buffers())
        gradients = (parameter.grad for parameter, _ in self.parameters.values())
        self.gradients = _copies(g for g in gradients if g is not None and g.layout == torch.strided)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy that was made, where the tensor is as it was; else a new one."""
        known = self.parameters.get(id(tensor)) or self.buffers.get(id(tensor))
        if known and known[0] is tensor and identical(*known):
            return known[1]
        return tensor.detach().clone()

    @contextmanager
    def restored(self, call: Arguments) -> Iterator[None]:
        """Whatever runs inside, the models and all random states, also those in ``call``, are afterwards as before."""
        with untouched(*self.models, given=call):
            try:
                yield
            finally:
                self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        for parameter, copy in self.parameters.values():
            if not identical(parameter, copy):
                parameter.copy_(copy)  # seen by version counters, as what moved it was
        for gradient, copy in self.gradients.values():
            if not identical(gradient, copy):
                gradient.data.copy_(copy)


def _copies(tensors: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with a copy of it, by its id."""
    return {key: (tensor, tensor.detach().clone()) for key, tensor in {id(t): t for t in tensors}.items()}


def set_seed(seed: int, generators: Iterable[torch.Generator]) -> None:
    """Seed these, and the random states of torch, of Python and of numpy."""
    # Not torch.manual_seed: where CUDA is not in use yet, it would be seeded when that begins.
    torch.default_generator.manual_seed(seed)
    if cuda_devices():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators:
        generator.manual_seed(seed)
