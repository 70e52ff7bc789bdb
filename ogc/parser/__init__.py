"""From a module and a sample input to a weighted graph over an executable program."""

from ..program.program import Loss
from .carry_over import carry_over
from .custom import ParseGraph
from .leaves import LeafModules, hooked_modules
from .parse import parse

__all__ = ["LeafModules", "Loss", "ParseGraph", "carry_over", "hooked_modules", "parse"]
