"""Sees what goes past PyTorch's dispatcher while a forward is recorded: calls of modules and custom functions, and the
methods of tensors by which Python gets hold of their content, hooks, memory or history."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from ...torch_state.hooks import collectors_watched, is_compiled
from ...torch_state.private import MAKE_SUBCLASS, is_functorch_active
from ...torch_state.random_state import python_random_state
from ..forward.location import user_line
from ..forward.patches import CONTENT, TEXT, checkpoint_nothing, replace
from .dispatch import unseen
from .leaf_calls import LeafCalls
from .recorder import Recorder

_SIZES = ("size", "numel", "nelement", "__len__")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


@contextmanager
def python_watched(model: torch.nn.Module, recorder: Recorder, leaves: Collection[str]) -> Iterator[Watch]:
    """``recorder`` is told of all that this thread does inside."""
    watch = Watch(model, recorder, leaves)
    try:
        watch.install()
        with collectors_watched(model, _told_of_hooks(recorder)):
            yield watch
    finally:
        watch.patches.close()


def _told_of_hooks(recorder: Recorder) -> Callable[[str, str], object]:
    return lambda module, why: None if recorder.leaf is not None else recorder.opaque.setdefault(module, why)


class Watch:
    """Patches of torch that tell a recorder what this thread does past the dispatcher."""

    def __init__(self, model: torch.nn.Module, recorder: Recorder, leaves: Collection[str]) -> None:
        self.recorder = recorder
        self.leaves = leaves
        self.names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
        self.calls = LeafCalls(recorder, model)
        self.thread = threading.get_ident()
        self.draws = python_random_state()
        self.has_draws = False
        self.patches = ExitStack()
        self.is_writing_text = False

    @property
    def is_on(self) -> bool:
        """Whether what this thread does is to be written down."""
        return self.recorder.leaf is None and threading.get_ident() == self.thread

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nothing is patched inside: for compiled code, which looks at what it calls."""
        self.patches.close()
        try:
            with unseen():
                yield
        finally:
            self.install()

    def install(self) -> None:
        """Patch torch until ``patches`` is closed."""
        stack = self.patches
        replace(stack, torch.nn.Module, "__call__", self._module)
        replace(stack, torch.autograd.Function, "apply", self._function)
        for name in CONTENT:
            replace(stack, torch.Tensor, name, self._content)
        checkpoint_nothing(stack)
        for name in _SIZES:
            replace(stack, torch.Tensor, name, self._size)
        replace(stack, torch.Tensor, "shape", lambda shape: property(self._size(shape.__get__)))
        for name in TEXT:
            replace(stack, torch.Tensor, name, self._text)
        for name in _HOOKS:
            replace(stack, torch.Tensor, name, self._hook)
        replace(stack, torch.Tensor, "requires_grad_", self._requires_grad)
        replace(stack, torch.Tensor, "requires_grad", self._requires_grad_property)
        replace(stack, torch.Tensor, MAKE_SUBCLASS, self._subclass)
        replace(stack, torch.Tensor, "data", self._data)

    def _module(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def module_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(module) if self.is_on else None
            if name is None:
                return call(module, *args, **kwargs)
            self.look_for_draws()
            try:
                if name in self.leaves:
                    own = call.__get__(module)
                    return self.calls.module(name, self._compiled(own) if is_compiled(module) else own, args, kwargs)
                with self.recorder.scopes.inside(name):
                    result = call(module, *args, **kwargs)
                    self.look_for_draws()
                    return result
            finally:
                if name in self.leaves:
                    self.draws = python_random_state()

        return module_call

    def _compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def compiled_call(*args: Any, **kwargs: Any) -> Any:
            with self.away():
                return call(*args, **kwargs)

        return compiled_call

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

    def _function(self, call: Any) -> Any:
        def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            own = call.__get__(None, kind)
            is_transformed = is_functorch_active()  # then it is taken apart by them
            is_leaf = self.is_on and not is_transformed
            return self.calls.function(kind, own, args, kwargs) if is_leaf else own(*args, **kwargs)

        return classmethod(apply)

    def _content(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def content(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self.thread and not self.is_writing_text:
                self.recorder.read_content(tensor, f"{method.__name__.strip('_')}() of a tensor")
            with unseen():
                return method(tensor, *args, **kwargs)

        return content

    def _size(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def size(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.recorder.read_size(tensor)
            return method(tensor, *args, **kwargs)

        return size

    def _text(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def text(*args: Any, **kwargs: Any) -> Any:
            before, self.is_writing_text = self.is_writing_text, True
            try:
                with unseen():
                    return method(*args, **kwargs)
            finally:
                self.is_writing_text = before

        return text

    def _hook(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.recorder.refuse(f"calls {method.__name__} of a tensor at {user_line()}")
            return method(*args, **kwargs)

        return hook

    def _requires_grad(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.gradient_begun_at(tensor) if self.is_on else nullcontext():
                return method(tensor, *args, **kwargs)

        return requires_grad_

    def _requires_grad_property(self, flag: Any) -> property:
        def put(tensor: torch.Tensor, value: bool) -> None:
            with self.recorder.gradient_begun_at(tensor) if self.is_on else nullcontext():
                flag.__set__(tensor, value)

        return property(flag.__get__, put)

    def _subclass(self, method: Callable[..., Any]) -> Any:
        def make_subclass(*args: Any, **kwargs: Any) -> Any:
            with unseen():  # it must not be known to Python before
                return method(*args, **kwargs)

        return staticmethod(make_subclass)

    def _data(self, data: Any) -> property:
        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if self.is_on:
                self.recorder.refuse(f"assigns to .data of a tensor at {user_line()}")
            with unseen():
                self.recorder.protect(tensor)
            data.__set__(tensor, value)

        return property(lambda tensor: data.__get__(tensor), put)
