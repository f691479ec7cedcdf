"""A throw-away Slurm of a single node, from the distribution's own programs: munged, slurmctld and slurmd.

It keeps its configuration, keys, state and sockets in a folder of its own and listens on free ports of the loopback
address, so that it disturbs no other Slurm of the machine. Its GPUs are made up: Slurm gives them out, as it does real
ones, and sets CUDA_VISIBLE_DEVICES.

Sources: https://slurm.schedmd.com/slurm.conf.html, https://github.com/dun/munge/wiki (munged's options).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.processes import until

DAEMONS = ("munged", "slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "sbatch", "squeue", "sinfo", "scancel", "scontrol")
FOLDERS = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
GPUS = ("/dev/zero", "/dev/full")  # Slurm wants a device file for each
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm that this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=FOLDERS) is None]


class Slurm:
    """A running Slurm. `environment` is what its commands need to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": FOLDERS, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """What a command of Slurm prints; CalledProcessError where it fails."""
        around = os.environ | self.environment
        return subprocess.run(command, env=around, capture_output=True, text=True, check=True).stdout

    def clear(self) -> None:
        """End all jobs, and wait until they have ended."""
        self.run("scancel", "--user", getpass.getuser())
        until(lambda: not self.states(), 60, "the end of all jobs of Slurm")

    def states(self) -> list[str]:
        """The states of the jobs and array tasks that have not left the queue yet."""
        return self.run("squeue", "--noheader", "--array", "--format=%T").split()


@contextlib.contextmanager
def running(kill_wait: int = 10) -> Iterator[Slurm]:
    """A Slurm of this machine as a single node with two GPUs; it is ended, with its jobs, at the end of the context."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path has 100 characters at most
    slurm = Slurm(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder, kill_wait)
        for command in _daemons(folder):
            log = (folder / f"{Path(command[0]).name}.out").open("ab")
            with log:
                around = os.environ | slurm.environment
                daemons.append(subprocess.Popen(command, cwd=folder, env=around, stdout=log, stderr=log))
            if "munged" in command[0]:
                until((folder / "munge.socket").exists, 20, "munged")
        until(lambda: _idle(slurm), 60, f"an idle node of Slurm; its logs: {_logs(folder)}")
        try:
            yield slurm
        finally:
            slurm.clear()
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, kill_wait: int) -> None:
    folder.chmod(0o755)  # munged refuses to keep its socket where users may not enter
    for name in ("controller", "node"):
        (folder / name).mkdir()
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    numbers = [port.getsockname()[1] for port in ports]
    for port in ports:
        port.close()
    text = CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        controller_port=numbers[0],
        node_port=numbers[1],
        user=getpass.getuser(),
        folder=folder,
        kill_wait=kill_wait,
        cpus=os.cpu_count(),
        gpus=len(GPUS),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in GPUS))
    # Without this, slurmd ends where the machine has no control groups.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)


def _daemons(folder: Path) -> list[list[str]]:
    """The commands of the daemons in the order in which they start, each in the foreground."""
    munged, slurmctld, slurmd = (shutil.which(name, path=FOLDERS) or name for name in DAEMONS)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
    return [[munged, "--foreground", "--force", *options], [slurmctld, "-D"], [slurmd, "-D"]]


def _idle(slurm: Slurm) -> bool:
    try:
        return slurm.run("sinfo", "--noheader", "--format=%T").strip() == "idle"
    except subprocess.CalledProcessError:
        return False


def _logs(folder: Path) -> str:
    return ", ".join(str(one) for one in sorted(folder.glob("*.log")))
