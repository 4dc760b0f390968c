// The register-blocked matrix product used for dense float matrices.
#pragma once
#include <cstdint>

#include "vec.h"

namespace midstream {

// Accumulators occupy most registers: 6 x 2 of 16 with AVX2, and 6 x 4 of 32 with AVX-512.
constexpr int kMicroRows = 6;
#if defined(__AVX512F__)
constexpr int kMicroVectors = 4;
#else
constexpr int kMicroVectors = 2;
#endif

// The right operand of a product: operator()(i, column) returns the vector of row i that starts at this column.
struct Matrix {
  const float* data;
  int64_t stride;
  [[gnu::always_inline]] F operator()(int i, int column) const { return load(data + i * stride + column); }
};

// c[R, V vectors] (+)= a[R, k] b[k, V vectors from `column` on]; each element is summed over k in ascending order.
template <int R, int V, class Right>
[[gnu::noinline]] void micro_kernel(const float* a, int64_t lda, Right b, int column, int k, float* c, int64_t ldc,
                                    bool accumulate) {
  F sum[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = accumulate ? load(c + r * ldc + column + v * kLanes) : zero();
  for (int i = 0; i < k; ++i) {
    F right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = b(i, column + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      F left = set1(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + r * ldc + column + v * kLanes, sum[r][v]);
}

template <int V, class Right>
inline void micro_rows(int rows, const float* a, int64_t lda, const Right& b, int column, int k, float* c, int64_t ldc,
                       bool accumulate) {
  switch (rows) {
    case 1: return micro_kernel<1, V>(a, lda, b, column, k, c, ldc, accumulate);
    case 2: return micro_kernel<2, V>(a, lda, b, column, k, c, ldc, accumulate);
    case 3: return micro_kernel<3, V>(a, lda, b, column, k, c, ldc, accumulate);
    case 4: return micro_kernel<4, V>(a, lda, b, column, k, c, ldc, accumulate);
    case 5: return micro_kernel<5, V>(a, lda, b, column, k, c, ldc, accumulate);
    default: return micro_kernel<6, V>(a, lda, b, column, k, c, ldc, accumulate);
  }
}

// c[m, n] (+)= a[m, k] b[k, n]; n must be a multiple of V vectors.
template <int V, class Right>
inline void multiply(int m, int n, int k, const float* a, int64_t lda, const Right& b, float* c, int64_t ldc,
                     bool accumulate) {
  for (int row = 0; row < m; row += kMicroRows) {
    int rows = m - row < kMicroRows ? m - row : kMicroRows;
    for (int column = 0; column < n; column += V * kLanes)
      micro_rows<V>(rows, a + row * lda, lda, b, column, k, c + row * ldc, ldc, accumulate);
  }
}

}  // namespace midstream
