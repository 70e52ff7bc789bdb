"""Checks of a user's model and sample input before anything runs."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch

from ..errors import InputError, ParseError
from ..program.program import device_of_model
from ..program.structures import Call, InputSpec, autocast_state
from ..program.tensors import copies
from ..torch_state.forwards import MODE, is_compiled, what_is_around
from ..torch_state.ranks import gathered_by, is_spread
from .forward.contents import Contents, has_content, lacks_content, on_meta


def check_model(model: Any, may_lack_content: bool = False) -> None:
    """Raise InputError unless ``model`` is a module that can be optimized, or else planned without content."""
    if isinstance(model, type):
        raise InputError(f"model is the class {model.__name__}; pass an instance of it")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            'model is a torch.jit.ScriptModule; pass the eager module that it was made from, or give front_end="jit"'
        )
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        kind = type(model).__name__
        raise InputError(
            f"model is a {kind}; optimize the module in it, model.module, and put the result into a {kind}"
        )
    if is_compiled(model):
        raise InputError("model was compiled, and would run compiled instead of planned; pass it without torch.compile")
    sharded = {key for one in gathered_by(model) for key in one.dtypes}
    if name := next((name for name, parameter in model.named_parameters() if id(parameter) in sharded), None):
        raise InputError(
            f"parameter {name} is sharded, and is whole only while its unit of fully_shard runs: ogc.optimize(model) "
            "plans units then. Parse and estimate the model before fully_shard: ogc.estimate(model, sample, shards=)"
        )
    if torch.is_inference_mode_enabled():
        raise InputError("nothing can be trained under torch.inference_mode(); leave it first")
    if what_is_around() == MODE:
        raise InputError(f"{MODE}, and a plan made in it would do that ever after; leave it first")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(f"parameter {name} is not initialized; call the model once on an input before")
        if not has_content(parameter) and not may_lack_content:
            where = "is on the meta device, where it has" if parameter.is_meta else "is a fake tensor, which has"
            raise InputError(
                f"parameter {name} {where} no content; move the model with model.to_empty(device=...) and initialize "
                'it first, or plan it for study alone: ogc.parse(model, sample, device="cuda")'
            )


def call_arguments(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the call that a sample input stands for."""
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, tuple):
        return sample_input, {}
    if isinstance(sample_input, dict):
        if strange := [key for key in sample_input if not isinstance(key, str)]:
            raise InputError(f"the keys of a dict as sample_input must be names of arguments, not {strange[0]!r}")
        return (), sample_input
    if isinstance(sample_input, Call):
        return sample_input.args, sample_input.kwargs
    raise InputError(
        "sample_input must be a tensor, a tuple of positional arguments or a dict of keyword arguments, "
        f"not {type(sample_input).__name__}"
    )


class Sample(NamedTuple):
    """A model and the arguments of one call of it, rebuilt by ``spec`` from their tensors."""

    model: torch.nn.Module
    spec: InputSpec
    tensors: list[torch.Tensor]

    def copies(self) -> list[torch.Tensor]:
        """Inputs of their own for a run on the side."""
        return copies(self.tensors)


def sample_of(model: torch.nn.Module, sample_input: Any, contents: Contents | None) -> Sample:
    """The call that is parsed; with ``contents``, of the model without content, wherever it and the call are."""
    args, kwargs = call_arguments(sample_input)
    if contents is None:
        return Sample(model, *InputSpec.of(args, kwargs))
    spec, tensors = InputSpec.of(args, kwargs)
    args, kwargs = spec.rebuild([contents.meta(tensor) for tensor in tensors])
    return Sample(on_meta(model, contents), *InputSpec.of(args, kwargs))


def contents_of(model: torch.nn.Module, device: torch.device | str | None) -> Contents | None:
    """What a model is run in without content, to be planned for ``device``; None where it runs with its content.

    It has none, or it is to be planned for CUDA under autocast, which casts otherwise where the model is. InputError
    for other devices, whose kernels take what shapes do not tell.
    """
    is_for_cuda = device is not None and device_of(device).type == "cuda"
    if not lacks_content(model):
        is_elsewhere = not any(t.is_cuda for t in chain(model.parameters(), model.buffers()))
        return Contents() if is_for_cuda and is_elsewhere and autocast_state() else None
    if not is_for_cuda:
        name = next(name for name, t in chain(model.named_parameters(), model.named_buffers()) if not has_content(t))
        raise InputError(
            f'{name} has no content, and what such a model takes is known for device="cuda" alone, not for {device}; '
            "give the model content with model.to_empty(device=...), and initialize it"
        )
    return Contents()


def check_tensors(sample: Sample) -> torch.device:
    """The device of the model; InputError without tensors, on several devices, or if nothing requires grad."""
    if not sample.tensors:
        raise InputError("sample_input holds no tensor")
    home = device_of_model(sample.model, sample.tensors)
    if not any(t.requires_grad for t in chain(sample.model.parameters(), sample.tensors)):
        raise InputError(
            "no parameter of the model requires grad, and no tensor of sample_input, so there is no backward pass to "
            "save memory in; call model.requires_grad_() first if it is to be trained, or requires_grad_() on those "
            "tensors of sample_input that gradients go to"
        )
    _check_one_device(sample.model, home)
    for number, tensor in enumerate(sample.tensors):
        if tensor.device != home and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise InputError(
                f"tensor {number} of sample_input is on {tensor.device}, the model on {home}; "
                f"move it with .to('{home}')"
            )
        if is_spread(tensor):
            raise InputError(
                f"tensor {number} of sample_input is a DTensor; plan modules that are called with local ones"
            )
        if tensor.layout is not torch.strided:
            raise ParseError(
                f"tensor {number} of sample_input is {tensor.layout}, not dense; call the model with dense ones"
            )
    return home


def _check_one_device(model: torch.nn.Module, home: torch.device) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.device != home and tensor.dim():
            raise InputError(
                f"{name} is on {tensor.device}, other parameters on {home}: a plan is for the memory of one device. "
                "Optimize the parts of the model that are on one device each, or move all to one"
            )


def device_of(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device must be a torch.device or its name, such as 'cuda', not {device!r}") from None


AUTO = {"cuda": "measure"}
"""What ``"auto"`` is on a type of device, where it is not ``"time"``: on CUDA no rule says what kernels allocate."""


def check_gpu(gpu: Any, target: torch.device) -> None:
    """Raise InputError unless ``gpu`` is None, or the name of one for a CUDA device as target."""
    if gpu is None:
        return
    if not isinstance(gpu, str) or not gpu.strip():
        raise InputError(f"gpu must be the name of a GPU, such as 'H100', not {gpu!r}")
    if target.type != "cuda":
        raise InputError(
            f"gpu={gpu!r} says which CUDA device is meant, but the graph is for {target}; add device='cuda'"
        )


def profile_kind(profile: str, home: torch.device, target: torch.device) -> str:
    if profile not in ("auto", "time", "estimate", "measure"):
        raise InputError(f"profile must be 'auto', 'time', 'estimate' or 'measure', not {profile!r}")
    if target.type != home.type:
        if profile in ("time", "measure"):
            raise InputError(f"cannot measure for {target} on a model that is on {home}")
        return "estimate"
    return AUTO.get(home.type, "time") if profile == "auto" else profile
