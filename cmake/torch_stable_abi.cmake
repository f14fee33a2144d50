# Target torch_stable_abi: headers and libraries of the installed torch, limited to what its stable
# ABI had in 2.11, so that one build runs under every torch from 2.11 on.
find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import os, torch; print(os.path.dirname(torch.__file__) + ';' + torch.__version__)"
  OUTPUT_VARIABLE VLLM_TORCH_FOUND
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE VLLM_TORCH_STATUS)
if(NOT VLLM_TORCH_STATUS EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch; install torch >= 2.11 first")
endif()
list(GET VLLM_TORCH_FOUND 0 VLLM_TORCH_DIR)
list(GET VLLM_TORCH_FOUND 1 VLLM_TORCH_VERSION)
message(STATUS "torch ${VLLM_TORCH_VERSION} in ${VLLM_TORCH_DIR}")

add_library(torch_stable_abi INTERFACE)
target_include_directories(torch_stable_abi SYSTEM INTERFACE "${VLLM_TORCH_DIR}/include")
target_compile_definitions(torch_stable_abi INTERFACE
  TORCH_TARGET_VERSION=0x020b000000000000
  VLLM_TORCH_BUILD_VERSION="${VLLM_TORCH_VERSION}")
target_link_options(torch_stable_abi INTERFACE -Wl,--no-as-needed)
target_link_libraries(torch_stable_abi INTERFACE "${VLLM_TORCH_DIR}/lib/libtorch_cpu.so")
