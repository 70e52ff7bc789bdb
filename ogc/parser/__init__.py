"""From a module and a sample input to a weighted graph over an executable program."""

from ..program.program import Loss
from .custom import ParseGraph
from .opaque import NamesAndTypes, hooked_modules
from .parse import parse
from .reuse import reuse

__all__ = ["Loss", "NamesAndTypes", "ParseGraph", "hooked_modules", "parse", "reuse"]
