"""Models that cannot be planned as a whole: their submodules are, one by one, and share one goal.

``find`` says what the parts are and ``measure`` what is around them, ``joined`` makes one graph of all and asks the
solver for a plan, ``module`` runs the parts; ``late`` plans calls that nobody planned for, ``units`` sharded models.
``make`` does it all, and says when. ``beside`` plans what is called of a model beside its forward.
"""

from .beside import with_calls_beside
from .late import frugal_plan
from .make import heavy_opaque, in_parts_if_better, in_parts_instead, optimize_in_parts
from .plan import PartPlan, PartsPlan, PlainModule
from .units import check_goal_of_units, optimize_units, shards_alone

__all__ = [
    "PartPlan", "PartsPlan", "PlainModule", "check_goal_of_units", "frugal_plan", "heavy_opaque",
    "in_parts_if_better", "in_parts_instead", "optimize_in_parts", "optimize_units", "shards_alone",
    "with_calls_beside",
]  # fmt: skip
