// The dialect that every kernel is written in: one text, compiled by NVRTC for the GPU and by a C++ compiler for the CPU.
//   KERNEL(name, arguments...) { body }           runs on both
//   CPU_KERNEL(name, arguments...) { body }       shares of work on the CPU only (inside #if ON_CPU)
//   NATIVE(result, name, arguments...) { body }   one plain call on the CPU only
// The Python side reads argument names and types from these lines, so the macros must stand at the start of a line.
//
// FOR_ITEMS(i, n) gives every item to one thread. FOR_TILES(i, n) gives it to a tile: LANES neighbouring threads of the
// GPU, one thread of the CPU. Within a tile FOR_DIMS(d, k) walks the dimensions d of a row, so that lanes read
// neighbouring words (8 lanes are one 32-byte sector), and k names the register that keeps dimension d. Iterations of
// FOR_DIMS must be independent; where they are not (sums, maxima) use FOR_DIMS_IN_TURN.
#pragma once

#if defined(__CUDACC__)
#define ON_CPU 0
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#define DEVICE __device__ __forceinline__
// Launch bounds ask for 1 block per multiprocessor: with 2, ptxas has fewer registers and spills sums of long rows.
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(256, 1) name(__VA_ARGS__)
#define SHARE_PARAMETERS
#define SHARE
#define LANES 8
#define LANE ((int)(threadIdx.x % LANES))
#define THREAD (blockIdx.x * (int64_t)blockDim.x + threadIdx.x)
#define FOR_ITEMS(i, n) for (int64_t i = THREAD; i < (n); i += (int64_t)gridDim.x * blockDim.x)
#define FOR_TILES(i, n) for (int64_t i = THREAD / LANES; i < (n); i += (int64_t)gridDim.x * blockDim.x / LANES)
#define REGISTERS(dims) (((dims) + LANES - 1) / LANES)
#define FOR_DIMS(d, k) \
    _Pragma("unroll") for (int k = 0, d = LANE; k < REGISTERS(MAX); ++k, d += LANES) if (d < D)
#define FOR_DIMS_IN_TURN(d, k) FOR_DIMS(d, k)
// The launcher compiles one module per size class of D (4, 8 ... 256) and names it DIM.
#define WITH_DIMENSION(D, call, ...) call<DIM>(D, __VA_ARGS__)
#define TILE_MASK (0xffu << (threadIdx.x % 32 / LANES * LANES))
#define TILE_SYNC() __syncwarp(TILE_MASK)
#define PREFETCH(address)
#define ATOMIC_OR(address, value) atomicOr(address, value)
#define ATOMIC_CAS(address, expected, value) atomicCAS(address, expected, value)
#define MULTIPLY_HIGH(a, b) __umul64hi(a, b)
#define DOUBLE_BITS(x) ((uint64_t)__double_as_longlong(x))
#define BITS_DOUBLE(x) __longlong_as_double((int64_t)(x))
#define FLOAT_BITS(x) __float_as_uint(x)
#define SQRT_FLOAT(x) __fsqrt_rn(x)
#define SQRT_DOUBLE(x) __dsqrt_rn(x)
#else
#define ON_CPU 1
#include <stddef.h>
#include <stdint.h>
#define DEVICE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))
#define KERNEL(name, ...) EXPORT void name(__VA_ARGS__, int64_t share_index, int64_t share_count)
#define CPU_KERNEL(name, ...) KERNEL(name, __VA_ARGS__)
#define NATIVE(result, name, ...) EXPORT result name(__VA_ARGS__)
// Last parameters, and last arguments, of a function that iterates over a kernel's items itself.
#define SHARE_PARAMETERS , int64_t share_index, int64_t share_count
#define SHARE , share_index, share_count
#define LANES 1
#define LANE 0
// The items of one share are contiguous.
#define FOR_ITEMS(i, n) \
    for (int64_t i = (n) * share_index / share_count, i##_end = (n) * (share_index + 1) / share_count; i < i##_end; ++i)
#define FOR_TILES(i, n) FOR_ITEMS(i, n)
#define REGISTERS(dims) (dims)
// omp simd tells GCC that iterations are independent. Without it, GCC unrolls the loop first and then cannot vectorise it.
#define FOR_DIMS(d, k) \
    _Pragma("omp simd") for (int k = 0; k < D; ++k) if ([[maybe_unused]] const int d = k; true)
#define FOR_DIMS_IN_TURN(d, k) for (int k = 0; k < D; ++k) if ([[maybe_unused]] const int d = k; true)
// Prefetches the cache lines of `count` 4-byte values, with the line of the last one, which may be one more. It is a single
// statement, so that an `if` that checks the bounds can precede it.
#define PREFETCH_RUN(address, count)                                                           \
    do {                                                                                       \
        for (int ahead_ = 0; ahead_ < (count); ahead_ += 16) PREFETCH((address) + ahead_);     \
        PREFETCH((address) + (count) - 1);                                                     \
    } while (0)
// D is a constant for the common sizes, so that the loops over dimensions unroll into whole vectors.
#define WITH_DIMENSION(D, call, ...)                   \
    switch (D) {                                       \
        case 4: call<4>(4, __VA_ARGS__); break;        \
        case 8: call<8>(8, __VA_ARGS__); break;        \
        case 16: call<16>(16, __VA_ARGS__); break;     \
        case 32: call<32>(32, __VA_ARGS__); break;     \
        case 64: call<64>(64, __VA_ARGS__); break;     \
        case 128: call<128>(128, __VA_ARGS__); break;  \
        default: call<256>(D, __VA_ARGS__);            \
    }
#define TILE_SYNC()
// Prefetches to the L2 cache, far ahead: 25 GB/s of random lines on 2 cores. To L1, which allows few outstanding misses, it
// was 12 GB/s at any distance.
#define PREFETCH(address) __builtin_prefetch((const void*)(address), 0, 2)
#define PREFETCH_AHEAD 48
#define ATOMIC_OR(address, value) __atomic_fetch_or(address, value, __ATOMIC_RELAXED)
#define ATOMIC_NEXT(address) __atomic_fetch_add(address, 1, __ATOMIC_RELAXED)
#define ATOMIC_CAS(address, expected, value) compare_and_swap(address, expected, value)
#define MULTIPLY_HIGH(a, b) (uint64_t)(((unsigned __int128)(a) * (b)) >> 64)
#define DOUBLE_BITS(x) bits_of<uint64_t>((double)(x))
#define BITS_DOUBLE(x) bits_of<double>((uint64_t)(x))
#define FLOAT_BITS(x) bits_of<uint32_t>((float)(x))
#define SQRT_FLOAT(x) __builtin_sqrtf(x)
#define SQRT_DOUBLE(x) __builtin_sqrt(x)
template <class To, class From>
DEVICE To bits_of(From from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
DEVICE int32_t compare_and_swap(int32_t* address, int32_t expected, int32_t value) {
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
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

#if ON_CPU
// Copies a row, whose bits are opaque, in pieces of 16 bytes; the last piece overlaps the one before it. memcpy of libc
// takes about 10 ns per call at this size.
DEVICE void copy_row(float* to, const float* from, int64_t width) {
    if (width < 4) {
        for (int64_t i = 0; i < width; ++i) __builtin_memcpy(to + i, from + i, 4);
        return;
    }
    for (int64_t i = 0; i + 4 <= width; i += 4) __builtin_memcpy(to + i, from + i, 16);
    __builtin_memcpy(to + width - 4, from + width - 4, 16);
}

// Iterates over a share's items in blocks of at most BLOCK, so that keys are mixed in whole vectors.
static const int64_t BLOCK = 256;
DEVICE void mix_block(const uint64_t* keys, int64_t count, uint64_t salt, uint64_t* mixed) {
    _Pragma("omp simd") for (int64_t j = 0; j < count; ++j) mixed[j] = mix64(keys[j] ^ salt);
}
#define FOR_BLOCKS(start, count, n)                                                                                  \
    for (int64_t start = (n) * share_index / share_count, start##_end = (n) * (share_index + 1) / share_count;        \
         start < start##_end; start += BLOCK)                                                                        \
        if (const int64_t count = start##_end - start < BLOCK ? start##_end - start : BLOCK; true)
#endif

// Returns the part, one of `parts`, of a mixed key by its high bits.
DEVICE int64_t part_of(uint64_t mixed, int64_t parts) { return (int64_t)(((mixed >> 32) * (uint64_t)parts) >> 32); }
