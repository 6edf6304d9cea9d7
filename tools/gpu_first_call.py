"""What a user of `draft_tree` meets on a GPU: the first call, every call, and a call inside a graph.

`python -m tools.gpu_first_call OUT` starts fresh processes, without kept kernels and with them, and times the first
`draft_tree` of one request of torch tensors, imports not included; then calls outside a graph, with `out=`, by the
host's clock; then a replay of a graph. Needs torch. Writes OUT, a JSON.
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

import ddtree
from ddtree.bench import VOCABULARY, write_measurement
from ddtree.cuda import current_device
from ddtree.measure import quartiles, time_graph

CALLS, REPEATS = 200, 21


def measure() -> dict[str, Any]:
    """Seconds of the first call of this process, then microseconds of later ones."""
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


def run_fresh(cache: str) -> dict[str, Any]:
    """`measure` in a new process that keeps kernels in a folder; nowhere for an empty name."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu_first_call", "--measure"]
    environment = {**os.environ, "DDTREE_CACHE": cache}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="where the JSON goes")
    parser.add_argument("--measure", action="store_true", help="measure in this process and print it")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"kernels": "compiled in the first call", **run_fresh("")}]
        run_fresh(folder)
        rows.append({"kernels": "kept from an earlier process", **run_fresh(folder)})
    for row in rows:
        print(row, flush=True)
    write_measurement(
        options.out, f"python -m tools.gpu_first_call {options.out.name}", {"compiled": "here", "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
