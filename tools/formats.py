"""Compare every format and family that is read with another code's numbers: `python -m tools.formats`.

Writes `fixtures/measurements/formats.json` and the README's list of families. `--check` computes the rows anew, holds
them against the record, and exits 1 where they differ. The tests do the same, row by row.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddtree.engine import Engine
from ddtree.gguf import BLOCK_TYPES, decode_blocks
from ddtree.kdtr import load
from ddtree.measure import write_measurement
from ddtree.models import Model, prefill
from ddtree.quant import PackedInts
from tests.llamacpp import convert
from tools.lossless import Blurred, endless

ROOT = Path(__file__).parent.parent
FIXTURES, RECORD = ROOT / "fixtures", ROOT / "fixtures" / "measurements" / "formats.json"
MODELS = FIXTURES / "models"
MARKERS = "<!-- formats: written by tools/formats.py -->\n", "<!-- end of formats -->"
COMMAND = "python -m tools.formats"
ROUNDINGS = 32  # a logit ends a chain of some hundred float32 operations, in two orders by two codes
NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi K2",
}  # fmt: skip
FOLDERS = {
    "llama": ("llama", "llama_bias", "llama3_rope"), "mistral": ("mistral", "mistral_nemo"),
    "qwen2": ("qwen2", "qwen2_window"), "qwen3": ("qwen3", "qwen3_window"), "qwen3_moe": ("qwen3_moe", "qwen3_moe_all"),
    "deepseek_v3": ("deepseek_v3_grouped", "deepseek_v3_bias"), "kimi_k2": ("kimi_k2",),
}  # fmt: skip
QUANTISED = (
    ("fp8", "qwen3", "qwen3_fp8"), ("fp8", "deepseek_v3", "deepseek_v3_fp8"), ("pack-quantized", "llama", "llama_w4a16")
)  # fmt: skip
# family → models whose config a GGUF file can hold, and how the file differs from today's converter
FILES: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "llama": (("llama", "", {}), ("llama_bias", "", {}), ("llama3_rope", "divisors of RoPE", {})),
    "mistral": (("mistral_nemo", "", {}),),
    "qwen2": (("qwen2", "", {}),),
    "qwen3": (("qwen3", "", {}),),
    "qwen3_moe": (("qwen3_moe_all", "", {}), ("qwen3_moe_all", "gate and up in one", {"fuse": True})),
    "deepseek_v3": (("deepseek_v3_grouped", "", {}),),
    "kimi_k2": (("kimi_k2", "kv_b in two", {}), ("kimi_k2", "kv_b whole", {"split": False})),
}


class Row(NamedTuple):
    """One line of the table. measure: gives the largest difference, the largest value and the tokens compared."""

    format: str
    family: str
    model: str
    source: str
    measure: Callable[[], tuple[float, float, int]]


def against_transformers(path: Path, name: str) -> tuple[float, float, int]:
    """The model in `path` beside the recording of model `name`: logits of a text and of a tree, then the text that
    greedy decoding writes, plainly and with trees. Raises ValueError for another token."""
    model, record = Model.load(path), load(MODELS / name / "expected.kdtr")
    ids, cache = record["input_ids"], model.new_cache()
    whole = model.forward(ids, np.arange(len(ids)) - 1, model.new_cache()).logits
    prefill(model, ids, cache)
    tree = model.forward(record["tree_token_ids"], record["tree_parents"], cache).logits
    found, expected = np.concatenate([whole, tree]), np.concatenate([record["logits"], record["tree_logits"]])
    text, target = load(FIXTURES / "generated.kdtr")[name].tolist(), endless(model)
    drafter = Blurred(text, len(ids), model.config.vocab_size, seed=1)
    for result in (
        Engine(target).generate_autoregressive(ids, len(text)),
        Engine(target, drafter).generate(ids, len(text), 16),
    ):
        if result.tokens.tolist() != text:
            raise ValueError(f"{path}: wrote {result.tokens.tolist()}, transformers {text}")
    return float(np.abs(found - expected).max()), float(np.abs(expected).max()), len(text)


def folder_row(name: str) -> tuple[float, float, int]:
    """A model folder."""
    return against_transformers(MODELS / name, name)


def file_row(name: str, options: dict[str, Any]) -> tuple[float, float, int]:
    """A GGUF file of the same model."""
    with tempfile.TemporaryDirectory() as folder:
        return against_transformers(convert(MODELS / name, Path(folder, "model.gguf"), **options), name)


def blocks_row() -> tuple[float, float, int]:
    """Blocks of every quantised GGUF type."""
    record, largest, top = load(FIXTURES / "gguf_blocks.kdtr"), 0.0, 0.0
    kinds = {kind.name: kind for kind in BLOCK_TYPES.values()}
    for name in {key.partition(".")[0] for key in record}:
        values = record[f"{name}.values"].astype(np.float64)
        found = decode_blocks(record[f"{name}.blocks"].reshape(-1), kinds[name]).reshape(values.shape)
        same = (found == values) | (np.isnan(found) & np.isnan(values))
        largest = max(largest, float(np.where(same, 0, np.abs(found - values)).max()))
        top = max(top, float(np.nanmax(np.abs(values))))
    return largest, top, 0


def int4_row() -> tuple[float, float, int]:
    """A packed matrix."""
    record = load(FIXTURES / "quant.kdtr")
    expected = record["int4.dequantised"]
    scale = (record["int4.weight_scale"].astype(np.uint32) << 16).view(np.float32)
    found = PackedInts(record["int4.weight_packed"], scale, expected.shape).dequantise()
    return float(np.abs(found - expected).max()), float(np.abs(expected).max()), 0


def rows() -> Iterator[Row]:
    """Every row of the table."""
    for family, names in FOLDERS.items():
        for name in names:
            yield Row("safetensors", family, name, "transformers", lambda name=name: folder_row(f"{name}_nano"))
    for family, files in FILES.items():
        for name, how, options in files:
            model = f"{name}, {how}" if how else name
            measure = lambda name=name, options=options: file_row(f"{name}_nano", options)  # noqa: E731
            yield Row("GGUF", family, model, "transformers", measure)
    for form, family, name in QUANTISED:
        yield Row(form, family, name, "transformers", lambda name=name: folder_row(f"{name}_nano"))
    yield Row("GGUF, 12 quantised types", "any", "blocks of random bytes", "gguf", blocks_row)
    yield Row("INT4 pack-quantized", "any", "a matrix", "compressed-tensors", int4_row)


def measured(row: Row) -> dict[str, Any]:
    """A row with its figures. `roundings`: the difference in units of the last place of the largest value.

    Raises ValueError if it is beyond `ROUNDINGS`.
    """
    difference, largest, tokens = row.measure()
    roundings = round(difference / float(np.spacing(np.float32(largest))), 1)
    if roundings > ROUNDINGS:
        raise ValueError(f"{row.format} {row.model}: {difference} is {roundings} roundings of {largest}")
    figures = {"difference": float(f"{difference:.1e}"), "largest": round(largest, 2), "roundings": roundings}
    return {**{key: getattr(row, key) for key in Row._fields[:4]}, **figures, "tokens": tokens}


def agree(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a row is the recorded one: another machine's sums may round otherwise, but not four times as far."""
    same = all(new[key] == old[key] for key in (*Row._fields[:4], "tokens"))
    return same and (new["roundings"] == old["roundings"] or 0.25 < new["roundings"] / max(old["roundings"], 1e-9) < 4)


def readme_lines(table: list[dict[str, Any]]) -> str:
    """What is read, for the README."""

    def families(form: str) -> str:
        return ", ".join(
            NAMES[name] for name in NAMES if any(row["format"] == form and row["family"] == name for row in table)
        )

    worst = max(row["difference"] for row in table if row["tokens"])
    return (
        f"- safetensors: {families('safetensors')}\n"
        f"- GGUF: {families('GGUF')}\n"
        f"- logits of random models are at most {worst:.1e} from transformers', and the text is the same\n"
    )


def written(table: list[dict[str, Any]]) -> str:
    """The README with its lines about formats."""
    start, end = MARKERS
    text = (ROOT / "README.md").read_text("utf-8")
    return re.sub(
        f"{re.escape(start)}.*{re.escape(end)}", lambda _: start + readme_lines(table) + end, text, flags=re.S
    )


def check(table: list[dict[str, Any]]) -> int:
    """Hold rows that were just computed against the record, and the record against the README; the exit code."""
    recorded = json.loads(RECORD.read_text("utf-8"))["rows"]
    wrong = [(new, old) for new, old in zip(table, recorded, strict=False) if not agree(new, old)]
    for new, old in wrong:
        print(f"computed {new}\nrecorded {old}")
    stale = len(table) != len(recorded) or written(recorded) != (ROOT / "README.md").read_text("utf-8")
    if stale:
        print(f"the record or the README is not what is read; run: {COMMAND}")
    return 1 if wrong or stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking, table = parser.parse_args().check, [measured(row) for row in rows()]
    if checking:
        return check(table)
    sources = json.loads((MODELS / "qwen2_nano" / "config.json").read_text("utf-8"))["transformers_version"]
    versions = {"transformers": f"{sources}, older models 5.17", "gguf": importlib.metadata.version("gguf")}
    write_measurement(RECORD, COMMAND, {"sources": versions, "allowed_roundings": ROUNDINGS, "rows": table})
    (ROOT / "README.md").write_text(written(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
