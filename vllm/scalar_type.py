"""Names of number formats, as quantisation code spells them. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarType:
    """A number format.

    Attributes:
        exponent: bits of the exponent; 0 for integers.
        mantissa: bits of the mantissa, or of an integer without its sign.
        bias: subtracted from the stored value.
        finite_only: whether there is no infinity.
    """

    exponent: int = 0
    mantissa: int
    signed: bool = True
    bias: int = 0
    finite_only: bool = False

    @property
    def size_bits(self) -> int:
        """Bits of one number."""
        return self.exponent + self.mantissa + int(self.signed)

    def is_integer(self) -> bool:
        """Whether it has no exponent."""
        return self.exponent == 0

    def is_floating_point(self) -> bool:
        """Whether it has an exponent."""
        return self.exponent > 0

    def has_bias(self) -> bool:
        """Whether stored values are shifted."""
        return self.bias != 0

    def max(self) -> int | float:
        """Return the largest number."""
        if self.is_integer():
            return (1 << self.mantissa) - 1 - self.bias
        top = (1 << self.exponent) - (1 if self.finite_only else 2)
        fraction = (1 << self.mantissa) - (2 if self.finite_only else 1)
        power: float = 2.0 ** (top - ((1 << (self.exponent - 1)) - 1))
        return power * (1 + fraction / (1 << self.mantissa))

    def min(self) -> int | float:
        """Return the smallest number."""
        if self.is_integer():
            return -(1 << self.mantissa) - self.bias if self.signed else -self.bias
        return -self.max()


class scalar_types:
    """The formats by name."""

    int4 = ScalarType(mantissa=3)
    uint4 = ScalarType(mantissa=4, signed=False)
    int8 = ScalarType(mantissa=7)
    uint8 = ScalarType(mantissa=8, signed=False)
    float8_e4m3fn = ScalarType(exponent=4, mantissa=3, finite_only=True)
    float8_e5m2 = ScalarType(exponent=5, mantissa=2)
    float16_e8m7 = ScalarType(exponent=8, mantissa=7)
    float16_e5m10 = ScalarType(exponent=5, mantissa=10)
    float6_e3m2f = ScalarType(exponent=3, mantissa=2, finite_only=True)
    uint4b8 = ScalarType(mantissa=4, signed=False, bias=8)
    uint8b128 = ScalarType(mantissa=8, signed=False, bias=128)
    bfloat16 = float16_e8m7
    float16 = float16_e5m10
