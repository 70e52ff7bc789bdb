"""Numbers, and sizes in bytes, as users give them."""

from __future__ import annotations

import re
from typing import Any

from .errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(budget: int | float | str, plain: int) -> int:
    """The number of bytes that a budget stands for, where the plain model peaks at ``plain``.

    Raises:
        InputError: it stands for none.
    """
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]i?)?b?\s*", budget.lower())
        if found is not None:
            return int(float(found[1]) * UNITS[found[2] or ""])
    elif is_number(budget) and budget > 0 and (isinstance(budget, int) or budget <= 1):
        return budget if isinstance(budget, int) else int(budget * plain)
    raise InputError(
        f"memory_budget must be bytes, a text like '8GB' or '512MiB', a share in (0, 1] of the plain peak, or 'least', "
        f"not {budget!r}"
    )


def memory_bytes(size: Any, argument: str) -> int:
    """Bytes of a memory that an argument gives: a number or a text such as ``"24GB"``, but no share."""
    if isinstance(size, (int, str)) and not isinstance(size, bool):
        try:
            return bytes_of(size, 0)
        except InputError:
            pass
    raise InputError(f"{argument} must be bytes or a text like '24GB' or '8GiB', not {size!r}")


def is_number(goal: Any) -> bool:
    """Whether this is a number, which True is not."""
    return isinstance(goal, (int, float)) and not isinstance(goal, bool)
