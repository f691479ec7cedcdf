"""Collects the wheels that a GPU machine without network needs: `make wheelhouse PYTHON=3.12 [CUDA=cuda130]`.

Such a machine has torch, transformers, peft and accelerate with all that these need. What dynotune needs beyond them is
downloaded for its Python, and dynotune itself is built. With CUDA given, bitsandbytes keeps that one CUDA library and
the CPU's only, a tenth of its size.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PRESENT = ("torch", "transformers", "peft", "accelerate")
# Parquet files are read with it; a machine that has jsonl or csv does without its 50 MB.
LEFT_OUT = ("pyarrow",)
# Kernels that levers take where they are installed. They need torch, triton and transformers, which are there.
KERNELS = ("cut-cross-entropy", "liger-kernel", "torchao")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def needed(roots: list[str], python: str, extras: set[str] | None = None) -> set[str]:
    """Names of the distributions that these need, themselves included, as installed here, for a Python version."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    seen: set[tuple[str, str]] = set()
    waiting = [(str(canonicalize_name(root)), extra) for root in roots for extra in ("", *(extras or ()))]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        try:
            requirements = distribution(name).requires or ()
        except PackageNotFoundError:
            continue  # another platform's, such as CUDA's libraries on a machine without a GPU
        seen.add((name, extra))
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate(environment | {"extra": extra}):
                child = str(canonicalize_name(requirement.name))
                waiting += [(child, one) for one in ("", *requirement.extras)]
    return {name for name, _ in seen}


def present(python: str) -> set[str]:
    """What is there already: torch with all that it needs, the others with what they name themselves.

    No deeper: what their own needs need differs between versions, and small wheels too many do no harm.
    """
    found = needed(["torch"], python) | {*PRESENT, "huggingface-hub"}
    for name in (*PRESENT, "huggingface-hub"):
        requirements = map(Requirement, distribution(name).requires or ())
        found |= {str(canonicalize_name(one.name)) for one in requirements if one.marker is None}
    return found


def carried(python: str) -> set[str]:
    """The distributions whose wheels are collected: what the worker needs and is not there, and the kernels."""
    wanted = needed(["dynotune"], python, {"worker"}) - present(python) - {*LEFT_OUT, "dynotune"}
    return wanted | set(KERNELS)


def trimmed(wheel: Path, cuda: str) -> None:
    """Leave only the CPU's and one CUDA version's library in a wheel of bitsandbytes; ValueError when it has none."""
    kept: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if "libbitsandbytes_" in name]
        wanted = [name for name in libraries if name.endswith((f"_{cuda}.so", "_cpu.so"))]
        if not any(name.endswith(f"_{cuda}.so") for name in wanted):
            there = ", ".join(sorted(name.rpartition("libbitsandbytes_")[2].removesuffix(".so") for name in libraries))
            raise ValueError(f"bitsandbytes has no library for {cuda}; it has: {there}")
        for name in names:
            if name not in libraries or name in wanted:
                kept[name] = archive.read(name)
    record = next(name for name in kept if name.endswith(".dist-info/RECORD"))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, content in kept.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            writer.writerow((name, f"sha256={digest}", len(content)))
    writer.writerow((record, "", ""))
    kept[record] = lines.getvalue().encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in kept.items():
            archive.writestr(name, content)


def main() -> None:
    """Download, build, trim, and say how large it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--cuda", default="", help="keep this CUDA library of bitsandbytes only, such as cuda130")
    parser.add_argument("--out", type=Path, default=ROOT / "wheelhouse")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    download = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(options.out)]
    download += ["--python-version", options.python, "--constraint", str(ROOT / "constraints.txt")]
    for platform in PLATFORMS:
        download += ["--platform", platform]
    subprocess.run([*download, *sorted(carried(options.python))], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(options.out), str(ROOT)], check=True)
    if options.cuda:
        try:
            trimmed(next(options.out.glob("bitsandbytes-*.whl")), options.cuda)
        except ValueError as error:
            sys.exit(f"wheelhouse: {error}")
    wheels = sorted(options.out.glob("*.whl"), key=lambda one: -one.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:7.1f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:7.1f} MB  in {len(wheels)} wheels in {options.out}")


if __name__ == "__main__":
    main()
