"""Plans that were made before: found again in a folder, and taken up where they still hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError, PlanError
from ..graph import MIB, Graph
from ..parser.weigh.measure import times_kept_in
from ..plan import Fingerprint, Plan, SavedPlan, plan_on
from ..plan.saving import PARTS, VERSION
from ..solver import Goal
from .replan import meets

log = logging.getLogger(__name__)

Found = TypeVar("Found")

ROUNDING, NOISE = 1 + 1e-9, 1.05
"""By how much a saved plan may miss the overhead that was asked for: where times are estimated, and measured anew."""

PlanSource = str | os.PathLike[str] | SavedPlan
"""A file that a plan was saved to, or what is in one; a plan itself will do too."""


def saved_plan(source: Any) -> SavedPlan:
    """What ``ogc.optimize`` is given as ``plan``.

    Raises:
        InputError: it is no plan and no path, or the file cannot be read.
        PlanError: the file is no plan, or of an unknown version.
    """
    if isinstance(source, SavedPlan):
        return source
    if isinstance(source, (str, os.PathLike)):
        try:
            return SavedPlan.from_file(source)
        except OSError as error:
            raise InputError(
                f"plan={os.fspath(source)!r} cannot be read ({error.strerror}); give the path of a file that "
                "result.plan.save(path) wrote, or leave plan= out and have cache_dir= keep and find plans"
            ) from error
    if not hasattr(source, "as_saved"):
        raise InputError(f"plan must be the path of a saved plan, or a plan, not {type(source).__name__}")
    found: SavedPlan = source.as_saved()
    return found


@dataclass(frozen=True)
class Store:
    """A folder of plans, and of the times that were measured for them; without a folder nothing is kept.

    Any number of processes may use it at once: files are whole or not there.
    """

    folder: str | None = None

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None) -> Store:
        """That of a folder, which is made when the first plan is.

        Raises:
            InputError: there is something else in its place.
        """
        if folder is None:
            return cls()
        if not isinstance(folder, (str, os.PathLike)) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise InputError(f"cache_dir must be the path of a folder, not {folder!r}")
        return cls(os.path.abspath(folder))

    def found(self, key: str, use: Callable[[SavedPlan], Found | None]) -> Found | None:
        """What ``use`` makes of the plan that is kept under ``key``; None if there is none that holds."""
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            found = use(SavedPlan.from_file(path))
        except FileNotFoundError:
            return None
        except (OSError, PlanError) as error:
            log.warning("a plan is made anew, as the one in cache_dir does not do: %s", error)
            return None
        if found is not None:
            log.info("the plan is that of %s", path)
        return found

    def keep(self, key: str, save: Callable[[], SavedPlan]) -> None:
        """Keep a plan under ``key``, in the place of what was there."""
        if self.folder is None:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            save().write(self._path(key))
        except OSError as error:
            log.warning("the plan is not kept in cache_dir: %s", error)

    def times(self) -> AbstractContextManager[None]:
        """In here, operations that were measured before on such a machine are not measured again."""
        return nullcontext() if self.folder is None else times_kept_in(self.folder)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return Path(self.folder, f"{key}.json")


NOWHERE = Store()


def key_of(kind: str, what: object, goal: Goal, solver: str, *more: object) -> str:
    """The name of what is kept for a goal; ``what`` tells graphs from others, but not what operations take here."""
    budget = goal.budget_bytes(1) if goal.is_in_bytes else goal.memory_budget
    asked = kind, VERSION, goal.is_in_bytes, budget, goal.max_overhead, solver, *more
    return f"{kind}-{sha256(repr((what, *asked)).encode()).hexdigest()[:32]}"


def taken_up(
    saved: SavedPlan,
    graph: Graph,
    goal: Goal,
    chunks: int,
    chunked_along: Callable[[tuple[tuple[str, str], ...]], Graph],
) -> tuple[Graph, Plan] | None:
    """A plan that was saved, for a graph that it was made for, without a search; and the graph that it runs on.

    Args:
        saved: the plan.
        graph: without chunks.
        goal: that it has to keep.
        chunks: that are allowed.
        sliced_along: gives the graph with regions in chunks.

    Returns:
        None, and a warning in the log, if it does not keep the goal here.

    Raises:
        PlanError: it does not fit the graph, or needs chunks that are not allowed.
    """
    if saved.kind == PARTS:
        raise PlanError("the plan is for a model in parts, but this one is planned as a whole")
    if saved.unchunked is not None:
        if difference := saved.unchunked.difference(Fingerprint.of(graph)):
            raise PlanError(f"the plan does not fit the graph, which has {difference}")
        if saved.chunks != chunks:
            raise PlanError(f"the plan runs regions in {saved.chunks} chunks of the batch; give chunks= so many")
        graph = chunked_along(saved.regions)
    plan = plan_on(graph, saved)
    plan = replace(plan, budget_bytes=goal.budget_bytes(plan.plain_peak_bytes), max_overhead=goal.max_overhead)
    keeps = meets(tolerant(goal, graph))
    if keeps is None or keeps(graph, plan):
        return graph, plan
    tell_broken(goal, plan.peak_bytes, plan.overhead)
    return None


def tolerant(goal: Goal, graph: Graph) -> Goal:
    """The goal with a little more time than was asked for: sums of it are rounded, or it is measured anew."""
    share, slack = goal.max_overhead, ROUNDING if graph.profile == "estimate" else NOISE
    return goal if share is None else replace(goal, max_overhead=slack * share)


def tell_broken(goal: Goal, peak_bytes: int, overhead: float) -> None:
    """Say that a saved plan does not keep the goal."""
    asked = "memory_budget" if goal.max_overhead is None else "max_overhead"
    log.warning(
        "a plan is made anew: the saved one peaks here at %.1f MiB, with %.1f %% more time, and does not keep %s=%r",
        *(peak_bytes / MIB, 100 * overhead, asked, getattr(goal, asked)),
    )
