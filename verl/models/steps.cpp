// Steps of training between the products, forward and backward, on bf16 with all arithmetic in fp32: each reads and writes
// memory once. Plain C++ with vector types and OpenMP, called through ctypes. Sums are made in an order that no number of
// threads changes.

#include <algorithm>
#include <cmath>
#include <vector>

#include "bf16.h"

constexpr int64_t kChunk = 64;  // rows whose part of a weight's gradient is summed by one thread

static inline v16 sigmoid(v16 x) {
  const v16 e = exp_below_zero(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

static inline v16 rounded(v16 x) {
  bf16 room[16];
  store(room, x);
  return load(room);
}

// Elements [from, from + 16) of a row whose last ones may be missing.
static inline v16 load_some(const bf16* x, int64_t count) {
  if (count >= 16) return load(x);
  v16 out = {};
  for (int64_t i = 0; i < count; ++i) out[i] = wide(x[i]);
  return out;
}

static inline void store_some(bf16* to, v16 x, int64_t count) {
  if (count >= 16) return store(to, x);
  for (int64_t i = 0; i < count; ++i) to[i] = narrow(x[i]);
}

extern "C" {

// x [rows, size] / rms * weight -> out; scale [rows]: 1 / rms, for the backward.
void norm_forward(const bf16* x, const bf16* weight, bf16* out, float* scale, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* row = x + r * size;
    v16 sum = {};
    for (int64_t d = 0; d < size; d += 16) {
      const v16 v = load_some(row + d, size - d);
      sum += v * v;
    }
    const float by = scale[r] = 1.0f / std::sqrt(total(sum) / size + eps);
    for (int64_t d = 0; d < size; d += 16) {
      const v16 v = load_some(row + d, size - d) * by * load_some(weight + d, size - d);
      store_some(out + r * size + d, v, size - d);
    }
  }
}

// grad [rows, size] -> dx [rows, size] and, by chunks of rows, parts [ceil(rows / 64), size] of the weight's gradient.
void norm_backward(const bf16* x, const bf16* weight, const float* scale, const bf16* grad, bf16* dx, float* parts,
                   int64_t rows, int64_t size) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
#pragma omp parallel
  {
    std::vector<float> room((size + 15) / 16 * 16);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {
      std::fill(room.begin(), room.end(), 0.0f);
      for (int64_t r = c * kChunk; r < std::min(rows, (c + 1) * kChunk); ++r) {
        const bf16 *row = x + r * size, *g = grad + r * size;
        v16 sum = {};
        for (int64_t d = 0; d < size; d += 16) {
          const v16 v = load_some(row + d, size - d) * scale[r], gv = load_some(g + d, size - d);
          *(v16*)(room.data() + d) += gv * v;
          sum += gv * load_some(weight + d, size - d) * v;
        }
        const float mean = total(sum) / size;
        for (int64_t d = 0; d < size; d += 16) {
          const v16 v = load_some(row + d, size - d) * scale[r];
          const v16 gw = load_some(g + d, size - d) * load_some(weight + d, size - d);
          store_some(dx + r * size + d, (gw - v * mean) * scale[r], size - d);
        }
      }
      std::copy(room.begin(), room.begin() + size, parts + c * size);
    }
  }
}

// silu(gate) * up, rounded after silu as the decoder does.
void gate_forward(const bf16* gate, const bf16* up, bf16* out, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += 16) {
    const v16 g = load_some(gate + i, count - i);
    store_some(out + i, rounded(g * sigmoid(g)) * load_some(up + i, count - i), count - i);
  }
}

void gate_backward(const bf16* gate, const bf16* up, const bf16* grad, bf16* d_gate, bf16* d_up, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += 16) {
    const v16 g = load_some(gate + i, count - i), u = load_some(up + i, count - i), dy = load_some(grad + i, count - i);
    const v16 s = sigmoid(g);
    store_some(d_up + i, dy * (g * s), count - i);
    store_some(d_gate + i, dy * u * s * (1.0f + g * (1.0f - s)), count - i);
  }
}

// x [rows, heads, dim] turned by the angles cos, sin [rows, dim / 2], the second times `sign`; rounded as the decoder rounds.
void turn(const bf16* x, const bf16* cos, const bf16* sin, bf16* out, int64_t rows, int64_t heads, int64_t dim, float sign) {
  const int64_t half = dim / 2;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      const bf16* row = x + (r * heads + h) * dim;
      bf16* to = out + (r * heads + h) * dim;
      for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const v16 a = load_some(row + i, left), b = load_some(row + half + i, left);
        const v16 c = load_some(cos + r * half + i, left), s = load_some(sin + r * half + i, left) * sign;
        store_some(to + i, rounded(a * c) - b * s, left);
        store_some(to + half + i, rounded(b * c) + a * s, left);
      }
    }
  }
}

// Of the law softmax(z / temperature), z [states, vocab]: norm [states], the log of its sum; entropy and squares [states], or
// null: its entropy, and the sum of its squares.
void law_forward(const bf16* z, int64_t states, int64_t vocab, float temperature, float* norm, float* entropy, float* squares) {
  const float by = 1.0f / temperature;
#pragma omp parallel for schedule(static)
  for (int64_t u = 0; u < states; ++u) {
    const bf16* row = z + u * vocab;
    const int64_t whole = vocab / 16 * 16;
    v16 top = all(-INFINITY);
    for (int64_t j = 0; j < whole; j += 16) {
      const v16 x = load(row + j);
      top = x > top || x != x ? x : top;
    }
    for (int64_t j = whole; j < vocab; ++j) top[0] = wide(row[j]) > top[0] || wide(row[j]) != wide(row[j]) ? wide(row[j]) : top[0];
    const float most = largest(top) * by;
    v16 sum = {}, mean = {}, square = {};
    for (int64_t j = 0; j < vocab; j += 16) {
      v16 x;
      if (j < whole) {
        x = load(row + j) * by - most;
      } else {
        x = all(-INFINITY);
        for (int64_t i = j; i < vocab; ++i) x[i - j] = wide(row[i]) * by - most;
      }
      const v16 p = exp_below_zero(x);
      sum += p;
      if (entropy) mean += p * (x < -1e30f ? all(-1e30f) : x);  // where p is 0, x may be -inf
      if (squares) square += p * p;
    }
    const float all_of_it = total(sum);
    norm[u] = std::log(all_of_it) + most;
    if (entropy) entropy[u] = std::log(all_of_it) - total(mean) / all_of_it;
    if (squares) squares[u] = total(square) / (all_of_it * all_of_it);
  }
}

// Its gradient: of_row [rows] that of the log-prob of target [rows], rows by state from row_at [states + 1]; of_entropy
// [states] or null. dz [states, vocab].
void law_backward(const bf16* z, int64_t states, int64_t vocab, float temperature, const float* norm, const float* entropy,
                  const float* of_row, const float* of_entropy, const int64_t* target, const int64_t* row_at, bf16* dz) {
  const float by = 1.0f / temperature;
#pragma omp parallel
  {
    std::vector<std::pair<int64_t, float>> ones;
#pragma omp for schedule(static)
    for (int64_t u = 0; u < states; ++u) {
      const bf16* row = z + u * vocab;
      bf16* to = dz + u * vocab;
      float sum = 0;
      ones.clear();
      for (int64_t r = row_at[u]; r < row_at[u + 1]; ++r) {
        sum += of_row[r];
        if (target[r] < 0) continue;  // of another part of the vocabulary
        auto same = std::find_if(ones.begin(), ones.end(), [&](const auto& o) { return o.first == target[r]; });
        if (same == ones.end()) {
          ones.emplace_back(target[r], of_row[r]);
        } else {
          same->second += of_row[r];
        }
      }
      const float slope = of_entropy ? of_entropy[u] : 0.0f, level = of_entropy ? entropy[u] : 0.0f;
      const auto grad = [&](v16 x) {  // d logp[target] / dz = onehot - p;  d entropy / dz = -p (log p + entropy), 0 where p is
        x = x > 0.0f ? v16{} : x;
        const v16 p = exp_below_zero(x);
        v16 rise = all(sum);
        if (of_entropy) rise += ((x < -1e30f ? all(-1e30f) : x) + level) * slope;
        return -p * rise;
      };
      const int64_t whole = vocab / 16 * 16;
      for (int64_t j = 0; j < whole; j += 16) store(to + j, grad(load(row + j) * by - norm[u]) * by);
      for (int64_t j = whole; j < vocab; ++j) to[j] = narrow(grad(all(wide(row[j]) * by - norm[u]))[0] * by);
      for (const auto& [at, value] : ones) to[at] = narrow((grad(all(wide(row[at]) * by - norm[u]))[0] + value) * by);
    }
  }
}
}
