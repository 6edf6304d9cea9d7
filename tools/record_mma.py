"""Keep a part of what an H200 answered to `mma.sync` as a fixture: `python -m tools.record_mma mma_h200.npz`.

The input has one set of four arrays for each kind of operands and numbers: A (n, 16, 16) and B (n, 16, 8) as bits in
uint16, C and D (n, 16, 8) in float32; a set of m16n8k8 uses the first 8 of k. It was recorded on 2026-12-01 on one
H200 (sm_90) by inline PTX. The first tiles of every set go into `fixtures/mma_h200.kdtr`. `--check` compares all
outputs of the input with `mma_ref` and writes nothing; exit status 1 if one differs.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np

from ddtree.kdtr import save
from ddtree.tensor_cores import mma_ref

FIXTURE = Path(__file__).parent.parent / "fixtures" / "mma_h200.kdtr"
TILES = 16


def read_sets(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """The sets by name: "bf16.k16.normal" → A, B, C, D, cut to their k."""
    with np.load(path) as arrays:
        names = sorted({name.rpartition(".")[0] for name in arrays.files})
        sets = {name: {part: arrays[f"{name}.{part}"] for part in "ABCD"} for name in names}
    sets = {"bf16.k16.wide" if name == "wide" else name: parts for name, parts in sets.items()}
    for name, parts in sets.items():
        k = int(name.split(".")[1][1:])
        parts["A"], parts["B"] = parts["A"][:, :, :k].copy(), parts["B"][:, :k].copy()
    return sets


def check(sets: dict[str, dict[str, np.ndarray]]) -> int:
    """Print how many outputs of each set differ from the rule; the sum."""
    wrong = total = 0
    for name, parts in sets.items():
        kind, k = name.split(".")[:2]
        ours = mma_ref(parts["A"], parts["B"], parts["C"], kind, step=int(k[1:]))
        differ = int((ours.view(np.uint32) != parts["D"].view(np.uint32)).sum())
        print(f"{name}: {differ} of {ours.size} differ")
        wrong, total = wrong + differ, total + ours.size
    print(f"all: {wrong} of {total} differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, help="mma_h200.npz")
    parser.add_argument("--check", action="store_true", help="compare everything with the rule instead of writing")
    arguments = parser.parse_args()
    sets = read_sets(arguments.recorded)
    if arguments.check:
        return 1 if check(sets) else 0
    kept = {f"{name}.{part}": array[:TILES] for name, parts in sets.items() for part, array in parts.items()}
    metadata = {
        "what": "mma.sync.aligned.m16n8k{8,16}.row.col.f32 with bf16 and f16 operands: D = A B + C, bits of a card",
        "card": "NVIDIA H200 (sm_90), recorded 2026-12-01",
        "sets": sorted(sets),
        "tiles": f"the first {TILES} of each set of {arguments.recorded.name}",
        "sha256": hashlib.sha256(arguments.recorded.read_bytes()).hexdigest(),
        "command": f"python -m tools.record_mma {arguments.recorded.name}, numpy {np.__version__}",
    }
    save(FIXTURE, kept, metadata)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes, {sum(len(kept[f'{name}.D']) for name in sets)} tiles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
