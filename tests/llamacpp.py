"""What llama.cpp's converter writes for a model folder, with names and a writer by the gguf package, for tests."""

import json

import gguf
import numpy as np

from ddtree.checkpoint import catalogue, read_tensors
from tests.gguf_writer import converted_divisors, permuted

# Hugging Face's model_type → the gguf package's name of the family, and whether the query and key rows are turned
FAMILIES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, True),
    "mistral": (gguf.MODEL_ARCH.LLAMA, True),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, False),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, False),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, False),
    "deepseek_v3": (gguf.MODEL_ARCH.DEEPSEEK2, False),
}


def stacked(tensors):
    """Experts of a layer as one tensor, under the name that the gguf package knows."""
    found, stacks = {}, {}
    for name, value in tensors.items():
        if ".mlp.experts." in name:
            before, _, rest = name.partition(".experts.")
            expert, _, part = rest.partition(".")
            stacks.setdefault(f"{before}.experts.{part}", {})[int(expert)] = value
        else:
            found[name] = value
    return found | {name: np.stack([of[i] for i in sorted(of)]) for name, of in stacks.items()}


def fused(tensors):
    """Gate and up of each expert as one tensor, as `--fuse-gate-up-exps` writes them; names are llama.cpp's."""
    found = dict(tensors)
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        both = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate(both, axis=1)
    return found


def halved(name, value, c):
    """kv_b_proj as attn_k_b, transposed, and attn_v_b. name: llama.cpp's of the whole."""
    key, rest = c["qk_nope_head_dim"], value.reshape(c["num_attention_heads"], -1, value.shape[1])
    return {
        name.replace("attn_kv_b", "attn_k_b"): rest[:, :key].swapaxes(1, 2),
        name.replace("attn_kv_b", "attn_v_b"): rest[:, key:],
    }


def converted(folder, c, split=True, fuse=False):
    """The tensors of a folder as the file has them. split: kv_b_proj in two; fuse: experts' gate and up in one."""
    arch, turned = FAMILIES[c["model_type"]]
    names, result = gguf.get_tensor_name_map(arch, c["num_hidden_layers"]), {}
    tensors = {tensor.name: np.asarray(value, np.float32) for tensor, value in read_tensors(catalogue(folder))}
    for name, value in stacked(tensors).items():
        if turned and ".self_attn.q_proj." in name:
            value = permuted(value, c["num_attention_heads"])
        if turned and ".self_attn.k_proj." in name:
            value = permuted(value, c["num_key_value_heads"])
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        result |= halved(theirs, value, c) if split and "attn_kv_b" in theirs else {theirs: value}
    rope = c["rope_parameters"]
    if rope["rope_type"] == "llama3":
        numbers = [rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor")]
        original = rope["original_max_position_embeddings"]
        result["rope_freqs.weight"] = converted_divisors(rope["rope_theta"], c["head_dim"], *numbers, original)
    return fused(result) if fuse else result


def add_sizes(writer, c):
    """The keys that every family has, as the converter writes them for a text model."""
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])
    rope = c["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(rope[key])


def add_heads(writer, c):
    """One size of head."""
    writer.add_head_count_kv(c["num_key_value_heads"])
    if c.get("head_dim"):
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if FAMILIES[c["model_type"]][1]:
        writer.add_rope_dimension_count(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def add_latent(writer, c, split):
    """DeepSeek's heads, as files had them before (split False) and since kv_b_proj is in two."""
    key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    rank, rope = c["kv_lora_rank"], c["rope_parameters"]
    writer.add_head_count_kv(1 if split else c["num_attention_heads"])
    writer.add_kv_lora_rank(rank)
    if c["q_lora_rank"] is not None:
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    writer.add_key_length(rank + c["qk_rope_head_dim"] if split else key)
    writer.add_value_length(rank if split else value)
    if split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if rope.get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_experts(writer, c):
    """How experts are chosen."""
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if c["model_type"] == "qwen3_moe":
        return writer.add_expert_count(c.get("num_local_experts") or c["num_experts"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    if c["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(c["n_group"])
    writer.add_expert_group_used_count(c["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def convert(folder, path, split=True, fuse=False, kinds=None, drop=(), more=()):
    """Write the model of a Hugging Face folder as llama.cpp's converter does. kinds: part of a name → quantised type.
    drop: keys left out. more: key → value, written as they are."""
    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[FAMILIES[c["model_type"]][0]])
    add_sizes(writer, c)
    add_latent(writer, c, split) if "kv_lora_rank" in c else add_heads(writer, c)
    if "num_experts_per_tok" in c:
        add_experts(writer, c)
    for key, value in dict(more).items():
        kind = next(k for k in (bool, int, float, str) if isinstance(value, k))
        getattr(writer, {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}[kind])(
            key, value
        )
    for key in drop:
        del writer.kv_data[0][key]
    for name, value in converted(folder, c, split, fuse).items():
        kind = next((kind for part, kind in dict(kinds or {}).items() if part in name), None)
        value = np.ascontiguousarray(value)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
