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

/* build_trees: class E0, from ddtree/build.py
     const float32[R, L, K] top_log_probs
     const int64[R, L, K] top_token_ids
     const int32[R] budgets
     const int64[R] root_tokens
     int64[R, N] tokens
     int32[R, N] parents
     int32[R, N] depths
     float64[R, N] scores
     int32[R, N] ranks
     int32[R] counts */
#define DDTREE_BUILD_TREES_FILE "build_trees.ptx"
#define DDTREE_BUILD_TREES_ENTRY "ddtree_build_trees"
enum { DDTREE_BUILD_TREES_BLOCK_X = 32, DDTREE_BUILD_TREES_BLOCK_Y = 1, DDTREE_BUILD_TREES_BLOCK_Z = 1 };
enum { DDTREE_BUILD_TREES_BYTES = 704 };
typedef struct {
    ddtree_array3 top_log_probs;
    ddtree_array3 top_token_ids;
    ddtree_array1 budgets;
    ddtree_array1 root_tokens;
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
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, tokens) == 288);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, parents) == 360);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, depths) == 432);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, scores) == 504);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, ranks) == 576);
DDTREE_ASSERT(offsetof(ddtree_build_trees_args, counts) == 648);

static inline void ddtree_build_trees_grid(const ddtree_build_trees_args *a, unsigned grid[3]) {
    grid[0] = (unsigned)(a->top_log_probs.shape[0]);
    grid[1] = (unsigned)(1);
    grid[2] = (unsigned)(1);
    (void)a;
}

static inline unsigned ddtree_build_trees_shared(const ddtree_build_trees_args *a) {
    (void)a;
    return (unsigned)(12 * a->tokens.shape[1]);
}

#endif
