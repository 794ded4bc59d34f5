# Kernels choose their instructions by #pragma GCC target and are picked at run time, so no -march
# here: the plugin must load on any x86-64. Vector types in static inline signatures are never ABI.
CFLAGS_common_engine_cpu_ := -fopenmp -O3 -Wno-psabi
