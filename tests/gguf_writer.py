"""Small GGUF files for tests, written from the format's description."""

import json
import math
import struct
from typing import NamedTuple

import numpy as np

from ddtree.checkpoint import catalogue, gguf_name, read_tensors


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, value):
    """One key with a value that is already in bytes."""
    return text(key) + struct.pack("<I", kind) + value


def entry(name, sizes, kind, start):
    """One row of the tensor table; sizes innermost first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, start)


def gguf_bytes(pairs, table, data, magic=b"GGUF", version=3, counts=None):
    tensors, keys = counts or (len(table), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(table)
    return head + bytes(-len(head) % 32) + data


def encode(value):
    """The type number and bytes of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    inner = [encode(item) for item in value]
    return 9, struct.pack("<IQ", inner[0][0] if inner else 8, len(inner)) + b"".join(item for _, item in inner)


class Blocks(NamedTuple):
    """A tensor that is in blocks already. number: its type's."""

    number: int
    shape: tuple[int, ...]
    data: bytes


def write_gguf(path, metadata, tensors):
    """metadata: key → value. tensors: name → `Blocks`, or a float32 array, stored as F32."""
    data, table = b"", []
    for name, value in tensors.items():
        if not isinstance(value, Blocks):
            value = Blocks(0, value.shape, np.ascontiguousarray(value, dtype="<f4").tobytes())
        table.append(entry(name, value.shape[::-1], value.number, len(data)))
        data += value.data
        data += bytes(-len(data) % 32)
    pairs = [pair(key, *encode(value)) for key, value in metadata.items()]
    path.write_bytes(gguf_bytes(pairs, table, data))


def write_parts(path, tensors, count, changes=(), metadata=()):
    """A split model: the parts of x.gguf are x-00001-of-00003.gguf and so on; returns their paths. changes: part → what
    its split keys say instead (None: nothing)."""
    paths = []
    for i, share in enumerate(np.array_split(np.array(list(tensors)), count)):
        facts = {"split.no": i, "split.count": count, "split.tensors.count": len(tensors)} | dict(changes).get(i, {})
        facts = {key: value for key, value in facts.items() if value is not None} | dict(metadata if i == 0 else ())
        paths.append(path.with_name(f"{path.stem}-{i + 1:05d}-of-{count:05d}.gguf"))
        write_gguf(paths[-1], facts, {name: tensors[name] for name in share})
    return paths


def permuted(rows, heads):
    """What llama.cpp's converter does to query and key rows."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted_divisors(theta, dim, factor, low, high, original):
    """`rope_freqs.weight` as llama.cpp's converter computes it from the recipe of Llama 3.1, by wavelength."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wavelength < original / high, 1, np.where(wavelength > original / low, factor, between))
    return divisors.astype(np.float32)


PARTS = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def llama_as_gguf(folder, path, metadata=(), more=(), parts=None):
    """Write the Llama of a Hugging Face folder as llama.cpp stores it, with more metadata and more tensors, split over
    so many parts; returns the paths."""
    config = json.loads((folder / "config.json").read_text())
    blocks = [f"blk.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in PARTS]
    names = {gguf_name(name): name for name in (*blocks, "token_embd.weight", "output_norm.weight", "output.weight")}
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for tensor, value in read_tensors(catalogue(folder)):
        heads = turned.get(tensor.name.split(".")[-2])
        tensors[names[tensor.name.removeprefix("model.")]] = permuted(value, heads) if heads else value
    facts = {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
    }
    if parts:
        return write_parts(path, tensors | dict(more), parts, metadata=facts | dict(metadata))
    write_gguf(path, facts | dict(metadata), tensors | dict(more))
    return [path]


# where a block of each type has its float16 numbers, in bytes from its start
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
