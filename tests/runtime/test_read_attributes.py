"""Plain attributes that a forward reads are looked at before each call; others are nobody's business."""

import copy
from types import SimpleNamespace

import pytest
import torch
from models import Doubled
from torch import nn

import ogc
from ogc.torch_state.reads import Observer, opaque_call


class Config:
    def __init__(self, gain=1.0, inner=None, bend=""):
        self.gain, self.inner, self.bend, self.steps = gain, inner, bend, 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm, self.batch, self.drop = nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.scale, self.settings, self.shift = 1.0, {"power": 2}, torch.zeros(16)
        self.step = 0
        self.config = SimpleNamespace(gain=1.0, inner=SimpleNamespace(bend="tanh"), steps=0)

    def forward(self, x):
        x = getattr(torch, self.config.inner.bend)(x) * self.config.gain
        for layer in self.layers:
            x = torch.relu(self.batch(self.norm(layer(x)))) ** self.settings["power"] * self.scale
        return self.drop(x) + self.shift


def set_power(net):
    net.settings = {"power": 3}


CHANGES = {
    "dropout": lambda net: setattr(net.drop, "p", 0.7),
    "momentum": lambda net: setattr(net.batch, "momentum", 0.5),
    "epsilon": lambda net: setattr(net.norm, "eps", 0.5),
    "own number": lambda net: setattr(net, "scale", 2.0),
    "own dict": set_power,
    "number in an object": lambda net: setattr(net.config, "gain", 2.0),
    "text in an object in an object": lambda net: setattr(net.config.inner, "bend", "sigmoid"),
    "own tensor": lambda net: setattr(net, "shift", torch.ones(16)),
}


def step(run, net, x):
    before = copy.deepcopy(net.state_dict())
    net.zero_grad()
    torch.manual_seed(3)
    output = run(x)
    output.square().mean().backward()
    found = [output.detach(), *(p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]
    net.load_state_dict(before)
    return found


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_planned_for(change, opened):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    before = step(optimised, net, x)
    CHANGES[change](net)
    expected = step(net, net, x)
    opened.clear()
    assert all(map(torch.equal, step(optimised, net, x), expected))
    assert opened  # by a plan all the same
    assert not all(map(torch.equal, before, expected))


class Around(Net):
    """Calls a custom function, which is an opaque module by itself; all around it is replayed."""

    def forward(self, x):
        return Doubled.apply(super().forward(x)) * getattr(self, "late", 1.0)


@pytest.mark.parametrize("name, value", [("scale", 2.0), ("late", 3.0)])
def test_a_module_around_a_custom_function_is_looked_at(name, value, opened):
    torch.manual_seed(0)
    net, x = Around(), torch.randn(64, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    assert not optimised.plan.is_plain
    setattr(net, name, value)  # of which one was not there
    assert all(map(torch.equal, step(optimised, net, x), step(net, net, x)))


@pytest.mark.full
def test_what_is_not_read_may_change(caplog):
    net, x = Net(), torch.randn(64, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    optimised(x).sum().backward()
    for number in range(30):
        net.step, net.drop.note, net.config.steps = number, torch.ones(2), number
        optimised(x).sum().backward()
    net.scale = 1.0  # the same again
    optimised(x)
    assert not caplog.records


def test_a_copy_has_attributes_of_its_own():
    net, x = Net(), torch.randn(64, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    twin = copy.deepcopy(optimised)
    twin.scale = 3.0
    plain = copy.deepcopy(net)
    plain.scale = 3.0
    assert all(map(torch.equal, step(twin, twin, x), step(plain, plain, x)))
    assert all(map(torch.equal, step(optimised, net, x), step(net, net, x)))
    shallow = copy.copy(optimised)
    assert all(map(torch.equal, step(shallow, net, x), step(net, net, x))) and shallow.plan is optimised.plan


def watched(net, opaque=None):
    """What is read by a forward of a net, one of whose modules may be an opaque module."""
    observer = Observer(net)
    run = net.forward
    if opaque is not None:
        inner = net.get_submodule(opaque)
        own = inner.forward

        def forward(x):
            with opaque_call(opaque):
                return own(x)

        inner.forward = forward
    observer.around(run)(torch.randn(64, 16))
    reads = observer.reads()
    assert reads.first_changed(net) is None
    return reads


@pytest.mark.full
def test_attributes_inside_opaque_modules_are_theirs():
    net = Net()
    known = watched(net, "drop")
    net.drop.p = 0.9
    assert known.first_changed(net) is None
    net.norm.eps = 0.1
    assert known.first_changed(net) == "the attribute norm.eps"
    net.norm.eps = 1e-5
    assert known.first_changed(net) is None
    del net.scale
    assert known.first_changed(net) == "the attribute scale"


def test_objects_are_looked_into_for_what_is_read():
    net = Net()
    net.config = Config(net.config.gain, Config(bend="tanh"))
    net.config.around = net.config  # a circle
    known = watched(net)
    net.config.steps = 1
    assert known.first_changed(net) is None
    net.config.inner.bend = "relu"
    assert known.first_changed(net) == "the attribute config.inner.bend"
    net.config.inner.bend = "tanh"
    assert known.first_changed(net) is None
    net.config.inner = Config(bend="tanh")  # another one, that is alike
    assert known.first_changed(net) is None
    net.config.inner.bend = "relu"
    assert known.first_changed(net) == "the attribute config.inner.bend"


def test_hooks_of_all_modules_and_cached_parametrizations_run_the_plain_model():
    net, x = Net(), torch.randn(64, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, output: output * 1.5)
    try:
        assert all(map(torch.equal, step(optimised, net, x), step(net, net, x)))
    finally:
        hook.remove()
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.Tanh(), nn.Linear(32, 16))
    optimised = ogc.optimize(net, x, memory_budget="least")
    found = []
    for run in (net, optimised):
        with nn.utils.parametrize.cached():
            found.append(step(lambda x, run=run: run(x) + run(2 * x), net, x))
    assert all(map(torch.equal, *found))


def test_a_symbolic_trace_is_of_the_plain_model():
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(4, 16)
    optimised = ogc.optimize(net, x, memory_budget="least")
    traced = torch.fx.symbolic_trace(optimised)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 3
    assert torch.equal(traced(x), net(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning", "ignore:.torch.jit.script:FutureWarning")
def test_a_script_is_of_the_plain_model():
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(4, 16)
    assert torch.equal(torch.jit.script(ogc.optimize(net, x, memory_budget="least"))(x), net(x))
