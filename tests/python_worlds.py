"""Programs whose forward reads and writes whatever Python has, and changes to it between calls.

A program is written as text and run in a world of its own: a Python module with its globals, classes and closures. So
the same program exists twice, once for the plain model and once for the optimized one.
"""

import contextlib
import random
import types

SOURCE = """
import dataclasses
import functools
import random
import types

import numpy
import torch
from torch import nn


@dataclasses.dataclass
class Inner:
    gain: float = 1.1
    power: float = 1.2


@dataclasses.dataclass
class Config:
    gain: float = 0.9
    inner: Inner = dataclasses.field(default_factory=Inner)
    table: dict = dataclasses.field(default_factory=lambda: {{"a": [1.0, 1.25], "b": 0.75}})
    last: int = 0
    bend: str = "tanh"


class Slotted:
    __slots__ = ("value", "other")

    def __init__(self):
        self.value, self.other = 1.05, 0.95


class Magic:
    def __init__(self):
        self._content = {{"gain": 1.15}}

    def __getattr__(self, name):
        try:
            return self.__dict__["_content"][name]
        except KeyError:
            raise AttributeError(name) from None


class Table(dict):
    def __getattr__(self, name):
        return self[name]


SCALE = 1.3
COUNT = 0
BOX = {{"a": [0.8, 1.7], "deep": {{"b": (1.0, [1.4])}}}}
CONFIG = Config()
SPACE = types.SimpleNamespace(gain=1.35)
other = types.ModuleType("other_world")
other.SCALE, other.inner = 0.85, types.ModuleType("other_world.inner")
other.inner.GAIN = 1.45


def make():
    number, box = 1.5, [0.7]

    def read(x):
        return x * number * box[0]

    def put(value):
        nonlocal number
        number = value

    def put_box(value):
        box[0] = value

    def count(x):
        nonlocal number
        number = 2.0 if number < 2.0 else number
        return x

    return read, put, put_box, count


read_closure, put_cell, put_box, count_cell = make()


def with_default(x, scale=1.6, table={{"a": 1.1}}):
    return x * scale * table["a"]


def with_other_default(x, scale=1.0, table=()):
    return x * scale * 0.5


def with_attribute(x):
    return x * with_attribute.gain


with_attribute.gain = 1.2


def scaled(x, scale):
    return x * scale


def helper(module, x, name):
    return x * getattr(module, name)


class Base(nn.Module):
    K = 1.25
    TABLE = {{"a": 0.65}}


class Block(Base):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale, self.scale0, self.scale1 = 1.1, 0.9, 1.2
        self.which = 1
        self.table = {{"default": 1.3, "list": [1.0, 0.8]}}
        self.items = [1.0, 0.5]
        self.flag = True
        self.act = "tanh"
        self.config = Config() if number else CONFIG
        self.slotted = Slotted()
        self.magic = Magic()
        self.own_table = Table(gain=0.9)
        self.array = numpy.array([1.0, 1.5])
        self.shift = torch.full((8,), 0.1)
        self.partial = functools.partial(scaled, scale=1.4)
        self.rng, self.noise = random.Random(number), numpy.random.default_rng(number)
        self.function = torch.sin
        self._hidden = 1.05
        self.seen, self.calls, self.cache, self.last, self.kept = 0, 0, {{}}, None, None

    @property
    def prop(self):
        return self._hidden * self.config.inner.gain

    @classmethod
    def of_class(cls, x):
        return x * cls.K * cls.TABLE["a"]

    @staticmethod
    def of_static(x):
        return x * SCALE

    def method(self, x, name="scale"):
        return x * getattr(self, name)

    def forward(self, x):
        x = torch.tanh(self.linear(x))
{statements}
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.blocks[2].config = self.blocks[1].config
        self.gain, self.hidden = 1.1, [Slotted()]

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.gain
{around}
        return x
"""

READS = (
    "x = x * self.scale",
    "x = x * self.table['default'] + self.table['list'][1]",
    "x = x * getattr(self, f'scale{self.which}')",
    "x = helper(self, x, 'sca' + 'le')",
    "x = self.method(x) + self.method(x, 'scale0')",
    "x = x * type(self).K",
    "x = x * Base.K * Block.TABLE['a']",
    "x = self.of_class(x)",
    "x = self.of_static(x)",
    "x = x * self.K",
    "x = x * self.prop",
    "x = x * SCALE",
    "x = x * globals()['SCALE']",
    "x = x * BOX['a'][1] * BOX['deep']['b'][1][0]",
    "x = x * CONFIG.gain * CONFIG.inner.power",
    "x = x * self.config.inner.gain + self.config.table['a'][1]",
    "x = getattr(torch, self.config.bend)(x)",
    "x = x * self.slotted.value",
    "x = x * self.magic.gain",
    "x = x * self.own_table.gain",
    "x = x * float(self.array[1])",
    "x = x * SPACE.gain",
    "x = x * other.SCALE * getattr(other.inner, 'GAIN')",
    "x = read_closure(x)",
    "x = with_default(x)",
    "x = with_attribute(x)",
    "x = self.partial(x)",
    "x = Block.of_static(Block.of_class(x))",
    "x = self.function(x)",
    "x = x * (1.5 if self.rng.random() < 0.5 else 1.0)",
    "x = x * (1.5 if self.noise.random() < 0.5 else 1.0)",
    "x = x * vars(self)['scale0']",
    "x = x * self.__dict__['scale1']",
    "x = x * sum(self.items) + len(self.items)",
    "x = 2.0 * x if self.flag else x",
    "x = 1.5 * x if hasattr(self, 'late') else x",
    "x = 1.5 * x if getattr(self, 'late', None) is not None else x",
    "x = 1.25 * x if self.config is CONFIG else x",
    "x = x + self.shift",
    "x = x * (3.0 if self.table is self.config.table else 0.5)",
    "x = x * dataclasses.asdict(self.config)['gain']",
    "x = x * functools.reduce(lambda a, b: a * b, [v for v in self.items])",
    "x = x * self.linear.in_features * self.norm.eps + self.norm(x)",
    "x = x * (2.0 if isinstance(self.slotted, Slotted) else 1.0)",
    "x = x * next(value for key, value in self.table.items() if key == 'default')",
    "x = x * max(self.table.get('late', 0.5), 0.1)",
    "x = x if 'late' in self.table else 0.7 * x",
    "x = nn.functional.relu(x) if self.act == 'relu' else torch.tanh(x)",
)

WRITES = (
    "self.seen = max(self.seen, x.shape[0])",
    "self.last = x.shape[0]",
    "self.calls += 1",
    "self.calls += 1\nx = x * self.calls",
    "self.config.last = x.shape[0]",
    "CONFIG.last = x.shape[0]",
    "global COUNT\nCOUNT += 1",
    "global COUNT\nCOUNT = 7",
    "type(self).K = 1.5",
    "self.cache.setdefault('mask', torch.ones(8))\nx = x * self.cache['mask']",
    "if 'mask' not in self.cache:\n    self.cache['mask'] = torch.full((8,), 0.5)\nx = x * self.cache['mask']",
    "if len(self.items) < 4:\n    self.items.append(1.0)",
    "self.kept = x.detach()",
    "self.kept = x.sum()",
    "self.slotted.other = x.shape[1]",
    "x = count_cell(x)",
    "if self.last is None:\n    self.last = torch.full((8,), 2.0)\nx = x * self.last",
    "self.scale0 = 1.0 if self.flag else 0.3",
    "self.which = 0",
    "self.stash = x.shape\nx = x.reshape(self.stash)",
    "self.late = 1",
    "BOX['deep']['b'][1][0] = 0.6",
)

AROUND = (
    "x = x * self.hidden[0].value",
    "x = x * self.blocks[0].scale",
    "x = x * self.blocks[1].calls + self.blocks[0].seen",
    "self.gain = 1.1",
    "x = x * COUNT",
    "x = x + (0 if self.blocks[2].last is None else 1)",
)

CHANGES = (
    "b.scale = r", "b.scale0 = r", "b.scale1 = r", "b.which = 1 - b.which", "b.table['default'] = r",
    "b.table['list'][1] = r", "b.table = {'default': r, 'list': [r, r]}", "b.items.append(r)", "b.items[0] = r",
    "b.flag = not b.flag", "b.act = 'relu'", "b.config.inner.gain = r", "b.config.table['a'][1] = r",
    "b.config.bend = 'sin'", "b.config.inner = Inner(r, r)", "b.config = Config(r)", "b.config = CONFIG",
    "b.slotted.value = r", "b.magic._content['gain'] = r", "b.own_table['gain'] = r", "b.array[1] = r",
    "b.partial = functools.partial(scaled, scale=r)", "b.function = torch.cos", "b._hidden = r", "b.late = r",
    "vars(b).pop('late', None)", "b.K = r", "vars(b).pop('K', None)", "Base.K = r", "Block.K = r",
    "Base.TABLE['a'] = r", "CONFIG.gain = r", "CONFIG.inner.power = r", "BOX['a'][1] = r",
    "BOX['deep']['b'][1][0] = r", "SPACE.gain = r", "other.SCALE = r", "other.inner.GAIN = r", "put_cell(r)",
    "put_box(r)", "with_default.__defaults__ = (r, {'a': r})", "with_default.__defaults__[1]['a'] = r",
    "with_attribute.gain = r", "globals()['SCALE'] = r", "b.table['late'] = r", "b.table.pop('late', None)",
    "b.shift = torch.full((8,), r)", "m.hidden[0].value = r", "m.gain = r", "b.linear.in_features = 3",
    "b.norm.eps = 1e-3", "b.cache.clear()", "b.seen = 0", "b.calls = 0", "globals()['COUNT'] = 3", "b.last = None",
    "b.table = b.config.table", "b.slotted = Slotted()", "b.notes = r", "CONFIG.notes = r", "globals()['NEW'] = r",
    "b.config.table = dict(b.config.table)", "b.items = list(b.items)",
    "Block.method = lambda self, x, name='', r=r: x * r", "Block.of_class = classmethod(lambda cls, x, r=r: x * r)",
    "Block.of_static = staticmethod(lambda x, r=r: x * r)", "Block.prop = property(lambda self, r=r: r)",
    "b.rng.seed(int(100 * r))", "b.noise = numpy.random.default_rng(int(100 * r))",
    "globals()['helper'] = lambda module, x, name, r=r: x * r", "with_default.__code__ = with_other_default.__code__",
)  # fmt: skip

STATE = (
    "[(b.seen, b.calls, b.last if not isinstance(b.last, torch.Tensor) else b.last.tolist(), "
    "sorted(b.cache), b.items, b.scale0, b.which, b.slotted.other if hasattr(b.slotted, 'other') else 0, "
    "b.config.last, getattr(b, 'late', None), getattr(b, 'stash', None)) for b in m.blocks], "
    "[None if b.kept is None else b.kept.tolist() for b in m.blocks], "
    "COUNT, CONFIG.last, Base.K, vars(Block).get('K'), BOX, m.gain, read_closure.__closure__[1].cell_contents"
)
"""What is to be seen of what a forward writes."""


class World:
    """One world in which a program runs."""

    def __init__(self, source: str) -> None:
        self.module = types.ModuleType("world")
        exec(compile(source, "<world>", "exec"), vars(self.module))
        self.model = self.module.Net()

    def change(self, text: str, block: int, number: float) -> None:
        """Make one of the changes, unless what it changes was taken away by others before."""
        with contextlib.suppress(LookupError, AttributeError, TypeError):
            exec(text, vars(self.module), {"m": self.model, "b": self.model.blocks[block], "r": number})

    def state(self) -> str:
        """What is to be seen of what was written."""
        scope = dict(vars(self.module), m=self.model)
        return repr(eval(STATE, scope))


def program(rng: random.Random) -> str:
    """The text of a program."""
    lines = rng.sample(READS, rng.randint(2, 6))
    lines += rng.sample(WRITES, rng.choice((0, 0, 1, 1, 2)))
    rng.shuffle(lines)
    seen = set()
    statements = []
    for line in lines:
        for part in line.split("\n"):
            if part.startswith("global ") and part in seen:
                continue
            seen.add(part)
            statements.append(f"        {part}")
    statements.sort(key=lambda part: "global " not in part)
    around = [f"        {line}" for line in rng.sample(AROUND, rng.choice((0, 0, 1, 2)))]
    return SOURCE.format(statements="\n".join(statements), around="\n".join(around))
