"""Record the values of GGUF blocks: `python -m tools.record_gguf` writes `fixtures/gguf_blocks.kdtr`.

For every block type that ddtree decodes and the gguf package can: 24 blocks of random bytes and their values by
`gguf.dequantize`. Their float16 scales are of three kinds in turn: ordinary ones, any finite ones, and the extremes
(both zeros, the smallest and the largest numbers).
"""

import importlib.metadata
import sys
from pathlib import Path

import gguf
import numpy as np

from ddtree.kdtr import save

FIXTURE = Path(__file__).parent.parent / "fixtures" / "gguf_blocks.kdtr"
BLOCKS = 24
EXTREMES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x3C00]  # ±0, smallest ±, subnormal, ±65504, 1

# where each type has its float16 numbers, in bytes from the start of a block
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}


def draw_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """(BLOCKS, size) uint8, random but for the scales."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in HALVES[name]:
        ordinary = rng.normal(0, 0.02, BLOCKS).astype(np.float16).view(np.uint16)
        finite = rng.integers(0, 0x7C00, BLOCKS, dtype=np.uint16) | rng.integers(0, 2, BLOCKS, dtype=np.uint16) << 15
        extreme = rng.permutation(np.resize(np.array(EXTREMES, dtype=np.uint16), BLOCKS))
        chosen = np.choose(np.arange(BLOCKS) % 3, [ordinary, finite, extreme]).astype("<u2")
        blocks[:, at : at + 2] = chosen.view(np.uint8).reshape(-1, 2)
    return blocks


def main() -> int:
    rng = np.random.default_rng(22)
    arrays = {}
    for name in HALVES:
        arrays[f"{name}.blocks"] = blocks = draw_blocks(name, rng)
        arrays[f"{name}.values"] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    source = f"gguf.dequantize of the gguf package {importlib.metadata.version('gguf')}, on random blocks"
    save(FIXTURE, arrays, {"source": source})
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
