"""Plans as plain data: decisions, the schedule that they mean, the simulator that verifies them. Free of torch.

The files build on one another in this order: decisions, saving, schedule, queues, simulate, timeline, pictures, plan.
"""

from .decisions import Decisions, Offload, Policy, Segment, recomputed, saved
from .plan import Frontier, Plan, load_plan, make_plan, plain_plan, plan_from_text, plan_on, restored, text_of
from .saving import Fingerprint, SavedPlan
from .simulate import Event, Moment, Simulation, lower_bound, simulate, trace

__all__ = [
    "Decisions",
    "Event",
    "Fingerprint",
    "Frontier",
    "Moment",
    "Offload",
    "Plan",
    "Policy",
    "SavedPlan",
    "Segment",
    "Simulation",
    "load_plan",
    "lower_bound",
    "make_plan",
    "plain_plan",
    "plan_from_text",
    "plan_on",
    "recomputed",
    "restored",
    "saved",
    "simulate",
    "text_of",
    "trace",
]  # fmt: skip
