// What the kernels of training share: bf16 as 16 bits, vectors of 16 fp32, and an exponential that vectorises.

#pragma once

#include <cstdint>
#include <cstring>

using bf16 = uint16_t;
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4)));

static inline float wide(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<bf16>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline v16 load(const bf16* x) {
  const u16 bits = __builtin_convertvector(*(const h16*)x, u16) << 16;
  return (v16)bits;
}

static inline void store(bf16* to, v16 x) {
  const u16 bits = (u16)x;
  const u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  *(h16*)to = __builtin_convertvector(x != x ? u16{} + 0x7fc0 : rounded, h16);
}

static inline v16 all(float x) { return x - v16{}; }

static inline float total(v16 x) {
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  return sum;
}

// The largest; NaN if there is one.
static inline float largest(v16 x) {
  float most = x[0];
  for (int i = 1; i < 16; ++i) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  return most;
}

// exp of x <= 0 to 2e-7 relative, 0 below e^-87; NaN stays NaN.
static inline v16 exp_below_zero(v16 x) {
  const v16 at = x < -87.0f ? all(-87.0f) : x;
  const v16 round = all(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
  const v16 n = (at * 1.44269504f + round) - round;
  const v16 r = (at - n * 0.693359375f) + n * 2.12194440e-4f;
  v16 p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  p = p * r * r + r + 1.0f;
  const i16 power = (__builtin_convertvector(n, i16) + 127) << 23;
  return x < -87.0f ? v16{} : p * (v16)power;
}
