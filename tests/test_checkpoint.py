import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ddtree import checkpoint
from ddtree.chat import load_chat, load_tokenizer
from ddtree.check import assert_close, assert_equal
from ddtree.checkpoint import (
    CheckpointError,
    catalogue,
    gguf_config,
    gguf_name,
    load_config,
    load_weights,
    read_tensors,
    take,
)
from ddtree.config import model_shapes, read_config
from ddtree.gguf import Gguf
from ddtree.kdtr import load
from ddtree.layers import Llama3, Rope, rope_frequencies
from ddtree.models import Model
from ddtree.quant import PackedInt4, pack_weight
from gguf_writer import HALVES, PARTS, Blocks, converted_divisors, llama_as_gguf, permuted, write_gguf
from memory import numbers_from
from random_models import FIXTURES


@pytest.fixture
def folder(tmp_path):
    """A model folder with two small tensors."""
    save_file(
        {"model.a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)},
        tmp_path / "model.safetensors",
    )
    return tmp_path


SHAPES = {"a": (2, 3), "b": (4,)}


def test_weights_come_as_float32_without_their_prefix(folder):
    weights = load_weights(folder, SHAPES, "model.")
    assert_equal(weights["a"], np.arange(6, dtype=np.float32).reshape(2, 3), name="a")
    assert weights["b"].dtype == np.float32


def test_prefixes_are_removed_in_order_and_patterns_are_left_out_unread(tmp_path):
    tensors = {"language_model.model.a": np.ones((2, 3), np.float32), "language_model.b": np.ones(4, np.float32)}
    tensors |= {"vision_tower.x.weight": np.ones(2, np.int32), "language_model.model.layers.61.y": np.ones(2, np.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    skip = ("vision_tower.*", "layers.61.*")
    assert sorted(load_weights(tmp_path, SHAPES, ("language_model.", "model."), skip)) == ["a", "b"]
    with pytest.raises(CheckpointError, match=r"extra vision_tower\.x\.weight"):
        load_weights(tmp_path, SHAPES, ("language_model.", "model."), skip[1:])


def test_every_problem_of_a_folder_is_listed_at_once(folder):
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, {"a": (3, 2), "c": (1,)}, "model.")
    message = str(caught.value)
    for part in ("model.a has shape (2, 3), the config asks for (3, 2)", "extra b (4,)", "missing c (1,)"):
        assert part in message
    assert len(message.splitlines()) == 4


def test_integer_weights_are_refused(tmp_path):
    save_file({"a": np.ones((2, 3), np.int32), "b": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a is I32, allowed are F32, F16, BF16"):
        load_weights(tmp_path, SHAPES)


def test_a_name_with_and_without_prefix_is_refused(tmp_path):
    save_file(
        {"a": np.ones((2, 3), np.float32), "model.a": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"a occurs twice, as a and model\.a"):
        load_weights(tmp_path, {"a": (2, 3)}, "model.")


def save_shards(path, tensors, count):
    """Spread tensors over files, with an index."""
    names = {name: f"model-{i % count}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: value for name, value in tensors.items() if names[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_sharded_checkpoint_is_read_by_its_index(tmp_path):
    save_shards(tmp_path, {"a": np.ones((2, 3), np.float32), "b": np.full(4, 2, np.float32)}, 2)
    assert load_weights(tmp_path, SHAPES)["b"].tolist() == [2, 2, 2, 2]
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model-1\.safetensors"):
        load_weights(tmp_path, SHAPES)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../model.safetensors"}}']
)
def test_a_damaged_index_is_an_error(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        load_weights(folder, SHAPES, "model.")


def two_models(folder, old):
    """`model.safetensors` beside what is left of an older model: its index, its parts, or both."""
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, folder / "model.safetensors")
    part, other = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    if "parts" in old:
        save_file({"a": np.zeros((2, 3), np.float32)}, folder / part)
        save_file({"b": np.zeros(4, np.float32)}, folder / other)
    if "index" in old:
        index = {"weight_map": {"a": part, "b": "model.safetensors" if "mixed" in old else other}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("old", [("index", "parts"), ("index",), ("parts",), ("index", "parts", "mixed")])
def test_an_older_model_left_beside_the_weights_is_refused_not_chosen(tmp_path, old):
    two_models(tmp_path, old)
    with pytest.raises(CheckpointError, match=r"has model\.safetensors and .*these are two models") as caught:
        load_weights(tmp_path, SHAPES)
    assert "model-00001-of-00002.safetensors" in str(caught.value)


def test_an_index_that_lists_only_the_one_file_is_no_second_model(tmp_path):
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys("ab", "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(load_weights(tmp_path, SHAPES)) == ["a", "b"]


def test_parts_without_their_index_are_named(tmp_path):
    two_models(tmp_path, ("parts",))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"but model-00001-of-00002\.safetensors without model\."):
        load_weights(tmp_path, SHAPES)


def test_a_tensor_in_two_shards_is_an_error(tmp_path):
    for part in "12":
        save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / f"model-{part}.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "x": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor a is in another file too"):
        catalogue(tmp_path)


def test_a_file_cut_anywhere_is_an_error(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            catalogue(folder)


def test_a_wrong_folder_is_refused_before_a_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match="missing c"):
        load_weights(folder, {**SHAPES, "c": (1,)}, "model.")


def test_a_folder_without_its_files_names_them(tmp_path):
    for read, file in ((load_config, "config.json"), (catalogue, "model.safetensors")):
        with pytest.raises(CheckpointError, match=f"has no {file}"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ud800"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_json_object_is_an_error(tmp_path, file, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=rf"/{file} "):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"eos_token_id": null}', '{"eos_token_id": null, "do_sample": true}'])
def test_a_generation_config_without_end_tokens_leaves_those_of_the_config(tmp_path, text):
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text(text)
    assert load_config(tmp_path) == {"eos_token_id": 1}


def test_end_tokens_come_from_the_generation_config_where_there_is_one(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 1, "hidden_size": 4}')
    assert load_config(tmp_path) == {"eos_token_id": 1, "hidden_size": 4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    assert load_config(tmp_path) == {"eos_token_id": [1, 2], "hidden_size": 4}


# packed weights

GROUP_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
PACKED_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": GROUP_WEIGHTS, "input_activations": None}},
}


def parts_of(name, packed):
    values = {"packed": packed.packed, "scale": packed.scale, "shape": np.array(packed.shape, np.int64)}
    return {f"{name}_{part}": value for part, value in values.items()}


@pytest.fixture
def packed(tmp_path):
    """A matrix in three tensors, and a plain norm; returns what it was made from."""
    weight = pack_weight(np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PACKED_CONFIG}))
    save_shards(tmp_path, parts_of("model.up.weight", weight) | {"model.norm.weight": np.ones(3, np.float32)}, 3)
    return weight


PACKED_SHAPES = {"up.weight": (6, 64), "norm.weight": (3,)}


def test_a_packed_matrix_stays_packed_though_its_parts_are_in_three_files(tmp_path, packed):
    told = []
    weights = load_weights(tmp_path, PACKED_SHAPES, "model.", progress=told.append)
    assert isinstance(weights["up.weight"], PackedInt4) and sorted(told) == sorted(PACKED_SHAPES)
    assert_equal(weights["up.weight"].dequantise(), packed.dequantise(), name="up")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.up.weight_scale": None}, r"missing up\.weight_scale"),
        ({"model.up.weight_shape": None, "model.up.weight_packed": None}, r"missing up\.weight_packed"),
        (
            {"model.up.weight": np.ones((6, 64), np.float32)},
            r"occurs twice, as it is and as up\.weight_packed",
        ),
        ({"model.up.weight_zero_point": np.ones((6, 2), np.int32)}, r"extra model\.up\.weight_zero_point"),
        ({"model.up.weight_packed": np.ones((6, 16), np.int32)}, r"weight_packed has shape \(6, 16\)"),
        ({"model.up.weight_packed": np.ones((6, 8), np.int8)}, "weight_packed is I8, allowed are I32"),
        ({"model.up.weight_scale": np.ones((6, 1), np.float32)}, r"asks for \(6, 2\)"),
        ({"model.up.weight_shape": np.array([64, 6])}, r"up\.weight_shape holds \[64, 6\]"),
        (
            {"model.norm.weight": None, "model.norm.weight_packed": np.ones((3, 1), np.int32)},
            "extra model.norm.weight_pack",
        ),
    ],
)
def test_a_packed_matrix_that_is_not_whole_is_refused(tmp_path, packed, change, message):
    tensors = parts_of("model.up.weight", packed) | {"model.norm.weight": np.ones(3, np.float32)} | change
    save_shards(tmp_path, {name: value for name, value in tensors.items() if value is not None}, 1)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path, PACKED_SHAPES, "model.")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "fp8"},
            r"quantization_config\.format = 'pack-quantized' is not known",
        ),
        ({"format": "nvfp4-pack-quantized"}, r"format 'nvfp4-pack-quantized': .*CompressedTensorsDequantizer"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            {"config_groups": {"g": {"weights": GROUP_WEIGHTS | {"num_bits": 3}}}},
            r"groups\.g\.weights\.num_bits = 3 is not supported; allowed: 4, 8",
        ),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS | {"group_size": 0}}}}, "group_size is 0"),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS | {"symmetric": "no"}}}}, "symmetric is 'no'"),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS | {"actorder": "sideways"}}}}, "actorder = 'sideways'"),
        ({"config_groups": {"g": {"weights": None}}}, "weights is missing"),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS, "input_activations": {"a": 1}}}}, "input_activations"),
        ({"transform_config": {"R1": {"type": "hadamard"}}}, r"quantization_config\.transform_config = "),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS, "rotate": True}}}, r"groups\.g\.rotate = True"),
        ({"config_groups": {"g": {"weights": GROUP_WEIGHTS | {"zero_point": 8}}}}, r"weights\.zero_point = 8"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused_by_key(tmp_path, change, message, inside):
    found = {"quantization_config": PACKED_CONFIG | change}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": found} if inside else found))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("value", [3, "x", [1], True])
@pytest.mark.parametrize("key", ["text_config", "quantization_config", "config_groups", "g", "weights"])
def test_a_part_of_the_quantisation_that_is_no_object_is_refused_by_key(tmp_path, key, value):
    config = GROUP_WEIGHTS
    for name in ("weights", "g", "config_groups", "quantization_config", "text_config"):
        config = {**(PACKED_CONFIG if name == "config_groups" else {}), name: value if name == key else config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{key} is .*; it must be dict"):
        load_config(tmp_path)


def test_the_quantisation_that_can_be_read_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PACKED_CONFIG}))
    assert load_config(tmp_path)["quantization_config"] == PACKED_CONFIG


# GGUF files as checkpoints

LLAMA = {
    "general.architecture": "llama",
    "llama.embedding_length": 36,
    "llama.feed_forward_length": 48,
    "llama.block_count": 1,
    "llama.context_length": 512,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e4,
    "llama.rope.dimension_count": 12,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 2,
}
WEIGHTS = {
    "embed_tokens.weight": (3, 36),
    "layers.0.self_attn.q_proj.weight": (36, 36),
    "layers.0.self_attn.k_proj.weight": (12, 36),
    "layers.0.self_attn.k_proj.bias": (12,),
    "layers.0.mlp.down_proj.weight": (36, 48),
    "norm.weight": (36,),
}
NAMES = (
    "token_embd.weight",
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.attn_k.bias",
    "blk.0.ffn_down.weight",
)


def gguf_file(path, facts=LLAMA, extra=()):
    """Random weights in a GGUF file; returns them in Hugging Face's names and order."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in WEIGHTS.items()}
    stored = dict(zip((*NAMES, "output_norm.weight"), weights.values(), strict=True))
    if facts.get("general.architecture") == "llama":
        stored |= {name: permuted(value, 3) for name, value in stored.items() if "attn_q" in name}
        stored |= {name: permuted(value, 1) for name, value in stored.items() if "attn_k" in name}
    write_gguf(path, facts, stored | dict(extra))
    return weights


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf_weights_come_under_hugging_faces_names_and_in_its_order(tmp_path, family):
    facts = {key.replace("llama.", f"{family}."): value for key, value in LLAMA.items()}
    expected = gguf_file(tmp_path / "x.gguf", facts | {"general.architecture": family})
    weights = load_weights(tmp_path / "x.gguf", WEIGHTS)
    for name, value in expected.items():
        assert_equal(weights[name], value, name=name)


def test_a_gguf_file_that_does_not_fit_lists_its_problems(tmp_path):
    gguf_file(tmp_path / "x.gguf", extra={"rope_freqs.weight": np.ones(6, np.float32)})
    shapes = WEIGHTS | {"norm.weight": (35,), "layers.0.mlp.up_proj.weight": (48, 36)}
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path / "x.gguf", shapes)
    for part in ("extra rope_freqs.weight (6,)", "norm.weight has shape (36,)", "missing layers.0.mlp.up_proj.weight"):
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 4


def test_gguf_metadata_is_a_config(tmp_path):
    gguf_file(tmp_path / "x.gguf")
    config = load_config(tmp_path / "x.gguf")
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5, rel=1e-6)
    assert config == {
        "model_type": "llama",
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_theta": 1e4,
        "vocab_size": 3,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": [1, 2],
    }


def test_a_gguf_head_of_its_own_and_biases_are_seen(tmp_path):
    extra = {"output.weight": np.ones((3, 36), np.float32), "blk.0.attn_q.bias": np.ones(36, np.float32)}
    gguf_file(tmp_path / "x.gguf", extra=extra)
    config = load_config(tmp_path / "x.gguf")
    assert config["tie_word_embeddings"] is False and config["attention_bias"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, r"general\.architecture 'gemma3' is not supported"),
        ({"general.architecture": None}, r"general\.architecture None"),
        ({"llama.embedding_length": None}, r"llama\.embedding_length is None; it must be a positive integer"),
        ({"llama.attention.head_count": [3, 3]}, r"llama\.attention\.head_count is \[3, 3\]"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0"),
        ({"llama.block_count": 2**31}, r"llama\.block_count is 2147483648; it has only 6 tensors"),
        ({"llama.rope.dimension_count": 6}, r"llama\.rope\.dimension_count is not head_dim 12"),
        ({"llama.attention.value_length": 6}, r"llama\.attention\.value_length is not head_dim 12"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type = 'longrope' is not supported"),
        ({"llama.rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.type = 'none' is not supported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 1.2},
            r"rope\.scaling\.attn_factor = 1\.2",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            r"yarn_log_multiplier = 0",
        ),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8 is not supported"),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window = 64"),
    ],
)
def test_gguf_metadata_that_would_change_the_maths_is_refused_by_key(tmp_path, change, message):
    facts = {key: value for key, value in (LLAMA | change).items() if value is not None}
    gguf_file(tmp_path / "x.gguf", facts)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_gguf_keys_that_say_nothing_are_accepted(tmp_path):
    gguf_file(tmp_path / "x.gguf", LLAMA | {"llama.expert_count": 0, "llama.rope.scaling.type": "none"})
    assert load_config(tmp_path / "x.gguf")["hidden_size"] == 36


def test_a_missing_or_damaged_gguf_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_config(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="ends at byte 4"):
        load_weights(tmp_path / "x.gguf", {})


# whole models

NANO = FIXTURES / "models"
TOKENS = [3, 1, 4, 1, 5, 92, 65, 35]


def logits_of(path):
    model = Model.load(path)
    return model.forward(TOKENS, [-1, 0, 1, 1, 3, 0, 5, 2], model.new_cache()).logits, model


def kimi_checkpoint(path, change):
    """The nano Kimi as Kimi K2.5 is stored: wrapped, in three files, with a vision tower, its experts changed."""
    path.mkdir()
    config = json.loads((NANO / "kimi_k2_nano" / "config.json").read_text())
    quantised = {"quantization_config": PACKED_CONFIG | {"ignore": ["lm_head"]}}
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config | quantised}))
    tensors = {
        "vision_tower.patch.weight": np.ones((2, 3), np.float32),
        "mm_projector.a.weight": np.ones(2, np.float32),
    }
    for tensor, value in read_tensors(catalogue(NANO / "kimi_k2_nano")):
        name = f"language_model.{tensor.name}"
        tensors |= change(name, value) if ".mlp.experts." in name else {name: value}
    save_shards(path, tensors, 3)


def test_a_kimi_with_packed_experts_gives_the_logits_of_its_dequantised_twin(tmp_path):
    kimi_checkpoint(tmp_path / "packed", lambda name, value: parts_of(name, pack_weight(value)))
    kimi_checkpoint(tmp_path / "twin", lambda name, value: {name: pack_weight(value).dequantise()})
    logits, packed = logits_of(tmp_path / "packed")
    expected, twin = logits_of(tmp_path / "twin")
    kinds = {name: type(weight) for name, weight in packed.weights.items() if ".mlp.experts." in name}
    assert len(kinds) == 2 * 12 * 3 and set(kinds.values()) == {PackedInt4}
    assert not any(isinstance(weight, PackedInt4) for weight in twin.weights.values())
    assert_equal(logits, expected, name="logits")
    exact = logits_of(NANO / "kimi_k2_nano")[0]
    assert 0 < np.abs(logits - exact).max() < np.abs(exact).max()  # four bits are not float32, and not noise either


def test_a_llama_gives_the_same_logits_from_a_folder_and_from_gguf(tmp_path):
    llama_as_gguf(NANO / "llama_nano", tmp_path / "x.gguf")
    assert_equal(logits_of(tmp_path / "x.gguf")[0], logits_of(NANO / "llama_nano")[0], name="logits")


OF_TOKENIZER = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "token_type": [1, 1, 1],
    "merges": [],
    "bos_token_id": 0,
    "add_bos_token": True,
    "padding_token_id": 1,
}
WIDE_FACTS = {
    "general.architecture": "llama",
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 256,
    "llama.block_count": 1,
    "llama.context_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 99,
}
WIDE = read_config(gguf_config(Gguf(Path("wide.gguf"), WIDE_FACTS, dict.fromkeys(PARTS), memoryview(b""))))


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_a_split_gguf_is_the_same_model_from_any_of_its_parts(tmp_path, parts):
    expected = logits_of(NANO / "llama_nano")[0]
    paths = llama_as_gguf(NANO / "llama_nano", tmp_path / "x.gguf", parts=parts)
    for path in {paths[0], paths[-1]}:
        assert_equal(logits_of(path)[0], expected, name=f"logits from {path.name}")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_split_gguf_without_one_of_its_parts_is_one_line_that_names_it(tmp_path, lost):
    paths = llama_as_gguf(NANO / "llama_nano", tmp_path / "x.gguf", parts=3)
    paths[lost].unlink()
    with pytest.raises(CheckpointError, match=rf"one of 3 parts; beside it there is no {paths[lost].name}$") as caught:
        Model.load(paths[lost - 1])
    assert "\n" not in str(caught.value)


MUTATED = (None, 0, 3, 2**31, True, 1.5, math.nan, "x", "", [], [1, 2], ["a"])


@pytest.mark.parametrize("key", [*LLAMA, *(f"tokenizer.ggml.{key}" for key in OF_TOKENIZER), "tokenizer.chat_template"])
def test_a_gguf_key_of_another_kind_is_one_clear_error_or_harmless(tmp_path, key):
    # None: the key is gone. Whatever is read afterwards, nothing but a CheckpointError comes out
    facts = LLAMA | {f"tokenizer.ggml.{key}": value for key, value in OF_TOKENIZER.items()}
    facts |= {"tokenizer.chat_template": "{{ messages[0].content }}"}
    for value in MUTATED:
        mutated = {name: other for name, other in (facts | {key: value}).items() if other is not None}
        gguf_file(tmp_path / "x.gguf", mutated, {"rope_freqs.weight": np.ones(6, np.float32)})
        for read in (Model.load, load_tokenizer, load_chat):
            try:
                read(tmp_path / "x.gguf")
            except CheckpointError as error:
                assert "x.gguf" in str(error) or "config.json" in str(error)


LLAMA_3_RECIPES = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 64), (4.0, 2.0, 8.0, 500)]


def test_a_llama_3_gguf_gives_the_logits_that_transformers_gives_its_folder(tmp_path):
    # the recipe is in the folder's config, its divisors in the file; 1e-4 as for the folder itself
    record = load(NANO / "llama3_rope_nano" / "expected.kdtr")
    divisors = converted_divisors(500_000.0, 16, 8.0, 1.0, 4.0, 64)
    assert {1.0, 8.0} < set(divisors.tolist())  # fast pairs, slow ones, and one between
    llama_as_gguf(NANO / "llama3_rope_nano", tmp_path / "x.gguf", more={"rope_freqs.weight": divisors})
    model, ids = Model.load(tmp_path / "x.gguf"), record["input_ids"]
    logits = model.forward(ids, np.arange(len(ids)) - 1, model.new_cache()).logits
    assert_close(logits, record["logits"], atol=1e-4, name="logits")
    llama_as_gguf(NANO / "llama3_rope_nano", tmp_path / "plain.gguf")
    model = Model.load(tmp_path / "plain.gguf")
    without = model.forward(ids, np.arange(len(ids)) - 1, model.new_cache()).logits
    assert np.abs(without - record["logits"]).max() > 1e-3  # so the comparison can fail


@pytest.mark.parametrize("recipe", LLAMA_3_RECIPES)
def test_stored_divisors_stand_for_the_recipe(tmp_path, recipe):
    divisors = converted_divisors(10_000.0, 12, *recipe)
    gguf_file(tmp_path / "x.gguf", extra={"rope_freqs.weight": divisors})
    rope = read_config(load_config(tmp_path / "x.gguf")).rope
    by_recipe = rope_frequencies(Rope(12, 10_000.0, Llama3(*recipe[:3], recipe[3])))
    assert_close(rope_frequencies(rope), by_recipe, atol=0, rtol=1e-5, name="frequencies")
    assert_equal(rope_frequencies(rope), rope_frequencies(Rope(12, 10_000.0)) / divisors, name="divided")


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (np.ones(5), r"rope_freqs\.weight has shape \(5,\), smallest 1\.0; it must be 6 positive numbers"),
        (np.ones((6, 1)), r"shape \(6, 1\)"),
        (np.array([1, 1, 1, 1, 1, 0]), r"shape \(6,\), smallest 0\.0"),
        (np.array([1, 1, 1, 1, 1, -8]), r"smallest -8\.0"),
        (np.array([1, 1, 1, 1, 1, np.nan]), r"smallest nan"),
        (np.array([1, 1, 1, 1, 1, np.inf]), r"it must be 6 positive numbers"),
    ],
)
def test_divisors_that_cannot_be_are_refused_by_the_tensors_name(tmp_path, divisors, message):
    gguf_file(tmp_path / "x.gguf", extra={"rope_freqs.weight": divisors.astype(np.float32)})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_a_family_without_divisors_does_not_swallow_them(tmp_path):
    facts = {key.replace("llama.", "qwen3."): value for key, value in LLAMA.items()}
    gguf_file(tmp_path / "x.gguf", facts | {"general.architecture": "qwen3"}, {"rope_freqs.weight": np.ones(6)})
    with pytest.raises(CheckpointError, match=r"extra rope_freqs\.weight \(6,\)"):
        Model.load(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "pair", [("Q4_K", "Q6_K"), ("Q5_K", "Q5_0"), ("IQ4_XS", "IQ4_NL"), ("Q2_K", "Q3_K")], ids="-".join
)
def test_a_quantised_gguf_gives_the_logits_of_its_dequantised_twin(tmp_path, pair):
    # random blocks of two types, read as such and as the float32 that the gguf package makes of them
    package = pytest.importorskip("gguf", reason="the gguf package is the second opinion here")
    rng, packed, twin = np.random.default_rng(5), {}, {}
    for name, shape in model_shapes(WIDE).items():
        twin[name] = packed[name] = rng.standard_normal(shape, dtype=np.float32) / 16
        if ".mlp." in name:
            kind = package.GGMLQuantizationType[pair[".down" in name]]
            values, size = package.GGML_QUANT_SIZES[kind]
            blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
            for at in HALVES[kind.name]:
                blocks[:, :, at : at + 2] = np.array([1e-4], np.float16).view(np.uint8)
            packed[name] = Blocks(kind.value, shape, blocks.tobytes())
            twin[name] = package.dequantize(blocks.reshape(shape[0], -1), kind)
    for which, tensors in (("packed", packed), ("twin", twin)):
        named = {f"blk.0.{part}.weight": tensors[gguf_name(f"blk.0.{part}.weight")] for part in PARTS}
        named |= {f"{part}.weight": tensors[gguf_name(f"{part}.weight")] for part in ("token_embd", "output_norm")}
        write_gguf(tmp_path / f"{which}.gguf", WIDE_FACTS, named)
    logits = [logits_of(tmp_path / f"{which}.gguf")[0] for which in ("packed", "twin")]
    assert np.isfinite(logits[0]).all() and np.ptp(logits[0]) > 0.1
    assert_equal(logits[0], logits[1], name="logits")


@pytest.mark.parametrize(("value", "kind"), [(True, int), ("3", int), (3.5, int), (None, int), (1, bool), ("x", float)])
def test_take_refuses_another_kind(value, kind):
    with pytest.raises(CheckpointError, match=r"config\.json: key is"):
        take({"key": value}, "key", kind)


def test_null_is_like_no_key():
    assert take({"rms_norm_eps": None}, "rms_norm_eps", float, 1e-6) == 1e-6 == take({}, "rms_norm_eps", float, 1e-6)
    assert take({"rope_interleave": None}, "rope_interleave", bool, True) is True
    with pytest.raises(CheckpointError, match="hidden_size is missing"):
        take({"hidden_size": None}, "hidden_size", int)


def test_take_reads_an_integer_as_a_float():
    assert take({"rope_theta": 10000}, "rope_theta", float) == 10_000.0


def test_loading_shards_never_holds_the_model_twice(tmp_path):
    """Four files of 24 MiB: the model is 96 MiB, and beside it at most one file's pages and one tensor are resident."""
    tensors = {f"w{i:02}": np.full((1024, 1024), i + 1, np.float32) for i in range(24)}
    save_shards(tmp_path, tensors, 4)
    code = """
from ddtree.checkpoint import load_weights
before = peak()
weights = load_weights(sys.argv[1], {f"w{i:02}": (1024, 1024) for i in range(24)})
print(before, peak(), *(int(weights[name][0, 0]) for name in sorted(weights)))
"""
    before, after, *values = numbers_from(code, tmp_path)
    grown = (after - before) / 2**20
    assert values == list(range(1, 25))
    assert 90 < grown < 96 + 24 + 4 + 20, f"{grown:.0f} MiB"  # 20: headers, the allocator
