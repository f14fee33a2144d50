// Ops: _C::linear, _C::pack_linear_weight, _C::unpack_linear_weight, _C::embedding.
#include "cpu/kernels/linear.h"

#include "cpu/op.h"

namespace vllm::cpu {

namespace {

constexpr int64_t kBlockCols = 32;

// A packed weight is [blocks, K, 32] (float) or [blocks, ceil(K/2), 32, 2] (bf16), contiguous.
void check_packed(const char* op, const Tensor& packed, ScalarType type, int64_t k) {
  check_dtype(op, "packed", packed, type);
  const bool is_float = type == ScalarType::Float;
  check_tensor(op, "packed", packed, is_float ? 3 : 4);
  check_contiguous(op, "packed", packed);
  CHECK_ARG(packed.size(1) == (is_float ? k : (k + 1) / 2), op, ": packed has shape ",
            shape_text(packed), ", made for another K than ", k);
  check_size(op, "packed", packed, 2, kBlockCols);
  if (!is_float) check_size(op, "packed", packed, 3, 2);
}

void linear_op(const Tensor& out, const Tensor& input, const Tensor& packed,
               const std::optional<Tensor>& bias) {
  const char* op = "linear";
  check_tensor(op, "input", input, 2);
  check_tensor(op, "out", out, 2);
  check_float_dtype(op, "input", input);
  if (out.scalar_type() != ScalarType::Float) check_dtype(op, "out", out, input.scalar_type());
  check_packed(op, packed, input.scalar_type(), input.size(1));
  check_size(op, "out", out, 0, input.size(0));
  const int64_t n = out.size(1);
  CHECK_ARG((n + kBlockCols - 1) / kBlockCols == packed.size(0), op, ": out has shape ",
            shape_text(out), ", packed has ", packed.size(0), " blocks of ", kBlockCols,
            " columns");
  if (bias.has_value()) {
    check_tensor(op, "bias", *bias, 1);
    check_dtype(op, "bias", *bias, input.scalar_type());
    check_size(op, "bias", *bias, 0, n);
  }
  if (input.size(0) == 0) return;
  const LinearArgs args{.out = out.data_ptr(),
                        .x = input.data_ptr(),
                        .packed = packed.data_ptr(),
                        .bias = bias.has_value() ? bias->data_ptr() : nullptr,
                        .element = element_of(input),
                        .out_element = element_of(out),
                        .m = input.size(0),
                        .n = n,
                        .k = input.size(1),
                        .out_stride = out.stride(0),
                        .x_stride = input.stride(0)};
  VLLM_CALL_KERNEL(linear, args);
}

PackArgs pack_args(const char* op, const Tensor& packed, const Tensor& plain) {
  check_tensor(op, "weight", plain, 2);
  check_float_dtype(op, "weight", plain);
  check_packed(op, packed, plain.scalar_type(), plain.size(1));
  CHECK_ARG((plain.size(0) + kBlockCols - 1) / kBlockCols == packed.size(0), op,
            ": packed has shape ", shape_text(packed), ", weight ", shape_text(plain));
  return PackArgs{.packed = packed.data_ptr(),
                  .plain = plain.data_ptr(),
                  .element = element_of(plain),
                  .n = plain.size(0),
                  .k = plain.size(1),
                  .stride = plain.stride(0)};
}

void pack_linear_weight_op(const Tensor& packed, const Tensor& weight) {
  const PackArgs args = pack_args("pack_linear_weight", packed, weight);
  VLLM_CALL_KERNEL(pack_weight, args);
}

void unpack_linear_weight_op(const Tensor& weight, const Tensor& packed) {
  const PackArgs args = pack_args("unpack_linear_weight", packed, weight);
  VLLM_CALL_KERNEL(unpack_weight, args);
}

void embedding_op(const Tensor& out, const Tensor& ids, const Tensor& packed) {
  const char* op = "embedding";
  check_tensor(op, "out", out, 2);
  check_tensor(op, "ids", ids, 1);
  check_float_dtype(op, "out", out);
  check_dtype(op, "ids", ids, ScalarType::Long);
  check_packed(op, packed, out.scalar_type(), out.size(1));
  check_size(op, "out", out, 0, ids.size(0));
  const int64_t* values = static_cast<const int64_t*>(ids.data_ptr());
  const int64_t limit = packed.size(0) * kBlockCols;
  for (int64_t i = 0; i < ids.size(0); ++i) {
    CHECK_ARG(values[i] >= 0 && values[i] < limit, op, ": ids[", i, "] is ", values[i],
              ", the table has ", limit, " rows");
  }
  const EmbeddingArgs args{.out = out.data_ptr(),
                           .ids = values,
                           .packed = packed.data_ptr(),
                           .element = element_of(out),
                           .m = ids.size(0),
                           .k = out.size(1),
                           .out_stride = out.stride(0)};
  VLLM_CALL_KERNEL(embedding, args);
}

}  // namespace

VLLM_OPS(_C, m) {
  m.def("linear(Tensor! out, Tensor input, Tensor packed, Tensor? bias) -> ()");
  m.def("pack_linear_weight(Tensor! packed, Tensor weight) -> ()");
  m.def("unpack_linear_weight(Tensor! weight, Tensor packed) -> ()");
  m.def("embedding(Tensor! out, Tensor ids, Tensor packed) -> ()");
}

VLLM_OPS_IMPL(_C, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear_op));
  m.impl("pack_linear_weight", TORCH_BOX(&pack_linear_weight_op));
  m.impl("unpack_linear_weight", TORCH_BOX(&unpack_linear_weight_op));
  m.impl("embedding", TORCH_BOX(&embedding_op));
}

}  // namespace vllm::cpu
