// C (+)= A B for matrices that lie in a core's caches, float32.
#pragma once

#include "vectors.h"

namespace ringjax {

// Sums of one inner loop: rows times vectors, all in registers beside the vectors of B and one of A. Where two units
// with a latency of 4 are to be kept busy, no less than 8.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4;
constexpr int rows_of(int) { return 6; }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kVectors = 3;
constexpr int rows_of(int vectors) { return vectors == 3 ? 4 : 6; }
#else
constexpr int kVectors = 2;
constexpr int rows_of(int) { return 4; }
#endif

// One product. A has an element at a[i * a_row + t * a_col]; rows of B and of C are contiguous.
struct Product {
  const float* a;
  long a_row, a_col;
  const float* b;
  long b_row;
  float* c;
  long c_row;
  long depth;          // columns of A
  bool adds;           // to C; otherwise C is written over
  const float* scale;  // what the rows of C are multiplied by first; null = 1
};

template <int M, int N>
inline void multiply_block(const Product& p, long row, long col) {
  Vec sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) {
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sum[i][j] = Vec{};
  }
  const float *a = p.a + row * p.a_row, *b = p.b + col;
  const long a_row = p.a_row, a_col = p.a_col, b_row = p.b_row;
  // Unrolled, since two threads of one core share what decodes instructions.
#pragma GCC unroll 4
  for (long t = p.depth; t; t--, a += a_col, b += b_row) {
    Vec of_b[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) of_b[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const Vec of_a = all(a[i * a_row]);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sum[i][j] += of_a * of_b[j];
    }
  }
  // Products are summed by themselves and then added: rounding errors grow with the length of a sum.
  float* c = p.c + row * p.c_row + col;
#pragma GCC unroll 8
  for (int i = 0; i < M; i++) {
    const Vec scale = all(p.scale ? p.scale[row + i] : 1.0f);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      float* at = c + i * p.c_row + j * kLanes;
      store(at, p.adds ? load(at) * scale + sum[i][j] : sum[i][j]);
    }
  }
}

// Fewer rows than a block has, counted down to the right number.
template <int M, int N>
inline void multiply_rest(const Product& p, long row, long col, long rows) {
  if constexpr (M > 0) {
    if (rows == M) return multiply_block<M, N>(p, row, col);
    multiply_rest<M - 1, N>(p, row, col, rows);
  }
}

template <int N>
__attribute__((noinline)) void multiply_columns(const Product& p, long col, long rows) {
  constexpr int kRows = rows_of(N);
  long row = 0;
  if constexpr (N > 1) {
    // What is left over is shared by the last two blocks: few rows do not keep the units busy.
    for (; rows - row >= 2 * kRows || rows - row == kRows; row += kRows) multiply_block<kRows, N>(p, row, col);
    if (rows - row > kRows) {
      const long half = (rows - row + 1) / 2;
      multiply_rest<kRows, N>(p, row, col, half);
      row += half;
    }
    if (row < rows) multiply_rest<kRows, N>(p, row, col, rows - row);
  } else {
    for (; row + kRows <= rows; row += kRows) multiply_block<kRows, N>(p, row, col);
    for (; row < rows; row++) multiply_block<1, N>(p, row, col);  // rare: not worth the time to compile more of them
  }
}

// All of C, rows x cols; cols is a multiple of kLanes.
inline void multiply(const Product& p, long rows, long cols) {
  long col = 0;
  if constexpr (kVectors == 4) {
    for (; col + 4 * kLanes <= cols; col += 4 * kLanes) multiply_columns<4>(p, col, rows);
  }
  if constexpr (kVectors == 3) {
    // Three vectors take less fetching, but rows that lie one after another: four of them are few in one line of a
    // cache. None may be left with a single vector.
    const auto fits = [](long left) { return left >= 3 && left != 4; };
    if (p.a_col == 1) {
      for (; fits((cols - col) / kLanes); col += 3 * kLanes) multiply_columns<3>(p, col, rows);
    }
  }
  for (; col + 2 * kLanes <= cols; col += 2 * kLanes) multiply_columns<2>(p, col, rows);
  for (; col < cols; col += kLanes) multiply_columns<1>(p, col, rows);
}

}  // namespace ringjax
