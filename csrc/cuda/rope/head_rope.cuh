// Rotary embedding of one head held by a group of lanes of a warp; used by the rotary op and by the
// fused query, key and value op, which therefore agree bit for bit.
//
// Lane layout as in norm/head_norm.cuh: pack p of lane l begins at element (p * lanes + l) * kSize.
#pragma once

#include "cuda/pack.cuh"

namespace vllm::cuda {

// What turns a head: a row of the table is half cosines, then half sines.
struct RopeTurn {
  const float* cos_sin;  // row of the token
  int rot_dim;
  bool is_neox;
  bool is_packed;  // halves are whole packs, and rows of the table lie on 16 bytes

  // Whether lanes hold their angles in registers.
  __device__ __forceinline__ bool holds() const { return is_neox && is_packed; }
};

__device__ __forceinline__ float turn_first(float a, float b, float cos, float sin) {
  return fmaf(-b, sin, a * cos);
}

__device__ __forceinline__ float turn_second(float a, float b, float cos, float sin) {
  return fmaf(a, sin, b * cos);
}

template <typename T>
__device__ __forceinline__ Pack<T> shuffle_pack(const Pack<T>& pack, int lane, int lanes) {
  const uint4 from = bits_of(pack);
  uint4 to;
  to.x = __shfl_sync(0xffffffffu, from.x, lane, lanes);
  to.y = __shfl_sync(0xffffffffu, from.y, lane, lanes);
  to.z = __shfl_sync(0xffffffffu, from.z, lane, lanes);
  to.w = __shfl_sync(0xffffffffu, from.w, lane, lanes);
  return pack_of<T>(to);
}

// Cosines and sines of a lane's packs, where halves are whole packs and pairs lie half apart. The
// sine is what the partner is multiplied with: negative in the first half.
template <typename T, int kPacks>
struct Angles {
  float cos[kPacks][Pack<T>::kSize], sin[kPacks][Pack<T>::kSize];

  __device__ __forceinline__ void load(int lane, int lanes, const RopeTurn& turn) {
    const int half = turn.rot_dim / 2;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int begin = (p * lanes + lane) * Pack<T>::kSize;
      if (begin >= turn.rot_dim) continue;
      const float* angles = turn.cos_sin + (begin < half ? begin : begin - half);
#pragma unroll
      for (int part = 0; part < Pack<T>::kSize; part += 4) {
        const float4 cos4 = *reinterpret_cast<const float4*>(angles + part);
        float4 sin4 = *reinterpret_cast<const float4*>(angles + half + part);
        if (begin < half) sin4 = make_float4(-sin4.x, -sin4.y, -sin4.z, -sin4.w);
        cos[p][part] = cos4.x, cos[p][part + 1] = cos4.y;
        cos[p][part + 2] = cos4.z, cos[p][part + 3] = cos4.w;
        sin[p][part] = sin4.x, sin[p][part + 1] = sin4.y;
        sin[p][part + 2] = sin4.z, sin[p][part + 3] = sin4.w;
      }
    }
  }
};

// A pack with its partner, by the angles of pack `p`.
template <typename T, int kPacks>
__device__ __forceinline__ Pack<T> turn_pack(const Pack<T>& pack, const Pack<T>& other,
                                             const Angles<T, kPacks>& angles, int p) {
  float own[Pack<T>::kSize], far[Pack<T>::kSize];
  unpack(pack, own);
  unpack(other, far);
  const auto turn = [&](int e) {
    return turn_second(far[e], own[e], angles.cos[p][e], angles.sin[p][e]);
  };
  return map_pairs<T>([&](int e) { return make_float2(turn(e), turn(e + 1)); });
}

// Pairs (i, i + half), halves of whole packs: the partner of a pack is one pack of some lane.
template <typename T, int kPacks>
__device__ __forceinline__ void turn_halves_packed(Pack<T> (&packs)[kPacks], int lane, int lanes,
                                                   bool is_live, int rot_dim,
                                                   const Angles<T, kPacks>& angles) {
  constexpr int kSize = Pack<T>::kSize;
  const int half = rot_dim / 2;
  Pack<T> turned[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int begin = (p * lanes + lane) * kSize;
    const int partner = (begin < half ? begin + half : begin - half) / kSize;
    Pack<T> other = shuffle_pack(packs[0], partner % lanes, lanes);
#pragma unroll
    for (int slot = 1; slot < kPacks; ++slot) {
      const Pack<T> candidate = shuffle_pack(packs[slot], partner % lanes, lanes);
      if (partner / lanes == slot) other = candidate;
    }
    const bool is_turned = is_live && begin < rot_dim;
    turned[p] = is_turned ? turn_pack(packs[p], other, angles, p) : packs[p];
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) packs[p] = turned[p];
}

// Pairs (i, i + half) of any half, through `exchange`: shared memory for the elements of the group.
template <typename T, int kPacks>
__device__ __forceinline__ void turn_halves_any(Pack<T> (&packs)[kPacks], int lane, int lanes,
                                                bool is_live, const RopeTurn& turn, T* exchange) {
  constexpr int kSize = Pack<T>::kSize;
  const int half = turn.rot_dim / 2;
  __syncwarp();  // the group may still read its head before this one
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    *reinterpret_cast<Pack<T>*>(exchange + (p * lanes + lane) * kSize) = packs[p];
  }
  __syncwarp();
  if (!is_live) return;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const int i = (p * lanes + lane) * kSize + e;
      if (i >= turn.rot_dim) continue;
      const bool is_first = i < half;
      const int angle = is_first ? i : i - half;
      const float cos = turn.cos_sin[angle], sin = turn.cos_sin[half + angle];
      const float own = to_float(packs[p].item[e]);
      const float far = to_float(exchange[is_first ? i + half : i - half]);
      packs[p].item[e] = from_float<T>(is_first ? turn_first(own, far, cos, sin)
                                                : turn_second(far, own, cos, sin));
    }
  }
}

// Pairs (2i, 2i + 1), which no pack splits.
template <typename T, int kPacks>
__device__ __forceinline__ void turn_neighbours(Pack<T> (&packs)[kPacks], int lane, int lanes,
                                                const RopeTurn& turn) {
  constexpr int kSize = Pack<T>::kSize;
  const int half = turn.rot_dim / 2;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
#pragma unroll
    for (int e = 0; e < kSize; e += 2) {
      const int i = (p * lanes + lane) * kSize + e;
      if (i >= turn.rot_dim) continue;
      const float cos = turn.cos_sin[i / 2], sin = turn.cos_sin[half + i / 2];
      const float a = to_float(packs[p].item[e]), b = to_float(packs[p].item[e + 1]);
      packs[p].item[e] = from_float<T>(turn_first(a, b, cos, sin));
      packs[p].item[e + 1] = from_float<T>(turn_second(a, b, cos, sin));
    }
  }
}

// Turns the head that the group holds, in place. Every lane of the warp takes part; where it is not
// `is_live`, nothing changes and turn.cos_sin is not read. `angles` are the lane's where
// turn.holds() says so.
template <typename T, int kPacks>
__device__ __forceinline__ void turn_lanes(Pack<T> (&packs)[kPacks], int lane, int lanes,
                                           bool is_live, const RopeTurn& turn,
                                           const Angles<T, kPacks>& angles, T* exchange) {
  if (!turn.is_neox) {
    if (is_live) turn_neighbours(packs, lane, lanes, turn);
  } else if (turn.is_packed) {
    turn_halves_packed(packs, lane, lanes, is_live, turn.rot_dim, angles);
  } else {
    turn_halves_any(packs, lane, lanes, is_live, turn, exchange);
  }
}

// A checked table of angles on the device.
struct RopeTable {
  const float* data;
  int64_t max_pos;
  int rot_dim;
  bool is_neox;

  // Whether halves are whole packs of elements of `item` bytes, and rows lie on 16 bytes.
  bool is_packed(int64_t item) const {
    return reinterpret_cast<uintptr_t>(data) % kPackBytes == 0 &&
           rot_dim / 2 * item % kPackBytes == 0;
  }

  __device__ __forceinline__ const float* row(int64_t position) const {
    DEVICE_CHECK(position >= 0 && position < max_pos);
    return data + position * rot_dim;
  }
};

inline RopeTable rope_table(const char* op, const Tensor& cos_sin, int64_t head_size,
                            bool is_neox) {
  check_tensor(op, "cos_sin_cache", cos_sin, 2);
  check_dtype(op, "cos_sin_cache", cos_sin, ScalarType::Float);
  check_contiguous(op, "cos_sin_cache", cos_sin);
  const int64_t rot_dim = cos_sin.size(1);
  CHECK_ARG(rot_dim > 0 && rot_dim % 2 == 0 && rot_dim <= head_size, op,
            ": the rows of cos_sin_cache must have an even size of 2 to ", head_size, ", got ",
            rot_dim);
  return RopeTable{.data = static_cast<const float*>(cos_sin.data_ptr()),
                   .max_pos = cos_sin.size(0),
                   .rot_dim = static_cast<int>(rot_dim),
                   .is_neox = is_neox};
}

}  // namespace vllm::cuda
