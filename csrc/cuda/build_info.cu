// What the library says about itself when it cannot be loaded (vllm/_custom_ops/library.py).
extern "C" __attribute__((visibility("default"))) const char vllm_cuda_build_info[] =
    "VLLM_BUILT_FOR_TORCH=" VLLM_TORCH_BUILD_VERSION ";";
