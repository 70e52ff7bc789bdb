"""Other ways to save activation memory beside ours."""

from .comparing import compare
from .row import Comparison, PeerRow, with_verdicts

__all__ = ["Comparison", "PeerRow", "compare", "with_verdicts"]
