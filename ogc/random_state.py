"""The states of torch's random generators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def random_states(devices: Iterable[torch.device]) -> tuple[torch.Tensor, ...]:
    """That of the CPU, then those of these CUDA devices."""
    return (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices))


def set_random_states(states: Sequence[torch.Tensor], devices: Iterable[torch.device]) -> None:
    """Put back what :func:`random_states` returned for the same devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.cuda.set_rng_state(state, device)


def same_states(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether nothing was drawn in between."""
    return all(map(torch.equal, before, after))


def cuda_devices() -> tuple[torch.device, ...]:
    """All there are, once CUDA is in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", index) for index in range(count))
