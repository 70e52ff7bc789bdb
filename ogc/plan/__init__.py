"""What a solver decides, what that means step by step, and what it costs: plain data and its judge, free of torch."""

from .plan import Plan, Segment, recomputed, saved
from .simulate import Event, Moment, PartCost, Simulation, lower_bound, part_cost, simulate, trace

__all__ = [
    "Event",
    "Moment",
    "PartCost",
    "Plan",
    "Segment",
    "Simulation",
    "lower_bound",
    "part_cost",
    "recomputed",
    "saved",
    "simulate",
    "trace",
]
