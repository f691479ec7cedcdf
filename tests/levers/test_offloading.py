"""Layers' inputs in host memory: what is learnt, on a machine whose copies take as long as they are allowed to."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.child import tiny
from training.errors import TrainingError
from training.levers import checkpointing
from training.levers import compile as compiling

LAYERS = 4
IDS = torch.arange(24).reshape(2, 12)
VERSIONS = ["2.11.0", torch.__version__]  # older versions of torch need reentrant checkpointing, which all still have
REENTRANT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # as training/levers/checkpointing.py has it

pytestmark = pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")


class Stream:
    """A stream of the machine: `told` is what the computation had been told when it last waited for that."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.told = machine, 0

    def wait_stream(self, other: Stream) -> None:
        assert self is self.machine.side and other is self.machine.computation
        self.told = self.machine.clock

    def record_event(self) -> int:
        return len(self.machine.copies)

    def wait_event(self, event: int) -> None:
        assert self is self.machine.computation
        self.machine.run_until(event)


class Machine(TorchDispatchMode):  # type: ignore[misc]
    """A device of two streams: what is computed runs at once, and a copy only when the computation waits for it.

    So a copy is always as late as it is allowed to be. Until then what it writes is NaN, and it fails where what it
    reads or writes is gone. Where it is allowed to be early is asserted when it is asked for: by then its stream must
    have waited for all that the computation did to either memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computation, self.side = Stream(self), Stream(self)
        self.current, self.clock, self.done = self.computation, 0, 0
        self.copies: list[Callable[[], None]] = []
        self.touched: dict[int, int] = {}  # address -> the clock when the computation last took or wrote the memory
        self.log: list[str] = []

    def is_available(self) -> bool:
        return False  # beside a GPU, checkpointing asks for which device it is where no tensor says so

    def current_stream(self, device: Any) -> Stream:
        return self.current

    def Stream(self, device: Any) -> Stream:  # noqa: N802 - torch's name
        return self.side

    @contextlib.contextmanager
    def stream(self, chosen: Any) -> Iterator[None]:
        self.current = chosen
        yield
        self.current = self.computation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is self.side:
            assert func is torch.ops.aten.copy_.default
            return self.enqueue(args[0], args[1])
        made = func(*args, **(kwargs or {}))
        self.clock += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.touched[tensor.untyped_storage().data_ptr()] = self.clock
        return made

    def enqueue(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        for one in (target, source):
            assert self.touched[one.untyped_storage().data_ptr()] <= self.side.told, "the copy may begin too early"
        given, place = weakref.ref(source), weakref.ref(target)
        storages = [StorageWeakRef(one.untyped_storage()) for one in (source, target)]
        late = len(self.copies) > self.done  # a source that is itself still to be written
        value = source.clone()

        def copy() -> None:
            assert not any(one.expired() for one in storages), "what is copied, or where to, is gone"
            read, written = given(), place()
            assert read is not None and written is not None
            assert late or torch.equal(read, value), "what is copied was changed before"
            written.copy_(read)

        target.fill_(float("nan"))
        self.copies.append(copy)
        return target

    def run_until(self, event: int) -> None:
        while self.done < event:
            self.copies[self.done]()
            self.done += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine as the device of all tensors."""
    made = Machine()
    monkeypatch.setattr(checkpointing, "in_host_memory", lambda tensor: False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a real GPU beside it would be asked for memory
    monkeypatch.setattr(checkpointing.Kept, "copy", logged(made, checkpointing.Kept.copy))
    return made


def logged(machine: Machine, copy: Any) -> Any:
    """`Kept.copy` that also notes the direction."""

    def noting(kept: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        machine.log.append("out" if target is kept.on_host else "in")
        copy(kept, target, source)

    return noting


def drawn() -> Any:
    """A Llama of four layers, seeded."""
    from transformers import AutoModelForCausalLM

    config = tiny.config("llama", vocabulary=128)
    config.num_hidden_layers, config.use_cache = LAYERS, False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def learnt(model: Any, steps: int = 2) -> dict[str, torch.Tensor]:
    """The summed gradients of some micro batches."""
    for number in range(steps):
        model(input_ids=IDS + number, labels=IDS).loss.backward()
    return tiny.gradients(model)


def offloaded() -> Any:
    model = drawn()
    checkpointing.checkpoint_offloaded(model)
    return model


def expected() -> dict[str, torch.Tensor]:
    model = drawn()
    checkpointing.checkpoint_layers(model)
    return learnt(model)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_is_waited_for_on_both_sides(monkeypatch: pytest.MonkeyPatch, machine: Machine, version: str) -> None:
    """Each copy begins after what it reads was computed, ends before what it wrote is used, and is kept meanwhile."""
    wanted = expected()
    monkeypatch.setattr(torch, "__version__", version)
    with machine:
        found = learnt(offloaded())
    assert machine.log.count("out") == 2 * LAYERS and machine.log.count("in") == 2 * (LAYERS - 1)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch, machine: Machine, version: str) -> None:
    model = offloaded()
    for number, layer in enumerate(checkpointing.checkpointed(model)):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: machine.log.append(f"layer {number}"))
    monkeypatch.setattr(torch, "__version__", version)
    with machine:
        loss = model(input_ids=IDS, labels=IDS).loss
        assert [one for one in machine.log if one != "out"] == [f"layer {number}" for number in range(LAYERS)]
        machine.log.clear()
        loss.backward()
    # The last layer's input has not left; the first's is the last that is fetched.
    assert machine.log == ["in", "layer 3", "in", "layer 2", "in", "layer 1", "layer 0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_inputs_leave_the_device_but_for_the_newest(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, version: str
) -> None:
    model, given = offloaded(), []
    for layer in checkpointing.checkpointed(model):
        layer.register_forward_pre_hook(lambda _, inputs: given.append(StorageWeakRef(inputs[0].untyped_storage())))
    monkeypatch.setattr(torch, "__version__", version)
    with machine:
        loss = model(input_ids=IDS, labels=IDS).loss
        assert [one.expired() for one in given] == [True] * (LAYERS - 1) + [False]
        loss.backward()
    assert all(one.expired() for one in given)


def without_waiting(kept: Any) -> None:
    kept.on_device = None


def too_early(kept: Any, target: torch.Tensor, source: torch.Tensor) -> None:
    streams = torch.get_device_module(kept.device)
    with streams.stream(kept.stream):
        target.copy_(source, non_blocking=True)
        kept.copied = kept.stream.record_event()


def let_go(offloading: Any, address: int, tensor: torch.Tensor, pack: Any = checkpointing.Offloading.pack) -> Any:
    made = pack(offloading, address, tensor)
    if not isinstance(made, torch.Tensor):
        made.on_device = None
    return made


@pytest.mark.parametrize(
    ("kind", "name", "fault", "seen"),
    [
        ("Kept", "leave", without_waiting, "other numbers"),
        ("Kept", "copy", too_early, "too early"),
        ("Offloading", "pack", let_go, "is gone"),
    ],
)
def test_the_machine_notices_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, kind: str, name: str, fault: Any, seen: str
) -> None:
    """The companion: without a wait, or with an input let go at once, the numbers or the machine say so."""
    wanted = expected()
    monkeypatch.setattr(getattr(checkpointing, kind), name, fault)
    with machine:
        try:
            found = learnt(offloaded())
            told = "other numbers" if any(not torch.equal(found[name], wanted[name]) for name in wanted) else "nothing"
        except AssertionError as error:
            told = str(error)
    assert seen in told


def test_a_graph_that_is_kept_is_gone_through_again(machine: Machine) -> None:
    model, plain = offloaded(), drawn()
    for one in (model, plain):
        with machine if one is model else contextlib.nullcontext():
            loss = one(input_ids=IDS, labels=IDS).loss
            loss.backward(retain_graph=True)
            loss.backward()
    assert tiny.furthest(tiny.gradients(model), tiny.gradients(plain)) < 1e-6


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # by torch 2.11, of what has none to have
def test_a_forward_pass_without_a_backward_pass_is_forgotten(machine: Machine) -> None:
    wanted = expected()
    model = offloaded()
    with machine:
        model(input_ids=IDS, labels=IDS)  # its loss is let go
        with torch.no_grad():
            model(input_ids=IDS, labels=IDS)
        found = learnt(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert machine.log.count("in") == 2 * (LAYERS - 1)


def test_a_mask_that_layers_share_stays(machine: Machine) -> None:
    """A positional argument beside the input is saved too; it is needed by every layer and copied by none."""
    offloading, mask = checkpointing.Offloading(), torch.ones(4, 4)
    weight = torch.ones(4, 4, requires_grad=True)
    with machine:
        rows = weight * 2
        for _ in range(LAYERS):
            rows = offloading.checkpoint(lambda rows, mask: torch.tanh(rows * mask), rows, mask)
        rows.sum().backward()
    assert machine.log == ["out"] * LAYERS + ["in"] * (LAYERS - 1)


@pytest.mark.skipif(REENTRANT, reason="torch refuses it itself where checkpointing is reentrant")
@pytest.mark.parametrize("changing", range(LAYERS))
def test_a_layer_that_changes_its_own_input_is_refused(machine: Machine, changing: int) -> None:
    """Its copy may be made before the change or after it: whether what is learnt is right would be luck."""
    offloading = checkpointing.Offloading()
    weight = torch.ones(4, 4, requires_grad=True)
    with machine, pytest.raises(TrainingError, match="changes its own input in place"):
        rows = weight * 2
        for number in range(LAYERS):
            if number == changing:
                rows = offloading.checkpoint(lambda rows: torch.tanh(rows.mul_(0.5)), rows)
            else:
                rows = offloading.checkpoint(torch.tanh, rows)
        rows.sum().backward()


@pytest.mark.parametrize("moved", [False, True])
def test_on_the_host_it_is_plain_checkpointing(monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    """To the bit, with torch's own streams of the CPU too, which do nothing."""
    if moved:
        monkeypatch.setattr(checkpointing, "in_host_memory", lambda tensor: False)
    found, wanted = learnt(offloaded()), expected()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.skipif(REENTRANT, reason="a reentrant forward pass is compiled without gradients, the other one with them")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_a_layer_is_compiled_whole_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 checkpoints inside of what is compiled: hooks there would leave every layer uncompiled."""
    monkeypatch.setattr(checkpointing, "in_host_memory", lambda tensor: False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = offloaded()
    model.enable_input_require_grads()
    compiling.compile_layers(model, backend="aot_eager")
    found, counted = learnt(model), torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 1 and not counted["graph_break"]
    assert tiny.furthest(found, expected()) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_it_learns_the_same_in_less_memory() -> None:
    """Many layers that take no longer than a copy, over several steps: a missing wait would change the sums."""
    layers = torch.nn.ModuleList([torch.nn.Linear(1024, 1024) for _ in range(48)]).cuda()
    offloading = checkpointing.Offloading()
    ways: list[Callable[..., Any]] = [
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        offloading.checkpoint,
    ]
    sums, peaks = [], []
    for way in ways:
        for _ in range(3):
            layers.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(1)
            rows = torch.randn(8192, 1024, device="cuda", requires_grad=True) * 1.0
            for layer in layers:
                rows = way(lambda rows, layer=layer: torch.tanh(layer(rows)), rows)
            rows.sum().backward()
            torch.cuda.synchronize()
        sums.append([one.grad.cpu() for one in layers.parameters()])
        peaks.append(torch.cuda.max_memory_allocated())
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))
    assert peaks[0] - peaks[1] > 36 * 8192 * 1024 * 4, "of 48 inputs, but for the newest and what a layer computes with"
