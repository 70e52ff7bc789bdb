"""Plans as plain data, and their judge: decisions, the schedule they stand for, and its cost. Free of torch.

The files build on one another in this order: decisions, schedule, simulate, trace, pictures, plan, part_cost.
"""

from .decisions import Decisions, Fate, Segment, recomputed, saved
from .part_cost import PartCost, part_cost
from .plan import Frontier, Plan, make_plan, plain_plan
from .simulate import Event, Simulation, lower_bound, simulate
from .trace import Moment, trace

__all__ = [
    "Decisions", "Event", "Fate", "Frontier", "Moment", "PartCost", "Plan", "Segment", "Simulation", "lower_bound",
    "make_plan", "part_cost", "plain_plan", "recomputed", "saved", "simulate", "trace",
]  # fmt: skip
