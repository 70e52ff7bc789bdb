"""All names of torch's that begin with an underscore, but for aten's: what each gives, and what fails without it.

tests/torch_state/test_private_api.py tries each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch._C._profiler
import torch._dynamo
import torch._dynamo.types
import torch._functorch.pyfunctorch
import torch._ops
import torch._subclasses.fake_tensor
import torch.jit._recursive
import torch.profiler._utils
import torch.utils._python_dispatch
import torch.utils._pytree

_C: Any = torch._C

pytree = torch.utils._pytree
"""Takes nested arguments and results apart. Without it no call has a signature: nothing can be parsed."""
base_of = attrgetter("_base")
"""The tensor that a view is of, or None. Without it no gradient that came through a view is written over."""
id_of_storage = attrgetter("_cdata")
"""The address of a storage object. Without it tensors that share memory cannot be told: no value has a size."""
version_of: Any = attrgetter("_version")
"""How often a tensor's memory was written. Without it writes are unseen: backwards use what is no longer there."""
tensor_holders: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
"""How many in C++ hold a tensor. Without it low-memory operators never write over a gradient: the peak is higher."""
number_of_node: Any = methodcaller("_sequence_nr")
"""The number of a node of autograd's graph, in the order of making. Without it as without ``next_node``."""
next_node: Any = _C._autograd._get_sequence_nr
"""The number of the next node. Without it what no backward comes to is taken to be saved: peaks are overestimated."""
sleep_on_cuda: Any = torch.cuda._sleep
"""Keeps a CUDA device busy for some cycles. Without it operations are timed with the host's pauses between kernels."""
MAKE_SUBCLASS = "_make_subclass"
"""The method of tensors that makes parameters. Without it a parameter made in a forward is recorded wrongly."""


def version_alone(tensor: torch.Tensor) -> torch.Tensor | None:
    """An empty tensor of another's version, if it has one. Without it writes beside what was saved are unknown."""
    alone = tensor.detach()
    try:
        alone.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    except (RuntimeError, TypeError):
        return None
    return alone


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes a tensor for a view. Without it what is held of a view holds the memory of its base."""
    return tensor._is_view()


def storage_id(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage object. Without it as without ``id_of_storage``."""
    return int(id_of_storage(tensor.untyped_storage()))


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors in C++ hold the storage of one. Without it as without ``tensor_holders``."""
    # By its address: ``untyped_storage()`` would leave a holder behind, and autograd would no longer add in place.
    return int(_C._storage_Use_Count(_C._storage_address(tensor)))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor. Without it sparse gradients of embeddings cannot be weighed."""
    return tensor._indices(), tensor._values()


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tensor of a class with operators of its own holds. Without it nested ones in opaque modules stay."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not _is_wrapper(tensor):
        return {}
    return {name: found for name, found in wrapped_by(tensor) if isinstance(found, torch.Tensor)}


def wrapped_by(tensor: Any) -> Iterator[tuple[str, Any]]:
    """What a tensor of such a class is made of: tensors, and of what not. Without it as without ``inner_tensors``."""
    return ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def maker_of(tensor: torch.Tensor) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Makes a tensor like this one of others in place of its inner ones. Without it as without ``inner_tensors``."""
    wrapper: Any = tensor
    made: Any = partial(type(wrapper).__tensor_unflatten__, outer_size=wrapper.shape, outer_stride=wrapper.stride())
    context = wrapper.__tensor_flatten__()[1]
    others = {name: found for name, found in wrapped_by(tensor) if not isinstance(found, torch.Tensor)}
    return lambda parts: made({**others, **parts}, context)


_dispatch: Any = torch.utils._python_dispatch
_is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass

OpOverload = torch._ops.OpOverload
"""The class of operators. Without it those of a program cannot be told from Python's functions."""
overload_name = attrgetter("_overloadname")
"""Which operator of its name one is. Without it operators have no out-of-place overloads."""
decomposes: Any = OpOverload._can_decompose
"""Whether an operator is made of others. Without it estimates take copies for views."""


def composed(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What PyTorch makes of an operator that has no kernel. Without it no model on ``meta`` is planned for CUDA."""
    # ``decompose()`` prefers what torch.compile makes of it.
    return operator._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees what is dispatched below autograd. Without it no program is verified, and none estimated."""
FakeTensorMode, FakeTensor = torch._subclasses.fake_tensor.FakeTensorMode, torch._subclasses.fake_tensor.FakeTensor
"""Runs operators without memory, and its tensors. Without them ``profile="estimate"`` cannot weigh anything."""
log_of_fakes: Any = torch._subclasses.fake_tensor.log
"""Where ``FakeTensorMode`` logs errors that it raises. Without it users read of calls that are tried so."""
RECORDING: Any = _C._parse_dispatch_key("DeferredInit")
"""A dispatch key that PyTorch leaves to others. Without it the recorder sees no operator: no model can be parsed."""
AUTOCAST = {name: getattr(_C.DispatchKey, name) for name in ("AutocastCPU", "AutocastCUDA")}
"""The dispatch keys of autocast. Without them a program lacks the casts, and computes in other types."""
recording: Any = partial(_C._IncludeDispatchKeyGuard, RECORDING)
"""A context in which calls go to the fallback of ``RECORDING``. Without it the recorder sees no operator."""
not_recording: Any = partial(_C._ExcludeDispatchKeyGuard, _C.DispatchKeySet(RECORDING))
"""A context in which calls go past ``RECORDING``. Without it the recorder records what it does itself."""
has_kernel: Any = cache(_C._dispatch_has_kernel_for_dispatch_key)
"""Whether an operator, by name, has a kernel for a dispatch key. Without it as without ``AUTOCAST``."""
saved_tensors_hooks_in_use: Any = partial(_C._autograd._top_saved_tensors_default_hooks, True)
"""The innermost hooks for saved tensors, or None. Without it parts are planned in torch.utils.checkpoint."""
function_modes, count_function_modes = torch.overrides._get_current_function_mode_stack, _C._len_torch_function_stack
"""The modes that functions of torch are handed to. Without them those around a planned forward are passed by."""
dispatch_modes, count_dispatch_modes = _dispatch._get_current_dispatch_mode_stack, _C._len_torch_dispatch_stack
"""The modes that operators are handed to. Without them what is recomputed runs outside of those around it."""
push_function_mode, pop_function_mode = torch.overrides._push_mode, torch.overrides._pop_mode
"""Put a mode for functions of torch on, and take the innermost off. Without them nothing can be optimized in one."""
DeviceContext = torch.utils._device.DeviceContext
"""The mode that a default device is. Without it the plain model runs wherever one is set."""
enter_saved_tensors_hooks: Any = _C._autograd._push_saved_tensors_default_hooks
"""Puts hooks for saved tensors on. Without it nothing is recomputed."""
leave_saved_tensors_hooks: Any = _C._autograd._pop_saved_tensors_default_hooks
"""Takes the innermost hooks for saved tensors off. Without it an interrupt may leave some of the parser's on."""
set_grad_enabled, is_any_autocast_enabled = _C._set_grad_enabled, _C._is_any_autocast_enabled
"""Switches gradients; whether autocast is on for any type of device. Without them nothing is recomputed."""
are_deterministic: Any = _C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only
"""Whether deterministic algorithms are asked for, and by warnings alone. Without it as without ``FLAGS``."""
matmul_precision: Any = _C._get_float32_matmul_precision
"""How exact products of float32 are. Without it as without ``FLAGS``."""
is_functorch_active: Any = _C._are_functorch_transforms_active
"""Whether a transform of torch.func runs. Without it custom functions inside one are called as they are, and fail."""
_BATCHED, _VMAP = map(_C._parse_dispatch_key, ("Batched", "VmapMode"))


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for many, as in ``vmap``. Without it low-memory backwards fail for many gradients."""
    return _C._dispatch_keys(tensor).has(_BATCHED) or _C._functorch.is_batchedtensor(tensor)


def is_mapped() -> bool:
    """Whether a ``vmap`` runs, also for ``is_grads_batched``. Without it as without ``unmapped``."""
    is_on, is_off = _C._dispatch_tls_is_dispatch_key_included(_VMAP), _C._dispatch_tls_is_dispatch_key_excluded(_VMAP)
    return (is_on and not is_off) or is_functorch_active()


@contextmanager
def unmapped() -> Iterator[None]:
    """Inside, no ``vmap`` and no transform runs. Without it nothing is recomputed in a backward for many gradients."""
    no_transform = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
    with no_transform, _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_VMAP)):
        yield


def has_tangents() -> bool:
    """Whether forward-mode derivatives are on. Without it plans run there, and fail, as more is saved."""
    return torch.autograd.forward_ad._current_level >= 0


NN_FUNCTIONS, nn_functions = "torch._C._nn", _C._nn
"""Functions that call operators such as gelu. Without them these are called by ``torch.ops``, which takes longer."""


def schema_of(operator: Any) -> Any:
    """Arguments and results of an operator, else None. Without it no operator is known to write what it is given."""
    return getattr(operator, "_schema", None)


current_backward: Any = _C._current_graph_task_id
"""The number of the backward that runs on this thread, or -1. Without it as without ``keeps_graph``."""


def keeps_graph() -> bool:
    """Whether another backward may come: none runs, or one with ``retain_graph=True``. Without it that one fails."""
    return current_backward() == -1 or bool(_C._autograd._get_current_graph_task_keep_graph())


CHECKPOINTS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""What torch.utils.checkpoint runs in: one of these. Without both it saves tensors as if nobody planned."""
is_profiled: Any = torch.autograd._profiler_enabled
"""Whether a profiler runs. Without it ogc measures on a CPU while another profiler runs, and fails."""
Allocation, traverse_dfs = torch._C._profiler._ExtraFields_Allocation, torch.profiler._utils.traverse_dfs
"""An event of the CPU's allocator, and a walk through events. Without them no peak can be measured on a CPU."""
MEMBERS = ("_parameters", "_buffers", "_modules")
"""A module's tables of its members. Without them a module that has changed runs by a plan of what it was."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""A module's tables of its hooks. Without them a replayed forward leaves out the hooks of submodules."""
parameters_of, buffers_of, submodules_of = map(attrgetter, MEMBERS)
"""Each of ``MEMBERS`` of one module. Without it as without ``MEMBERS``."""
hooks_of = attrgetter(*HOOKS)
"""All of ``HOOKS`` of one module. Without it as without ``HOOKS``."""
always_called_of = attrgetter("_forward_hooks_always_called")
"""Forward hooks that run after errors too. Without it these are taken for some that only collect outputs."""
has_global_hooks: Any = torch.nn.modules.module._has_any_global_hook
"""Whether there are hooks of all modules. Without it these are given the planned copy of a part."""
is_fx_tracing: Any = torch.fx._symbolic_trace.is_fx_symbolic_tracing
"""Whether a symbolic trace by torch.fx is on. Without it optimized modules cannot be traced by it."""


def parametrizations_are_cached() -> bool:
    """Whether a parametrized tensor is made once for all who use it in a region. Without it plans make it for each."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


_SKIP: Any = torch._dynamo.types.FrameExecStrategy(*2 * [torch._dynamo.types.FrameAction.SKIP])


def is_exporting() -> bool:
    """Whether torch.export runs, and not torch.compile. Without it plans stay in what is exported."""
    return torch.compiler._is_exporting_flag


def untraced(function: Any) -> Any:
    """The function, in which torch.compile starts no graph. Without it what was planned is compiled in backwards."""
    torch._dynamo.eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


CALL = "_compiled_call_impl"
"""What a module calls in the place of its own call, if it has it. Without it no part of a model can be planned."""


def own_call(module: torch.nn.Module) -> Any:
    """A module's own call, which torch.compile traces. Without it as without ``CALL``."""
    return module._call_impl


ignored_by_scripts: list[str] = torch.jit._recursive.ignored_attributes
"""Attributes that torch.jit.script does not look at. Without it modules with a call of their own are not scripted."""
COMPILED = "_orig_mod"
"""Where torch.compile's wrapper has the module in it. Without it compiled modules are recorded, and that fails."""
eval_frame, ENTERS_COMPILED = torch._dynamo.eval_frame, "_callback_from_stance"
"""What each call of a compiled function asks what to compile by. Without it such functions are recorded, and fail."""
WRAPPED_CALL = "_wrapped_call"
"""What a class that torch.fx made has its call in. Without it copies of such modules call themselves for ever."""
CODE = "_code"
"""Where a module that torch.fx made has the text of its forward. Without it plans run what the text was."""
REPLICATE = "_replicate_for_data_parallel"
"""What DataParallel copies a module by. Without it a model that is planned in parts runs there, and plain."""
sdp_order: Any = _C._get_sdp_priority_order
"""In which order kernels of attention are tried, by number. Without it no graph for CUDA has attention in it."""
FLAGS: dict[str, tuple[Any, Any]] = {
    "torch.backends.mkldnn.enabled": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "torch.backends.mkldnn.deterministic": (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    "torch.backends.nnpack": (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    "torch.backends.cudnn.enabled": (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "torch.backends.cudnn.benchmark": (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "torch.backends.cudnn.deterministic": (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    "flash attention": (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math attention": (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "cuDNN attention": (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    "reduced precision in math attention": (
        _C._get_math_sdp_allow_fp16_bf16_reduction,
        _C._set_math_sdp_allow_fp16_bf16_reduction,
    ),
    "the order of attention kernels": (sdp_order, _C._set_sdp_priority_order),
    "fp16 accumulation in cuBLAS": (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    "reduced precision in fp16 products": (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_fp16_reduced_precision_reduction(*value),
    ),
    "reduced precision in bf16 products": (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda value: _C._set_cublas_allow_bf16_reduced_precision_reduction(*value),
    ),
}
"""Settings that choose kernels: how each is read and made. Without one a recomputation may run another kernel."""
get_fp32_precision, set_fp32_precision = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
"""What a kind of kernels computes float32 in. Without it a recomputation may be in TF32, or not."""


def finished_work() -> Any:
    """What a collective returns that is done. Without it a forward with collectives cannot be planned."""
    from torch._C._distributed_c10d import FakeWork, Work  # which not all builds have

    return Work.boxed(FakeWork())  # type: ignore[attr-defined]


ALONE, OPERATOR_NAMES = "TESTING_ONLY_GenericMode", _C._dispatch_get_all_op_names
"""A dispatch key without kernels that goes before all others, and the names of all operators. Without them no model
with collectives can be planned."""
FUNCTIONAL, DIFFERENTIABLE = "_c10d_functional", "_c10d_functional_autograd"
"""The namespaces of collectives that give their results as tensors. Without it as without ``ALONE``."""
nodes_of_function: Any = attrgetter("_backward_cls")
"""The class of the nodes that a custom function makes. Without it no call with collectives is verified."""


def is_wait(operator: Any) -> bool:
    """Whether an operator waits for a collective. Without it as without ``nodes_of_function``."""
    return torch.distributed.is_available() and operator is torch.ops._c10d_functional.wait_tensor.default


def run_on_device(operator: Any, device: str, args: Any, kwargs: Any) -> Any:
    """Run an operator by the kernel for a type of devices. Without it as without ``ALONE``."""
    key = _C._parse_dispatch_key("Meta" if device == "meta" else device.upper())
    return operator.redispatch(_C.DispatchKeySet(key), *args, **kwargs)


alone_on_this_thread: Any = partial(_C._IncludeDispatchKeyGuard, _C._parse_dispatch_key(ALONE))
"""A context in which calls go to the kernels for ``ALONE``. Without it as without that."""


def store_of_all_ranks() -> Any:
    """Where the ranks of the default group met, and can leave texts for one another. Without it plans are not equal."""
    return torch.distributed.distributed_c10d._get_default_store()


def share_shards(module: torch.nn.Module, like: torch.nn.Module) -> None:
    """Have what shards one module shard another instance. Without it what is optimized then is taken for unsharded."""
    from torch.distributed._composable_state import _get_module_state, _insert_module_state

    state: Any = _get_module_state(like)
    _insert_module_state(module, state)


def groups_of_shards(module: torch.nn.Module) -> list[Any]:
    """The parameters that a unit of ``fully_shard`` gathers at once. Without it its units share no goal."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    found = getattr(state, "_fsdp_param_groups", None)
    return list(found) if found is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def gathered_parameter(one: Any) -> torch.Tensor | None:
    """A parameter of such a group, gathered, once it was. Without it as without ``groups_of_shards``."""
    return getattr(one, "_unsharded_param", None)
