// Steps of cached decoding in bf16 that a chain of tensor operations passes over memory too often for: the norm of a
// few rows, and rotary embedding, cache write and attention of one new token a sequence. Sums are in fp32; what the decoder
// rounds to bf16 between operations is rounded here at the same places. Plain C++ with OpenMP, called through ctypes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;

static inline float wide(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Nearest, ties to even.
static inline bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp of x <= 0 to 2e-7 relative, 0 below e^-87: 2^n times a polynomial on the rest. Written out because it must vectorise.
// NaN stays NaN.
static inline float exp_below_zero(float x) {
  const float at = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyintf(at * 1.44269504f);
  const float r = (at - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return x < -87.0f ? 0.0f : p * scale;
}

// One head [dim] rotated by the angles of its position; element i is paired with element i + dim / 2.
static inline void rotate(const bf16* x, const bf16* cos, const bf16* sin, int64_t dim, bf16* out) {
  const int64_t half = dim / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = wide(x[i]), b = wide(x[i + half]), c = wide(cos[i]), s = wide(sin[i]);
    out[i] = narrow(wide(narrow(a * c)) - b * s);
    out[i + half] = narrow(wide(narrow(b * c)) + a * s);
  }
}

// The cache is larger than the processor's: what is read next is asked for while the present is computed.
template <int DIM>
static inline void fetch(const bf16* row) {
  for (int d = 0; d < DIM; d += 32) __builtin_prefetch(row + d);
}

// One sequence and one group of query heads: scores of `count` keys, softmax, mixed values. DIM: head size, SHARE: heads.
template <int DIM, int SHARE>
static void mix(const float* query, const bf16* key, const bf16* value, const bf16* next, int64_t token, int64_t count,
                float* p, bf16* out) {
  for (int64_t t = 0; t < count; ++t) {
    fetch<DIM>(value + t * token);
    float row[DIM];
#pragma omp simd
    for (int d = 0; d < DIM; ++d) row[d] = wide(key[t * token + d]);
    for (int h = 0; h < SHARE; ++h) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int d = 0; d < DIM; ++d) sum += query[h * DIM + d] * row[d];
      p[h * count + t] = sum;
    }
  }
  for (int h = 0; h < SHARE; ++h) {
    float *row = p + h * count, top = row[0], total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t t = 0; t < count; ++t) top = row[t] > top ? row[t] : top;
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < count; ++t) {
      row[t] = exp_below_zero(row[t] - top);
      total += row[t];
    }
    const float share = 1.0f / total;
#pragma omp simd
    for (int64_t t = 0; t < count; ++t) row[t] *= share;
  }
  float sums[SHARE * DIM] = {};
  for (int64_t t = 0; t < count; ++t) {
    fetch<DIM>(next + t * token);
    float row[DIM];
#pragma omp simd
    for (int d = 0; d < DIM; ++d) row[d] = wide(value[t * token + d]);
    for (int h = 0; h < SHARE; ++h) {
      const float w = p[h * count + t];
#pragma omp simd
      for (int d = 0; d < DIM; ++d) sums[h * DIM + d] += w * row[d];
    }
  }
#pragma omp simd
  for (int d = 0; d < SHARE * DIM; ++d) out[d] = narrow(sums[d]);
}

using Mix = void (*)(const float*, const bf16*, const bf16*, const bf16*, int64_t, int64_t, float*, bf16*);

template <int DIM>
static Mix of_share(int64_t share) {
  static const Mix table[] = {mix<DIM, 1>, mix<DIM, 2>, mix<DIM, 3>, mix<DIM, 4>,
                              mix<DIM, 5>, mix<DIM, 6>, mix<DIM, 7>, mix<DIM, 8>};
  return share >= 1 && share <= 8 ? table[share - 1] : nullptr;
}

static Mix find(int64_t dim, int64_t share) {
  switch (dim) {
    case 32: return of_share<32>(share);
    case 64: return of_share<64>(share);
    case 96: return of_share<96>(share);
    case 128: return of_share<128>(share);
    default: return nullptr;
  }
}

extern "C" {

// Whether `attend` knows heads of this size, `share` of them to a key.
int knows(int64_t dim, int64_t share) { return find(dim, share) != nullptr; }

// x [rows, size] with a row stride, weight [size] -> out [rows, size]: x / sqrt(mean(x^2) + eps) * weight.
void rms_norm(const bf16* x, int64_t stride, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > 8192)
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* row = x + r * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < size; ++d) sum += wide(row[d]) * wide(row[d]);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) out[r * size + d] = narrow(wide(row[d]) * scale * wide(weight[d]));
  }
}

// both [rows, 2 size]: gates, then what they gate -> out [rows, size]: silu(gate) * up.
void silu_mul(const bf16* both, bf16* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 16384)
  for (int64_t r = 0; r < rows; ++r) {
    const bf16 *gate = both + r * 2 * size, *up = gate + size;
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) {
      const float x = wide(gate[d]), e = exp_below_zero(-std::fabs(x));
      const float sigmoid = (x < 0 ? e : 1.0f) / (1.0f + e);
      out[r * size + d] = narrow(wide(narrow(x * sigmoid)) * wide(up[d]));
    }
  }
}

// One token a row by inversion: logits [rows, vocab] in bf16, divided by temperature [rows]; u [rows] in [0, 1).
// ids [rows]: the token at which the running sum of probabilities passes u; logps [rows] of it. A row whose sum is not finite
// gets id -1. Sums of blocks are in fp32, running sums in fp64, as in sampling.py.
void draw(const bf16* logits, const float* temperature, const double* u, int64_t* ids, float* logps, int64_t rows,
          int64_t vocab) {
  const int64_t size = 256, blocks = (vocab + size - 1) / size;
#pragma omp parallel
  {
    std::vector<float> sums(blocks), mass(size);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const bf16* x = logits + r * vocab;
      const float over = 1.0f / temperature[r];
      float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
      for (int64_t i = 0; i < vocab; ++i) top = wide(x[i]) > top ? wide(x[i]) : top;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t end = std::min(vocab, (b + 1) * size);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * size; i < end; ++i) sum += exp_below_zero((wide(x[i]) - top) * over);
        sums[b] = sum;
      }
      double all = 0, before = 0;
      for (int64_t b = 0; b < blocks; ++b) all += sums[b];
      if (!std::isfinite(all) || !std::isfinite(top)) {
        ids[r] = -1;
        continue;
      }
      const double target = u[r] * all;
      int64_t b = 0, last = 0;
      for (double run = 0; b < blocks; ++b) {
        if (run + sums[b] > target) break;
        if (sums[b] > 0) last = b;
        run += sums[b];
        before = run;
      }
      if (b == blocks) {  // rounding left none: the last block that adds mass
        b = last;
        before -= sums[b];
      }
      const int64_t begin = b * size, end = std::min(vocab, begin + size);
      int64_t id = begin;
      double run = before;
      for (int64_t i = begin; i < end; ++i) {
        const float p = exp_below_zero((wide(x[i]) - top) * over);
        if (p > 0) id = i;
        run += p;
        if (p > 0 && run > target) break;
      }
      ids[r] = id;
      total = static_cast<float>(all);
      logps[r] = (wide(x[id]) - top) * over - std::log(total);
    }
  }
}

// qkv [rows, H + 2 KV, hd] in one piece: queries, keys, values, not yet rotated; cos, sin [rows, hd / 2].
// keys, values [slots, KV, tokens, hd] with strides slot, group, hd. Row b is token positions[b] of slots[b]; its key and
// value are written there and to the copies[b] - 1 slots behind, and then every row sees its slot up to itself.
// window: tokens seen, 0 for all. out [rows, H hd].
void attend(const bf16* qkv, const bf16* cos, const bf16* sin, bf16* keys, bf16* values, const int64_t* slots,
            const int64_t* copies, const int64_t* positions, bf16* out, int64_t rows, int64_t heads, int64_t groups,
            int64_t dim, int64_t slot, int64_t group, int64_t window) {
  const int64_t share = heads / groups, width = (heads + 2 * groups) * dim, tasks = rows * groups;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const Mix mixer = find(dim, share);
#pragma omp parallel
  {
    std::vector<bf16> turned(dim);
    std::vector<float> query(share * dim), scores;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < rows; ++b) {
      const bf16* row = qkv + b * width + heads * dim;
      for (int64_t g = 0; g < groups; ++g, row += dim) {
        rotate(row, cos + b * (dim / 2), sin + b * (dim / 2), dim, turned.data());
        for (int64_t c = 0; c < copies[b]; ++c) {
          const int64_t at = (slots[b] + c) * slot + g * group + positions[b] * dim;
          std::memcpy(keys + at, turned.data(), dim * sizeof(bf16));
          std::memcpy(values + at, row + groups * dim, dim * sizeof(bf16));
        }
      }
    }
    // By turns in small shares: a prompt's last rows see more than its first.
#pragma omp for schedule(static, 4)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t b = task / groups, g = task % groups, last = positions[b];
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0, count = last - first + 1;
      const bf16 *row = qkv + b * width, *c = cos + b * (dim / 2), *s = sin + b * (dim / 2);
      const int64_t begin = slots[b] * slot + g * group + first * dim;
      for (int64_t h = 0; h < share; ++h) {
        rotate(row + (g * share + h) * dim, c, s, dim, turned.data());
        for (int64_t d = 0; d < dim; ++d) query[h * dim + d] = wide(turned[d]) * scale;
      }
      scores.resize(share * count);
      const int64_t after = std::min(task + 1, tasks - 1);
      const bf16* next = keys + slots[after / groups] * slot + (after % groups) * group + first * dim;
      mixer(query.data(), keys + begin, values + begin, next, dim, count, scores.data(),
            out + (b * heads + g * share) * dim);
    }
  }
}
}
