"""Time `draft_tree` with several texts of one kernel on a GPU: `python -m tools.gpu_texts KERNEL OUT NAME=FILE ...`.

KERNEL: its name, such as top_k_select_bfloat16. FILE: PTX for this GPU's architecture, of any version of the kernel
with the same parameters; its entry is renamed. 64 requests of bfloat16 logits, each text in turn, twice, so that a
drift of the card shows. Writes OUT, a JSON of the kernel's registers and of its time and the whole step's.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench import VOCABULARY, draw_logits, time_pipeline, write_measurement
from ddtree.cuda import GpuDevice
from tools.gpu import read_resources, with_texts

LOGITS = f"[64, 15, {VOCABULARY}] bfloat16"


def renamed(name: str, text: str) -> str:
    """The PTX with the entry of the kernel of this name."""
    entry = re.search(r"\.visible \.entry (\w+)\(", text)
    assert entry is not None, "the text has no entry"
    return re.sub(rf"\b{entry[1]}\b", f"ddtree_{name}", text)


def time_text(name: str, text: str, inputs: list[Any]) -> list[dict[str, Any]]:
    """Rows of the whole step and of the kernel with this text."""
    with with_texts({name: renamed(name, text)}):
        gpu = GpuDevice()
        found = time_pipeline(gpu, LOGITS, [gpu.array(logits) for logits in inputs], 64)
        registers = read_resources(gpu)[name]["registers"]
    return [{"registers": registers, **row} for row in found if row["step"] in ("draft_tree", name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="the kernel's name")
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE", help="a name for people, and the PTX")
    options = parser.parse_args()
    bits, rows = draw_logits((64, 15, VOCABULARY), "bfloat16"), []
    for repeat in (1, 2):
        for pair in options.texts:
            name, _, file = pair.rpartition("=")
            for row in time_text(
                options.kernel, Path(file).read_text(encoding="utf-8"), [bits, np.roll(bits, 1, axis=0)]
            ):
                rows.append({"text": name, "repeat": repeat, **row})
                print(name, row["registers"], row["step"], f"{row['us']['median']:.1f} µs", flush=True)
    command = f"python -m tools.gpu_texts {options.kernel} {options.out.name} " + " ".join(
        f"'{t}'" for t in options.texts
    )
    write_measurement(options.out, command, {"note": "the other kernels are compiled here", "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
