/* Reads KDTR files with kernels/kdtr.h for tests/test_kdtr.py. C99, and valid C++.

     kdtr_reader file PATH        metadata, then one line a tensor: name, dtype, shape, offset, bytes, data in hexadecimal
     kdtr_reader find PATH NAME   the offset of a tensor, or "absent"
     kdtr_reader pack PATH VERIFY many files in one: u64 size, then the bytes; prints "ok" or the error, one line a file */
#include "kdtr.h"

#include <stdlib.h>

static void print_tensor(const kdtr_file *file, const kdtr_tensor *tensor) {
    const unsigned char *data = (const unsigned char *)tensor->data;
    uint64_t i;
    printf("%s\t%s\t", tensor->name, kdtr_dtypes[tensor->dtype].name);
    for (i = 0; i < tensor->ndim; i++) printf("%s%llu", i ? "," : "", (unsigned long long)tensor->shape[i]);
    printf("\t%llu\t%llu\t", (unsigned long long)(data - file->base), (unsigned long long)tensor->bytes);
    for (i = 0; i < tensor->bytes; i++) printf("%02x", data[i]);
    printf("\n");
}

static int read_file(const char *path, const char *name) {
    kdtr_file file;
    kdtr_tensor tensor;
    uint32_t i;
    if (kdtr_open(&file, path, 1)) {
        printf("%s\n", file.error);
        return 1;
    }
    if (name && !kdtr_find(&file, name, &tensor)) printf("absent\n");
    else if (name) printf("%llu\n", (unsigned long long)((const unsigned char *)tensor.data - file.base));
    else printf("%.*s\n", (int)file.metadata_bytes, file.metadata);
    for (i = 0; !name && i < file.count; i++) {
        kdtr_get(&file, i, &tensor);
        print_tensor(&file, &tensor);
    }
    kdtr_close(&file);
    return 0;
}

/* Every byte a reader would touch: an address sanitizer sees one that lies outside. */
static unsigned touch(const kdtr_file *file) {
    unsigned sum = 0;
    uint32_t i;
    uint64_t j;
    for (i = 0; i < file->count; i++) {
        kdtr_tensor tensor, found;
        kdtr_get(file, i, &tensor);
        if (!kdtr_find(file, tensor.name, &found) || found.data != tensor.data) abort();
        for (j = 0; j < tensor.bytes; j++) sum += ((const unsigned char *)tensor.data)[j];
    }
    return sum;
}

static int read_pack(const char *path, int verify) {
    static volatile unsigned sum;
    FILE *pack = fopen(path, "rb");
    uint64_t bytes;
    while (pack && fread(&bytes, 1, 8, pack) == 8) {
        kdtr_file file;
        void *memory = malloc(bytes ? (size_t)bytes : 1);
        if (!memory || fread(memory, 1, (size_t)bytes, pack) != bytes) abort();
        if (kdtr_open_memory(&file, memory, bytes, verify)) printf("%s\n", file.error);
        else sum += touch(&file), printf("ok\n");
        kdtr_close(&file);
        free(memory);
    }
    return pack ? fclose(pack) : 1;
}

int main(int count, char **values) {
    if (count == 3 && !strcmp(values[1], "file")) return read_file(values[2], NULL);
    if (count == 4 && !strcmp(values[1], "find")) return read_file(values[2], values[3]);
    if (count == 4 && !strcmp(values[1], "pack")) return read_pack(values[2], atoi(values[3]));
    fprintf(stderr, "usage: kdtr_reader file PATH | find PATH NAME | pack PATH 0|1\n");
    return 2;
}
