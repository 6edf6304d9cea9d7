"""Kimi's tokenizer against Moonshot's own code and the package tiktoken, as recorded, and damaged files."""

import base64
import hashlib
import json
import random
import shutil

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.chat import load_chat, load_tokenizer
from ddtree.checkpoint import CheckpointError
from ddtree.kimi_tokenizer import KIMI_WORDS, cut_text, kimi_tokenizer, read_ranks
from ddtree.stream import stop_at
from random_models import FIXTURES

KIMI = FIXTURES / "tokenizers" / "kimi"
RECORD = json.loads((KIMI.parent / "recorded.json").read_text(encoding="utf-8"))
TOKENIZER = kimi_tokenizer(KIMI)
RANKS = read_ranks(KIMI / "tiktoken.model")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(KIMI, tmp_path, dirs_exist_ok=True)
    return tmp_path


def edit(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ------------------------------------------------------------------ as Moonshot's code does it


def test_every_recorded_text_has_the_same_ids():
    assert len(RECORD["texts"]) == len(RECORD["kimi"]["ids"]) >= 200
    for text, ids in zip(RECORD["texts"], RECORD["kimi"]["ids"], strict=True):
        assert TOKENIZER.encode(text).ids == ids, repr(text)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == ids


def test_ids_have_the_same_text():
    for text, ids, shown in zip(RECORD["texts"], RECORD["kimi"]["ids"], RECORD["kimi"]["shown"], strict=True):
        assert TOKENIZER.decode(ids) == shown, repr(text)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    for ids, text in RECORD["kimi"]["random"]:
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text, ids


@pytest.mark.parametrize("index", range(len(RECORD["long"])))
def test_long_runs_are_cut_where_they_cut_them(index):
    unit, count = RECORD["long"][index]
    ids = TOKENIZER.encode(unit * count).ids
    length, digest = RECORD["kimi"]["long"][index]
    assert len(ids) == length and hashlib.sha256(json.dumps(ids).encode()).hexdigest() == digest


def test_some_of_the_long_texts_are_cut():
    assert sum(len([*cut_text(unit * count)]) > 1 for unit, count in RECORD["long"]) >= 4


def test_the_words_are_the_published_ones():
    assert RECORD["kimi"]["pattern"] == KIMI_WORDS


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example(text="<|im_end|>中a")
@settings(max_examples=300)
def test_any_text_comes_back_and_has_the_ids_of_tiktoken(text):
    special = {token.content: number for number, token in TOKENIZER.get_added_tokens_decoder().items()}
    theirs = tiktoken.Encoding("k", pat_str=RECORD["kimi"]["pattern"], mergeable_ranks=RANKS, special_tokens=special)
    ids = TOKENIZER.encode(text).ids
    assert ids == theirs.encode(text, allowed_special="all")
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(ids=st.lists(st.integers(0, 895), max_size=12))
@settings(max_examples=300)
def test_any_ids_have_the_text_of_tiktoken(ids):
    special = {token.content: number for number, token in TOKENIZER.get_added_tokens_decoder().items()}
    theirs = tiktoken.Encoding("k", pat_str=KIMI_WORDS, mergeable_ranks=RANKS, special_tokens=special)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@given(text=st.text(st.sampled_from("a \n"), max_size=40), run=st.integers(1, 5), longest=st.integers(5, 20))
def test_a_cut_text_is_the_text_with_short_runs(text, run, longest):
    parts = list(cut_text(text, longest, run))
    assert "".join(parts) == text
    for part in parts:
        kinds = "".join("s" if letter.isspace() else "x" for letter in part)
        assert len(part) <= longest and "s" * (run + 1) not in kinds and "x" * (run + 1) not in kinds


# ------------------------------------------------------------------ special tokens, ends, templates


def test_the_special_tokens_are_theirs():
    added = TOKENIZER.get_added_tokens_decoder()
    assert {token.content: number for number, token in added.items()} == RECORD["kimi"]["special"]


def test_special_tokens_have_their_ids_and_are_hidden_if_listed_as_special():
    assert [TOKENIZER.token_to_id(text) for text in ("[BOS]", "<|im_end|>", "[PAD]", "nothing")] == [
        640,
        642,
        895,
        None,
    ]
    assert TOKENIZER.decode([640, 97, 642, 662, 645, 98]) == "a<think><|reserved_token_645|>b"
    assert TOKENIZER.decode([97, 896, 5_000]) == "a"


@pytest.mark.parametrize("text", ["<|im_end|>", "x<|im_end|>", "<think>", "<|reserved_token_645|>"])
def test_a_special_token_stops(text):
    ids = TOKENIZER.encode(f"abx{text}yz").ids
    rule = stop_at([text], TOKENIZER)
    at = next(count for count in range(1, len(ids) + 1) if rule(ids[:count]))
    assert TOKENIZER.decode(ids[:at], skip_special_tokens=False).endswith(text)


TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}{{ eos_token }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]


def test_a_conversation_has_the_ids_of_its_marks(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = load_chat(folder).render([{"role": "user", "content": "[BOS]中"}])
    assert text == "<|im_user|>user<|im_middle|>[BOS]中<|im_end|>[EOS]"
    ids = load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert ids[0] == 643 and ids[-2:] == [642, 641] and 657 in ids and 640 in ids


def test_tools_are_given_as_kimi_gives_them(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = '[{"function":{"description":"d","name":"f"},"type":"function"}][EOS]'
    assert load_chat(folder).render([], tools=TOOLS) == text
    (folder / "chat_template.jinja").write_text("{% if tools_ts_str %}{{ tools_ts_str }}{% endif %}" + TEMPLATE)
    with pytest.raises(CheckpointError, match="takes tools as TypeScript, which is not made here"):
        load_chat(folder).render([], tools=TOOLS)
    assert load_chat(folder).render([], tools=TOOLS, tools_ts_str="") == text
    assert load_chat(folder).render([], tools=TOOLS, tools_ts_str="ts") == "ts" + text
    assert load_chat(folder).render([]) == "[EOS]"


def test_no_program_of_the_folder_is_run(folder):
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('run')")
    (folder / "tiktoken.py").write_text("raise SystemExit('run')")
    assert load_tokenizer(folder).encode("ab").ids == TOKENIZER.encode("ab").ids


# ------------------------------------------------------------------ damaged files

LINES = (KIMI / "tiktoken.model").read_bytes().splitlines(keepends=True)


def changed(line, content):
    return b"".join([*LINES[:line], content, *LINES[line + 1 :]])


DAMAGES = {
    "empty": (b"", "no token is the byte 0x00; all 256 must be there"),
    "a line that is no base64": (changed(9, b"!!!! 9\n"), "line 10: b'!!!! 9' is not a token in base64"),
    "base64 without its end": (changed(300, b"YWE 300\n"), "line 301: .* is not a token in base64"),
    "a line without a rank": (changed(5, b"BQ==\n"), "line 6: b'BQ==' is not a token in base64, a space and its rank"),
    "a line of three": (changed(5, b"BQ== 5 5\n"), "line 6: "),
    "a rank that is a word": (changed(5, b"BQ== five\n"), "line 6: .*the rank b'five' is no number"),
    "a rank below zero": (changed(5, b"BQ== -5\n"), "line 6: .*the rank b'-5' is no number"),
    "a rank with a point": (changed(5, b"BQ== 5.0\n"), "line 6: .* is no number"),
    "an endless rank": (changed(5, b"BQ== " + b"9" * 5000 + b"\n"), "line 6: .* is no number"),
    "a rank twice": (changed(639, b"enp6eno= 5\n"), "line 640: its rank stands in line 6 too"),
    "a token twice": (changed(639, b"BQ== 639\n"), "line 640: its token stands in line 6 too"),
    "a line that is missing": (changed(400, b""), "no line has rank 400; 639 tokens must have ranks 0 to 638"),
    "a rank too large": (changed(639, b"enp6eno= 999999999\n"), "no line has rank 639"),
    "a byte that is missing": (changed(65, b"enp6eno= 65\n"), "no token is the byte 0x41"),
    "cut in a line": (b"".join(LINES)[:4003], "line 432: .* is not a token in base64"),
    "cut after a line": (b"".join(LINES[:200]), "no token is the byte 0xc8; .* cut short"),
    "zeros": (b"\x00" * 500, "line 1: "),
    "JSON": (b'{"model": {}}\n', "line 1: "),
    "a file of git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 28\n", "line 1: b'version"),
    "the other format": ((KIMI.parent / "llama" / "tokenizer.model").read_bytes(), "line 2: "),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_rank_file_is_one_error_that_names_the_place(folder, name):
    content, message = DAMAGES[name]
    (folder / "tiktoken.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / 'tiktoken.model'}") and len(str(caught.value)) < 400


@pytest.mark.parametrize("seed", range(40))
def test_a_rank_file_with_random_changes_is_read_whole_or_refused(folder, seed):
    rng, content = random.Random(seed), bytearray(b"".join(LINES))
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(2)] = rng.randbytes(rng.randrange(3))
    (folder / "tiktoken.model").write_bytes(content)
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError as error:
        assert "tiktoken.model" in str(error)
    else:
        assert tokenizer.decode(tokenizer.encode("Hello 中文").ids) == "Hello 中文"


def test_lines_may_stand_in_any_order(folder):
    lines = LINES[:]
    random.Random(0).shuffle(lines)
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    assert load_tokenizer(folder).encode(RECORD["texts"][80]).ids == RECORD["kimi"]["ids"][80]


LISTED = json.loads((KIMI / "tokenizer_config.json").read_text())["added_tokens_decoder"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class 'QWenTokenizer' with tiktoken.model is not supported"),
        ({"added_tokens_decoder": None}, "names the special token '.*' without its id in added_tokens_decoder"),
        ({"added_tokens_decoder": {}}, "without its id in added_tokens_decoder"),
        ({"added_tokens_decoder": LISTED | {"5": {"content": "<x>"}}}, r"gives '<x>' the id 5; .* ids 640 to 895"),
        ({"added_tokens_decoder": LISTED | {"896": {"content": "<x>"}}}, r"gives '<x>' the id 896"),
        (
            {"added_tokens_decoder": LISTED | {"645": {"content": "[BOS]"}}},
            r"'\[BOS\]' is the token 640 and the .* 645",
        ),
        ({"added_tokens_decoder": LISTED | {"645": {"content": "a"}}}, "'a' is the token 97 and the special token 645"),
        ({"added_tokens_decoder": LISTED | {"645": [5]}}, r"'645': \[5\] is no token with its id"),
        ({"bos_token": "<s>"}, "names the special token '<s>' without its id"),
        ({"additional_special_tokens": ["<|x|>"]}, r"names the special token '<\|x\|>' without its id"),
    ],
)
def test_special_tokens_that_do_not_fit_are_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_a_folder_without_its_list_of_special_tokens_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"names the special token '\[BOS\]' without its id"):
        load_tokenizer(folder)


def test_a_token_of_other_bytes_is_no_text_but_a_token(folder):
    ranks = [*LINES[:-1], base64.b64encode(b"\xe9\xbe") + b" 639\n"]
    (folder / "tiktoken.model").write_bytes(b"".join(ranks))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([639]) == "�" and tokenizer.decode([639, 0x98]) == "龘"
