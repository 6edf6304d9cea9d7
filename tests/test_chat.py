import dataclasses
import json
import re

import numpy as np
import pytest

from ddtree.chat import Chat, find_model, gguf_tokenizer, load_chat, load_tokenizer, pre_tokenizer
from ddtree.check import assert_equal
from ddtree.checkpoint import CheckpointError, load_config
from ddtree.engine import Engine
from ddtree.kdtr import load
from ddtree.models import prefill
from gguf_writer import write_gguf
from memory import numbers_from
from random_models import FIXTURES, PAIR, random_drafter

RECORDED = load(FIXTURES / "smollm2.kdtr")
FACTS = RECORDED.metadata
SMOLLM2 = FIXTURES.parent / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="SmolLM2 is not here: `make model` was not run or could not fetch it"
)


@pytest.fixture(scope="module")
def smollm2():
    return Engine.load(SMOLLM2), load_tokenizer(SMOLLM2), load_chat(SMOLLM2)


# SmolLM2 against Hugging Face transformers on the same file


@needs_smollm2
def test_a_page_of_text_gives_the_recorded_token_ids(smollm2):
    ids = np.array(smollm2[1].encode(FACTS["page"]).ids, np.int32)
    assert_equal(ids, RECORDED["page_ids"], name="page")
    assert smollm2[1].decode(ids.tolist(), skip_special_tokens=False) == FACTS["page"]


@needs_smollm2
def test_chat_texts_and_their_token_ids_are_the_recorded_ones(smollm2):
    _, tokenizer, chat = smollm2
    assert chat.render(FACTS["chat"]) == FACTS["chat_text"]
    for i, (prompt, text) in enumerate(zip(FACTS["prompts"], FACTS["prompt_texts"], strict=True)):
        assert chat.render([{"role": "user", "content": prompt}]) == text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert_equal(np.array(ids, np.int32), RECORDED[f"p{i}.prompt"], name=f"prompt {i}")


@needs_smollm2
@pytest.mark.parametrize("i", range(10))
def test_64_greedy_tokens_are_the_recorded_ones(smollm2, i):
    """Logits differ by at most 5e-5 and the smallest recorded margin is 0.0025, so no tie can excuse a difference."""
    margins = RECORDED[f"p{i}.top2"][:, 0] - RECORDED[f"p{i}.top2"][:, 1]
    target = smollm2[0].target
    endless = type(target)(dataclasses.replace(target.config, eos_token_ids=()), target.weights)
    tokens = Engine(endless).generate_autoregressive(RECORDED[f"p{i}.prompt"], 64).tokens
    expected = RECORDED[f"p{i}.tokens"].astype(np.int64)
    if (differs := np.flatnonzero(tokens != expected)).size:
        at = int(differs[0])
        pytest.fail(f"token {at}: ours {tokens[at]}, recorded {expected[at]} with a margin of {margins[at]:.6f}")


@needs_smollm2
def test_logits_are_the_recorded_ones(smollm2):
    target = smollm2[0].target
    logits, _ = prefill(target, RECORDED["p0.prompt"], target.new_cache())
    assert np.abs(logits - RECORDED["p0.prefill_logits"]).max() <= 1e-4  # the acceptance bound of this engine


@needs_smollm2
def test_a_drafter_of_smollm2_changes_no_token(smollm2):
    """A random drafter, so hardly a draft is accepted; sizes, taps, the tied head and its embedding must fit."""
    target = smollm2[0].target
    result = Engine(target, random_drafter(target, np.random.default_rng(0))).generate(RECORDED["p2.prompt"], 12, 7)
    assert len(result.rounds[0].tree) == 8
    assert_equal(result.tokens, RECORDED["p2.tokens"][:12].astype(np.int64), name="tokens")


@needs_smollm2
def test_an_answer_ends_at_its_end_token(smollm2):
    engine, tokenizer, _ = smollm2
    expected = RECORDED["p5.tokens"].tolist()
    result = engine.generate_autoregressive(RECORDED["p5.prompt"], 64)
    assert result.stopped and result.tokens.tolist() == expected[: expected.index(2) + 1]
    assert tokenizer.decode(result.tokens.tolist()) == "The house is old, but the garden is beautiful."


@needs_smollm2
def test_loading_peaks_below_one_gibibyte():
    code = "from ddtree.engine import Engine; engine = Engine.load(sys.argv[1]); print(peak())"
    (peak,) = numbers_from(code, SMOLLM2)
    assert 512 * 2**20 < peak < 2**30, f"{peak / 2**20:.0f} MiB"  # the weights alone are 513 MiB


@needs_smollm2
def test_config_of_smollm2_is_the_published_one():
    config = load_config(SMOLLM2)
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in sizes] == [576, 1536, 30, 9, 3]
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (64, 49152, 1e5)
    # the published end token, and what llama.cpp ends at because of its text: <|endoftext|> and <reponame>
    assert config["tie_word_embeddings"] is True and config["eos_token_id"] == [2, 0, 4]


def test_a_model_that_was_not_fetched_says_how(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "build" / "models" / SMOLLM2.name
    with pytest.raises(
        CheckpointError, match=rf"no file {re.escape(str(file))}, nor in a folder above; run make model"
    ):
        find_model("smollm2")


# tokenizers


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 12 a", ["it", "'s", "Ġ12", "Ġa"]),
        ("gpt-2", "x =  10\n", ["x", "Ġ=", "Ġ", "Ġ10", "Ċ"]),
        # digits are cut out first, so the spaces before one stay together; transformers reading the GGUF misses this
        ("smollm", "x =  10\n", ["x", "Ġ=", "ĠĠ", "1", "0", "Ċ"]),
        ("smollm", "v2.5", ["v", "2", ".", "5"]),
        ("llama-bpe", "I'LL 12345\n\n x", ["I", "'LL", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("llama-bpe", "#tag é (a)", ["#tag", "ĠÃ©", "Ġ(", "a", ")"]),
        ("qwen2", "12 apples\r\n", ["1", "2", "Ġapples", "čĊ"]),
    ],
)
def test_words_are_cut_as_the_family_does(name, text, words):
    assert [word for word, _ in pre_tokenizer(name).pre_tokenize_str(text)] == words


TOY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["Ġ", "a", "b", "ab", "Ġab", "<end>", "<tool>", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3, 4, 3],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
}


def test_control_tokens_are_cut_out_and_skipped_and_user_tokens_stay():
    tokenizer = gguf_tokenizer(TOY)
    ids = tokenizer.encode("ab ab<end>b<tool>").ids
    assert ids == [3, 4, 5, 2, 6]
    assert tokenizer.decode(ids) == "ab abb<tool>"


def test_merges_have_their_order_or_are_left_out_for_whole_words():
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    facts = TOY | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 6}
    facts |= {"tokenizer.ggml.merges": ["b c", "a b"]}
    assert gguf_tokenizer(facts).encode("abc").tokens == ["a", "bc"]
    assert gguf_tokenizer(facts | {"tokenizer.ggml.pre": "llama-bpe"}).encode("abc").tokens == ["abc"]


def test_the_first_token_is_added_where_the_file_says_so():
    tokenizer = gguf_tokenizer(TOY | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 7})
    assert tokenizer.encode("ab").ids == [7, 3]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [3]


@pytest.mark.parametrize(
    ("facts", "ids"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 7}, [7, 3]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [3]),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.bos_token_id": 7}, [3]),
        (
            {
                "tokenizer.ggml.pre": "llama-bpe",
                "tokenizer.ggml.bos_token_id": 7,
                "tokenizer.ggml.add_bos_token": False,
            },
            [3],
        ),
    ],
)
def test_without_a_key_the_cut_into_words_says_whether_a_text_begins(facts, ids):
    assert gguf_tokenizer(TOY | facts).encode("ab").ids == ids


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>", "<|endoftext|>", "</s>", "<|fim_pad|>"])
def test_a_token_that_ends_by_its_text_is_a_control_token_whatever_its_type(end):
    tokenizer = gguf_tokenizer(TOY | {"tokenizer.ggml.tokens": [*TOY["tokenizer.ggml.tokens"][:-1], end],
                                      "tokenizer.ggml.token_type": [1] * 8})  # fmt: skip
    ids = tokenizer.encode(f"ab{end}").ids
    assert ids == [3, 7] and tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(
    ("template", "facts", "rendered"),
    [
        ("hi", {}, "<s>hi"),
        ("{{ bos_token }}hi", {}, "<s>hi"),
        ("hi", {"tokenizer.ggml.add_bos_token": False}, "hi"),
        ("hi", {"tokenizer.ggml.pre": "qwen2"}, "hi"),
        ("hi", {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, "<s>hi"),
    ],
)
def test_a_conversation_of_a_gguf_file_begins_once_as_every_text_of_it_does(tmp_path, template, facts, rendered):
    begin = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 7, "tokenizer.chat_template": template}
    write_gguf(tmp_path / "x.gguf", TOY | begin | facts, {})
    assert load_chat(tmp_path / "x.gguf").render([]) == rendered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 8}, "bos_token_id 8 is no token"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": "x"}, "bos_token_id 'x' is no token"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.tokens, scores and token_type must be there"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model None"),
        ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre 'falcon' is not supported; gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre 'None'"),
        ({"tokenizer.ggml.tokens": ["a"] * 8}, "without a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "without a token twice"),
        ({"tokenizer.ggml.merges": None}, "must be there"),
        ({"tokenizer.ggml.merges": ["a z"]}, "has 'a z', which is not made of tokens"),
        ({"tokenizer.ggml.add_bos_token": True}, "bos_token_id -1 is no token"),
    ],
)
def test_a_tokenizer_that_cannot_be_right_is_refused_by_key(tmp_path, change, message):
    facts = {key: value for key, value in (TOY | change).items() if value is not None}
    write_gguf(tmp_path / "x.gguf", facts, {})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_bytes_survive_the_tokenizer():
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer.encode("aé\n\x00").ids == [97, 195, 169, 10, 0]
    assert tokenizer.decode(list("tab\t, é, 🙂".encode())) == "tab\t, é, 🙂"
    assert [tokenizer.token_to_id(name) for name in ("<|bos|>", "<|eos|>", "<|mask|>")] == [256, 257, 258]


def test_a_missing_or_damaged_tokenizer_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "x.gguf")


# chat templates

HI = [{"role": "user", "content": "Hi <b>é</b>!"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n  {{ m['content'] }}\n{% endfor %}", "  Hi <b>é</b>!\n"),
        ("    {% if true %}\nx\n    {% endif %}\ny", "x\ny"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>é</b>!"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "Hi <b>é</b>!"\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{{ bos_token }}{% if add_generation_prompt %}>{% endif %}{{ nothing }}", "<s>>"),
        ("{{ strftime_now('%Y') | length }}{% if tools is defined %}t{% endif %}", "4t"),  # defined, and none
    ],
)
def test_templates_mean_what_they_mean_to_transformers(template, text):
    assert Chat(template, {"bos_token": "<s>"}).render(HI) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template says: roles must alternate"),
        ("{% if %}", "the chat template says: "),
        ("{{ ''.__class__.mro() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big|range"),
        ("{{ nothing.more }}", "'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "the chat template says"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error(template, message):
    with pytest.raises(CheckpointError, match=message):
        Chat(template, {}).render(HI)


def test_templates_are_found_where_they_live(tmp_path):
    assert load_chat(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}))
    assert load_chat(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}{{ bos_token }}"}]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    assert load_chat(tmp_path).render([]) == "d</s><s>"
    (tmp_path / "chat_template.jinja").write_text("j{{ eos_token }}")
    assert load_chat(tmp_path).render([]) == "j</s>"


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": [{"name": "default"}]}', '{"chat_template": [3]}'])
def test_a_damaged_tokenizer_config_is_an_error(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json or chat_template\.jinja is damaged"):
        load_chat(tmp_path)


def test_a_gguf_template_knows_its_special_tokens(tmp_path):
    facts = {
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}.",
        "tokenizer.ggml.tokens": ["x", "y"],
    }
    facts |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 9}
    write_gguf(tmp_path / "x.gguf", facts, {})
    assert load_chat(tmp_path / "x.gguf").render([]) == "yx."
    write_gguf(tmp_path / "y.gguf", {"tokenizer.ggml.tokens": ["x"]}, {})
    assert load_chat(tmp_path / "y.gguf") is None
