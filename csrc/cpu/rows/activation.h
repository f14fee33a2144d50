// Activations on vectors and on one row; used by the activation ops, the experts and the fused
// decoder layers, which therefore agree bit for bit.
#pragma once

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

// erf(x), absolute error below 2e-7. Own least-squares fits on Chebyshev nodes: erf(x)/x in x^2 on
// [0, 1], and -log(1 - erf(x)) on [1, 4].
VLLM_INLINE Vec erf(Vec x) {
  const Vec a = min(abs(x), set1(4.0f));
  const Vec s = mul(x, x);
  Vec p = set1(7.8825003844e-05f);
  p = fma(p, s, set1(-8.0188589962e-04f));
  p = fma(p, s, set1(5.1893128105e-03f));
  p = fma(p, s, set1(-2.6854329537e-02f));
  p = fma(p, s, set1(1.1283597492e-01f));
  p = fma(p, s, set1(-3.7612626908e-01f));
  p = fma(p, s, set1(1.1283791659e+00f));
  Vec q = set1(1.3309405963e-05f);
  q = fma(q, a, set1(-3.1757275344e-04f));
  q = fma(q, a, set1(3.4368762839e-03f));
  q = fma(q, a, set1(-2.2622034371e-02f));
  q = fma(q, a, set1(1.0331912501e-01f));
  q = fma(q, a, set1(6.3909308012e-01f));
  q = fma(q, a, set1(1.1259261539e+00f));
  q = fma(q, a, set1(7.5689836482e-04f));
  const Vec tail = sub(set1(1.0f), exp(sub(zero(), q)));
  return select_less(abs(x), set1(1.0f), mul(x, p), copy_sign(tail, x));
}

// 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))
VLLM_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = mul(mul(set1(0.7978845608f), x), fma(mul(set1(0.044715f), x), x, set1(1.0f)));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

struct Silu {
  VLLM_INLINE static Vec apply(Vec x) { return mul(x, sigmoid(x)); }
};

struct Gelu {
  VLLM_INLINE static Vec apply(Vec x) {
    return mul(mul(set1(0.5f), x), add(set1(1.0f), erf(mul(x, set1(0.70710678f)))));
  }
};

struct GeluTanh {
  VLLM_INLINE static Vec apply(Vec x) { return gelu_tanh(x); }
};

struct GeluQuick {
  VLLM_INLINE static Vec apply(Vec x) { return mul(x, sigmoid(mul(set1(1.702f), x))); }
};

// out[i] = act(gate[i]) * up[i], the activation rounded to T before the product.
template <typename Act, typename T>
VLLM_INLINE void act_and_mul_row(T* out, const T* gate, const T* up, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, mul(round_to<T>(Act::apply(load(gate + i))), load(up + i)));
  }
  if (i < n) {
    const int64_t rest = n - i;
    const Vec a = round_to<T>(Act::apply(load_n(gate + i, rest)));
    store_n(out + i, mul(a, load_n(up + i, rest)), rest);
  }
}

// out[i] = act(x[i]); out may be x.
template <typename Act, typename T>
VLLM_INLINE void act_row(T* out, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, Act::apply(load(x + i)));
  if (i < n) store_n(out + i, Act::apply(load_n(x + i, n - i)), n - i);
}

}  // namespace VLLM_KERNEL_NAMESPACE
