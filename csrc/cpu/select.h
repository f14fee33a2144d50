// Selection without sorting: partition, the first k of an order, and sorting of short arrays.
// Included by kernels only. All orders are strict, so every result is fixed by the input.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace VLLM_KERNEL_NAMESPACE {

namespace {

inline constexpr int64_t kShort = 16;

template <typename T>
VLLM_INLINE void swap(T& a, T& b) {
  const T kept = a;
  a = b;
  b = kept;
}

template <typename T, typename Before>
VLLM_INLINE T median(const T& a, const T& b, const T& c, const Before& before) {
  if (before(a, b)) return before(b, c) ? b : before(a, c) ? c : a;
  return before(a, c) ? a : before(b, c) ? c : b;
}

template <typename T, typename Before>
void insertion_sort(T* a, int64_t n, const Before& before) {
  for (int64_t i = 1; i < n; ++i) {
    const T item = a[i];
    int64_t j = i;
    for (; j > 0 && before(item, a[j - 1]); --j) a[j] = a[j - 1];
    a[j] = item;
  }
}

// Splits n > kShort items so that none of the right part comes before any of the left part; returns
// the size of the left part, 1 to n - 1.
template <typename T, typename Before>
int64_t partition(T* a, int64_t n, const Before& before) {
  const int64_t e = n / 8;
  const T pivot =
      median(median(a[0], a[e], a[2 * e], before), median(a[3 * e], a[4 * e], a[5 * e], before),
             median(a[6 * e], a[7 * e], a[n - 1], before), before);
  int64_t i = -1, j = n;
  while (true) {
    do ++i;
    while (before(a[i], pivot));
    do --j;
    while (before(pivot, a[j]));
    if (i >= j) return j + 1;
    swap(a[i], a[j]);
  }
}

// Brings the first k items of the order to the front, in no order among themselves; 1 <= k <= n.
template <typename T, typename Before>
void select_first_k(T* a, int64_t n, int64_t k, const Before& before) {
  while (n > kShort) {
    if (k == n) return;
    const int64_t left = partition(a, n, before);
    if (k <= left) {
      n = left;
    } else {
      a += left;
      n -= left;
      k -= left;
    }
  }
  insertion_sort(a, n, before);
}

template <typename T, typename Before>
void sort(T* a, int64_t n, const Before& before) {
  while (n > kShort) {
    const int64_t left = partition(a, n, before);
    if (left < n - left) {
      sort(a, left, before);
      a += left;
      n -= left;
    } else {
      sort(a + left, n - left, before);
      n = left;
    }
  }
  insertion_sort(a, n, before);
}

}  // namespace

}  // namespace VLLM_KERNEL_NAMESPACE
