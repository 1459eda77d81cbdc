// The dialect that every kernel is written in: one text, compiled by NVRTC for the GPU and by a C++ compiler for the CPU.
// KERNEL(name, arguments...) { body } runs on both; NATIVE(result, name, arguments...) { body } on the CPU only.
// The Python side reads argument names and types from these lines, so both macros must stand at the start of a line.
#pragma once

#if defined(__CUDACC__)
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#define DEVICE __device__ __forceinline__
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define FOR_ITEMS(i, n) \
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)
#else
#include <stddef.h>
#include <stdint.h>
#define DEVICE static inline
#define EXPORT extern "C" __attribute__((visibility("default")))
#define KERNEL(name, ...) EXPORT void name(__VA_ARGS__, int64_t share_index, int64_t share_count)
#define NATIVE(result, name, ...) EXPORT result name(__VA_ARGS__)
// A thread's share of the items is one contiguous run.
#define FOR_ITEMS(i, n) \
    for (int64_t i = (n) * share_index / share_count, i##_end = (n) * (share_index + 1) / share_count; i < i##_end; ++i)
#endif

// A full-period mix of 64 bits (the finalizer of SplitMix64). It is a bijection, so distinct keys stay distinct.
DEVICE uint64_t mix64(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 31;
    return x;
}
