"""One answer for all ranks to a question that each can answer by itself, without waiting for another rank.

Whoever has an answer first puts it where all ranks look: into the store that they met at. Later ones take it from
there. Ranks that never ask keep nobody waiting, and those that ask late find the answer.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from ..private import store_of_all_ranks
from .collectives import are_several

log = logging.getLogger(__name__)

T = TypeVar("T")


def first_of_all(question: str, answer: Callable[[], T]) -> T:
    """What the first rank answered, be it this one.

    Args:
        question: text that is equal on the ranks that are to agree, and on no others.
        answer: plain data that can be pickled; it is asked for only where no rank has answered yet.
    """
    store = store_of_all_ranks() if are_several() else None
    if store is None:
        return answer()
    key = f"ogc/{hashlib.sha256(question.encode()).hexdigest()}"
    if (known := _asked(lambda: store.get(key) if store.check([key]) else None)) is not None:
        return known
    mine = answer()
    text = base64.b64encode(pickle.dumps(mine)).decode()
    first = _asked(lambda: store.compare_set(key, "", text))
    return mine if first is None else first


def _asked(ask: Callable[[], bytes | None]) -> Any:
    """What the store has, if it has anything and can still be asked."""
    try:
        found = ask()
    except RuntimeError as error:
        log.info("ogc plans on this rank by itself: %s", error)
        return None
    return None if found is None else pickle.loads(base64.b64decode(found))
