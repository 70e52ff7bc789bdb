"""From a weighted graph to a plan. Numbers in, plain data out: nothing here needs torch."""

from .simulate import Event, Simulation, simulate
from .solve import make_plan, solve

__all__ = ["Event", "Simulation", "make_plan", "simulate", "solve"]
