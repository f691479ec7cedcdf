"""What the fork server imports leaves CUDA alone: after CUDA was touched, a forked child cannot use it.

The modules are imported in a fresh interpreter that takes itself for a machine with a GPU: torch says that it was built
for CUDA and that there is a device, so that what is only done then is done. Whatever would make a context, or ask the
CUDA runtime anything, is written down and refused. Two questions are allowed, since torch answers them through NVML
under PYTORCH_NVML_BASED_CUDA_CHECK: whether there is a device, and how many. Two more are answered by the worker, which
knows the compute capability.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.once import made_once
from worker.runner.main import environment
from worker.runner.preload import PRELOAD, PRELOAD_CPU

PRETENDED = textwrap.dedent("""
    import ctypes, importlib, json, os, sys, threading
    import torch

    touched, opened, failed = [], [], []

    def refuse(name):
        def call(*_, **__):
            touched.append(name)
            raise RuntimeError(f"{name} would initialise CUDA")
        return call

    real = ctypes.CDLL.__init__

    def load(self, name, *rest, **more):
        if name and any(part in str(name) for part in ("cuda", "nvidia", "cublas")):
            opened.append(str(name))
        real(self, name, *rest, **more)

    ctypes.CDLL.__init__ = load
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    for name in ("init", "_lazy_init", "current_device", "current_stream", "get_device_capability", "get_device_name",
                 "get_device_properties", "is_bf16_supported", "mem_get_info", "set_device", "synchronize"):
        setattr(torch.cuda, name, refuse(f"torch.cuda.{name}"))
    for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice", "_cuda_getDriverVersion",
                 "_cuda_getCurrentRawStream", "_cuda_getCurrentStream"):
        setattr(torch._C, name, refuse(f"torch._C.{name}"))

    from torch.utils import _triton
    from worker.child.answers import answer, ask_again
    answer((9, 0))
    def tell(*modules):
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                failed.append(f"{module}: {error}")
        threads = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
        print(json.dumps({"touched": touched, "opened": opened, "failed": failed, "threads": threads,
                          "modules": sorted(sys.modules), "initialised": torch.cuda.is_initialized()}), flush=True)

    preloaded, more = map(json.loads, sys.argv[1:])
    tell(*preloaded)
    for module in more:
        if (child := os.fork()) == 0:
            ask_again()
            if module == "tests.asking":  # where triton is installed, the answer is more than that it is missing
                _triton.has_triton_package = lambda: True
                answer((9, 0))
            tell(module)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
""")
UNASKED = ("peft", "bitsandbytes")
MORE = (*UNASKED, "tests.asking")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What importing PRELOAD did, by the name "", and what one of MORE then did, each in a process forked from it."""
    return made_once(tmp_path_factory, "imported", do_import)


def do_import() -> dict[str, dict[str, list[str]]]:
    """Import them."""
    done = subprocess.run(
        [sys.executable, "-c", PRETENDED, json.dumps(PRELOAD), json.dumps(MORE)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment() | os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(("", *MORE), lines, strict=True))


def test_what_is_preloaded_beside_a_gpu_leaves_cuda_alone(imported: dict[str, dict[str, list[str]]]) -> None:
    found = imported[""]
    assert not found["touched"] and not found["opened"] and not found["failed"] and not found["initialised"]
    assert not found["threads"], "a thread that holds a lock while another forks leaves it locked in the child"
    assert {"transformers.modeling_utils", "accelerate", "torch._inductor.compile_fx"} <= set(found["modules"])
    assert not {"peft", "bitsandbytes"} & set(found["modules"])


def test_what_torchao_asks_is_answered(imported: dict[str, dict[str, list[str]]]) -> None:
    found = imported["tests.asking"]
    assert not found["touched"] and not found["failed"] and "tests.asking" in found["modules"]


@pytest.mark.parametrize("module", UNASKED)
def test_what_is_not_would_initialise_it(imported: dict[str, dict[str, list[str]]], module: str) -> None:
    """bitsandbytes asks for the GPU's compute capability to choose its library, and peft imports bitsandbytes."""
    found = imported[module]
    assert not found["failed"]
    assert any("capability" in name for name in found["touched"]), found
    assert {module, "bitsandbytes"} <= set(found["modules"])


def test_without_a_gpu_the_rest_is_preloaded_too() -> None:
    assert set(PRELOAD_CPU) - set(PRELOAD) == {"peft"}
