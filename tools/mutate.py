"""Read 2,000 models with one change each: `python -m tools.mutate` writes fixtures/measurements/mutations.json.

For each reader: how many were tried, read and decoded two tokens, refused in a clear line, and how many escaped with
another error. It also counts weights that were read before a refusal, and the peak memory.
"""

import argparse
import collections
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from mutations import READERS, change_one, outcome  # noqa: E402

from ddtree.bench import write_measurement  # noqa: E402

OUTPUT = ROOT / "fixtures" / "measurements" / "mutations.json"


def run(cases: int) -> dict[str, object]:
    """Counts for each reader over the seeds 0 to `cases` - 1, and the escapes, each with its seed."""
    counts = {reader: collections.Counter[str]() for reader in READERS}
    escapes, slowest = [], 0.0
    for seed in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            case, start = change_one(Path(folder), seed), time.perf_counter()
            counts[case.reader]["tried"] += 1
            try:
                result = outcome(case)
            except Exception as error:  # what escapes is what is counted here
                counts[case.reader]["escapes"] += 1
                escapes.append({"seed": seed, "change": case.change, "error": f"{type(error).__name__}: {error}"[:200]})
                continue
            slowest = max(slowest, time.perf_counter() - start)
            told = "told by its numbers" if result.text else "read"  # a logit that is no number is told as well
            counts[case.reader][told if result.kind == "read" else "clear line"] += 1
            counts[case.reader]["weights read in vain"] += result.kind == "line" and result.weights
    names = ("tried", "read", "clear line", "told by its numbers", "escapes", "weights read in vain")
    rows = [{"reader": reader, **{name: found[name] for name in names}} for reader, found in counts.items()]
    return {"cases": cases, "rows": rows, "escapes": escapes, "slowest_s": round(slowest, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    results = run(options.cases)
    results["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    write_measurement(options.output, f"python -m tools.mutate --cases {options.cases}", results)
    for row in results["rows"]:
        print(row)
    print(f"escapes: {results['escapes']}, slowest {results['slowest_s']} s, peak {results['peak_mib']} MiB")
    return 1 if results["escapes"] else 0


if __name__ == "__main__":
    sys.exit(main())
