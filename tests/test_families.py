"""Families that are a config away: every format beside another code's numbers, and keys followed or refused by name."""

import functools
import json

import gguf
import numpy as np
import pytest

from ddtree.check import assert_close, assert_equal
from ddtree.checkpoint import CheckpointError, catalogue, load_config, open_gguf
from ddtree.config import DEFAULTS, FAMILIES, NEUTRAL, model_shapes, read_config
from ddtree.gguf import BLOCK_TYPES, GgufTensor, read_gguf
from ddtree.kdtr import load
from ddtree.llamacpp import GGUF_FAMILIES, cut_stack, find_sources
from ddtree.models import Model, check_model
from gguf_writer import write_gguf
from random_models import FIXTURES
from tests.llamacpp import convert
from tools import formats

MODELS = FIXTURES / "models"
CONFIGS = {name: load_config(MODELS / f"{name}_nano") for name in ("llama", "mistral", "qwen2", "qwen3", "kimi_k2")}
CONFIGS["qwen3_moe"] = load_config(MODELS / "qwen3_moe_all_nano")
CONFIGS["deepseek_v3"] = load_config(MODELS / "deepseek_v3_grouped_nano")
CONFIGS["kimi_k2"] = CONFIGS["kimi_k2"] | {"model_type": "kimi_k2"}


def logits_of(path, ids):
    """Logits of a chain of tokens."""
    model = Model.load(path)
    return model.forward(ids, np.arange(len(ids)) - 1, model.new_cache()).logits


@functools.cache
def recorded(name):
    return load(MODELS / f"{name}_nano" / "expected.kdtr")


# ------------------------------------------------------------------ the table of formats

ROWS = list(formats.rows())


@functools.cache
def record():
    return json.loads(formats.RECORD.read_text())["rows"]


@pytest.mark.parametrize("i", range(len(ROWS)), ids=[f"{row.format} {row.model}" for row in ROWS])
def test_every_row_of_the_table_is_computed_anew(i):
    new = formats.measured(ROWS[i])  # raises beyond the allowed roundings, and for another token
    assert formats.agree(new, record()[i]), f"computed {new}, recorded {record()[i]}"


def test_the_table_has_every_row_every_model_and_every_family():
    assert len(record()) == len(ROWS)
    named = {row["model"] for row in record() if row["source"] == "transformers" and row["format"] != "GGUF"}
    assert {f"{name}_nano" for name in named} == {path.name for path in MODELS.iterdir()}
    assert {row["family"] for row in record()} - {"any"} == FAMILIES.keys() - {"kimi_k25"}
    written = {json.loads((MODELS / f"{name}_nano" / "config.json").read_text())["model_type"] for name in named}
    assert set(GGUF_FAMILIES.values()) <= written


def test_the_readme_says_what_the_record_says():
    assert formats.written(record()) == (formats.ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("change", [{"tokens": 23}, {"model": "x"}, {"roundings": 500.0}, {"roundings": 0.0}])
def test_a_row_that_is_another_one_does_not_agree(change):
    assert formats.agree(record()[0], record()[0]) and not formats.agree(record()[0] | change, record()[0])


def test_a_difference_beyond_the_allowed_roundings_is_an_error():
    row = formats.Row("x", "llama", "y", "z", lambda: (1e-3, 4.0, 24))
    with pytest.raises(ValueError, match=r"x y: 0\.001 is 2097\.2 roundings of 4\.0"):
        formats.measured(row)


# ------------------------------------------------------------------ windows


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 40, "max_window_layers": 0}, ()),
        ({"use_sliding_window": None, "sliding_window": 40, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}, (40, 40, 40)),
        ({"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}, (None, 40, 40)),
        ({"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3}, ()),
        ({"use_sliding_window": True, "sliding_window": 40}, ()),  # 28 layers have none
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
          "use_sliding_window": True, "sliding_window": 8}, (8, None, 8, None)),
    ],
)  # fmt: skip
def test_the_window_of_qwen2_holds_from_a_layer_on(change, windows):
    config = {key: value for key, value in CONFIGS["qwen2"].items() if key not in ("layer_types", "sliding_window")}
    config.pop("max_window_layers", None)
    assert read_config(config | {"num_hidden_layers": 3} | change).windows == windows


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (4096, 4096)),
        ({"sliding_window": None}, ()),
        ({"sliding_window": 40}, (40, 40)),
        ({"sliding_window": 40, "layer_types": ["sliding_attention"] * 2}, (40, 40)),
        ({"sliding_window": 40, "use_sliding_window": True}, (40, 40)),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2, "use_sliding_window": False}, ()),
    ],
)
def test_mistral_has_one_window_for_all_layers_or_none(change, windows):
    config = {key: value for key, value in CONFIGS["mistral"].items() if key != "sliding_window"}
    assert read_config(config | change).windows == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["full_attention"] * 2},
            r"layer_types \['full_attention', 'full_attention'\] is not supported",
        ),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "with this window all are 'sliding_attention'"),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "all are 'full_attention'"),
        ({"use_sliding_window": False}, "sliding_window is 40, but use_sliding_window is False"),
        (
            {"sliding_window": None, "use_sliding_window": True},
            "sliding_window is None, but use_sliding_window is True",
        ),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ({"sliding_window": "40"}, "sliding_window is '40'"),
    ],
)
def test_two_sayings_about_mistrals_window_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(CONFIGS["mistral"] | change)


# ------------------------------------------------------------------ keys that change the maths

TELLING = {
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "clip_qkv": 8.0, "attention_chunk_size": 8192,
    "swiglu_limit": 7.0, "qkv_bias": True, "use_bias": True, "lm_head_bias": True, "attn_output_gate": True,
    "use_parallel_residual": True, "attn_temperature_tuning": True, "use_mrope": True,
    "use_bidirectional_attention": True,
    "no_rope_layers": [1, 0], "logit_scale": 0.0625, "logits_scaling": 8.0, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.015, "query_pre_attn_scalar": 256, "scale_emb": 12,
    "rope_ratio": 500, "partial_rotary_factor": 0.5, "rotary_pct": 0.25, "rope_local_base_freq": 10000.0,
    "dual_chunk_attention_config": {"chunk_size": 262144}, "sliding_window_pattern": 6, "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh", "is_causal": False, "norm_type": "layer_norm", "rope_interleaved": True,
    "scoring_func": "sqrtsoftplus",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_key_of_another_family_is_refused_by_name(family):
    whole = read_config(CONFIGS[family])
    for key, value in TELLING.items():
        if key == "scoring_func" and key not in NEUTRAL[family]:
            continue
        with pytest.raises(CheckpointError, match=f"config.json: {key} = "):
            read_config(CONFIGS[family] | {key: value})
        for says_nothing in (*NEUTRAL[family][key], None):
            assert read_config(CONFIGS[family] | {key: says_nothing}) == whole


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096 is not supported; allowed: no such key"),
        ("llama", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "is not supported for llama; full_attention is"),
        ("llama", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("mistral", {"attention_bias": True}, "attention_bias = True is not supported; allowed: False"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = True"),
        ("mistral", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("qwen2", {"attention_bias": False}, "attention_bias = False is not supported; allowed: True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen2", {"num_experts": 60}, "num_experts = 60"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm = False is not supported; allowed: True"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, r"routed_scaling_factor = 2\.5"),
        ("qwen3_moe", {"n_group": 8}, "n_group = 8"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "is not supported for qwen3_moe"),
        ("qwen3_moe", {"num_experts": 16}, "num_experts = 16 is not supported; allowed: 8"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias = True"),
        ("deepseek_v3", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        ("deepseek_v3", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("deepseek_v3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("deepseek_v3", {"num_local_experts": 8}, "num_local_experts = 8 is not supported; allowed: 16"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(family, change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(CONFIGS[family] | change)


@pytest.mark.parametrize(
    ("family", "change", "changed"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "experts"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "experts"),
        ("qwen3_moe", {"norm_topk_prob": False}, "experts"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "experts"),
        ("deepseek_v3", {"rope_interleave": False}, "rope"),
        ("deepseek_v3", {"num_nextn_predict_layers": None, "num_mtp_layers": 2}, "skip"),
        ("qwen2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("mistral", {"head_dim": 16}, "head_dim"),
        ("llama", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_a_family_has_is_followed(family, change, changed):
    before, after = read_config(CONFIGS[family]), read_config(CONFIGS[family] | change)
    assert getattr(before, changed) != getattr(after, changed)


def test_the_biases_of_qwen2_are_those_of_query_key_and_value():
    shapes = model_shapes(read_config(CONFIGS["qwen2"]))
    biased = {name.split(".")[3] for name in shapes if name.endswith(".bias")}
    assert biased == {"q_proj", "k_proj", "v_proj"}
    without = {key: value for key, value in CONFIGS["qwen2"].items() if key != "attention_bias"}
    assert model_shapes(read_config(without | {"attention_bias": True})) == shapes


@pytest.mark.parametrize("left", ["absent", "null"])
@pytest.mark.parametrize(
    ("family", "key", "field", "value"),
    [
        ("mistral", "max_position_embeddings", "max_position_embeddings", 131072),
        ("mistral", "rms_norm_eps", "rms_norm_eps", 1e-6),
        ("mistral", "head_dim", "head_dim", 8),
        ("mistral", "tie_word_embeddings", "tie_word_embeddings", False),
        ("qwen2", "max_position_embeddings", "max_position_embeddings", 32768),
        ("qwen2", "tie_word_embeddings", "tie_word_embeddings", False),
        ("qwen2", "rms_norm_eps", "rms_norm_eps", 1e-6),
    ],
)
def test_what_qwen2_and_mistral_leave_out_is_what_their_authors_published(family, key, field, value, left):
    rest = {name: given for name, given in CONFIGS[family].items() if name != key}
    assert getattr(read_config(rest | ({} if left == "absent" else {key: None})), field) == value


def test_mistral_has_eight_keys_where_it_says_nothing_and_null_means_one_a_query():
    config = {key: value for key, value in CONFIGS["mistral"].items() if key != "num_key_value_heads"}
    config |= {"num_attention_heads": 16, "head_dim": 8}
    assert read_config(config).num_key_value_heads == 8
    assert read_config(config | {"num_key_value_heads": None}).num_key_value_heads == 16
    assert read_config({**config, "num_key_value_heads": 4}).eos_token_ids == (1,)
    assert DEFAULTS["mistral"]["eos_token_id"] == 2 and "eos_token_id" not in DEFAULTS["qwen2"]


@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "qwen3_next", "llama4", "deepseek_v2", None, ["llama"]])
def test_a_family_that_is_not_read_is_named_with_those_that_are(kind):
    with pytest.raises(CheckpointError, match=r"model_type .* is not supported; allowed: llama, mistral, qwen2, qwen3"):
        read_config(CONFIGS["llama"] | {"model_type": kind})


# ------------------------------------------------------------------ GGUF: what a key means, and what is refused

MOE, LATENT = "qwen3_moe_all", "kimi_k2"


def rewritten(name, path, change=(), tensors=(), **options):
    """A GGUF file of a model, with some metadata and tensors changed. None takes one away."""
    whole = read_gguf(convert(MODELS / f"{name}_nano", path.with_name("whole.gguf"), **options))
    facts = {key: value for key, value in (whole.metadata | dict(change)).items() if value is not None}
    values = {name: whole.read(name) for name in whole.tensors} | dict(tensors)
    write_gguf(path, facts, {name: value for name, value in values.items() if value is not None})
    return path


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LATENT, {"deepseek2.expert_gating_func": None}, "expert_gating_func is None; 2 is supported"),
        (LATENT, {"deepseek2.expert_gating_func": 1}, r"expert_gating_func is 1; 2 is supported \(sigmoid"),
        (LATENT, {"deepseek2.attention.key_length": 192}, "key_length is not 40, which follows from kv_lora_rank"),
        (LATENT, {"deepseek2.attention.value_length_mla": None}, "value_length_mla is None; it must be a positive"),
        (LATENT, {"deepseek2.attention.kv_lora_rank": None}, "attention.kv_lora_rank is None"),
        (LATENT, {"deepseek2.rope.dimension_count": 32}, "key_length is not 64"),
        (LATENT, {"deepseek2.rope.dimension_count": 7}, "key_length is not 39"),
        (LATENT, {"deepseek2.rope.scaling.attn_factor": 0.5}, r"rope.scaling.attn_factor = 0\.5 is not supported"),
        (LATENT, {"deepseek2.rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor = 0.5"),
        (LATENT, {"deepseek2.attention.temperature_scale": 0.1}, "attention.temperature_scale = 0.1"),
        (LATENT, {"deepseek2.nextn_predict_layers": 1}, "nextn_predict_layers = 1"),
        (LATENT, {"deepseek2.expert_group_count": 5}, "12 experts in 5 groups"),
        (LATENT, {"deepseek2.expert_used_count": 13}, "top_k is 13"),
        (
            LATENT,
            {"deepseek2.rope.scaling.yarn_log_multiplier": "x"},
            "yarn_log_multiplier is 'x'; it must be a number",
        ),
        (MOE, {"qwen3moe.expert_used_count": 9}, "top_k is 9"),
        (MOE, {"qwen3moe.expert_count": 9}, "missing layers.0.mlp.experts.8.gate_proj.weight"),
        (MOE, {"qwen3moe.expert_count": 7}, "extra layers.0.mlp.experts.7.gate_proj.weight"),
        (MOE, {"qwen3moe.expert_feed_forward_length": 8}, r"has shape \(16, 32\), the config asks for \(8, 32\)"),
        (MOE, {"qwen3moe.expert_shared_count": 1}, "expert_shared_count = 1"),
        (MOE, {"qwen3moe.expert_weights_scale": 2.5}, r"expert_weights_scale = 2\.5"),
        (MOE, {"qwen3moe.attention.sliding_window": 16}, "attention.sliding_window = 16"),
        ("qwen2", {"qwen2.attention.sliding_window": 16}, "attention.sliding_window = 16"),
        ("qwen2", {"qwen2.attention.value_length": 4}, "value_length is not head_dim 8"),
        ("mistral_nemo", {"llama.attention.key_length": 8}, "rope.dimension_count is not head_dim 8"),
        ("mistral_nemo", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, "= 'linear' is not"),
    ],
)
def test_a_gguf_key_that_would_change_the_maths_is_refused_by_name(tmp_path, name, change, message):
    path = rewritten(name, tmp_path / "x.gguf", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_model(path)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "config"),
    [
        (MOE, {"qwen3moe.expert_weights_norm": None}, {"norm_topk_prob": True}),
        (MOE, {"qwen3moe.expert_weights_norm": False}, {"norm_topk_prob": False}),
        (LATENT, {"deepseek2.expert_weights_norm": None}, {"norm_topk_prob": False}),
        (LATENT, {"deepseek2.expert_weights_scale": None}, {"routed_scaling_factor": 1.0}),
        (LATENT, {"deepseek2.expert_weights_scale": 0.0}, {"routed_scaling_factor": 1.0}),
        (LATENT, {"deepseek2.expert_group_count": None, "deepseek2.expert_group_used_count": None}, {"n_group": 1}),
        (LATENT, {"deepseek2.expert_group_count": 0, "deepseek2.expert_group_used_count": 0}, {"topk_group": 1}),
        (LATENT, {"deepseek2.attention.q_lora_rank": None}, {"q_lora_rank": None}),
        (LATENT, {"deepseek2.leading_dense_block_count": None}, {"first_k_dense_replace": 0}),
        (LATENT, {"deepseek2.expert_shared_count": None}, {"n_shared_experts": 0}),
    ],
)
def test_a_gguf_key_that_is_not_there_means_what_llama_cpp_does_without_it(tmp_path, name, change, config):
    read = load_config(rewritten(name, tmp_path / "x.gguf", change))
    assert config.items() <= read.items()


@pytest.mark.parametrize(("written", "mscale"), [(0.1, 1.0), (0.0707, 0.707), (0.05, 0.5)])
def test_yarns_log_multiplier_is_a_tenth_of_mscale_all_dim(tmp_path, written, mscale):
    path = rewritten(LATENT, tmp_path / "x.gguf", {"deepseek2.rope.scaling.yarn_log_multiplier": written})
    config = read_config(load_config(path))
    rope = CONFIGS["kimi_k2"]["rope_parameters"] | {"mscale": mscale, "mscale_all_dim": mscale}
    expected = read_config(CONFIGS["kimi_k2"] | {"rope_parameters": rope})
    assert config.softmax_scale == pytest.approx(expected.softmax_scale, rel=1e-6) and config.rope.amplitude == 1.0


def test_without_the_log_multiplier_yarn_is_as_in_a_config_without_mscale(tmp_path):
    path = rewritten(LATENT, tmp_path / "x.gguf", {"deepseek2.rope.scaling.yarn_log_multiplier": None})
    rope = {key: value for key, value in CONFIGS["kimi_k2"]["rope_parameters"].items() if "mscale" not in key}
    expected, config = read_config(CONFIGS["kimi_k2"] | {"rope_parameters": rope}), read_config(load_config(path))
    assert (config.rope, config.softmax_scale) == (expected.rope, expected.softmax_scale)
    assert config.rope.amplitude > 1.4


@pytest.mark.parametrize("name", ["qwen2_window", "qwen3_window"])
def test_yarn_of_a_gguf_file_is_that_of_the_folder(tmp_path, name):
    config = load_config(convert(MODELS / f"{name}_nano", tmp_path / "x.gguf"))
    assert read_config(config).rope == read_config(load_config(MODELS / f"{name}_nano")).rope


@pytest.mark.parametrize("name", ["mistral", "qwen2_window", "qwen3_window"])
def test_a_gguf_file_knows_no_window_so_texts_are_equal_up_to_its_length(tmp_path, name):
    path, ids = convert(MODELS / f"{name}_nano", tmp_path / "x.gguf"), recorded(name)["input_ids"]
    logits, expected = logits_of(path, ids), recorded(name)["logits"]
    assert_close(logits[:40], expected[:40], atol=1e-5, name="within the window")
    assert np.abs(logits[40:] - expected[40:]).max() > 0.1


# ------------------------------------------------------------------ GGUF: stacks and halves


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_v_b.weight": None}, "missing layers.0.self_attn.kv_b_proj.weight"),
        ({"blk.0.attn_k_b.weight": None}, "extra blk.0.attn_v_b.weight"),
        ({"blk.0.attn_k_b.weight": np.ones((4, 31, 16), np.float32)}, r"extra blk.0.attn_k_b.weight \(4, 31, 16\)"),
        ({"blk.0.attn_kv_b.weight": np.ones((128, 32), np.float32)}, "kv_b_proj.weight occurs twice"),
        ({"blk.1.exp_probs_b.bias": None}, "missing layers.1.mlp.gate.e_score_correction_bias"),
        ({"blk.1.ffn_up_exps.weight": None}, "missing layers.1.mlp.experts.0.up_proj.weight"),
        ({"blk.1.ffn_up_exps.weight": np.ones((12, 64), np.float32)}, "extra blk.1.ffn_up_exps.weight"),
        ({"blk.1.ffn_up_exps.weight": np.ones((12, 32, 0), np.float32)}, r"has shape \(32, 0\)"),
        ({"blk.1.ffn_up_exps.weight": np.ones((12, 31, 64), np.float32)}, r"has shape \(31, 64\)"),
    ],
)
def test_stacks_and_halves_that_do_not_fit_are_named(tmp_path, tensors, message):
    path = rewritten(LATENT, tmp_path / "x.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        check_model(path)


@pytest.mark.parametrize(("name", "fuse"), [(LATENT, False), (LATENT, True), (MOE, False), (MOE, True)])
def test_every_weight_of_a_gguf_file_is_that_of_the_folder_to_the_bit(tmp_path, name, fuse):
    model = Model.load(convert(MODELS / f"{name}_nano", tmp_path / "x.gguf", fuse=fuse))
    folder = Model.load(MODELS / f"{name}_nano")
    assert model.weights.keys() == folder.weights.keys()
    for key, weight in folder.weights.items():
        assert_equal(model.weights[key], weight, name=key)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_stacks_have_the_values_of_the_gguf_package_expert_by_expert(tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    kinds = {"_exps": number, "attn_v_b": number, "attn_q_a.weight": number}
    packed = convert(MODELS / "kimi_k2_nano", tmp_path / "x.gguf", kinds=kinds)
    model, folder = Model.load(packed), Model.load(MODELS / "kimi_k2_nano")
    assert {tensor.dtype for tensor in catalogue(packed)} == {"F32", kind}
    for e in (0, 7, 11):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"layers.2.mlp.experts.{e}.{part}.weight"
            rounded = gguf.quants.dequantize(gguf.quants.quantize(folder.weights[name], number), number)
            assert_equal(model.weights[name], rounded, name=name)
    assert np.abs(model.weights[name] - folder.weights[name]).max() > 0


def test_a_split_file_of_experts_is_the_same_model(tmp_path):
    whole = read_gguf(convert(MODELS / "kimi_k2_nano", tmp_path / "whole.gguf"))
    names, paths = list(whole.tensors), [tmp_path / f"x-0000{i + 1}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):  # keys and values of a layer are in different parts
        share = {name: whole.read(name) for name in names[i::3]}
        facts = {"split.no": i, "split.count": 3, "split.tensors.count": len(names)}
        write_gguf(path, facts | (whole.metadata if i == 0 else {}), share)
    ids = recorded("kimi_k2")["input_ids"]
    assert_equal(logits_of(paths[1], ids), logits_of(tmp_path / "whole.gguf", ids), name="logits")


@pytest.mark.parametrize("shape", [(2**40, 2, 0), (10_001, 2, 0), (2, 3), (4,), (2, 3, 5, 7)])
def test_a_stack_that_cannot_be_one_is_not_cut(shape):
    tensor = GgufTensor("blk.0.ffn_gate_up_exps.weight", shape, BLOCK_TYPES[0], start=0)
    assert cut_stack(tensor) == {}
    assert [name for name, _ in find_sources({tensor.name: tensor})] == [tensor.name]


MUTATED = (None, 0, 3, 2**31, True, 1.5, float("nan"), "x", "", [], [1, 2], ["a"])


@pytest.mark.parametrize("name", [MOE, LATENT, "qwen2"])
def test_any_key_of_another_kind_is_one_clear_error_or_harmless(tmp_path, monkeypatch, name):
    path = convert(MODELS / f"{name}_nano", tmp_path / "x.gguf")
    opened = open_gguf(path)
    monkeypatch.setattr("ddtree.checkpoint.open_gguf", lambda path: opened)
    for key in list(opened.metadata):
        before = opened.metadata.pop(key)
        for value in MUTATED:
            opened.metadata.update({} if value is None else {key: value})
            try:
                check_model(path)
            except CheckpointError as error:
                assert str(error).strip()
        opened.metadata[key] = before
    assert len(check_model(path).found) > 20
