"""What the fork server imports ahead of its children, and whether a child that is forked after it can still use CUDA.

CUDA does not work in a process that was forked after its parent had initialised CUDA. Whether an import initialises it
depends on what is installed: transformers imports torchao where that is there, and torchao asks for the GPU's compute
capability, which worker/child/answers.py answers without asking the GPU. Some other library may ask for something else.
So the first child that is forked does nothing but try whether torch can use the GPU
(https://docs.pytorch.org/docs/stable/notes/multiprocessing.html, "Poison fork in multiprocessing").
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

# Modules whose import does not initialise CUDA, as tests/runner/test_preload.py checks. Where there is a GPU, peft is
# left out, as it imports bitsandbytes, which opens CUDA's libraries. Most of the time to import is inductor's.
PRELOAD = (
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "accelerate",
    "torch._inductor.compile_fx",
    "numpy",
)
PRELOAD_CPU = (*PRELOAD, "peft")
SPOILT = 3  # the exit code of the child that looks, where CUDA cannot be used in it
_harmless: dict[tuple[str, ...], tuple[str, ...]] = {}  # what was to be imported -> what of it left CUDA alone


def set_preload(context: Any, always: tuple[str, ...], preload: tuple[str, ...]) -> None:
    """Have the fork server import `preload`, or as much of it as leaves CUDA alone, after what it `always` imports.

    If not all of it does, only torch's modules are imported, or none. A trial then takes a second or two longer to
    start, as it imports the rest by itself; the fork server's log says so. Where CUDA cannot be used even so, there is
    another reason, which the first trial will tell. `context` is multiprocessing's, for the start method `forkserver`.
    """
    from multiprocessing import forkserver

    if preload in _harmless:
        context.set_forkserver_preload([*always, *_harmless[preload]])
        return
    torchs = tuple(name for name in preload if name.partition(".")[0] == "torch")
    for modules in dict.fromkeys((preload, torchs, ())):
        context.set_forkserver_preload([*always, *modules])
        look = context.Process(target=_look, args=(modules,))
        with contextlib.suppress(EOFError, OSError):  # an import has ended the fork server
            look.start()
            look.join()
            if look.exitcode != SPOILT:
                _harmless[preload] = modules
                return
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _look(modules: tuple[str, ...]) -> None:
    """Exit with SPOILT where torch is imported and cannot use the GPU that it sees."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:
        named = f"importing {', '.join(modules)}" if modules else "importing nothing ahead"
        sys.stderr.write(f"after {named}, a child cannot use CUDA ({error}); trials import more of it themselves\n")
        sys.exit(SPOILT)
