"""Every arithmetic form of the PTX machine against Python integers and fractions, through PTX text, bit for bit."""

import math
from itertools import product

import numpy as np
import ptx_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_oracle import (
    add,
    compare,
    divide,
    encode,
    extreme,
    flush,
    minus,
    multiply,
    negative,
    order,
    signed,
    square_root,
    value,
    width,
)

from ddtree.ptx import GlobalMemory, PtxError, load_ptx

SPECIAL_FLOATS = [
    "-0",
    0.0,
    1.0,
    -1.0,
    1.5,
    0.5,
    2.5,
    -3.5,
    "+inf",
    "-inf",
    "nan",
    255.5,
    1 / 3,
    2.0**31,
    -(2.0**31),
    2.0**63,
]


def specials(kind):
    """Bits worth trying for a type: zeros, extremes, subnormals, NaN with payloads."""
    n = width(kind)
    if "f" not in kind:
        return [
            0,
            1,
            2,
            3,
            7,
            31,
            32,
            33,
            63,
            64,
            255,
            (1 << n) - 1,
            (1 << n) - 2,
            1 << (n - 1),
            (1 << (n - 1)) - 1,
            0x5555555555555555 % (1 << n),
        ]
    exponent, fraction = oracle.FORMATS[kind]
    top, inf = 1 << (n - 1), ((1 << exponent) - 1) << fraction
    bits = [
        1,
        2,
        (1 << fraction) - 1,
        1 << fraction,
        (1 << fraction) + 1,
        inf - 1,
        inf + 1,
        inf | 1 << (fraction - 1),
        top | inf | 3,
        inf | 0x5A5A5A5A5A5A5A % (1 << fraction),
    ]
    bits += [top | 1, top | (1 << fraction), top | (inf - 1)]
    return bits + [encode(x if isinstance(x, str) else oracle.Fraction(x), kind) for x in SPECIAL_FLOATS]


def samples(kinds, count=150, few=12):
    """Tuples of operand bits: all pairs of specials, and random bits (for floats also of like size)."""
    rng = np.random.default_rng(len(kinds) * 100 + sum(map(ord, "".join(kinds))))
    lists = [specials(kind) for kind in kinds]
    if len(kinds) > 2:
        lists = [list(rng.permutation(np.array(each, object))[:few]) for each in lists]
    rows = list(product(*lists))
    for _ in range(count):
        row = []
        near = rng.random() < 0.7
        for kind in kinds:
            bits = int(rng.integers(0, 1 << 63)) * 2 + int(rng.integers(0, 2))
            bits %= 1 << width(kind)
            if near and "f" in kind:
                bits = encode(oracle.Fraction(float(rng.standard_normal() * 2.0 ** rng.integers(-3, 4))), kind)
            row.append(bits)
        rows.append(tuple(row))
    return rows


def run(code, kinds, result, rows):
    """Execute PTX for every row of operand bits;
    the result bits. In `code`, {0} is the result and {1}, ... operands."""
    sizes = [32 if kind == "pred" else width(kind) for kind in kinds]
    text = (
        ".version 9.5\n.target sm_120\n.address_size 64\n.visible .entry k("
        + ", ".join(f".param .u64 a{i}" for i in range(len(kinds) + 1))
        + ") {\n"
    )
    text += (
        f".reg .pred %p<9>;\n.reg .b16 %h<9>;\n.reg .b32 %r<9>;\n.reg .b64 %d<9>;\n.reg .b64 %a<{len(kinds) + 3}>;\n"
    )
    text += "mov.u32 %r0, %ctaid.x;\nmov.u32 %r7, %ntid.x;\nmov.u32 %r8, %tid.x;\nmad.lo.s32 %r0, %r0, %r7, %r8;\n"
    names = {16: "%h", 32: "%r", 64: "%d", 8: "%h"}
    for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        text += f"ld.param.u64 %a{i}, [a{i}];\nmad.wide.u32 %a{i}, %r0, {size // 8}, %a{i};\n"
        text += f"ld.global.b{size} {names[size]}{i + 1}, [%a{i}];\n"
        if kind == "pred":
            text += f"setp.ne.u32 %p{i + 1}, %r{i + 1}, 0;\n"
    operands = [
        f"{'%p' if kind == 'pred' else names[size]}{i + 1}"
        for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    ]
    size = 32 if result == "pred" else width(result)
    target = "%p0" if result == "pred" else {16: "%h0", 32: "%r7", 64: "%d0", 8: "%h0"}[size]
    text += "{ .reg .b32 %scratch<3>; .reg .b64 %wide<3>;\n" + code.format(target, *operands) + ";\n}\n"
    if result == "pred":
        text += "selp.u32 %r7, 1, 0, %p0;\n"
        target = "%r7"
    n = len(kinds)
    text += f"ld.param.u64 %a{n}, [a{n}];\nmad.wide.u32 %a{n}, %r0, {size // 8}, %a{n};\n"
    text += f"st.global.b{size} [%a{n}], {target};\nret;\n}}\n"
    blocks = -(-len(rows) // 256)
    memory, addresses = GlobalMemory(), []
    for column, bits in zip(zip(*rows, strict=True), sizes, strict=True):
        padded = np.zeros(blocks * 256, f"u{bits // 8}")
        padded[: len(rows)] = np.array(column, f"u{bits // 8}")
        addresses.append(memory.bind(padded))
    out = np.zeros(blocks * 256, f"u{size // 8}")
    load_ptx(text).launch("k", blocks, 256, [*addresses, memory.bind(out)], memory=memory)
    return out[: len(rows)].tolist()


def whole_instruction(opcode, count):
    """`opcode {0}, {1}, ...` with `count` sources."""
    return f"{opcode} " + ", ".join(f"{{{i}}}" for i in range(count + 1))


def check(opcode, kinds, result, expected, rows=None, immediate=""):
    """Compare an instruction with `expected(*bits)`; float64 NaN may have any payload."""
    rows = rows or samples(kinds)
    got = run(whole_instruction(opcode, len(kinds)) + immediate, kinds, result, rows)
    for row, bits in zip(rows, got, strict=True):
        wanted = expected(*row)
        if result == "f64" and value(wanted, "f64") == "nan" and value(bits, "f64") == "nan":
            continue
        assert bits == wanted, f"{opcode} {[hex(x) for x in row]}: got {bits:#x}, expected {wanted:#x}"


def floats(kind, function, mode="rn", ftz=False):
    """Turn a function of values into one of bits."""

    def of_bits(*bits):
        values = [value(b, kind) for b in bits]
        result = function(*(map(flush, values) if ftz else values))
        return flush_bits(encode(result, kind, mode)) if ftz else encode(result, kind, mode)

    return of_bits


def flush_bits(bits):
    """A subnormal float32 result as a zero of its sign."""
    return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits


def integers(kind, function):
    """Turn a function of integers into one of bits."""
    return lambda *bits: function(*(signed(b, kind) for b in bits)) % (1 << width(kind))


INTEGERS = ["s16", "u16", "s32", "u32", "s64", "u64"]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_sums_and_products_wrap(kind):
    n = width(kind)
    check(f"add.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: a + b))
    check(f"sub.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: a - b))
    check(f"mul.lo.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: a * b))
    check(f"mul.hi.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: a * b >> n))
    check(f"mad.lo.{kind}", [kind] * 3, kind, integers(kind, lambda a, b, c: a * b + c))
    check(f"mad.hi.{kind}", [kind] * 3, kind, integers(kind, lambda a, b, c: (a * b >> n) + c))
    check(f"sad.{kind}", [kind] * 3, kind, integers(kind, lambda a, b, c: abs(a - b) + c))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products_have_twice_the_bits(kind):
    wide = f"{kind[0]}{2 * width(kind)}"
    exact = lambda a, b, c=0: (signed(a, kind) * signed(b, kind) + signed(c, wide)) % (1 << width(wide))  # noqa: E731
    check(f"mul.wide.{kind}", [kind] * 2, wide, exact)
    check(f"mad.wide.{kind}", [kind, kind, wide], wide, exact)


def _truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_division_truncates(kind):
    ones = (1 << width(kind)) - 1
    check(f"div.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: _truncated(a, b) if b else ones))
    check(f"rem.{kind}", [kind] * 2, kind, integers(kind, lambda a, b: a - _truncated(a, b) * b if b else ones))


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_extremes_and_signs(kind):
    check(f"min.{kind}", [kind] * 2, kind, integers(kind, min))
    check(f"max.{kind}", [kind] * 2, kind, integers(kind, max))
    if kind[0] == "s":
        check(f"abs.{kind}", [kind], kind, integers(kind, abs))
        check(f"neg.{kind}", [kind], kind, integers(kind, lambda a: -a))


def test_saturating_sums():
    clamp = lambda x: min(max(x, -(1 << 31)), (1 << 31) - 1)  # noqa: E731
    check("add.sat.s32", ["s32"] * 2, "s32", integers("s32", lambda a, b: clamp(a + b)))
    check("sub.sat.s32", ["s32"] * 2, "s32", integers("s32", lambda a, b: clamp(a - b)))


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_logic_and_shifts(kind):
    n = width(kind)
    check(f"and.{kind}", [kind] * 2, kind, lambda a, b: a & b)
    check(f"or.{kind}", [kind] * 2, kind, lambda a, b: a | b)
    check(f"xor.{kind}", [kind] * 2, kind, lambda a, b: a ^ b)
    check(f"not.{kind}", [kind], kind, lambda a: ~a % (1 << n))
    check(f"cnot.{kind}", [kind], kind, lambda a: int(a == 0))
    check(f"shl.{kind}", [kind, "u32"], kind, lambda a, s: (a << min(s, n)) % (1 << n))
    for signedness in "us":
        name = f"{signedness}{n}"
        check(f"shr.{name}", [name, "u32"], name, lambda a, s, name=name: (signed(a, name) >> min(s, n)) % (1 << n))


def test_predicate_logic():
    rows = list(product([0, 1], repeat=2))
    check("and.pred", ["pred"] * 2, "pred", lambda a, b: a & b, rows)
    check("or.pred", ["pred"] * 2, "pred", lambda a, b: a | b, rows)
    check("xor.pred", ["pred"] * 2, "pred", lambda a, b: a ^ b, rows)
    check("not.pred", ["pred"], "pred", lambda a: 1 - a, [(0,), (1,)])


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode):
    amount = (lambda s: s & 31) if mode == "wrap" else (lambda s: min(s, 32))
    check(f"shf.r.{mode}.b32", ["b32"] * 3, "b32", lambda a, b, s: ((b << 32 | a) >> amount(s)) % (1 << 32))
    check(f"shf.l.{mode}.b32", ["b32"] * 3, "b32", lambda a, b, s: ((b << 32 | a) << amount(s)) >> 32 & 0xFFFFFFFF)


def _leading(a, n):
    return n - a.bit_length()


def _highest(a, kind, shift):
    a = signed(a, kind)
    a = ~a if a < 0 else a
    return 0xFFFFFFFF if a == 0 else width(kind) - a.bit_length() if shift else a.bit_length() - 1


@pytest.mark.parametrize("n", [32, 64])
def test_bit_counts(n):
    check(f"popc.b{n}", [f"b{n}"], "u32", lambda a: a.bit_count())
    check(f"clz.b{n}", [f"b{n}"], "u32", lambda a: _leading(a, n))
    check(f"brev.b{n}", [f"b{n}"], f"b{n}", lambda a: int(f"{a:0{n}b}"[::-1], 2))
    for kind in (f"u{n}", f"s{n}"):
        check(f"bfind.{kind}", [kind], "u32", lambda a, kind=kind: _highest(a, kind, False))
        check(f"bfind.shiftamt.{kind}", [kind], "u32", lambda a, kind=kind: _highest(a, kind, True))


def _extracted(a, start, length, kind):
    """bfe as the pseudocode of the PTX ISA writes it, bit by bit."""
    n, start, length = width(kind), start & 255, length & 255
    top = n - 1
    sign = 0 if kind[0] == "u" or length == 0 else a >> min(start + length - 1, top) & 1
    return sum(((a >> (start + i) & 1) if i < length and start + i <= top else sign) << i for i in range(n))


def _inserted(a, b, start, length, n):
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < n:
            b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
    return b


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    rows = [
        (a, s, n)
        for a in [*specials(kind), 81985529216486895 % (1 << width(kind))]
        for s in (0, 1, 5, 31, 32, 63, 64, 255)
        for n in (0, 1, 4, 31, 32, 33, 64, 255)
    ]
    check(f"bfe.{kind}", [kind, "u32", "u32"], kind, lambda a, s, n: _extracted(a, s, n, kind), rows)
    if kind[0] == "u":
        n = width(kind)
        both = [(a ^ 0x5A5A5A5A, *row) for row in rows for a in (row[0],)]
        check(f"bfi.b{n}", [f"b{n}"] * 2 + ["u32"] * 2, f"b{n}", lambda a, b, s, m: _inserted(a, b, s, m, n), both)


def test_masks_and_extension():
    rows = [(a, b) for a in (0, 3, 31, 32, 200) for b in (0, 1, 31, 32, 40)]
    check("bmsk.clamp.b32", ["u32"] * 2, "b32", lambda a, b: (((1 << min(b, 32)) - 1) << a) % (1 << 32), rows)
    check("bmsk.wrap.b32", ["u32"] * 2, "b32", lambda a, b: (((1 << (b & 31)) - 1) << (a & 31)) % (1 << 32), rows)
    check(
        "szext.clamp.s32",
        ["s32", "u32"],
        "s32",
        lambda a, n: _extracted(a, 0, min(n, 255), "s32"),
        [(a, n) for a in specials("s32") for n in (0, 1, 8, 31, 32, 99)],
    )


def _permuted(a, b, selector):
    source = [(b << 32 | a) >> (8 * i) & 255 for i in range(8)]
    picked = [
        source[s & 7] if not s & 8 else 255 * (source[s & 7] >> 7) for s in (selector >> (4 * i) & 15 for i in range(4))
    ]
    return int.from_bytes(bytes(picked), "little")


def test_byte_permutation_and_three_input_logic():
    check("prmt.b32", ["b32"] * 3, "b32", _permuted)
    for table in (0x80, 0xFE, 0x96, 0xCA, 0x1B):

        def looked_up(a, b, c, table=table):
            return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

        check("lop3.b32", ["b32"] * 3, "b32", looked_up, samples(["b32"] * 3, 60, 6), f", {table}")


def _dot(a, b, c, left, right):
    parts = [(signed(a >> 8 * i, left), signed(b >> 8 * i, right)) for i in range(4)]
    return (sum(x * y for x, y in parts) + c) % (1 << 32)


@pytest.mark.parametrize(("left", "right"), list(product(["s", "u"], repeat=2)))
def test_byte_dot_products(left, right):
    check(f"dp4a.{left}32.{right}32", ["b32"] * 3, "b32", lambda a, b, c: _dot(a, b, c, f"{left}8", f"{right}8"))


@pytest.mark.parametrize("n", [32, 64])
def test_carries_run_through_long_sums(n):
    """128-bit (or 64-bit) sums, differences and products from halves, compared with Python's integers."""
    rng = np.random.default_rng(0)
    top = 1 << n
    values = [0, 1, top - 1, top - 2, top // 2, 12345]
    rows = [tuple(values[i] for i in rng.integers(0, 6, 4)) for _ in range(300)]
    kinds, low = [f"b{n}"] * 4, "%scratch0" if n == 32 else "%wide0"
    other = low.replace("0", "1")
    for name, operation in (("add", int.__add__), ("sub", int.__sub__)):
        got = run(f"{name}.cc.u{n} {low}, {{1}}, {{3}}; {name}c.u{n} {{0}}, {{2}}, {{4}}", kinds, f"b{n}", rows)
        assert got == [(operation(a + b * top, c + d * top) >> n) % top for a, b, c, d in rows]
    got = run(
        f"mad.lo.cc.u{n} {low}, {{1}}, {{2}}, {{3}}; madc.hi.u{n} {{0}}, {{1}}, {{2}}, {{4}}", kinds, f"b{n}", rows
    )
    assert got == [((a * b + c + d * top) >> n) % top for a, b, c, d in rows]
    chain = f"add.cc.u{n} {low}, {{1}}, {{3}}; addc.cc.u{n} {other}, {{2}}, {{4}}; addc.u{n} {{0}}, 0, 0"
    assert run(chain, kinds, f"b{n}", rows) == [(a + b * top + c + d * top) >> (2 * n) for a, b, c, d in rows]


FLOATS = ["f16", "bf16", "f32", "f64"]
MODES = ["rn", "rz", "rm", "rp"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_float_sums_and_products_round_as_told(kind, mode):
    few = 8 if kind == "f64" else 12
    check(f"add.{mode}.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: add(a, b, mode), mode))
    check(f"sub.{mode}.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: add(a, minus(b), mode), mode))
    check(f"mul.{mode}.{kind}", [kind] * 2, kind, floats(kind, multiply, mode))
    check(
        f"fma.{mode}.{kind}",
        [kind] * 3,
        kind,
        floats(kind, lambda a, b, c: add(multiply(a, b), c, mode), mode),
        samples([kind] * 3, 500, few),
    )


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_short_floats(kind):
    for suffix in ("", ".rn"):
        check(f"add{suffix}.{kind}", [kind] * 2, kind, floats(kind, add))
    check(f"sub.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: add(a, minus(b))))
    check(f"mul.{kind}", [kind] * 2, kind, floats(kind, multiply))
    check(
        f"fma.rn.{kind}",
        [kind] * 3,
        kind,
        floats(kind, lambda a, b, c: add(multiply(a, b), c)),
        samples([kind] * 3, 1500),
    )
    check(f"min.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: extreme(a, b, True)))
    check(f"max.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: extreme(a, b, False)))
    check(f"neg.{kind}", [kind], kind, floats(kind, minus))
    check(f"abs.{kind}", [kind], kind, floats(kind, lambda a: minus(a) if negative(a) else a))


def pairs(function):
    """A function of 16-bit values on both halves of 32 bits."""
    return lambda *x: function(*(v & 0xFFFF for v in x)) | function(*(v >> 16 for v in x)) << 16


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_pairs_are_two_short_floats(kind):
    one = samples([kind] * 3, 400)
    rows = [tuple(a | b << 16 for a, b in zip(x, y, strict=True)) for x, y in zip(one, reversed(one), strict=True)]
    check(f"fma.rn.{kind}x2", ["b32"] * 3, "b32", pairs(floats(kind, lambda a, b, c: add(multiply(a, b), c))), rows)
    two = [row[:2] for row in rows]
    check(f"add.{kind}x2", ["b32"] * 2, "b32", pairs(floats(kind, add)), two)
    check(f"mul.{kind}x2", ["b32"] * 2, "b32", pairs(floats(kind, multiply)), two)
    check(f"max.{kind}x2", ["b32"] * 2, "b32", pairs(floats(kind, lambda a, b: extreme(a, b, False))), two)
    check(f"neg.{kind}x2", ["b32"], "b32", pairs(floats(kind, minus)), [row[:1] for row in rows])


def test_flush_to_zero_of_float32():
    check("add.ftz.f32", ["f32"] * 2, "f32", floats("f32", add, ftz=True))
    check("mul.ftz.f32", ["f32"] * 2, "f32", floats("f32", multiply, ftz=True))
    check("fma.rn.ftz.f32", ["f32"] * 3, "f32", floats("f32", lambda a, b, c: add(multiply(a, b), c), ftz=True))
    check("min.ftz.f32", ["f32"] * 2, "f32", floats("f32", lambda a, b: extreme(a, b, True), ftz=True))


def clamp_unit(x):
    """.sat: NaN and everything below 0 become +0, everything above 1 becomes 1."""
    if isinstance(x, str):
        return oracle.Fraction(int(x == "+inf"))
    return min(max(x, oracle.Fraction(0)), oracle.Fraction(1))


def test_saturation_of_floats():
    check("add.sat.f32", ["f32"] * 2, "f32", floats("f32", lambda a, b: clamp_unit(add(a, b))))
    check("fma.rn.sat.f32", ["f32"] * 3, "f32", floats("f32", lambda a, b, c: clamp_unit(add(multiply(a, b), c))))
    check("cvt.sat.f32.f32", ["f32"], "f32", floats("f32", clamp_unit))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_division_roots_extremes_and_signs(kind):
    check(f"div.rn.{kind}", [kind] * 2, kind, floats(kind, divide))
    check(f"rcp.rn.{kind}", [kind], kind, floats(kind, lambda a: divide(oracle.Fraction(1), a)))
    check(f"sqrt.rn.{kind}", [kind], kind, floats(kind, square_root))
    check(f"min.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: extreme(a, b, True)))
    check(f"max.{kind}", [kind] * 2, kind, floats(kind, lambda a, b: extreme(a, b, False)))
    top = 1 << (width(kind) - 1)
    check(f"copysign.{kind}", [kind] * 2, kind, lambda a, b: b & ~top | a & top)
    numbers = [row for row in samples([kind]) if value(row[0], kind) != "nan"]
    check(f"neg.{kind}", [kind], kind, lambda a: a ^ top, numbers)
    check(f"abs.{kind}", [kind], kind, lambda a: a & ~top, numbers)


def test_extremes_with_three_operands_and_with_nan_winning():
    three = lambda a, b, c: extreme(extreme(a, b, False), c, False)  # noqa: E731
    check("max.f32", ["f32"] * 3, "f32", floats("f32", three))
    check(
        "min.NaN.f32", ["f32"] * 2, "f32", floats("f32", lambda a, b: "nan" if "nan" in (a, b) else extreme(a, b, True))
    )


FLOAT_TESTS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("kind", FLOATS)
def test_float_comparisons_know_unordered(kind):
    for name in FLOAT_TESTS:
        check(
            f"setp.{name}.{kind}",
            [kind] * 2,
            "pred",
            lambda a, b, name=name: int(compare(name, value(a, kind), value(b, kind))),
        )


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_comparisons(kind):
    names = ["eq", "ne", "lt", "le", "gt", "ge"] + (["lo", "ls", "hi", "hs"] if kind[0] == "u" else [])
    for name in names:
        check(
            f"setp.{name}.{kind}",
            [kind] * 2,
            "pred",
            lambda a, b, name=name: int(order(name, signed(a, kind), signed(b, kind))),
        )


def test_comparisons_joined_with_a_predicate_and_sets():
    rows = [(*row, i % 2) for i, row in enumerate(samples(["s32"] * 2))]
    for join, operation in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        check(
            f"setp.lt.{join}.s32",
            ["s32", "s32", "pred"],
            "pred",
            lambda a, b, c, operation=operation: operation(int(signed(a, "s32") < signed(b, "s32")), c),
            rows,
        )
    check(
        "set.gt.u32.f32", ["f32"] * 2, "u32", lambda a, b: 0xFFFFFFFF * compare("gt", value(a, "f32"), value(b, "f32"))
    )
    check("set.le.f32.s32", ["s32"] * 2, "f32", lambda a, b: 0x3F800000 * (signed(a, "s32") <= signed(b, "s32")))
    check(
        "setp.lt.ftz.f32",
        ["f32"] * 2,
        "pred",
        lambda a, b: int(compare("lt", flush(value(a, "f32")), flush(value(b, "f32")))),
    )


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "f32"])
def test_selection_moves_bits(kind):
    rows = [(*row, i % 2) for i, row in enumerate(samples([kind] * 2))]
    check(f"selp.{kind}", [kind, kind, "pred"], kind, lambda a, b, p: a if p else b, rows)
    if kind == "b32":
        check("slct.b32.s32", ["b32", "b32", "s32"], "b32", lambda a, b, c: a if signed(c, "s32") >= 0 else b)


def test_number_kinds():
    tests = {
        "finite": lambda x: not isinstance(x, str) or x == "-0",
        "infinite": lambda x: x in ("+inf", "-inf"),
        "notanumber": lambda x: x == "nan",
        "number": lambda x: x != "nan",
        "subnormal": lambda x: x not in ("nan", "+inf", "-inf", "-0") and 0 < abs(x) < oracle.Fraction(2) ** -126,
        "normal": lambda x: x == "-0" or (not isinstance(x, str) and (x == 0 or abs(x) >= oracle.Fraction(2) ** -126)),
    }
    for name, test in tests.items():
        check(f"testp.{name}.f32", ["f32"], "pred", lambda a, test=test: int(test(value(a, "f32"))))


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("source", FLOATS)
def test_float_to_integer_clamps(source, rounding):
    for kind in ("s32", "u32", "s64", "u64", "s16", "u16"):
        check(
            f"cvt.{rounding}.{kind}.{source}",
            [source],
            kind,
            lambda a, kind=kind: oracle.to_integer(value(a, source), source, kind, rounding),
        )
    if source in ("f32", "f64"):
        check(
            f"cvt.{rounding}.{source}.{source}", [source], source, floats(source, lambda a: oracle.whole(a, rounding))
        )


@pytest.mark.parametrize("mode", MODES)
def test_integer_to_float_rounds_as_told(mode):
    for source, to in product(["s32", "u32", "s64", "u64", "s16", "u16"], ["f32", "f64"]):
        check(
            f"cvt.{mode}.{to}.{source}",
            [source],
            to,
            lambda a, s=source, t=to: encode(oracle.Fraction(signed(a, s)), t, mode),
        )
    if mode in ("rn", "rz"):
        check(f"cvt.{mode}.f16.s32", ["s32"], "f16", lambda a: encode(oracle.Fraction(signed(a, "s32")), "f16", mode))


def test_float_to_float():
    for source, to in product(FLOATS, FLOATS):
        if source == to:
            continue
        narrows = width(to) < width(source) or {source, to} == {"f16", "bf16"}
        modes = MODES if (source, to) == ("f64", "f32") else ["rn", "rz"] if narrows else [""]
        for mode in modes:
            dotted = f".{mode}" if mode else ""
            check(f"cvt{dotted}.{to}.{source}", [source], to, converted(source, to, mode or "rn"))


def converted(source, to, mode):
    """cvt between float types: a NaN from float64, or from bf16 to f32, keeps what it can; others become canonical."""

    def of_bits(bits):
        if value(bits, source) == "nan" and source == "f64":
            return oracle.kept_nan(bits, to)
        if value(bits, source) == "nan" and (source, to) == ("bf16", "f32"):
            return bits << 16
        return encode(value(bits, source), to, mode)

    return of_bits


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packing_two_floats(kind):
    both = lambda a, b: encode(value(a, "f32"), kind) << 16 | encode(value(b, "f32"), kind)  # noqa: E731
    check(f"cvt.rn.{kind}x2.f32", ["f32"] * 2, "b32", both)


def test_integer_to_integer():
    kinds = ["s8", "u8", *INTEGERS]
    for source, to in product(INTEGERS, kinds):
        n = max(width(to), 16)
        result = f"{to[0]}{n}"
        check(f"cvt.{to}.{source}", [source], result, lambda a, s=source, t=to, n=n: signed(signed(a, s), t) % (1 << n))
        low, high = (-(1 << width(to) - 1), (1 << width(to) - 1) - 1) if to[0] == "s" else (0, (1 << width(to)) - 1)
        ends = [signed(bits, source) for bits in specials(source)]
        if low <= min(ends) and max(ends) <= high:
            with pytest.raises(PtxError, match="unsupported"):  # nothing could be clamped: ptxas refuses it too
                run(f"cvt.sat.{to}.{source} {{0}}, {{1}}", [source], result, [(0,)])
            continue
        check(
            f"cvt.sat.{to}.{source}",
            [source],
            result,
            lambda a, s=source, n=n, low=low, high=high: min(max(signed(a, s), low), high) % (1 << n),
        )


APPROXIMATIONS = {
    "ex2.approx.f32": (lambda x: 2.0**x, 2**-22),
    "ex2.approx.ftz.f32": (lambda x: 2.0**x, 2**-22),
    "rcp.approx.f32": (lambda x: 1 / x, 2**-23),
    "sqrt.approx.f32": (lambda x: math.sqrt(abs(x)), 2**-23),
    "rsqrt.approx.f32": (lambda x: 1 / math.sqrt(x), 2**-22.9),
    "lg2.approx.f32": (lambda x: math.log2(x), 2**-22),
    "tanh.approx.f32": (math.tanh, 2**-11),
    "rcp.approx.ftz.f64": (lambda x: 1 / x, 2**-20),  # 20 bits are kept
    "rsqrt.approx.f64": (lambda x: 1 / math.sqrt(x), 2**-22.9),
}


@pytest.mark.parametrize("opcode", APPROXIMATIONS)
def test_approximations_keep_the_documented_bound(opcode):
    """The bounds are the PTX ISA's; the machine rounds correctly (to the upper word in float64), which lies inside."""
    function, bound = APPROXIMATIONS[opcode]
    kind = opcode[-3:]
    dtype, bits = ("f4", "u4") if kind == "f32" else ("f8", "u8")
    x = np.random.default_rng(0).uniform(0.1, 30, 500).astype(dtype)
    got = np.array(run(whole_instruction(opcode, 1), [kind], kind, [(int(v),) for v in x.view(bits)]), bits).view(dtype)
    wanted = np.array([function(float(v)) for v in x])
    assert (abs(got - wanted) <= bound * np.maximum(abs(wanted), 1 if "lg2" in opcode else 0)).all()


def test_sine_and_cosine_keep_the_documented_bound():
    x = np.linspace(-np.pi, np.pi, 500).astype("f4")
    for name, function in (("sin", np.sin), ("cos", np.cos)):
        got = np.array(
            run(f"{name}.approx.f32 {{0}}, {{1}}", ["f32"], "f32", [(int(v),) for v in x.view("u4")]), "u4"
        ).view("f4")
        assert (abs(got - function(x.astype("f8"))) <= 2**-20.5).all()


def test_special_results_of_approximations():
    inf, nan = 0x7F800000, 0x7FFFFFFF
    cases = {
        "ex2.approx.ftz.f32": {0xFF800000: 0, inf: inf, 1: 0x3F800000, nan: nan},
        "rcp.approx.f32": {0: inf, 0x80000000: 0xFF800000, inf: 0},
        "lg2.approx.f32": {0: 0xFF800000, inf: inf, 0xBF800000: nan},
        "sqrt.approx.f32": {0x80000000: 0x80000000, 0xBF800000: nan},
        "rsqrt.approx.f32": {0: inf, inf: 0, 0xBF800000: nan},
    }
    for opcode, results in cases.items():
        assert run(whole_instruction(opcode, 1), ["f32"], "f32", [(bits,) for bits in results]) == list(
            results.values()
        ), opcode


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(*[st.floats(width=64)] * 3), min_size=20, max_size=60))
def test_double_fma_has_one_rounding(lanes):
    rows = [tuple(int(np.float64(x).view("u8")) for x in lane) for lane in lanes]
    check("fma.rn.f64", ["f64"] * 3, "f64", floats("f64", lambda a, b, c: add(multiply(a, b), c)), rows)


def test_fma_beside_a_tie_that_float64_cannot_see():
    """The product of two odd 13-bit integers has 25 bits: a tie in float32, and the sum is a hair beside it."""
    rng = np.random.default_rng(6)
    left, right = ((rng.integers(2050, 2896, 400) * 2 + 1) / 4096 for _ in range(2))
    a, b = left.astype("f4"), right.astype("f4")
    c = rng.choice([2.0**-70, -(2.0**-70), 2.0**-60, 0.0], 400).astype("f4")
    rows = [tuple(int(v) for v in row) for row in zip(a.view("u4"), b.view("u4"), c.view("u4"), strict=True)]
    for mode in MODES:
        exact = floats("f32", lambda a, b, c, mode=mode: add(multiply(a, b), c, mode), mode)
        check(f"fma.{mode}.f32", ["f32"] * 3, "f32", exact, rows)


def test_fma_at_ties_and_cancellations():
    """Sums that lie on, or a hair beside, a rounding boundary: a second rounding would show."""
    rng = np.random.default_rng(5)
    for kind, digits, bits in (("f32", 24, "u4"), ("f64", 53, "u8")):
        dtype = bits.replace("u", "f")
        a = (1 + rng.integers(0, 1 << (digits - 1), 400) / 2.0 ** (digits - 1)).astype(dtype)
        b = (1 + 2.0 ** -rng.integers(1, digits, 400)).astype(dtype)
        c = np.concatenate(
            [-(a * b)[:200], (a * 2.0 ** -rng.integers(digits - 2, 2 * digits, 400).astype(dtype))[200:]]
        ).astype(dtype)
        rows = [tuple(int(v) for v in row) for row in zip(a.view(bits), b.view(bits), c.view(bits), strict=True)]
        check(f"fma.rn.{kind}", [kind] * 3, kind, floats(kind, lambda a, b, c: add(multiply(a, b), c)), rows)


@pytest.mark.parametrize(
    "opcode",
    [
        "frob.s32 %r7, %r1, %r2",
        "add.s33 %r7, %r1, %r2",
        "mul.s32 %r7, %r1, %r2",
        "cvt.f32.s32.x %r7, %r1",
        "add.rn.rz.f32 %r7, %r1, %r2",
        "setp.zz.s32 %p0, %r1, %r2",
        "prmt.b32.f4e %r7, %r1, %r2, %r3",
    ],
)
def test_an_unknown_opcode_is_refused_with_its_line(opcode):
    text = f".version 9.5\n.target sm_120\n.entry k() {{\n.reg .pred %p<3>; .reg .b32 %r<9>;\n{opcode};\nret; }}"
    with pytest.raises(PtxError) as caught:
        load_ptx(text)
    assert caught.value.kind == "unsupported" and caught.value.ptx_line == 5
    assert opcode.split()[0] in str(caught.value)


@pytest.mark.parametrize(
    "code",
    [
        "add.f32.bf16 {0}, {1}, {2}",
        "fma.rn.f32.f16 {0}, {1}, {2}, {2}",
        "mul.lo.f32 {0}, {1}, {2}",
        "fma.rn.s32 {0}, {1}, {2}, {2}",
        "add.u32.f32 {0}, {1}, {2}",
        "cvt.f32.s32 {0}, {1}",
        "mul.rn.u32 {0}, {1}, {2}",
        "mul.wide.u64 {0}, {1}, {2}",
        "mad.wide.s64 {0}, {1}, {2}, {2}",
        "cvt.rn.u32.s32 {0}, {1}",
        "cvt.rn.sat.f32.u32 {0}, {1}",
        "cvt.rn.f64.f32 {0}, {1}",
        "cvt.f16.f32 {0}, {1}",
        "abs.u32 {0}, {1}",
        "min.b32 {0}, {1}, {2}",
        "min.s32 {0}, {1}, {2}, {2}",
        "abs.ftz.f16 {0}, {1}",
        "div.f32 {0}, {1}, {2}",
        "fma.f32 {0}, {1}, {2}, {2}",
        "shl.u32 {0}, {1}, {2}",
        "sad.f32 {0}, {1}, {2}, {2}",
        "popc.u32 {0}, {1}",
        "copysign.s32 {0}, {1}, {2}",
        "clz.shiftamt.b32 {0}, {1}",
        "selp.u32.u32 {0}, {1}, {2}, %p1",
        "bfe.b32 {0}, {1}, 1, 2",
    ],
)
def test_forms_that_ptx_does_not_have_are_refused(code):
    with pytest.raises(PtxError) as caught:
        run(code, ["u32", "u32"], "u32", [(1, 2)])
    assert caught.value.kind == "unsupported" and caught.value.ptx_line


@pytest.mark.parametrize("test", ["setp.lo.s32", "setp.lt.b32", "setp.eq.f16x2", "setp.ftz.eq.s32", "setp.lt.s32.s32"])
def test_comparisons_that_ptx_does_not_have_are_refused(test):
    with pytest.raises(PtxError, match="unsupported"):
        run(f"{test} {{0}}, {{1}}, {{2}}", ["u32", "u32"], "pred", [(1, 2)])
