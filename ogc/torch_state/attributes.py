"""Plain attributes that a forward changes. A replayed program does not; what depends on them would be wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from .no_trace import DEEP, LARGE, attributes, items, length


def attributes_of(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of each module, by its name; what they hold, not what it is held in."""
    return {
        name: {key: _content(value) for key, value in attributes(module).items()}
        for name, module in model.named_modules()
    }


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], leaves: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The modules that are not inside leaves, with the first attribute of each that is not the same."""
    covered = tuple(f"{leaf}." for leaf in leaves)
    for name, found in after.items():
        known = before.get(name, {})
        different = (
            key for key in dict.fromkeys((*found, *known)) if known.get(key, _ABSENT) != found.get(key, _ABSENT)
        )
        first = next(different, None)
        if first is not None and not f"{name}.".startswith(covered):
            yield name, first


_ABSENT = object()


class _Itself:
    """Equal to what wraps the same object."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.wrapped is other.wrapped

    __hash__ = None  # type: ignore[assignment]


def _content(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)  # a NaN is the same as before
    if not isinstance(value, (list, tuple, dict, set)) or depth == DEEP:
        return _Itself(value)
    if length(value) > LARGE:
        return type(value), length(value)
    if isinstance(value, set):
        return type(value), frozenset(value)
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(items(value))
    return type(value), [(key, _content(item, depth + 1)) for key, item in pairs]
