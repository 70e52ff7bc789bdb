"""The published algorithm for arbitrary graphs, as segments of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...graph import Graph
from ...plan import Segment
from .common import all_but_last, at_cuts, reference
from .division import checkpoint_places


@reference("feng-huang")
def feng_huang(graph: Graph) -> Iterable[Sequence[Segment]]:
    """The published algorithm for arbitrary graphs; source, objective and complexity: :mod:`.division`.

    The program is cut at each of its checkpoints, or behind it where it may first be cut. For vertices that
    split the whole graph this is exact. Elsewhere a cut keeps all that crosses it, not the checkpoint alone,
    and branches that the algorithm looks at one by one are run in program order.
    """
    indices = np.searchsorted(graph.cuts, checkpoint_places(graph))
    yield all_but_last(at_cuts(graph, indices.tolist()))
