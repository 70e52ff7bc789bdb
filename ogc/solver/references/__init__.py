"""Solvers to compare with: what is published or in common use, judged by the same simulator; a file for each idea."""

from ..wish import Solver
from .binomial import binomial
from .chen import chen
from .feng_huang import feng_huang
from .uniform import uniform

REFERENCES: dict[str, Solver] = {
    "chen": chen,
    "uniform": uniform,
    "binomial": binomial,
    "feng-huang": feng_huang,
}
"""Reference solvers by the names that :func:`ogc.solve` takes."""
