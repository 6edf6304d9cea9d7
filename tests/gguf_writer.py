"""Small GGUF files for tests, written from the format's description."""

import json
import struct

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


def write_gguf(path, metadata, tensors):
    """metadata: key → value. tensors: name → float32 array, stored as F32."""
    data, table = b"", []
    for name, value in tensors.items():
        table.append(entry(name, value.shape[::-1], 0, len(data)))
        data += np.ascontiguousarray(value, dtype="<f4").tobytes()
        data += bytes(-len(data) % 32)
    pairs = [pair(key, *encode(value)) for key, value in metadata.items()]
    path.write_bytes(gguf_bytes(pairs, table, data))


def permuted(rows, heads):
    """What llama.cpp's converter does to query and key rows."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


PARTS = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def llama_as_gguf(folder, path, metadata=()):
    """Write the Llama of a Hugging Face folder as llama.cpp stores it, with more metadata."""
    config = json.loads((folder / "config.json").read_text())
    blocks = [f"blk.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in PARTS]
    names = {gguf_name(name): name for name in (*blocks, "token_embd.weight", "output_norm.weight")}
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
    write_gguf(path, facts | dict(metadata), tensors)
