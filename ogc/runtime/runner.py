"""Chooses what runs each call of an optimized module: a plan that was made for calls like it, or the plain model."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, product
from operator import attrgetter
from typing import Any, Protocol

import torch

from ..errors import OgcError, ReplayError
from ..graph import Graph
from ..plan.plan import Plan
from ..process import during_step
from ..program.opaque import OpaqueCall
from ..program.program import Outcome, Program, attribute, get_attribute, tensor_leaves, without_autocast
from ..program.structures import Call, InputSpec, input_tensors
from ..torch_state.forwards import DISPATCH, MODE, SAVED, is_as_assigned, plain_forward, what_is_around
from ..torch_state.module_state import State, WatchedModule
from ..torch_state.no_trace import is_plain
from ..torch_state.private import (
    has_global_hooks,
    has_tangents,
    is_functorch_active,
    is_fx_tracing,
    parametrizations_are_cached,
    version_of,
)
from ..torch_state.reads import Reads
from ..torch_state.settings import Flags, flags, flags_held, random_put_back, without_benchmark
from .calls import Calls, Kind, Report
from .frame import Step
from .generate import Generated, generate, numbers_of
from .held import Places, raise_what_is_known
from .host import Home, home_at

log = logging.getLogger(__name__)

PLANS, SHAPES = 8, 256
"""Kinds of calls that are planned for beside the sample's, and other sizes and numbers that plans are reused for; the
least recently used makes room."""

LOOKS = 16
"""At every so many calls in a row that need no plan, all of the model is looked at."""

EVICTIONS = 3
"""How many plans may make room for others before a plan is made only for calls that come again and again."""

LIKE_SAMPLE = "like the sample"
"""The kind of calls that were planned for first, in words."""

CHOOSES_ALGORITHMS = ("cuda",)
"""Types of devices on which ``torch.backends.cudnn.benchmark`` decides."""


class Planner(Protocol):
    """Makes plans for calls that differ from the sample input. Whatever it raises, the plain model runs."""

    def reuse(self, model: torch.nn.Module, call: Call, graph: Graph, plan: Plan, quickly: bool) -> Graph | None:
        """``graph`` for inputs of other sizes, if the plan still holds; None if that is not sure.

        ``quickly``, if it takes no more than a forward.
        """

    def distrust(self, graph: Graph) -> None:
        """Take a graph that was found by numbers alone, and those like it, for wrong."""

    def plan(self, model: torch.nn.Module, call: Call) -> tuple[Graph, Plan] | None:
        """A plan of its own, if this planner makes any."""

    def apart(self, model: torch.nn.Module, call: Call) -> torch.nn.Module | None:
        """What runs the model from now on if it is another one than was planned."""


@dataclass(frozen=True)
class Entry:
    """A kind of calls and what runs them: generated code, or without it the plain forward."""

    kind: Kind
    words: str  # how it differs from the sample's
    graph: Graph | None = None
    plan: Plan | None = None
    code: Generated | None = None
    is_reused: bool = False  # the plan was made for other sizes or numbers
    reads: Reads | None = None  # what its program depends on, outside of tensors
    cold: Reads | None = None  # the same before a first call, which runs the plain model and settles it
    problem: str = ""  # why there is no plan
    shared: list[Generated] = field(default_factory=list)  # the code for other sizes, with names for their numbers

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Those of the tensors that are given: of two entries, they tell most."""
        return _sizes(self.kind.inputs)

    @property
    def is_unplanned(self) -> bool:
        """Whether nothing could be planned for these calls."""
        return self.graph is None

    def difference(self, model: torch.nn.Module, tensors: list[torch.Tensor]) -> str:
        """What Python would read otherwise out of attributes and these inputs, in words; "" if nothing.

        ``SETTLES`` if it is a first call, which settles what Python reads in these calls.
        """
        changed = None if self.reads is None else self.reads.first_changed(model)
        if changed is not None:
            is_first = self.cold is not None and self.cold.first_changed(model) is None
            return SETTLES if is_first else f"{changed} is another than when it was optimized"
        guards = None if self.graph is None else self.graph.program.guards
        return "" if guards is None else guards.difference(model, tensors)

    @cached_property
    def runs(self) -> str:
        """What runs these calls, in words."""
        if self.plan is None or self.code is None:
            return f"plain: {self.problem or 'no plan needs less memory'}"
        reused = "reused from a plan of" if self.is_reused else "plan:"
        return f"{reused} {self.plan.summary}"


class Runner:
    """The plans of one optimised module and its deep copies."""

    def __init__(self, model: torch.nn.Module, graph: Graph, plan: Plan, planner: Planner | None = None) -> None:
        self.planner = planner
        self.modes = Modes(model)
        self.assigned = vars(model).get("forward")  # before it was optimized
        self.structures = count(1)
        self.watched: weakref.WeakKeyDictionary[torch.nn.Module, WatchedModule] = weakref.WeakKeyDictionary()
        self.generated = generate(graph, plan)
        self.is_idle = plan.is_plain and planner is None
        kind = self._kind(model, graph.program.inputs)
        self.sample = _entry(model, kind, LIKE_SAMPLE, graph, plan, self.generated)
        self.entries = [self.sample]  # most recently used first
        self.calls: Counter[tuple[str, str]] = Counter()  # by what kind of calls, and what ran them
        self.evictions = self.unseen = 0
        self.waiting: list[tuple[Kind, int]] = []  # kinds of calls that run plain for now, and how many there were
        self.last_state: State | None = None  # of the module that was called last
        self.is_planning = False
        self.told: set[str] = set()
        self.apart: weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Module] = weakref.WeakKeyDictionary()
        self.apart_kind = ""  # of the calls that these were made for
        self.homes: dict[tuple[torch.device, str], Home] = {}  # of offloaded values

    @property
    def is_plain(self) -> bool:
        """Whether all that was planned for runs as it is."""
        return all(entry.code is None for entry in self.entries)

    def report(self) -> Report:
        """What ran the calls until now."""
        return Report(tuple(Calls(kind, runs, number) for (kind, runs), number in self.calls.items() if number))

    def add(self, model: torch.nn.Module, graph: Graph, plan: Plan) -> None:
        """Take in a plan for another kind of calls."""
        self.is_idle = self.is_idle and plan.is_plain
        kind = self._kind(model, graph.program.inputs)
        self.entries.append(_entry(model, kind, kind.differences(model, self.sample.kind), graph, plan))

    def watch(self, model: torch.nn.Module, like: torch.nn.Module | None = None) -> WatchedModule:
        """Start to compare ``model`` with what it is now: as the sample was planned for, or the same as ``like``."""
        structure = self.watched[like].state(like).structure if like is not None and like in self.watched else 0
        watched = self.watched[model] = WatchedModule(model, self.structures, structure)
        return watched

    def select(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
        """What runs this call, or None for the original forward."""
        if self.is_planning or is_plain() or model in self.apart:
            return None
        raise_what_is_known()
        why = plain_because(model, self.modes.in_training_alone)
        if not why and not is_as_assigned(model, self.assigned):
            why = REPLACED
        if why:
            return self.ran_plain(why, is_told=why in COSTS_THE_SAVING)
        if self.is_idle:
            return self._count(self.sample)
        inputs, tensors = InputSpec.of(args, kwargs)
        if self._stays_plain(model, inputs):
            return self._count(self.entries[0])
        kind = self._kind(model, inputs)
        sizes = _sizes(inputs)
        alike = [entry for entry in self.entries if entry.sizes == sizes and entry.kind.fits(kind)]
        alike.sort(key=lambda entry: entry.is_unplanned)  # of those nothing is known
        is_first = False
        for known in alike:
            if not (difference := known.difference(model, tensors)):
                return self._use(known, kind)
            is_first |= difference == SETTLES
        if self.evictions > EVICTIONS and not self._is_met_often(kind):
            return self.ran_plain("more kinds of calls than are planned for")
        if self._is_apart(model, Call(args, kwargs), kind):
            return None
        if is_first:
            return self.ran_plain(SETTLES)
        made = self._make(model, Call(args, kwargs), kind)
        if made.difference(model, tensors) == SETTLES:
            self._put_first(made)
            return self.ran_plain(SETTLES)
        return self._use(made, kind)

    def _is_met_often(self, kind: Kind) -> bool:
        """Whether a kind of calls has come often enough to be planned for: each plan that went doubles that."""
        known = next((one for one in self.waiting if one[0].fits(kind)), None)
        self.waiting = [
            (kind, 1 if known is None else known[1] + 1),
            *(one for one in self.waiting if one is not known),
        ]
        del self.waiting[SHAPES:]
        return self.waiting[0][1] > 2 ** (self.evictions - EVICTIONS)

    def _use(self, entry: Entry, kind: Kind) -> Entry | None:
        """Note a call that an entry is for; the entry if a plan runs it."""
        if entry is not self.entries[0]:
            self._put_first(entry)
        self.last_state = kind.state
        return self._count(entry)

    def _count(self, entry: Entry) -> Entry | None:
        """Count a call of its kind; the entry if a plan runs it."""
        self.calls[entry.words, entry.runs] += 1
        return entry if entry.code is not None else None

    def _stays_plain(self, model: torch.nn.Module, inputs: InputSpec) -> bool:
        """Whether the call is like the last one, which ran plain as it needed no plan.

        The plain model is always right. What may make it need more memory is looked at each time, but for replaced
        parts of the model: these at every ``LOOKS``-th call.
        """
        last, watched = self.entries[0], self.watched.get(model)
        if last.plan is None or not last.plan.is_plain or watched is None:
            return False
        self.unseen = (self.unseen + 1) % LOOKS
        is_alike = watched.description is self.last_state and last.kind.flags == flags()
        return bool(self.unseen) and is_alike and last.kind.inputs.fits(inputs) and watched.trains_as_before()

    def ran_plain(self, why: str, is_told: bool = False) -> Entry | None:
        """Count a call that runs the plain model, None, whatever its kind; with ``is_told``, log the reason once."""
        self.calls["", f"plain: {why}"] += 1
        if is_told:
            tell_plain(why, self.told)
        return None

    def _kind(self, model: torch.nn.Module, inputs: InputSpec) -> Kind:
        return Kind((self.watched.get(model) or self.watch(model)).state(model), inputs, flags())

    def run(self, entry: Entry, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One planned forward."""
        assert entry.graph is not None and entry.code is not None
        program, device = entry.graph.program, torch.device(entry.graph.device)
        devices = (device,) if device.type == "cuda" and program.random else ()
        code = entry.code
        watched = self.watched[model]
        bound = watched.bound(code.key, partial(_bound, model, program, code))
        places = watched.bound((code.key, "places"), dict[tuple[int, ...], Places])
        settings = self._settings(entry, device)
        held = nullcontext() if settings is entry.kind.flags else flags_held(settings)  # which takes longer
        tensors = input_tensors(args, kwargs)
        before = None if program.expected is None else _Before(model, tensors)
        outputs: list[torch.Tensor] = []
        try:
            with without_autocast(), held:
                step = Step(model, code.runs, bound, devices, settings, self._home(entry, device), places)
                outputs = code.forward(step, *tensors, *bound)
        except Exception as error:
            if before is None:
                raise
            log.info("%s", error)
        if before is not None and not self._is_as_expected(entry, model, outputs):
            del step, outputs
            before.put_back()
            return plain_forward(model)(*args, **kwargs)
        if entry.reads is not None:
            entry.reads.write(model)
        return program.outputs.deliver(outputs, args, kwargs)

    def _home(self, entry: Entry, device: torch.device) -> Home | None:
        """Where the values go that a plan offloads, if it does."""
        assert entry.graph is not None and entry.plan is not None
        host = entry.graph.host
        if host is None or not entry.plan.offloaded:
            return None
        key = device, host.folder
        return self.homes.get(key) or self.homes.setdefault(key, home_at(*key))

    def _is_as_expected(self, entry: Entry, model: torch.nn.Module, outputs: list[torch.Tensor]) -> bool:
        """Whether the first call by code for other numbers gave what the model gave; else that runs from now on."""
        assert entry.graph is not None and self.planner is not None
        program = entry.graph.program
        is_same: bool = Outcome.of(model, outputs) == program.expected
        if is_same:
            settled = replace(entry, graph=entry.graph.running(replace(program, expected=None)))
        else:
            self.planner.distrust(entry.graph)
            problem = "the plan, reused for these sizes, did not give what the model gives"
            settled = Entry(entry.kind, entry.words, problem=problem)
            self._tell(f"ogc runs the plain model for calls where {entry.words}: {problem}")
            self.calls[entry.words, entry.runs] -= 1
            self._count(settled)
        self.entries = [settled if one is entry else one for one in self.entries]
        return is_same

    def _settings(self, entry: Entry, device: torch.device) -> Flags:
        """Those of planned forwards and of recomputation: cuDNN may choose another algorithm each time."""
        settings = entry.kind.flags
        if device.type not in CHOOSES_ALGORITHMS or settings == without_benchmark(settings):
            return settings
        self._tell(
            "torch.backends.cudnn.benchmark is on, which may choose other algorithms in a recomputation: what "
            "is planned runs without it. Its numbers are those of the plain model without it"
        )
        return without_benchmark(settings)

    def _is_apart(self, model: torch.nn.Module, call: Call, kind: Kind) -> bool:
        """Whether the model is run by another one from now on, or plain as that cannot be made."""
        if self.planner is None:
            return False
        self.is_planning = True
        try:
            with self._during_step():
                found = self.planner.apart(model, call)
        except Exception as error:
            why = self._difference(model, call, kind)
            entry = Entry(kind, why, problem=first_line(error))
            self._tell(f"ogc runs the plain model for calls where {why}: {entry.problem}", entry.problem)
            self._put_first(entry)
            self._count(entry)
            return True
        finally:
            self.is_planning = False
        if found is None:
            return False
        self.apart[model], self.apart_kind = found, self._difference(model, call, kind)
        log.warning("the model is planned anew, for calls where %s", self.apart_kind)
        return True

    def _during_step(self) -> AbstractContextManager[None]:
        """Planning in here takes no more memory than the step."""
        return during_step(self.sample.plan.peak_bytes if self.sample.plan else 0)

    def _make(self, model: torch.nn.Module, call: Call, kind: Kind) -> Entry:
        """What runs a kind of calls that was not seen before."""
        why, start = self._difference(model, call, kind), time.perf_counter()
        self.is_planning = True  # calls of the model from here on are the planner's
        entry, problem = None, ""
        try:
            with self._during_step():
                entry = None if self.planner is None else self._planned(self.planner, model, call, kind, why)
        except Exception as error:  # a broken call raises the same from the plain model
            problem = first_line(error)
        finally:
            self.is_planning = False
        seconds = time.perf_counter() - start
        if entry is None:
            self._tell(f"ogc runs the plain model for calls where {why}" + (f": {problem}" if problem else ""), problem)
            return Entry(kind, why, problem=problem or "no plan is made for such calls")
        if entry.is_reused:
            log.info("the plan is reused for calls where %s, in %.2f s", why, seconds)
        else:
            what = "needs no less memory than the plain model" if entry.code is None else "is ready"
            log.warning("a plan for calls where %s %s, after %.2f s", why, what, seconds)
        return entry

    def _planned(self, planner: Planner, model: torch.nn.Module, call: Call, kind: Kind, why: str) -> Entry | None:
        """A plan that is reused from other sizes or numbers, or else one of its own."""
        for quickly, origin in product((True, False), self.entries):
            if origin.graph is None or origin.plan is None:
                continue
            if origin.is_reused and not (quickly and origin.graph.program.recorded is not None):
                continue
            if origin.kind.fits(kind, size=False):
                graph = planner.reuse(model, call, origin.graph, origin.plan, quickly)
                if graph is not None:
                    return _entry(model, kind, why, graph, origin.plan, _code_of(origin, graph), is_reused=True)
        planned = planner.plan(model, call)
        return None if planned is None else _entry(model, kind, why, *planned)

    def _put_first(self, entry: Entry) -> None:
        """Note that an entry is used; if it is new, one of its kind may have to make room."""
        entries = [entry, *(v for v in self.entries if v is not entry)]
        is_like = attrgetter("is_reused", "is_unplanned")
        alike = [v for v in entries if is_like(v) == is_like(entry) and v is not self.sample]
        if len(alike) > (PLANS if is_like(entry) == (False, False) else SHAPES):
            entries.remove(alike[-1])
            self._forget(alike[-1])
        self.entries = entries

    def _forget(self, entry: Entry) -> None:
        if entry.is_unplanned:  # as calls that fail are, and none of these makes anybody's plan go
            return
        if entry.is_reused:
            self._tell(
                f"ogc meets more than {SHAPES} sizes or numbers of inputs and checks those that it forgot anew; "
                "pad sizes to a few, and hand numbers in as tensors"
            )
            return
        self.evictions += 1
        if self.evictions > EVICTIONS:
            self._tell(
                f"ogc met more than {PLANS + EVICTIONS} kinds of calls that need a plan each: calls unlike those of "
                "the last plans run the plain model until they have come again and again"
            )

    def _difference(self, model: torch.nn.Module, call: Call, kind: Kind) -> str:
        """In what a call differs from the sample, in words."""
        known = next((entry for entry in self.entries if entry.kind.fits(kind)), None)
        if known is not None:
            return known.difference(model, input_tensors(call.args, call.kwargs))
        return kind.differences(model, self.sample.kind)

    def _tell(self, what: str, cause: str = "") -> None:
        """Log something once, or once for all that has the same cause."""
        tell_once(what, self.told, cause)


HOOKED = "hooks of all modules are set"
CACHED = "parametrized tensors are made once for a region (parametrize.cached())"
EVAL = "the model is in eval mode with gradients on, and no backward has come to such a call yet"
TRANSFORMED = "it runs in a transform of torch.func or with forward-mode derivatives, which recompute nothing"
REPLACED = "another forward was assigned to the model that was optimized"
SETTLES = "it is a first call, which settles what Python reads in all others"
UNDER_HOOKS = (
    "it is called under hooks for saved tensors, as those of torch.utils.checkpoint; switch gradient checkpointing "
    "off, in the model and in the trainer (gradient_checkpointing=False): what is planned recomputes by itself"
)
COSTS_THE_SAVING = (HOOKED, CACHED, EVAL, TRANSFORMED, REPLACED, MODE, DISPATCH, SAVED)
"""Reasons to run the plain model in what may well be a training step."""


def tell_once(what: str, told: set[str], cause: str = "") -> None:
    """Log something once, or once for all that has the same cause; ``told`` has what was."""
    if (cause or what) not in told:
        told.add(cause or what)
        log.warning(what)


def tell_plain(why: str, told: set[str]) -> None:
    """Log once why the plain model runs; ``told`` has what was."""
    tell_once(f"ogc runs the plain model, which keeps all activations: {why}", told)


class Modes:
    """In which modes a model is trained: in that which it was optimized in, and in eval mode too once a backward has
    come to the result of such a call. Evaluation that merely forgets ``torch.no_grad()`` is not planned for.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.in_training_alone = model.training

    def looked_at(self, model: torch.nn.Module, result: Any) -> Any:
        """What a call that ran plain gave."""
        if self.in_training_alone and not model.training and torch.is_grad_enabled() and not is_plain():
            for tensor in tensor_leaves(result):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._note)
                    break
        return result

    def _note(self, gradients: Any) -> None:
        self.in_training_alone = False


def plain_because(model: torch.nn.Module, training: bool) -> str:
    """Why no plan is for a call now, of a ``model`` that is trained in ``training`` mode alone or in any; else ""."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return "gradients are off"
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or is_fx_tracing():
        return "the model is traced"
    if training and not model.training:
        return EVAL
    if is_functorch_active() or has_tangents():
        return TRANSFORMED
    return HOOKED if has_global_hooks() else CACHED if parametrizations_are_cached() else what_is_around()


def _sizes(inputs: InputSpec) -> list[tuple[int, ...]]:
    return [spec.shape for spec in inputs.tensors]


def _bound(model: torch.nn.Module, program: Program, code: Generated) -> tuple[Any, ...]:
    """What the code is given of the model and of the program's constants."""
    found = [get_attribute(model, program.constants, name) for name in code.bound]
    return (*found, *(torch.zeros_like(attribute(model, name)) for name in code.copied))


def _entry(
    model: torch.nn.Module,
    kind: Kind,
    words: str,
    graph: Graph,
    plan: Plan,
    code: Generated | None = None,
    is_reused: bool = False,
) -> Entry:
    if plan.is_plain:
        return Entry(kind, words, graph, plan, None, is_reused)
    reads, cold = graph.program.reads, graph.program.cold
    for found in (reads, cold):
        if found is not None:
            found.first_changed(model)  # as it is now: later it is compared by identity
    return Entry(kind, words, graph, plan, code or generate(graph, plan), is_reused, reads, cold)


class _Before:
    """What a planned forward may change, as it was before."""

    def __init__(self, model: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self.random = random_put_back()
        self.inputs = [(tensor, version_of(tensor)) for tensor in inputs]

    def put_back(self) -> None:
        """Let all be as before; ReplayError if inputs were written."""
        if any(version_of(tensor) != version for tensor, version in self.inputs):
            raise ReplayError(
                "the plan, reused for inputs of another size, gave something else than the model, which changes its "
                "inputs; optimize it for this size, or let it leave its inputs as they are"
            )
        for buffer, copy in self.buffers:
            buffer.data.copy_(copy)  # unseen by version counters: an earlier forward may wait for its backward
        self.random()


def _code_of(origin: Entry, graph: Graph) -> Generated | None:
    """The code of ``origin`` for another call, whose graph that is; None if it has to be written anew."""
    assert origin.graph is not None and origin.plan is not None
    if origin.code is None:
        return None
    program = graph.program
    if program.graph is not origin.graph.program.graph:  # it was recorded and verified as a whole
        return origin.code if _runs_the_same(graph, origin.graph) else None
    if not program.numbers and program.saves == origin.graph.program.saves:
        return origin.code
    found = origin.shared[0].of(program) if origin.shared else None
    if found is None:
        known = origin.shared[0].numbers if origin.shared else {}
        origin.shared[:] = [generate(origin.graph, origin.plan, numbers_of(program).keys() | known.keys())]
        found = origin.shared[0].of(program)
    return found


def _runs_the_same(a: Graph, b: Graph) -> bool:
    """Whether the code that runs one program runs the other."""
    same = ("saves", "variants", "bindings")
    alike = not a.program.constants and not b.program.constants
    alike = alike and all(getattr(a.program, name) == getattr(b.program, name) for name in same)
    has_opaque = any(isinstance(node.target, OpaqueCall) for node in a.program.operations)
    return alike and not has_opaque and str(a.program.graph) == str(b.program.graph)


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    text = str(error) if isinstance(error, OgcError) else repr(error)
    return text.splitlines()[0] if text else ""
