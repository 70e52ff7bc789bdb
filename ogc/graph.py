"""The weighted computation graph: operations in program order and the values they make. Nothing here needs torch.

A *value* is one tensor storage (views share their base's value); parameters, buffers and the inputs of the forward
pass are not values, because they stay in memory whatever the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from .errors import InputError, ParseError, optional

if TYPE_CHECKING:
    import networkx as nx


MIB = 2**20
"""Bytes of the unit in which sizes are printed."""


@dataclass(frozen=True)
class Value:
    """One tensor storage made by the program: its name and its size in bytes."""

    name: str
    bytes: int
    is_output: bool = False  # held by the caller whom it is returned to, or by autograd's graph, beyond the backward
    is_returned: bool = False  # returned to the caller, who lets go of it before the backward pass
    held_until: int | None = None  # the last operation during which the plain forward holds it, after its last use


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one implementation of an operation costs (bytes and seconds): PyTorch's own operator or a low-memory one."""

    saves: tuple[int, ...] = ()  # values that its backward reads
    internal_bytes: int = 0  # tensors saved for its backward that are no value (statistics, masks)
    scratch_bytes: int = 0  # temporaries of its forward
    backward_bytes: int = 0  # most gradients and temporaries alive while its backward runs
    late_bytes: int = 0  # of these, once it has released what it saved, if it does so before it is done
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    repeat_seconds: float | None = None  # of its forward where its internal tensors are there; None: as ever
    forward_flops: int = 0
    backward_flops: int = 0
    again_seconds: float = 0.0  # of a forward that is part of its backward, beyond ``backward_seconds``
    again_flops: int = 0


@dataclass(frozen=True)
class Operation(Variant):
    """One node of the program, with the costs of PyTorch's own operator, and of its low-memory variant if it has one.

    ``writes`` names the values the operation makes and those it changes in place; the first operation to
    write a value is its producer. ``gradient_bytes`` and ``backward_bytes`` do not depend on the plan:
    checkpointing changes which values are in memory, never which gradients are.
    """

    name: str
    target: str = ""  # the operator, e.g. aten.convolution
    module: str = ""  # qualified name of the module that called it
    source: str = ""  # file:line of the user's code
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    gradient_bytes: int = 0  # gradients alive, copies of them too, when its backward asks for what it saved
    saved_tensors: int = 0  # how many tensors autograd saves for its backward
    replayable: bool = True  # False: running it twice would change the model or the numbers
    takes_over: int | None = None  # a value whose storage its result takes where no cut separates the two
    low_memory: Variant | None = None  # a plan decides which of the two runs
    plain_scratch_bytes: int | None = None  # of the plain model, where that takes less, or runs what nothing uses
    plain_backward_bytes: int | None = None  # of the plain model, where that runs another operator there

    def in_variant(self, is_low_memory: bool) -> Operation:
        """The operation with one of its variants alone."""
        if self.low_memory is None:
            return self
        return replace(self, low_memory=None, **(vars(self.low_memory) if is_low_memory else {}))

    @property
    def as_plain(self) -> Operation:
        """The operation as the plain model runs it."""
        if self.plain_scratch_bytes is None and self.plain_backward_bytes is None:
            return self
        scratch = self.scratch_bytes if self.plain_scratch_bytes is None else self.plain_scratch_bytes
        backward = self.backward_bytes if self.plain_backward_bytes is None else self.plain_backward_bytes
        return replace(self, scratch_bytes=scratch, backward_bytes=backward)

    def scaled(self, share: float) -> Operation:
        """The operation with so many times the bytes, seconds and FLOPs."""
        variant = self.low_memory
        scaled = variant and replace(variant, **_scaled(variant, share))
        return replace(self, low_memory=scaled, **_scaled(self, share))

    def renumbered(self, numbers: Sequence[int]) -> Operation:
        """The operation with other numbers for values, by the numbers that it has."""

        def new(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(numbers[v] for v in values)

        taken, variant = self.takes_over, self.low_memory
        return replace(
            self,
            reads=new(self.reads),
            writes=new(self.writes),
            saves=new(self.saves),
            takes_over=None if taken is None else numbers[taken],
            low_memory=variant and replace(variant, saves=new(variant.saves)),
        )

    @property
    def may_save(self) -> tuple[int, ...]:
        """The values that it saves in one of its variants or the other."""
        return self.saves if self.low_memory is None else (*self.saves, *self.low_memory.saves)

    @property
    def variant_seconds(self) -> float:
        """What its low-memory variant takes more, forward and backward."""
        low = self.low_memory or self
        return low.forward_seconds + low.backward_seconds - self.forward_seconds - self.backward_seconds

    @property
    def variant_saves_otherwise(self) -> bool:
        """Whether its low-memory variant saves something else, and does not only take other bytes while it runs."""
        low = self.low_memory or self
        return self.internal_bytes != low.internal_bytes or set(self.saves) != set(low.saves)


def _scaled(variant: Variant, share: float) -> dict[str, Any]:
    names = (name for name in variant.__dataclass_fields__ if name.endswith(("_bytes", "_seconds", "_flops")))
    return {name: type(weight)(share * weight) for name in names if (weight := getattr(variant, name))}


SMALL_INTERNALS = 64
"""Internal tensors this many times smaller than the largest value of their operation are always kept."""


@dataclass(frozen=True)
class RuntimeCosts:
    """Seconds of the host that a plan takes beside its operators.

    Attributes:
        run: for each recomputation.
        saved_tensor: for each tensor that autograd saves where a recomputation will supply it.
        left_out: of work that only the plain model does: its own Python, and copies of what it writes over.
        choice: for each call, to see that the plan is for it.
        overlapped: by which any step takes less than its operations add up to, as host and GPU work side by side.
    """

    run: float = 0.0
    saved_tensor: float = 0.0
    left_out: float = 0.0
    choice: float = 0.0
    overlapped: float = 0.0


@dataclass(frozen=True)
class Host:
    """Where values may be offloaded to, and how quickly.

    Attributes:
        out, back: bytes per second of copies out of the device's memory, and of those back; more than 0.
        values: those that may be offloaded; None for all that the caller does not hold.
        folder: of the file that they go to; "" for pinned memory.
        each: seconds that a step takes longer for each of them, however small.
        memory: most bytes that may be there of one forward; None for as many as there are.
    """

    out: float
    back: float
    values: frozenset[int] | None = None
    folder: str = ""
    each: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        if not (self.out > 0 and self.back > 0):
            raise InputError(f"bandwidth must be bytes per second, more than 0, not {self.out!r} and {self.back!r}")


@dataclass(frozen=True)
class Told:
    """What every plan of a graph keeps to, because the user said so; see :mod:`ogc.plan.told`.

    Attributes:
        saved: values that are saved from the forward wherever they are needed behind it.
        recomputed: values that nothing keeps from the forward to the backward.
        in_recomputed: operations that no segment of the forward saves, as that would keep such a value.
        words: as the user said it.
    """

    saved: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    in_recomputed: frozenset[int] = frozenset()
    words: str = field(default="", compare=False)

    def __bool__(self) -> bool:
        return bool(self.saved or self.recomputed)


FREE = Told()
"""Where nothing was told."""


@dataclass(frozen=True)
class Graph:
    """A program of operations over values, with everything the solver needs to weigh it.

    Attributes:
        operations: in program order, which is a topological order.
        values: indexed by the numbers in ``Operation.reads``, ``writes`` and ``saves``.
        program: what the runtime runs (opaque to the solver), or None.
        device: where the weights hold, e.g. ``"cpu"``.
        profile: how the weights were found, ``"estimate"``, ``"time"`` or ``"measure"``.
        chunks, chunked: into how many chunks of the batch regions are divided in this graph, and which; 1 and none.
        unsliced: the graph without chunks, where :func:`ogc.chunk_batch` made this one of it.
        plain_peak_bytes: peak of the plain model, where these operations are not the plain model's; else None.
        runtime: what the runtime's own work takes.
        outside: how many operations at the end are the caller's, such as a loss; no plan recomputes them.
        left_bytes: parameters' gradients that the backward leaves, where there are none before it; they count among
            all other gradients.
        told: what every plan keeps to.
        free: the same graph where nothing is told, if something is.
        kinds: for each module, by its name, the names of its class and of those that this inherits from.
        host: where plans may offload values to, if anywhere.
        in_flight: so many forwards run before the backward of the first, as in a stage of a pipeline: what each keeps
            for its backward counts as often.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    program: Any = field(default=None, compare=False, repr=False)
    device: str = "cpu"
    profile: str = "estimate"
    plain_peak_bytes: int | None = None
    runtime: RuntimeCosts = RuntimeCosts()
    outside: int = 0
    left_bytes: int = 0
    chunks: int = 1
    chunked: tuple[tuple[str, str], ...] = ()
    unchunked: Graph | None = field(default=None, compare=False, repr=False)
    told: Told = FREE
    free: Graph | None = field(default=None, compare=False, repr=False)
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    host: Host | None = None
    in_flight: int = 1

    def __post_init__(self) -> None:
        written: set[int] = set()
        saved: set[int] = set()
        for op in self.operations:
            self._check_reads_and_writes(op, written)
            written.update(op.writes)
            saved.update(op.saves)
        for position, op in enumerate(self.operations):
            taken = op.takes_over
            if taken is not None and (self.last_uses[taken] != position or taken in saved):
                name = self.values[taken].name
                raise ParseError(f"operation {op.name} takes over {name}, which is needed afterwards")
        for index, value in enumerate(self.values):
            if index not in written:
                raise ParseError(f"no operation makes value {value.name}")
        if self.outside and self.end not in self.cuts:
            raise ParseError(
                f"{self.operations[self.end].name}, which follows the model's forward, writes in place to what that "
                "returns; make it an operation that is not in place"
            )

    def _check_reads_and_writes(self, op: Operation, written: set[int]) -> None:
        for v in (*op.reads, *op.writes, *op.saves):
            if not 0 <= v < len(self.values):
                raise ParseError(f"operation {op.name} names value {v}, which the graph lacks")
        early = "reads {} before any operation makes it; list the operations in topological order"
        blind = "changes {} in place; name the value among its reads too"
        stray = "saves {}, which it neither reads nor writes"
        problems = [
            *((early, v) for v in op.reads if v not in written),
            *((blind, v) for v in op.writes if v in written and v not in op.reads),
            *((stray, v) for v in op.saves if v not in op.reads and v not in op.writes),
        ]
        if problems:
            text, value = problems[0]
            raise ParseError(f"operation {op.name} {text.format(self.values[value].name)}")
        if op.takes_over is not None and (op.takes_over not in op.reads or op.takes_over in op.writes):
            raise ParseError(f"operation {op.name} takes over a value that it does not read, or writes itself")

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def may_be_plain(self) -> bool:
        """Whether the plain model keeps to what is told."""
        return not self.told.in_recomputed

    def running(self, program: Any) -> Graph:
        """The same graph with another program, without another look at its operations."""
        result = copy(self)
        object.__setattr__(result, "program", program)
        return result

    def without_program(self) -> Graph:
        """The graph for all but running it: to be pickled, or held by another one."""
        return replace(self, program=None, free=self.free and replace(self.free, program=None))

    @property
    def end(self) -> int:
        """The position where the model's forward ends."""
        return len(self) - self.outside

    @cached_property
    def regions(self) -> tuple[tuple[str, str], ...]:
        """First and last operation of the regions that can run chunk by chunk; see :func:`ogc.chunk_batch`."""
        return () if self.program is None else tuple(optional("rewrites.chunking").regions_of(self))

    @cached_property
    def low_memory(self) -> tuple[int, ...]:
        """The operations that have a low-memory variant."""
        return tuple(t for t, op in enumerate(self.operations) if op.low_memory is not None)

    def with_variants(self, chosen: Collection[int]) -> Graph:
        """The same program with the low-memory variants of the chosen operations, and no choice left for any other."""
        if not self.low_memory:
            return self
        wanted = frozenset(chosen).intersection(self.low_memory)
        if wanted not in self._in_variants:
            if len(self._in_variants) > 2:  # few are asked for again and again
                self._in_variants.clear()
            operations = tuple(op.in_variant(t in wanted) for t, op in enumerate(self.operations))
            made = self._in_variants[wanted] = replace(self, operations=operations)
            vars(made)["cuts"] = self.cuts  # whatever is chosen, so that a plan of one choice is one of all
        return self._in_variants[wanted]

    @cached_property
    def _in_variants(self) -> dict[frozenset[int], Graph]:
        return {}

    @cached_property
    def of_the_plain_model(self) -> Graph:
        """The same program as the plain model runs it: every operator PyTorch's own, values as Python holds them."""
        rest = replace(self.with_variants(()), told=FREE, free=None) if self.told else self.with_variants(())
        held: dict[int, tuple[int, ...]] = {}
        for v, value in enumerate(self.values):
            if value.held_until is not None:
                held[value.held_until] = (*held.get(value.held_until, ()), v)
        if not held and all(op.as_plain is op for op in rest.operations):
            return rest
        operations = (op.as_plain for op in rest.operations)
        read = (replace(op, reads=op.reads + held[t]) if t in held else op for t, op in enumerate(operations))
        return replace(rest, operations=tuple(read))

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """For each value, the operation that makes it."""
        return self._by_value(((v, t) for t, op in self._backwards for v in op.writes), len(self))

    @cached_property
    def last_writes(self) -> tuple[int, ...]:
        """For each value, the last operation that writes it."""
        return self._by_value(((v, t) for t, op in enumerate(self.operations) for v in op.writes), -1)

    @cached_property
    def first_uses(self) -> tuple[int, ...]:
        """For each value, the first operation after its last write that reads or saves it, or N; mere views aside."""
        runs = ((t, op) for t, op in self._backwards if op.writes or op.saves or op.internal_bytes)
        used = ((v, t) for t, op in runs for v in (*op.reads, *op.saves))
        return self._by_value(
            ((v, t) for v, t in used if t > self.last_writes[v] or v in self.operations[t].saves), len(self)
        )

    @cached_property
    def last_uses(self) -> tuple[int, ...]:
        """For each value, the last operation of the forward that touches it; N for an output that is held.

        The caller holds other returned ones until the last operation.
        """
        touched = ((v, t) for t, op in enumerate(self.operations) for v in (*op.reads, *op.writes))
        returned = ((v, len(self) - 1) for v in self.returned)
        outputs = ((v, len(self)) for v, value in enumerate(self.values) if value.is_output)
        return self._by_value(chain(touched, returned, outputs), -1)

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """The values that the caller releases before the backward."""
        return tuple(v for v, value in enumerate(self.values) if value.is_returned and not value.is_output)

    @cached_property
    def offloadable(self) -> frozenset[int]:
        """The values that may be offloaded: those that the caller does not hold, as far as the host takes them."""
        if self.host is None:
            return frozenset()
        values = range(len(self.values)) if self.host.values is None else self.host.values
        held = {v for v, value in enumerate(self.values) if value.is_output or value.is_returned}
        return frozenset(v for v in values if v not in held and self.last_uses[v] < self.end)

    def fits_host(self, values: Iterable[int]) -> bool:
        """Whether the host has room for these values together: at the end of the forward all are there."""
        most = None if self.host is None else self.host.memory
        return most is None or sum(self.values[v].bytes for v in values) <= most

    @cached_property
    def first_savers(self) -> tuple[int, ...]:
        """For each value, the first operation that saves it (its backward runs last), or N."""
        return self._by_value(((v, t) for t, op in self._backwards for v in op.saves), len(self))

    @property
    def _backwards(self) -> Iterator[tuple[int, Operation]]:
        return zip(reversed(range(len(self))), reversed(self.operations), strict=True)

    def _by_value(self, entries: Iterable[tuple[int, int]], absent: int) -> tuple[int, ...]:
        """For each value, the number that the last of the entries (value, number) has for it."""
        numbers = dict(entries)
        return tuple(numbers.get(v, absent) for v in range(len(self.values)))

    @cached_property
    def keeps_internals(self) -> tuple[bool, ...]:
        """For each operation, whether every plan keeps its internal tensors: small ones, those of what runs once."""
        largest = [max((self.values[v].bytes for v in (*op.reads, *op.writes)), default=0) for op in self.operations]
        return tuple(
            op.internal_bytes > 0 and (not op.replayable or op.internal_bytes * SMALL_INTERNALS <= most)
            for op, most in zip(self.operations, largest, strict=True)
        )

    def keeps_internals_with(self, kept: Collection[int]) -> tuple[bool, ...]:
        """:attr:`keeps_internals`, and those of each operation of which a segment of the forward keeps all results."""
        return tuple(
            always or (bool(op.writes) and all(v in kept for v in op.writes))
            for op, always in zip(self.operations, self.keeps_internals, strict=True)
        )

    @cached_property
    def repeat_seconds(self) -> tuple[float, ...]:
        """For each operation, the time of its forward where a plan recomputes it."""
        return tuple(
            op.forward_seconds if op.repeat_seconds is None or not kept else op.repeat_seconds
            for op, kept in zip(self.operations, self.keeps_internals, strict=True)
        )

    @cached_property
    def operation_bounds(self) -> tuple[int, ...]:
        """For each operation, the bytes that must be alive while it runs, whatever the plan.

        Its forward needs what it reads and writes; its backward what it saved, and the gradients and temporaries
        alive then, which no plan changes; both need the outputs that the caller holds.
        """
        size = [value.bytes for value in self.values]
        outputs = {v for v, value in enumerate(self.values) if value.is_output}
        output_bytes = sum(size[v] for v in outputs)
        bounds = []
        for t, op in enumerate(self.operations):
            given = {*op.reads, *op.writes} - {op.takes_over}
            given |= {v for v in outputs.union(self.returned) if self.last_writes[v] < t}
            forward = sum(size[v] for v in given) + op.scratch_bytes
            early = sum(size[v] for v in outputs.union(op.saves)) + op.backward_bytes
            bounds.append(max(forward, early, output_bytes + op.late_bytes) + op.internal_bytes)
        return tuple(bounds)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Positions where the program may be cut: 0, N and all that separate no value from its writes.

        A value that is read before its last in-place write has two contents over time; no cut may fall between its
        production and its last use, so that a kept copy is never mistaken for the older one. A mere view reads no
        content. What is written piece by piece and read only afterwards may be cut between its writes.
        """
        last = [
            producer if v in self._written_in_pieces else last
            for v, (producer, last) in enumerate(zip(self.producers, self.last_writes, strict=True))
        ]
        for t, op in enumerate(self.operations):
            for v in op.reads if op.writes or op.may_save else ():
                if v not in op.writes and t < self.last_writes[v]:
                    last[v] = self.last_uses[v]
        # After an operation that touches no value, the cut is the one before it.
        barred = {t + 1 for t, op in enumerate(self.operations) if not (op.reads or op.writes)}
        for before, after in zip(self.producers, last, strict=True):
            barred.update(range(before + 1, after + 1))
        return tuple(cut for cut in range(len(self) + 1) if cut not in barred or cut in (0, len(self)))

    @cached_property
    def _written_in_pieces(self) -> frozenset[int]:
        """The values of which no operation that may be recomputed needs what is there before the last write."""
        places = zip(self.producers, self.last_writes, self.last_uses, strict=True)
        found = {v for v, (first, last, use) in enumerate(places) if first < last < use}
        for t, op in enumerate(self.operations):
            for v in found.intersection((*op.reads, *op.writes)):
                is_writer = v in op.writes
                is_asked = op.writes != (v,) or op.internal_bytes or op.low_memory  # by others, or for its own sake
                needs_half = t <= self.last_writes[v] and (v in op.may_save or (op.writes and not is_writer))
                if needs_half or (is_writer and is_asked):
                    found.discard(v)
        return frozenset(found)

    def boundary(self, cut: int) -> tuple[int, ...]:
        """Values made before ``cut`` and used at or after it (outputs are used by the caller)."""
        return tuple(
            v for v, (first, last) in enumerate(zip(self.producers, self.last_uses, strict=True)) if first < cut <= last
        )

    @property
    def forward_seconds(self) -> float:
        """Time of the plain forward pass."""
        return self.runtime.left_out + sum(op.forward_seconds for op in self.operations)

    @property
    def step_seconds(self) -> float:
        """Time of the plain forward and backward pass."""
        return self.forward_seconds + sum(op.backward_seconds for op in self.operations) - self.runtime.overlapped

    @property
    def step_flops(self) -> int:
        """Floating-point operations of the plain forward and backward pass."""
        return sum(op.forward_flops + op.backward_flops for op in self.operations)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The weighted DAG: a node per operation, an edge per value passed between two of them.

        Nodes carry the operation's fields, edges ``value`` (name) and ``bytes``.
        """
        import networkx as nx

        dag = nx.MultiDiGraph()
        writer: dict[int, str] = {}
        for op in self.operations:
            dag.add_node(op.name, **{k: getattr(op, k) for k in Operation.__dataclass_fields__ if k != "name"})
            for v in dict.fromkeys(op.reads):
                if v in writer:
                    dag.add_edge(writer[v], op.name, value=self.values[v].name, bytes=self.values[v].bytes)
            for v in op.writes:
                writer[v] = op.name
        return dag

    def __str__(self) -> str:
        return table(
            ["#", "operation", "operator", "module", "source", "MiB", "saved MiB", "forward ms", "backward ms"],
            [self._row(position) for position in range(len(self))],
        )

    def _row(self, position: int) -> list[str]:
        op = self.operations[position]
        made = sum(self.values[v].bytes for v in op.writes if self.producers[v] == position)
        saved = op.internal_bytes + sum(self.values[v].bytes for v in op.saves)
        numbers = (made / MIB, saved / MIB, op.forward_seconds * 1e3, op.backward_seconds * 1e3)
        return [str(position), op.name, op.target, op.module, op.source, *(f"{number:.3f}" for number in numbers)]


def price(
    peak: int,
    plain: int,
    added: float,
    step: float,
    floor: tuple[int, float] | None,
    free: tuple[int, float] | None = None,
) -> str:
    """A plan in one line: its peak and the plain model's in bytes, and the share of the plain step that it adds.

    Args:
        peak, plain: in bytes.
        added, step: seconds that the plan adds, and of the plain step.
        floor: peak in bytes and added seconds of the plan with the least peak, if that is known.
        free: the plan for the same goal where nothing is told, if something was.
    """
    share = 1 / step if step else 0.0
    text = f"peak {peak / MIB:.1f} of {plain / MIB:.1f} MiB, {share * added:+.0%} time"
    if floor is not None and floor[0] < peak:
        text += f"; floor {floor[0] / MIB:.1f} MiB at {share * floor[1]:+.0%}"
    if free is not None:
        text += (
            f"; what was told costs {(peak - free[0]) / MIB:+.1f} MiB and {share * (added - free[1]):+.1%} of a step"
        )
    return text


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain-text table: text left, numbers right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return not text.strip("0123456789.,+-% ")
