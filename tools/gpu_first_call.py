"""What a user of `draft_tree` meets first: seconds from `python -c` to the first tree, with nothing but small wheels.

`python -m tools.gpu_first_call OUT --wheels FOLDER` makes a fresh environment in a temporary folder, installs the
wheels of FOLDER into it without an index (ddtree, numpy, platformdirs, cuda-core, cuda-bindings, cuda-pathfinder; no
compiler), and starts fresh processes there: without any cache, then with the machine code that an earlier process
kept. The driver's own cache is off. No process may have imported numba. With `--here` it starts them with this Python
and torch instead, and times calls outside a graph and replays of a graph too. Writes OUT, a JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ddtree.bench import VOCABULARY, write_measurement
from ddtree.measure import quartiles, time_graph

CALLS, REPEATS, PROCESSES = 200, 21, 5
OURS = ("PYTHON", "DDTREE", "CUDA_CACHE")
LINKED, KEPT = "linked in the first call", "kept from an earlier process"
FIRST = f"""
import json, os, sys, time
imported = time.time()
import numpy as np
import ddtree
from ddtree.cuda import current_device
ready = time.time()
device = current_device()
logits = device.array(4 * np.random.default_rng(0).standard_normal((1, 15, {VOCABULARY}), dtype=np.float32))
device.synchronize()
on_device = time.time()
draft = ddtree.draft_tree(logits, 64, lengths=1024)
device.synchronize()
done = time.time()
start = float(sys.argv[1])
heavy = ("numba", "numba_cuda", "llvmlite", "torch", "matplotlib", "tokenizers")
found = {{"device": device.name, "arch": device.arch, "nodes": len(draft.tree(0)),
    "to_first_tree_s": done - start, "python_s": imported - start, "import_s": ready - imported,
    "device_and_logits_s": on_device - ready, "first_call_s": done - on_device,
    "imported": [name for name in heavy if name in sys.modules]}}
print(json.dumps(found))
"""


def bare_environment() -> dict[str, str]:
    """The variables of this process without those that name other Pythons, our choices and the driver's cache."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def make_environment(folder: Path, wheels: Path) -> Path:
    """A fresh virtual environment that has these wheels and nothing else; returns its Python."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    files = [str(path) for path in sorted(wheels.glob("*.whl"))]
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([str(python), "-m", "pip", "install", *options, *files], check=True, env=bare_environment())
    return python


def run_first(python: Path, cache: str) -> dict[str, Any]:
    """The first tree of a new process that keeps machine code in a folder, or nowhere for "off"."""
    environment = {**bare_environment(), "DDTREE_CACHE": cache, "CUDA_CACHE_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [str(python), "-W", "error", "-c", FIRST, repr(time.time())]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=elsewhere)
    if run.returncode:
        raise SystemExit(f"the first tree failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if compiled := {"numba", "numba_cuda", "llvmlite"} & set(found["imported"]):
        raise SystemExit(f"the first tree imported {', '.join(sorted(compiled))}")
    return found


def measure_first(wheels: Path) -> list[dict[str, Any]]:
    """Rows of first trees in a fresh environment: without kept machine code, and with it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        python, cache = make_environment(Path(folder, "environment"), wheels), str(Path(folder, "kept"))
        listed = [str(python), "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]
        packages = subprocess.run(
            listed, capture_output=True, text=True, check=True, env=bare_environment()
        ).stdout.split()
        for kernels, place in ((LINKED, "off"), (KEPT, cache)):
            if place != "off":
                run_first(python, place)
            runs = [run_first(python, place) for _ in range(PROCESSES)]
            times = {name: quartiles([run[name] for run in runs]) for name in runs[0] if name.endswith("_s")}
            facts = {name: runs[0][name] for name in ("device", "arch", "nodes", "imported")}
            rows.append({"kernels": kernels, **facts, **times, "packages": packages})
    return rows


def measure_calls() -> dict[str, Any]:
    """With torch, in this process: the first call in seconds, then later ones, outside a graph and in one, in µs."""
    import ddtree
    from ddtree.cuda import current_device

    torch = import_module("torch")
    logits = 4 * torch.randn(15, VOCABULARY, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    ddtree.draft_tree(logits, 64, lengths=1024)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    device, out = current_device(), ddtree.empty_draft(logits.shape, 65)
    calls = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            ddtree.draft_tree(logits, 64, lengths=1024, out=out)
        calls.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    with device.graph() as graph:
        ddtree.draft_tree(logits, 64, lengths=1024, out=out, stream=graph)
    return {**found, "host_us_a_call": quartiles(calls), "graph_us": time_graph(graph, 1)}


def measure_here() -> list[dict[str, Any]]:
    """Rows of `measure_calls` in fresh processes of this Python: without kept machine code, and with it."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu_first_call", "--measure"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kernels, place in ((LINKED, "off"), ("", folder), (KEPT, folder)):
            environment = {**os.environ, "DDTREE_CACHE": place, "CUDA_CACHE_DISABLE": "1"}
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            if kernels:
                rows.append({"kernels": kernels, **json.loads(run.stdout.splitlines()[-1])})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="where the JSON goes")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, ddtree's among them")
    parser.add_argument("--here", action="store_true", help="also with this Python and torch")
    parser.add_argument("--measure", action="store_true", help="measure in this process and print it")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_calls()))
        return 0
    found = {"first_tree": measure_first(options.wheels)} if options.wheels else {}
    found |= {"rows": measure_here()} if options.here else {}
    print(json.dumps(found, indent=1), flush=True)
    if options.out:
        wheels, here = " --wheels WHEELS" if options.wheels else "", " --here" if options.here else ""
        write_measurement(options.out, f"python -m tools.gpu_first_call {options.out.name}{wheels}{here}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
