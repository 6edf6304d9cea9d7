/* example.cpp: build draft trees on the GPU from C++, with the NVIDIA driver and no Python and no CUDA toolkit.

     g++ -std=c++11 -O2 example.cpp -o example -ldl
     ./example FOLDER trees.kdtr

   FOLDER holds build_trees.ptx, as written by `ddtree kernels build` for this GPU's architecture or an older one. The KDTR
   file holds, for each case NNN, NNN.top_log_probs (L, K) float32, NNN.top_token_ids (L, K) and the expected NNN.parents
   and NNN.node_token_ids; fixtures/tree_vectors.kdtr is such a file. Exit status 0: every tree is equal; 1: one is not, or an
   error, which is printed; 2: wrong usage; 77: no NVIDIA driver or no GPU here. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ddtree_kernels.h"
#include "kdtr.h"

/* The few driver functions needed here, declared as in cuda.h and found in the driver's library. */
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };

struct Driver {
    int (*Init)(unsigned);
    int (*DeviceGetCount)(int *);
    int (*DeviceGet)(int *, int);
    int (*GetErrorName)(int, const char **);
    int (*DevicePrimaryCtxRetain)(CUcontext *, int);
    int (*CtxSetCurrent)(CUcontext);
    int (*CtxSynchronize)();
    int (*ModuleLoad)(CUmodule *, const char *);
    int (*ModuleGetFunction)(CUfunction *, CUmodule, const char *);
    int (*FuncSetAttribute)(CUfunction, int, int);
    int (*MemAlloc)(CUdeviceptr *, size_t);
    int (*MemFree)(CUdeviceptr);
    int (*MemcpyHtoD)(CUdeviceptr, const void *, size_t);
    int (*MemcpyDtoH)(void *, CUdeviceptr, size_t);
    int (*LaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **,
                        void **);
};
static Driver cu;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(int status, const char *what) {
    const char *name = "unknown error";
    if (status == 0) return;
    cu.GetErrorName(status, &name);
    fail(what, name);
}

template <typename Function>
static void find(void *library, const char *name, Function *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) fail(name, "not in libcuda.so.1: the driver is too old");
    memcpy(function, &symbol, sizeof symbol);
}

static void load_driver() {
    int count = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "no NVIDIA driver here: libcuda.so.1 was not found\n");
        exit(77);
    }
    find(library, "cuInit", &cu.Init);
    find(library, "cuDeviceGetCount", &cu.DeviceGetCount);
    find(library, "cuDeviceGet", &cu.DeviceGet);
    find(library, "cuGetErrorName", &cu.GetErrorName);
    find(library, "cuDevicePrimaryCtxRetain", &cu.DevicePrimaryCtxRetain);
    find(library, "cuCtxSetCurrent", &cu.CtxSetCurrent);
    find(library, "cuCtxSynchronize", &cu.CtxSynchronize);
    find(library, "cuModuleLoad", &cu.ModuleLoad);
    find(library, "cuModuleGetFunction", &cu.ModuleGetFunction);
    find(library, "cuFuncSetAttribute", &cu.FuncSetAttribute);
    find(library, "cuMemAlloc_v2", &cu.MemAlloc);
    find(library, "cuMemFree_v2", &cu.MemFree);
    find(library, "cuMemcpyHtoD_v2", &cu.MemcpyHtoD);
    find(library, "cuMemcpyDtoH_v2", &cu.MemcpyDtoH);
    find(library, "cuLaunchKernel", &cu.LaunchKernel);
    if (cu.Init(0) || cu.DeviceGetCount(&count) || count == 0) {
        fprintf(stderr, "an NVIDIA driver is here, but no GPU that works\n");
        exit(77);
    }
}

static CUfunction load_kernel(const std::string &folder) {
    int device = 0;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    check(cu.DeviceGet(&device, 0), "cuDeviceGet");
    check(cu.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cu.CtxSetCurrent(context), "cuCtxSetCurrent");
    check(cu.ModuleLoad(&module, (folder + "/" DDTREE_BUILD_TREES_FILE).c_str()), "cuModuleLoad " DDTREE_BUILD_TREES_FILE);
    check(cu.ModuleGetFunction(&function, module, DDTREE_BUILD_TREES_ENTRY), "cuModuleGetFunction");
    return function;
}

/* An array on the GPU and on the host. */
template <typename T>
struct Array {
    std::vector<T> host;
    CUdeviceptr device = 0;
    explicit Array(const std::vector<T> &values) : host(values) {
        check(cu.MemAlloc(&device, host.size() * sizeof(T) + 1), "cuMemAlloc");
        check(cu.MemcpyHtoD(device, host.data(), host.size() * sizeof(T)), "cuMemcpyHtoD");
    }
    ~Array() { cu.MemFree(device); }
    Array(const Array &) = delete;
    void read() { check(cu.MemcpyDtoH(host.data(), device, host.size() * sizeof(T)), "cuMemcpyDtoH"); }
};

/* A tensor of the file as T; the file stores integers as i32 where they fit. */
template <typename T>
static std::vector<T> read_tensor(const kdtr_file &file, const std::string &name, kdtr_tensor *tensor) {
    if (!kdtr_find(&file, name.c_str(), tensor)) fail(name.c_str(), "not in the file");
    size_t n = (size_t)(tensor->bytes / kdtr_dtypes[tensor->dtype].bytes);
    std::vector<T> values(n);
    for (size_t i = 0; i < n; i++) switch (tensor->dtype) {
            case KDTR_F32: values[i] = (T)((const float *)tensor->data)[i]; break;
            case KDTR_I32: values[i] = (T)((const int32_t *)tensor->data)[i]; break;
            case KDTR_I64: values[i] = (T)((const int64_t *)tensor->data)[i]; break;
            default: fail(name.c_str(), "neither f32, i32 nor i64");
        }
    return values;
}

/* Build one tree of `budget` nodes besides the root and compare it with the recorded one: the number of nodes, or -1. */
static int build_case(CUfunction function, const kdtr_file &file, const std::string &name) {
    kdtr_tensor t, ignored;
    Array<float> log_probs(read_tensor<float>(file, name + ".top_log_probs", &t));
    Array<int64_t> ids(read_tensor<int64_t>(file, name + ".top_token_ids", &ignored));
    std::vector<int32_t> parents = read_tensor<int32_t>(file, name + ".parents", &ignored);
    std::vector<int64_t> tokens = read_tensor<int64_t>(file, name + ".node_token_ids", &ignored);
    int64_t L = (int64_t)t.shape[0], K = (int64_t)t.shape[1], N = (int64_t)parents.size();
    Array<int32_t> budgets(std::vector<int32_t>(1, (int32_t)N - 1)), counts(std::vector<int32_t>(1));
    Array<int64_t> roots(std::vector<int64_t>(1, 42)), out_tokens{std::vector<int64_t>((size_t)N)};
    Array<int32_t> out_parents{std::vector<int32_t>((size_t)N)}, depths{std::vector<int32_t>((size_t)N)};
    Array<int32_t> ranks{std::vector<int32_t>((size_t)N)};
    Array<double> scores{std::vector<double>((size_t)N)};

    /* Launch: the args struct is the kernel's parameter buffer. */
    ddtree_build_trees_args args;
    args.top_log_probs = ddtree_make_array3(log_probs.device, 4, 1, L, K);
    args.top_token_ids = ddtree_make_array3(ids.device, 8, 1, L, K);
    args.budgets = ddtree_make_array1(budgets.device, 4, 1);
    args.root_tokens = ddtree_make_array1(roots.device, 8, 1);
    args.max_depths = args.chain_lengths = ddtree_make_array1(0, 4, 0); /* no limits */
    args.min_log_probs = args.costs = ddtree_make_array1(0, 8, 0);
    args.tokens = ddtree_make_array2(out_tokens.device, 8, 1, N);
    args.parents = ddtree_make_array2(out_parents.device, 4, 1, N);
    args.depths = ddtree_make_array2(depths.device, 4, 1, N);
    args.scores = ddtree_make_array2(scores.device, 8, 1, N);
    args.ranks = ddtree_make_array2(ranks.device, 4, 1, N);
    args.counts = ddtree_make_array1(counts.device, 4, 1);
    unsigned grid[3], shared = ddtree_build_trees_shared(&args);
    size_t bytes = DDTREE_BUILD_TREES_BYTES;
    void *extra[] = {(void *)1, &args, (void *)2, &bytes, (void *)0};
    ddtree_build_trees_grid(&args, grid);
    check(cu.FuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared), "shared memory");
    check(cu.LaunchKernel(function, grid[0], grid[1], grid[2], DDTREE_BUILD_TREES_BLOCK_X, DDTREE_BUILD_TREES_BLOCK_Y,
                          DDTREE_BUILD_TREES_BLOCK_Z, shared, NULL, NULL, extra), "cuLaunchKernel");
    check(cu.CtxSynchronize(), "cuCtxSynchronize");
    /* End of launch */

    out_tokens.read();
    out_parents.read();
    counts.read();
    tokens.insert(tokens.begin(), 42); /* the file leaves the root's token out */
    return counts.host[0] == N && out_parents.host == parents && out_tokens.host == tokens ? (int)N : -1;
}

int main(int argc, char **argv) {
    kdtr_file file;
    kdtr_tensor found;
    int cases = 0, equal = 0, nodes = 0;
    if (argc != 3) {
        fprintf(stderr, "usage: %s FOLDER trees.kdtr\n", argv[0]);
        return 2;
    }
    if (kdtr_open(&file, argv[2], 1)) fail(argv[2], file.error);
    load_driver();
    CUfunction function = load_kernel(argv[1]);
    for (;; cases++) {
        std::string number = std::to_string(cases), name = std::string(3 - std::min<size_t>(3, number.size()), '0') + number;
        if (!kdtr_find(&file, (name + ".parents").c_str(), &found)) break;
        int built = build_case(function, file, name);
        if (built < 0) printf("case %s: not the recorded tree\n", name.c_str());
        equal += built >= 0;
        nodes += built > 0 ? built : 0;
    }
    printf("%d of %d trees equal, %d nodes\n", equal, cases, nodes);
    kdtr_close(&file);
    return equal == cases && cases > 0 ? 0 : 1;
}
