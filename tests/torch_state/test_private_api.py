"""Names of torch's that begin with an underscore, one by one: a release without one says here what of ogc breaks."""

import ast
import inspect
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._ordered_set import OrderedSet

FOLDER = Path(__file__).parents[2] / "ogc" / "torch_state"
FILES = FOLDER / "private.py", FOLDER / "compilers.py"
aten = torch.ops.aten


def statements():
    """Each name that the files give, with the statement that makes it and the docstring of that."""
    body = [node for file in FILES for node in ast.parse(file.read_text("utf-8")).body]
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node, ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            found.update(dict.fromkeys((name for name in names if not name.startswith("_")), (node, doc)))
    return found


STATEMENTS = statements()


def loaded():
    """What the files give, as far as this torch has it, and for each name that it lacks the error."""
    scope, errors = {}, {}
    for node in (node for file in FILES for node in ast.parse(file.read_text("utf-8")).body):
        try:
            exec(compile(ast.Module([node], []), "private", "exec"), scope)
        except Exception as error:
            errors.update({name: error for name, (one, _) in STATEMENTS.items() if ast.dump(one) == ast.dump(node)})
    return scope, errors


def tried(name):
    """Fail, with what ogc needs it for, unless torch has a name and it does what ogc takes it to do."""
    scope, errors = loaded()
    why = repr(errors[name]) if name in errors else ""
    if not why:
        try:
            why = "" if CHECKS[name](scope[name]) else "it does something else"
        except Exception as error:
            why = repr(error)
    if why:
        pytest.fail(f"torch {torch.__version__}, {name}: {STATEMENTS[name][1]} ({why})")


def numbers_backwards(current):
    x, seen = torch.ones(2, requires_grad=True), []
    y = (x * 2).sum()
    x.register_hook(lambda gradient: seen.append(current()))
    y.backward(retain_graph=True)
    y.backward()
    return current() == -1 and -1 not in seen and len(set(seen)) == 2


def divides(partition):
    graphs = []

    def compiler(gm, inputs):
        graphs.append(gm.code)
        return make_boxed_func(gm.forward)

    x = torch.ones(2, requires_grad=True)
    aot_function(lambda x: x.exp().sin(), fw_compiler=compiler, partition_fn=partition)(x).sum().backward()
    return "aten.sin" in graphs[0] and "aten.cos" in graphs[1] and x.grad is not None


def holds(hold):
    gm = torch.fx.symbolic_trace(lambda x: (x.exp(), x.sin()))
    one, other = (node for node in gm.graph.nodes if node.op == "call_method")
    one.op = other.op = "call_function"
    one.target, other.target = aten.exp.default, aten.sin.default
    hold(gm.graph, {other: OrderedSet([one])})
    return "control_deps" in str(gm.graph) and one in {n for node in gm.graph.nodes for n in node.all_input_nodes}


def keeps_graph(keeps):
    x = torch.ones(2, requires_grad=True)
    y, seen = x.exp().sum(), [keeps()]
    x.register_hook(lambda gradient: seen.append(keeps()))
    y.backward(retain_graph=True)
    y.backward()
    return seen == [True, True, False]


def in_both_maps(holds):
    """Whether something holds in a backward for many gradients, and in one within vmap."""
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(holds(gradient)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda seed: torch.autograd.grad(y, x, seed, retain_graph=True)[0])(torch.eye(2))
    return seen == [True, True]


def draws_out_of_maps(unmapped):
    def draws(gradient):
        with unmapped():
            return torch.rand(2).shape == (2,) and bool((Doubled.apply(torch.ones(2)) == 2).all())

    return in_both_maps(draws)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def keeps_busy(sleep):
    """Where there is no device, that it asks for one has to do."""
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError, AttributeError)):
            sleep(1)
        return True
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    sleep(3_000_000)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) > 0.5


def makes_parameters(name):
    seen, own = [], getattr(torch.Tensor, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, name, staticmethod(lambda *args, **kwargs: seen.append(args) or own(*args, **kwargs))
        )
        nn.Parameter(torch.ones(1))
    return len(seen) == 1


def runs_checkpoints(names):
    called = []

    def generator(*args, **kwargs):
        called.append(args)
        yield

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            if hasattr(torch.utils.checkpoint, name):
                patch.setattr(torch.utils.checkpoint, name, generator)
        torch.utils.checkpoint.checkpoint(torch.exp, torch.ones(2, requires_grad=True), use_reentrant=False)
    return len(called) == 1


def events():
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profiler:
        torch.empty(1000)
    return profiler.kineto_results.experimental_event_tree()


def allocates(kind):
    blocks = [e.extra_fields for e in loaded()[0]["traverse_dfs"](events()) if isinstance(e.extra_fields, kind)]
    return any(block.alloc_size >= 4000 and block.ptr and block.device.type == "cpu" for block in blocks)


def dispatches(mode):
    seen = []

    class Mode(mode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Mode():
        x.reshape(3, 1).exp_()
    return seen == [aten.view.default, aten.exp_.default]


def fake_ones(kind):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        made = torch.empty(3), nn.Parameter(torch.empty(3))
    return all(isinstance(one, kind) for one in made) and not isinstance(torch.empty(3), kind)


def orders_kernels(order):
    kernels = [nn.attention.SDPBackend.EFFICIENT_ATTENTION, nn.attention.SDPBackend.FLASH_ATTENTION]
    with nn.attention.sdpa_kernel(kernels, set_priority=True):
        first = order()[:2]
    return first == [2, 1] and {0, 1, 2, 3} <= {*order()}


def fakes(mode):
    with mode() as fake:
        return fake.from_tensor(torch.ones(2)).device.type == "cpu" and torch.empty(10**15).sum().shape == ()


def with_hooks():
    module = nn.Linear(2, 2)
    module.register_forward_hook(print, always_call=True)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    module.register_full_backward_pre_hook(print)
    return module


def are_tables_of_hooks(names):
    return all(len(getattr(with_hooks(), name)) == 1 and not getattr(nn.Linear(2, 2), name) for name in names)


def is_fx_tracing(is_tracing):
    found = []

    class Asking(nn.Module):
        def forward(self, x):
            found.append(is_tracing())
            return x

    torch.fx.symbolic_trace(Asking())
    return (found, is_tracing()) == ([True], False)


def are_cached(are):
    with nn.utils.parametrize.cached():
        inside = are()
    return (inside, are()) == (True, False)


def has_global_hooks(has):
    before = has()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        return (bool(before), bool(has())) == (False, True)
    finally:
        handle.remove()


def calls(own):
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    module.register_forward_hook(lambda module, args, result: result + 1)
    return torch.equal(own(module)(x), module(x)) and not torch.equal(own(module)(x), module.forward(x))


def takes_the_place(name):
    module = nn.Linear(2, 2)
    vars(module)[name] = lambda x: "called"
    return module(torch.ones(1, 2)) == "called"


def is_wrapped(name):
    module = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(torch.compile(module).named_children())[name] is module


def is_untraced(marked):
    def inside(x):
        return x + 1

    def graphs(mark):
        counter = CompileCounter()
        function = mark(lambda x: inside(x))
        torch.compile(lambda x: function(x), backend=counter)(X)
        through = counter.frame_count
        torch.compile(function, backend=counter)(X)
        return through, counter.frame_count - through

    torch._dynamo.reset()
    return (graphs(lambda function: function), graphs(marked)) == ((1, 1), (1, 0))


def exports(is_exporting):
    class Notes(nn.Module):
        def forward(self, x):
            seen.append(is_exporting())
            return x + 1

    seen = [is_exporting()]
    torch.export.export(Notes(), (X,), strict=False)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1 if is_exporting() else x - 1, backend="eager")(X)
    return seen[0] is False and set(seen[1:]) == {True} and torch.equal(compiled, X - 1)


def in_transform(is_active):
    seen = [is_active()]
    torch.func.vmap(lambda x: seen.append(is_active()) or x)(torch.ones(2))
    return seen == [False, True]


def profiled(is_profiled):
    before = is_profiled()
    with torch.profiler.profile(acc_events=True):
        return (before, is_profiled()) == (False, True)


def is_on(guard):
    key, included = loaded()[0]["RECORDING"], torch._C._dispatch_tls_is_dispatch_key_included
    before = included(key)
    with guard():
        return (before, included(key), included(key)) == (False, True, True)


def is_off(guard):
    key, excluded = loaded()[0]["RECORDING"], torch._C._dispatch_tls_is_dispatch_key_excluded
    before = excluded(key)
    with guard():
        return (before, excluded(key)) == (False, True)


def left_in_use(leave):
    torch.autograd.graph.saved_tensors_hooks(id, id).__enter__()
    leave()
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def entered(enter):
    enter(id, id)
    in_use = torch._C._autograd._top_saved_tensors_default_hooks(True)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return in_use == (id, id)


def switches(set_enabled):
    with torch.no_grad():
        set_enabled(True)
        return torch.is_grad_enabled()


def sees_autocast(is_enabled):
    with torch.autocast("cpu"):
        return is_enabled() and torch.is_autocast_enabled("cpu")


def deterministic(both):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return [asked() for asked in both]
    finally:
        torch.use_deterministic_algorithms(False)


def in_use(hooks):
    def pack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        return hooks()[0] is pack


def flattens(pytree):
    leaves, tree = pytree.tree_flatten(([1, (2,)], {"a": 3}))
    is_same = isinstance(tree, pytree.TreeSpec) and tree == pytree.tree_structure(([0, (0,)], {"a": 0}))
    back = (
        pytree.tree_unflatten(leaves, tree),
        pytree.tree_map_only(int, lambda x: x, [1]),
        pytree.tree_leaves([1, [2]]),
    )
    return is_same and leaves == [1, 2, 3] and back == (([1, (2,)], {"a": 3}), [1], [1, 2])


def counts_holders(holders):
    x = torch.ones(2)
    before = holders(x)
    view = x.view(2, 1)
    return holders(x) == before + 1 and view is not None


class Relu(nn.Module):
    def forward(self, x):
        return x.relu()


def counts_writes_without_memory(version_alone):
    parts = torch.zeros(2, 4).unsafe_chunk(2)
    alone = version_alone(parts[0])
    before = alone._version
    parts[1].add_(1)
    unchanged = alone._version == before
    parts[0][0, 1:].add_(1)
    return unchanged and alone._version == before + 1 and not alone.untyped_storage().nbytes()


def counts_writes(version_of):
    x = torch.ones(2)
    before = version_of(x)
    x.view(-1).add_(1)
    return version_of(x) == before + 1


X = torch.ones(2, 3)


def are_on(has_tangents):
    with torch.autograd.forward_ad.dual_level():
        inside = has_tangents()
    return (inside, has_tangents()) == (True, False)


def are_settings(pairs):
    for get, put in pairs.values():
        put(get())
    before = pairs["math attention"][0]()
    torch.backends.cuda.enable_math_sdp(not before)
    try:
        return pairs["math attention"][0]() is not before
    finally:
        pairs["math attention"][1](before)


def sets_precision(put):
    get = loaded()[0]["get_fp32_precision"]
    before = get("mkldnn", "rnn")
    put("mkldnn", "rnn", "ieee")
    try:
        return get("mkldnn", "rnn") == torch.backends.mkldnn.rnn.fp32_precision == "ieee"
    finally:
        put("mkldnn", "rnn", before)


def is_finished(work):
    return "Work" in str(work()._type()) and work()._has_method("wait")


def taken_off(pop, push):
    """Whether the innermost mode is taken off and put on again."""
    with torch.device("cpu"):
        modes = torch.overrides._get_current_function_mode_stack
        before, mode = modes(), pop()
        between = modes()
        push(mode)
        return between == before[:-1] and mode is before[-1] and modes() == before


def within_a_mode(modes):
    with torch.overrides.BaseTorchFunctionMode() as mode:
        return modes() == [mode]


def within_a_dispatch_mode(modes, expected=None):
    with torch.utils._python_dispatch.BaseTorchDispatchMode() as mode:
        return modes() == (expected or [mode])


def on_a_device(modes):
    with torch.device("cpu"):
        return modes()


def goes_before_others(alone):
    from ogc.torch_state import ranks

    ranks._install()
    x = torch.randn(2, requires_grad=True)
    with alone():  # others are let through
        torch.relu(x).sum().backward()
    return x.grad is not None and not torch._C._dispatch_tls_is_dispatch_key_included(
        torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
    )


@contextmanager
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def has_store(store):
    with one_rank():
        first, second = (store().compare_set("ogc", "", value) for value in ("a", "b"))
        return first == second == b"a" and store().check(["ogc"]) and not store().check(["none"])


def shares_shards(share):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fully_shard(nn.Linear(2, 2), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        twin = object.__new__(type(module))
        object.__setattr__(twin, "__dict__", vars(module))
        share(twin, module)
        twin.unshard()
        return not isinstance(module.weight, DTensor)


@contextmanager
def unit_of_shards():
    from torch.distributed.fsdp import fully_shard

    with one_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield fully_shard(nn.Linear(2, 3, bias=False), mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def has_groups(groups_of):
    with unit_of_shards() as module:
        (group,) = groups_of(module)
        (one,) = group.fsdp_params
        is_kept, policy = group.post_forward_mesh_info is None, group.mp_policy
        return not is_kept and policy.param_dtype is policy.reduce_dtype is None and one.sharded_param is module.weight


def knows_gathered(gathered):
    with unit_of_shards() as module:
        (one,) = module._get_fsdp_state()._fsdp_param_group.fsdp_params
        before = gathered(one)
        module.unshard()
        return before is None and gathered(one) is module.weight


def asks_what_to_compile_by(name):
    from torch._dynamo import eval_frame

    known, asked, compiled = getattr(eval_frame, name), [], torch.compile(lambda x: x + 1, backend="eager")
    setattr(eval_frame, name, lambda callback: (asked.append(callable(callback)), known(callback))[1])
    try:
        compiled(X)
        before = list(asked)
        torch.compiler.disable(lambda x: x + 1)(X)
    finally:
        setattr(eval_frame, name, known)
    return any(before) and not any(asked[len(before) :])


@contextmanager
def jagged():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.nested.nested_tensor_from_jagged(torch.ones(5, 2), torch.tensor([0, 2, 5]))


def takes_apart(inner_tensors):
    with jagged() as rows:
        found = inner_tensors(rows)
        return inner_tensors(X) == {} and any(part is rows.values() or part.shape == (5, 2) for part in found.values())


def puts_together(maker_of):
    with jagged() as rows:
        names = rows.__tensor_flatten__()[0]
        made = maker_of(rows)({name: getattr(rows, name) for name in names})
        return made.shape == rows.shape and torch.equal(made.values(), rows.values())


CHECKS = {
    "pytree": flattens,
    "version_of": counts_writes,
    "WRAPPED_CALL": lambda name: name in vars(type(torch.fx.symbolic_trace(nn.ReLU()))),
    "CODE": lambda name: "relu" in vars(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()).append(Relu())))[name],
    "version_alone": counts_writes_without_memory,
    "inner_tensors": takes_apart,
    "maker_of": puts_together,
    "base_of": lambda base_of: base_of(X[0]) is X and base_of(X) is None,
    "is_view": lambda is_view: is_view(X[0]) and not is_view(X),
    "id_of_storage": lambda of: (
        of(X.untyped_storage()) == of(X[0].untyped_storage()) != of(X[0].clone().untyped_storage())
    ),
    "storage_id": lambda storage_id: storage_id(X) == storage_id(X[0]) != storage_id(X[0].clone()),
    "tensor_holders": counts_holders,
    "storage_holders": counts_holders,
    "sparse_parts": lambda parts: [list(t.shape) for t in parts(X.to_sparse())] == [[2, 6], [6]],
    "sleep_on_cuda": keeps_busy,
    "MAKE_SUBCLASS": makes_parameters,
    "OpOverload": lambda kind: isinstance(aten.add.Tensor, kind) and not isinstance(aten.add, kind),
    "overload_name": lambda name: name(aten.add.Tensor) == "Tensor",
    "decomposes": lambda decomposes: decomposes(aten.reshape.default) and not decomposes(aten.view.default),
    "composed": lambda composed: (
        "Mul" in composed(aten.dropout.default, torch.ones(1, device="meta").requires_grad_(), 0.5, True).grad_fn.name()
    ),
    "NN_FUNCTIONS": lambda name: eval(name).gelu(torch.zeros(1)) == 0,
    "nn_functions": lambda functions: functions.gelu(torch.zeros(1)) == 0,
    "number_of_node": lambda of: (
        1 + of(torch.ones(1).requires_grad_().exp().grad_fn) == torch._C._autograd._get_sequence_nr()
    ),
    "next_node": lambda following: following() == torch.ones(1).requires_grad_().exp().grad_fn._sequence_nr(),
    "schema_of": lambda of: of(aten.add_.Tensor).is_mutable and not of(aten.add.Tensor).is_mutable and of(len) is None,
    "TorchDispatchMode": dispatches,
    "FakeTensorMode": fakes,
    "FakeTensor": fake_ones,
    "log_of_fakes": lambda log: log.name == FakeTensorMode.__module__ and not log.disabled,
    "sdp_order": orders_kernels,
    "RECORDING": lambda key: (
        torch._C.DispatchKeySet(key).has(key) and torch._C._dispatch_key_name(key) == "DeferredInit"
    ),
    "AUTOCAST": lambda keys: len(keys) == 2 and all(torch._C.DispatchKeySet(key).has(key) for key in keys.values()),
    "is_functorch_active": in_transform,
    "is_batched": lambda is_batched: in_both_maps(is_batched) and not is_batched(X),
    "is_mapped": lambda is_mapped: in_both_maps(lambda gradient: is_mapped()) and not is_mapped(),
    "unmapped": draws_out_of_maps,
    "recording": is_on,
    "not_recording": is_off,
    "has_kernel": lambda has: has("aten::linear", "AutocastCPU") and not has("aten::relu", "AutocastCPU"),
    "saved_tensors_hooks_in_use": lambda hooks: hooks() is None and in_use(hooks),
    "function_modes": lambda modes: modes() == [] and within_a_mode(modes),
    "pop_function_mode": lambda pop: taken_off(pop, torch.overrides._push_mode),
    "push_function_mode": lambda push: taken_off(torch.overrides._pop_mode, push),
    "count_function_modes": lambda count: count() == 0 and on_a_device(count) == 1,
    "count_dispatch_modes": lambda count: count() == 0 and within_a_dispatch_mode(lambda: [None] * count(), [None]),
    "dispatch_modes": lambda modes: modes() == [] and within_a_dispatch_mode(modes),
    "DeviceContext": lambda kind: type(on_a_device(torch.overrides._get_current_function_mode_stack)[0]) is kind,
    "leave_saved_tensors_hooks": lambda leave: not left_in_use(leave),
    "enter_saved_tensors_hooks": entered,
    "set_grad_enabled": switches,
    "is_any_autocast_enabled": lambda is_enabled: not is_enabled() and sees_autocast(is_enabled),
    "are_deterministic": lambda both: [asked() for asked in both] == [False] * 2 and deterministic(both) == [True] * 2,
    "matmul_precision": lambda precision: precision() == torch.get_float32_matmul_precision(),
    "current_backward": numbers_backwards,
    "keeps_graph": keeps_graph,
    "CHECKPOINTS": runs_checkpoints,
    "is_profiled": profiled,
    "Allocation": allocates,
    "traverse_dfs": lambda traverse: any(event.name and event.start_time_ns for event in traverse(events())),
    "MEMBERS": lambda names: all(isinstance(vars(nn.Module())[name], dict) for name in names),
    "HOOKS": are_tables_of_hooks,
    "parameters_of": lambda of: list(of(nn.Linear(2, 2))) == ["weight", "bias"],
    "buffers_of": lambda of: "running_mean" in of(nn.BatchNorm1d(2)),
    "submodules_of": lambda of: list(of(nn.Sequential(nn.ReLU()))) == ["0"],
    "hooks_of": lambda of: list(map(len, of(with_hooks()))) == [1, 1, 1, 1],
    "always_called_of": lambda of: of(with_hooks()) and not of(nn.Linear(2, 2)),
    "has_global_hooks": has_global_hooks,
    "is_fx_tracing": is_fx_tracing,
    "parametrizations_are_cached": are_cached,
    "is_exporting": exports,
    "untraced": is_untraced,
    "own_call": calls,
    "CALL": takes_the_place,
    "ignored_by_scripts": lambda names: "_modules" in names and "training" not in names,
    "COMPILED": is_wrapped,
    "ENTERS_COMPILED": asks_what_to_compile_by,
    "eval_frame": lambda module: module.__name__ == "torch._dynamo.eval_frame",
    "has_tangents": are_on,
    "FLAGS": are_settings,
    "get_fp32_precision": lambda get: get("cuda", "conv") == torch.backends.cudnn.conv.fp32_precision,
    "set_fp32_precision": sets_precision,
    "finished_work": is_finished,
    "ALONE": lambda name: torch._C.DispatchKeySet(torch._C._parse_dispatch_key(name)).has(
        torch._C._parse_dispatch_key(name)
    ),
    "alone_on_this_thread": goes_before_others,
    "FUNCTIONAL": lambda name: callable(getattr(torch.ops, name).all_reduce),
    "DIFFERENTIABLE": lambda name: callable(getattr(torch.ops, name).reduce_scatter_tensor),
    "nodes_of_function": lambda of: isinstance(Doubled.apply(X.clone().requires_grad_()).grad_fn, of(Doubled)),
    "is_wait": lambda is_wait: is_wait(torch.ops._c10d_functional.wait_tensor.default) and not is_wait(aten.add.Tensor),
    "wrapped_by": lambda wrapped: "_values" in dict(wrapped(torch.nested.nested_tensor([X], layout=torch.jagged))),
    "run_on_device": lambda run: torch.equal(run(aten.neg.default, "cpu", (X,), {}), -X),
    "OPERATOR_NAMES": lambda names: "aten::relu" in names(),
    "store_of_all_ranks": has_store,
    "share_shards": shares_shards,
    "groups_of_shards": has_groups,
    "gathered_parameter": knows_gathered,
    "partition_in_order": divides,
    "CustomPartitioner": lambda kind: kind.__abstractmethods__ == {"__call__", "uuid"},
    "hash_of_files": lambda of: of((str(FILES[0]),)) != of((str(FILES[1]),)),
    "hold_order": holds,
    "OrderedSet": lambda kind: list(kind([2, 1])) == [2, 1],
    "compile_by_inductor": lambda compile: "config_patches" in inspect.signature(compile).parameters,
    "aot_autograd": lambda make: callable(make(fw_compiler=lambda gm, inputs: gm)),
    "prims": lambda names: callable(names.inductor_random) and callable(names.inductor_seeds),
    "run_as_it_is": lambda run: run(torch.fx.symbolic_trace(lambda x: (x + 1,)), [])([torch.ones(1)])[0].item() == 2,
    "REPLICATE": lambda name: name in inspect.getsource(inspect.getmodule(nn.parallel.replicate)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKS)
def test_torch_has_it(name):
    tried(name)


def test_each_name_says_what_it_is_for():
    assert CHECKS.keys() == STATEMENTS.keys()
    for name, (_, doc) in STATEMENTS.items():
        assert doc and "Without" in doc, name


@pytest.mark.parametrize(
    "name, owner, attribute, what",
    [
        ("is_profiled", torch.autograd, "_profiler_enabled", "AttributeError.*_profiler_enabled"),
        ("own_call", nn.Module, "_call_impl", "AttributeError.*_call_impl"),
    ],
)
def test_a_name_that_is_gone_is_told(monkeypatch, name, owner, attribute, what):
    monkeypatch.delattr(owner, attribute)
    with pytest.raises(pytest.fail.Exception, match=f"(?s), {name}: .*Without.*{what}"):
        tried(name)


def test_a_name_that_does_something_else_is_told(monkeypatch):
    monkeypatch.setattr(torch.autograd, "_profiler_enabled", lambda: False)
    with pytest.raises(pytest.fail.Exception, match=r"ogc measures on a CPU .*it does something else"):
        tried("is_profiled")
