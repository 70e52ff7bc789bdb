"""Autocast as CUDA has it, for forwards on meta tensors, of which PyTorch casts nothing.

The same call is made on fake tensors on CUDA, up to the first operator that is no cast: that shows what PyTorch casts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from ...program.autocast import autocast_to
from ...program.program import tensor_leaves, without_autocast
from ...program.structures import autocast_state
from ...torch_state.dispatch import Call, calls_are, in_mode, unseen
from ...torch_state.private import FakeTensorMode, OpOverload, TorchDispatchMode, has_kernel

aten = torch.ops.aten

_BEFORE = (aten.to.dtype, aten._to_copy.default, torch.ops.prim.device.default)
"""What autocast calls before the operator."""

_OF_CUDNN = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""Recurrent layers are cast whole. Source: aten/src/ATen/cudnn/AutocastRNN.cpp."""

_TENSOR: Any = object()
"""Stands where a tensor was."""

_casts: dict[Any, _Cast] = {}


def autocast_of_cuda() -> AbstractContextManager[None]:
    """Inside, on this thread, forwards on meta tensors are cast as on CUDA where autocast is on, be it for the CPU."""
    return calls_are(CallOnCuda)


class CallOnCuda(Call):
    """A call on meta tensors, cast as on CUDA."""

    @property
    def is_cast(self) -> bool:
        has_rule = self.operator in _OF_CUDNN or has_kernel(self.operator.name(), "AutocastCUDA")
        tensors = tensor_leaves(self.args, self.kwargs)
        return has_rule and bool(autocast_state()) and any(tensor.is_floating_point() for tensor in tensors)

    def run(self) -> Any:
        with unseen(), in_mode(), without_autocast():
            return self.operator(*self.args, **self.kwargs)

    def open(self) -> Any:
        if not self.is_cast or self.takes_numbers:
            return super().open()
        ((_, dtype), *_) = autocast_state()
        cast, given = _cast_of(self, dtype), tensor_leaves(self.args, self.kwargs)
        with without_autocast():  # as inside of autocast's own rules
            wanted = zip(given, cast.dtypes, strict=True)
            tensors = iter([t if t.dtype == dtype else aten.to.dtype(t, dtype) for t, dtype in wanted])
            args, kwargs = map_aggregate(
                (cast.args, cast.kwargs), lambda leaf: next(tensors) if leaf is _TENSOR else leaf
            )
            return cast.operator(*args, **kwargs)


class _Cast(NamedTuple):
    """The call that autocast makes of another: without its tensors, but with their types in order."""

    operator: OpOverload
    args: Any
    kwargs: Any
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(operator: OpOverload, args: Any, kwargs: Any) -> _Cast:
        dtypes = tuple(tensor.dtype for tensor in tensor_leaves(args, kwargs))
        rest = map_aggregate((args, kwargs), lambda leaf: _TENSOR if isinstance(leaf, torch.Tensor) else leaf)
        return _Cast(operator, *rest, dtypes)


def _cast_of(call: Call, dtype: torch.dtype) -> _Cast:
    """What autocast to ``dtype`` makes of a call on CUDA."""
    known = _Cast.of(*call[:3])
    if call.operator in _OF_CUDNN:
        return known._replace(dtypes=tuple(dtype if given.is_floating_point else given for given in known.dtypes))
    dims = tuple(tensor.dim() for tensor in tensor_leaves(call.args, call.kwargs))
    key = call.operator, dtype, dims, known.dtypes, repr(known[1:3])
    if key not in _casts:
        _casts[key] = _asked(call, dtype)
    return _casts[key]


class _Reached(Exception):
    """The call after the casts."""

    def __init__(self, cast: _Cast) -> None:
        super().__init__(cast)
        self.cast = cast


class _Asking(TorchDispatchMode):
    """Stops at the first call that is not a cast."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _BEFORE:
            raise _Reached(_Cast.of(function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def _asked(call: Call, dtype: torch.dtype) -> _Cast:
    def fake(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        return torch.empty((1,) * leaf.dim(), dtype=leaf.dtype, device="cuda") if is_tensor else leaf

    try:
        with unseen(), torch.inference_mode(), FakeTensorMode():  # in inference mode no call is taken apart
            args, kwargs = map_aggregate((call.args, call.kwargs), fake)
            with autocast_to("cuda", dtype), _Asking():
                call.operator(*args, **kwargs)
    except _Reached as reached:
        return reached.cast
    raise AssertionError(f"autocast makes no call of {call.operator}")
