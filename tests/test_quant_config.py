"""What a quantization_config may say, formats that are named, and whole models with quantised weights."""

import json
import random
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ddtree import checkpoint
from ddtree.check import assert_equal
from ddtree.checkpoint import CheckpointError, catalogue, find_weights, load_config, load_weights, read_tensors
from ddtree.engine import Engine, check_engine
from ddtree.models import Model, check_model
from ddtree.quant import PackedInts, ScaledBytes, foreign_tensors, join_parts, pack_weight, read_quantisation
from ddtree.quant.foreign import METHODS
from deep import DEEP
from random_models import FIXTURES
from test_quant import compressed_config

MODELS = FIXTURES / "models"
TOKENS, PARENTS = [3, 1, 4, 1, 5, 92, 65, 35], [-1, 0, 1, 1, 3, 0, 5, 2]
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def logits_of(folder):
    model = Model.load(folder)
    return model.forward(TOKENS, PARENTS, model.new_cache()).logits, model


def read_raw(folder):
    return {tensor.name: value for tensor, value in read_tensors(catalogue(folder))}


def write_folder(folder, source, quantisation, tensors):
    """The config of a nano model with another quantization_config, and tensors."""
    folder.mkdir(exist_ok=True)
    config = json.loads((MODELS / source / "config.json").read_text())
    config |= {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


# targets


RECORDED = json.loads((FIXTURES / "quant_targets.json").read_text())["cases"]


@pytest.mark.parametrize("case", RECORDED, ids=range(len(RECORDED)))
@pytest.mark.parametrize("wrapper", ["model.", "language_model.model."])
def test_every_module_gets_the_group_that_compressed_tensors_gives_it(case, wrapper):
    groups = {
        f"group_{i}": {"targets": targets, "weights": FOUR | {"group_size": 8 << i}}
        for i, targets in enumerate(case["groups"])
    }
    config = compressed_config("pack", FOUR, ignore=case["ignore"]) | {"config_groups": groups}
    quantised = read_quantisation({"quantization_config": config})
    for module, group in case["modules"].items():
        inside = module.startswith("model.")
        scheme = quantised.scheme(f"{module.removeprefix('model.')}.weight", wrapper if inside else wrapper[:-6])
        assert (scheme.block if scheme else None) == ((1, 8 << group) if group >= 0 else None), module


# keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, r"quantization_config\.fmt = 'e5m2' is not supported; allowed: 'e4m3'"),
        ({"fmt": 4}, r"quantization_config\.fmt = 4"),
        ({"activation_scheme": "sometimes"}, "activation_scheme = 'sometimes' is not supported"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be \[rows, columns\]"),
        ({"weight_block_size": [128, 0]}, "weight_block_size is 0; it must be at least 1"),
        ({"weight_block_size": [2**40, 1]}, "weight_block_size is 1099511627776; it must be at most"),
        ({"weight_block_size": ["128", 128]}, "weight_block_size is '128'; it must be int"),
        ({"weight_block_size": 128}, "weight_block_size is 128; it must be list"),
        ({"scale_fmt": "e5m3"}, "scale_fmt = 'e5m3' is not supported; allowed: 'float', 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({"kv_cache_scheme": "static"}, r"kv_cache_scheme = 'static' is not supported; leave it out"),
        ({"modules_to_convert": ["embed_tokens"]}, r"modules_to_convert = \['embed_tokens'\]"),
        ({"rotation": "hadamard"}, r"quantization_config\.rotation = 'hadamard' is not known; it may change the model"),
    ],
)
def test_a_key_of_fp8_is_followed_or_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_quantisation({"quantization_config": DEEPSEEK | change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scale_fmt": "ue8m0"},
        {"activation_scheme": "static"},
        {"activation_scheme": None, "fmt": None},
        {"modules_to_not_convert": ["lm_head"], "ignored_layers": None, "dequantize": True},
        {"weight_block_size": [1, 32]},
        {"rotation": None, "other": {}},
    ],
)
def test_keys_of_fp8_that_leave_the_weights_alone_are_read(change):
    quantised = read_quantisation({"quantization_config": DEEPSEEK | change})
    assert quantised.scheme("lm_head.weight").block == tuple(change.get("weight_block_size", (128, 128)))


@pytest.mark.parametrize(
    ("form", "weights", "message"),
    [
        ("pack", {"strategy": "tensor_group", "group_size": 16}, "strategy = 'tensor_group' is not supported"),
        ("pack", {"strategy": "channel", "group_size": 64}, "positive group_size goes with strategy 'group' only"),
        ("pack", {"strategy": "group", "group_size": None}, "strategy = 'group' with group_size = None cannot be"),
        ("pack", {"strategy": "block", "group_size": None}, "block_structure is missing"),
        (
            "pack",
            {"strategy": "block", "group_size": None, "block_structure": "8 by 8"},
            "block_structure is '8 by 8'; it",
        ),
        ("pack", {"strategy": "block", "group_size": None, "block_structure": [8, 8]}, "'group' and 'channel' are"),
        ("pack", {"type": "float"}, "type = 'float' is not supported; allowed: 'int'"),
        ("pack", {"num_bits": 5}, "num_bits = 5 is not supported; allowed: 4, 8"),
        ("pack", {"dynamic": True}, "dynamic = True"),
        ("pack", {"actorder": True}, "actorder = True is not supported"),
        (
            "pack",
            {"strategy": "channel", "group_size": -1, "actorder": "group"},
            "actorder = 'group' goes with packed gr",
        ),
        ("int", {"num_bits": 8, "actorder": "group"}, "actorder = 'group' goes with packed groups only"),
        ("float", {}, "type = 'int' is not supported; allowed: 'float'"),
        ("float", {"type": "float", "num_bits": 4}, "num_bits = 4 is not supported; allowed: 8"),
        ("float", {"type": "float", "num_bits": 8, "symmetric": False}, "symmetric = False"),
        ("mxfp4-pack", {}, "format 'mxfp4-pack-quantized': .*, or take a GGUF of the model; read are pack-quantized"),
        ("nvfp4-pack", {}, "format 'nvfp4-pack-quantized'"),
        ("marlin-24", {}, "format 'marlin-24-quantized'"),
    ],
)
def test_a_key_of_compressed_tensors_is_followed_or_refused_by_name(form, weights, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_quantisation({"quantization_config": compressed_config(form, FOUR | weights)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_status": "frozen"}, "quantization_status = 'frozen' is not supported; allowed: 'compressed'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format = 'sparse-24-bitmask'"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head'; it must be list"),
        ({"ignore": [3]}, "ignore names 3; it must hold texts"),
        ({"ignore": ["re:("]}, r"'re:\(' is no regular expression"),
        ({"format": None}, "format is missing"),
        ({"format": "mixed-precision"}, "format 'mixed-precision'"),
        ({"config_groups": {"W4A16": ["Linear"]}}, r"W4A16 is \['Linear'\]; it must be dict"),
        ({"config_groups": None}, "config_groups is missing"),
    ],
)
def test_the_rest_of_a_config_of_compressed_tensors_is_followed_or_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_quantisation({"quantization_config": compressed_config("pack", FOUR) | change})


def test_activations_that_a_gpu_would_round_are_accepted_and_their_scales_not_read():
    group = {"weights": FLOAT8, "input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}
    config = compressed_config("float", FLOAT8) | {
        "config_groups": {"g": group},
        "sparsity_config": {"format": "dense"},
    }
    assert read_quantisation({"quantization_config": config}).unread == ("*.input_scale", "*.input_zero_point")
    group["input_activations"]["dynamic"] = True
    assert read_quantisation({"quantization_config": config}).unread == ()
    with pytest.raises(CheckpointError, match=r"input_activations\.smooth = 1 is not known"):
        group["input_activations"]["smooth"] = 1
        read_quantisation({"quantization_config": config})


def test_a_config_that_says_it_twice_must_say_the_same():
    both = {"quantization_config": DEEPSEEK, "text_config": {"quantization_config": DEEPSEEK}}
    assert read_quantisation(both).schemes
    both["text_config"] = {"quantization_config": DEEPSEEK | {"weight_block_size": [64, 64]}}
    with pytest.raises(CheckpointError, match="quantization_config differs from that of text_config"):
        read_quantisation(both)


def group(weights, **more):
    nulls = dict.fromkeys(("actorder", "block_structure", "group_size"))
    observed = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "symmetric": True}
    return {"targets": ["Linear"], "output_activations": None, "weights": nulls | observed | weights, **more}


def inputs(kind):
    found = {"actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8}
    return found | {"observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": kind}


SAID = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
EXPERTS_ONLY = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
PUBLISHED = {  # facts: what these models' config.json say
    "DeepSeek-V3, Kimi-K2-Instruct": DEEPSEEK,
    "DeepSeek-V3.1": DEEPSEEK | {"scale_fmt": "ue8m0"},
    "Qwen3-FP8": DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "Kimi-K2-Thinking, K2.5": SAID
    | {
        "format": "pack-quantized",
        "ignore": EXPERTS_ONLY,
        "config_groups": {"group_0": group(FOUR, input_activations=None)},
    },
    "W4A16 of llm-compressor": SAID
    | {"format": "pack-quantized", "ignore": ["lm_head"], "global_compression_ratio": 1.9, "version": "0.9.0"}
    | {"sparsity_config": {}, "transform_config": {}}
    | {"config_groups": {"group_0": group(FOUR | {"group_size": 128, "actorder": "weight"}, input_activations=None)}},
    "W8A8 of llm-compressor": SAID
    | {"format": "int-quantized", "ignore": ["lm_head"]}
    | {
        "config_groups": {
            "group_0": group({"num_bits": 8, "type": "int", "strategy": "channel"}, input_activations=inputs("int"))
        }
    },
    "FP8-dynamic of llm-compressor": SAID
    | {"format": "float-quantized", "ignore": ["lm_head"], "global_compression_ratio": None}
    | {"config_groups": {"group_0": group(FLOAT8, input_activations=inputs("float"))}},
    "Llama-3.1-405B-FP8": {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    },
}
BLOCKS = [(128, 128), (128, 128), (128, 128), (1, 32), (1, 128), (1, None), (1, None), (1, None)]


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
@pytest.mark.parametrize(("name", "block"), list(zip(PUBLISHED, BLOCKS, strict=True)))
def test_configs_of_published_models_are_read(name, block, place):
    found = {"quantization_config": PUBLISHED[name]} if place == "text_config" else PUBLISHED[name]
    quantised = read_quantisation({place: found})
    assert quantised.scheme("layers.3.mlp.experts.7.up_proj.weight", "language_model.model.").block == block
    attention = quantised.scheme("layers.3.self_attn.o_proj.weight", "language_model.model.")
    assert (attention is None) == name.startswith("Kimi-K2-Thinking")


# formats that are named


@pytest.mark.parametrize("method", METHODS)
def test_a_format_that_is_not_read_is_named_with_what_to_convert_to(tmp_path, method):
    write_folder(tmp_path, "qwen3_nano", {"quant_method": method, "bits": 4}, {"x": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"or take a GGUF of the model$") as caught:
        check_engine(tmp_path)
    assert all(word in str(caught.value) for word in METHODS[method])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "MLX"),
        ({"quantization_config": {"quant_method": "GPTQ"}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "made-up"}}, "quant_method = 'made-up' is not known; read are compr"),
        ({"quantization_config": {"quant_method": None, "a": 1}}, "quant_method = None is not known"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "is not known"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ"),
    ],
)
def test_other_spellings_of_a_format_are_named_too(tmp_path, config, name):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=name):
        load_config(tmp_path)


def test_the_file_that_modelopt_writes_beside_the_config_is_seen(tmp_path):
    write_folder(tmp_path, "qwen3_nano", None, {"x": np.ones(2, np.float32)})
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match="NVIDIA ModelOpt"):
        load_config(tmp_path)


TENSORS = {
    "GPTQ": ("qweight", "qzeros", "scales", "g_idx"),
    "AWQ or GPTQ": ("qweight", "qzeros", "scales"),
    "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "EXL2": ("q_weight", "q_scale", "q_invperm", "q_groups"),
    "EXL3": ("trellis", "suh", "svh"),
    "MXFP4": ("weight_blocks", "weight_scales"),
    "ModelOpt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "NVFP4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "HQQ": ("W_q", "scale", "zero"),
    "AQLM": ("codes", "codebooks", "scales"),
    "VPTQ": ("indices", "centroids.weight", "centroids"),
    "QuIP#": ("Qidxs", "SU", "SV"),
    "MLX": ("weight", "scales", "biases"),
    "compressed-tensors weights need their quantization_config": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8 weights need their quantization_config": ("weight", "weight_scale_inv"),
    "fp8 or int8 weights need their quantization_config": ("weight", "weight_scale"),
}


@pytest.mark.parametrize("family", ["qwen3_nano", "kimi_k2_nano", "llama_bias_nano"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_folder_whose_config_says_nothing_is_named_by_its_tensors(tmp_path, monkeypatch, name, family):
    tensors = {}
    for key, value in read_raw(MODELS / family).items():
        base = key.removesuffix("weight")
        quantised = key.endswith("proj.weight")
        tensors |= (
            {f"{base}{part}": np.zeros((2, 2), np.int32) for part in TENSORS[name]} if quantised else {key: value}
        )
    write_folder(tmp_path, family, None, tensors)
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=name) as caught:
        check_engine(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("family", sorted(path.name for path in MODELS.iterdir()))
def test_no_model_of_ours_looks_like_another_format(family):
    names = [tensor.name for tensor in catalogue(MODELS / family)]
    assert foreign_tensors(names, lost=False) is None


# whole models


def to_fp8(weight, block):
    """Codes and scales of a matrix, the largest of each block at 448; sizes need not be multiples."""
    rows, columns = weight.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((grid[0] * block[0], grid[1] * block[1]), np.float32)
    padded[:rows, :columns] = np.abs(weight)
    scale = padded.reshape(grid[0], block[0], grid[1], block[1]).max((1, 3)) / np.float32(448)
    spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:rows, :columns]
    return (weight / spread).astype(ml_dtypes.float8_e4m3fn), scale


def fp8_parts(block, ending="_scale_inv", dtype=np.float32):
    def parts(name, weight):
        codes, scale = to_fp8(weight, [by or size for by, size in zip(block, weight.shape, strict=True)])
        scale = scale.astype(dtype)
        return {name: codes, f"{name}{ending}": scale.reshape(-1)[0] if block == (0, 0) else scale}

    return parts


def int8_parts(name, weight):
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    return {name: np.rint(weight / scale).astype(np.int8), f"{name}_scale": scale.astype(ml_dtypes.bfloat16)}


def packed_parts(name, weight):
    packed = pack_weight(weight)
    return {f"{name}_packed": packed.packed, f"{name}_scale": packed.scale, f"{name}_shape": np.array(packed.shape)}


PLAINLY = DEEPSEEK | {"weight_block_size": None}
FORMS = {
    "deepseek": (DEEPSEEK, fp8_parts((128, 128))),
    "small blocks": (DEEPSEEK | {"weight_block_size": [16, 32]}, fp8_parts((16, 32))),
    "odd blocks": (DEEPSEEK | {"weight_block_size": [7, 5]}, fp8_parts((7, 5))),
    "bfloat16 scales": (DEEPSEEK, fp8_parts((128, 128), dtype=ml_dtypes.bfloat16)),
    "one scale": (PLAINLY | {"activation_scheme": "static"}, fp8_parts((0, 0))),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_parts((0, 0), "_scale")),
    "FBGEMM": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_parts((1, 0), "_scale")),
    "float-quantized": (compressed_config("float", FLOAT8), fp8_parts((1, 0), "_scale", ml_dtypes.bfloat16)),
    "int-quantized": (compressed_config("int", {"strategy": "channel"}), int8_parts),
    "pack-quantized": (compressed_config("pack", FOUR), packed_parts),
}


@pytest.mark.parametrize("family", ["deepseek_v3_grouped_nano", "qwen3_nano", "qwen3_moe_nano"])
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_model_gives_the_logits_of_its_dequantised_twin(tmp_path, form, family):
    config, parts = FORMS[form]
    tensors, twin = {}, {}
    for name, value in read_raw(MODELS / family).items():
        quantised = "_proj" in name and value.ndim == 2 and "layers.0.self_attn.o_proj" not in name
        tensors |= parts(name, value.astype(np.float32)) if quantised else {name: value.astype(ml_dtypes.bfloat16)}
        if form == "one scale" and quantised:
            tensors[name.removesuffix("weight") + "activation_scale"] = np.ones((), np.float32)
    write_folder(tmp_path / "quantised", family, config, tensors)
    logits, model = logits_of(tmp_path / "quantised")
    kept = {name: weight for name, weight in model.weights.items() if not isinstance(weight, np.ndarray)}
    stored = {tensor.name.removeprefix("model."): tensor.name for tensor in catalogue(MODELS / family)}
    for name, weight in model.weights.items():
        twin[stored[name]] = weight if isinstance(weight, np.ndarray) else weight.dequantise()
    write_folder(tmp_path / "twin", family, None, twin)
    expected, _ = logits_of(tmp_path / "twin")
    assert_equal(logits, expected, name="logits")
    assert {type(weight) for weight in kept.values()} == {PackedInts if form == "pack-quantized" else ScaledBytes}
    assert len(kept) == sum("_proj" in name for name in twin) - 1
    exact, _ = logits_of(MODELS / family)
    assert 0 < np.abs(logits - exact).max() < np.abs(exact).max()  # fewer bits are not float32, and not noise either


def test_a_quantised_pair_writes_the_text_of_its_dequantised_twin(tmp_path):
    ways = {"target": (compressed_config("pack", FOUR), packed_parts), "draft": (DEEPSEEK, fp8_parts((128, 128)))}
    for part, (config, parts) in ways.items():
        source, tensors, twin = FIXTURES / "pycode_qwen3" / part, {}, {}
        for name, value in read_raw(source).items():
            if "_proj" in name or name == "fc.weight":
                tensors |= (new := parts(name, value.astype(np.float32)))
                scheme = read_quantisation({"quantization_config": config}).scheme(name)
                joined = join_parts(name, scheme, value.shape, {key[len(name) :]: new[key] for key in new})
                twin[name] = joined.dequantise()
            else:
                tensors[name] = twin[name] = value
        for which, content, said in (("quantised", tensors, config), ("twin", twin, None)):
            folder = tmp_path / which / part
            folder.mkdir(parents=True)
            settings = json.loads((source / "config.json").read_text()) | (
                {"quantization_config": said} if said else {}
            )
            (folder / "config.json").write_text(json.dumps(settings))
            save_file(content, folder / "model.safetensors")
    engines = [Engine.load(tmp_path / which / "target", tmp_path / which / "draft") for which in ("quantised", "twin")]
    assert any(isinstance(weight, ScaledBytes) for weight in engines[0].drafter.weights.values())
    results = [engine.generate(list(b"import os\n"), max_new_tokens=24, budget=16) for engine in engines]
    assert results[0].tokens.tolist() == results[1].tokens.tolist()
    assert results[0].tokens_per_round == results[1].tokens_per_round > 1


def test_deepseek_with_a_projection_of_576_rows_has_five_rows_of_scales():
    scheme = read_quantisation({"quantization_config": DEEPSEEK}).scheme("layers.0.self_attn.kv_a_proj_with_mqa.weight")
    assert scheme.parts((576, 7168))["_scale_inv"][0] == ((5, 56),)


# files that cannot be

SHAPES = {"up.weight": (200, 300), "norm.weight": (3,)}


def small_fp8(tmp_path, change, config=DEEPSEEK):
    codes, scale = to_fp8(np.random.default_rng(0).standard_normal((200, 300), dtype=np.float32), (128, 128))
    tensors = {
        "model.up.weight": codes,
        "model.up.weight_scale_inv": scale,
        "model.norm.weight": np.ones(3, np.float32),
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = {name: value for name, value in (tensors | change).items() if value is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    return load_weights(tmp_path, SHAPES, "model.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.up.weight_scale_inv": None}, r"missing up\.weight_scale_inv"),
        (
            {"model.up.weight_scale_inv": np.ones((1, 3), np.float32)},
            r"has shape \(1, 3\), the config asks for \(2, 3\)",
        ),
        (
            {"model.up.weight_scale_inv": np.ones((3, 2), np.float32)},
            r"has shape \(3, 2\), the config asks for \(2, 3\)",
        ),
        ({"model.up.weight_scale_inv": np.ones((), np.float32)}, r"has shape \(\), the config asks for \(2, 3\)"),
        (
            {"model.up.weight_scale_inv": np.ones((2, 3), np.uint8)},
            "weight_scale_inv is U8, allowed are F32, F16, BF16",
        ),
        ({"model.up.weight": None}, r"missing up\.weight$"),
        ({"model.up.weight": np.ones((200, 300), ml_dtypes.float8_e5m2)}, r"model\.up\.weight is F8_E5M2, allowed are"),
        ({"model.up.weight": np.ones((200, 300), np.int8)}, r"model\.up\.weight is I8, allowed are"),
        ({"model.up.weight": np.ones((200, 300), np.float32)}, r"is F32 and has up\.weight_scale_inv beside it"),
        ({"model.up.weight": np.ones((300, 200), ml_dtypes.float8_e4m3fn)}, r"weight has shape \(300, 200\)"),
        ({"model.up.weight_scale": np.ones((2, 3), np.float32)}, r"up\.weight_scale_inv occurs twice, as model\.up"),
        ({"model.up.input_scale": np.ones((), np.float32)}, r"extra model\.up\.input_scale"),
        (
            {"model.norm.weight": np.ones(3, ml_dtypes.float8_e4m3fn)},
            r"model\.norm\.weight is F8_E4M3, allowed are F32",
        ),
        ({"model.norm.weight_scale_inv": np.ones((1, 1), np.float32)}, r"extra model\.norm\.weight_scale_inv"),
    ],
)
def test_fp8_parts_that_do_not_fit_are_named_before_a_weight_is_read(tmp_path, monkeypatch, change, message):
    assert isinstance(small_fp8(tmp_path, {})["up.weight"], ScaledBytes)
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=message):
        small_fp8(tmp_path, change)


@pytest.mark.parametrize("part", ["", "_scale_inv"])
def test_a_value_that_is_no_number_is_named_with_its_tensor(tmp_path, part):
    value = np.ones((200, 300) if part == "" else (2, 3), np.float32)
    value[1, 2] = np.nan
    change = {f"model.up.weight{part}": value.astype(ml_dtypes.float8_e4m3fn) if part == "" else value}
    with pytest.raises(CheckpointError, match=r"up\.weight.*(row 1, column 2|not finite).*the file is damaged"):
        small_fp8(tmp_path, change)


def test_weights_in_several_files_wait_for_their_scales(tmp_path):
    codes, scale = to_fp8(np.random.default_rng(0).standard_normal((200, 300), dtype=np.float32), (128, 128))
    tensors = {"up.weight_scale_inv": scale, "norm.weight": np.ones(3, np.float32), "up.weight": codes}
    index = {}
    for i, (name, value) in enumerate(tensors.items()):
        index[name] = f"model-{i}.safetensors"
        save_file({name: value}, tmp_path / index[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": DEEPSEEK}))
    told = []
    weights = load_weights(tmp_path, SHAPES, progress=told.append)
    assert sorted(told) == sorted(SHAPES)
    assert_equal(weights["up.weight"].dequantise(), ScaledBytes(codes, scale, (128, 128)).dequantise(), name="up")


def test_a_packed_weight_that_is_ignored_is_refused(tmp_path):
    config = compressed_config("pack", FOUR, ignore=["re:.*up"])
    save_file({f"model.{key}": value for key, value in packed_parts("up.weight", np.ones((8, 64), np.float32)).items()},
              tmp_path / "model.safetensors")  # fmt: skip
    for ignore, message in ((["re:.*up"], r"extra model\.up\.weight_packed"), (["lm_head"], None)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config | {"ignore": ignore}}))
        if message is None:
            assert "up.weight_packed" in find_weights(tmp_path, {"up.weight": (8, 64)}, "model.")
            continue
        with pytest.raises(CheckpointError, match=message):
            find_weights(tmp_path, {"up.weight": (8, 64)}, "model.")


# mutated folders

QUANTISED = ("deepseek_v3_fp8_nano", "llama_w4a16_nano", "qwen3_fp8_nano")
KINDS = (np.int8, np.int32, np.uint8, np.float64, ml_dtypes.float8_e5m2)


def change_tensors(tensors, rng):
    """Drop, rename, cut, double or retype one tensor. Nothing of it may load."""
    name = rng.choice(sorted(tensors))
    value = tensors.pop(name)
    match rng.randrange(5):
        case 0:
            return
        case 1:
            tensors[f"{name}x"] = value
        case 2:
            tensors[name] = value[: len(value) - 1] if value.ndim else np.stack([value, value])
        case 3:
            tensors[name], tensors[f"model.{name}"] = value, value
        case 4:
            other = rng.choice([kind for kind in KINDS if value.dtype not in (kind, np.int64)] or [np.float32])
            tensors[name] = np.ones(value.shape).astype(other)


@pytest.mark.parametrize("seed", range(600 if DEEP else 120))
def test_a_folder_with_a_changed_tensor_is_refused_before_a_weight_is_read(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    source = rng.choice(QUANTISED)
    tensors = read_raw(MODELS / source)
    change_tensors(tensors, rng)
    shutil.copy(MODELS / source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=r"missing|extra|has shape|is |occurs twice"):
        check_model(tmp_path)


VALUES = [None, True, False, 0, -1, 1, 2.5, 16, 32, 64, 128, 10**30, "x", "", "int", "float", [], [16, 16], [8, 16], {}]


def places(part):
    """Every object in a JSON document with one of its keys."""
    for key, value in part.items():
        yield part, key
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.parametrize("seed", range(1200 if DEEP else 240))
def test_a_changed_config_is_refused_or_gives_the_same_logits(tmp_path, seed):
    rng = random.Random(seed)
    source = rng.choice(QUANTISED)
    config = json.loads((MODELS / source / "config.json").read_text())
    part, key = rng.choice(list(places({"quantization_config": config["quantization_config"]})))
    part = config if key == "quantization_config" else part
    match rng.randrange(4):
        case 0:
            del part[key]
        case 1:
            part[f"{key}x"] = part.pop(key)
        case _:
            part[key] = rng.choice(VALUES)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(MODELS / source / "model.safetensors")
    try:
        logits, _ = logits_of(tmp_path)
    except CheckpointError as error:
        assert str(error).strip()
    else:
        assert_equal(logits, logits_of(MODELS / source)[0], name="logits")
