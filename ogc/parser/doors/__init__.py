"""Front ends beside the recorder, a file each: what other tracers make of a forward becomes its program."""

from .dynamo import dynamo
from .export import export
from .jit import jit

__all__ = ["dynamo", "export", "jit"]
