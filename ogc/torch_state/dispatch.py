"""Sees each operator that PyTorch dispatches on a thread, above autocast and autograd, without being seen.

A dispatch key that PyTorch leaves to others has no kernels of its own. While it is on, every call of an operator comes
here first, before it is cast, differentiated or decomposed. No tracing mode is on, and sizes are Python ints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from ..process import OnThread
from .private import AUTOCAST, RECORDING, OpOverload, TorchDispatchMode, has_kernel, not_recording, recording, schema_of

_handler: OnThread[Handler | None] = OnThread(None)
_modes: OnThread[tuple[TorchDispatchMode, ...]] = OnThread(())


class Call(NamedTuple):
    """One call of an operator, as it was made."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: Any  # of the dispatcher

    @property
    def is_cast(self) -> bool:
        """Whether autocast is on and has a rule of its own for the operator."""
        return any(map(self.keys.has, _keys_of_casts(self.operator)))

    @property
    def is_composite(self) -> bool:
        """Whether the operator has no derivative of its own, but is made of others."""
        return bool(has_kernel(self.operator.name(), "CompositeImplicitAutograd"))

    @property
    def takes_numbers(self) -> bool:
        """Whether it was given numbers in the place of tensors."""
        wanted = zip(self.args, schema_of(self.operator).arguments, strict=False)
        numbers = (bool, int, float, complex)
        return any(isinstance(given, numbers) and str(argument.type) == "Tensor" for given, argument in wanted)

    def run(self) -> Any:
        """The result; what the operator is made of is not seen."""
        with unseen(), in_mode():
            return self.operator(*self.args, **self.kwargs)

    def made(self) -> Any:
        """The result; operators that autocast casts for are handed to the handler, in whatever they are called."""
        return self.open() if self.is_cast or self.is_composite else self.run()

    def open(self) -> Any:
        """The result; each operator that this one is made of is handed to the handler in its turn."""
        if self.takes_numbers:  # which redispatch does not take
            return self.run()
        return self.operator.redispatch(self.keys.remove(RECORDING), *self.args, **self.kwargs)


@cache
def _keys_of_casts(operator: OpOverload) -> list[Any]:
    """The dispatch keys of autocast for which the operator has a rule."""
    return [key for text, key in AUTOCAST.items() if has_kernel(operator.name(), text)]


def complete(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the default values of those that were not given."""
    positional, named = list(args), dict(kwargs)
    for name, is_named, default in _parameters(operator)[len(args) :]:
        given = named.pop(name, default)
        if is_named:
            named[name] = given
        else:
            positional.append(given)
    return tuple(positional), named


@cache
def _parameters(operator: OpOverload) -> list[tuple[str, bool, Any]]:
    """The arguments of an operator: the name, whether it is given by that alone, the default value."""
    return [(one.name, one.kwarg_only, one.default_value) for one in schema_of(operator).arguments]


_kind: OnThread[type[Call]] = OnThread(Call)


def calls_are(kind: type[Call]) -> AbstractContextManager[None]:
    """Inside, on this thread, calls are handed on as another class; see :func:`made_as_they_are`."""
    return _kind.set_to(kind)


def made_as_they_are() -> AbstractContextManager[None]:
    """Inside, calls of a class of their own run as it says, whether a handler wants them or not."""
    is_ordinary = _kind.value is Call or _handler.value is not None
    return nullcontext() if is_ordinary else dispatched_to(lambda call: call.made())


Handler = Callable[[Call], Any]
"""Runs each call in its place and returns its result."""


@contextmanager
def dispatched_to(handler: Handler) -> Iterator[None]:
    """Hand each call of an operator that is made inside to ``handler``."""
    _install()
    is_first = _handler.value is None
    with _handler.set_to(handler), out_of_mode() if is_first else nullcontext(), recording():
        yield


class OperatorMode(TorchDispatchMode):
    """Has each operator that is called below autograd run by ``called``; compiled code runs compiled in it, too."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch.compile may compile and run what is called inside, not eager in its place."""
        return True

    def called(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call."""
        return operator(*args, **kwargs)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(operator, args, kwargs or {})


@contextmanager
def run_in(mode: TorchDispatchMode) -> Iterator[None]:
    """Run operators in a mode, also those that a handler of :func:`dispatched_to` runs.

    The mode is off in the handler: PyTorch finds no fallbacks written in Python while one is on.
    """
    with _modes.set_to((*_modes.value, mode)), mode:
        yield


@contextmanager
def out_of_mode() -> Iterator[None]:
    """Run operators as if :func:`run_in` were not; its modes must be the innermost ones."""
    modes = _modes.value
    for mode in reversed(modes):
        mode.__exit__(None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            mode.__enter__()


def in_mode() -> AbstractContextManager[None]:
    """Run operators in the modes of :func:`run_in` where they are off."""
    return _entered(_modes.value) if _modes.value else _NOTHING


@contextmanager
def _entered(modes: tuple[TorchDispatchMode, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


_NOTHING = nullcontext()


unseen: Callable[[], AbstractContextManager[None]] = not_recording
"""Operators that are called inside are handed to nobody."""


@cache
def _install() -> torch.library.Library:
    library = torch.library.Library("_", "IMPL")
    library.fallback(_dispatch, "DeferredInit", with_keyset=True)
    return library  # which takes the function back when it is let go


def _dispatch(keys: Any, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    call = _kind.value(operator, args, kwargs, keys)
    handler = _handler.value
    return call.run() if handler is None else handler(call)  # none on a thread that was started inside
