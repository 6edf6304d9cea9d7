"""Tokenizers of model folders, held against what Hugging Face transformers made of the same files."""

import json
import os
import shutil
import sys

import pytest
from tokenizers import Tokenizer

from ddtree.chat import load_chat, load_tokenizer
from ddtree.checkpoint import CheckpointError
from ddtree.tokenizer import folder_tokenizer, read_special_tokens
from random_models import FIXTURES, PAIR

RECORD = json.loads((FIXTURES / "chat.json").read_text(encoding="utf-8"))
TEXT = "def add(a, b):\n    return a + b"


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


# ------------------------------------------------------------------ recorded folders


@pytest.mark.parametrize("case", RECORD["folders"], ids=range(len(RECORD["folders"])))
def test_a_folder_gives_the_ids_text_and_template_that_transformers_gives(tmp_path, case):
    """Who names which special token differs from folder to folder, and so does a stored truncation."""
    tokenizer = load_tokenizer(write(tmp_path, case["files"]))
    ids = tokenizer.encode(RECORD["text"]).ids
    assert ids == case["ids"]
    assert tokenizer.decode(ids) == case["text"]
    assert load_chat(tmp_path).render(RECORD["messages"][:1]) == case["rendered"]


def test_the_recorded_folders_use_every_file_and_state():
    files = [case["files"] for case in RECORD["folders"]]
    for name in ("special_tokens_map.json", "added_tokens.json"):
        assert sum(name in names for names in files) >= 10
    assert sum("added_tokens_decoder" in names["tokenizer_config.json"] for names in files) >= 8
    assert sum(names["tokenizer.json"]["truncation"] is not None for names in files) >= 10


@pytest.mark.parametrize("case", RECORD["padding"], ids=["length", "multiple", "left"])
def test_stored_padding_fills_nothing_up_and_names_its_token(tmp_path, case):
    assert case["files"]["tokenizer.json"]["padding"] is not None
    tokenizer = load_tokenizer(write(tmp_path, case["files"]))
    assert tokenizer.encode(RECORD["text"]).ids == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    assert load_chat(tmp_path).render(RECORD["messages"][:1]) == case["rendered"]


@pytest.mark.parametrize("case", RECORD["defaults"]["cases"], ids=range(len(RECORD["defaults"]["cases"])))
def test_roles_that_nobody_names_are_those_of_the_class(tmp_path, case):
    config = case["config"] | {"chat_template": RECORD["defaults"]["template"]}
    stored = RECORD["defaults"]["tokenizers"][case["tokenizer"]]
    write(tmp_path, {"tokenizer.json": stored, "config.json": {"model_type": case["model"]}})
    write(tmp_path, {"tokenizer_config.json": config})
    assert load_chat(tmp_path).render(RECORD["messages"][:1]) == case["rendered"]


def test_a_token_that_only_the_class_names_gets_no_new_id(tmp_path):
    stored = RECORD["defaults"]["tokenizers"]["pieces"]
    stored = stored | {"added_tokens": []}
    write(tmp_path, {"tokenizer.json": stored, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.token_to_id(text) for text in ("<unk>", "<s>", "</s>")] == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("<s>ab</s>").ids) == "ab"
    write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}})
    assert load_tokenizer(tmp_path).token_to_id("<|endoftext|>") is None


# ------------------------------------------------------------------ stored states


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 8},
        {"max_length": 8, "direction": "left"},
        {"max_length": 8, "stride": 3, "strategy": "only_first"},
        {"max_length": 1},
    ],
)
def test_stored_truncation_cuts_nothing(tmp_path, options):
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    tokenizer.enable_truncation(**options)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert folder_tokenizer(tmp_path).encode(TEXT).ids == list(TEXT.encode())
    assert folder_tokenizer(tmp_path).truncation is None and folder_tokenizer(tmp_path).padding is None


# ------------------------------------------------------------------ special tokens in other files


@pytest.fixture
def folder(tmp_path):
    """A byte tokenizer with three special tokens, 256 to 258."""
    (tmp_path / "tokenizer.json").write_bytes((PAIR / "target" / "tokenizer.json").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("files", "roles"),
    [
        ({"special_tokens_map.json": {"bos_token": "<|bos|>"}}, {"bos_token": "<|bos|>"}),
        (
            {
                "tokenizer_config.json": {"bos_token": "<|mask|>", "eos_token": "<|eos|>"},
                "special_tokens_map.json": {"bos_token": {"content": "<|bos|>", "lstrip": False}},
            },
            {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        ),
        (
            {
                "tokenizer_config.json": {"bos_token": "<|mask|>", "added_tokens_decoder": {}},
                "special_tokens_map.json": {"bos_token": "<|bos|>"},
            },
            {"bos_token": "<|mask|>"},
        ),
        ({"special_tokens_map.json": {"pad_token": None, "add_bos_token": True}}, {}),
        ({"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<i>"}}}, {"image_token": "<i>"}),
    ],
)
def test_roles_come_from_the_file_that_counts(folder, files, roles):
    write(folder, files)
    assert read_special_tokens(folder).roles == roles


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<tool>": 259}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"259": {"content": "<tool>", "special": True}}}},
        {"tokenizer_config.json": {"additional_special_tokens": ["<tool>"]}},
        {"tokenizer_config.json": {"pad_token": "<tool>"}},
        {"special_tokens_map.json": {"pad_token": {"content": "<tool>"}}},
    ],
)
def test_a_token_of_another_file_is_cut_out_of_the_text(folder, files):
    assert folder_tokenizer(write(folder, files)).encode("a<tool>b").ids == [97, 259, 98]


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"added_tokens.json": {"<tool>": 300}}, "added_tokens.json"),
        ({"added_tokens.json": {"<|bos|>": 259}}, "added_tokens.json"),
        ({"added_tokens.json": {"<a>": 260, "<b>": 259, "<c>": 262}}, "added_tokens.json"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"5": {"content": "<|eos|>"}}}}, "tokenizer_config.json"),
    ],
)
def test_two_files_that_give_a_token_different_ids_are_refused(folder, files, source):
    with pytest.raises(CheckpointError, match=rf"{source} gives '<.*' the id \d+, tokenizer\.json gives it \d+"):
        load_tokenizer(write(folder, files))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens.json": {"<tool>": "x"}}, "'<tool>': 'x' is no token with its id"),
        ({"added_tokens.json": {"<tool>": -1}}, "'<tool>': -1 is no token with its id"),
        ({"added_tokens.json": {"<tool>": True}}, "'<tool>': True is no token"),
        ({"added_tokens.json": [1]}, "holds a list; it must hold a JSON object"),
        ({"special_tokens_map.json": "x"}, "holds a str; it must hold a JSON object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder is \[1\]"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "y"}}}}, "is no token with its id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"1": {"content": 3}}}}, "is no token with its id"),
    ],
)
def test_a_damaged_file_of_special_tokens_is_an_error_that_names_it(folder, files, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(write(folder, files))
    assert next(iter(files)) in str(caught.value)


# ------------------------------------------------------------------ which file counts


@pytest.mark.parametrize("name", ["tekken.json", "vocab.json"])
def test_a_tokenizer_of_another_format_is_named(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match=rf"has no tokenizer\.json, .* \(it has {name}, which is not read\)"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_goes_first_and_two_others_are_refused(folder):
    for name in ("kimi/tiktoken.model", "llama/tokenizer.model"):
        shutil.copy(FIXTURES / "tokenizers" / name, folder)
    assert load_tokenizer(folder).encode("ab").ids == [97, 98]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has tiktoken\.model and tokenizer\.model; keep the one"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model", "tokenizer.model"])
@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_not_opened(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a file; add the file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("package", "name"), [("tiktoken", "kimi"), ("sentencepiece", "llama")])
def test_a_package_that_is_not_here_is_named(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=rf"is read by the package {package}.*pip install 'ddtree\[tokenizers\]'"):
        load_tokenizer(FIXTURES / "tokenizers" / name)
