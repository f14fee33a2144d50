# _C_cuda: csrc/cuda/**/*.cu. Needs nvcc but no CUDA build of torch: the stable headers have no CUDA
# in them, and the few functions that only libtorch_cuda.so exports are linked by name.
#
# VLLM_CUDA_ARCHS: what is compiled, as CMake writes architectures. The default serves everything
# from A100 on: binaries for 8.x and 9.0, and PTX for what comes later.
#   -DVLLM_CUDA_ARCHS=90a-real    for one machine, in a third of the time
set(VLLM_CUDA_ARCHS "80-real;90a-real;90-virtual" CACHE STRING "CUDA architectures")
set(CMAKE_CUDA_ARCHITECTURES "${VLLM_CUDA_ARCHS}")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

file(GLOB_RECURSE VLLM_CUDA_OPS CONFIGURE_DEPENDS
  "${CMAKE_SOURCE_DIR}/csrc/cuda/*.cu" "${CMAKE_SOURCE_DIR}/csrc/hybrid/cuda/*.cu")

# The library must name both libtorch_cpu and libtorch_cuda as needed, or it is loaded before the
# symbols of the latter are there. Where torch has no CUDA, an empty library of that name stands in
# at link time; it is not installed.
set(VLLM_TORCH_CUDA "${VLLM_TORCH_DIR}/lib/libtorch_cuda.so")
if(NOT EXISTS "${VLLM_TORCH_CUDA}")
  message(STATUS "torch has no CUDA here: linking against a stub of libtorch_cuda.so")
  add_library(torch_cuda_stub SHARED "${CMAKE_SOURCE_DIR}/cmake/torch_cuda_stub.cpp")
  set_target_properties(torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/stub")
  set(VLLM_TORCH_CUDA torch_cuda_stub)
endif()

add_library(_C_cuda MODULE ${VLLM_CUDA_OPS})
target_include_directories(_C_cuda PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
# -fmad=false: a product and a sum are fused only where the code says fmaf, as in the CPU ops.
target_compile_options(_C_cuda PRIVATE
  -O3 -fmad=false --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter
  $<$<BOOL:${VLLM_CUDA_VERBOSE}>:-Xptxas=-v>)
target_link_libraries(_C_cuda PRIVATE torch_stable_abi ${VLLM_TORCH_CUDA} ${CMAKE_DL_LIBS})
set_target_properties(_C_cuda PROPERTIES
  PREFIX "" SUFFIX ".abi3.so" LIBRARY_OUTPUT_DIRECTORY "${VLLM_OUTPUT_DIR}"
  SKIP_BUILD_RPATH ON)
