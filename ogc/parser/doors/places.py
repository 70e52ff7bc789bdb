"""Where in a model the calls of another tracer's graph come from, and the model as such a tracer is given it."""

from __future__ import annotations

import re
from itertools import takewhile

import torch

from ..forward.flat import FlatForward
from ..forward.location import is_before_us, line_of

INNER = "model"
"""The attribute of a :class:`FlatModule` that the model is."""


class FlatModule(torch.nn.Module):
    """A model as a function of flat tensors, of which it returns others."""

    def __init__(self, model: torch.nn.Module, flat: FlatForward) -> None:
        super().__init__()
        self.model = model
        self.flat = flat

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.flat(*tensors))


class Names:
    """The names that the recorder gives to modules: of several, a module has the last."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
        self.by_id = {str(id(module)): name for module, name in self.names.items()}

    def of(self, path: str) -> str:
        """The name of what is seen from a :class:`FlatModule` by a path such as ``model.blocks.0``."""
        name = path.partition(".")[2]
        try:
            return self.names.get(self.model.get_submodule(name), name)
        except AttributeError:
            return name


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def note_places(graph: torch.fx.Graph, model: torch.nn.Module) -> None:
    """Note in each node's ``meta`` its module and its line, of what torch's tracers say of it."""
    names = Names(model)
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        key, path = next(((str(key), str(entry[0])) for key, entry in reversed(stack.items())), ("", ""))
        key = key.partition("@")[0]  # behind which is the number of the module's call
        frames = [(found["file"], int(found["line"])) for found in _FRAME.finditer(node.meta.get("stack_trace") or "")]
        node.meta["module"] = names.by_id[key] if key in names.by_id else names.of(path)
        node.meta["source"] = line_of(takewhile(is_before_us, reversed(frames)))
