"""State ops in plain PyTorch: the twins of `_custom_ops/state_space.py`.

Read by tests and by anyone who wants to know what the ops mean. Never called by the engine. Every
recurrence is written token by token, in float32, whatever the states are kept in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_EPSILON = 1e-6


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
    """Put the last inputs in front of the new ones and slide the filter over both."""
    filter_size = weight_CK.shape[1]
    for begin, end, state_CK in _rows(state, state_offsets, cu_query_lens, num_computed):
        inputs_CL = torch.cat((state_CK, x_TC[begin:end].T), 1)
        windows_CTK = inputs_CL.unfold(1, filter_size, 1)
        sum_CT = (windows_CTK.float() * weight_CK.float()[:, None]).sum(-1)
        if bias_C is not None:
            sum_CT = sum_CT + bias_C.float()[:, None]
        sum_CT = sum_CT.to(x_TC.dtype)
        out_TC[begin:end] = (F.silu(sum_CT.float()).to(x_TC.dtype) if silu else sum_CT).T
        state_CK.copy_(inputs_CL[:, inputs_CL.shape[1] - filter_size + 1 :])


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
    """Gate, convolve, gate."""
    rows = _StepRows(state_offsets, cu_query_lens, seq_lens)
    x_TC = rows.take(x_TC)
    if gate_in_TC is not None:
        x_TC = rows.take(gate_in_TC) * x_TC
    result_TC = torch.empty_like(x_TC)
    causal_conv1d(result_TC, x_TC, weight_CK, bias_C, state, *rows.arguments, silu)
    if gate_out_TC is not None:
        result_TC = rows.take(gate_out_TC) * result_TC
    rows.put(out_TC, result_TC)


def delta_rule_gates(
    g_TH: Tensor, beta_TH: Tensor, a_TH: Tensor, b_TH: Tensor, a_log_H: Tensor, dt_bias_H: Tensor
) -> None:
    """g = -exp(a_log) * softplus(a + dt_bias); beta = sigmoid(b)."""
    g_TH.copy_(-a_log_H.exp() * F.softplus(a_TH.float() + dt_bias_H))
    beta_TH.copy_(b_TH.float().sigmoid())


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
    """Decay the state, correct what it predicts for the key, read it with the query.

    Source: Gated Delta Networks, arXiv 2412.06464, equation 10.
    """
    q_THK, k_THK = q_THK.float(), k_THK.float()
    if l2norm:
        q_THK, k_THK = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPSILON) for x in (q_THK, k_THK)
        )
    share = v_THV.shape[1] // q_THK.shape[1]
    q_THK, k_THK = (x.repeat_interleave(share, 1) for x in (q_THK * scale, k_THK))
    for begin, end, state_HKV in _float_rows(state, state_offsets, cu_query_lens, num_computed):
        for t in range(begin, end):
            state_HKV.mul_(g_TH[t].exp()[:, None, None])
            predicted_HV = torch.einsum("hkv,hk->hv", state_HKV, k_THK[t])
            change_HV = (v_THV[t].float() - predicted_HV) * beta_TH[t][:, None]
            state_HKV.add_(k_THK[t][:, :, None] * change_HV[:, None, :])
            out_THV[t] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[t]).to(out_THV.dtype)


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
    """Convolve, make gates, run the rule, norm and gate each head."""
    rows = _StepRows(state_offsets, cu_query_lens, seq_lens)
    qkv, a, b, gate = map(rows.take, (qkv_TC, a_TH, b_TH, gate_THV))
    mixed_TC = torch.empty_like(qkv)
    causal_conv1d(mixed_TC, qkv, conv_weight_CK, None, conv_state, *rows.arguments, True)
    num_heads, key_size, value_size = state.shape[1:]
    keys = (qkv.shape[1] - num_heads * value_size) // 2
    q, k, v = mixed_TC.split((keys, keys, num_heads * value_size), 1)
    q, k = (t.unflatten(1, (-1, key_size)) for t in (q, k))
    v = v.unflatten(1, (-1, value_size))
    g_TH, beta_TH = torch.empty(2, *a.shape, device=a.device)
    delta_rule_gates(g_TH, beta_TH, a, b, a_log_H, dt_bias_H)
    result_THV = torch.empty_like(gate)
    gated_delta_rule(result_THV, q, k, v, g_TH, beta_TH, state, *rows.arguments, scale, True)
    result_TC, gate_TC = result_THV.flatten(1), gate.flatten(1)
    gated_rms_norm(result_TC, result_TC, gate_TC, norm_weight_V, epsilon, value_size, False)
    rows.put(out_THV, result_TC.view(gate.shape))


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
    """Decay the state, add the outer product of input and B, read it with C.

    Source: Transformers are SSMs, arXiv 2405.21060, section 2.
    """
    dt_TH = dt_TH.float() if dt_bias_H is None else dt_TH.float() + dt_bias_H
    dt_TH = F.softplus(dt_TH).clamp(dt_min, dt_max)
    share = x_THP.shape[1] // B_TGN.shape[1]
    x_THP = x_THP.float()
    B_THN, C_THN = (x.float().repeat_interleave(share, 1) for x in (B_TGN, C_TGN))
    for begin, end, state_HPN in _float_rows(state, state_offsets, cu_query_lens, num_computed):
        for t in range(begin, end):
            state_HPN.mul_((dt_TH[t] * A_H).exp()[:, None, None])
            scaled_HP = dt_TH[t][:, None] * x_THP[t]
            state_HPN.add_(scaled_HP[:, :, None] * B_THN[t][:, None, :])
            read_HP = torch.einsum("hpn,hn->hp", state_HPN, C_THN[t])
            if D_H is not None:
                read_HP = read_HP + D_H[:, None] * x_THP[t]
            out_THP[t] = read_HP.to(out_THP.dtype)


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
    """Convolve, scan with A = -exp(A_log), gate and norm each group."""
    rows = _StepRows(state_offsets, cu_query_lens, seq_lens)
    xbc, dt = map(rows.take, (xbc_TC, dt_TH))
    mixed_TC = torch.empty_like(xbc)
    causal_conv1d(mixed_TC, xbc, conv_weight_CK, conv_bias_C, conv_state, *rows.arguments, True)
    num_heads, head_size, state_size = state.shape[1:]
    inner = num_heads * head_size
    shared = (xbc.shape[1] - inner) // 2
    x, b, c = mixed_TC.split((inner, shared, shared), 1)
    x = x.unflatten(1, (-1, head_size))
    b, c = (t.unflatten(1, (-1, state_size)) for t in (b, c))
    result_TC = x.new_empty(len(x), inner)
    result_THP = result_TC.view(x.shape)
    decay_H = -a_log_H.exp()
    mamba2_scan(
        result_THP, x, dt, decay_H, b, c, D_H, dt_bias_H, state, *rows.arguments, dt_min, dt_max
    )
    if gate_TC is not None and norm_weight_C is not None:
        size, gate = inner * state_size // shared, rows.take(gate_TC)
        gated_rms_norm(result_TC, result_TC, gate, norm_weight_C, epsilon, size, True)
    rows.put(out_THP, result_THP)


def gated_rms_norm(
    out_TC: Tensor,
    x_TC: Tensor,
    gate_TC: Tensor,
    weight: Tensor,
    epsilon: float,
    group_size: int,
    gate_first: bool,
) -> None:
    """Norm in float32 and round, scale, gate; or gate, norm and round, scale."""
    dtype = x_TC.dtype
    x, gate = (t.float().unflatten(-1, (-1, group_size)) for t in (x_TC, gate_TC))
    scale = weight.view(-1, group_size)
    if gate_first:
        x = x * F.silu(gate)
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)).to(dtype) * scale
    if not gate_first:
        normed = (normed.float() * F.silu(gate)).to(dtype)
    out_TC.copy_(normed.flatten(-2))


class _StepRows:
    """The rows of a step op that have a token and are no padding, one token each.

    Attributes:
        arguments: their state_offsets, cu_query_lens and num_computed.
    """

    def __init__(self, state_offsets: Tensor, cu_query_lens: Tensor, seq_lens: Tensor) -> None:
        has_token = cu_query_lens[1:] > cu_query_lens[:-1]
        is_live = has_token & (seq_lens > 0)
        self._tokens = cu_query_lens[:-1][is_live].long()
        self._padding = cu_query_lens[:-1][has_token & (seq_lens <= 0)].long()
        bounds = torch.arange(len(self._tokens) + 1, device=seq_lens.device)
        self.arguments = (state_offsets[is_live], bounds, seq_lens[is_live] - 1)

    def take(self, tensor: Tensor) -> Tensor:
        """Return the rows' tokens."""
        return tensor[self._tokens]

    def put(self, out: Tensor, result: Tensor) -> None:
        """Write the rows' results, and zero for padding."""
        out[self._padding] = 0.0
        out[self._tokens] = result


def _rows(
    state: Tensor, state_offsets: Tensor, cu_query_lens: Tensor, num_computed: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first token, end, state) of every row with tokens; a new row's state is zeroed."""
    bounds = cu_query_lens.tolist()
    for row, offset in enumerate(state_offsets.tolist()):
        if bounds[row] == bounds[row + 1]:
            continue
        own = state[offset]
        if num_computed[row] == 0:
            own.zero_()
        yield bounds[row], bounds[row + 1], own


def _float_rows(
    state: Tensor, state_offsets: Tensor, cu_query_lens: Tensor, num_computed: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield rows as `_rows` does, with states in float32; they are rounded back after the row."""
    for begin, end, own in _rows(state, state_offsets, cu_query_lens, num_computed):
        wide = own.float()
        yield begin, end, wide
        own.copy_(wide)
