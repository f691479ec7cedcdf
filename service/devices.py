"""The facts of this machine's devices, read in another process: reading them imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from service.contract.hardware import HardwareFacts
from service.errors import Misconfigured

COMMAND = [sys.executable, "-W", "ignore", "-m", "worker.devices.facts"]
# torch looks for CUDA without making a context. Nothing is compiled there, and without dynamo bitsandbytes imports no
# compiler, which takes a second.
SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHDYNAMO_DISABLE": "1"}


def device_facts() -> list[HardwareFacts]:
    """The devices that trials may use, the best kind first; Misconfigured where they cannot be read.

    What is said of devices that are left out is printed on stderr.
    """
    done = subprocess.run(COMMAND, capture_output=True, text=True, env={**os.environ, **SETTINGS})
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Misconfigured(f"the devices could not be read ({last}); is dynotune's extra `worker` installed?")
    sys.stderr.writelines(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("dynotune worker:"))
    return [HardwareFacts.model_validate(one) for one in json.loads(done.stdout.splitlines()[-1])]
