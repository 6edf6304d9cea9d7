/* ddtree_kernels.h: the entry points of the kernels in this folder, for C11 and C++11. Made by `ddtree kernels build`.

   Load FILE with cuModuleLoad, find ENTRY with cuModuleGetFunction, fill the args struct, and launch with
     size_t bytes = NAME_BYTES;
     void *extra[] = {(void *)1, &args, (void *)2, &bytes, (void *)0};  CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END
     cuLaunchKernel(function, grid[0], grid[1], grid[2], BLOCK_X, BLOCK_Y, BLOCK_Z, shared, stream, NULL, extra);
   More than 48 KB of shared memory needs CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES first: see example.cpp. */
#ifndef DDTREE_KERNELS_H
#define DDTREE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define DDTREE_ASSERT(condition) static_assert(condition, #condition)
#else
#define DDTREE_ASSERT(condition) _Static_assert(condition, #condition)
#endif

static inline int64_t ddtree_cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* An array of 1 axis in C order: `data` is a device address, strides are in bytes. */
typedef struct {
    uint64_t meminfo, parent;
    int64_t size, itemsize;
    uint64_t data;
    int64_t shape[1], strides[1];
} ddtree_array1;

static inline ddtree_array1 ddtree_make_array1(uint64_t data, int64_t itemsize, int64_t n0) {
    ddtree_array1 a;
    a.meminfo = a.parent = 0;
    a.size = n0;
    a.itemsize = itemsize;
    a.data = data;
    a.shape[0] = n0;
    a.strides[0] = itemsize;
    return a;
}

/* An array of 2 axes in C order: `data` is a device address, strides are in bytes. */
typedef struct {
    uint64_t meminfo, parent;
    int64_t size, itemsize;
    uint64_t data;
    int64_t shape[2], strides[2];
} ddtree_array2;

static inline ddtree_array2 ddtree_make_array2(uint64_t data, int64_t itemsize, int64_t n0, int64_t n1) {
    ddtree_array2 a;
    a.meminfo = a.parent = 0;
    a.size = n0 * n1;
    a.itemsize = itemsize;
    a.data = data;
    a.shape[0] = n0; a.shape[1] = n1;
    a.strides[1] = itemsize; a.strides[0] = a.strides[1] * n1;
    return a;
}

/* An array of 3 axes in C order: `data` is a device address, strides are in bytes. */
typedef struct {
    uint64_t meminfo, parent;
    int64_t size, itemsize;
    uint64_t data;
    int64_t shape[3], strides[3];
} ddtree_array3;

static inline ddtree_array3 ddtree_make_array3(uint64_t data, int64_t itemsize, int64_t n0, int64_t n1, int64_t n2) {
    ddtree_array3 a;
    a.meminfo = a.parent = 0;
    a.size = n0 * n1 * n2;
    a.itemsize = itemsize;
    a.data = data;
    a.shape[0] = n0; a.shape[1] = n1; a.shape[2] = n2;
    a.strides[2] = itemsize; a.strides[1] = a.strides[2] * n2; a.strides[0] = a.strides[1] * n1;
    return a;
}

/* top_k_partial_float32_wide: class E1, from ddtree/topk/partial.py
     const int32[M] data
     int64 row_step
     int32 vocabulary
     const float32[B] temperatures
     const float32[B, W] bias
     const uint8[B, A] allowed
     int32 rows_a_request
     int32 C
     int32 each
     uint32[R, G] maxima
     int64[R, S, 6] states */
#define DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_FILE "top_k_partial_float32_wide.ptx"
#define DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_ENTRY "ddtree_top_k_partial_float32_wide"
enum { DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_BLOCK_X = 128, DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_BLOCK_Y = 1, DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_BLOCK_Z = 1 };
enum { DDTREE_TOP_K_PARTIAL_FLOAT32_WIDE_BYTES = 448 };
typedef struct {
    ddtree_array1 data;
    int64_t row_step;
    int32_t vocabulary;
    ddtree_array1 temperatures;
    ddtree_array2 bias;
    ddtree_array2 allowed;
    int32_t rows_a_request;
    int32_t C;
    int32_t each;
    ddtree_array2 maxima;
    ddtree_array3 states;
} ddtree_top_k_partial_float32_wide_args;
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, data) == 0);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, row_step) == 56);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, vocabulary) == 64);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, temperatures) == 72);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, bias) == 128);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, allowed) == 200);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, rows_a_request) == 272);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, C) == 276);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, each) == 280);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, maxima) == 288);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_float32_wide_args, states) == 360);

static inline void ddtree_top_k_partial_float32_wide_grid(const ddtree_top_k_partial_float32_wide_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)((int64_t)a->C);
    grid[1] = (unsigned)(a->maxima.shape[0]);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_top_k_partial_float32_wide_shared(const ddtree_top_k_partial_float32_wide_args *a) {
    (void)a;
    return (unsigned)(0);
}

/* top_k_partial_bfloat16_wide: class E1, from ddtree/topk/spans.py
     const int32[M] data
     int64 row_step
     int32 vocabulary
     const float32[B] temperatures
     const float32[B, W] bias
     const uint8[B, A] allowed
     int32 rows_a_request
     int32 C
     int32 each
     uint32[R, G] maxima
     int64[R, S, 6] states */
#define DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_FILE "top_k_partial_bfloat16_wide.ptx"
#define DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_ENTRY "ddtree_top_k_partial_bfloat16_wide"
enum { DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_BLOCK_X = 128, DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_BLOCK_Y = 1, DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_BLOCK_Z = 1 };
enum { DDTREE_TOP_K_PARTIAL_BFLOAT16_WIDE_BYTES = 448 };
typedef struct {
    ddtree_array1 data;
    int64_t row_step;
    int32_t vocabulary;
    ddtree_array1 temperatures;
    ddtree_array2 bias;
    ddtree_array2 allowed;
    int32_t rows_a_request;
    int32_t C;
    int32_t each;
    ddtree_array2 maxima;
    ddtree_array3 states;
} ddtree_top_k_partial_bfloat16_wide_args;
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, data) == 0);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, row_step) == 56);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, vocabulary) == 64);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, temperatures) == 72);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, bias) == 128);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, allowed) == 200);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, rows_a_request) == 272);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, C) == 276);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, each) == 280);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, maxima) == 288);
DDTREE_ASSERT(offsetof(ddtree_top_k_partial_bfloat16_wide_args, states) == 360);

static inline void ddtree_top_k_partial_bfloat16_wide_grid(const ddtree_top_k_partial_bfloat16_wide_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)((int64_t)a->C);
    grid[1] = (unsigned)(a->maxima.shape[0]);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_top_k_partial_bfloat16_wide_shared(const ddtree_top_k_partial_bfloat16_wide_args *a) {
    (void)a;
    return (unsigned)(0);
}

/* top_k_select_float32: class E1, from ddtree/topk/select.py
     const int32[M] data
     int64 row_step
     int32 vocabulary
     const float32[B] temperatures
     const float32[B, W] bias
     const uint8[B, A] allowed
     int32 rows_a_request
     int64 first_id
     int32 P
     int32 Q
     const uint32[R, G] maxima
     const int64[R, S, 6] states
     int64[R, K] ids
     float32[R, K] logits
     float32[R, K] log_probs
     float32[R] log_z
     int64[R, 6] state */
#define DDTREE_TOP_K_SELECT_FLOAT32_FILE "top_k_select_float32.ptx"
#define DDTREE_TOP_K_SELECT_FLOAT32_ENTRY "ddtree_top_k_select_float32"
enum { DDTREE_TOP_K_SELECT_FLOAT32_BLOCK_X = 512, DDTREE_TOP_K_SELECT_FLOAT32_BLOCK_Y = 1, DDTREE_TOP_K_SELECT_FLOAT32_BLOCK_Z = 1 };
enum { DDTREE_TOP_K_SELECT_FLOAT32_BYTES = 800 };
typedef struct {
    ddtree_array1 data;
    int64_t row_step;
    int32_t vocabulary;
    ddtree_array1 temperatures;
    ddtree_array2 bias;
    ddtree_array2 allowed;
    int32_t rows_a_request;
    int64_t first_id;
    int32_t P;
    int32_t Q;
    ddtree_array2 maxima;
    ddtree_array3 states;
    ddtree_array2 ids;
    ddtree_array2 logits;
    ddtree_array2 log_probs;
    ddtree_array1 log_z;
    ddtree_array2 state;
} ddtree_top_k_select_float32_args;
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, data) == 0);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, row_step) == 56);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, vocabulary) == 64);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, temperatures) == 72);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, bias) == 128);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, allowed) == 200);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, rows_a_request) == 272);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, first_id) == 280);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, P) == 288);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, Q) == 292);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, maxima) == 296);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, states) == 368);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, ids) == 456);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, logits) == 528);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, log_probs) == 600);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, log_z) == 672);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_float32_args, state) == 728);

static inline void ddtree_top_k_select_float32_grid(const ddtree_top_k_select_float32_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->maxima.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_top_k_select_float32_shared(const ddtree_top_k_select_float32_args *a) {
    (void)a;
    return (unsigned)(20 * (int64_t)a->P + 4 * (int64_t)a->Q + 4);
}

/* top_k_select_bfloat16: class E1, from ddtree/topk/select.py
     const int16[M] data
     int64 row_step
     int32 vocabulary
     const float32[B] temperatures
     const float32[B, W] bias
     const uint8[B, A] allowed
     int32 rows_a_request
     int64 first_id
     int32 P
     int32 Q
     const uint32[R, G] maxima
     const int64[R, S, 6] states
     int64[R, K] ids
     float32[R, K] logits
     float32[R, K] log_probs
     float32[R] log_z
     int64[R, 6] state */
#define DDTREE_TOP_K_SELECT_BFLOAT16_FILE "top_k_select_bfloat16.ptx"
#define DDTREE_TOP_K_SELECT_BFLOAT16_ENTRY "ddtree_top_k_select_bfloat16"
enum { DDTREE_TOP_K_SELECT_BFLOAT16_BLOCK_X = 512, DDTREE_TOP_K_SELECT_BFLOAT16_BLOCK_Y = 1, DDTREE_TOP_K_SELECT_BFLOAT16_BLOCK_Z = 1 };
enum { DDTREE_TOP_K_SELECT_BFLOAT16_BYTES = 800 };
typedef struct {
    ddtree_array1 data;
    int64_t row_step;
    int32_t vocabulary;
    ddtree_array1 temperatures;
    ddtree_array2 bias;
    ddtree_array2 allowed;
    int32_t rows_a_request;
    int64_t first_id;
    int32_t P;
    int32_t Q;
    ddtree_array2 maxima;
    ddtree_array3 states;
    ddtree_array2 ids;
    ddtree_array2 logits;
    ddtree_array2 log_probs;
    ddtree_array1 log_z;
    ddtree_array2 state;
} ddtree_top_k_select_bfloat16_args;
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, data) == 0);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, row_step) == 56);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, vocabulary) == 64);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, temperatures) == 72);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, bias) == 128);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, allowed) == 200);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, rows_a_request) == 272);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, first_id) == 280);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, P) == 288);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, Q) == 292);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, maxima) == 296);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, states) == 368);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, ids) == 456);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, logits) == 528);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, log_probs) == 600);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, log_z) == 672);
DDTREE_ASSERT(offsetof(ddtree_top_k_select_bfloat16_args, state) == 728);

static inline void ddtree_top_k_select_bfloat16_grid(const ddtree_top_k_select_bfloat16_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->maxima.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_top_k_select_bfloat16_shared(const ddtree_top_k_select_bfloat16_args *a) {
    (void)a;
    return (unsigned)(20 * (int64_t)a->P + 4 * (int64_t)a->Q + 4);
}

/* merge_top_k: class E1, from ddtree/topk/__init__.py
     const int64[R, A] ids_a
     const float32[R, A] logits_a
     const int64[R, 6] state_a
     const int64[R, B] ids_b
     const float32[R, B] logits_b
     const int64[R, 6] state_b
     int64[R, K] ids
     float32[R, K] logits
     float32[R, K] log_probs
     float32[R] log_z
     int64[R, 6] state */
#define DDTREE_MERGE_TOP_K_FILE "merge_top_k.ptx"
#define DDTREE_MERGE_TOP_K_ENTRY "ddtree_merge_top_k"
enum { DDTREE_MERGE_TOP_K_BLOCK_X = 256, DDTREE_MERGE_TOP_K_BLOCK_Y = 1, DDTREE_MERGE_TOP_K_BLOCK_Z = 1 };
enum { DDTREE_MERGE_TOP_K_BYTES = 776 };
typedef struct {
    ddtree_array2 ids_a;
    ddtree_array2 logits_a;
    ddtree_array2 state_a;
    ddtree_array2 ids_b;
    ddtree_array2 logits_b;
    ddtree_array2 state_b;
    ddtree_array2 ids;
    ddtree_array2 logits;
    ddtree_array2 log_probs;
    ddtree_array1 log_z;
    ddtree_array2 state;
} ddtree_merge_top_k_args;
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, ids_a) == 0);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, logits_a) == 72);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, state_a) == 144);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, ids_b) == 216);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, logits_b) == 288);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, state_b) == 360);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, ids) == 432);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, logits) == 504);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, log_probs) == 576);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, log_z) == 648);
DDTREE_ASSERT(offsetof(ddtree_merge_top_k_args, state) == 704);

static inline void ddtree_merge_top_k_grid(const ddtree_merge_top_k_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->ids_a.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_merge_top_k_shared(const ddtree_merge_top_k_args *a) {
    (void)a;
    return (unsigned)(0);
}

/* build_trees: class E0, from ddtree/build/fast.py
     const float32[R, L, K] top_log_probs
     const int64[R, L, K] top_token_ids
     const int32[R] budgets
     const int64[R] root_tokens
     const int32[D] max_depths
     const float64[S] min_log_probs
     const int32[C] chain_lengths
     const float64[M] costs
     int64[R, N] tokens
     int32[R, N] parents
     int32[R, N] depths
     float64[R, N] scores
     int32[R, N] ranks
     int32[R] counts */
#define DDTREE_BUILD_TREES_FILE "build_trees.ptx"
#define DDTREE_BUILD_TREES_ENTRY "ddtree_build_trees"
enum { DDTREE_BUILD_TREES_BLOCK_X = 512, DDTREE_BUILD_TREES_BLOCK_Y = 1, DDTREE_BUILD_TREES_BLOCK_Z = 1 };
enum { DDTREE_BUILD_TREES_BYTES = 928 };
typedef struct {
    ddtree_array3 top_log_probs;
    ddtree_array3 top_token_ids;
    ddtree_array1 budgets;
    ddtree_array1 root_tokens;
    ddtree_array1 max_depths;
    ddtree_array1 min_log_probs;
    ddtree_array1 chain_lengths;
    ddtree_array1 costs;
    ddtree_array2 tokens;
    ddtree_array2 parents;
    ddtree_array2 depths;
    ddtree_array2 scores;
    ddtree_array2 ranks;
    ddtree_array1 counts;
} ddtree_build_trees_args;
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, top_log_probs) == 0);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, top_token_ids) == 88);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, budgets) == 176);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, root_tokens) == 232);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, max_depths) == 288);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, min_log_probs) == 344);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, chain_lengths) == 400);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, costs) == 456);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, tokens) == 512);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, parents) == 584);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, depths) == 656);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, scores) == 728);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, ranks) == 800);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, counts) == 872);

static inline void ddtree_build_trees_grid(const ddtree_build_trees_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->top_log_probs.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_build_trees_shared(const ddtree_build_trees_args *a) {
    (void)a;
    return (unsigned)(56 * a->tokens.shape[1] + 15520);
}

/* build_trees_one_warp: class E0, from ddtree/build/search.py
     const float32[R, L, K] top_log_probs
     const int64[R, L, K] top_token_ids
     const int32[R] budgets
     const int64[R] root_tokens
     const int32[D] max_depths
     const float64[S] min_log_probs
     const int32[C] chain_lengths
     const float64[M] costs
     int64[R, N] tokens
     int32[R, N] parents
     int32[R, N] depths
     float64[R, N] scores
     int32[R, N] ranks
     int32[R] counts */
#define DDTREE_BUILD_TREES_ONE_WARP_FILE "build_trees_one_warp.ptx"
#define DDTREE_BUILD_TREES_ONE_WARP_ENTRY "ddtree_build_trees_one_warp"
enum { DDTREE_BUILD_TREES_ONE_WARP_BLOCK_X = 32, DDTREE_BUILD_TREES_ONE_WARP_BLOCK_Y = 1, DDTREE_BUILD_TREES_ONE_WARP_BLOCK_Z = 1 };
enum { DDTREE_BUILD_TREES_ONE_WARP_BYTES = 928 };
typedef struct {
    ddtree_array3 top_log_probs;
    ddtree_array3 top_token_ids;
    ddtree_array1 budgets;
    ddtree_array1 root_tokens;
    ddtree_array1 max_depths;
    ddtree_array1 min_log_probs;
    ddtree_array1 chain_lengths;
    ddtree_array1 costs;
    ddtree_array2 tokens;
    ddtree_array2 parents;
    ddtree_array2 depths;
    ddtree_array2 scores;
    ddtree_array2 ranks;
    ddtree_array1 counts;
} ddtree_build_trees_one_warp_args;
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, top_log_probs) == 0);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, top_token_ids) == 88);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, budgets) == 176);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, root_tokens) == 232);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, max_depths) == 288);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, min_log_probs) == 344);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, chain_lengths) == 400);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, costs) == 456);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, tokens) == 512);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, parents) == 584);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, depths) == 656);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, scores) == 728);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, ranks) == 800);
DDTREE_ASSERT(offsetof(ddtree_build_trees_one_warp_args, counts) == 872);

static inline void ddtree_build_trees_one_warp_grid(const ddtree_build_trees_one_warp_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->top_log_probs.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_build_trees_one_warp_shared(const ddtree_build_trees_one_warp_args *a) {
    (void)a;
    return (unsigned)(12 * a->tokens.shape[1]);
}

/* layout_trees: class E0, from ddtree/layout/trees.py
     const int32[R, N] parents
     const int32[R, N] depths
     const int32[R] counts
     const int64[R] lengths
     int64[R, N] positions
     uint32[R, N, W] masks
     int32[R, N] first_children
     int32[R, N] next_siblings */
#define DDTREE_LAYOUT_TREES_FILE "layout_trees.ptx"
#define DDTREE_LAYOUT_TREES_ENTRY "ddtree_layout_trees"
enum { DDTREE_LAYOUT_TREES_BLOCK_X = 256, DDTREE_LAYOUT_TREES_BLOCK_Y = 1, DDTREE_LAYOUT_TREES_BLOCK_Z = 1 };
enum { DDTREE_LAYOUT_TREES_BYTES = 560 };
typedef struct {
    ddtree_array2 parents;
    ddtree_array2 depths;
    ddtree_array1 counts;
    ddtree_array1 lengths;
    ddtree_array2 positions;
    ddtree_array3 masks;
    ddtree_array2 first_children;
    ddtree_array2 next_siblings;
} ddtree_layout_trees_args;
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, parents) == 0);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, depths) == 72);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, counts) == 144);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, lengths) == 200);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, positions) == 256);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, masks) == 328);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, first_children) == 416);
DDTREE_ASSERT(offsetof(ddtree_layout_trees_args, next_siblings) == 488);

static inline void ddtree_layout_trees_grid(const ddtree_layout_trees_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->parents.shape[0]);
    grid[1] = (unsigned)(ddtree_cdiv(a->parents.shape[1], 128) + 1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_layout_trees_shared(const ddtree_layout_trees_args *a) {
    (void)a;
    return (unsigned)(768 * a->masks.shape[2]);
}

#endif
