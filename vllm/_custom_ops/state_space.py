"""Doors of the ops of layers that keep a state: convolution, delta rule, Mamba-2, gated norm.

Called by `model_executor/layers/{linear_attention,mamba,state}.py`. Naive twins:
`_custom_ops/naive/state_space.py`. The compiled ops check their arguments; nothing here computes.
What a row computes depends on that row alone, bit for bit, and not on where its tokens are cut into
steps: a prompt in one piece, in chunks and token by token leave the same state.

Rows are batched as in attention: row b has the tokens cu_query_lens[b] … cu_query_lens[b + 1] - 1.
A state is a view [units, ...] of the cache with stride(0) = 256 bytes; row b's lies at unit
state_offsets[b]. It is read unless num_computed[b] is 0, where it counts as zero whatever its bytes
are, and overwritten with the state after the row's last token. A row without tokens keeps it. A GPU
takes recurrent states in float32, bfloat16 or float16, a CPU in float32; all compute in float32.

Ops named `_step` exist on a GPU only. They are what a layer does in a decode step in few launches,
and take seq_lens, int32 [B], tokens after the step, where the others take num_computed. A row has
at most one token; one of seq_len 0 is padding: its output is zero and its state stays. Their rows
may be the first of a step, whose other tokens they leave alone.

On a GPU the ops without that name may take the last rows of a step. The bits of a longer row do
depend there on where it is cut, within the tolerances of `_custom_ops/triton/delta_rule.py`, and
offsets and lengths, which the host does not know, are not checked.
"""

from __future__ import annotations

from torch import Tensor

from vllm._custom_ops.library import C


def causal_conv1d(
    out_TC: Tensor,
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    silu: bool,
) -> None:
    """Convolve each channel with its own filter over the last K tokens.

    Args:
        out_TC: like `x_TC`; not the same memory.
        x_TC: float32 or bfloat16 [T, C], contiguous in C.
        weight_CK: [C, K], dtype of `x_TC`, contiguous in C (stored as [K, C]); K is 2 to 8 and the
            last column meets the newest token.
        bias_C: [C] or None.
        state: [units, C, K - 1], dtype of `x_TC`, contiguous in C: the last K - 1 inputs, oldest
            first.
        state_offsets: int32 [B], the unit of each row's state.
        cu_query_lens: int32 [B + 1].
        num_computed: int32 [B], tokens before this step.
        silu: whether the sum, rounded to the dtype, passes through x * sigmoid(x).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an offset lies outside.
    """
    C.causal_conv1d(
        out_TC,
        x_TC,
        weight_CK,
        bias_C,
        state,
        state_offsets,
        cu_query_lens,
        num_computed,
        silu,
    )


def causal_conv1d_step(
    out_TC: Tensor,
    x_TC: Tensor,
    gate_in_TC: Tensor | None,
    gate_out_TC: Tensor | None,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    silu: bool,
) -> None:
    """Convolve one token a row, with the gates of a short convolution around it; GPU only.

    The input is gate_in * x and the result is multiplied by gate_out, each rounded to the dtype.
    The gates are like `x_TC`, or both None; the other arguments are those of `causal_conv1d`.
    """
    C.causal_conv1d_step(
        out_TC,
        x_TC,
        gate_in_TC,
        gate_out_TC,
        weight_CK,
        bias_C,
        state,
        state_offsets,
        cu_query_lens,
        seq_lens,
        silu,
    )


def delta_rule_gates(
    g_TH: Tensor, beta_TH: Tensor, a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> None:
    """Compute decay and learning rate of the delta rule from their projections.

    g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b).

    Args:
        g_TH: float32 [T, H], contiguous.
        beta_TH: like `g_TH`.
        a_TH: float32 or bfloat16 [T, H], contiguous in H.
        b_TH: like `a_TH`.
        a_log_H: float32 [H].
        dt_bias_H: float32 [H].

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.delta_rule_gates(g_TH, beta_TH, a_TH, b_TH, a_log_H, dt_bias_H)


def gated_delta_rule(
    out_THV: Tensor,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    scale: float,
    l2norm: bool,
) -> None:
    """Run the gated delta rule, S := exp(g) S; S += k (beta (v - S'k))'; out = S'(scale q).

    Args:
        out_THV: like `v_THV`.
        q_THK: float32 or bfloat16 [T, Hk, K], contiguous in K; each of the Hk heads serves Hv / Hk
            neighbouring heads of `v_THV`. K is at most 256.
        k_THK: like `q_THK`.
        v_THV: [T, Hv, V], same dtype, contiguous in V.
        g_TH: float32 [T, Hv], logarithm of the decay, at most 0; contiguous.
        beta_TH: float32 [T, Hv], contiguous.
        state: float32 [units, Hv, K, V], each unit contiguous.
        state_offsets: int32 [B], the unit of each row's state.
        cu_query_lens: int32 [B + 1].
        num_computed: int32 [B], tokens before this step.
        scale: factor of the queries.
        l2norm: whether queries and keys are first divided by sqrt(sum of squares + 1e-6).

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an offset lies outside.

    Cost: reads and writes each row's state once for every 64 tokens; 8 K V operations a token and
        head.
    Source: Gated Delta Networks, arXiv 2412.06464.
    """
    C.gated_delta_rule(
        out_THV,
        q_THK,
        k_THK,
        v_THV,
        g_TH,
        beta_TH,
        state,
        state_offsets,
        cu_query_lens,
        num_computed,
        scale,
        l2norm,
    )


def gated_delta_step(
    out_THV: Tensor,
    qkv_TC: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    gate_THV: Tensor,
    conv_weight_CK: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_V: Tensor,
    conv_state: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    epsilon: float,
) -> None:
    """Run a gated delta net between its projections, one token a row; GPU only.

    The composition of `causal_conv1d` with silu over queries, keys and values, which stand behind
    each other in `qkv_TC`, `delta_rule_gates`, `gated_delta_rule` with l2norm and, over each head,
    `gated_rms_norm` with the gate after the norm, and with their arguments; the norm has a weight
    for each of V. The heads of output and gate are neighbours in memory.

    Cost: reads and writes each row's states once.
    """
    C.gated_delta_step(
        out_THV,
        qkv_TC,
        a_TH,
        b_TH,
        gate_THV,
        conv_weight_CK,
        a_log_H,
        dt_bias_H,
        norm_weight_V,
        conv_state,
        state,
        state_offsets,
        cu_query_lens,
        seq_lens,
        scale,
        epsilon,
    )


def mamba2_scan(
    out_THP: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor | None,
    dt_bias_H: Tensor | None,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    num_computed: Tensor,
    dt_min: float,
    dt_max: float,
) -> None:
    """Run the Mamba-2 recurrence, S := exp(dt A) S + dt x B'; out = S C + D x.

    dt is softplus(dt + dt_bias), clamped to dt_min … dt_max, in float32.

    Args:
        out_THP: like `x_THP`.
        x_THP: float32 or bfloat16 [T, H, P], contiguous in P.
        dt_TH: [T, H], dtype of `x_THP`, contiguous in H.
        A_H: float32 [H], negative.
        B_TGN: [T, G, N], dtype of `x_THP`, contiguous in N; each group serves H / G neighbouring
            heads.
        C_TGN: like `B_TGN`.
        D_H: float32 [H] or None.
        dt_bias_H: float32 [H] or None.
        state: [units, H, P, N], each unit contiguous.
        state_offsets: int32 [B], the unit of each row's state.
        cu_query_lens: int32 [B + 1].
        num_computed: int32 [B], tokens before this step.
        dt_min: least time step.
        dt_max: greatest time step.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype, or an offset lies outside.

    Cost: reads and writes each row's state once for every 64 tokens; 5 P N operations a token and
        head.
    Source: Transformers are SSMs, arXiv 2405.21060.
    """
    C.mamba2_scan(
        out_THP,
        x_THP,
        dt_TH,
        A_H,
        B_TGN,
        C_TGN,
        D_H,
        dt_bias_H,
        state,
        state_offsets,
        cu_query_lens,
        num_computed,
        dt_min,
        dt_max,
    )


def mamba2_step(
    out_THP: Tensor,
    xbc_TC: Tensor,
    dt_TH: Tensor,
    gate_TC: Tensor | None,
    conv_weight_CK: Tensor,
    conv_bias_C: Tensor | None,
    a_log_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_C: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    state_offsets: Tensor,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    dt_min: float,
    dt_max: float,
    epsilon: float,
) -> None:
    """Run a Mamba-2 mixer between its projections, one token a row; GPU only.

    The composition of `causal_conv1d` with silu over x, B and C, which stand behind each other in
    `xbc_TC`, `mamba2_scan` with A = -exp(a_log) and, unless gate and norm weight are None,
    `gated_rms_norm` of the channels of each group of heads with the gate before the norm, and with
    their arguments. The heads of the output are neighbours in memory.

    Cost: reads and writes each row's states once.

    Raises:
        ShapeError: heads, channels or the elements of a state are no neighbours.
    """
    C.mamba2_step(
        out_THP,
        xbc_TC,
        dt_TH,
        gate_TC,
        conv_weight_CK,
        conv_bias_C,
        a_log_H,
        D_H,
        dt_bias_H,
        norm_weight_C,
        conv_state,
        state,
        state_offsets,
        cu_query_lens,
        seq_lens,
        dt_min,
        dt_max,
        epsilon,
    )


def gated_rms_norm(
    out_TC: Tensor,
    x_TC: Tensor,
    gate_TC: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    gate_first: bool,
) -> None:
    """Norm groups of channels by their root mean square and gate them with x * sigmoid(x).

    Args:
        out_TC: like `x_TC`; may be `x_TC` itself.
        x_TC: float32 or bfloat16 [T, C], contiguous in C.
        gate_TC: like `x_TC`.
        weight: dtype of `x_TC`, [C], or [group_size] for all groups alike.
        epsilon: added to the mean square.
        group_size: channels that are normed together; divides C.
        gate_first: whether the gate multiplies before the norm (Mamba-2) instead of after it.

    Raises:
        ShapeError: an argument has the wrong shape, stride or dtype.
    """
    C.gated_rms_norm(out_TC, x_TC, gate_TC, weight, epsilon, group_size, gate_first)
