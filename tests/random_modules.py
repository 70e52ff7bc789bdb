"""Random modules as small programs: a recipe of numbers in, the text of a module that runs out.

A recipe holds nothing but numbers that pick rules and operands, counted back from the newest value, so that
any part of it may be left out and what is left is a recipe again: failures shrink to a few lines. The
writer runs each statement as it is written and leaves out what PyTorch itself refuses.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

_serial = count()


# -- what rules may use beside PyTorch -------------------------------------------------------------------


class Branch(nn.Module):
    """Control flow on data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x) * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 + 0 * x


class Custom(nn.Module):
    """An autograd function of its own."""

    def forward(self, x):
        return Doubled.apply(x)


class Counts(nn.Module):
    """Buffers that are written, one before and one after it is read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.ones(size))

    def forward(self, x):
        self.calls += 1
        y = x * self.mean + self.calls
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.flatten(0, -2).mean(0), alpha=0.1)
        return y


class Hooked(nn.Linear):
    """A layer with a forward hook."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_forward_hook(lambda module, given, result: result * 0.5)


NAMES = {"torch": torch, "nn": nn, "F": F, **{kind.__name__: kind for kind in (Branch, Custom, Counts, Hooked)}}


# -- rules -----------------------------------------------------------------------------------------------

When = Callable[[torch.Tensor], bool]


def floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int64


def dims(least: int, most: int = 4) -> When:
    return lambda tensor: tensor.is_floating_point() and least <= tensor.dim() <= most


def image(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.dim() == 4 and min(tensor.shape[2:]) > 1


def sequence(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.dim() == 3 and min(tensor.shape) > 1


@dataclass(frozen=True)
class Rule:
    """One way to go on: ``{a}`` and ``{b}`` are values, ``{n}`` and ``{k}`` new ones, ``{m}`` a member of the module.

    ``{N}``, ``{C}``, ``{D}`` are the first, second and last size of ``a``.

    Attributes:
        text: the statement, or an expression that becomes a new value.
        when: whether ``a`` will do.
        init: the statement in ``__init__`` that makes the member.
        other: ``"same"`` shape or a shape that ``"fits"`` up to the last but one, of ``b``; or ``"any"``.
        writes: whether it writes a value in place.
    """

    text: str
    when: When = floating
    init: str = ""
    other: str = "same"
    writes: bool = False

    @property
    def statement(self) -> str:
        return self.text if self.writes or re.match(r"\{n\}.* = ", self.text) else "{n} = " + self.text


def _rules(when: When, *texts: str, **options: Any) -> list[Rule]:
    return [Rule(text, when, **options) for text in texts]


def _member(when: When, *inits: str, text: str = "{m}({a})") -> list[Rule]:
    return [Rule(text, when, "{m} = " + init) for init in inits]


RULES = [
    *_rules(
        floating,
        "torch.relu({a})",
        "{a} * 0.5",
        "{a} + 1",
        "torch.tanh({a})",
        "{a}.sigmoid()",
        "-{a}",
        "{a}.sin()",
        "{a}.abs()",
        "F.gelu({a})",
        "F.silu({a})",
        "F.elu({a})",
        "F.softplus({a})",
        "F.hardswish({a})",
        "F.leaky_relu({a}, 0.1)",
        "{a}.clamp(-1, 1)",
        "{a} / (1 + {a}.abs())",
        "{a} * {a}",
        "{a} - {a}.mean()",
        "{a}.masked_fill({a} > 0.5, 0)",
        "torch.where({a} > 0, {a}, 0.1 * {a})",
        "{a}.square().sum().sqrt() + {a}",
        "{a}.clone()",
        "{a}.detach()",
        "{a}.contiguous()",
        "{a}.float()",
        "{a}.double().cos().float()",
        "{a}.to(torch.bfloat16).float()",
        "torch.sigmoid({a}) * 2 - torch.tanh({a})",
        "{a}.exp().clamp(max=3)",
        "{a}.unsqueeze(0).squeeze(0)",
    ),
    *_rules(
        floating,
        "F.dropout({a}, 0.3, self.training)",
        "F.dropout({a}, 0.2, self.training) + {a}",
        "{a} + 0.1 * torch.randn_like({a})",
        "{a} * torch.rand({a}.shape)",
        "torch.bernoulli({a}.sigmoid()) * {a}",
        "F.rrelu({a}, training=self.training)",
    ),
    *_rules(
        dims(1),
        "F.softmax({a}, -1)",
        "F.log_softmax({a}, -1)",
        "{a}.cumsum(-1)",
        "{a}.roll(1, -1)",
        "{a}.flip(-1)",
        "F.pad({a}, (0, 1))",
        "F.normalize({a}, dim=-1)",
        "{a}.mean(-1, keepdim=True)",
        "{a}.amax(-1, keepdim=True) + {a}",
        "{a}.sort(-1).values",
        "F.layer_norm({a}, ({D},))",
        "{a}.unsqueeze(0)",
        "{a}[..., -1]",
        "{a}[..., 1:]",
        "{a}[..., ::2]",
        "{a}[None]",
        "{a}.repeat_interleave(2, -1)",
        "{a}.logsumexp(-1, keepdim=True)",
        "{a}.argmax(-1)",
        "{n}, {k} = {a}.max(-1)",
        "{n}, {k} = {a}.topk(1, -1)",
        "{n}, {k} = {a}.chunk(2, -1)",
        "{n}, {k} = {a}.split([1, {D} - 1], -1)",
        "{n}, *{k} = {a}.unbind(-1)",
        "F.cross_entropy({a}.reshape(-1, {D}), {a}.reshape(-1, {D}).argmax(1))",
    ),
    *_rules(
        dims(2),
        "{a}.transpose(0, 1)",
        "{a}.transpose(1, -1)",
        "{a}.mT",
        "{a}.flatten(1)",
        "{a}.flatten(0, 1)",
        "{a}.reshape({N}, -1)",
        "{a}.view({N}, -1)",
        "{a}.movedim(-1, 0)",
        "{a}[0]",
        "{a}[:, 0]",
        "{a}[:, :1].expand_as({a})",
        "{a}[:1].expand({N}, *{a}.shape[1:])",
        "{a}[:, 1:]",
        "{a}.select(1, 0).unsqueeze(1)",
        "{a}.diagonal(0, 0, 1)",
        "{a}.tril()",
        "{a}.narrow(1, 0, 1) * {a}",
        "{a}.mean(1)",
        "{a}.sum(0)",
        "{a}.var(1, unbiased=False, keepdim=True)",
        "{a} @ {a}.mT",
        "{a}.mT @ {a}",
        "{n}, {k} = {a}.chunk(2, 1)",
        "torch.einsum('i...,j...->ij', {a}, {a}) * 0.1",
        "{a}.gather(-1, {a}.argsort(-1))",
        "{a}.index_select(0, torch.arange({N} - 1, -1, -1))",
    ),
    *_rules(
        image,
        "F.max_pool2d({a}, 2)",
        "F.avg_pool2d({a}, 2)",
        "F.adaptive_avg_pool2d({a}, 2)",
        "F.interpolate({a}, scale_factor=2)[..., :6, :6]",
        "F.pixel_unshuffle(F.pad({a}, (0, {D} % 2, 0, {a}.shape[2] % 2)), 2)",
        "{a}.flatten(2).transpose(1, 2)",
        "{a}.permute(0, 2, 3, 1)",
        "{a}.contiguous(memory_format=torch.channels_last)",
        "F.dropout2d({a}, 0.3, self.training)",
        "{a} * {a}.mean((2, 3), keepdim=True).sigmoid()",
        "F.instance_norm({a})",
        "F.group_norm({a}, 1)",
        "F.unfold({a}, 2)",
    ),
    *_rules(
        sequence,
        "F.scaled_dot_product_attention({a}, {a}, {a})",
        "F.scaled_dot_product_attention({a}[:, None], {a}[:, None], {a}[:, None], is_causal=True)[:, 0]",
        "F.max_pool1d({a}, 2)",
        "{a}.transpose(1, 2).contiguous()",
        "F.glu(torch.cat([{a}, {a}], -1))",
        "torch.bmm({a}, {a}.transpose(1, 2)).softmax(-1) @ {a}",
    ),
    *_rules(
        floating,
        "{a} + {b}",
        "{a} * {b}",
        "{a} - {b}",
        "torch.maximum({a}, {b})",
        "torch.where({b} > 0, {a}, {b})",
        "torch.lerp({a}, {b}, 0.3)",
        "torch.addcmul({a}, {a}, {b}, value=0.5)",
        "torch.stack([{a}, {b}]).mean(0)",
        "torch.relu({a} + {b})",
        "{a} / ({b}.abs() + 1)",
    ),
    *_rules(dims(1), "torch.cat([{a}, {b}], -1)", "torch.cat([{b}, {a}, {b}])", "torch.stack([{a}, {b}], 1).amax(1)"),
    *_rules(dims(0), "{a} + {b}.mean()", "{a} * {b}.sum().sigmoid()", other="any"),
    # integers
    *_rules(
        whole, "{a}.float()", "{a} + 1", "{a} % 3", "F.one_hot({a} % 4, 4).float()", "({a} > 1).float()", "{a}[:1]"
    ),
    *_rules(whole, "{b}.flatten()[({a} % {b}.numel())]", "({a} % 2).sum() * {b}", other="any"),
    *_rules(whole, "{a}.add_(1)", "{a}[..., :1] = 2", writes=True),
    # in place
    *_rules(
        floating,
        "{a}.relu_()",
        "{a}.mul_(0.5)",
        "{a}.add_(1)",
        "{a} += 1",
        "{a}.tanh_()",
        "{a}.sigmoid_()",
        "{a}.clamp_(-1, 1)",
        "{a}.neg_()",
        "{n} = F.relu({a}, inplace=True)",
        "{n} = F.leaky_relu({a}, 0.2, inplace=True)",
        "{n} = F.silu({a}, inplace=True)",
        "{n} = F.dropout({a}, 0.3, self.training, inplace=True)",
        "{n} = {a}.add_(0.5)",
        "{n} = {a}.mul_(2).sin_()",
        "{a}.masked_fill_({a} > 1, 0)",
        "{a}.zero_()",
        "{a}.fill_(0.5)",
        "{a}.add_(torch.randn_like({a}), alpha=0.1)",
        "{a}.view(-1)[:2].mul_(0.5)",
        "{a}.detach().add_(0)",
        writes=True,
    ),
    *_rules(
        dims(1),
        "{a}[..., 0] = 0.5",
        "{a}[..., :1] += 1",
        "{a}[..., 1:] *= 0.5",
        "{a}[0] = {a}[-1]",
        "{a}[..., :1].relu_()",
        "{a}[{a} > 1] = 0",
        "{a}[..., ::2] = {a}[..., ::2].clone() * 2",
        "{n} = {a}.unsqueeze_(-1)",
        "{a}.cumsum_(-1)",
        writes=True,
    ),
    *_rules(
        dims(2),
        "{a}.transpose(0, 1).mul_(0.5)",
        "{a}[:, 0].add_(1)",
        "{a}[:, :1] = {a}[:, -1:].detach()",
        "{n} = {a}.transpose_(0, 1)",
        "{n} = {a}.flatten(1).mul_(0.5)",
        "{n} = {a}.chunk(2, 1)[0].sigmoid_()",
        writes=True,
    ),
    *_rules(
        floating,
        "{a}.add_({b})",
        "{a}.mul_({b})",
        "{a} += {b}",
        "{a} -= 0.1 * {b}",
        "{a}.copy_({b})",
        "{a}.addcmul_({b}, {b}, value=0.1)",
        "{n} = {a}.add_({b}).relu_()",
        "{a}[..., :1] = {b}[..., :1]",
        "{a}.lerp_({b}, 0.5)",
        writes=True,
    ),
    *_rules(dims(1), "{a}.mul_({b}.mean())", "{a}[..., 0] += {b}.sum()", other="any", writes=True),
    # members
    *_member(
        dims(1),
        "nn.Linear({D}, {D})",
        "nn.Linear({D}, 4)",
        "nn.Linear({D}, 5, bias=False)",
        "nn.LayerNorm({D})",
        "nn.Sequential(nn.Linear({D}, 6), nn.ReLU(inplace=True), nn.Linear(6, {D}))",
        "nn.Sequential(nn.Linear({D}, {D}), nn.Dropout(0.2), nn.Tanh())",
        "nn.Linear({D}, {D}).requires_grad_(False)",
        "nn.RMSNorm({D})",
    ),
    *_member(floating, "nn.Dropout(0.3)", "nn.ReLU(inplace=True)", "nn.PReLU()", "nn.GELU()", "nn.Identity()"),
    *_member(
        image,
        "nn.Conv2d({C}, 4, 3, padding=1)",
        "nn.Conv2d({C}, {C}, 3, padding='same')",
        "nn.Conv2d({C}, {C}, 3, padding=1, bias=False)",
        "nn.Conv2d({C}, 4, 1)",
        "nn.Conv2d({C}, {C}, 3, padding=1, groups={C})",
        "nn.Conv2d({C}, 3, 2, stride=2)",
        "nn.ConvTranspose2d({C}, 3, 2)",
        "nn.BatchNorm2d({C})",
        "nn.Sequential(nn.Conv2d({C}, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))",
        "nn.Sequential(nn.BatchNorm2d({C}), nn.ReLU(inplace=True), nn.Conv2d({C}, {C}, 3, padding=1))",
        "nn.GroupNorm(1, {C})",
        "nn.InstanceNorm2d({C}, affine=True, track_running_stats=True)",
        "nn.MaxPool2d(2)",
        "nn.MaxPool2d(3, 1, 1)",
        "nn.AdaptiveAvgPool2d(1)",
        "nn.BatchNorm2d({C}).eval()",
        "nn.BatchNorm2d({C}, affine=False, momentum=0.5)",
        "nn.Dropout2d(0.4)",
    ),
    *_member(
        sequence,
        "nn.Conv1d({C}, {C}, 3, padding=1)",
        "nn.Conv1d({C}, {C}, 3, padding='same')",
        "nn.BatchNorm1d({C})",
        "nn.TransformerEncoderLayer({D}, 1, 8, batch_first=True)",
    ),
    Rule("{n}, {k} = {m}({a}, {a}, {a})", sequence, "{m} = nn.MultiheadAttention({D}, 1, 0.1, batch_first=True)"),
    Rule("{n}, {k} = {m}({a})", sequence, "{m} = nn.GRU({D}, {D}, batch_first=True)"),
    Rule("{m}({a})[0]", sequence, "{m} = nn.LSTM({D}, 4, batch_first=True)"),
    *_member(dims(2, 2), "nn.Bilinear({D}, {D}, 3)", text="{m}({a}, {a})"),
    *_member(dims(2, 2), "nn.BatchNorm1d({D})"),
    *_member(whole, "nn.Embedding(5, 4)", text="{m}({a} % 5)"),
    *_member(whole, "nn.Parameter(torch.randn(5, 3))", text="{m}[{a} % 5]"),
    *_member(dims(1), "nn.Parameter(torch.randn({D}))", text="{a} * {m}"),
    *_member(dims(1), "nn.Parameter(torch.randn({D}, {D}))", text="{a} @ {m}.t()"),
    *_member(dims(1), "nn.Linear({D}, {D})", text="F.linear({a}, {m}.weight.t(), {m}.bias)"),
    *_member(dims(1), "nn.Linear({D}, {D})", text="F.linear({a}, {m}.weight / {m}.weight.norm())"),
    *_member(dims(1), "nn.Buffer(torch.full(({D},), 0.5))", text="{a} * {m}"),
    *_member(dims(1), "nn.Buffer(torch.zeros(()))", text="{a} + {m}.add_(1)"),
    *_member(dims(1), "torch.linspace(0, 1, {D})", text="{a} + {m}"),  # no buffer: a constant
    *_member(dims(2), "Counts({D})"),
    *_member(dims(1), "Branch({D})", "Hooked({D})"),
    *_member(floating, "Custom()"),
    *_member(image, "nn.BatchNorm2d({C}, momentum=None)"),
]


# -- recipes and programs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """Which rule, which values counted back from the newest, and what else is possible."""

    rule: int
    a: int = 0
    b: int = 0
    reuses: bool = False
    without_grad: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that a program is made of."""

    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    structure: int = 0
    needs_grad: bool = False


INPUTS = (
    "torch.randn(3, 6)",
    "torch.randn(2, 3, 6, 6)",
    "torch.randn(2, 5, 4)",
    "torch.arange(10).reshape(2, 5)",
    "torch.randn(6, 3).t()",
    "torch.randn(4, 4, 5, 5).contiguous(memory_format=torch.channels_last)",
    "torch.randn(())",
)

STRUCTURES = (
    "{all}",
    "({all},)",
    "{{'first': {first}, 'all': [{all}]}}",
    "({all}, None, x0)",
    "({first}, {{'again': {first}, 'rest': ({all},)}}, 3)",
)


@dataclass(frozen=True, repr=False)
class Program:
    """The text of a module and of the arguments to call it with."""

    init: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(f"x{number}" for number in range(len(self.inputs)))
        lines = ["class Random(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.init]
        lines += ["", f"    def forward(self, {names}):", *(f"        {line}" for line in self.body)]
        lines += [f"        return {self.result}", ""]
        return "\n".join([*lines, f"inputs = ({', '.join(self.inputs)},)", ""])

    __repr__ = __str__

    def make(self) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The module and its arguments, always the same."""
        torch.manual_seed(0)
        text, file, names = str(self), f"<random module {next(_serial)}>", dict(NAMES)
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), names)
        return names["Random"](), names["inputs"]


class Writer:
    """Writes a program statement by statement, and runs each to know the shapes."""

    def __init__(self, recipe: Recipe) -> None:
        texts = [INPUTS[number] for number in recipe.inputs]
        ending = ".requires_grad_()" if recipe.needs_grad else ""
        self.inputs = tuple(f"{text}{ending if 'randn' in text else ''}" for text in texts)
        # One parameter at least, which the first value depends on.
        self.init = ["self.p = nn.Parameter(torch.ones(()))"]
        self.body: list[str] = []
        self.names: list[str] = []
        self.members = 0
        self._start()
        self._add([], "v0 = x0 * self.p")
        for instruction in recipe.instructions:
            self._follow(instruction)
        chosen = [self.names[-1 - number % len(self.names)] for number in recipe.outputs]
        if not any(self._gets_gradient(self.values[name]) for name in chosen):
            chosen.append(next(name for name in self.names if self._gets_gradient(self.values[name])))
        self.result = STRUCTURES[recipe.structure].format(all=", ".join(chosen), first=chosen[0])
        if len(chosen) > 1 and recipe.structure == 0:
            self.result = f"({self.result})"

    def program(self) -> Program:
        return Program(tuple(self.init), tuple(self.body), self.result, self.inputs)

    def _start(self) -> None:
        """Run what is written so far from the start."""
        torch.manual_seed(0)
        self.live = nn.Module()
        self.values: dict[str, Any] = {**NAMES, "self": self.live}
        for number, text in enumerate(self.inputs):
            self.values[f"x{number}"] = eval(text, dict(NAMES))
        for line in (*self.init, *self.body):
            exec(line, self.values)

    def _add(self, init: list[str], line: str) -> bool:
        """Add a statement unless PyTorch refuses it, or the backward of what there is then."""
        self.init += init
        self.body.append(line)
        try:
            for text in (*init, line):
                exec(text, self.values)
            if init or "_(" in line or "= " in line or "inplace" in line:
                self._backward()
            self._check()
        except (RuntimeError, ValueError, IndexError, TypeError, UserWarning):
            del self.init[len(self.init) - len(init) :], self.body[-1]
            self._start()
            return False
        self.names += [name for name in re.findall(r"v\d+", line.partition(" = ")[0]) if self._is_new(name)]
        return True

    def _is_new(self, name: str) -> bool:
        return name not in self.names and isinstance(self.values.get(name), torch.Tensor)

    def _gets_gradient(self, value: torch.Tensor) -> bool:
        """Whether the value depends on the first parameter, or anything else to be trained."""
        if not value.requires_grad or value.grad_fn is None:
            return False
        sources = [parameter for parameter in self.live.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(value.sum(), sources, retain_graph=True, allow_unused=True)
        return any(gradient is not None for gradient in gradients)

    def _check(self) -> None:
        for value in self.values.values():
            if isinstance(value, torch.Tensor) and not 0 < value.numel() < 3000:
                raise ValueError("too large")

    def _backward(self) -> None:
        roots = [v.sum() for v in self.values.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        torch.autograd.backward(roots, retain_graph=True)

    def _follow(self, instruction: Instruction) -> None:
        rule = RULES[instruction.rule]
        known = [*(f"x{number}" for number in range(len(self.inputs))), *self.names]
        a = self._operand(known, instruction.a, rule.when)
        if a is None:
            return
        first = self.values[a]
        b = self._operand(known, instruction.b, lambda other: self._goes_with(rule, first, other))
        if b is None:
            return
        sizes = [*first.shape] or [1]
        new = {"n": f"v{len(self.names)}", "k": f"v{len(self.names) + 1}"}
        values = {"a": a, "b": b, **new, "N": sizes[0], "C": sizes[1 % len(sizes)], "D": sizes[-1]}
        init, member = self._member(rule, values, instruction.reuses)
        line = rule.statement.format(**values, m=member)
        if instruction.without_grad and not rule.writes:
            line = f"with torch.no_grad(): {line}"
        self._add(init, line)

    def _operand(self, known: list[str], back: int, fits: When) -> str | None:
        """The value that is meant, or the next older one that fits."""
        start = back % len(known)
        order = known[::-1][start:] + known[::-1][:start]
        return next((name for name in order if fits(self.values[name])), None)

    @staticmethod
    def _goes_with(rule: Rule, a: torch.Tensor, b: torch.Tensor) -> bool:
        if "{b}" not in rule.text:
            return True
        return floating(b) and (rule.other == "any" or (a.shape == b.shape and a.dtype == b.dtype))

    def _member(self, rule: Rule, values: dict[str, Any], reuses: bool) -> tuple[list[str], str]:
        """The statement that makes the member, if there is none such already, and its name."""
        if not rule.init:
            return [], ""
        text = rule.init.format(**values, m="").partition(" = ")[2]
        for line in self.init if reuses else ():
            name, _, made = line.partition(" = ")
            if made == text:
                return [], name
        self.members += 1
        member = f"self.m{self.members}"
        return [f"{member} = {text}"], member


def write(recipe: Recipe) -> Program:
    """The program of a recipe."""
    return Writer(recipe).program()


_rarely = st.integers(0, 15).map(lambda number: number == 15)

instructions = st.builds(
    Instruction,
    rule=st.integers(0, len(RULES) - 1),
    a=st.one_of(st.just(0), st.integers(0, 9)),
    b=st.integers(0, 9),
    reuses=st.booleans(),
    without_grad=_rarely,
)

recipes = st.builds(
    Recipe,
    inputs=st.lists(st.integers(0, len(INPUTS) - 1), min_size=1, max_size=3).map(tuple),
    instructions=st.lists(instructions, min_size=1, max_size=24).map(tuple),
    outputs=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    structure=st.integers(0, len(STRUCTURES) - 1),
    needs_grad=st.booleans(),
)

programs = recipes.map(write)
"""Random programs."""
