"""What Python reads outside of tensors while a forward runs, and what it writes: observed once, compared at each call.

A recorded program has the numbers that Python read while it was recorded. It holds as long as Python would read the
same again. So reads are observed in the recorded forward: of attributes of modules and other objects, of classes,
Python modules, globals, cells of closures, default arguments, lists, dicts and sets. What was read is compared at the
start of each call.
"""

from .observer import Observer, Write, call_unseen, leaf_call
from .owners import Reads, WatchedReads

__all__ = ["Observer", "Reads", "WatchedReads", "Write", "call_unseen", "leaf_call"]
