"""SentencePiece files against sentencepiece as transformers' LlamaTokenizer runs it, as recorded, and damaged files."""

import io
import json
import random
import shutil

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.chat import load_chat, load_tokenizer
from ddtree.checkpoint import CheckpointError
from ddtree.gguf_pieces import gguf_pieces, pieces_message
from ddtree.llama_tokenizer import NO_SPACE_IN_FRONT, entries, llama_tokenizer
from ddtree.stream import stop_at
from gguf_writer import write_gguf
from random_models import FIXTURES

LLAMA = FIXTURES / "tokenizers" / "llama"
MODEL = (LLAMA / "tokenizer.model").read_bytes()
RECORD = json.loads((LLAMA.parent / "recorded.json").read_text(encoding="utf-8"))
PIECES = sentencepiece.SentencePieceProcessor(model_proto=MODEL)


def with_config(folder, config, model=MODEL):
    (folder / "tokenizer.model").write_bytes(model)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# ------------------------------------------------------------------ as transformers does it


@pytest.mark.parametrize("case", RECORD["llama"], ids=["legacy", "newer", "no space"])
def test_every_recorded_text_has_the_same_ids(tmp_path, case):
    tokenizer = load_tokenizer(with_config(tmp_path, case["config"]))
    assert len(RECORD["texts"]) == len(case["ids"]) >= 200
    for text, ids in zip(RECORD["texts"], case["ids"], strict=True):
        assert tokenizer.encode(text).ids == ids, repr(text)
    for ids, text in case["random"]:
        assert tokenizer.decode(ids) == text, ids


def test_the_recorded_configs_differ():
    assert len({json.dumps(case["ids"]) for case in RECORD["llama"]}) == len(RECORD["llama"]) == 3


def test_a_converted_tokenizer_differs_for_few_texts_and_only_in_spaces(tmp_path):
    """What `tokenizer.json` made from the same file gives: the number of texts is a fact to know, not a wish."""
    legacy, newer, bare = (len(case["converted"]) for case in RECORD["llama"])
    assert max(legacy, newer, bare) < 24
    for case in RECORD["llama"]:
        tokenizer = load_tokenizer(with_config(tmp_path, case["config"]))
        for index, ids in case["converted"]:
            texts = [tokenizer.decode(found, skip_special_tokens=False) for found in (ids, case["ids"][index])]
            assert texts[0].replace(" ", "") == texts[1].replace(" ", "")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=200)
def test_a_text_without_special_tokens_has_the_ids_of_sentencepiece(text):
    tokenizer = TOKENIZERS["absent"]
    if not any(token.content in text for token in tokenizer.get_added_tokens_decoder().values()):
        assert tokenizer.encode(text).ids == [1, *PIECES.encode(text)]


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (None, {"legacy": True}),
        ({}, {"legacy": True}),
        ({"legacy": None, "add_prefix_space": None, "add_bos_token": None}, {"legacy": True}),
        ({"tokenizer_class": "LlamaTokenizerFast"}, {"legacy": True}),
        ({"legacy": False, "sp_model_kwargs": {}}, {"legacy": False}),
    ],
)
def test_what_is_absent_or_null_is_the_default(tmp_path, config, same):
    a, b = (tmp_path / name for name in "ab")
    a.mkdir(), b.mkdir()
    ours, theirs = load_tokenizer(with_config(a, config)), load_tokenizer(with_config(b, same))
    for text in RECORD["texts"]:
        assert ours.encode(text).ids == theirs.encode(text).ids


TOKENIZERS = {}


@pytest.fixture(autouse=True, scope="module")
def absent(tmp_path_factory):
    TOKENIZERS["absent"] = load_tokenizer(with_config(tmp_path_factory.mktemp("absent"), None))
    return TOKENIZERS["absent"]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [1, 264]),
        ({"add_bos_token": False}, [264]),
        ({"add_eos_token": True}, [1, 264, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [264, 2]),
        ({"bos_token": None}, [264]),
        ({"bos_token": "<tool>"}, [3, 264]),
        ({"add_eos_token": True, "eos_token": {"content": "<s>"}}, [1, 264, 1]),
    ],
)
def test_begin_and_end_are_what_the_config_says(tmp_path, config, ids):
    tokenizer = load_tokenizer(with_config(tmp_path, config))
    assert tokenizer.encode("a").ids == ids
    assert tokenizer.encode("a", add_special_tokens=False).ids == [264]
    assert tokenizer.decode(ids) == "a"


# ------------------------------------------------------------------ special tokens


def test_control_pieces_are_special_and_user_defined_ones_are_shown(absent):
    assert absent.encode("a<tool>b").ids[2] == 3 and absent.encode("a[INST]b").ids[2] == 4
    assert absent.decode([1, 3, 4, 264, 2]) == "[INST] a"
    assert absent.decode([264, 700, 99_999]) == "a"


def test_tokens_of_other_files_are_added(tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 700, "<x>": 701}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|im_start|>"}))
    tokenizer = load_tokenizer(with_config(tmp_path, {"legacy": False}))
    ids = tokenizer.encode("<|im_start|>a<x>").ids
    assert ids[:2] == [1, 700] and ids[-1] == 701 and tokenizer.decode(ids) == "a<x>"
    assert tokenizer.token_to_id("<x>") == 701


@pytest.mark.parametrize("text", ["</s>", "<tool>", "a</s>", "[INST]"])
def test_a_special_token_stops(absent, text):
    ids = absent.encode(f"bca{text}cb", add_special_tokens=False).ids
    rule = stop_at([text], absent)
    at = next(count for count in range(1, len(ids) + 1) if rule(ids[:count]))
    assert absent.decode(ids[:at], skip_special_tokens=False).endswith(text)


def test_a_template_sees_the_tokens_of_the_class(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST] {{ messages[0].content }} [/INST]")
    chat = load_chat(with_config(tmp_path, {"legacy": False}))
    text = chat.render([{"role": "user", "content": "a"}])
    assert text == "<s>[INST] a [/INST]"
    ids = load_tokenizer(tmp_path).encode(text, add_special_tokens=False).ids
    assert ids[:2] == [1, 4] and ids[-1] == 5


def test_text_comes_back_from_bytes(absent):
    for text in ("龘", "a 🙂 b", "\U0010ffff", "tab\tx"):
        assert absent.decode(absent.encode(text).ids) == text
    assert absent.decode([264, 6 + 0xE9]) == "a�"


# ------------------------------------------------------------------ damaged files

STARTS = range(977, len(MODEL), 977)
PART = list(entries(MODEL))
WITHOUT = {
    number: b"".join(bytes([n << 3 | 2]) + size(len(data)) + data for n, data in PART if n != number)
    for number in (1, 2, 3)
    for size in [lambda length: bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])]
}
DAMAGES = {
    "empty": (b"", "it has no pieces and no trainer_spec and no normalizer_spec; is it cut short"),
    "without pieces": (WITHOUT[1], "it has no pieces;"),
    "without trainer_spec": (WITHOUT[2], "it has no trainer_spec;"),
    "without normalizer_spec": (WITHOUT[3], "it has no normalizer_spec;"),
    "ranks": (
        (LLAMA.parent / "kimi" / "tiktoken.model").read_bytes(),
        "holds ranks of tiktoken, as Llama 3's own file",
    ),
    "text": (b"hello world\n", "is no SentencePiece file, or it is damaged: the entry at byte 0 is"),
    "JSON": (b'{"model": {}}', "is no SentencePiece file"),
    "a file of git lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 28\n",
        "is no SentencePiece",
    ),
    "zeros": (b"\x00" * 100, "is no SentencePiece file"),
    "a number without an end": (MODEL + b"\x0a" + b"\xff" * 20, "does not end"),
    "a size beyond the end": (MODEL + b"\x0a\x7f", "the entry at byte .* is cut"),
    "entries that are no pieces": (b"\x0a\x03xyz\x12\x00\x1a\x00", "damaged; the package sentencepiece says"),
    "a piece twice": (MODEL[:16] + MODEL, "damaged; the package sentencepiece says"),
} | {f"cut at {at}": (MODEL[:at], "tokenizer.model is no (whole )?SentencePiece file") for at in STARTS}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, name):
    content, message = DAMAGES[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(with_config(tmp_path, {}, content))
    assert str(tmp_path / "tokenizer.model") in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_cut_between_two_pieces_is_refused_though_the_package_may_read_it(tmp_path):
    pieces = [data for _, data in PART if b"\x18\x06" not in data]  # none of one byte
    short = b"".join(b"\x0a" + bytes([len(data)]) + data for data in pieces[:300])
    assert sentencepiece.SentencePieceProcessor(model_proto=short).get_piece_size() == 300
    with pytest.raises(CheckpointError, match="has no trainer_spec and no normalizer_spec"):
        load_tokenizer(with_config(tmp_path, {}, short))


@pytest.mark.parametrize("seed", range(40))
def test_a_file_with_random_changes_is_read_or_refused(tmp_path, seed):
    rng, content = random.Random(seed), bytearray(MODEL)
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    try:
        tokenizer = load_tokenizer(with_config(tmp_path, {}, bytes(content)))
    except CheckpointError as error:
        assert "tokenizer.model" in str(error)
    else:
        assert isinstance(tokenizer.decode(tokenizer.encode("Hello 中文").ids), str)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "T5Tokenizer"}, "tokenizer_class 'T5Tokenizer' with tokenizer.model is not supported"),
        ({"tokenizer_class": "GemmaTokenizerFast"}, "tokenizer_class 'GemmaTokenizer'"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs = .* is not supported"),
        ({"legacy": "no"}, r"tokenizer_config.json: legacy is 'no'; it must be bool"),
        ({"add_prefix_space": 1}, "add_prefix_space is 1"),
        ({"add_bos_token": "x"}, "add_bos_token is 'x'"),
        ({"added_tokens_decoder": {"5": {"content": "<s>"}}}, "gives '<s>' the id 5, tokenizer.model gives it 1"),
        ({"added_tokens_decoder": {"900": {"content": "<x>"}}}, "gives '<x>' the id 900, tokenizer.model gives it 700"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(with_config(tmp_path, config))


def test_the_space_in_front_is_one_key(tmp_path):
    message = sentencepiece.SentencePieceProcessor(model_proto=MODEL + NO_SPACE_IN_FRONT)
    assert message.encode("a", out_type=str) == ["a"] and PIECES.encode("a", out_type=str) == ["▁a"]


def test_a_model_of_unigrams_is_encoded_by_sentencepiece_too(tmp_path):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(RECORD["texts"][110:]), model_writer=written, model_type="unigram", vocab_size=500,
        byte_fallback=True, normalization_rule_name="identity", num_threads=1, minloglevel=2,
    )  # fmt: skip
    tokenizer = llama_tokenizer(with_config(tmp_path, {}, written.getvalue()))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    for text in ("Hello,  world!", "def f(x):", "中"):
        assert tokenizer.encode(text).ids == [1, *theirs.encode(text)]


def test_the_fixture_folder_is_read(tmp_path):
    shutil.copytree(LLAMA, tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(tmp_path).encode("a").ids == [1, 264]


# ------------------------------------------------------------------ pieces in a GGUF file


def metadata_of(pieces, user_defined=()):
    """The keys that llama.cpp's converter makes of a SentencePiece file."""
    ids = range(pieces.get_piece_size())
    kinds = [
        (pieces.is_unknown(i) and 2)
        or (pieces.is_control(i) and 3)
        or (pieces.is_byte(i) and 6)
        or (i in user_defined and 4)
        or 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


METADATA = metadata_of(PIECES, {4, 5})


def test_a_gguf_file_gives_the_ids_of_the_file_it_was_made_from():
    tokenizer, theirs = gguf_pieces(METADATA), RECORD["llama"][0]["ids"]
    plain = [i for i, text in enumerate(RECORD["texts"]) if "INST]" not in text]
    assert len(plain) > 200
    for i in plain:
        assert tokenizer.encode(RECORD["texts"][i]).ids == theirs[i], repr(RECORD["texts"][i])


def test_every_part_between_special_tokens_gets_a_space_as_in_llama_cpp():
    tokenizer = gguf_pieces(METADATA)
    assert tokenizer.encode("[INST]a</s>a").ids == [1, 4, 264, 2, 264]
    bare = gguf_pieces(METADATA | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("a", add_special_tokens=False).ids == list(
        sentencepiece.SentencePieceProcessor(model_proto=MODEL + NO_SPACE_IN_FRONT).encode("a")
    )


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [1, 264]),
        ({"add_bos_token": False}, [264]),
        ({"add_eos_token": True}, [1, 264, 2]),
        ({"bos_token_id": 3}, [3, 264]),
        ({"bos_token_id": None}, [264]),
    ],
)
def test_a_gguf_file_begins_and_ends_a_text_as_its_keys_say(tmp_path, changes, ids):
    facts = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_gguf(tmp_path / "x.gguf", {key: value for key, value in facts.items() if value is not None}, {})
    assert load_tokenizer(tmp_path / "x.gguf").encode("a").ids == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens, scores and token_type must be there and of one length"),
        ({"tokens": METADATA["tokenizer.ggml.tokens"][:-1]}, "of one length"),
        ({"scores": None}, "of one length"),
        ({"scores": [0.0]}, "of one length"),
        ({"scores": ["x"] * 700}, "of one length"),
        ({"scores": [float("nan")] * 700}, "of one length"),
        ({"token_type": [1] * 700}, "with one unknown token"),
        ({"token_type": [2] * 700}, "with one unknown token"),
        ({"token_type": [2, *[9] * 699]}, "kinds 1 to 6"),
        ({"token_type": [2, *[6] * 699]}, "the package sentencepiece says"),
        ({"tokens": ["a"] * 700}, "the package sentencepiece says"),
        ({"bos_token_id": 700}, "bos_token_id 700 is no token"),
        ({"add_eos_token": True, "eos_token_id": "x"}, "eos_token_id 'x' is no token"),
    ],
)
def test_a_gguf_vocabulary_that_cannot_be_right_is_refused_by_key(changes, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_pieces(METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def test_the_message_is_the_file_in_all_that_counts():
    ours = dict(enumerate(data for number, data in entries(pieces_message(METADATA, True)) if number == 1))
    theirs = dict(enumerate(data for number, data in PART if number == 1))
    assert len(ours) == len(theirs) == 700
    for i, data in theirs.items():  # a kind of 1 may be written or left out
        assert ours[i] in (data, data + b"\x18\x01")
