"""Configs of drafters as people publish them: keys in two places, keys that change the maths, missing keys."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.checkpoint import CheckpointError, load_config
from ddtree.dflash import Drafter
from ddtree.dflash_config import draft_keys, read_draft_config
from ddtree.engine import Engine
from ddtree.models import Model
from random_models import PAIR

DRAFT = load_config(PAIR / "draft")
OWN = {"block_size": 16, "num_target_layers": 6, "mask_token_id": 258, "target_layer_ids": [1, 2, 3]}
BARE = {key: value for key, value in DRAFT.items() if key not in (*OWN, "dflash_config")}
PROMPT = list(b"import os\nimport sys\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n\n")


def read(nested=None, **top):
    return read_draft_config({**BARE, **top, "dflash_config": nested})


# ------------------------------------------------------------------ two places


@given(nested=st.sets(st.sampled_from(sorted(OWN))), null=st.booleans())
def test_each_key_may_stand_in_either_place(nested, null):
    inside = {key: value for key, value in OWN.items() if key in nested}
    outside = {key: value for key, value in OWN.items() if key not in nested}
    if null:
        inside, outside = dict.fromkeys(OWN) | inside, dict.fromkeys(OWN) | outside
    assert read(inside, **outside) == read_draft_config(DRAFT)


def test_all_keys_at_the_top_need_no_nested_part():
    assert read_draft_config({**BARE, **OWN}) == read(None, **OWN) == read({}, **OWN) == read_draft_config(DRAFT)


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("block_size", 8, "block_size"),
        ("num_target_layers", 9, "num_target_layers"),
        ("mask_token_id", 3, "mask_token_id"),
        ("target_layer_ids", [0, 5], "target_layer_ids"),
    ],
)
def test_the_nested_one_counts_if_there_are_two(key, value, field):
    expected = tuple(value) if isinstance(value, list) else value
    assert getattr(read({key: value}, **OWN), field) == expected
    assert getattr(read({**OWN, key: value}, **OWN), field) == expected


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_key_in_neither_place_is_asked_for(key):
    rest = {name: value for name, value in OWN.items() if name != key}
    for inside, outside in ((rest, {}), ({}, rest), ({**rest, key: None}, {key: None})):
        with pytest.raises(CheckpointError, match=f"{key} is missing"):
            read(inside, **outside)


@pytest.mark.parametrize(
    ("key", "value"), [("block_size", 10**30), ("block_size", 0), ("num_target_layers", -1), ("mask_token_id", 10**30)]
)
def test_a_number_that_cannot_be_is_refused(key, value):
    with pytest.raises(CheckpointError, match=f"{key} (is )?-?\\d+"):
        read(OWN | {key: value})


@pytest.mark.parametrize("taps", [None, []])
def test_missing_taps_are_asked_for_and_the_usual_rule_is_only_told(taps):
    with pytest.raises(CheckpointError, match=r"target_layer_ids is missing; .*\(often \[1, 2, 3\]\)"):
        read(OWN | {"target_layer_ids": taps})
    with pytest.raises(CheckpointError, match=r"drafter was trained on into dflash_config"):
        read(OWN | {"target_layer_ids": taps, "num_target_layers": None})


@pytest.mark.parametrize("value", [3, "x", [1], True])
def test_a_nested_part_that_is_no_object_is_refused(value):
    with pytest.raises(CheckpointError, match=r"dflash_config is .*; it must be dict"):
        draft_keys({"dflash_config": value})


# ------------------------------------------------------------------ who sees whom

WINDOWED = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 64,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("name", ["causal", "is_causal", "causal_head"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("windows", [{}, WINDOWED])
def test_the_direction_is_read_in_both_places_for_all_layers(name, value, windows):
    assert read(OWN | {name: value}, **windows).causal == (value,) * 3
    assert read(OWN, **windows, **{name: value}).causal == (value,) * 3
    assert read(OWN | {name: value}, **windows, is_causal=not value).causal == (value,) * 3
    assert read(OWN | {name: None}, **windows).causal == ((True, True, False) if windows else (False,) * 3)


def test_two_names_for_the_direction_that_differ_are_refused():
    with pytest.raises(CheckpointError, match="causal and is_causal say different things"):
        read(OWN | {"causal": True, "is_causal": False})
    assert read(OWN | {"causal": True, "is_causal": True}).causal == (True,) * 3


@pytest.mark.parametrize("value", [0, 1, "true", [True]])
def test_a_direction_that_is_no_truth_value_is_refused(value):
    with pytest.raises(CheckpointError, match=r"causal is .*; it must be bool"):
        read(OWN | {"causal": value})


# ------------------------------------------------------------------ keys that change the maths


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("projector_type", "domino"),
        ("attention_mode", "mla"),
        ("head_type", "causal"),
        ("output_multiplier", 0.196),
        ("final_logit_softcapping", 20.0),
        ("input_embedding_scale", 72.0),
        ("attention_value_scale", 0.5),
        ("attention_sink_bias", True),
        ("sample_from_anchor", True),
        ("conv_kernel_size", 2),
        ("selector_rank", 256),
        ("shift_label", True),
        ("fc_layernorm", True),
        ("use_qk_norm", False),
        ("is_neox_style", False),
        ("markov_rank", 8),
        ("dflash_attention_version", 1),
        ("use_swa", True),
        ("draft_vocab_size", 128),
        ("target_hidden_size", 512),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 3]),
    ],
)
def test_a_key_that_changes_the_drafts_is_refused_by_name(key, value, nested):
    keys = {key: value}
    with pytest.raises(CheckpointError, match=f"{key} = "):
        read(OWN | keys) if nested else read(OWN, **keys)


@pytest.mark.parametrize("nested", [True, False])
def test_the_same_keys_with_values_that_change_nothing_are_accepted(nested):
    keys = {
        "projector_type": "dflash",
        "attention_mode": "gqa",
        "output_multiplier": 1.0,
        "final_logit_softcapping": 0.0,
    }
    keys |= {"input_embedding_scale": 1, "sample_from_anchor": False, "conv_kernel_size": 0, "use_qk_norm": True}
    keys |= {"draft_vocab_size": 260, "target_hidden_size": 256, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    keys |= {"use_swa": False, "head_type": None, "mask_token": "<|mask|>", "dflash_attention_version": 2}
    assert (read(OWN | keys) if nested else read(OWN, **keys)) == read_draft_config(DRAFT)


@pytest.mark.parametrize("key", ["gru_hidden_dim", "emb_dim", "rope_theta", "num_hidden_layers", "blocksize"])
def test_a_nested_key_that_nobody_knows_is_refused_by_name(key):
    with pytest.raises(CheckpointError, match=rf"dflash_config\.{key} = 3 is not known"):
        read(OWN | {key: 3})


def test_a_window_that_is_said_twice_is_said_alike():
    assert read(OWN | {"swa_window_size": 64, "use_swa": True}, **WINDOWED).layers.windows == (64, 64, None)
    for key in ("swa_window_size", "sliding_window"):
        with pytest.raises(CheckpointError, match=f"{key} = 32 is not supported; allowed: 64"):
            read(OWN | {key: 32}, **WINDOWED)


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "JetSpecDraftModel", "Qwen3DSparkModel"])
def test_another_architecture_is_refused(name):
    with pytest.raises(CheckpointError, match=f"architectures = .*{name}"):
        read(OWN, architectures=[name])


# ------------------------------------------------------------------ published configs, as facts

PUBLISHED = {  # keys as their authors wrote them; sizes of the drafter's own layers as here
    "Qwen3-8B-DFlash-b16": (
        {"block_size": 16, "num_target_layers": 36},
        {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        {"num_target_layers": 40},
        {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37]},
    ),
    "Qwen3.6-27B-DFlash": (
        {"block_size": 16, "num_target_layers": 64},
        {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    ),
    "Kimi-K2.6-DFlash": (
        {"block_size": 8, "num_target_layers": 61},
        {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_its_authors_mean_it(name):
    top, nested = PUBLISHED[name]
    config = read(nested, vocab_size=248320, **top)
    both = top | nested
    assert (config.block_size, config.mask_token_id) == (both["block_size"], both["mask_token_id"])
    assert config.target_layer_ids == tuple(both["target_layer_ids"])
    assert config.num_target_layers == both["num_target_layers"]


def test_the_next_generation_is_refused_by_its_first_unknown_key():
    nested = {"block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0}
    nested |= {"output_multiplier": 0.196, "selector_rank": 256, "selector_top_k": 16, "mask_token_id": 258}
    nested |= {"target_layer_ids": [1, 13, 25, 37, 49]}
    for architecture in ("DFlash2DraftModel", "DFlashDraftModel"):
        with pytest.raises(CheckpointError, match=r"architectures|output_multiplier"):
            read(nested, architectures=[architecture], num_target_layers=52, is_causal=False)


# ------------------------------------------------------------------ the drafts themselves


@pytest.fixture(scope="module")
def target():
    return Model.load(PAIR / "target")


def drafter(folder, target, config):
    shutil.copytree(PAIR / "draft", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return Drafter.load(folder, target)


def test_the_same_keys_in_other_places_give_the_same_drafts(tmp_path, target):
    first = Engine(target, Drafter.load(PAIR / "draft", target)).generate(PROMPT, 60, 16)
    for i, config in enumerate([{**BARE, **OWN}, {**BARE, "dflash_config": OWN}]):
        config = {key: value for key, value in config.items() if key != "num_target_layers"}
        other = drafter(tmp_path / str(i), target, config)
        result = Engine(target, other).generate(PROMPT, 60, 16)
        assert other.config.num_target_layers == 6
        assert_equal(result.acceptance_lengths, first.acceptance_lengths, name="acceptance lengths")
        assert_equal(result.tokens, first.tokens, name="tokens")


def test_a_nested_direction_changes_the_drafts_as_the_one_at_the_top_does(tmp_path, target):
    features = np.random.default_rng(0).standard_normal((9, 3 * 256), dtype=np.float32)
    spellings = {"none": DRAFT, "top": DRAFT | {"is_causal": True}}
    spellings["nested"] = DRAFT | {"dflash_config": DRAFT["dflash_config"] | {"causal": True}}
    drafts = {}
    for name, config in spellings.items():
        one = drafter(tmp_path / name, target, config)
        drafts[name] = one.draft(100, features, one.new_cache())
    assert_equal(drafts["nested"], drafts["top"], name="logits")
    assert np.abs(drafts["nested"] - drafts["none"]).max() > 0.1


def test_taps_beyond_the_target_are_refused_where_the_config_does_not_say_how_many_layers_it_has(tmp_path, target):
    config = {**BARE, **OWN, "target_layer_ids": [1, 2, 6]}
    del config["num_target_layers"]
    with pytest.raises(CheckpointError, match="the drafter reads target layer 6, the target has 6"):
        drafter(tmp_path / "d", target, config)
