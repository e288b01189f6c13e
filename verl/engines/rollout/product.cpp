// Products of a bf16 weight with any number of rows, sums in fp32, for processors with AVX512-BF16. A weight is laid out once
// in the order in which it is read: blocks of 32 outputs, in each block pairs of inputs, of each pair the 32 outputs. A row's
// result does not depend on the rows beside it. What follows a product is done while its sums are at hand, and is rounded
// to bf16 where the decoder rounds.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

constexpr int64_t kWide = 32, kRows = 12;
constexpr int64_t kDepth = 4096;  // inputs a pass: a block of so many (256 KiB) stays in the second-level cache

static inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline __m512 rounded(__m512 x) { return widen(narrow(x)); }
static inline __mmask16 below(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

// R rows with one block: sums [R, 32] from 0 (first) or from what `sums` holds.
template <int R>
static void tile(const bf16* x, int64_t stride, const bf16* w, int64_t pairs, float* sums, bool first) {
  __m512 a[R], b[R];
  for (int r = 0; r < R; ++r) {
    a[r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kWide);
    b[r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * kWide + 16);
  }
  for (int64_t p = 0; p < pairs; ++p) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w + p * 64), w1 = (__m512bh)_mm512_loadu_si512(w + p * 64 + 32);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + 2 * p, 4);
      const __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
      a[r] = _mm512_dpbf16_ps(a[r], v, w0);
      b[r] = _mm512_dpbf16_ps(b[r], v, w1);
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(sums + r * kWide, a[r]);
    _mm512_storeu_ps(sums + r * kWide + 16, b[r]);
  }
}

using Tile = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*, bool);
static const Tile kTiles[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                              tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

// exp of x <= 0 to 2e-7 relative, as in decode.cpp.
static inline __m512 exp_below_zero(__m512 x) {
  const __m512 at = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(at, _mm512_set1_ps(1.44269504f)), 0);
  const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), at));
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

static inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), e = exp_below_zero(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 sigmoid = _mm512_div_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_add_ps(e, one));
  return _mm512_mul_ps(x, sigmoid);
}

// One row of a block [32] where the first 16 are gates and the others what they gate -> 16 outputs.
static inline void gate(const float* sums, const bf16* bias, bf16* out) {
  __m512 g = _mm512_loadu_ps(sums), u = _mm512_loadu_ps(sums + 16);
  if (bias) {
    g = _mm512_add_ps(g, widen(_mm256_loadu_si256((const __m256i*)bias)));
    u = _mm512_add_ps(u, widen(_mm256_loadu_si256((const __m256i*)(bias + 16))));
  }
  _mm256_storeu_si256((__m256i*)out, narrow(_mm512_mul_ps(rounded(silu(rounded(g))), rounded(u))));
}

// 16 sums, `count` of them real: with the bias, and added to what lies in `out` where `add`.
static inline void finish(const float* sums, const bf16* bias, bf16* out, int64_t count, bool add) {
  const __mmask16 mask = below(count);
  __m512 y = _mm512_loadu_ps(sums);
  if (bias) y = _mm512_add_ps(y, widen(_mm256_maskz_loadu_epi16(mask, bias)));
  if (add) y = _mm512_add_ps(rounded(y), widen(_mm256_maskz_loadu_epi16(mask, out)));
  _mm256_mask_storeu_epi16(out, mask, narrow(y));
}

extern "C" {

int multiplies() { return 1; }

// Lay weight [n, k] (k even) out. Its outputs go by sixteens to the halves `first`, `first + step`, ... of out's blocks.
void pack(const bf16* weight, int64_t n, int64_t k, bf16* out, int64_t first, int64_t step) {
  const int64_t pairs = k / 2, halves = (n + 15) / 16;
  const __m512i row = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i index = _mm512_mullo_epi32(row, _mm512_set1_epi32(static_cast<int>(pairs)));
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < halves; ++h) {
    const int64_t at = first + h * step;
    const __mmask16 mask = below(n - h * 16);
    int32_t* to = reinterpret_cast<int32_t*>(out) + (at / 2) * pairs * kWide + (at % 2) * 16;
    const int32_t* from = reinterpret_cast<const int32_t*>(weight) + h * 16 * pairs;
    for (int64_t p = 0; p < pairs; ++p)
      _mm512_storeu_si512(to + p * kWide, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, index, from + p, 4));
  }
}

// x [rows, k] with a row stride, w packed of n outputs, bias [n] as they are packed, or null.
// how 0: out [rows, n] = x W^T + b; 1: that added to out; 2: out [rows, n / 2] = silu(gate) * up of gates and ups by sixteens.
void multiply(const bf16* x, int64_t stride, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t n, int64_t k,
              int64_t how) {
  const int64_t blocks = (n + kWide - 1) / kWide, tiles = (rows + kRows - 1) / kRows, pairs = k / 2;
  const bool once = k <= kDepth;
#pragma omp parallel
  {
    std::vector<float> scratch((once ? kRows : rows) * kWide);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const bf16 *weight = w + block * pairs * 64, *b = bias ? bias + block * kWide : nullptr;
      for (int64_t from = 0; from < pairs; from += kDepth / 2) {
        const int64_t depth = std::min(kDepth / 2, pairs - from);
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
          float* sums = scratch.data() + (once ? 0 : begin * kWide);
          kTiles[end - begin](x + begin * stride + 2 * from, stride, weight + from * 64, depth, sums, from == 0);
          if (from + depth < pairs) continue;
          for (int64_t r = begin; r < end; ++r, sums += kWide) {
            const int64_t at = block * kWide;
            if (how == 2) {
              gate(sums, b, out + r * (n / 2) + block * 16);
              continue;
            }
            finish(sums, b, out + r * n + at, n - at, how == 1);
            if (n - at > 16) finish(sums + 16, b ? b + 16 : nullptr, out + r * n + at + 16, n - at - 16, how == 1);
          }
        }
      }
    }
  }
}
}

#else

extern "C" {
int multiplies() { return 0; }
void pack(const bf16*, int64_t, int64_t, bf16*, int64_t, int64_t) {}
void multiply(const bf16*, int64_t, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t) {}
}

#endif
