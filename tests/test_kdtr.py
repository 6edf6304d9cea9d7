"""KDTR: what is written is read back in Python and C, and both readers refuse the same damaged and forged files."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddtree.kdtr import (
    DTYPES,
    KdtrError,
    KdtrFile,
    Tensor,
    bf16_to_float32,
    float32_to_bf16,
    load,
    pack_int4,
    parse,
    save,
    unpack_int4,
)

ROOT = Path(__file__).parent.parent
LANGUAGES = {"c99": ["gcc", "-std=c99"], "c++17": ["g++", "-x", "c++", "-std=c++17"]}
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def everything() -> dict[str, object]:
    """One tensor of each dtype, and the shapes that are easy to get wrong."""
    rng = np.random.default_rng(1)
    arrays: dict[str, object] = {
        name: rng.integers(0, 100, (3, 5)).astype(dtype)
        for name, dtype in DTYPES.items()
        if name not in ("bf16", "int4")
    }
    arrays["bool"] = rng.integers(0, 2, (3, 5)).astype(bool)
    arrays["bf16"] = Tensor("bf16", (2, 3), float32_to_bf16(rng.normal(size=(2, 3)).astype(np.float32)))
    arrays["int4"] = Tensor("int4", (2, 5), pack_int4(rng.integers(-8, 8, (2, 5))))
    arrays["int4 empty"] = Tensor("int4", (2, 0), pack_int4(np.zeros((2, 0), np.int8)))
    arrays |= {
        "scalar": np.array(-2.5),
        "empty": np.zeros((0, 7), np.int32),
        "8 axes": np.arange(4.0).reshape(1, 2, *[1] * 5, 2),
    }
    arrays |= {
        "64 bytes": np.arange(64, dtype=np.uint8),
        "naïve 模型": np.float32([np.nan, -0.0, np.inf]),
        "z" * 151: np.int8(-1),
    }
    return arrays


def content(path: Path, arrays: dict[str, object], metadata: dict | None = None) -> bytes:
    save(path, arrays, metadata)
    return path.read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of about a kilobyte, small enough to try every byte and bit."""
    arrays = {"b": np.array([True, False]), "q": Tensor("int4", (3,), pack_int4([1, -1, 7])), "w": np.float32([[1, 2]])}
    return content(tmp_path_factory.mktemp("kdtr") / "small.kdtr", arrays, {"seed": 0})


@pytest.fixture(scope="module", params=LANGUAGES)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/kdtr_reader.c in one language, warnings as errors, under the sanitizers."""
    command = LANGUAGES[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: kernels/kdtr.h is not tested as {request.param}")
    program = tmp_path_factory.mktemp(request.param) / "kdtr_reader"
    source = ["-I", str(ROOT / "kernels"), str(ROOT / "tests/kdtr_reader.c"), "-o", str(program)]
    subprocess.run([*command, *STRICT, *SANITIZED, *source], check=True, timeout=600)
    return program


def run(reader: Path, *arguments: object) -> list[str]:
    """The lines the C program prints; a sanitizer's complaint fails here."""
    done = subprocess.run([reader, *map(str, arguments)], capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1]


def verdict(raw: bytes, verify: bool = True) -> str:
    """The field that the Python reader names, or "ok"."""
    try:
        parse(raw, verify)
    except KdtrError as error:
        return error.field
    return "ok"


def assert_same_verdicts(reader: Path, folder: Path, files: list[bytes], verify: bool = True) -> list[str]:
    """Both readers accept the same files and name the same field in the others; returns the fields."""
    pack = folder / "pack"
    pack.write_bytes(b"".join(struct.pack("<Q", len(raw)) + raw for raw in files))
    lines = run(reader, "pack", pack, int(verify))
    fields = [verdict(raw, verify) for raw in files]
    assert len(lines) == len(fields)
    for index, (line, field) in enumerate(zip(lines, fields, strict=True)):
        assert line == "ok" if field == "ok" else line.startswith(f"{field}: "), (
            f"#{index}: C {line!r}, Python {field!r}"
        )
    return fields


def seal(raw: bytes | bytearray) -> bytes:
    """Put right all checksums that can be computed, so that the checks behind them are reached."""
    sealed = bytearray(raw)
    count, metadata = struct.unpack_from("<IQ", sealed, 12)
    table_end = 64 + 256 * count
    if table_end <= len(sealed):
        for entry in range(64, table_end, 256):
            offset, size = struct.unpack_from("<QQ", sealed, entry + 232)
            struct.pack_into("<I", sealed, entry + 164, zlib.crc32(memoryview(sealed)[offset : offset + size]))
        struct.pack_into("<I", sealed, 32, zlib.crc32(memoryview(sealed)[64:table_end]))
        struct.pack_into("<I", sealed, 36, zlib.crc32(memoryview(sealed)[table_end : table_end + metadata]))
    struct.pack_into("<I", sealed, 60, zlib.crc32(memoryview(sealed)[:60]))
    return bytes(sealed)


def with_front(names: list[bytes], metadata: bytes) -> bytes:
    """A sealed file of empty u8 tensors with these raw names and this raw metadata."""
    start = 64 + 256 * len(names) + len(metadata)
    start += -start % 64
    table = b"".join(struct.pack("<152s8sII8QQQ8x", name, b"u8", 1, 0, *[0] * 8, start, 0) for name in names)
    header = struct.pack("<8sIIQQ32x", b"KDTR\r\n\x1a\n", 1, len(names), len(metadata), start)
    return seal((header + table + metadata).ljust(start, b"\0"))


# What is written is read back


def test_the_bytes_of_version_1_never_change(tmp_path: Path) -> None:
    """Written out by hand; the four checksums were computed by gzip."""
    entry = b"ab".ljust(152, b"\0") + b"u16".ljust(8, b"\0") + bytes.fromhex("02000000 72a8b16e")
    entry += b"".join(value.to_bytes(8, "little") for value in (1, 3, 0, 0, 0, 0, 0, 0, 384, 6, 0))
    header = b"KDTR\r\n\x1a\n" + bytes.fromhex("01000000 01000000 0700000000000000 c001000000000000 06752aea 0eb4ab1c")
    front = header + bytes(20) + bytes.fromhex("2bab73f0") + entry + b'{"k":1}'
    data = bytes.fromhex("0100 0200 ffff")
    raw = content(tmp_path / "f", {"ab": np.array([[1, 2, 65535]], np.uint16)}, {"k": 1})
    assert raw == front.ljust(384, b"\0") + data.ljust(64, b"\0")


def test_every_dtype_and_shape_comes_back_from_python(tmp_path: Path) -> None:
    arrays, metadata = everything(), {"a": [1, 2.5, None, True, "é\n"], "b": {}}
    save(tmp_path / "f", arrays, metadata)
    file = load(tmp_path / "f")
    assert {t.dtype for t in file.tensors.values()} == set(DTYPES)
    assert list(file) == sorted(arrays) and len(file) == len(arrays) and file.metadata == metadata
    for name, value in arrays.items():
        bits, tensor = value.data if isinstance(value, Tensor) else value, file.tensors[name]
        np.testing.assert_array_equal(file[name], bits, err_msg=name, strict=isinstance(bits, np.ndarray))
        assert tensor.shape == value.shape and (tensor.dtype == value.dtype or not isinstance(value, Tensor)), name


def test_every_dtype_and_shape_comes_back_from_c(reader: Path, tmp_path: Path) -> None:
    save(tmp_path / "f", everything(), {"seed": 3, "note": "é"})
    metadata, *lines = run(reader, "file", tmp_path / "f")
    file = load(tmp_path / "f")
    assert json.loads(metadata) == file.metadata and len(lines) == len(file)
    for line, (name, tensor) in zip(lines, file.tensors.items(), strict=True):
        assert line.split("\t")[:3] == [name, tensor.dtype, ",".join(map(str, tensor.shape))]
        offset, size, data = line.split("\t")[3:]
        assert (int(offset) % 64, int(size), data) == (0, tensor.data.nbytes, tensor.data.tobytes().hex())
        assert run(reader, "find", tmp_path / "f", name) == [offset]


@pytest.mark.parametrize("name", ["", "a", "zz", "z" * 152])
def test_a_name_that_is_not_there_is_absent_in_both(reader: Path, tmp_path: Path, name: str) -> None:
    save(tmp_path / "f", everything())
    assert run(reader, "find", tmp_path / "f", name) == ["absent"]
    assert name not in load(tmp_path / "f")
    with pytest.raises(KeyError, match=f"no tensor '{name}' among the 21"):
        load(tmp_path / "f")[name]


def test_a_file_of_no_tensors(reader: Path, tmp_path: Path) -> None:
    raw = content(tmp_path / "f", {})
    assert len(raw) == 128 and len(load(tmp_path / "f")) == 0 and load(tmp_path / "f").metadata == {}
    assert run(reader, "file", tmp_path / "f") == ["{}"]
    assert run(reader, "find", tmp_path / "f", "w") == ["absent"]


NUMERIC = st.sampled_from([np.dtype(code) for code in ("?", "u1", "i2", ">i4", "<u8", ">f2", "f4", ">f8")])
ARRAYS = NUMERIC.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(arrays=st.dictionaries(NAMES, ARRAYS, max_size=4), seed=st.randoms())
def test_arrays_of_any_order_and_strides_come_back(tmp_path_factory, arrays, seed) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.kdtr"
    twisted = {name: array.T[::-1] if array.ndim else array for name, array in arrays.items()}
    save(path, twisted)
    file = load(path)
    for name, array in twisted.items():
        np.testing.assert_array_equal(file[name], array)
        assert file[name].dtype == array.dtype.newbyteorder("=") and file[name].flags.c_contiguous
    names = list(twisted)
    seed.shuffle(names)
    assert content(path, {name: twisted[name] for name in names}) == memoryview(path.read_bytes())


def test_a_loaded_file_saves_to_the_same_bytes_even_onto_itself(tmp_path: Path) -> None:
    raw = content(tmp_path / "f", everything(), {"k": 1})
    file = load(tmp_path / "f")
    save(tmp_path / "f", file, file.metadata)
    save(tmp_path / "g", file.tensors, file.metadata)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "g").read_bytes() == raw


# No copy


def test_arrays_are_read_only_aligned_views_of_the_map(tmp_path: Path) -> None:
    save(tmp_path / "f", everything())
    for name, array in load(tmp_path / "f").items():
        assert not array.flags.owndata and not array.flags.writeable, name
        assert array.size == 0 or array.ctypes.data % 64 == 0, name


@pytest.mark.parametrize("verify", [True, False])
def test_loading_allocates_nothing_of_the_tensors_size(tmp_path: Path, verify: bool) -> None:
    save(tmp_path / "f", {"w": np.zeros(4_000_000, np.uint8), "flags": np.zeros(4_000_000, bool)})
    tracemalloc.start()
    load(tmp_path / "f", verify)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_parse_reads_memory_without_a_copy(small: bytes) -> None:
    buffer = bytearray(small)
    file = parse(buffer)
    buffer[-61] = 0
    assert file["w"].tolist() != [[1, 2]] and not file["w"].flags.writeable


# bf16 and int4


def test_every_bf16_survives_float32_and_a_nan_stays_a_nan() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    values = bf16_to_float32(bits)
    nan = np.isnan(values)
    assert nan.sum() == 2 * 127
    np.testing.assert_array_equal(float32_to_bf16(values)[~nan], bits[~nan])
    np.testing.assert_array_equal(float32_to_bf16(values)[nan], bits[nan] | 0x40)


def test_bf16_rounds_to_the_nearest_and_halves_to_even() -> None:
    """Against a search in float64, where the distance to both neighbours is exact."""
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, 0x7F7F0000, 20000), np.arange(2000) * 0x8000])
    values = words.astype(np.uint32).view(np.float32)
    below = (words >> 16).astype(np.uint16)
    low, high = (bf16_to_float32(bits).astype(np.float64) for bits in (below, below + 1))
    up, down = high - values, values - low
    expected = below + ((up < down) | ((up == down) & (below % 2 == 1)))
    np.testing.assert_array_equal(float32_to_bf16(values), expected)
    np.testing.assert_array_equal(float32_to_bf16(-values), expected | 0x8000)


@pytest.mark.parametrize(
    "word, half", [(0x7F7FFFFF, 0x7F80), (0xFF7F8000, 0xFF80), (0x7F800001, 0x7FC0), (0xFFFFFFFF, 0xFFFF)]
)
def test_bf16_at_the_edge_of_the_range(word: int, half: int) -> None:
    assert float32_to_bf16(np.array(word, np.uint32).view(np.float32)) == half


def test_every_int4_byte_means_its_two_values() -> None:
    packed = np.arange(256, dtype=np.uint8)[:, None]
    expected = [[(byte & 15 ^ 8) - 8, (byte >> 4 ^ 8) - 8] for byte in range(256)]
    np.testing.assert_array_equal(unpack_int4(packed, 2), expected)
    np.testing.assert_array_equal(pack_int4(expected), packed)


@given(hnp.arrays(np.int8, hnp.array_shapes(min_side=0, max_side=5), elements=st.integers(-8, 7)))
def test_int4_of_any_shape_comes_back(values) -> None:
    packed = pack_int4(values)
    assert packed.shape == (*values.shape[:-1], (values.shape[-1] + 1) // 2)
    np.testing.assert_array_equal(unpack_int4(packed, values.shape[-1]), values, strict=True)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: float32_to_bf16(np.zeros(2)), "float32_to_bf16: given float64"),
        (lambda: bf16_to_float32(np.zeros(2, np.int16)), "bf16_to_float32: given int16"),
        (lambda: pack_int4([0.0]), "pack_int4: given float64"),
        (lambda: pack_int4(3), "pack_int4: given a scalar"),
        (lambda: pack_int4([7, 8]), r"pack_int4: given \[8\]; int4 holds -8 to 7"),
        (lambda: unpack_int4(np.zeros((2, 2), np.int8), 4), "unpack_int4: given int8"),
        (lambda: unpack_int4(np.zeros((2, 2), np.uint8), 5), "unpack_int4: 5 columns are not held in 2 bytes"),
    ],
)
def test_a_conversion_refuses_what_it_would_spoil(call, message: str) -> None:
    with pytest.raises(KdtrError, match=message):
        call()


# Saving refuses, and never leaves half a file


@pytest.mark.parametrize(
    "arrays, metadata, message",
    [
        ({"w": np.array(["a"])}, {}, "tensor 'w' dtype: 'numpy <U1'; allowed are bool, u8"),
        ({"w": np.array([None])}, {}, "tensor 'w' dtype: 'numpy object'"),
        ({"w": np.zeros(1, np.longdouble)}, {}, "tensor 'w' dtype: 'numpy (longdouble|float128)'"),
        ({"w": np.zeros(1, "c8")}, {}, "tensor 'w' dtype: 'numpy complex64'"),
        ({"w": np.zeros(1, "f4,i4")}, {}, "tensor 'w' dtype"),
        ({"w": np.zeros(1, "M8[s]")}, {}, "tensor 'w' dtype"),
        ({"w": np.array(["a"], np.dtypes.StringDType())}, {}, "tensor 'w' dtype"),
        ({"w": [1, 2]}, {}, "tensor 'w' type: list; save takes numpy arrays and Tensor"),
        ({"w": Tensor("i4", (1,), np.zeros(1, np.int32))}, {}, "tensor 'w' dtype: 'i4'"),
        ({"w": Tensor("bf16", (1,), np.zeros(1, np.float32))}, {}, "tensor 'w' data: float32 .* is held in uint16"),
        (
            {"w": Tensor("int4", (5,), np.zeros(2, np.uint8))},
            {},
            r"tensor 'w' data: uint8 \(2,\); .* held in uint8 \(3,\)",
        ),
        ({"w": Tensor("int4", (), np.zeros((), np.uint8))}, {}, "tensor 'w' shape: .*last axis"),
        ({"w": np.zeros((1,) * 9)}, {}, "tensor 'w' ndim: 9; at most 8"),
        ({"w": np.broadcast_to(np.uint8(0), (2**25, 2**25, 0))}, {}, "tensor 'w' shape: .*2\\*\\*48"),
        ({"w": np.array([2], np.uint8).view(bool)}, {}, "tensor 'w' data: a bool that is neither"),
        ({"": np.zeros(1)}, {}, "tensor '' name: 0 bytes"),
        ({"é" * 76: np.zeros(1)}, {}, "name: 152 bytes of UTF-8; allowed are 1 to 151"),
        ({"a\0b": np.zeros(1)}, {}, "name: .* control character"),
        ({"\ud800": np.zeros(1)}, {}, "name: .* not UTF-8"),
        ({3: np.zeros(1)}, {}, "tensor 3 name: int; names are str"),
        (dict.fromkeys(map(str, range(2**16 + 1)), np.uint8(0)), {}, "tensor_count: 65537; at most 65536"),
        ({}, [1], "metadata"),
        ({}, {"a": float("nan")}, "metadata: Out of range float"),
        ({}, {"a": np.float32(1)}, "metadata: .*float32 is not JSON serializable"),
        ({}, {"a": "x" * 2**20}, "metadata: 1048584 bytes; at most 1048576"),
        ({}, {"a": 10**64}, "metadata: a number longer than 64"),
        ({}, {"a": json.loads("[" * 32 + "]" * 32)}, "metadata: nested deeper than 32"),
    ],
)
def test_save_refuses_and_names_the_tensor(tmp_path: Path, arrays, metadata, message: str) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KdtrError, match=message):
        save(tmp_path / "f", arrays, metadata)
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failing_disk_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch, step: str, error) -> None:
    raw = content(tmp_path / "f", {"w": np.arange(5)})

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        save(tmp_path / "f", {"w": np.zeros(100_000)})
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == raw


def test_a_killed_process_leaves_the_old_file_whole_and_the_next_save_works(tmp_path: Path) -> None:
    raw = content(tmp_path / "f", {"w": np.arange(5)})
    script = f"""
import os, signal, numpy
from ddtree.kdtr import save
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
save({str(tmp_path / "f")!r}, {{"w": numpy.zeros(100_000)}})
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=600).returncode == -signal.SIGKILL
    assert (tmp_path / "f").read_bytes() == raw
    assert content(tmp_path / "f", {"w": np.zeros(3)}) != raw


def test_the_bytes_are_on_disk_before_the_name_is_theirs(tmp_path: Path, monkeypatch) -> None:
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append("replace"), replace(old, new)))
    save(tmp_path / "f", {"w": np.arange(5)})
    assert steps[1:] == ["replace", str(tmp_path.resolve())] and steps[0].startswith(str(tmp_path.resolve() / ".kdtr-"))


def test_save_follows_a_link_and_obeys_the_umask(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "f")
    old = os.umask(0o027)
    save(tmp_path / "link", {"w": np.arange(5)})
    os.umask(old)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "f").stat().st_mode & 0o777 == 0o640


# Damaged and forged files, through both readers


def test_a_cut_at_every_byte_is_refused(reader: Path, tmp_path: Path, small: bytes) -> None:
    cuts = [small[:length] for length in range(len(small))]
    longer = [small + tail for tail in (b"\0", b"x", bytes(64), small)]
    assert set(assert_same_verdicts(reader, tmp_path, cuts + longer)) == {"file_bytes"}


def test_a_flip_of_every_bit_is_refused(reader: Path, tmp_path: Path, small: bytes) -> None:
    flips = [small[:i] + bytes([small[i] ^ 1 << bit]) + small[i + 1 :] for i in range(len(small)) for bit in range(8)]
    fields = assert_same_verdicts(reader, tmp_path, flips)
    assert set(fields) == {
        "magic", "version", "header_crc", "table_crc", "metadata_crc", "metadata padding",
        *(f"tensor '{name}' {field}" for name in "bqw" for field in ("crc", "padding")),
    }  # fmt: skip


@pytest.mark.parametrize("verify", [True, False])
def test_a_flip_under_valid_checksums_meets_the_same_check_in_both(
    reader, tmp_path: Path, small: bytes, verify: bool
) -> None:
    """Only bits that mean nothing to the format may go through: tensors' own values, names and text of the metadata."""
    front = 64 + 3 * 256
    flips = [seal(small[:i] + bytes([small[i] ^ 1 << b]) + small[i + 1 :]) for i in range(len(small)) for b in range(8)]
    fields = assert_same_verdicts(reader, tmp_path, flips, verify)
    accepted = {index // 8 for index, field in enumerate(fields) if field == "ok"}
    names = {start + i for start in range(64, front, 256) for i in (0, 1)}
    checksums = {
        *range(32, 40),
        *range(60, 64),
        *(start + i for start in range(64, front, 256) for i in range(164, 168)),
    }
    metadata = set(range(front, front + 10))
    assert accepted - checksums <= names | metadata | set(range(front + 64, len(small))) | {64 + 152, 64 + 152 + 1}


FORGERIES = [
    # byte of the small file, little-endian bytes written there, the field both readers must name
    (12, (2**32 - 1).to_bytes(4, "little"), "tensor_count"),
    (12, (60_000).to_bytes(4, "little"), "tensor_count"),
    (16, (2**64 - 1).to_bytes(8, "little"), "metadata_bytes"),
    (16, (2**20 + 1).to_bytes(8, "little"), "metadata_bytes"),
    (16, (2**20).to_bytes(8, "little"), "tensor_count"),
    (24, (2**64 - 1).to_bytes(8, "little"), "file_bytes"),
    (40, b"\1", "reserved"),
    (64, b"q", "tensor #1 name"),
    (64, b"r", "tensor #1 name"),
    (64, b"\0", "tensor #0 name"),
    (65, b"\0x", "tensor #0 name"),
    (64, b"x" * 152, "tensor #0 name"),
    (64, b"\xed\xa0\x80", "tensor #0 name"),
    (64 + 152, b"i4\0\0", "tensor 'b' dtype"),
    (64 + 152, b"bool\0x", "tensor 'b' dtype"),
    (64 + 160, b"\x09", "tensor 'b' ndim"),
    (64 + 160, b"\xff\xff\xff\xff", "tensor 'b' ndim"),
    (64 + 160, b"\0", "tensor 'b' shape"),
    (320 + 160, bytes(16), "tensor 'q' shape"),
    (64 + 168, (2**48 + 1).to_bytes(8, "little"), "tensor 'b' shape"),
    (64 + 168, b"\xff" * 8, "tensor 'b' shape"),
    (576 + 168, struct.pack("<QQ", 2**33, 2**31), "tensor 'w' shape"),
    (576 + 168, struct.pack("<QQ", 0, 2**63), "tensor 'w' shape"),
    (576 + 168, struct.pack("<QQ", 2**24, 2**24), "tensor 'w' bytes"),
    (64 + 232, struct.pack("<QQ", 896, 3), "tensor 'b' bytes"),
    (320 + 232, struct.pack("<Q", 896), "tensor 'q' offset"),
    (320 + 232, struct.pack("<Q", 961), "tensor 'q' offset"),
    (320 + 232, struct.pack("<Q", 2**64 - 64), "tensor 'q' offset"),
    (576 + 168, struct.pack("<QQ7Q", 2**24, 2**20, *[0] * 6, 1024) + struct.pack("<Q", 2**46), "tensor 'w' bytes"),
    (576 + 248, b"\1", "tensor 'w' reserved"),
    (895, b"\1", "metadata padding"),
    (897, b"\2", "tensor 'b' data"),
    (959, b"\1", "tensor 'b' padding"),
]


def test_each_forged_field_is_named(reader: Path, tmp_path: Path, small: bytes) -> None:
    forged = [seal(small[:at] + patch + small[at + len(patch) :]) for at, patch, _ in FORGERIES]
    assert assert_same_verdicts(reader, tmp_path, forged) == [field for *_, field in FORGERIES]
    longer = small[:24] + (len(small) + 64).to_bytes(8, "little") + small[32:] + bytes(64)
    assert assert_same_verdicts(reader, tmp_path, [small, seal(longer)]) == ["ok", "file_bytes"]


def test_random_edits_under_valid_checksums_meet_the_same_check_in_both(reader: Path, tmp_path: Path) -> None:
    """Several fields at once, with values that sit at the edges of the checks, and pieces cut out or put in."""
    rng = random.Random(7)
    base = content(tmp_path / "f", everything(), {"a": [1, {"b": "c"}]})
    count = len(everything())
    values = [0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, len(base), 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 64, 2**64 - 1]
    fields = [(12, 4), (16, 8), (24, 8), *((64 + 256 * i + 160, 4) for i in range(count))]
    fields += [(64 + 256 * i + at, 8) for i in range(count) for at in (0, 8, 152, *range(168, 256, 8))]
    fields += [(*struct.unpack_from("<Q", base, 64 + 256 * i + 232), 1) for i in range(count)]

    def edit() -> bytes:
        raw = bytearray(base)
        for at, size in rng.choices(fields, k=rng.choice([1, 1, 1, 2, 3])):
            old = int.from_bytes(raw[at : at + size], "little")
            new = rng.choice([*values, old + 1, old - 1, old + 64, 2 * old, old ^ 1 << rng.randrange(64)])
            raw[at : at + size] = (new % 256**size).to_bytes(size, "little")
        if rng.random() < 0.2:
            at = rng.randrange(64, len(raw))
            raw[at : at + rng.choice([0, 64, 256])] = rng.choice([b"", bytes(64), base[64:320]])
            raw[24:32] = len(raw).to_bytes(8, "little")
        return seal(raw)

    seen = assert_same_verdicts(reader, tmp_path, [edit() for _ in range(3000)])
    seen += assert_same_verdicts(reader, tmp_path, [edit() for _ in range(1000)], verify=False)
    kinds = {field.rsplit(" ", 1)[-1] for field in seen}
    assert kinds >= {"ok", "tensor_count", "metadata_bytes", "file_bytes", "metadata"}
    assert kinds >= {"name", "dtype", "ndim", "shape", "bytes", "offset", "reserved", "data", "padding"}


def test_the_readers_agree_on_what_a_name_is(reader: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    pieces = [bytes([byte]) for byte in (0, 1, 31, 32, 127, 128, 191, 192, 193, 194, 224, 237, 240, 244, 245, 255)]
    pieces += [text.encode() for text in ("é", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff")]
    pieces += [
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xf8\x88\x80\x80\x80",
    ]
    names = [*pieces, *(bytes([first, second]) for first in range(256) for second in (0x61, 0x80, 0xBF))]
    names += [b"".join(rng.choices(pieces[3:], k=rng.randrange(1, 4))) for _ in range(2000)]
    fields = assert_same_verdicts(reader, tmp_path, [with_front([name], b"{}") for name in names])
    assert set(fields) == {"ok", "tensor #0 name"}
    pairs = [with_front([first, second], b"{}") for first in pieces[3:] for second in pieces[3:]]
    assert {"ok", "tensor #1 name"} <= set(assert_same_verdicts(reader, tmp_path, pairs))


GOOD_JSON = [
    "{}", " {\t}\r\n", '{"a":1}', '{ "a" : [ 1 , 2 ] , "b" : { } }', '{"":""}', '{"a":1,"a":2}', '{"a":[[],[[]],{}]}',
    *(f'{{"n":{n}}}' for n in ("0", "-0", "10", "1.5", "-1.5e3", "1E+9", "2e-0", "0.0", "1e999", "9" * 64)),
    *(f'{{"s":"{s}"}}' for s in (r"\"", r"\\", r"\/\b\f\n\r\t", r"\u00e9", r"\uD834\uDD1E", r"\ud800", "é模")),
    '{"delete":"\x7f\U0001f600"}',
    '{"t":true,"f":false,"n":null}', '{"d":' + "[" * 31 + "]" * 31 + "}", '{"brackets":"' + "[" * 99 + '"}',
    '{"digits":"' + "9" * 99 + '"}', '{"s":"' + "x" * (2**20 - 8) + '"}',
]  # fmt: skip
BAD_JSON = [
    "", " ", "[]", "1", "null", '"{}"', "{", "}", "{}{}", "{} x", "{}\0", "\ufeff{}", '{"a"}', '{"a":}',
    '{"a":1,}', "{,}", '{a:1}', "{'a':1}", '{"a" 1}', '{"a":1 "b":2}', '{1:2}', '{"a":[1,]}', '{"a":[1 2]}',
    '{"a":[}', '{"a":[1}', '{"a":{]}',
    *(f'{{"n":{n}}}' for n in ("01", "1.", ".5", "-", "+1", "1e", "1e+", "0x1", "1_0", "--1")),
    *(f'{{"n":{n}}}' for n in ("NaN", "Infinity", "-Infinity")),
    *(f'{{"n":{n}}}' for n in ("9" * 65, "9" * 5000, "0." + "1" * 63, "1e" + "0" * 63, "١")),
    *(f'{{"s":"{s}"}}' for s in ("\n", "\0", "\x1f", r"\x", r"\u12", r"\u12g4", "\\", '"', r"\u")), '{"s":"',
    '{"t":tru}', '{"t":True}', '{"t":nulll}', '{"d":' + "[" * 32 + "]" * 32 + "}", '{"a":' * 33 + "1" + "}" * 33,
    '{"d":' + "[" * 100_000, '{"a":' * 100_000, '{"s":"' + '\\"' * 100_000,
]  # fmt: skip


def test_the_readers_agree_on_what_json_is(reader: Path, tmp_path: Path) -> None:
    good = [with_front([], text.encode()) for text in GOOD_JSON]
    assert set(assert_same_verdicts(reader, tmp_path, good)) == {"ok"}
    texts = [*(text.encode() for text in BAD_JSON), b'{"\xff":1}', b"\xef\xbb"]
    bad = [with_front([], text) for text in texts]
    assert set(assert_same_verdicts(reader, tmp_path, bad)) == {"metadata"}
    rng = random.Random(5)
    short, edited = [text for text in GOOD_JSON if len(text) < 40], []
    for _ in range(4000):
        text = bytearray(rng.choice(short), "utf-8")
        at = rng.randrange(len(text) + 1)
        text[at : at + rng.randrange(3)] = rng.choice(
            [b"", *(bytes([c]) for c in b'{}[]",:\\/0123-+.eEtrufalsn \n\x00\x80')]
        )
        edited.append(with_front([], bytes(text)))
    assert set(assert_same_verdicts(reader, tmp_path, edited)) == {"ok", "metadata"}


def test_what_is_no_file_at_all_is_refused_without_waiting(reader: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "none").touch()
    for name, field in (("pipe", "path"), (".", "path"), ("none", "file_bytes")):
        assert run(reader, "file", tmp_path / name)[0].startswith(f"{field}: ")
        with pytest.raises(KdtrError, match=f"{field}: "):
            load(tmp_path / name)
    assert run(reader, "file", tmp_path / "missing") == ["path: No such file or directory"]
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")


def test_a_giant_file_of_holes_is_refused_before_its_table_is_read(reader: Path, tmp_path: Path) -> None:
    count, size = 2**25, 64 + 256 * 2**25
    header = struct.pack("<8sIIQQII20x", b"KDTR\r\n\x1a\n", 1, count, 0, size, 0, 0)
    (tmp_path / "f").write_bytes(header + struct.pack("<I", zlib.crc32(header)))
    os.truncate(tmp_path / "f", size)
    assert run(reader, "file", tmp_path / "f")[0].startswith("tensor_count: ")
    with pytest.raises(KdtrError, match=r"^f: tensor_count: 33554432; at most 65536"):
        load(tmp_path / "f")


def test_refusing_allocates_little(small: bytes) -> None:
    forged = [seal(small[:at] + patch + small[at + len(patch) :]) for at, patch, _ in FORGERIES]
    tracemalloc.start()
    for raw in forged:
        verdict(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_an_error_names_the_file_the_tensor_and_the_field(tmp_path: Path, small: bytes) -> None:
    (tmp_path / "bad.kdtr").write_bytes(small[:-64] + b"x" + small[-63:])
    with pytest.raises(KdtrError, match=r"^bad\.kdtr: tensor 'w' crc: its data was changed$"):
        load(tmp_path / "bad.kdtr")
    assert isinstance(load(tmp_path / "bad.kdtr", verify=False), KdtrFile)
