"""What the GPU tools share: recorded sections, PTX from elsewhere, a kernel's resources, compute-sanitizer, ncu.

`tools.gpu_check`, `tools.gpu_draft` and `tools.gpu_topk` measure and record; what they compare on the way,
`pytest tests/gpu` compares too.
"""

import csv
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from ddtree.bench import write_measurement
from ddtree.cuda import GpuDevice, Kernel

ROOT = Path(__file__).parent.parent
ERRORS = (
    AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError, subprocess.SubprocessError,
)  # fmt: skip


def run_sections(
    sections: dict[str, Callable[[], Any]], out: Path | None, command: str, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run sections in turn; what each finds, or "FAILED: ...", is printed and written to `out` before the next begins.

    facts: what is recorded beside them. `command` made the file. Returns facts and findings by their names.
    """
    results = dict(facts or {})
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            results[name] = section()
        except ERRORS as error:
            results[name] = f"FAILED: {type(error).__name__}: {error}"
        print(f"== {name} ({time.perf_counter() - start:.1f} s)\n{results[name]}", flush=True)
        if out:
            write_measurement(out, command, results)
    return results


def failures(results: Any) -> list[str]:
    """Every text in the results that begins with FAILED, with the names that lead to it."""
    if isinstance(results, dict):
        return [f"{key}: {line}" for key, value in results.items() for line in failures(value)]
    return [results] if isinstance(results, str) and results.startswith("FAILED") else []


def with_texts(texts: Mapping[str, str]) -> Any:
    """While it lasts, devices run this PTX for the kernels of these names; others have their own."""
    own = Kernel.ptx_to_run

    def ptx_to_run(kernel: Kernel, arch: str) -> str:
        return texts[kernel.name] if kernel.name in texts else own(kernel, arch)

    return mock.patch.object(Kernel, "ptx_to_run", ptx_to_run)


RESOURCES = {"registers": "NUM_REGS", "local_bytes": "LOCAL_SIZE_BYTES", "static_shared_bytes": "SHARED_SIZE_BYTES"}


def read_resources(gpu: GpuDevice) -> dict[str, dict[str, int]]:
    """What each kernel that the device has loaded takes, as the driver tells, by the kernel's name."""
    attributes = gpu._driver.CUfunction_attribute
    which = {name: getattr(attributes, f"CU_FUNC_ATTRIBUTE_{what}") for name, what in RESOURCES.items()}

    def read(loaded: Any, attribute: Any) -> int:
        return int(gpu._call("cuKernelGetAttribute", attribute, int(loaded.handle), gpu.ordinal))

    return {
        kernel.name: {name: read(loaded, attribute) for name, attribute in which.items()}
        for kernel, (loaded, _) in gpu._kernels.items()
    }


def start_sanitizer(tool: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -m` with these arguments, under one of compute-sanitizer's tools."""
    command = ["compute-sanitizer", "--tool", tool, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    command += [sys.executable, "-W", "ignore", "-m", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def is_clean(text: str) -> bool:
    """Whether compute-sanitizer's report has no error and no hazard; a report that is cut off is not clean."""
    return bool(re.search(r"ERROR SUMMARY: 0 errors|0 hazards displayed", text)) and "hazard detected" not in text


def count_with_ncu(metrics: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    """The GPU's counters of each kernel that `python -m` with these arguments launches; metrics: ncu's name → ours."""
    command = ["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-W", "ignore", "-m", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise AssertionError(f"ncu: {run.stdout[-500:]}{run.stderr[-500:]}")
    rows: dict[str, dict[str, Any]] = {}
    for entry in csv.DictReader(lines):
        launched = {"kernel": entry["Kernel Name"].removeprefix("ddtree_"), "grid": entry["Grid Size"]}
        row = rows.setdefault(entry["ID"], launched)
        row[metrics[entry["Metric Name"]]] = float(entry["Metric Value"].replace(",", ""))
    return list(rows.values())
