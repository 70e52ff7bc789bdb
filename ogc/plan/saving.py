"""Plans as text: decisions, each with the fingerprint of the graph that it is for.

One format holds both kinds: the plan of a graph, chunked or not, and those of a model in parts. Costs are noted for
readers; the simulator weighs a plan that is loaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from operator import index
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..graph import Graph, Operation
from .decisions import Decisions, Offload, Policies, Policy, Segment

log = logging.getLogger(__name__)

FORMAT, VERSION = "ogc plan", 2

WHOLE, PARTS = "plan", "parts"
"""What a text holds: a plan, or the plans of a model's parts."""


@cache
def torch_version() -> str | None:
    """Of the torch that is installed, which is not imported for that."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Fingerprint:
    """What a graph computes on how many bytes, the same on every machine: of each field, a number and a hash."""

    operations: str
    modules: str
    uses: str
    sizes: str

    @classmethod
    def of(cls, graph: Graph) -> Fingerprint:
        """That of a graph."""
        ops, values = graph.operations, graph.values
        uses = [*((op.reads, op.writes, op.saves) for op in ops), *((v.is_output, v.is_returned) for v in values)]
        return cls(
            operations=_digest(len(ops), [*map(_named, ops), graph.outside]),
            modules=_digest(len({op.module for op in ops}), [op.module for op in ops]),
            uses=_digest(len(values), uses),
            sizes=_digest(sum(value.bytes for value in values), [value.bytes for value in values]),
        )

    def difference(self, other: Fingerprint) -> str:
        """In what another graph differs, in words; "" if in nothing."""
        if self.operations != other.operations:
            ours, theirs = _count(self.operations), _count(other.operations)
            return "other operations" if ours == theirs else f"other operations ({theirs}, not {ours})"
        words = {
            "modules": "other modules around the operations",
            "uses": "operations that read, write or save other values",
            "sizes": f"other sizes of values ({_count(other.sizes)} bytes in all, not {_count(self.sizes)})",
        }
        return ", ".join(text for name, text in words.items() if getattr(self, name) != getattr(other, name))


def structure_of(graph: Graph) -> tuple[Any, ...]:
    """All of a graph that plans depend on but times."""
    once = [t for t, op in enumerate(graph.operations) if not op.replayable]
    where, told = graph.device.partition(":")[0], (sorted(graph.told.saved), sorted(graph.told.recomputed))
    found = astuple(Fingerprint.of(graph)), once, where, graph.profile, graph.low_memory, graph.left_bytes, told
    others: tuple[Any, ...] = ("in flight", graph.in_flight) if graph.in_flight > 1 else ()
    if graph.host is not None:
        others = *others, "offloads", graph.host.values and sorted(graph.host.values)
    return *found, *others


def _named(op: Operation) -> str:
    """What an operation calls, as the files of this version name it: of an opaque module, an earlier word."""
    return re.sub(r"^opaque (?=\w)", "leaf ", op.target)


def _digest(count: int, what: Any) -> str:
    return f"{count} {sha256(json.dumps(what).encode()).hexdigest()[:32]}"


def _count(digest: str) -> str:
    return digest.partition(" ")[0]


@dataclass(frozen=True)
class SavedDecisions:
    """Decisions, and the fingerprint of the graph that they are for; ``name`` is that of a part."""

    decisions: Decisions
    fingerprint: Fingerprint
    name: str = ""


@dataclass(frozen=True)
class SavedPlan:
    """All that a plan decides, of a whole model or of its parts.

    Attributes:
        plans: one, or one for each part.
        kind: what they are.
        solver: the name of the solver that chose them.
        budget_bytes, max_overhead: what was asked for.
        chunks: into how many chunks regions divide the batch, 1 for none.
        regions: the first and last operation of each of these, in the graph without chunks.
        unsliced: the fingerprint of that graph, if there are some.
        idle: parts for which no plan is better than the plain module.
        torch: the version that it was made with.
        about: what is only for readers: costs, the device.
    """

    plans: tuple[SavedDecisions, ...]
    kind: str = WHOLE
    solver: str = ""
    budget_bytes: int | None = None
    max_overhead: float | None = None
    chunks: int = 1
    regions: tuple[tuple[str, str], ...] = ()
    unchunked: Fingerprint | None = None
    idle: tuple[SavedDecisions, ...] = ()
    torch: str | None = field(default_factory=torch_version, compare=False)
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """It as JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        plain["unchunked"] = self.unchunked and asdict(self.unchunked)
        lists = {name: list(map(_written, getattr(self, name))) for name in ("idle", "plans")}
        return json.dumps({"format": FORMAT, "version": VERSION, **plain, **lists}, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str, source: str = "the text") -> SavedPlan:
        """What :attr:`text` was made of.

        Raises:
            PlanError: it is no plan, or of an unknown version; the message begins with ``source``.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{source} is no plan: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise PlanError(f"{source} is no plan, as plan.save() writes it")
        if found.get("version") != VERSION:
            raise PlanError(
                f"{source} is a plan of version {found.get('version')!r}, and this ogc reads version {VERSION}; "
                "plan again, or load it with the ogc that wrote it"
            )
        try:
            plan = _read(found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{source} is a damaged plan ({type(error).__name__}: {error}); plan again") from None
        if plan.torch != torch_version():
            log.info("%s was saved with torch %s, and this is %s", source, plan.torch, torch_version())
        return plan

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SavedPlan:
        """What :meth:`write` wrote.

        Raises:
            OSError: the file cannot be read.
            PlanError: as :meth:`from_text` does.
        """
        try:
            return cls.from_text(Path(path).read_text("utf-8"), os.fspath(path))
        except UnicodeDecodeError:
            raise PlanError(f"{os.fspath(path)} is no plan: it is no text") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is at no time half written."""
        write_at_once(path, self.text)


def saved_decisions(graph: Graph, decisions: Decisions, name: str = "") -> SavedDecisions:
    """The decisions of a plan for a graph."""
    return SavedDecisions(decisions, Fingerprint.of(graph), name)


def write_at_once(path: str | os.PathLike[str], text: str) -> None:
    """Put a text into a file such that no other reader or writer sees a part of it."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _written(plan: SavedDecisions) -> dict[str, Any]:
    decisions = plan.decisions
    away = {str(v): moments for v, *moments in decisions.offloaded}
    return {
        "name": plan.name,
        "fingerprint": asdict(plan.fingerprint),
        "is_plain": decisions.is_plain,
        "low_memory": decisions.low_memory,
        "policies": _written_policies(decisions.policies),
        "segments": list(map(_written_segment, decisions.segments)),
        **({"offloaded": away} if away else {}),
    }


def _written_segment(segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {"operations": [segment.start, segment.stop]}
    if segment.parts:
        found["parts"] = list(map(_written_segment, segment.parts))
    return {**found, "policies": _written_policies(segment.policies)} if segment.policies else found


def _written_policies(policies: Policies) -> dict[str, str]:
    return {str(v): policy.name.lower() for v, policy in policies}


def _read(found: Mapping[str, Any]) -> SavedPlan:
    plans = tuple(map(_read_decisions, found["plans"]))
    if found["kind"] not in (WHOLE, PARTS) or (found["kind"] == WHOLE) > (len(plans) == 1):
        raise ValueError(f"{len(plans)} plans of kind {found['kind']!r}")
    budget, share = found["budget_bytes"], found["max_overhead"]
    return SavedPlan(
        plans,
        found["kind"],
        _text(found["solver"]),
        None if budget is None else index(budget),
        None if share is None else float(share),
        index(found["chunks"]),
        tuple((_text(first), _text(last)) for first, last in found["regions"]),
        _read_fingerprint(found["unchunked"]) if found["regions"] else None,
        tuple(map(_read_decisions, found["idle"])),
        None if found["torch"] is None else _text(found["torch"]),
        dict(found["about"]),
    )


def _read_decisions(found: Mapping[str, Any]) -> SavedDecisions:
    decisions = Decisions(
        _read_segments(found["segments"]),
        _read_policies(found["policies"]),
        tuple(sorted(map(index, found["low_memory"]))),
        bool(found["is_plain"]),
        tuple(sorted(Offload(int(v), *map(index, moments)) for v, moments in found.get("offloaded", {}).items())),
    )
    return SavedDecisions(decisions, _read_fingerprint(found["fingerprint"]), _text(found["name"]))


def _read_fingerprint(found: Mapping[str, Any]) -> Fingerprint:
    return Fingerprint(**{name: _text(value) for name, value in found.items()})


def _read_segments(found: Iterable[Mapping[str, Any]]) -> tuple[Segment, ...]:
    segments = []
    for one in found:
        start, stop = map(index, one["operations"])
        segments.append(
            Segment(start, stop, _read_segments(one.get("parts", ())), _read_policies(one.get("policies", {})))
        )
    return tuple(segments)


def _read_policies(found: Mapping[str, str]) -> Policies:
    return tuple(sorted((int(v), Policy[policy.upper()]) for v, policy in found.items()))


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is no text")
    return found
