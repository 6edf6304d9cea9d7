"""Model folders and GGUF files with one thing wrong, or changed: what people's files look like after an accident.

`change_one(folder, seed)` builds a small model with all files that may stand beside it and changes one of them.
`outcome(case)` reads it as the command line does. The same seed gives the same case.
"""

import contextlib
import json
import random
import shutil
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from ddtree import checkpoint
from ddtree.chat import load_chat, load_tokenizer
from ddtree.checkpoint import CheckpointError, read_tensors
from ddtree.engine import check_engine
from ddtree.gguf import read_gguf
from gguf_writer import encode, entry, gguf_bytes, llama_as_gguf, pair
from random_models import FIXTURES, NANO, PAIRS

DEEP_LIST, DEEP_DICT = [], {}
for _ in range(400):
    DEEP_LIST, DEEP_DICT = [DEEP_LIST], {"a": DEEP_DICT}
VALUES = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2.5, -0.5, 1e300, float("nan"), float("inf"), 2**31, 2**63, 2**64, 10**30,
    10**400, "x", "", "3", "a\nb", "\x00", "\ud800", "x" * 100_000, [], [1], [-1], ["a"], [None], [[]], [1, "a"], {},
    {"a": 1}, {"content": 3}, DEEP_LIST, DEEP_DICT, list(range(3000)),
]  # fmt: skip
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}}
TEMPLATE = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
EXTRA = {
    "tokenizer_config.json": {
        "bos_token": "<|bos|>", "chat_template": TEMPLATE, "extra_special_tokens": ["<|a|>"],
        "added_tokens_decoder": {"256": {"content": "<|bos|>", "special": True, "normalized": False}},
    },
    "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}},
    "added_tokens.json": {"<|bos|>": 256},
    "generation_config.json": {"eos_token_id": [1]},
}  # fmt: skip
HOSTILE_TEMPLATES = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}", "{{ messages.x.y }}",
    "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{% set ns = namespace(a='x' * 9999) %}"
    "{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}", "\x00", "{{ 10 ** 10 ** 10 }}",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A changed model. reader: who reads what was changed; change: what, in words; target, draft: what is loaded."""

    reader: str
    change: str
    target: Path
    draft: Path | None


# ------------------------------------------------------------------ JSON documents


def places(part):
    """Every object in a JSON document with one of its keys, and every list with one of its indices."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        yield part, key
        if isinstance(value, dict | list) and len(value) < 300:
            yield from places(value)


def change_json(content, rng):
    """Change one value in place; returns what was done, in words."""
    choices = list(places(content))
    if not choices:
        return "nothing: it is empty"
    part, key = rng.choice(choices)
    action = rng.choice(["drop", "null", "rename", "nest", "type", "type", "size"])
    if isinstance(part, list):
        part[key] = rng.choice(VALUES)
        return f"[{key}] is another value"
    match action:
        case "drop":
            del part[key]
        case "null":
            part[key] = None
        case "rename":
            part[f"{key}x"] = part.pop(key)
        case "nest":
            value, name = part.pop(key), rng.choice(["text_config", "dflash_config", "rope_parameters"])
            content[name] = {**(content[name] if isinstance(content.get(name), dict) else {}), key: value}
        case "size" if isinstance(part[key], int | float) and not isinstance(part[key], bool):
            part[key] = rng.choice([0, -part[key], part[key] * 2, part[key] + 1, part[key] * 10**6, 10**9, 10**18])
        case _:
            part[key] = rng.choice(VALUES)
    return f"{key}: {action}"


def edit_json(file, rng):
    content = json.loads(file.read_text())
    words = [change_json(content, rng) for _ in range(rng.choice([1, 1, 2]))]
    file.write_text(json.dumps(content))
    return f"{file.name}, {'; '.join(words)}"


def edit_bytes(file, rng):
    """Cut a file, or write noise over a piece of its first 4096 bytes."""
    raw = bytearray(file.read_bytes())
    if rng.random() < 0.4:
        file.write_bytes(raw[: rng.randrange(len(raw) + 1)])
        return f"{file.name} is cut"
    for _ in range(rng.choice([1, 4, 32])):
        raw[rng.randrange(min(len(raw), 4096))] = rng.randrange(256)
    file.write_bytes(raw)
    return f"{file.name} has noise in it"


# ------------------------------------------------------------------ safetensors


TYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32,
    "I32": np.int32, "I64": np.int64, "U8": np.uint8, "I8": np.int8,
}  # fmt: skip


def load_file(file):
    """The tensors of a safetensors file; its own reader for numpy has no float8."""
    parts = sorted(dict(deserialize(file.read_bytes())).items())
    return {name: np.frombuffer(part["data"], TYPES[part["dtype"]]).reshape(part["shape"]) for name, part in parts}


def split(file, rng):
    """Replace a single safetensors file by two parts and their index. Returns the index."""
    tensors, folder = load_file(file), file.parent
    file.unlink()
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name, where in weight_map.items() if where == part}, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def edit_header(file, rng):
    """Change the header of a safetensors file: a name, a type, a shape, offsets, or its length."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if rng.random() < 0.1:
        file.write_bytes(struct.pack("<Q", rng.choice([0, 1, length + 1, 2**40, 2**63])) + raw[8:])
        return "the length of the header"
    words = change_json(header, rng)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return f"header, {words}"


def edit_tensors(file, rng):
    """Drop, rename, swap, cut, turn or retype one tensor; returns what was done, in words."""
    tensors = load_file(file)
    name, other = rng.sample(sorted(tensors), 2)
    value, action = tensors[name], rng.choice(["drop", "rename", "swap", "cut", "turn", "type", "extra", "empty"])
    match action:
        case "drop":
            del tensors[name]
        case "rename":
            tensors[f"{name}x"] = tensors.pop(name)
        case "swap":
            tensors[name], tensors[other] = tensors[other], value
        case "cut":
            tensors[name] = value[: len(value) // 2]
        case "turn":
            tensors[name] = np.ascontiguousarray(value.T)
        case "type":
            tensors[name] = value.astype(rng.choice([np.float16, np.float64, np.int32, np.int8, np.bool_]))
        case "extra":
            tensors[f"{name}.extra"] = value
        case "empty":
            tensors[name] = value[:0]
    save_file(tensors, file)
    return f"{name}: {action}"


# ------------------------------------------------------------------ GGUF


@cache
def gguf_parts():
    """Metadata and tensors of a small Llama with a tokenizer, as llama.cpp stores it."""
    tokens = sorted(ByteLevel.alphabet())[:199]
    facts = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 199, "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 198, "tokenizer.ggml.add_bos_token": True, "general.alignment": 32,
        "tokenizer.chat_template": TEMPLATE, "llama.rope.dimension_count": 16,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        llama_as_gguf(FIXTURES / "models" / "llama_nano", path, facts)
        gguf = read_gguf(path)
        gguf.metadata["llama.rope.dimension_count"] = 2 * (gguf.metadata["llama.embedding_length"] // gguf.metadata[
            "llama.attention.head_count"] // 2)  # fmt: skip
        return dict(gguf.metadata), {name: gguf.read(name) for name in gguf.tensors}


def encode_any(value):
    """The type number and bytes of a value that GGUF can hold; others as their text."""
    if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value < 2**32:
        return (11, struct.pack("<q", value)) if -(2**63) <= value < 0 else (10, struct.pack("<Q", value % 2**64))
    if isinstance(value, list) and (not value or len({type(item) for item in value}) == 1):
        with contextlib.suppress(TypeError, struct.error, UnicodeEncodeError):
            return encode(value)
    if isinstance(value, bool | int) or (isinstance(value, float) and abs(value) < 1e38):
        return encode(value)
    raw = (value if isinstance(value, str) else str(value)[:1000]).encode("utf-8", "replace")
    return 8, struct.pack("<Q", len(raw)) + raw


def edit_gguf(path, rng):
    """Write a GGUF file with one key or one row of its table changed; returns what was done, in words."""
    metadata, tensors = gguf_parts()
    metadata, data, table = dict(metadata), b"", []
    key = rng.choice(sorted(metadata))
    action = rng.choice(["drop", "rename", "type", "type", "size", "table", "table", "counts", "unknown"])
    match action:
        case "drop":
            del metadata[key]
        case "rename":
            metadata[f"{key}x"] = metadata.pop(key)
        case "unknown":
            metadata[f"llama.{rng.choice(['rope.scaling.type', 'expert_count', 'attention.causal'])}"] = rng.choice(
                VALUES
            )
        case "size" if isinstance(metadata[key], int):
            metadata[key] = rng.choice([0, 1, metadata[key] + 1, 10**6, 2**31, 2**32, 2**63])
        case "type" | "size":
            metadata[key] = rng.choice(VALUES)
    odd = rng.choice(sorted(tensors)) if action == "table" else None
    for name, value in tensors.items():
        sizes, kind, start = list(value.shape[::-1]), 0, len(data)
        if name == odd:
            change = rng.randrange(5)
            name = f"{name}x" if change == 0 else name
            sizes = [sizes[::-1], [*sizes, 2**40], [0], [2**33] * 4, sizes][rng.randrange(5)] if change == 1 else sizes
            kind = rng.choice([1, 2, 8, 12, 16, 30, 31, 99]) if change == 2 else kind
            start = rng.choice([1, 2**40, 2**63]) if change == 3 else start
            key = f"{odd} ({change})"
        table.append(entry(name, sizes, kind, start))
        data += value.tobytes() + bytes(-value.nbytes % 32)
    pairs = [pair(name, *encode_any(value)) for name, value in metadata.items()]
    counts = rng.choice([(0, len(pairs)), (2**60, len(pairs)), (len(table), 2**60), (len(table), 0)])
    path.write_bytes(gguf_bytes(pairs, table, data, counts=counts if action == "counts" else None))
    return f"{key}: {action}"


# ------------------------------------------------------------------ a case


def build(folder, rng, with_draft):
    """A pair, or a nano model alone, with all files that may stand in a folder. Returns its places by name."""
    source = FIXTURES / f"pycode_{rng.choice(PAIRS)}"
    alone = not with_draft and rng.random() < 0.6
    found = {"target": FIXTURES / "models" / rng.choice(NANO) if alone else source / "target"}
    found |= {} if alone else {"draft": source / "draft"}
    for name, place in found.items():
        (folder / name).mkdir(parents=True)
        shutil.copy(place / "config.json", folder / name)
        (folder / name / "model.safetensors").symlink_to((place / "model.safetensors").resolve())
    shutil.copy(source / "target" / "tokenizer.json", folder / "target")
    for name, content in EXTRA.items():
        (folder / "target" / name).write_text(json.dumps(content))
    return {name: folder / name for name in found}


def own_copy(folder):
    """The folder's weights as a file of its own, to be changed."""
    file = folder / "model.safetensors"
    place = file.resolve()
    file.unlink()
    shutil.copy(place, file)
    return file


def edit_config(file, rng):
    if rng.random() < 0.15:
        content = json.loads(file.read_text())
        content["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
        file.write_text(json.dumps(content))
    return edit_json(file, rng)


def edit_template(folder, rng):
    text = rng.choice(HOSTILE_TEMPLATES) if rng.random() < 0.5 else TEMPLATE[: rng.randrange(len(TEMPLATE))]
    (folder / "chat_template.jinja").write_text(text)
    return f"chat_template.jinja is {text[:60]!r}"


READERS = ("config", "drafter config", "tokenizer", "special tokens", "template", "index", "safetensors header",
           "safetensors tensors", "GGUF metadata and table", "bytes of any file")  # fmt: skip


def change_one(folder, seed):
    """A model in `folder` with one change, drawn by the seed; the reader is seed mod their number."""
    rng, reader = random.Random(seed), READERS[seed % len(READERS)]
    folder.mkdir(parents=True, exist_ok=True)
    if reader.startswith("GGUF"):
        return Case(reader, edit_gguf(folder / "x.gguf", rng), folder / "x.gguf", None)
    found = build(folder, rng, reader == "drafter config")
    target, draft = found["target"], found.get("draft")
    match reader:
        case "config":
            change = edit_config(target / rng.choice(["config.json"] * 4 + ["generation_config.json"]), rng)
        case "drafter config":
            change = edit_config(draft / "config.json", rng)
        case "tokenizer":
            change = edit_json(target / "tokenizer.json", rng)
        case "special tokens":
            change = edit_json(target / rng.choice([*sorted(EXTRA)[::2], "tokenizer_config.json"]), rng)
        case "template":
            change = edit_template(target, rng)
        case "index":
            change = edit_json(split(target / "model.safetensors", rng), rng)
        case "safetensors header":
            change = edit_header(own_copy(rng.choice(list(found.values()))), rng)
        case "safetensors tensors":
            change = edit_tensors(own_copy(rng.choice(list(found.values()))), rng)
        case _:
            own_copy(target)
            files = sorted(path for path in target.iterdir() if path.is_file())
            change = edit_bytes(rng.choice(files), rng)
    return Case(reader, change, target, draft)


# ------------------------------------------------------------------ what becomes of it


@dataclass(frozen=True)
class Outcome:
    """What became of a case. kind: "read" or "line"; text: the line; weights: whether a weight was read."""

    kind: str
    text: str
    weights: bool


def outcome(case):
    """Check a case as the command line does, then read its weights and decode two tokens. Any other error escapes."""
    reads = []

    def counted(stored):
        reads.append(len(stored))
        return read_tensors(stored)

    original, checkpoint.read_tensors = checkpoint.read_tensors, counted
    try:
        files = check_engine(case.target, case.draft)
        tokenizer = load_tokenizer(case.target)
        chat = load_chat(case.target)
        text = chat.render([{"role": "user", "content": "x"}]) if chat else "x"
        tokenizer.encode(text)
        engine = files.read()
        if files.target.config.max_position_embeddings >= 3 and files.target.config.vocab_size >= 3:
            engine.generate([1, 2], 1, 3 if engine.drafter else 0)
        return Outcome("read", "", bool(reads))
    except CheckpointError as error:
        return Outcome("line", str(error), bool(reads))
    except ValueError as error:
        if "its weights are damaged" not in str(
            error
        ):  # numbers that are no weights cannot be told without reading them
            raise
        return Outcome("read", str(error), True)
    finally:
        checkpoint.read_tensors = original
