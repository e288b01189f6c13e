// Attention of packed sequences in training, forward and backward, on bf16 inputs with all arithmetic in fp32. Problems are
// ragged: each is a list of packed queries and one of packed keys, so nothing is padded, copied or cast on the way in. Plain
// C++ with vector types and OpenMP, called through ctypes. Sums are made in an order that no number of threads changes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bf16.h"

constexpr int64_t kRows = 48;  // queries worked on together: their scores stay in the second-level cache
constexpr float kNever = -INFINITY;

// c [M, 16 N] = (add: + c) a b, with a's rows and columns am and ak apart, b's rows bk apart.
template <int M, int N>
static void tile(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c, int64_t cm, int64_t depth, bool add) {
  v16 sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = add ? *(const v16*)(c + m * cm + 16 * n) : v16{};
  for (int64_t k = 0; k < depth; ++k) {
    v16 w[N];
    for (int n = 0; n < N; ++n) w[n] = *(const v16*)(b + k * bk + 16 * n);
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) sum[m][n] += a[m * am + k * ak] * w[n];
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) *(v16*)(c + m * cm + 16 * n) = sum[m][n];
}

template <int N>
static void strip(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c, int64_t cm, int64_t rows,
                  int64_t depth, bool add) {
  int64_t m = 0;
  for (; m + 6 <= rows; m += 6) tile<6, N>(a + m * am, am, ak, b, bk, c + m * cm, cm, depth, add);
  a += m * am, c += m * cm;
  switch (rows - m) {
    case 5: return tile<5, N>(a, am, ak, b, bk, c, cm, depth, add);
    case 4: return tile<4, N>(a, am, ak, b, bk, c, cm, depth, add);
    case 3: return tile<3, N>(a, am, ak, b, bk, c, cm, depth, add);
    case 2: return tile<2, N>(a, am, ak, b, bk, c, cm, depth, add);
    case 1: return tile<1, N>(a, am, ak, b, bk, c, cm, depth, add);
  }
}

// c [rows, columns] = (add: + c) a [rows, depth] b [depth, columns]; columns is a multiple of 16.
static void product(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c, int64_t cm, int64_t rows,
                    int64_t columns, int64_t depth, bool add) {
  int64_t n = 0;
  for (; n + 64 <= columns; n += 64) strip<4>(a, am, ak, b + n, bk, c + n, cm, rows, depth, add);
  for (; n + 32 <= columns; n += 32) strip<2>(a, am, ak, b + n, bk, c + n, cm, rows, depth, add);
  for (; n < columns; n += 16) strip<1>(a, am, ak, b + n, bk, c + n, cm, rows, depth, add);
}

// Rows `index` of one head of x, times `scale`.
static void gather(const bf16* x, int64_t stride, const int64_t* index, int64_t rows, int64_t dim, float scale, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const bf16* row = x + index[r] * stride;
    float* to = out + r * dim;
    for (int64_t d = 0; d < dim; d += 16) *(v16*)(to + d) = load(row + d) * scale;
  }
}

// x [rows, dim] -> out [dim, width], zeros behind the rows.
static void transpose(const float* x, int64_t rows, int64_t dim, float* out, int64_t width) {
  for (int64_t d = 0; d < dim; ++d) {
    for (int64_t r = 0; r < rows; ++r) out[d * width + r] = x[r * dim + d];
    for (int64_t r = rows; r < width; ++r) out[d * width + r] = 0;
  }
}

extern "C" {

// Problem u: queries query[query_at[u] ..), keys key[key_at[u] ..); seen[u]: bytes [queries, keys], or null where the queries
// are the keys and each sees the `window` last ones (0: all) up to itself. q [., heads, dim], k and v [., groups, dim], their
// tokens the strides apart.
struct Problems {
  int64_t count, heads, groups, dim, window;
  const int64_t *query_at, *key_at, *query, *key;
  const uint8_t* const* seen;
  const bf16 *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
};
}

namespace {

int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

// One problem and key head, as a thread works on it.
struct Task {
  const Problems& p;
  int64_t u, group, rows, keys, width, share;
  const int64_t *query, *key;
  const uint8_t* seen;
  float scale;

  Task(const Problems& p, int64_t number)
      : p(p), u(number / p.groups), group(number % p.groups), rows(p.query_at[u + 1] - p.query_at[u]),
        keys(p.key_at[u + 1] - p.key_at[u]), width(up16(keys)), share(p.heads / p.groups), query(p.query + p.query_at[u]),
        key(p.key + p.key_at[u]), seen(p.seen[u]), scale(1.0f / std::sqrt(static_cast<float>(p.dim))) {}

  // Which keys the queries [first, first + count) see, as [begin, end) with begin a multiple of 16.
  void bounds(int64_t first, int64_t count, int64_t* begin, int64_t* end) const {
    *begin = p.window && first >= p.window ? (first - p.window + 1) / 16 * 16 : 0, *end = std::min(first + count, keys);
    if (!seen) return;
    *begin = keys, *end = 0;
    for (int64_t r = first; r < first + count; ++r) {
      const uint8_t* row = seen + r * keys;
      const auto* one = static_cast<const uint8_t*>(std::memchr(row, 1, keys));
      if (!one) continue;
      *begin = std::min<int64_t>(*begin, one - row);
      int64_t last = keys;
      while (!row[last - 1]) --last;
      *end = std::max(*end, last);
    }
    *begin = *begin / 16 * 16, *end = std::max(*end, *begin);
  }

  // Scores of one query over [begin, up16(end)): what it does not see becomes -inf.
  void hide(int64_t row, int64_t begin, int64_t end, float* s) const {
    const int64_t stop = up16(end);
    if (seen) {
      const uint8_t* mine = seen + row * keys;
      for (int64_t j = begin; j < end; ++j) s[j] = mine[j] ? s[j] : kNever;
      for (int64_t j = end; j < stop; ++j) s[j] = kNever;
    } else {
      for (int64_t j = row + 1; j < stop; ++j) s[j] = kNever;
      for (int64_t j = begin; p.window && j <= row - p.window; ++j) s[j] = kNever;
    }
  }
};

float* room(std::vector<float>& all, int64_t size) {
  if (static_cast<int64_t>(all.size()) < size) all.resize(size);
  return all.data();
}

void forward(const Task& t, bf16* out, float* norm, std::vector<float>& scratch) {
  const Problems& p = t.p;
  const int64_t dim = p.dim;
  float* v = room(scratch, 2 * t.width * dim + kRows * (t.width + 2 * dim));
  float *kt = v + t.width * dim, *s = kt + t.width * dim, *q = s + kRows * t.width, *o = q + kRows * dim;
  gather(p.k + t.group * dim, p.k_stride, t.key, t.keys, dim, 1.0f, v);
  transpose(v, t.keys, dim, kt, t.width);
  gather(p.v + t.group * dim, p.v_stride, t.key, t.keys, dim, 1.0f, v);
  for (int64_t first = 0; first < t.rows; first += kRows) {
    const int64_t count = std::min(kRows, t.rows - first);
    int64_t begin, end;
    t.bounds(first, count, &begin, &end);
    const int64_t stop = up16(end);
    for (int64_t h = t.group * t.share; h < (t.group + 1) * t.share; ++h) {
      gather(p.q + h * dim, p.q_stride, t.query + first, count, dim, t.scale, q);
      product(q, dim, 1, kt + begin, t.width, s + begin, t.width, count, stop - begin, dim, false);
      float sums[kRows];
      for (int64_t r = 0; r < count; ++r) {
        float* row = s + r * t.width;
        t.hide(first + r, begin, end, row);
        v16 top = all(kNever), sum = {};
        for (int64_t j = begin; j < stop; j += 16) {
          const v16 x = *(v16*)(row + j);
          top = x > top || x != x ? x : top;
        }
        const float most = largest(top);
        for (int64_t j = begin; j < stop; j += 16) sum += *(v16*)(row + j) = exp_below_zero(*(v16*)(row + j) - most);
        sums[r] = total(sum);
        norm[(p.query_at[t.u] + first + r) * p.heads + h] = most + std::log(sums[r]);
      }
      product(s + begin, t.width, 1, v + begin * dim, dim, o, dim, count, dim, end - begin, false);
      for (int64_t r = 0; r < count; ++r) {
        bf16* to = out + (t.query[first + r] * p.heads + h) * dim;
        const float whole = 1.0f / sums[r];
        for (int64_t d = 0; d < dim; d += 16) store(to + d, *(v16*)(o + r * dim + d) * whole);
      }
    }
  }
}

// Gradients of the queries into dq; of keys and values into dk, dv [keys, dim] fp32.
void backward(const Task& t, const bf16* out, const bf16* grad, const float* norm, bf16* dq, float* dk, float* dv,
              std::vector<float>& scratch) {
  const Problems& p = t.p;
  const int64_t dim = p.dim, size = t.width * dim;
  float* k = room(scratch, 3 * size + kRows * (2 * t.width + 3 * dim));
  float *kt = k + size, *vt = kt + size, *s = vt + size, *ds = s + kRows * t.width;
  float *q = ds + kRows * t.width, *g = q + kRows * dim, *o = g + kRows * dim;
  gather(p.v + t.group * dim, p.v_stride, t.key, t.keys, dim, 1.0f, k);
  transpose(k, t.keys, dim, vt, t.width);
  gather(p.k + t.group * dim, p.k_stride, t.key, t.keys, dim, 1.0f, k);
  transpose(k, t.keys, dim, kt, t.width);
  std::fill(dk, dk + t.keys * dim, 0.0f);
  std::fill(dv, dv + t.keys * dim, 0.0f);
  for (int64_t first = 0; first < t.rows; first += kRows) {
    const int64_t count = std::min(kRows, t.rows - first);
    int64_t begin, end;
    t.bounds(first, count, &begin, &end);
    const int64_t stop = up16(end), depth = end - begin;
    for (int64_t h = t.group * t.share; h < (t.group + 1) * t.share; ++h) {
      gather(p.q + h * dim, p.q_stride, t.query + first, count, dim, t.scale, q);
      gather(grad + h * dim, p.heads * dim, t.query + first, count, dim, 1.0f, g);
      gather(out + h * dim, p.heads * dim, t.query + first, count, dim, 1.0f, o);
      product(q, dim, 1, kt + begin, t.width, s + begin, t.width, count, stop - begin, dim, false);
      product(g, dim, 1, vt + begin, t.width, ds + begin, t.width, count, stop - begin, dim, false);
      for (int64_t r = 0; r < count; ++r) {
        float *row = s + r * t.width, *slope = ds + r * t.width;
        t.hide(first + r, begin, end, row);
        v16 sum = {};
        for (int64_t d = 0; d < dim; d += 16) sum += *(v16*)(g + r * dim + d) * *(v16*)(o + r * dim + d);
        const float mean = total(sum), whole = norm[(p.query_at[t.u] + first + r) * p.heads + h];
        for (int64_t j = begin; j < stop; j += 16) {
          const v16 x = *(v16*)(row + j) - whole;
          const v16 prob = exp_below_zero(x > 0.0f ? v16{} : x);
          *(v16*)(row + j) = prob;
          *(v16*)(slope + j) = prob * (*(v16*)(slope + j) - mean);
        }
      }
      product(ds + begin, t.width, 1, k + begin * dim, dim, o, dim, count, dim, depth, false);
      product(ds + begin, 1, t.width, q, dim, dk + begin * dim, dim, depth, dim, count, true);
      product(s + begin, 1, t.width, g, dim, dv + begin * dim, dim, depth, dim, count, true);
      for (int64_t r = 0; r < count; ++r) {
        bf16* to = dq + (t.query[first + r] * p.heads + h) * dim;
        for (int64_t d = 0; d < dim; d += 16) store(to + d, *(v16*)(o + r * dim + d) * t.scale);
      }
    }
  }
}

void add_rows(const float* part, const int64_t* key, int64_t keys, int64_t dim, int64_t stride, float* sum) {
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t d = 0; d < dim; ++d) sum[key[i] * stride + d] += part[i * dim + d];
}

void write_rows(const float* part, const int64_t* key, int64_t keys, int64_t dim, int64_t stride, bf16* to) {
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t d = 0; d < dim; d += 16) store(to + key[i] * stride + d, *(const v16*)(part + i * dim + d));
}

}  // namespace

extern "C" {

// out [., heads, dim]; norm [queries, heads]: log of the sum of exponentials, for the backward.
void attend_forward(const Problems* problems, bf16* out, float* norm) {
#pragma omp parallel
  {
    std::vector<float> scratch;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < problems->count * problems->groups; ++i) forward(Task(*problems, i), out, norm, scratch);
  }
}

// Gradients dq, dk, dv of out's. parts: null where every token is a key of one problem; else fp32 room [2, all keys,
// groups, dim] for what is added, problem by problem, into sums [2, tokens, groups, dim] fp32, which are zero; dk and dv are
// then not written.
void attend_backward(const Problems* problems, const bf16* out, const bf16* grad, const float* norm, bf16* dq, bf16* dk,
                     bf16* dv, float* parts, float* sums, int64_t tokens) {
  const Problems& p = *problems;
  const int64_t all = p.key_at[p.count], stride = p.groups * p.dim;
#pragma omp parallel
  {
    std::vector<float> scratch, mine;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < p.count * p.groups; ++i) {
      const Task t(p, i);
      float* part = parts ? parts + (p.key_at[t.u] * p.groups + t.group * t.keys) * p.dim : room(mine, 2 * t.keys * p.dim);
      float* other = parts ? part + all * stride : part + t.keys * p.dim;
      backward(t, out, grad, norm, dq, part, other, scratch);
      if (parts) continue;
      write_rows(part, t.key, t.keys, p.dim, stride, dk + t.group * p.dim);
      write_rows(other, t.key, t.keys, p.dim, stride, dv + t.group * p.dim);
    }
    if (parts) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < 2 * p.groups; ++i) {
        const int64_t side = i / p.groups, group = i % p.groups;
        for (int64_t u = 0; u < p.count; ++u) {
          const int64_t keys = p.key_at[u + 1] - p.key_at[u];
          const float* part = parts + side * all * stride + (p.key_at[u] * p.groups + group * keys) * p.dim;
          add_rows(part, p.key + p.key_at[u], keys, p.dim, stride, sums + side * tokens * stride + group * p.dim);
        }
      }
    }
  }
}
}
