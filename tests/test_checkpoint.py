import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ddtree.check import assert_equal
from ddtree.checkpoint import CheckpointError, iterate_tensors, load_config, load_tokenizer, load_weights, take
from ddtree.dflash import Drafter, default_layer_ids, read_draft_config
from ddtree.models import KVCache, Model, read_config
from random_models import PAIR

CONFIG = load_config(PAIR / "target")
DRAFT = load_config(PAIR / "draft")


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
    weights = load_weights(folder, SHAPES, prefix="model.")
    assert_equal(weights["a"], np.arange(6, dtype=np.float32).reshape(2, 3), name="a")
    assert weights["b"].dtype == np.float32


def test_every_problem_of_a_folder_is_listed_at_once(folder):
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, {"a": (3, 2), "c": (1,)}, prefix="model.")
    message = str(caught.value)
    for part in ("model.a has shape (2, 3), the config asks for (3, 2)", "extra b (4,)", "missing c (1,)"):
        assert part in message
    assert len(message.splitlines()) == 4


def test_integer_weights_are_refused(tmp_path):
    save_file({"a": np.ones((2, 3), np.int32), "b": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a is int32, allowed are float32, float16 and bfloat16"):
        load_weights(tmp_path, SHAPES)


def test_a_name_with_and_without_prefix_is_refused(tmp_path):
    save_file(
        {"a": np.ones((2, 3), np.float32), "model.a": np.ones((2, 3), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"a occurs with and without 'model[.]'"):
        load_weights(tmp_path, {"a": (2, 3)}, prefix="model.")


def test_sharded_checkpoint_is_read_by_its_index(tmp_path):
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.full(4, 2, np.float32)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_weights(tmp_path, SHAPES)["b"].tolist() == [2, 2, 2, 2]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model-2\.safetensors"):
        load_weights(tmp_path, SHAPES)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../model.safetensors"}}']
)
def test_a_damaged_index_is_an_error(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        load_weights(folder, SHAPES, prefix="model.")


def test_a_tensor_in_two_shards_is_an_error(tmp_path):
    for part in "12":
        save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / f"model-{part}.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "x": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor a is in another file too"):
        list(iterate_tensors(tmp_path))


def test_a_file_cut_anywhere_is_an_error(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            list(iterate_tensors(folder))


def test_a_folder_without_its_files_names_them(tmp_path):
    for read, file in (
        (load_config, "config.json"),
        (load_tokenizer, "tokenizer.json"),
        (lambda f: list(iterate_tensors(f)), "model.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=f"has no {file}"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ud800"])
def test_a_config_that_is_no_json_object_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError):
        load_config(tmp_path)


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_tokenizer(tmp_path)


def test_bytes_survive_the_tokenizer():
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer.encode("aé\n\x00").ids == [97, 195, 169, 10, 0]
    assert tokenizer.decode(list("tab\t, é, 🙂".encode())) == "tab\t, é, 🙂"
    assert [tokenizer.token_to_id(name) for name in ("<|bos|>", "<|eos|>", "<|mask|>")] == [256, 257, 258]


@pytest.mark.parametrize(("value", "kind"), [(True, int), ("3", int), (3.5, int), (None, int), (1, bool), ("x", float)])
def test_take_refuses_another_kind(value, kind):
    with pytest.raises(CheckpointError, match=r"config\.json: key is"):
        take({"key": value}, "key", kind)


def test_take_reads_an_integer_as_a_float():
    assert take({"rope_theta": 10000}, "rope_theta", float) == 10_000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type 'linear'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "260"}, "vocab_size is '260'"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"eos_token_id": [257, 9999]}, "eos_token_id 9999"),
        ({"head_dim": 63}, "head_dim"),
    ],
)
def test_a_config_that_would_change_the_maths_is_refused_by_key(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**CONFIG, **change})


def test_old_and_new_rope_spellings_are_read():
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    assert read_config(old).rope_theta == 5e5
    assert read_config(CONFIG).rope_theta == 1e6


def test_head_sizes_follow_from_the_config_where_not_given():
    config = {key: value for key, value in CONFIG.items() if key not in ("head_dim", "num_key_value_heads")}
    assert (read_config(config).head_dim, read_config(config).num_key_value_heads) == (64, 4)


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


@pytest.mark.parametrize("change", [{"vocab_size": 300}, {"num_target_layers": 7}])
def test_a_drafter_of_another_target_is_refused(tmp_path, change):
    target = Model.load(PAIR / "target")
    shutil.copytree(PAIR / "draft", tmp_path / "draft")
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**DRAFT, **change}))
    with pytest.raises(CheckpointError, match=r"the drafter is made for .* the target has \(256, 260, 6\)"):
        Drafter.load(tmp_path / "draft", target)


def test_a_tied_checkpoint_may_store_its_head_too(tmp_path):
    shutil.copytree(PAIR / "target", tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    model = Model.load(tmp_path / "target")
    assert "lm_head.weight" not in model.weights


def test_loading_tells_its_progress():
    names = []
    model = Model.load(PAIR / "target", progress=names.append)
    assert sorted(names) == sorted(model.weights)


def test_bf16_weights_load_exactly():
    stored = dict(iterate_tensors(PAIR / "target"))
    weights = Model.load(PAIR / "target").weights
    for name, tensor in stored.items():
        assert_equal(
            weights[name.removeprefix("model.")].astype(ml_dtypes.bfloat16).view(np.uint16),
            tensor.view(np.uint16),
            name=name,
        )


def test_cache_grows_and_keeps_what_was_committed():
    rng, cache = np.random.default_rng(0), KVCache(layers=2, heads=3, head_dim=4)
    kept = []
    for n in (1, 70, 3, 200):
        new = [tuple(rng.standard_normal((2, 3, n, 4), dtype=np.float32)) for _ in range(2)]
        rows = np.sort(rng.permutation(n)[: n // 2 + 1])
        cache.commit(new, rows)
        kept.append([(k[:, rows], v[:, rows]) for k, v in new])
    for layer in range(2):
        for which in range(2):
            expected = np.concatenate([step[layer][which] for step in kept], axis=1)
            assert_equal(cache.layer(layer)[which], expected, name=f"layer {layer}")


def test_cache_refuses_a_pass_of_another_model():
    with pytest.raises(ValueError, match="the pass has 1 layers of keys, the cache 2"):
        KVCache(2, 1, 4).commit([(np.zeros((1, 1, 4), np.float32),) * 2], [0])
