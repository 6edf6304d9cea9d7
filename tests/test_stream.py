"""Streamed text is the tokenizer's text, whatever the tokens; and stop texts are found wherever they stand."""

import contextlib
import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ddtree.chat import load_tokenizer
from ddtree.stream import TextStream, settled_text, stop_at
from ddtree.tokenizer import folder_tokenizer
from random_models import FIXTURES, PAIR

BYTES = folder_tokenizer(PAIR / "target")


def pieces(strip=True):
    """A tokenizer as Llama 2's: pieces of text, and 256 bytes for the rest."""
    words = (
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "ab",
        "é",
        "語",
    )
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


PIECES, UNSTRIPPED = pieces(), pieces(strip=False)
BYTE, A, E_ACUTE = 3, 260, 265  # <0x00>, "a" and "é"


KIMI, LLAMA = (load_tokenizer(FIXTURES / "tokenizers" / name) for name in ("kimi", "llama"))


def streamed(tokenizer, rounds):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        stream = TextStream(tokenizer)
        for tokens in rounds:
            stream.write(tokens)
        before = out.getvalue()
        stream.close()
    return before, out.getvalue()


def ended(text):
    return text if text.endswith("\n") else text + "\n"


# ------------------------------------------------------------------ invalid UTF-8


@pytest.mark.parametrize(
    "ids",
    [
        [BYTE + 0x0A, BYTE + 0xE3, A],
        [BYTE + 0x5A, BYTE + 0x80, E_ACUTE],
        [BYTE + 0xFF],
        [BYTE + 0xE3, BYTE + 0x81],
        [BYTE + 0xE3, BYTE + 0x81, BYTE + 0x82, A],
        [A, BYTE + 0xC3, 2, BYTE + 0xA9, A],  # a special token in a run is not shown and does not end it
        [1, 261, BYTE + 0xF0, BYTE + 0x9F, BYTE + 0x99, BYTE + 0x82],
    ],
)
@pytest.mark.parametrize("tokenizer", [PIECES, UNSTRIPPED], ids=["strip", "plain"])
def test_bytes_that_are_no_text_are_streamed_as_the_tokenizer_shows_them(tokenizer, ids):
    for rounds in ([ids], [[token] for token in ids]):
        assert streamed(tokenizer, rounds)[1] == ended(tokenizer.decode(ids))


TOKENS = {
    "bytes": (BYTES, st.one_of(st.integers(0, 255), st.sampled_from([0xC3, 0xA9, 0xE3, 0x81, 0x82, 256, 257]))),
    "pieces": (PIECES, st.one_of(st.integers(0, 266), st.sampled_from([BYTE + 0xC3, BYTE + 0xA9, BYTE + 0xE3]))),
    "unstripped": (UNSTRIPPED, st.integers(0, 266)),
    "kimi": (KIMI, st.one_of(st.integers(0, 896), st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 642, 662]))),
    "llama": (LLAMA, st.one_of(st.integers(0, 700), st.sampled_from([6 + 0xE3, 6 + 0x81, 6 + 0x82, 1, 3]))),
}


@pytest.mark.parametrize("name", TOKENS)
@given(data=st.data())
@settings(max_examples=150)
def test_streamed_text_is_the_text_of_all_tokens(name, data):
    tokenizer, tokens = TOKENS[name]
    rounds = data.draw(st.lists(st.lists(tokens, max_size=6), max_size=30))
    before, whole = streamed(tokenizer, rounds)
    assert whole == ended(tokenizer.decode([token for tokens in rounds for token in tokens]))
    assert whole.startswith(before)


@pytest.mark.parametrize("name", TOKENS)
@given(data=st.data())
@settings(max_examples=100)
def test_settled_text_stays_whatever_comes(name, data):
    tokenizer, tokens = TOKENS[name]
    ids, more = data.draw(st.lists(tokens, max_size=8)), data.draw(st.lists(tokens, max_size=4))
    assert tokenizer.decode(ids + more).startswith(settled_text(ids, tokenizer))


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("seed", range(3))
def test_a_long_text_is_streamed_from_its_last_tokens(name, seed):
    tokenizer, _ = TOKENS[name]
    rng = random.Random(seed)
    words = (
        [65, 32, 0xC3, 0xA9, 0xE3, 10]
        if name in ("bytes", "kimi")
        else [A, 261, 263, E_ACUTE, BYTE + 0xC3, BYTE + 0xA9, 1]
    )
    rounds = [[rng.choice(words) for _ in range(rng.randrange(1, 9))] for _ in range(700)]
    stream = TextStream(tokenizer)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for tokens in rounds:
            stream.write(tokens)
        stream.close()
    assert out.getvalue() == ended(tokenizer.decode([token for tokens in rounds for token in tokens]))
    assert len(stream._ids) < 700


# ------------------------------------------------------------------ stop texts


def stops_after(rule, ids):
    """How many tokens come until the rule says stop, 0 for never."""
    return next((n for n in range(1, len(ids) + 1) if rule(ids[:n])), 0)


@pytest.mark.parametrize(
    ("text", "ids", "count"),
    [
        ("<|eos|>", [97, 257, 98], 2),
        ("<|mask|>", [97, 257, 258, 98], 3),
        ("a<|eos|>", [257, 97, 257, 98], 3),
        ("<|eos|>b", [97, 257, 98], 3),
        ("<|eos|><|mask|>", [257, 97, 257, 258], 4),
        ("ab", [97, 257, 98], 3),  # as shown: special tokens are not there
        ("<|eos|>", [*b"<|eos|>"], 7),  # the same text, written in letters
        ("eos", [97, 257, 98], 0),  # never shown, so no part of it can stop a text
        ("|>", [97, 257, 98], 0),
        ("é", [0xC3, 0xA9], 2),
        ("�", [0xC3, 97], 1),
    ],
)
def test_a_stop_text_is_found_among_special_tokens_and_in_what_is_shown(text, ids, count):
    assert stops_after(stop_at([text], BYTES), ids) == count


@pytest.mark.parametrize("text", ["</s>", "ab</s>", "</s>b"])
def test_a_special_token_of_another_tokenizer_stops_too(text):
    ids = [1, 264, 2, 261, 260]
    assert stops_after(stop_at([text], PIECES), ids) == (4 if text.endswith("b") else 3)


def test_a_stop_text_in_a_long_run_of_bytes_is_found_where_it_ends():
    run = [BYTE + byte for byte in "はい、そうです。".encode()]
    rule = stop_at(["です"], PIECES)
    assert stops_after(rule, [A, *run, A]) == 1 + len("はい、そうです".encode())


def test_special_tokens_in_between_do_not_hide_a_stop_text():
    assert stops_after(stop_at(["stop"], BYTES), [*b"st", *[256] * 50, *b"op", 97]) == 54


def test_any_of_several_texts_stops_and_none_makes_no_rule():
    rule = stop_at(["xyz", "<|eos|>", "b"], BYTES)
    assert stops_after(rule, [97, 98]) == 2 and stops_after(rule, [97, 257]) == 2 and not rule([97])
    assert stop_at([], BYTES) is None
    with pytest.raises(ValueError, match="--stop needs a text"):
        stop_at(["a", ""], BYTES)


def test_a_token_that_is_added_but_shown_stops_by_its_text():
    tokenizer = pieces()
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    assert stops_after(stop_at(["<tool>"], tokenizer), [A, tokenizer.token_to_id("<tool>"), A]) == 2
