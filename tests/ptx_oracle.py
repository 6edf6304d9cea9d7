"""Arithmetic of PTX on Python integers and fractions, one value at a time: what the PTX machine is compared with.

Nothing here is shared with the machine. A float is its bits; a value is a Fraction, or "nan", "+inf", "-inf", "-0".
"""

import math
from fractions import Fraction

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}


def width(kind):
    """Bits of a PTX type."""
    return 16 if kind == "bf16" else int(kind[1:])


def signed(bits, kind):
    """Bits as the integer of an sN, uN or bN type."""
    n = width(kind)
    bits &= (1 << n) - 1
    return bits - (1 << n) if kind[0] == "s" and bits >> (n - 1) else bits


def value(bits, kind):
    """Bits as the value of a float type."""
    exponent_bits, fraction_bits = FORMATS[kind]
    sign = bits >> (exponent_bits + fraction_bits) & 1
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return "nan" if fraction else ("-inf" if sign else "+inf")
    if exponent == 0 and fraction == 0:
        return "-0" if sign else Fraction(0)
    mantissa = fraction + ((1 << fraction_bits) if exponent else 0)
    size = mantissa * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)
    return -size if sign else size


def encode(x, kind, mode="rn"):
    """A value as bits of a float type, rounded in `mode`."""
    exponent_bits, fraction_bits = FORMATS[kind]
    top = 1 << (exponent_bits + fraction_bits)
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    if x == "nan":
        return NAN[kind]
    if isinstance(x, str):
        return {"+inf": infinity, "-inf": top | infinity, "-0": top}[x]
    sign, size = (top if x < 0 else 0), abs(x)
    (1 << (exponent_bits - 1)) - 1
    low = (
        infinity - 1
        if size >= _grid(infinity, exponent_bits, fraction_bits)
        else _below(size, exponent_bits, fraction_bits)
    )
    below = _grid(low, exponent_bits, fraction_bits)
    above = _grid(low + 1, exponent_bits, fraction_bits)
    up = {"rz": False, "rm": sign != 0, "rp": sign == 0}.get(mode)
    if up is None:
        up = size - below > above - size or (size - below == above - size and low % 2 == 1)
    return sign | (low + (1 if up and size != below else 0))


def _below(size, exponent_bits, fraction_bits):
    """Bits of the largest float at or below a size: the positive floats in order are the integers 0, 1, 2, ..."""
    bias = (1 << (exponent_bits - 1)) - 1
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power = power - 1 if size < Fraction(2) ** power else power
    power = max(power, 1 - bias) if size else 1 - bias
    return int(size / Fraction(2) ** (power - fraction_bits)) + ((power + bias - 1) << fraction_bits)


def _grid(bits, exponent_bits, fraction_bits):
    """The value of positive bits, infinity being the next power of two."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponent, fraction = bits >> fraction_bits, bits & ((1 << fraction_bits) - 1)
    mantissa = fraction + ((1 << fraction_bits) if exponent else 0)
    return mantissa * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)


def negative(x):
    """Whether the sign bit is set."""
    return x in ("-inf", "-0") if isinstance(x, str) else x < 0


def minus(x):
    """−x."""
    if x == 0:
        return "-0"
    return {"nan": "nan", "+inf": "-inf", "-inf": "+inf", "-0": Fraction(0)}[x] if isinstance(x, str) else -x


def add(x, y, mode="rn"):
    """x + y exactly; a zero sum of opposite signs is −0 only when rounding down."""
    if "nan" in (x, y) or {x, y} == {"+inf", "-inf"}:
        return "nan"
    for infinity in ("+inf", "-inf"):
        if infinity in (x, y):
            return infinity
    if x == "-0" and y == "-0":
        return "-0"
    total = (0 if x == "-0" else x) + (0 if y == "-0" else y)
    if total == 0:
        both_plus = x != "-0" and y != "-0" and x == 0 and y == 0
        return "-0" if mode == "rm" and not both_plus else Fraction(0)
    return total


def multiply(x, y):
    """x · y exactly."""
    zeros, infinities = ("-0", 0), ("+inf", "-inf")
    if "nan" in (x, y) or (x in zeros and y in infinities) or (y in zeros and x in infinities):
        return "nan"
    sign = negative(x) != negative(y)
    if x in infinities or y in infinities:
        return "-inf" if sign else "+inf"
    if x in zeros or y in zeros:
        return "-0" if sign else Fraction(0)
    return x * y


def divide(x, y):
    """x / y exactly."""
    zeros, infinities = ("-0", 0), ("+inf", "-inf")
    if "nan" in (x, y) or (x in zeros and y in zeros) or (x in infinities and y in infinities):
        return "nan"
    sign = negative(x) != negative(y)
    if x in infinities or y in zeros:
        return "-inf" if sign else "+inf"
    if y in infinities or x in zeros:
        return "-0" if sign else Fraction(0)
    return x / y


def square_root(x):
    """√x, close enough below to round correctly to 53 bits."""
    if x in ("nan", "-0", "+inf") or x == 0:
        return x
    if negative(x):
        return "nan"
    scale = 4**600
    root = math.isqrt(x.numerator * scale * x.denominator)
    exact = root * root == x.numerator * scale * x.denominator
    return (Fraction(2 * root + (0 if exact else 1), 2) / x.denominator) / 2**600


def compare(name, x, y):
    """A comparison of two float values by its PTX name."""
    unordered = "nan" in (x, y)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return name.endswith("u")
    keys = [{"-inf": -math.inf, "+inf": math.inf, "-0": 0}.get(v, v) if isinstance(v, str) else v for v in (x, y)]
    return order(name.removesuffix("u"), *keys)


def kept_nan(bits, kind):
    """A float64 NaN in a shorter format: its sign, the quiet bit, the top of its payload."""
    exponent_bits, fraction_bits = FORMATS[kind]
    top = ((bits >> 63) << exponent_bits | ((1 << exponent_bits) - 1)) << fraction_bits
    return top | 1 << (fraction_bits - 1) | (bits & (1 << 51) - 1) >> (52 - fraction_bits)


def order(name, x, y):
    """A comparison of two numbers by its PTX name."""
    return {
        "eq": x == y,
        "ne": x != y,
        "lt": x < y,
        "le": x <= y,
        "gt": x > y,
        "ge": x >= y,
        "lo": x < y,
        "ls": x <= y,
        "hi": x > y,
        "hs": x >= y,
    }[name]


def extreme(x, y, low):
    """min (or max) where a NaN loses and −0 < +0."""
    if x == "nan" or y == "nan":
        return y if x == "nan" else x
    if x in ("-0", 0) and y in ("-0", 0):
        return ("-0" if "-0" in (x, y) else x) if low else (x if x == y == "-0" else Fraction(0))
    return x if compare("lt" if low else "gt", x, y) else y


def flush(x, kind="f32"):
    """A subnormal as a zero of its sign."""
    if isinstance(x, str) or x == 0 or abs(x) >= Fraction(2) ** -126:
        return x
    return "-0" if x < 0 else Fraction(0)


def whole(x, rounding):
    """Round a value to an integer value: rni, rzi, rmi, rpi."""
    if isinstance(x, str):
        return x
    n = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding](x)
    return "-0" if n == 0 and x < 0 else Fraction(n)


def to_integer(x, source, kind, rounding):
    """cvt from a float value: clamped; NaN is 0, or the top bit alone where a 64-bit type takes part."""
    n = width(kind)
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    if x == "nan":
        return 1 << (n - 1) if source == "f64" or n == 64 else 0
    if x in ("+inf", "-inf"):
        result = high if x == "+inf" else low
    else:
        rounded = whole(x, rounding)
        result = min(max(0 if rounded == "-0" else int(rounded), low), high)
    return result & ((1 << n) - 1)
