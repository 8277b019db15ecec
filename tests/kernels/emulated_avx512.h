// AVX-512's operations that forward.cpp uses, lane by lane, so that its path for it runs on processors without.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {
typedef float f32 __attribute__((vector_size(64), may_alias));
typedef int32_t i32 __attribute__((vector_size(64), may_alias));
typedef int16_t i16 __attribute__((vector_size(64), may_alias));
typedef int8_t i8 __attribute__((vector_size(64), may_alias));
typedef uint8_t u8 __attribute__((vector_size(64), may_alias));
typedef uint16_t u16 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32 __attribute__((vector_size(64), may_alias));

inline __m512i loadu(const void *from) { i32 v; std::memcpy(&v, from, 64); return (__m512i)v; }
inline __m512i set1_8(char x) { i8 v; for (int i = 0; i < 64; i++) v[i] = x; return (__m512i)v; }
inline __m512i set1_32(int x) { i32 v; for (int i = 0; i < 16; i++) v[i] = x; return (__m512i)v; }
inline __m512 set1_ps(float x) { f32 v; for (int i = 0; i < 16; i++) v[i] = x; return (__m512)v; }
inline __m512i zero() { return set1_32(0); }
inline __m512i land(__m512i a, __m512i b) { return (__m512i)((i32)a & (i32)b); }
inline __m512i lxor(__m512i a, __m512i b) { return (__m512i)((i32)a ^ (i32)b); }
inline __m512i srli16(__m512i a, int n) { return (__m512i)((u16)a >> (uint16_t)n); }
inline __m512i slli32(__m512i a, int n) { return (__m512i)((u32)a << (uint32_t)n); }
inline __m512 sub(__m512 a, __m512 b) { return (__m512)((f32)a - (f32)b); }
inline __m512 mul(__m512 a, __m512 b) { return (__m512)((f32)a * (f32)b); }
inline __m512 fma(__m512 a, __m512 b, __m512 c) {
    f32 v; for (int i = 0; i < 16; i++) v[i] = __builtin_fmaf(((f32)a)[i], ((f32)b)[i], ((f32)c)[i]); return (__m512)v;
}
inline __m512 to_ps(__m512i a) { f32 v; for (int i = 0; i < 16; i++) v[i] = float(((i32)a)[i]); return (__m512)v; }
inline __m512i widen8(__m128i a) { int8_t b[16]; std::memcpy(b, &a, 16); i32 v; for (int i = 0; i < 16; i++) v[i] = b[i]; return (__m512i)v; }
inline __m512i widen16(__m256i a) { uint16_t b[16]; std::memcpy(b, &a, 32); i32 v; for (int i = 0; i < 16; i++) v[i] = b[i]; return (__m512i)v; }
inline __m512 halves(__m256i a) {
    __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
    __m512 v; std::memcpy(&v, parts, 64); return v;
}
inline __m512i dpbusd(__m512i sum, __m512i a, __m512i b) {  // unsigned bytes times signed ones, by fours
    i32 v = (i32)sum;
    for (int i = 0; i < 16; i++) for (int j = 0; j < 4; j++) v[i] += int(((u8)a)[4 * i + j]) * int(((i8)b)[4 * i + j]);
    return (__m512i)v;
}
inline __m256 lower(__m512 a) { __m256 v; std::memcpy(&v, &a, 32); return v; }
inline __m256d upper(__m512d a) { __m256d v; std::memcpy(&v, (const char *)&a + 32, 32); return v; }
inline void storeu(void *to, __m512 a) { std::memcpy(to, &a, 64); }
}  // namespace emulated

#define _mm512_loadu_si512 emulated::loadu
#define _mm512_set1_epi8 emulated::set1_8
#define _mm512_set1_epi32 emulated::set1_32
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setzero_si512 emulated::zero
#define _mm512_setzero_ps() emulated::set1_ps(0.0f)
#define _mm512_and_si512 emulated::land
#define _mm512_xor_si512 emulated::lxor
#define _mm512_srli_epi16 emulated::srli16
#define _mm512_slli_epi32 emulated::slli32
#define _mm512_sub_ps emulated::sub
#define _mm512_mul_ps emulated::mul
#define _mm512_fmadd_ps emulated::fma
#define _mm512_cvtepi32_ps emulated::to_ps
#define _mm512_cvtepi8_epi32 emulated::widen8
#define _mm512_cvtepu16_epi32 emulated::widen16
#define _mm512_cvtph_ps emulated::halves
#define _mm512_dpbusd_epi32 emulated::dpbusd
#define _mm512_castps512_ps256 emulated::lower
#define _mm512_extractf64x4_pd(a, one) emulated::upper(a)
#define _mm512_storeu_ps emulated::storeu
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1
