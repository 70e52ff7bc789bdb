"""What Python reads outside of tensors while a forward runs, and what it writes.

A recorded program has the values that Python read: attributes of modules and other objects, of classes and Python
modules, globals, cells, default arguments, containers. They are observed once and compared at the start of each call.
"""

from .intercept import is_observer
from .observer import Observer, Write, call_unseen, opaque_call
from .owners import Reads

__all__ = ["Observer", "Reads", "Write", "call_unseen", "is_observer", "opaque_call"]
