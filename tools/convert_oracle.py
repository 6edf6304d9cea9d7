"""Convert reference data to KDTR: `python -m tools.convert_oracle ORACLE_DIR [NAME ...]` writes `fixtures/NAME.kdtr`.

ORACLE_DIR holds NAME.npz (numbers) and NAME.json (what they are): the paper authors' PyTorch implementation and
Hugging Face transformers, run once and recorded. Nothing is computed here. `models/X` is the folder of a small random
model: its config and weights are copied, its expected values become `fixtures/models/X/expected.kdtr`.
Integers become int32 where they fit; visibility matrices become bits: `X.visibility` (n, n) bool is stored as
`X.visibility_bits` (n, ceil(n / 8)) uint8, where bit c % 8 of byte c // 8 of a row is column c.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.kdtr import Tensor, save

FIXTURES = Path(__file__).parent.parent / "fixtures"
AUTHORS = "the paper authors' PyTorch implementation of DDTree (arXiv 2604.12989), float32 on a CPU"
RUNS = (
    "whole runs for 4 prompts by {} and Hugging Face transformers 5.17: a trained byte-level {} and its DFlash drafter"
)
SOURCES = {
    "tree_vectors": f"31 trees and accept walks by {AUTHORS}",
    "e2e_qwen3": RUNS.format(AUTHORS, "Qwen3"),
    "e2e_deepseek_v3": RUNS.format(AUTHORS, "DeepSeek-V3"),
}
NANO = "a random model, its values for 90 tokens and a 24-node tree by Hugging Face transformers 5.17, float32 on a CPU"
MODELS = ("deepseek_v3_grouped", "kimi_k2", "llama", "llama3_rope", "qwen3")
SOURCES |= {f"models/{name}_nano": NANO for name in MODELS}
SOURCES["quant"] = "INT4 packed by compressed-tensors 0.20.1, and GGUF blocks, with their values by the gguf package"


def smaller(array: np.ndarray) -> np.ndarray:
    """The same integers as int32 if all of them fit; any other array as it is."""
    limits = np.iinfo(np.int32)
    if array.dtype.kind in "iu" and (array.size == 0 or limits.min <= array.min() <= array.max() <= limits.max):
        return array.astype(np.int32)
    return array


def convert(npz: Path) -> dict[str, np.ndarray]:
    """All arrays of one recording in their stored form, by name."""
    arrays = {}
    with np.load(npz) as recorded:
        for name in sorted(recorded.files):
            if name.endswith(".visibility"):
                arrays[f"{name}_bits"] = np.packbits(recorded[name], axis=1, bitorder="little")
            else:
                arrays[name] = smaller(recorded[name])
    return arrays


def describe(name: str, details: Any) -> dict[str, Any]:
    """Metadata: where the numbers come from, how they are stored, and the recording's own description."""
    key = "cases" if isinstance(details, list) else "run"
    storage = "int64 as int32 where it fits; visibility (n, n) bool as visibility_bits, columns as little-endian bits"
    return {"source": SOURCES[name], "storage": storage, key: details}


def write_quant(oracle: Path) -> Path:
    """Packed weights and their values, from two recordings without a description; bf16 scales as bf16."""
    arrays: dict[str, Any] = {}
    for prefix, recording in (("int4", "int4_pack_quantized"), ("gguf", "gguf_blocks")):
        with np.load(oracle / "models" / f"{recording}.npz") as recorded:
            arrays |= {f"{prefix}.{name.replace('dequantized', 'dequantised')}": recorded[name] for name in recorded}
    bits = arrays.pop("int4.weight_scale_bf16_bits").view(np.uint16)
    arrays["int4.weight_scale"] = Tensor("bf16", bits.shape, bits)
    save(FIXTURES / "quant.kdtr", arrays, {"source": SOURCES["quant"]})
    return FIXTURES / "quant.kdtr"


def write(oracle: Path, name: str) -> Path:
    """Convert one recording; returns the file written."""
    if name == "quant":
        return write_quant(oracle)
    if name.startswith("models/"):
        source, folder = oracle / name / "expected", FIXTURES / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(oracle / name / file, folder / file)
        target = folder / "expected.kdtr"
    else:
        source, target = oracle / name, FIXTURES / f"{name}.kdtr"
    details = json.loads(source.with_suffix(".json").read_text(encoding="utf-8"))
    save(target, convert(source.with_suffix(".npz")), describe(name, details))
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path, help="the folder with NAME.npz and NAME.json")
    parser.add_argument("names", nargs="*", help=f"which recordings, of: {', '.join(SOURCES)} (default: all)")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(SOURCES)):
        parser.error(f"unknown recording {', '.join(unknown)}; known: {', '.join(SOURCES)}")
    for name in options.names or SOURCES:
        target = write(options.oracle, name)
        print(f"{target.relative_to(FIXTURES)}: {target.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
