"""The wheels for a machine without network: which ones, and bitsandbytes cut down to one CUDA version."""

from __future__ import annotations

import csv
import io
import runpy
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

WHEELHOUSE = runpy.run_path(str(ROOT / ".ci" / "wheelhouse.py"))
RECORD = "bitsandbytes-1.dist-info/RECORD"


def wheel(folder: Path) -> Path:
    file = folder / "bitsandbytes-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("cuda124", "cuda130", "cpu", "rocm70"):
            archive.writestr(f"bitsandbytes/libbitsandbytes_{name}.so", name * 100)
        archive.writestr("bitsandbytes/__init__.py", "")
        archive.writestr(RECORD, "")
    return file


def test_one_cuda_library_and_the_cpus_are_kept(tmp_path: Path) -> None:
    file = wheel(tmp_path)
    WHEELHOUSE["trimmed"](file, "cuda130")
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        rows = list(csv.reader(io.StringIO(archive.read(RECORD).decode())))
    libraries = {name for name in names if name.endswith(".so")}
    assert libraries == {f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cuda130", "cpu")}
    assert {row[0] for row in rows} == names, "the record lists what is there"
    assert all(row[1].startswith("sha256=") for row in rows if row[0] != RECORD)


def test_a_cuda_version_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no library for cuda999; it has: cpu, cuda124, cuda130, rocm70"):
        WHEELHOUSE["trimmed"](wheel(tmp_path), "cuda999")


def test_what_torch_brings_is_not_carried() -> None:
    wanted = WHEELHOUSE["carried"]("3.12")
    assert {"cut-cross-entropy", "liger-kernel", "torchao"} <= wanted, "they are levers' kernels"
    assert {"optuna", "sqlalchemy", "alembic", "fastapi", "uvicorn", "bitsandbytes", "colorlog", "pydantic"} <= wanted
    assert not wanted & {"torch", "transformers", "peft", "accelerate", "numpy", "datasets", "sympy"}
