"""Sees what goes past PyTorch's dispatcher while a forward is recorded.

That is calls of modules and custom functions, and the methods of tensors by which Python gets hold of their content,
hooks, memory or history. Calls of opaque modules become nodes, with the recorder aside while they run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, product
from typing import Any, NoReturn

import torch

from ...program.opaque import OpaqueCall, Returned
from ...program.program import storage_of, tensor_leaves
from ...program.structures import CONSTANTS, Given, InputSpec, autocast_state
from ...torch_state.dispatch import in_mode, unseen
from ...torch_state.forwards import TAKES_NONE, collectors_watched, hooks_off_in
from ...torch_state.no_trace import unwatched
from ...torch_state.private import ENTERS_COMPILED, MAKE_SUBCLASS, eval_frame, is_functorch_active
from ...torch_state.ranks import arrived
from ...torch_state.reads import call_unseen
from ...torch_state.settings import python_random_state
from ..forward.flat import saved_until_done
from ..forward.location import user_line
from ..forward.patches import CONTENT, TEXT, checkpoint_nothing, replace, wrap
from ..traced import READS, OpaqueError
from .recorder import Recorder, writes_of

_SIZES = ("size", "numel", "nelement", "__len__")

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
REFUSED = (
    *(
        (owner, name, "sets torch's random state ({})")
        for owner, name in product((torch, torch.random), ("manual_seed", "seed", "set_rng_state"))
    ),
    *((torch.Tensor, name, "calls {} of a tensor") for name in _HOOKS),
    (
        torch.autograd.graph.saved_tensors_hooks,
        "__enter__",
        "has hooks of its own for what is saved (saved_tensors_hooks)",
    ),
)
"""Functions that no program holds, by owner and name, and what a forward does that calls one."""


@contextmanager
def python_watched(recorder: Recorder) -> Iterator[PythonCalls]:
    """``recorder`` is told of all that this thread does inside."""
    calls = PythonCalls(recorder)
    try:
        calls.install()
        with collectors_watched(recorder.model, calls.note_hooks):
            yield calls
    finally:
        calls.patches.close()


class PythonCalls:
    """Patches of torch that tell a recorder what this thread does past the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.names = {module: name for name, module in recorder.model.named_modules(remove_duplicate=False)}
        self.thread = threading.get_ident()
        self.draws = python_random_state()
        self.has_draws = False
        self.failed = ""  # the opaque module that was left by an exception
        self.opaque_calls = 0
        self.patches = ExitStack()
        self.away = ExitStack()  # what is on while nobody looks into an opaque module
        self.is_away = False  # the patches are, until the opaque module is left
        self.is_writing_text = False

    @property
    def is_on(self) -> bool:
        """Whether what this thread does is to be written down."""
        return self.recorder.within is None and threading.get_ident() == self.thread

    def note_hooks(self, module: str, why: str) -> None:
        """Note what the hooks of a module do, unless an opaque module hides it."""
        if self.recorder.within is None:
            self.recorder.opaque.setdefault(module, why)

    def look_for_draws(self) -> None:
        """Note whether the running module has drawn random numbers past torch."""
        state = python_random_state()
        if state != self.draws:
            self.draws, self.has_draws = state, True
            where = f"before {user_line()}" if self.recorder.before_call is not None else "in it"
            self.recorder.refuse(
                f"draws random numbers of Python or numpy {where}: those of the sample input would be repeated in "
                "every step. Draw them with torch"
            )

    def install(self) -> None:
        """Patch torch until ``patches`` is closed."""
        stack = self.patches
        wrap(stack, torch.nn.Module, "__call__", self._module)
        replace(stack, torch.autograd.Function, "apply", self._function)
        wrap(stack, torch.autograd.graph, TAKES_NONE, self._transform)
        wrap(stack, eval_frame, ENTERS_COMPILED, self._compiled)
        checkpoint_nothing(stack, self.recorder.model)
        for names, call in ((CONTENT, self._content), (_SIZES, self._size), (TEXT, self._text)):
            for name in names:
                wrap(stack, torch.Tensor, name, call)
        for owner, name, what in REFUSED:
            wrap(stack, owner, name, partial(self._refused, what))
        wrap(stack, torch.Tensor, "requires_grad_", self._requires_grad)
        replace(stack, torch.Tensor, "shape", lambda shape: property(partial(self._size, shape.__get__)))
        replace(
            stack,
            torch.Tensor,
            "requires_grad",
            lambda flag: property(flag.__get__, partial(self._requires_grad, flag.__set__)),
        )
        replace(stack, torch.Tensor, MAKE_SUBCLASS, self._subclass)
        replace(stack, torch.Tensor, "data", lambda data: property(data.__get__, partial(self._put_data, data.__set__)))

    # -- modules and functions -----------------------------------------------------------------------------

    def _module(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = self.names.get(module) if self.is_on else None
        if name is None:
            return call(module, *args, **kwargs)
        self.look_for_draws()
        if name in self.recorder.opaque_names:
            called = self.recorder.model.get_submodule(name)
            try:
                return self._opaque(
                    name, called, partial(self._in_opaque, call, module), args, kwargs, module in unwatched
                )
            except Exception:
                self.failed = self.failed or name
                raise
            finally:
                self.draws = python_random_state()
        with self.recorder.scopes.inside(name):
            result = call(module, *args, **kwargs)
            self.look_for_draws()
            return result

    def _function(self, known: Any) -> Any:
        def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            own = known.__get__(None, kind)
            # The transforms of functorch take a function apart themselves, an operator may have its backward from one.
            if not self.is_on or self.recorder.is_in_operator or is_functorch_active():
                return own(*args, **kwargs)
            strange = [x for x in (*args, *kwargs.values()) if not isinstance(x, (torch.Tensor, *CONSTANTS))]
            if strange:
                what = f"{kind.__name__}, that is given a {type(strange[0]).__name__}, at {user_line()}"
                self.recorder.refuse(f"calls a custom torch.autograd.Function, {what}")
            return self._opaque(self.recorder.scopes.current, kind, partial(self._in_opaque, own), args, kwargs)

        return classmethod(apply)

    def _transform(self, known: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A transform of torch.func that differentiates: opaque modules may run it, then without saved-tensor hooks."""
        if self.is_on:
            self._refuse_at_once(f"differentiates by torch.func at {user_line()}")
        self.recorder.takes_no_hooks = True
        return hooks_off_in(known, *args, **kwargs)

    def _compiled(self, known: Callable[[Any], Any], callback: Any) -> Any:
        """A compiled function begins. An opaque module may call one."""
        if callable(callback) and threading.get_ident() == self.thread:
            if self.is_on:
                self._refuse_at_once(f"calls compiled code at {user_line()}")
            self._look_away()
        return known(callback)

    def _refuse_at_once(self, what: str) -> NoReturn:
        raise OpaqueError(
            f"the forward {what}, which cannot be recorded; put it into a submodule of its own",
            {self.recorder.scopes.current: what},
        )

    # -- opaque modules --------------------------------------------------------------------------------------------

    def _look_away(self) -> None:
        """Nothing is patched until the opaque module is left, which may read numbers out of tensors.

        Compiled code looks at what it calls, tensors of other classes hand calls on.
        """
        self.recorder.counting.add(str(self.recorder.within))
        self.patches.close()
        self.away.enter_context(unseen())
        self.away.enter_context(call_unseen())
        self.is_away = True

    def _in_opaque(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self.away:
                return call(*args, **kwargs)
        finally:
            if self.is_away:
                self.is_away = False
                self.install()

    def _opaque(
        self, name: str, called: Any, call: Callable[..., Any], args: Any, kwargs: Any, is_unwatched: bool = False
    ) -> Any:
        """Call ``called``, an opaque module or a custom function, by ``call``, and write that down as a node."""
        recorder, tensors = self.recorder, self.recorder.tensors
        module, function = (called, None) if isinstance(called, torch.nn.Module) else (None, called)
        held = set() if module is None else set(map(id, chain(module.parameters(), module.buffers())))
        with unseen():
            inputs, given = InputSpec.of(args, kwargs)
            before = Given(args, kwargs)
            recorder.check_known(given)
            nodes = [tensors.node(tensor) for tensor in given]
            versions = [writes_of(tensor) for tensor in given]
        source = user_line()
        with recorder.inside(name, given), saved_until_done():
            if is_unwatched:
                self._look_away()
            result = call(*args, **kwargs)
            if talks := name in recorder.talking:
                with unseen():
                    result = arrived(result)
        with unseen():
            self._check_dense(name, given, "is given")
            self._check_dense(name, tensor_leaves(result), "returns")
            returned, results = Returned.of(result, before, given, versions)
            opaque = OpaqueCall(
                f"_ogc_opaque_{self.opaque_calls}", name, source, inputs, returned, torch.is_grad_enabled(),
                autocast_state(), function=function, talks=talks, takes_no_hooks=recorder.takes_no_hooks,
            )  # fmt: skip
            self.opaque_calls += 1
            self._check_opaque(opaque)
            state = [tensors.node(t) for t in tensors.state.values() if id(t) in held and storage_of(t) is not None]
            holder = None if module is None else tensors.get_attr(name)
            node = recorder.graph.call_function(opaque, (holder, nodes, state))
            what = f"opaque {(function or type(module)).__name__}"
            node.meta.update({"module": name, "source": source, "operator": what, READS: name in recorder.counting})
            recorder.note_opaque(node, [results[number] for number in opaque.new], given)
        return result

    def _check_dense(self, name: str, tensors: list[torch.Tensor], what: str) -> None:
        """Raise OpaqueError unless no program has to hold a sparse tensor between an opaque module and the rest."""
        if (layout := next((t.layout for t in tensors if t.layout is not torch.strided), None)) is not None:
            self.recorder.leaky[name] = f"{what} a tensor that is {layout}, not dense"
            self.recorder.raise_if_leaky()

    def _check_opaque(self, opaque: OpaqueCall) -> None:
        """Note whether something goes in or comes out that is neither a tensor nor the same each time."""
        returned, leaky, name = opaque.returned.outputs, self.recorder.leaky, opaque.module
        strange = [x for x in (*opaque.inputs.constants, *returned.constants) if not isinstance(x, CONSTANTS)]
        numbers = [x for x in returned.leaves if isinstance(x, (int, float)) and not isinstance(x, bool)]
        decides = name in self.recorder.counting
        if strange:
            leaky[name] = f"takes or returns a {type(strange[0]).__name__}, in which tensors may hide"
        elif decides and numbers:
            leaky[name] = "returns a number read out of a tensor"
        elif decides and any(view is not None for view in opaque.returned.views) and "." in name:
            leaky[name] = "returns its own input, as the data will have it"
        elif name in self.recorder.counting_rows and not {opaque.returned.tensors[n].shape for n in opaque.new} <= {
            spec.shape for spec in opaque.inputs.tensors
        }:  # what stands in for collectives gives other counts than it is given
            leaky[name] = "returns tensors of sizes that data of other ranks may decide"

    # -- methods of tensors --------------------------------------------------------------------------------

    def _refused(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_on:
            self.recorder.refuse(f"{what.format(function.__name__)} at {user_line()}")
        with unseen():
            return function(*args, **kwargs)

    def _content(self, method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self.thread and not self.is_writing_text:
            self.recorder.read_content(tensor, f"{method.__name__.strip('_')}() of a tensor")
        with unseen(), in_mode():
            return method(tensor, *args, **kwargs)

    def _size(self, method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_on:
            self.recorder.read_size(tensor)
        return method(tensor, *args, **kwargs)

    def _text(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self.is_writing_text = self.is_writing_text, True
        try:
            with unseen():
                return method(*args, **kwargs)
        finally:
            self.is_writing_text = before

    def _requires_grad(self, method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self.recorder.gradient_begun_at(tensor) if self.is_on else nullcontext():
            return method(tensor, *args, **kwargs)

    def _subclass(self, known: Any) -> Any:
        def make_subclass(*args: Any, **kwargs: Any) -> Any:
            with unseen():  # it must not be known to Python before
                return known(*args, **kwargs)

        return staticmethod(make_subclass)

    def _put_data(self, put: Callable[..., None], tensor: torch.Tensor, value: torch.Tensor) -> None:
        if self.is_on:
            self.recorder.refuse(f"assigns to .data of a tensor at {user_line()}")
        with unseen():
            self.recorder.protect(tensor)
        put(tensor, value)
