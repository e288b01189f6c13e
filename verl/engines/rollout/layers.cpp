// All layers of the decoder in one call, from the functions of decode.cpp and product.cpp: between two of them no time is
// spent outside of C++, which for a few rows is as long as a small product.

#include <cstdint>

using bf16 = uint16_t;

extern "C" {

void rms_norm(const bf16* x, int64_t stride, const bf16* weight, bf16* out, int64_t rows, int64_t size, float eps);
void attend(const bf16* qkv, const bf16* cos, const bf16* sin, bf16* keys, bf16* values, const int64_t* slots,
            const int64_t* copies, const int64_t* positions, bf16* out, int64_t rows, int64_t heads, int64_t groups,
            int64_t dim, int64_t slot, int64_t group, int64_t window);
void multiply(const bf16* x, int64_t stride, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t n, int64_t k,
              int64_t how);

// Packed weights and biases (null: none) and norms of one layer, and its cache. q_norm, k_norm: null where there is none.
struct Layer {
  const bf16 *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gated, *gated_bias, *down, *down_bias;
  bf16 *keys, *values;
  int64_t slot, group, window;
};

struct Shape {
  int64_t layers, rows, hidden, inner, heads, groups, dim;
  float eps;
};

// x [rows, hidden]: the residual stream, in place. y [rows, hidden], wide [rows, (heads + 2 groups) dim], mixed
// [rows, heads dim], gated [rows, inner]: room to work in. The rest as `attend` takes it.
void layers(const Layer* table, const Shape* shape, bf16* x, bf16* y, bf16* wide, bf16* mixed, bf16* gated, const bf16* cos,
            const bf16* sin, const int64_t* slots, const int64_t* copies, const int64_t* positions) {
  const Shape& s = *shape;
  const int64_t queries = s.heads * s.dim, width = queries + 2 * s.groups * s.dim;
  for (const Layer* w = table; w < table + s.layers; ++w) {
    rms_norm(x, s.hidden, w->norm, y, s.rows, s.hidden, s.eps);
    multiply(y, s.hidden, w->qkv, w->qkv_bias, wide, s.rows, width, s.hidden, 0);
    for (int64_t r = 0; w->q_norm && r < s.rows; ++r) {
      bf16 *q = wide + r * width, *k = q + queries;
      rms_norm(q, s.dim, w->q_norm, q, s.heads, s.dim, s.eps);
      rms_norm(k, s.dim, w->k_norm, k, s.groups, s.dim, s.eps);
    }
    attend(wide, cos, sin, w->keys, w->values, slots, copies, positions, mixed, s.rows, s.heads, s.groups, s.dim, w->slot,
           w->group, w->window);
    multiply(mixed, queries, w->out, w->out_bias, x, s.rows, s.hidden, queries, 1);
    rms_norm(x, s.hidden, w->mlp_norm, y, s.rows, s.hidden, s.eps);
    multiply(y, s.hidden, w->gated, w->gated_bias, gated, s.rows, 2 * s.inner, s.hidden, 2);
    multiply(gated, s.inner, w->down, w->down_bias, x, s.rows, s.hidden, s.inner, 1);
  }
}
}
