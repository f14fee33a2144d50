"""Rounding to 16 bits and the SiLU activation, inside of kernels, in the fewest instructions.

Inlined into the kernels of layers with a state. What Triton makes of x * sigmoid(x) is a dozen
instructions, and a number that is rounded only to go on with it takes a unit of a quarter of the
rate; both would be the limit of kernels that only read and write. The interpreter, which knows no
assembly, runs the plain expressions.

Source: the PTX manual, `cvt`, `ex2` and `rcp`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

_IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return the numbers of `dtype` nearest to x, in float32."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; "
            "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r",
            [x],
            tl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(dtype).to(tl.float32)


@triton.jit
def silu(x):
    """Return x * sigmoid(x) in float32, to a few units in the last place."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 power; mul.f32 power, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 power, power; "
            "add.f32 power, power, 0f3F800000; rcp.approx.ftz.f32 power, power; "
            "mul.f32 $0, $1, power; }",  # with -log2(e) and 1
            "=f,f",
            [x],
            tl.float32,
            is_pure=True,
            pack=1,
        )
    return x / (1.0 + tl.exp(-x))
