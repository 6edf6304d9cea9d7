import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.check import assert_equal
from ddtree.gguf import BLOCK_TYPES, decode_blocks, read_gguf
from ddtree.kdtr import load
from gguf_writer import entry, gguf_bytes, pair, text
from random_models import FIXTURES

RECORDED = load(FIXTURES / "quant.kdtr")
BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_gguf_blocks_give_the_values_of_the_gguf_package(name):
    decoded = decode_blocks(RECORDED[f"gguf.{name}.blocks"].reshape(-1), BY_NAME[name])
    assert_equal(decoded, RECORDED[f"gguf.{name}.dequantised"].reshape(-1), name=name)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_type_agrees_with_the_gguf_package_on_random_bytes(name):
    gguf = pytest.importorskip("gguf", reason="the gguf package is the second opinion here")
    kind = BY_NAME[name]
    data = np.random.default_rng(3).integers(0, 256, 4096 * kind.size, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data.reshape(-1, kind.size), gguf.GGMLQuantizationType[name])
        assert_equal(decode_blocks(data, kind), expected.reshape(-1).astype(np.float32), name=name)


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
        (file(table=(entry("w", (32, 2), 12, 0),)), r"tensor w has type 12, which is not supported; F32 \(0\)"),
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
