"""The errors that the library raises on purpose; all share one root."""

from __future__ import annotations


class OgcError(Exception):
    """Root of every error that ``ogc`` raises itself."""


class InputError(OgcError):
    """An argument is of the wrong kind; the message says what was expected."""


class ParseError(OgcError):
    """The model cannot be turned into a graph that computes the same numbers."""


class SolveError(OgcError):
    """No plan of the solver's class meets what was asked."""


class PlanError(OgcError):
    """A plan does not fit the graph it is used with."""


class ReplayError(OgcError):
    """A segment cannot be recomputed as it ran in the forward pass."""
