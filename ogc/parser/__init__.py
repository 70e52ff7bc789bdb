"""From a module and a sample input to a weighted graph over an executable program."""

from ..program.program import Loss
from .custom import ParseGraph
from .opaque import NamesAndTypes, hooked_modules
from .options import ParseOptions
from .parse import parse, parsed
from .reuse import Shapes, at_shapes, reuse, reuse_quickly, shapes_of

__all__ = [
    "Loss",
    "NamesAndTypes",
    "ParseGraph",
    "ParseOptions",
    "Shapes",
    "at_shapes",
    "hooked_modules",
    "parse",
    "parsed",
    "reuse",
    "reuse_quickly",
    "shapes_of",
]
