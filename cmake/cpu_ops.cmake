# _C_cpu: csrc/cpu/*.cpp (ops: checks and registration, baseline x86-64) and csrc/cpu/kernels/*.cpp
# (kernel bodies), the latter compiled once for each instruction set in a namespace of its own.
#
# OpenMP: objects are compiled with -fopenmp but the library does not name an OpenMP runtime of its
# own. Its symbols resolve through libtorch_cpu.so to whatever runtime torch itself brought, under
# whatever file name, so that a process has one runtime (vllm/_custom_ops/library.py checks it).
file(GLOB VLLM_CPU_OPS CONFIGURE_DEPENDS
  "${CMAKE_SOURCE_DIR}/csrc/cpu/*.cpp" "${CMAKE_SOURCE_DIR}/csrc/hybrid/cpu/*.cpp")
file(GLOB VLLM_CPU_KERNELS CONFIGURE_DEPENDS
  "${CMAKE_SOURCE_DIR}/csrc/cpu/kernels/*.cpp" "${CMAKE_SOURCE_DIR}/csrc/hybrid/cpu/kernels/*.cpp")

set(VLLM_CXX_FLAGS -O3 -g0 -fopenmp -Wall -Wextra -Wno-unknown-pragmas
  -Wno-maybe-uninitialized -Wno-uninitialized -fno-math-errno
  -fno-trapping-math -ffp-contract=off -fdiagnostics-color=auto)
set(VLLM_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mtune=haswell)
set(VLLM_ISA_FLAGS_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq
  -mprefer-vector-width=512 -mtune=skylake-avx512)
set(VLLM_ISA_FLAGS_avx512_bf16 ${VLLM_ISA_FLAGS_avx512} -mavx512bf16)

set(VLLM_CPU_OBJECTS "")
foreach(isa avx2 avx512 avx512_bf16)
  add_library(cpu_kernels_${isa} OBJECT ${VLLM_CPU_KERNELS})
  target_include_directories(cpu_kernels_${isa} PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
  target_compile_options(cpu_kernels_${isa} PRIVATE ${VLLM_CXX_FLAGS} ${VLLM_ISA_FLAGS_${isa}})
  string(TOUPPER ${isa} isa_upper)
  target_compile_definitions(cpu_kernels_${isa} PRIVATE
    VLLM_ISA=${isa} VLLM_ISA_${isa_upper}=1)
  list(APPEND VLLM_CPU_OBJECTS $<TARGET_OBJECTS:cpu_kernels_${isa}>)
endforeach()

add_library(_C_cpu MODULE ${VLLM_CPU_OPS} ${VLLM_CPU_OBJECTS})
target_include_directories(_C_cpu PRIVATE "${CMAKE_SOURCE_DIR}/csrc")
target_compile_options(_C_cpu PRIVATE ${VLLM_CXX_FLAGS})
target_link_libraries(_C_cpu PRIVATE torch_stable_abi ${CMAKE_DL_LIBS})
set_target_properties(_C_cpu PROPERTIES
  PREFIX "" SUFFIX ".abi3.so" LIBRARY_OUTPUT_DIRECTORY "${VLLM_OUTPUT_DIR}")
