import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ddtree.check import assert_close, assert_equal
from ddtree.checkpoint import CheckpointError, catalogue, load_config, read_tensors
from ddtree.config import DEFAULTS, model_shapes, read_config, read_rope
from ddtree.dflash import Drafter, block_mask, default_layer_ids, read_draft_config
from ddtree.kdtr import load
from ddtree.layers import Llama3, Yarn, dense, rope_frequencies
from ddtree.models import KVCache, Model, check_model, norm, prefill
from invariance import check_fixture, check_random
from random_models import FAMILIES, FIXTURES, NANO, PAIR, PAIRS, random_engine, random_weights

CONFIG = load_config(PAIR / "target")
DRAFT = load_config(PAIR / "draft")
NANO_CONFIGS = {name.removesuffix("_nano"): load_config(FIXTURES / "models" / name) for name in NANO}
LATENT = ("kimi_k2_nano", "deepseek_v3_grouped_nano", "deepseek_v3_bias_nano")
FORMS = [(name, absorb) for name in NANO for absorb in ((True, False) if name in LATENT else (True,))]


@functools.cache
def nano(name, absorb=True):
    return Model.load(FIXTURES / "models" / name, absorb=absorb)


@functools.cache
def expected(name):
    return load(FIXTURES / "models" / name / "expected.kdtr")


# ------------------------------------------------------------------ recorded values


@pytest.mark.parametrize(("name", "absorb"), FORMS)
def test_logits_and_every_hidden_state_are_the_recorded_ones(name, absorb):
    model, record = nano(name, absorb), expected(name)
    ids, layers = record["input_ids"], model.config.num_hidden_layers
    result = model.forward(ids, np.arange(len(ids)) - 1, model.new_cache(), taps=range(layers))
    assert_close(result.logits, record["logits"], atol=1e-4, name="logits")
    states = np.split(result.features, layers, axis=1)
    assert_equal(model.embed(ids), record["hidden_states"][0], name="embeddings")
    for i, state in enumerate(states[:-1]):
        assert_close(state, record["hidden_states"][i + 1], atol=1e-4, name=f"after layer {i}")
    last = norm(states[-1], model.weights, "norm.weight", model.config)
    assert_close(last, record["hidden_states"][layers], atol=1e-4, name="after the final norm")


@pytest.mark.parametrize(("name", "absorb"), FORMS)
def test_one_pass_over_a_tree_gives_the_recorded_logits_of_every_path(name, absorb):
    model, record, cache = nano(name, absorb), expected(name), nano(name).new_cache()
    prefill(model, record["input_ids"], cache)
    tree = model.forward(record["tree_token_ids"], record["tree_parents"], cache)
    assert_close(tree.logits, record["tree_logits"], atol=1e-4, name="tree logits")


@pytest.mark.parametrize("name", LATENT)
def test_absorbed_and_expanded_latent_attention_agree(name):
    ids, taps = expected(name)["input_ids"], range(nano(name).config.num_hidden_layers)
    both = [
        nano(name, absorb).forward(ids, np.arange(len(ids)) - 1, nano(name).new_cache(), taps)
        for absorb in (True, False)
    ]
    # two orders of the same float32 sums; logits up to 18
    assert_close(both[0].logits, both[1].logits, atol=3e-5, name="logits")
    assert_close(both[0].features, both[1].features, atol=3e-5, name="hidden states")
    for absorbed, expanded in zip(both[0].new_kv, both[1].new_kv, strict=True):
        assert absorbed.shape == expanded.shape == (1, 90, nano(name).new_cache().layer(0).shape[2])


# ------------------------------------------------------------------ batch invariance


@pytest.mark.parametrize(("name", "absorb"), FORMS)
def test_a_recorded_model_gives_a_token_the_same_bits_in_every_pass(name, absorb):
    check_fixture(FIXTURES / "models" / name, absorb)


@pytest.mark.parametrize("name", PAIRS)
def test_a_trained_model_gives_a_token_the_same_bits_in_every_pass(name):
    check_fixture(FIXTURES / f"pycode_{name}" / "target", absorb=True)


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 100_000))
@settings(max_examples=12)
def test_a_random_model_gives_a_token_the_same_bits_in_every_pass(family, seed):
    check_random(seed, family)


@pytest.mark.parametrize("setting", ["CORETYPE=Haswell", "NUM_THREADS=1", "CORETYPE=Prescott"])
def test_the_bits_agree_with_other_matrix_kernels_and_threads_too(setting):
    name, value = setting.split("=")
    tests = Path(__file__).parent
    environment = {**os.environ, f"OPENBLAS_{name}": value, "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, tests / "invariance.py"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr


# ------------------------------------------------------------------ packed weights


class Packed:
    """Any weight, unpacked only when it is asked for."""

    def __init__(self, weight):
        self._weight, self.shape = weight, weight.shape

    def dequantise(self):
        return dense(self._weight).copy()


@pytest.mark.parametrize("name", NANO)
def test_packed_weights_give_the_bits_of_their_unpacked_twins(name):
    model, ids = nano(name), expected(name)["input_ids"][:20]
    packed = {key: Packed(weight) if "proj" in key else weight for key, weight in model.weights.items()}
    twin = Model(model.config, packed)
    of_twin, of_model = (m.forward(ids, np.arange(20) - 1, m.new_cache()).logits for m in (twin, model))
    assert_equal(of_twin, of_model, name="logits")


# ------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; allowed: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 6}, "use_sliding_window is false"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 3}, "sliding_window is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set for all layers"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "260"}, "vocab_size is '260'"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": 63}, "head_dim"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [257, 9999]}, "eos_token_id 9999"),
    ],
)
def test_a_config_that_would_change_the_maths_is_refused_by_key(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**CONFIG, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": "48"}, "q_lora_rank is '48'"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
        ({"num_experts_per_tok": 13}, "top_k is 13; the chosen groups have 12 experts"),
        ({"n_group": 5}, "12 experts in 5 groups"),
        ({"sliding_window": 128}, "sliding_window = 128"),
    ],
)
def test_a_deepseek_config_that_would_change_the_maths_is_refused_by_key(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**NANO_CONFIGS["kimi_k2"], **change})


def old_spelling(config):
    """A config as transformers 4 wrote it: rope_theta and rope_scaling with `type`."""
    rope = dict(config["rope_parameters"])
    kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    old = {key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": theta}
    return old | {"rope_scaling": None if kind == "default" else {"type": kind, **rope}}


@pytest.mark.parametrize("config", [CONFIG, *NANO_CONFIGS.values()], ids=["pycode", *NANO_CONFIGS])
def test_old_and_new_rope_spellings_mean_the_same(config):
    assert read_config(old_spelling(config)) == read_config(config)


KIMI_K2 = {
    "model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_shared_experts": 1, "n_routed_experts": 384, "ep_size": 1, "routed_scaling_factor": 2.827, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc",
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False, "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip


def test_kimi_k25_is_a_wrapper_around_kimi_k2():
    wrapped = read_config({"model_type": "kimi_k25", "text_config": KIMI_K2, "vision_config": {}, "eos_token_id": 1})
    plain = read_config({**KIMI_K2, "eos_token_id": [1]})
    assert wrapped.prefixes == ("language_model.", "model.") and set(wrapped.skip) > set(plain.skip)
    assert "vision_tower.*" in wrapped.skip
    assert dataclasses.replace(wrapped, prefixes=plain.prefixes, skip=plain.skip) == plain
    assert plain.softmax_scale == pytest.approx(0.1447, abs=5e-5)  # the specification sheet's number
    assert plain.rope.amplitude == 1.0 and plain.rope.interleaved
    assert plain.experts.layers == tuple(range(1, 61))


def test_kimi_k2_has_a_trillion_parameters():
    shapes = model_shapes(read_config(KIMI_K2))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(1.026e12, rel=1e-3)
    assert shapes["layers.60.mlp.experts.383.down_proj.weight"] == (7168, 2048)


def test_yarn_without_mscale_stretches_cosine_and_sine_unless_told_otherwise():
    keys = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    assert read_rope({"rope_parameters": keys}, 128).amplitude == pytest.approx(1.4159, abs=1e-4)
    assert read_rope({"rope_parameters": keys | {"attention_factor": 1.0}}, 128).amplitude == 1.0


def test_slow_pairs_turn_slower_and_fast_pairs_as_before():
    plain = read_rope({"rope_theta": 5e5}, 64)
    for scaling in (Llama3(8.0, 1.0, 4.0, 8192), Yarn(8.0, 8192)):
        ratio = rope_frequencies(plain) / rope_frequencies(dataclasses.replace(plain, scaling=scaling))
        assert ratio[0] == 1 and ratio[-1] == pytest.approx(8) and np.all(np.diff(ratio) >= -1e-6)


def test_layers_for_multi_token_prediction_and_old_buffers_are_skipped(tmp_path):
    source = FIXTURES / "models" / "kimi_k2_nano"
    tensors = load_file(source / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    extra = np.zeros((2, 2), np.float32)
    unused = {"model.layers.3.eh_proj.weight": extra, "model.layers.0.self_attn.rotary_emb.inv_freq": extra}
    save_file(tensors | unused, tmp_path / "model.safetensors")
    assert_equal(Model.load(tmp_path).weights["norm.weight"], nano("kimi_k2_nano").weights["norm.weight"], name="norm")
    save_file(tensors | {"model.layers.4.eh_proj.weight": extra}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"extra model\.layers\.4\.eh_proj"):
        Model.load(tmp_path)


def test_a_wrapped_checkpoint_loads_its_text_model(tmp_path):
    source = FIXTURES / "models" / "kimi_k2_nano"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "kimi_k25", "text_config": NANO_CONFIGS["kimi_k2"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrapped, ids, chain = Model.load(tmp_path), expected("kimi_k2_nano")["input_ids"], np.arange(90) - 1
    plain = nano("kimi_k2_nano").forward(ids, chain, nano("kimi_k2_nano").new_cache())
    assert_equal(wrapped.forward(ids, chain, wrapped.new_cache()).logits, plain.logits, name="logits")


def test_head_sizes_follow_from_the_config_where_not_given():
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "num_key_value_heads")}
    assert (read_config(config).head_dim, read_config(config).num_key_value_heads) == (64, 4)


def test_windows_are_read_from_layer_types_or_from_max_window_layers():
    base = {key: value for key, value in CONFIG.items() if key != "layer_types"}
    new = {"sliding_window": 32, "use_sliding_window": True}
    assert read_config({**base, **new, "max_window_layers": 4}).windows == (None,) * 4 + (32,) * 2
    kinds = ["full_attention", "sliding_attention"] * 3
    assert read_config({**base, **new, "layer_types": kinds}).windows == (None, 32) * 3
    assert read_config({**base, "sliding_window": 32, "use_sliding_window": False}).windows == ()


QWEN3_MOE = {
    **CONFIG, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True,
}  # fmt: skip


def test_qwen3_moe_layers_and_tensors():
    config = read_config(QWEN3_MOE)
    with pytest.raises(CheckpointError, match="use_sliding_window = True"):
        read_config({**QWEN3_MOE, "use_sliding_window": True})
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert read_config(newer) == config
    assert config.experts.layers == (1, 5) and config.experts.routing.softmax and config.qk_norm
    shapes = model_shapes(config)
    assert shapes["layers.1.mlp.experts.7.up_proj.weight"] == (96, 256)
    assert shapes["layers.1.mlp.gate.weight"] == (8, 256) and shapes["layers.0.mlp.up_proj.weight"] == (768, 256)
    assert not any("bias" in name or "shared" in name for name in shapes)


@pytest.mark.parametrize(
    ("base", "key", "names"),
    [
        (NANO_CONFIGS["llama"], "attention_bias", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (NANO_CONFIGS["llama"], "mlp_bias", ["down_proj", "gate_proj", "up_proj"]),
        (NANO_CONFIGS["qwen3"], "attention_bias", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (NANO_CONFIGS["kimi_k2"], "attention_bias", ["kv_a_proj_with_mqa", "o_proj", "q_a_proj"]),
        (NANO_CONFIGS["deepseek_v3_grouped"], "attention_bias", ["kv_a_proj_with_mqa", "o_proj"]),
    ],
)
def test_biases_are_tensors_of_the_model_and_change_the_result(base, key, names):
    config = read_config({**base, key: True})
    shapes = model_shapes(config)
    biased = sorted(name.split(".")[3] for name in shapes if name.startswith("layers.0.") and name.endswith(".bias"))
    assert biased == names
    weights = random_weights(shapes, np.random.default_rng(0), 0.3)
    results = []
    for changed in [None, *(name for name in shapes if name.startswith("layers.0.") and name.endswith(".bias"))]:
        noisy = {} if changed is None else {changed: weights[changed] + np.linspace(0, 1, len(weights[changed]))}
        model = Model(config, weights | {name: bias.astype(np.float32) for name, bias in noisy.items()})
        results.append(model.forward([1, 2, 3], [-1, 0, 1], model.new_cache()).logits.tobytes())
    assert len(set(results)) == len(names) + 1


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_hides_what_is_outside_it(window):
    config = dataclasses.replace(nano("llama_nano").config, num_hidden_layers=1, windows=(window,))
    model = Model(config, nano("llama_nano").weights)
    text = np.arange(150) % 199
    chain = np.arange(150) - 1
    rows = model.forward(text, chain, model.new_cache()).logits
    changed = text.copy()
    changed[: 149 - window + 1] = 7  # all that the last token cannot see
    assert_equal(model.forward(changed, chain, model.new_cache()).logits[-1], rows[-1], name="last row")
    changed[149 - window + 1] = 8  # the first that it sees
    assert np.any(model.forward(changed, chain, model.new_cache()).logits[-1] != rows[-1])


# ------------------------------------------------------------------ what a config leaves out


def without(config, keys, left=None):
    """A config without some keys, or with null for them."""
    rest = {key: value for key, value in config.items() if key not in keys}
    return rest if left == "absent" else rest | dict.fromkeys(keys)


@pytest.mark.parametrize("left", ["absent", "null"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("deepseek_v3_grouped_nano", ["routed_scaling_factor"]),  # 2.5, as its config says
        ("deepseek_v3_grouped_nano", ["norm_topk_prob", "rope_interleave", "rms_norm_eps"]),
        ("qwen3_nano", ["hidden_act", "rms_norm_eps", "attention_bias", "max_window_layers"]),
        ("llama_bias_nano", ["head_dim", "hidden_act", "tie_word_embeddings"]),
        ("qwen3_moe_nano", ["decoder_sparse_step", "rms_norm_eps"]),
    ],
)
def test_what_a_config_leaves_out_gives_the_recorded_logits_all_the_same(tmp_path, name, keys, left):
    shutil.copytree(FIXTURES / "models" / name, tmp_path / "model")
    config = without(NANO_CONFIGS[name.removesuffix("_nano")], keys, left)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model, record = Model.load(tmp_path / "model"), expected(name)
    logits = model.forward(record["input_ids"], np.arange(90) - 1, model.new_cache()).logits
    assert_close(logits, record["logits"], atol=1e-4, name="logits")


@pytest.mark.parametrize("left", ["absent", "null"])
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2"])
def test_a_deepseek_config_that_is_almost_empty_means_the_published_model(family, left):
    """The values of transformers' DeepseekV3Config, and of the file that DeepSeek published with the weights."""
    keys = ["routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok"]
    keys += ["norm_topk_prob", "scoring_func", "topk_method", "moe_layer_freq", "max_position_embeddings"]
    config = NANO_CONFIGS["kimi_k2"] | {"model_type": family, "n_routed_experts": 256, "num_hidden_layers": 5}
    read = read_config(without(config, keys, left))
    routing = read.experts.routing
    assert (routing.scale, routing.groups, routing.top_groups, routing.top_k) == (2.5, 8, 4, 8)
    assert (routing.normalise, routing.softmax, read.experts.layers) == (True, False, (3, 4))
    assert read.max_position_embeddings == 4096


def test_absent_and_null_differ_where_null_is_a_statement():
    config = NANO_CONFIGS["deepseek_v3_grouped"]
    assert read_config(config | {"q_lora_rank": None}).latent.q_lora_rank is None
    assert read_config(without(config, ["q_lora_rank"], "absent")).latent.q_lora_rank == 1536
    assert read_config(config | {"n_shared_experts": None}).experts.shared_size == 0
    assert read_config(without(config, ["n_shared_experts"], "absent")).experts.shared_size == 32
    for family, end in (("deepseek_v3_grouped", (1,)), ("llama", (2,)), ("qwen3", ())):
        assert read_config(without(NANO_CONFIGS[family], ["eos_token_id"], "absent")).eos_token_ids == end
        assert read_config(NANO_CONFIGS[family] | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(("family", "positions"), [("llama", 2048), ("qwen3", 32768), ("deepseek_v3_grouped", 4096)])
def test_the_number_of_positions_is_the_family_s(family, positions):
    config = without(NANO_CONFIGS[family], ["max_position_embeddings"])
    assert read_config(config).max_position_embeddings == positions


@pytest.mark.parametrize("family", sorted(NANO_CONFIGS))
@pytest.mark.parametrize("left", ["absent", "null"])
def test_any_key_left_out_is_asked_for_or_means_the_default(family, left):
    config, whole = NANO_CONFIGS[family], read_config(NANO_CONFIGS[family])
    changed = {"rope_parameters", "eos_token_id", "layer_types", "num_key_value_heads", "head_dim", "q_lora_rank"}
    changed |= {"mlp_only_layers", "n_shared_experts", "num_nextn_predict_layers", *DEFAULTS[config["model_type"]]}
    for key in config:
        try:
            assert read_config(without(config, [key], left)) == whole or key in changed, key
        except CheckpointError as error:
            assert key in str(error) or "experts" in str(error) or "use_sliding_window" in str(error), (key, error)


# ------------------------------------------------------------------ numbers that no file bears out


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3", "num_hidden_layers", 10**30),
        ("llama", "num_hidden_layers", 9_999),
        ("qwen3", "hidden_size", 2**40),
        ("qwen3_moe", "num_local_experts", 10**9),
        ("qwen3_moe", "num_local_experts", 9_999),
        ("kimi_k2", "n_routed_experts", 9_999),
        ("kimi_k2", "num_nextn_predict_layers", 10**9),
        ("kimi_k2", "first_k_dense_replace", -(10**9)),
    ],
)
def test_a_number_that_the_files_do_not_bear_out_is_refused_not_believed(tmp_path, name, key, value):
    """Without this a config of a thousand bytes costs minutes and gigabytes."""
    (tmp_path / "model.safetensors").symlink_to(FIXTURES / "models" / f"{name}_nano" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(NANO_CONFIGS[name] | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key} is|{key} {value}|cannot be a model with experts"):
        check_model(tmp_path)


def test_a_number_with_too_many_digits_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1' + "0" * 5000 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_config(tmp_path)


# ------------------------------------------------------------------ keys of a RoPE block

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("block", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (YARN | {"attn_factor": 1.0}, r"attn_factor = 1\.0 is not supported; for 'yarn' these are: rope_type"),
        (YARN | {"extrapolation_factor": 1.0}, "extrapolation_factor = 1"),
        (YARN | {"mscale_all_dims": 1.0}, "mscale_all_dims = 1"),
        (YARN | {"low_freq_factor": 1.0}, "low_freq_factor = 1"),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast = 32 is not supported; for 'llama3'"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "default", "factor": 2.0}, "factor = 2"),
        (YARN | {"type": "linear"}, "type = 'linear' is not supported; allowed: 'yarn'"),
        (YARN | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ],
)
def test_an_unknown_key_of_a_rope_block_is_refused_by_name(block, rope, message):
    config = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    with pytest.raises(CheckpointError, match=message):
        read_config({**config, block: rope})


@pytest.mark.parametrize(("rope", "keys"), [(YARN, ("factor", "beta_fast", "beta_slow", "rope_theta")),
                                            (LLAMA3, ("factor", "low_freq_factor", "high_freq_factor"))])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1.5])
def test_a_number_that_must_be_positive_is_refused_by_name(rope, keys, value):
    for key in keys:
        with pytest.raises(CheckpointError, match=f"{key} is {value}.*must be above 0"):
            read_config({**CONFIG, "rope_parameters": {**rope, key: value}})
    with pytest.raises(CheckpointError, match=f"rms_norm_eps is {value}.*must be above 0"):
        read_config({**CONFIG, "rms_norm_eps": value})


def test_the_band_of_llama3_has_a_width():
    for low, high in ((4.0, 4.0), (8.0, 4.0)):
        with pytest.raises(CheckpointError, match=f"low_freq_factor {low} must be below high_freq_factor {high}"):
            read_config({**CONFIG, "rope_parameters": {**LLAMA3, "low_freq_factor": low, "high_freq_factor": high}})


@pytest.mark.parametrize("rope", [YARN, LLAMA3, YARN | {"truncate": False, "beta_fast": 16, "type": "yarn"}])
def test_null_in_a_rope_block_is_like_no_key(rope):
    nulls = dict.fromkeys(("attention_factor", "mscale", "attn_factor", "partial_rotary_factor"))
    assert read_rope({"rope_parameters": rope | nulls}, 64) == read_rope({"rope_parameters": rope}, 64)


# ------------------------------------------------------------------ drafters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": None}, "block_size is missing"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"dflash_config": {"target_layer_ids": [9], "mask_token_id": 1}}, "names layer 9, the target has 6"),
        ({"dflash_config": {"target_layer_ids": 3, "mask_token_id": 1}}, "target_layer_ids is 3"),
        ({"dflash_config": {"target_layer_ids": ["3"], "mask_token_id": 1}}, "names layer '3'"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 9999}}, "mask_token_id 9999"),
        ({"dflash_config": {"mask_token_id": 1, "input_embedding_scale": 2.0}}, "input_embedding_scale = 2"),
        (NANO_CONFIGS["kimi_k2"], "model_type 'deepseek_v3' is not supported for a drafter"),
    ],
)
def test_a_draft_config_that_cannot_work_is_refused_by_key(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_draft_config({**DRAFT, **change})


@pytest.mark.parametrize(
    ("draft", "target", "ids"), [(1, 36, (18,)), (3, 6, (1, 2, 3)), (5, 36, (1, 9, 17, 25, 33)), (2, 7, (1, 4))]
)
def test_target_layers_are_spread_evenly_where_not_given(draft, target, ids):
    assert default_layer_ids(draft, target) == ids


def test_a_draft_layer_with_a_window_looks_backwards_only_unless_told_otherwise():
    windowed = {**DRAFT, "use_sliding_window": True, "sliding_window": 32}
    windowed |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    assert read_draft_config(windowed).causal == (True, True, False)
    assert read_draft_config({**windowed, "is_causal": False}).causal == (False,) * 3
    assert read_draft_config(windowed).layers.windows == (32, 32, None)
    assert read_draft_config(DRAFT).causal == (False,) * 3


def test_block_mask_by_hand():
    assert block_mask(3, 2, None, causal=False).all()
    assert block_mask(3, 2, 2, causal=False).astype(int).tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert block_mask(3, 2, 2, causal=True).astype(int).tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert block_mask(1, 3, None, causal=True).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_the_rope_amplitude_of_a_drafter_can_be_set():
    target = Model.load(PAIR / "target")
    drafters = [Drafter.load(PAIR / "draft", target, amplitude) for amplitude in (None, 1.0, 1.4159)]
    features = np.ones((4, drafters[0].weights["fc.weight"].shape[1]), np.float32)
    default, same, other = (drafter.draft(1, features, drafter.new_cache()) for drafter in drafters)
    assert_equal(same, default, name="amplitude 1")
    assert np.abs(other - default).max() > 1e-3


@pytest.mark.parametrize("change", [{"vocab_size": 300}, {"num_target_layers": 7}])
def test_a_drafter_of_another_target_is_refused(tmp_path, change):
    target = Model.load(PAIR / "target")
    shutil.copytree(PAIR / "draft", tmp_path / "draft")
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**DRAFT, **change}))
    with pytest.raises(CheckpointError, match=r"the drafter is made for .* the target has \(256, 260, 6\)"):
        Drafter.load(tmp_path / "draft", target)


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_checkpoint_may_store_its_head_only_as_a_copy_of_the_embedding(tmp_path, same):
    tensors = load_file(PAIR / "target" / "model.safetensors")
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_config(PAIR / "target") | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if same:
        assert "lm_head.weight" not in Model.load(tmp_path).weights
    else:
        with pytest.raises(
            CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight is not the embedding"
        ):
            Model.load(tmp_path)


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model."])
@pytest.mark.parametrize("names", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_a_tied_matrix_is_found_under_either_name(tmp_path, names, prefix):
    tensors = load_file(FIXTURES / "models" / "qwen3_nano" / "model.safetensors")
    matrix = tensors.pop("model.embed_tokens.weight")
    tensors = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    head = {"embed_tokens": prefix + "embed_tokens.weight", "lm_head": prefix.removesuffix("model.") + "lm_head.weight"}
    save_file(tensors | {head[name]: matrix.copy() for name in names}, tmp_path / "model.safetensors")
    config = NANO_CONFIGS["qwen3"]
    if prefix.startswith("language_model"):
        config = {"model_type": "kimi_k25", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, record = Model.load(tmp_path), expected("qwen3_nano")
    logits = model.forward(record["input_ids"], np.arange(90) - 1, model.new_cache()).logits
    assert_close(logits, record["logits"], atol=1e-4, name="logits")
    assert "lm_head.weight" not in model.weights


def test_a_head_of_its_own_is_still_asked_for(tmp_path):
    tensors = load_file(PAIR / "target" / "model.safetensors")
    for missing, kept in (("lm_head.weight", "embed"), ("model.embed_tokens.weight", "head")):
        folder = tmp_path / kept
        folder.mkdir()
        save_file({name: value for name, value in tensors.items() if name != missing}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(CheckpointError, match=rf"missing {missing.removeprefix('model.')}"):
            Model.load(folder)


def test_two_spellings_of_rope_that_differ_are_refused():
    config = load_config(PAIR / "target") | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling say different things"):
        read_config(config)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400])
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        read_config(load_config(PAIR / "target") | {"rms_norm_eps": value})


def test_a_config_nested_without_end_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError):
        load_config(tmp_path)


# ------------------------------------------------------------------ weights and cache


def test_loading_tells_its_progress():
    names = []
    model = Model.load(PAIR / "target", progress=names.append)
    assert sorted(names) == sorted(model.weights)


def test_bf16_weights_load_exactly():
    weights = Model.load(PAIR / "target").weights
    for stored, tensor in read_tensors(catalogue(PAIR / "target")):
        loaded = weights[stored.name.removeprefix("model.")].astype(ml_dtypes.bfloat16)
        assert_equal(loaded.view(np.uint16), tensor.view(np.uint16), name=stored.name)


def test_cache_grows_and_keeps_what_was_committed():
    rng, cache = np.random.default_rng(0), KVCache(layers=2, heads=3, width=4)
    kept = []
    for n in (1, 70, 3, 200):
        new = [rng.standard_normal((3, n, 4), dtype=np.float32) for _ in range(2)]
        rows = np.sort(rng.permutation(n)[: n // 2 + 1])
        cache.commit(new, rows)
        kept.append([of_pass[:, rows] for of_pass in new])
    for layer in range(2):
        expected_rows = np.concatenate([step[layer] for step in kept], axis=1)
        assert_equal(cache.layer(layer), expected_rows, name=f"layer {layer}")


def test_cache_refuses_a_pass_of_another_model():
    with pytest.raises(ValueError, match="the pass has 1 layers of rows, the cache 2"):
        KVCache(2, 1, 4).commit([np.zeros((1, 1, 4), np.float32)], [0])


def test_latent_attention_caches_one_small_row_a_position():
    cache = Model.load(FIXTURES / "pycode_deepseek_v3" / "target").new_cache()
    assert cache.layer(0).shape == (1, 0, 64 + 16)  # 4 heads of (48 + 32) values without it


def test_random_engines_cover_every_family():
    kinds = {
        (bool(c.latent), bool(c.experts)) for c in (random_engine(seed).target.config for seed in range(len(FAMILIES)))
    }
    assert kinds == {(False, False), (False, True), (True, True)}
