"""Models that cannot be planned as a whole: their submodules are, one by one, and share one wish.

``find`` says what the parts are, ``ways`` how each may be run, ``measure`` what is around them, ``combine`` which
plan each gets, ``module`` runs them; ``resume`` takes up a plan that was saved, ``instead`` says when all this is done.
``units`` plans those of a sharded model.
"""

from .instead import heavy_leaves, in_parts_if_better, in_parts_instead
from .make import optimize_in_parts
from .options import Options
from .plan import PartPlan, PartsPlan, PlainRest
from .units import check_wish_of_units, optimize_units

__all__ = [
    "Options", "PartPlan", "PartsPlan", "PlainRest", "check_wish_of_units", "heavy_leaves", "in_parts_if_better",
    "in_parts_instead", "optimize_in_parts", "optimize_units",
]  # fmt: skip
