"""What the user tells of modules: whose results plans save, whose they recompute, and which run once.

An entry is the name of a module, a pattern such as ``"layers.*.attn"`` or a type. It holds for all operations within
the outermost modules that match it; of two entries that say different things, the one for the inner module holds.

*Keep* and *once* say the same of an operation: no plan runs it again, so that what it makes is saved from the forward
wherever it is needed behind it. *Recompute* says that nothing which it makes stays from the forward to the backward.
But what a module with submodules hands on may stay: from there the next one is recomputed. So may what the caller
holds, and what cannot be recomputed, as it changes the model or depends on what is gone.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from ..errors import InputError
from ..graph import Graph, Operation, Told

log = logging.getLogger(__name__)

Entry = str | type
"""The name of a module, a pattern of names, or a type of modules."""

Kinds = Mapping[str, tuple[str, ...]]
"""For each module, by its name, the names of its class and of those that this inherits from."""


@dataclass(frozen=True)
class Instructions:
    """Entries by what they say.

    Raises:
        InputError: something is no list of entries.
    """

    keep: Iterable[Entry] = ()
    recompute: Iterable[Entry] = ()
    once: Iterable[Entry] = ()
    words: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for argument, entries in self._arguments():
            if isinstance(entries, (str, type)) or not isinstance(entries, Iterable):
                raise InputError(f"{argument} must be a list of module names, patterns and types, not {entries!r}")
            entries = tuple(entries)
            for entry in entries:
                if not isinstance(entry, (str, type)):
                    raise InputError(f"{argument} must hold module names, patterns and types, not {entry!r}")
            object.__setattr__(self, argument.removesuffix("="), entries)

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        return ((f"{name}=", getattr(self, name)) for name in ("keep", "recompute", "once"))

    def __bool__(self) -> bool:
        return any(entries for _, entries in self._arguments())

    def __str__(self) -> str:
        said = (f"{argument}{_listed(entries)}" for argument, entries in self._arguments() if entries)
        return self.words or " and ".join(said)

    def check(self, kinds: Kinds) -> None:
        """Raise InputError unless each entry matches a module of these, and no two say different things of one."""
        for argument, entries in self._arguments():
            for entry in entries:
                if not any(_matches(entry, name, kinds) for name in kinds):
                    raise InputError(_unmatched(argument, entry, kinds))
        for name in kinds:
            self._said(name, kinds)

    def named(self, kinds: Kinds) -> Instructions:
        """The same by the names of modules alone. InputError: as :meth:`check` raises it."""
        self.check(kinds)
        names = {
            argument.removesuffix("="): tuple(
                name
                for name in kinds
                if any(_outermost(entry, _around(name), kinds) == len(_around(name)) - 1 for entry in entries)
            )
            for argument, entries in self._arguments()
        }
        return Instructions(**names, words=str(self))

    def warn_of(self, plain: Mapping[str, str]) -> None:
        """Log that what modules without a plan compute is not recomputed, where that was told; by name, and why."""
        for name, why in plain.items():
            if self._said(name, {})[0] == RECOMPUTE:
                log.warning("%s: %s, so that %s holds for its parts alone", name or "the model", why, self)

    def within(self, name: str) -> Instructions:
        """What names of modules say of those in a submodule, with names as seen from there."""
        around = _around(name)
        outside = {
            argument: max((around.index(entry) for entry in entries if entry in around), default=-1)
            for argument, entries in self._arguments()
        }
        inside = {
            argument.removesuffix("="): (
                *([""] if outside[argument] == max(outside.values()) >= 0 else []),
                *(str(entry).removeprefix(f"{name}.") for entry in entries if str(entry).startswith(f"{name}.")),
            )
            for argument, entries in self._arguments()
        }
        return Instructions(**inside, words=self.words)

    def on(self, graph: Graph) -> Graph:
        """The graph whose plans all keep to this.

        Raises:
            InputError: two entries say different things of one module.
        """
        if not self:
            return graph
        known: dict[Instructions, Graph] = vars(graph).setdefault("_told", {})
        if self not in known:
            known[self] = self._on(graph)
        return known[self]

    def _on(self, graph: Graph) -> Graph:
        ops = graph.operations
        of_module = {module: self._said(module, graph.kinds) for module in {op.module for op in ops}}
        said = [self._of_hidden(graph, op) or of_module[op.module] for op in ops]
        once = {t for t, op in enumerate(ops) if said[t][0] in (KEEP, ONCE) and op.writes}
        saved = {v for t in once for v in ops[t].writes}
        may_stay = _MayStay(graph)
        wanted = ((v, *said[t]) for v, t in enumerate(graph.last_writes) if v not in saved)
        lost = {v for v, what, around in wanted if what == RECOMPUTE and not may_stay(v, around)}
        operations = tuple(replace(op, replayable=False) if t in once else op for t, op in enumerate(ops))
        in_lost = {t for t, op in enumerate(ops) if t < graph.end and _would_keep(graph, t, op, lost)}
        told = Told(frozenset(saved), frozenset(lost), frozenset(in_lost), str(self))
        return replace(graph, operations=operations, told=told, free=graph)

    def _of_hidden(self, graph: Graph, op: Operation) -> tuple[str, str] | None:
        """What holds for an opaque module as it does for one that it hides; None if nothing does."""
        if not op.target.startswith("opaque "):
            return None
        seen = {name for one in graph.operations for name in _around(one.module)}
        hidden = [name for name in graph.kinds if name not in seen and _is_in(name, op.module)]
        said = {self._said(name, graph.kinds) for name in hidden}
        inside = [what for what, around in said if around not in seen]
        if RECOMPUTE in inside:
            log.warning("%s: it is called as a whole, so that %s cannot hold for what is in it", op.module, self)
        return (KEEP, op.module) if {KEEP, ONCE}.intersection(inside) else None

    def _said(self, module: str, kinds: Kinds) -> tuple[str, str]:
        """What holds for the operations of a module, and the module around them of which it was said."""
        around = _around(module)
        found = {
            argument: max((_outermost(entry, around, kinds) for entry in entries), default=-1)
            for argument, entries in self._arguments()
        }
        keeps = max((KEEP, ONCE), key=found.__getitem__)
        if found[keeps] == found[RECOMPUTE] >= 0:
            name = around[found[keeps]] or "the model"
            raise InputError(f"{keeps} and {RECOMPUTE} both name {name}; leave one of them out, or name modules in it")
        what = max((keeps, RECOMPUTE), key=found.__getitem__)
        return (what, around[found[what]]) if found[what] >= 0 else ("", "")


KEEP, RECOMPUTE, ONCE = "keep=", "recompute=", "once="

NO_INSTRUCTIONS = Instructions()
"""Where nothing is told."""


def kinds_of(operations: Iterable[Operation]) -> dict[str, tuple[str, ...]]:
    """The modules that operations name, of no known type."""
    return {name: () for module in dict.fromkeys(op.module for op in operations) for name in _around(module)}


def kind_of(one: type) -> tuple[str, ...]:
    """The names of a class and of those that it inherits from."""
    return tuple(map(_name_of, one.__mro__[:-1]))


def _name_of(one: type) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _around(module: str) -> list[str]:
    """The names of the modules around what a module calls, from the model itself on."""
    return ["", *accumulate(module.split("."), "{}.{}".format)] if module else [""]


def _matches(entry: Entry, name: str, kinds: Kinds) -> bool:
    if isinstance(entry, type):
        return _name_of(entry) in kinds.get(name, ())
    return name == entry if not name else fnmatchcase(name, entry)


def _outermost(entry: Entry, around: list[str], kinds: Kinds) -> int:
    """The place of the first of these modules that matches, or -1."""
    return next((place for place, name in enumerate(around) if _matches(entry, name, kinds)), -1)


class _MayStay:
    """Whether a value may stay though ``recompute`` names a module ``around`` its last write."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[int, set[str]] = {}
        self.modules = {op.module for op in graph.operations}
        self.fixed = {v for op in graph.operations[graph.end :] for v in op.saves}
        for op in graph.operations:
            self.fixed.update(op.writes if not op.replayable else ())
            for v in op.reads:
                self.readers.setdefault(v, set()).add(op.module)

    def __call__(self, v: int, around: str) -> bool:
        value = self.graph.values[v]
        if value.is_output or value.is_returned or v in self.fixed:
            return True
        has_submodules = any(name != around and _is_in(name, around) for name in self.modules)
        return has_submodules and not all(_is_in(name, around) for name in self.readers.get(v, ()))


def _is_in(name: str, around: str) -> bool:
    return not around or f"{name}.".startswith(f"{around}.")


def _would_keep(graph: Graph, t: int, op: Operation, lost: Set[int]) -> bool:
    """Whether an operation in a segment that is saved keeps some of these values, or internal tensors beside them."""
    saves = {*op.saves, *(op.low_memory.saves if op.low_memory else ())}
    has_internals = op.internal_bytes > 0 and not graph.keeps_internals[t]
    return not saves.isdisjoint(lost) or (has_internals and bool(op.writes) and lost >= set(op.writes))


def _unmatched(argument: str, entry: Entry, kinds: Kinds) -> str:
    if isinstance(entry, type):
        known, wanted, what = (
            sorted({kind[0].rpartition(".")[2] for kind in kinds.values() if kind}),
            entry.__name__,
            "is a",
        )
        if not known:
            return f"{argument} this graph does not know the types of its modules; give names or patterns for {wanted}"
    else:
        known, wanted, what = [name for name in kinds if name], entry, "is called"
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or known[:3]
    return f"{argument} no submodule {what} {wanted!r}; the nearest are {', '.join(near) or 'none'}"


def _listed(entries: Iterable[Entry]) -> str:
    return f"[{', '.join(_name_of(one) if isinstance(one, type) else repr(one) for one in entries)}]"
