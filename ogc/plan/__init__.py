"""Plans as plain data, and their judge: decisions, the schedule they stand for, and its cost. Free of torch.

The files build on one another in this order: decisions, saving, schedule, simulate, trace, pictures, caching,
plan, loading.
"""

from .decisions import Decisions, Fate, Segment, recomputed, saved
from .loading import load_plan, plan_from_text, plan_on, restored, text_of
from .plan import Frontier, Plan, make_plan, plain_plan
from .saving import Fingerprint, SavedPlan
from .simulate import Event, Simulation, lower_bound, simulate
from .trace import Moment, trace

__all__ = [
    "Decisions", "Event", "Fate", "Fingerprint", "Frontier", "Moment", "Plan", "SavedPlan", "Segment",
    "Simulation", "load_plan", "lower_bound", "make_plan", "plain_plan", "plan_from_text", "plan_on",
    "recomputed", "restored", "saved", "simulate", "text_of", "trace",
]  # fmt: skip
