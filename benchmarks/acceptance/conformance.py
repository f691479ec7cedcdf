"""Parts `conformance` and `conformance-more`: the lever and trial tests with CUDA in place of the CPU.

It needs pytest with pytest-xdist and pytest-timeout beside the wheels.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from functools import partial

from benchmarks.acceptance.place import ROOT, Failed, Late, Part, Place, Step
from benchmarks.store import Row

LEVERS = "tests/levers/test_conformance.py"
# (file, which of its tests), seconds that they may need; a report is written at the end only, so none is long.
FILES = {
    (LEVERS, "reference and llama and not compile"): 150,
    ("tests/child/test_timing.py", ""): 60,
}
MORE = {
    ("tests/levers/test_projections.py", ""): 60,
    ("tests/child/test_quantised.py", ""): 60,
    ("tests/levers/test_offloading.py", ""): 60,
    ("tests/levers/test_graphs.py", ""): 90,
    ("tests/levers/test_as_on_cuda.py", "gradients"): 60,
}
PROCESSES = "4"


def tested(place: Place, file: str, which: str) -> Row:
    """Counts, and the names of what failed, with the last line of each reason."""
    report = place.home / "conformance.xml"
    report.unlink(missing_ok=True)
    # The pins differ on a GPU machine, so its libraries may warn of what ours do not.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += place.pick(["-n", PROCESSES, "-k", which], ["-k", "adamw-fused and full", "-p", "no:xdist"])
    try:
        place.python("-m", "pytest", *options, str(ROOT / file), environment={"DYNOTUNE_TEST_DEVICE": place.device})
    except Late:
        raise  # its report leaves out what had not run
    except Failed as error:
        if not report.exists():
            raise
        said = str(error).splitlines()[-1]
    else:
        said = ""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {
        case.get("name", "?"): (problem.get("message") or "").strip().splitlines()[0:1]
        for case in cases
        for problem in (*case.iter("failure"), *case.iter("error"))
    }
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    if not cases:
        raise Failed(f"no test ran: {said}")
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def show(_: Place, rows: dict[str, Row]) -> list[str]:
    """A line a file, and one a failure."""
    lines = []
    for key, row in rows.items():
        if "passed" in row:
            counts = f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
            lines.append(f"{key.partition('/')[2]}: {counts}")
            lines += [f"  FAILED {name}: {' '.join(reason)[:100]}" for name, reason in row["failed"].items()]
    return lines


def part(name: str, files: dict[tuple[str, str], int]) -> Part:
    """A part with a step for each file, or a part of one; a dry run takes a test or two of the conformance suite."""

    def steps(place: Place) -> list[Step]:
        chosen = place.pick(files, dict([next(iter(FILES.items()))]))
        return [
            Step(f"{name}/{file} {which}".strip(), seconds, partial(tested, file=file, which=which))
            for (file, which), seconds in chosen.items()
        ]

    return Part(name, steps, show)


PART, MORE_PART = part("conformance", FILES), part("conformance-more", MORE)
