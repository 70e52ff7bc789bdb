"""A ScriptModule as a module of Python, whose forward runs it.

Its parameters and buffers are the script's. Its attributes are looked up in the script, so that it is seen when one is
changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...torch_state.reads.objects import LookedUp

_ogc_of_models = True

HELD = "script"
"""The attribute that holds the script, in a tuple, so that it is no submodule."""


READ = "attributes_read"
"""The attribute of a class that names what the graph reads of its script, beside tensors and modules."""


class Scripted(torch.nn.Module):
    """A ScriptModule, or a submodule of one, with its submodules; its class looks up what the graph reads of it.

    Whether it trains is said here, and to the script when that runs.
    """

    def __init__(self, script: Any) -> None:
        super().__init__()
        object.__setattr__(self, HELD, (script,))
        self.training = script.training
        for name, parameter in script.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in script.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the script returns, as its interpreter runs it without optimizing."""
        for module in self.modules():
            _script(module).training = module.training
            for name in getattr(type(module), READ):
                getattr(module, name)  # so that what the script reads is observed
        with torch.jit.optimized_execution(False):
            return _script(self)(*args, **kwargs)


def as_python(model: Any, front_end: str) -> Any:
    """The module of Python for a ScriptModule, if the front end reads its graph; other models as they are."""
    if front_end != "jit" or not isinstance(model, torch.jit.ScriptModule):
        return model
    return _of(model, "", _names_read(model))


def script_of(model: torch.nn.Module) -> Any:
    """The ScriptModule that a module stands for, None for any other module."""
    return _script(model) if isinstance(model, Scripted) else None


def _of(script: Any, path: str, read: dict[str, set[str]]) -> Scripted:
    names = tuple(sorted(read.get(path, ())))
    kind = type(f"Scripted{script.original_name}", (Scripted,), {READ: names})
    for name in names:
        setattr(kind, name, LookedUp(name, _script))
    made: Scripted = kind(script)
    for name, child in script.named_children():
        made.add_module(name, _of(child, f"{path}.{name}" if path else name, read))
    return made


def _script(module: torch.nn.Module) -> Any:
    return vars(module)[HELD][0]


def _names_read(script: Any) -> dict[str, set[str]]:
    """For each submodule by its name, the attributes that the graph reads and that are neither tensors nor modules."""
    graph = script.inlined_graph
    modules = {next(iter(graph.inputs())).debugName(): ("", script)}
    found: dict[str, set[str]] = {}
    for node in _nodes_of(graph):
        if node.kind() != "prim::GetAttr" or node.input().debugName() not in modules:
            continue
        (path, module), name = modules[node.input().debugName()], node.s("name")
        value = getattr(module, name)
        if isinstance(value, torch.nn.Module):
            modules[node.output().debugName()] = f"{path}.{name}" if path else name, value
        elif not isinstance(value, torch.Tensor) and name != "training":
            found.setdefault(path, set()).add(name)
    return found


def _nodes_of(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes_of(inner)
