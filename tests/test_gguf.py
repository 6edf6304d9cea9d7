import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.gguf import BLOCK_TYPES, begin_token, decode_blocks, end_tokens, ends_by_text, read_gguf
from ddtree.gguf.types import OTHER_TYPES
from ddtree.kdtr import load
from gguf_writer import HALVES, entry, gguf_bytes, pair, text, write_gguf, write_parts
from random_models import FIXTURES

RECORDED = load(FIXTURES / "quant.kdtr")
BLOCKS = load(FIXTURES / "gguf_blocks.kdtr")
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_gguf_blocks_give_the_values_of_the_gguf_package(name):
    decoded = decode_blocks(RECORDED[f"gguf.{name}.blocks"].reshape(-1), BY_NAME[name])
    assert_equal(decoded, RECORDED[f"gguf.{name}.dequantised"].reshape(-1), name=name)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("F32", "F16", "BF16")])
def test_recorded_blocks_of_every_quantised_type_decode_to_the_bit(name):
    decoded = decode_blocks(BLOCKS[f"{name}.blocks"].reshape(-1), BY_NAME[name])
    assert_equal(decoded, BLOCKS[f"{name}.values"].reshape(-1), name=name)


def decoded_by_the_package(blocks, name):
    """The second opinion: blocks (n, size) uint8 as flat float32."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is the second opinion here")
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(-1).astype(np.float32)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_type_agrees_with_the_gguf_package_on_random_bytes(name):
    kind = BY_NAME[name]
    blocks = np.random.default_rng(3).integers(0, 256, (4096, kind.size), dtype=np.uint8)
    expected = decoded_by_the_package(blocks, name)
    with np.errstate(all="ignore"):
        assert_equal(decode_blocks(blocks.reshape(-1), kind), expected, name=name)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("F32", "F16", "BF16")])
def test_every_type_agrees_with_the_gguf_package_for_scales_of_all_sizes(name):
    # each float16 field of a block takes every 13th bit pattern, both zeros, the ends of the range, infinities and NaN
    kind = BY_NAME[name]
    patterns = np.r_[0:65536:13, 0x8000, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7E00, 0xFBFF, 0xFC00, 0xFFFF]
    rng = np.random.default_rng(4)
    for at in HALVES[name]:
        blocks = rng.integers(0, 256, (len(patterns), kind.size), dtype=np.uint8)
        blocks[:, at : at + 2] = patterns.astype("<u2").view(np.uint8).reshape(-1, 2)
        expected = decoded_by_the_package(blocks, name)
        with np.errstate(all="ignore"):
            assert_equal(decode_blocks(blocks.reshape(-1), kind), expected, name=f"{name}, float16 at byte {at}")


@pytest.mark.parametrize("name", [name for name in BY_NAME if BY_NAME[name].size <= 210 and name[0] in "QI"])
def test_every_byte_of_a_block_counts_as_in_the_gguf_package(name):
    # one block, and for each of its bytes all 256 values in turn: every bit of every packed scale is met alone
    kind = BY_NAME[name]
    block = BLOCKS[f"{name}.blocks"][0]
    blocks = np.tile(block, (kind.size * 256, 1))
    row = np.arange(len(blocks))
    blocks[row, row // 256] = row % 256
    expected = decoded_by_the_package(blocks, name)
    with np.errstate(all="ignore"):
        assert_equal(decode_blocks(blocks.reshape(-1), kind), expected, name=name)


def test_the_table_of_types_is_the_gguf_packages():
    gguf = pytest.importorskip("gguf", reason="the gguf package is the second opinion here")
    for kind in gguf.GGMLQuantizationType:
        if kind.value in BLOCK_TYPES:
            ours = BLOCK_TYPES[kind.value]
            assert (ours.name, ours.values, ours.size) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        else:
            assert OTHER_TYPES[kind.value] == kind.name


def test_bfloat16_and_float16_blocks_are_exact():
    values = np.array([1.5, -0.0, 3e-5, 65504.0], np.float16)
    assert_equal(decode_blocks(values.view(np.uint8), BY_NAME["F16"]), values.astype(np.float32), name="F16")
    values = np.array([1.5, -0.0, 1e30, -3.0], ml_dtypes.bfloat16)
    assert_equal(decode_blocks(values.view(np.uint8), BY_NAME["BF16"]), values.astype(np.float32), name="BF16")


def test_a_long_tensor_decodes_as_its_pieces():
    kind = BY_NAME["Q8_0"]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 64, (20_000, kind.size), dtype=np.uint8)
    pieces = [decode_blocks(part.reshape(-1), kind) for part in np.array_split(blocks, 7)]
    assert_equal(decode_blocks(blocks.reshape(-1), kind), np.concatenate(pieces), name="pieces")


def test_bytes_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="a block is 34 bytes of uint8"):
        decode_blocks(np.zeros(35, np.uint8), BY_NAME["Q8_0"])


PAIRS = (
    pair("a.text", 8, text("héllo")),
    pair("a.list", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 7)),
    pair("a.words", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
    pair("a.flag", 7, b"\1"),
    pair("a.float", 6, struct.pack("<f", 0.25)),
)
TABLE = (entry("w", (32, 2), 8, 0), entry("b", (3,), 0, 96))
DATA = (struct.pack("<e", 0.5) + bytes(range(32))) * 2 + bytes(28) + struct.pack("<3f", 1, 2, 3)


def file(pairs=PAIRS, table=TABLE, data=DATA, **changes):
    return gguf_bytes(pairs, table, data, **changes)


def read(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_and_tensors_of_a_file_are_read(tmp_path):
    gguf = read(tmp_path, file())
    assert gguf.metadata == {
        "a.text": "héllo",
        "a.list": [-1, 0, 7],
        "a.words": ["x", ""],
        "a.flag": True,
        "a.float": 0.25,
    }
    assert {name: tensor.shape for name, tensor in gguf.tensors.items()} == {"w": (2, 32), "b": (3,)}
    assert_equal(gguf.read("w"), np.tile(np.arange(32, dtype=np.float32) / 2, (2, 1)), name="w")
    assert_equal(gguf.read("b"), np.array([1, 2, 3], np.float32), name="b")


def test_a_tensor_is_a_copy_of_its_own(tmp_path):
    gguf = read(tmp_path, file())
    gguf.read("b")[:] = 0
    assert gguf.read("b").tolist() == [1, 2, 3]


def test_the_gguf_package_reads_the_same(tmp_path):
    package = pytest.importorskip("gguf", reason="the gguf package is the second opinion here")
    ours = read(tmp_path, file())
    theirs = package.GGUFReader(tmp_path / "x.gguf")
    assert {tensor.name: tuple(tensor.shape[::-1].tolist()) for tensor in theirs.tensors} == {
        name: tensor.shape for name, tensor in ours.tensors.items()
    }
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path):
    whole = file()
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"x\.gguf "):
            read(tmp_path, whole[:length])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file(magic=b"GGML"), r"starts with b'GGML'"),
        (file(version=1), "version 1"),
        (file(version=3 << 24), "version 50331648"),
        (file(counts=(2**40, 5)), "ends at byte|dimensions|type"),
        (file(counts=(2, 2**60)), "ends at byte|type|utf-8"),
        (file(pairs=(pair("k", 13, b""),)), "has a value of type 13"),
        (file(pairs=(pair("k", 9, struct.pack("<IQ", 9, 1)),)), "has an array of type 9"),
        (file(pairs=(pair("k", 9, struct.pack("<IQ", 12, 2**61)),)), "in the middle of a value"),
        (file(pairs=(pair("k", 9, struct.pack("<IQ", 8, 2**61)),)), "in the middle of a value|utf-8"),
        (file(pairs=(text(b"\xff\xff"),)), "utf-8"),
        (file(pairs=(PAIRS[0], PAIRS[0])), "has the key a.text twice"),
        (file(pairs=(pair("general.alignment", 4, bytes(4)),)), "general.alignment 0"),
        (file(table=(TABLE[0], TABLE[0])), "has the tensor w twice"),
        (file(table=(entry("w", (32, 3), 8, 64),)), "tensor w ends at byte"),
        (file(table=(entry("w", (2**62, 2**62), 8, 0),)), "tensor w ends at byte"),
        (file(table=(entry("w", (33, 2), 8, 0),)), "rows of 33, which are no whole Q8_0 blocks"),
        (file(table=(entry("w", (), 8, 0),)), "tensor w has 0 dimensions"),
        (file(table=(entry("w", (32, 2), 12, 0),)), "rows of 32, which are no whole Q4_K blocks"),
        (file(table=(entry("w", (256, 2), 16, 0),)), "tensor w, whose type IQ2_XXS is not supported, but F32, .*Q4_K"),
        (file(table=(entry("w", (256, 2), 18, 0),)), "tensor w, whose type IQ3_XXS is not supported"),
        (file(table=(entry("w", (256, 2), 29, 0),)), "tensor w, whose type IQ1_M is not supported"),
        (file(table=(entry("w", (32, 2), 39, 0),)), "tensor w, whose type MXFP4 is not supported"),
        (file(table=(entry("w", (32, 2), 31, 0),)), "tensor w, whose type Q4_0_4_4 is not supported"),
        (file(table=(entry("w", (32, 2), 99, 0),)), "tensor w, whose type number 99 is not supported"),
        (file(table=(entry("w", (1,) * 5, 0, 0),)), "tensor w has 5 dimensions"),
        (b"", "is empty"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_the_field(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, content)
    assert "x.gguf" in str(caught.value)


@given(st.data())
def test_a_changed_byte_never_crashes_the_reader(tmp_path_factory, data):
    whole = bytearray(file())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    path.write_bytes(whole)
    try:
        gguf = read_gguf(path)
    except ValueError as error:
        assert "x.gguf" in str(error)
    else:
        for name in gguf.tensors:
            with np.errstate(all="ignore"):
                gguf.read(name)


# models in several files


def numbers(*names):
    return {name: np.full(3, i, np.float32) for i, name in enumerate(names)}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_split_model_is_read_from_any_of_its_parts(tmp_path, count):
    tensors = numbers("a", "b", "c", "d", "e", "f")
    for path in write_parts(tmp_path / "x.Q4_K_M.gguf", tensors, count, metadata={"general.architecture": "llama"}):
        gguf = read_gguf(path)
        assert gguf.metadata["general.architecture"] == "llama" and list(gguf.tensors) == list(tensors)
        for name, value in tensors.items():
            assert_equal(gguf.read(name), value, name=name)


def test_a_split_model_as_the_gguf_package_writes_it_is_read(tmp_path):
    package = pytest.importorskip("gguf", reason="the gguf package writes the parts here")
    writer = package.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(7)
    tensors = numbers("a", "b", "c", "d", "e")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf = read_gguf(tmp_path / "x-00002-of-00003.gguf")
    assert gguf.metadata["llama.block_count"] == 7
    for name, value in tensors.items():
        assert_equal(gguf.read(name), value, name=name)


@pytest.mark.parametrize(("lost", "named"), [([1], "x-00002-of-00004"), ([3], "x-00004-of-00004"), ([1, 2], "00003")])
def test_a_missing_part_is_named(tmp_path, lost, named):
    paths = write_parts(tmp_path / "x.gguf", numbers("a", "b", "c", "d"), 4)
    for i in lost:
        paths[i].unlink()
    with pytest.raises(ValueError, match=rf"x-00001-of-00004\.gguf is one of 4 parts; beside it there is no .*{named}"):
        read_gguf(paths[0])


def test_many_missing_parts_are_one_short_line(tmp_path):
    path = write_parts(tmp_path / "x.gguf", numbers("a"), 1, {0: {"split.count": 60_000}})[0]
    path.rename(tmp_path / "x-00001-of-60000.gguf")
    with pytest.raises(ValueError, match="and 59996 more") as caught:
        read_gguf(tmp_path / "x-00001-of-60000.gguf")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {1: {"split.no": 2}},
            r"x-00002-of-00003\.gguf has split\.no, split\.count = \(2, 3\); by its name they are \(1, 3\)",
        ),
        ({2: {"split.count": 4}}, r"x-00003-of-00003\.gguf has split\.no, split\.count = \(2, 4\)"),
        ({1: {"split.no": None}}, r"x-00002-of-00003\.gguf has split\.no, split\.count = \(None, 3\)"),
        ({0: {"split.count": 2}}, r"is one of 2 parts \(split\.count\), so its name must end in -of-00002\.gguf"),
        ({0: {"split.tensors.count": 4}}, r"have 3 tensors; split\.tensors\.count is 4"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, changes, message):
    paths = write_parts(tmp_path / "x.gguf", numbers("a", "b", "c"), 3, changes)
    with pytest.raises(ValueError, match=message):
        read_gguf(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = write_parts(tmp_path / "x.gguf", numbers("a", "b"), 2)
    write_gguf(paths[1], {"split.no": 1, "split.count": 2}, numbers("a"))
    with pytest.raises(ValueError, match=r"x-00002-of-00002\.gguf has the tensor a, as has part 1"):
        read_gguf(paths[0])


def test_a_part_under_another_name_is_told_what_it_must_be_called(tmp_path):
    path = write_parts(tmp_path / "x.gguf", numbers("a", "b"), 2)[0]
    path.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"renamed\.gguf is one of 2 parts .* must end in -of-00002\.gguf"):
        read_gguf(tmp_path / "renamed.gguf")


@pytest.mark.parametrize("split", [{}, {"split.count": 1, "split.no": 0}, {"split.count": 0}])
def test_a_file_that_is_whole_needs_no_parts_whatever_it_is_called(tmp_path, split):
    path = tmp_path / "x-00001-of-00003.gguf"
    write_gguf(path, split, numbers("a"))
    assert list(read_gguf(path).tensors) == ["a"]


def test_a_damaged_part_is_named(tmp_path):
    paths = write_parts(tmp_path / "x.gguf", numbers("a", "b", "c"), 3)
    paths[2].write_bytes(paths[2].read_bytes()[:70])
    with pytest.raises(ValueError, match=r"x-00003-of-00003\.gguf ends at byte 70"):
        read_gguf(paths[0])


# where a text begins and ends

LLAMA_3 = ["a", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]


def ends(tokens, **keys):
    return end_tokens({"tokenizer.ggml.tokens": tokens} | {f"tokenizer.ggml.{key}": i for key, i in keys.items()})


@pytest.mark.parametrize(
    ("tokens", "keys", "expected"),
    [
        (LLAMA_3, {"eos_token_id": 2}, [2, 3, 4]),
        (LLAMA_3, {"eos_token_id": 3, "eot_token_id": 3}, [3, 2, 4]),
        (LLAMA_3, {}, [2, 3, 4]),
        (["x", "<|im_start|>", "<|im_end|>"], {"eos_token_id": 0}, [0, 2]),
        (["x", "<|endoftext|>", "<|im_end|>"], {"eos_token_id": 2}, [2, 1]),
        (["x", "</s>", "[EOT]", "<end_of_turn>", "_<EOT>"], {}, [1, 2, 3, 4]),
        (["x", "y"], {"eom_token_id": 1}, [1]),
        (["x", "y"], {}, []),
        ([], {}, []),
    ],
)
def test_ends_are_found_by_key_and_by_text(tokens, keys, expected):
    assert ends(tokens, **keys) == expected


@pytest.mark.parametrize(
    ("tokens", "keys", "expected"),
    [
        (["x", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], {}, [1, 2, 3]),
        (["x", "<reponame>", "<fim_pad>", "<fim_suffix>"], {}, [1, 2]),
        (["x", "<|fim_pad|>", "<PAD>"], {}, [1]),  # one of a kind
        (["x", "<|fim_pad|>", "<|file_sep|>"], {"fim_pad_token_id": 0}, [0, 2]),
    ],
)
def test_tokens_for_filling_in_the_middle_end_a_text_too(tokens, keys, expected):
    assert ends(tokens, **keys) == expected


@pytest.mark.parametrize(
    ("tokens", "keys", "expected"),
    [
        (["<|end|>", "<|call|>", "<|return|>"], {}, [1, 2]),
        (["<|end|>", "<|calls|>", "<|flush|>"], {"eos_token_id": 0}, [1, 2]),
        (["<|end|>", "<|return|>"], {}, [0, 1]),
        (["</s>", "<|tool_response>", "<eos>"], {}, [1, 2]),
    ],
)
def test_a_text_that_means_something_else_beside_others_ends_nothing(tokens, keys, expected):
    assert ends(tokens, **keys) == expected


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("llama-bpe", {"bos_token_id": 1}, 1),
        ("llama3", {"bos_token_id": 1}, 1),
        ("llama-bpe", {"bos_token_id": 1, "add_bos_token": False}, None),
        ("llama-bpe", {}, None),
        ("qwen2", {"bos_token_id": 1}, None),
        ("qwen2", {"bos_token_id": 1, "add_bos_token": True}, 1),
        ("gpt-2", {"add_bos_token": True}, -1),
        (None, {"bos_token_id": 1}, None),
    ],
)
def test_a_text_begins_as_the_key_says_or_else_the_cut_into_words(pre, keys, expected):
    facts = {"tokenizer.ggml.pre": pre} | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert begin_token(facts) == expected


@pytest.mark.parametrize("tokens", [None, 3, "abc", [], [1, 2]])
def test_a_damaged_vocabulary_has_no_ends_by_text(tokens):
    assert ends_by_text({"tokenizer.ggml.tokens": tokens}) == []
    assert end_tokens({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": [1]}) == [[1]]
