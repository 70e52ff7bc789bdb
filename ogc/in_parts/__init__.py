"""Models that cannot be planned as a whole: their submodules are, one by one, and share one wish.

``find`` says what the parts are, ``ways`` how each may be run, ``measure`` what is around them, ``combine`` which
plan each gets, ``module`` runs them; ``resume`` takes up a plan that was saved, ``instead`` says when all this is done.
"""

from .instead import in_parts_if_better, in_parts_instead
from .make import heavy_leaves, optimize_in_parts
from .options import Options
from .plan import PartPlan, PartsPlan, PlainRest

__all__ = [
    "Options", "PartPlan", "PartsPlan", "PlainRest", "heavy_leaves", "in_parts_if_better", "in_parts_instead",
    "optimize_in_parts",
]  # fmt: skip
