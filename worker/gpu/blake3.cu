// BLAKE3 (keyed) of 2 MiB chunks of device memory; the digests are those of any BLAKE3 library for the same key.
// The specification: https://github.com/BLAKE3-team/BLAKE3-specs
//
// `leaves`: one thread for each 1 KiB, one block of 256 threads for each 256 KiB, whose chaining value it leaves in
// `out`. `roots`: one thread for each 2 MiB joins eight of those.
typedef unsigned int u32;
typedef unsigned long long u64;

enum : u32 { kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8, kKeyed = 16 };

__device__ __forceinline__ u32 rotate(u32 x, int by) { return __funnelshift_r(x, x, by); }

__device__ __forceinline__ void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
  a = a + b + x;
  d = rotate(d ^ a, 16);
  c = c + d;
  b = rotate(b ^ c, 12);
  a = a + b + y;
  d = rotate(d ^ a, 8);
  c = c + d;
  b = rotate(b ^ c, 7);
}

#define ROUND(a, b, c, d, e, f, g, h, i, j, k, l, m_, n, o, p)                                              \
  mix(v[0], v[4], v[8], v[12], m[a], m[b]), mix(v[1], v[5], v[9], v[13], m[c], m[d]),                       \
      mix(v[2], v[6], v[10], v[14], m[e], m[f]), mix(v[3], v[7], v[11], v[15], m[g], m[h]),                 \
      mix(v[0], v[5], v[10], v[15], m[i], m[j]), mix(v[1], v[6], v[11], v[12], m[k], m[l]),                 \
      mix(v[2], v[7], v[8], v[13], m[m_], m[n]), mix(v[3], v[4], v[9], v[14], m[o], m[p])

// The message words of each round stand here as numbers, so that `m` and `v` stay in registers.
__device__ __forceinline__ void compress(u32 (&value)[8], const u32 (&m)[16], u64 counter, u32 flags) {
  u32 v[16] = {value[0], value[1], value[2], value[3], value[4], value[5], value[6], value[7],
               0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, (u32)counter, (u32)(counter >> 32), 64, flags};
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8);
  ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1);
  ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6);
  ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4);
  ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7);
  ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13);
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

struct Key {
  u32 words[8];
};

__device__ __forceinline__ void join(u32 (&value)[8], const u32* left, const u32* right, const Key& key, u32 flags) {
  u32 m[16];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    m[i] = left[i];
    m[8 + i] = right[i];
    value[i] = key.words[i];
  }
  compress(value, m, 0, flags | kParent | kKeyed);
}

extern "C" __global__ void __launch_bounds__(256) leaves(const uint4* __restrict__ in, u32* __restrict__ out, Key key) {
  const u64 leaf = blockIdx.x * (u64)256 + threadIdx.x;
  const uint4* from = in + leaf * 64;
  u32 value[8];
#pragma unroll
  for (int i = 0; i < 8; i++) value[i] = key.words[i];
#pragma unroll 1
  for (int block = 0; block < 16; block++) {
    u32 m[16];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 quad = __ldg(from + block * 4 + i);
      m[4 * i] = quad.x;
      m[4 * i + 1] = quad.y;
      m[4 * i + 2] = quad.z;
      m[4 * i + 3] = quad.w;
    }
    // 2,048 leaves make one chunk: the counter begins anew with each.
    compress(value, m, leaf & 2047, kKeyed | (block == 0 ? kChunkStart : 0) | (block == 15 ? kChunkEnd : 0));
  }
  __shared__ u32 values[256][9];  // 9: no two threads meet in a bank
#pragma unroll
  for (int i = 0; i < 8; i++) values[threadIdx.x][i] = value[i];
  for (int left = 128; left >= 1; left >>= 1) {
    __syncthreads();
    const bool joins = threadIdx.x < left;
    if (joins) join(value, values[2 * threadIdx.x], values[2 * threadIdx.x + 1], key, 0);
    __syncthreads();
    if (joins) {
#pragma unroll
      for (int i = 0; i < 8; i++) values[threadIdx.x][i] = value[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < 8) out[blockIdx.x * 8 + threadIdx.x] = values[0][threadIdx.x];
}

extern "C" __global__ void roots(const u32* __restrict__ in, u32* __restrict__ out, Key key, u32 chunks) {
  const u32 chunk = blockIdx.x * blockDim.x + threadIdx.x;
  if (chunk >= chunks) return;
  u32 values[8][8];
  for (int i = 0; i < 64; i++) values[i / 8][i % 8] = in[chunk * 64ull + i];
  for (int left = 4; left >= 1; left >>= 1) {
    for (int i = 0; i < left; i++) {
      u32 value[8];
      join(value, values[2 * i], values[2 * i + 1], key, left == 1 ? kRoot : 0);
      for (int k = 0; k < 8; k++) values[i][k] = value[k];
    }
  }
  for (int i = 0; i < 8; i++) out[chunk * 8ull + i] = values[0][i];
}

// Copies chunks (2 MiB each) from anywhere to one after the other: `from[i]` is the address of chunk i.
extern "C" __global__ void gather(const u64* __restrict__ from, uint4* __restrict__ to) {
  const uint4* source = (const uint4*)from[blockIdx.y];
  uint4* target = to + blockIdx.y * (u64)131072;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < 131072; i += gridDim.x * blockDim.x) target[i] = source[i];
}
