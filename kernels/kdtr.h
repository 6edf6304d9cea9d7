/* kdtr.h: read KDTR files from C99 and C++. One header, no allocation: tensors are read where they lie.

   A file, all numbers little-endian, every section at a multiple of 64 bytes but for the metadata, which follows the table:
     header, 64 bytes   magic[8] "KDTR\r\n\x1a\n", u32 version = 1, u32 tensor_count, u64 metadata_bytes, u64 file_bytes,
                        u32 table_crc, u32 metadata_crc, 20 zero bytes, u32 header_crc (of the 60 bytes before it)
     table              one entry of 256 bytes a tensor, names strictly ascending as unsigned bytes:
                        name[152] and dtype[8], zero-padded, u32 ndim, u32 crc, u64 shape[8], u64 offset, u64 bytes, 8 zero bytes
     metadata           one JSON object in UTF-8, zero bytes up to a multiple of 64
     data               the tensors in the table's order, C order, each followed by zero bytes up to a multiple of 64
   Checksums are zlib's CRC-32. int4 packs two values of the last axis in a byte, the first in the low bits; a row of odd
   length ends in half a byte. A reader accepts exactly this: no gaps, no overlaps, nothing left over.

     kdtr_file file;
     kdtr_tensor w;
     if (kdtr_open(&file, "weights.kdtr", 1)) { puts(file.error); return 1; }
     if (kdtr_find(&file, "w", &w)) { ... w.dtype, w.ndim, w.shape, w.data, w.bytes ... }
     kdtr_close(&file);

   Does not convert: data stays little-endian, bf16 and int4 stay bits. Read-only and free of global state, so any number
   of threads may read one kdtr_file. The Python reader and writer is ddtree/kdtr/ (notebooks/01c_kdtr.ipynb). */
#ifndef KDTR_H
#define KDTR_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#define KDTR_HAS_OPEN 1
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

enum { KDTR_HEADER = 64, KDTR_ENTRY = 256, KDTR_NAME = 152, KDTR_MAX_NDIM = 8, KDTR_MAX_DEPTH = 32, KDTR_MAX_NUMBER = 64 };
enum { KDTR_MAX_METADATA = 1 << 20, KDTR_MAX_TENSORS = 1 << 16 };
static const uint64_t KDTR_MAX_ELEMENTS = (uint64_t)1 << 48;

typedef enum {
    KDTR_BOOL, KDTR_U8, KDTR_I8, KDTR_U16, KDTR_I16, KDTR_U32, KDTR_I32, KDTR_U64, KDTR_I64,
    KDTR_F16, KDTR_F32, KDTR_F64, KDTR_BF16, KDTR_INT4, KDTR_DTYPES
} kdtr_dtype;

/* The name of each dtype in the file, zero-padded to 8 bytes, and the bytes of one element (int4: of one pair). */
static const struct { char name[8]; uint64_t bytes; } kdtr_dtypes[KDTR_DTYPES] = {
    {"bool", 1}, {"u8", 1}, {"i8", 1}, {"u16", 2}, {"i16", 2}, {"u32", 4}, {"i32", 4}, {"u64", 8}, {"i64", 8},
    {"f16", 2}, {"f32", 4}, {"f64", 8}, {"bf16", 2}, {"int4", 1},
};

typedef struct {
    const char *name; /* UTF-8, zero-terminated */
    kdtr_dtype dtype;
    uint32_t ndim;
    uint64_t shape[8]; /* logical shape; int4 counts values, not bytes */
    const void *data;  /* at a multiple of 64 bytes from the start of the file */
    uint64_t bytes;
} kdtr_tensor;

typedef struct {
    const unsigned char *base; /* the whole file; NULL when it was refused */
    uint64_t bytes;
    uint32_t count;       /* tensors */
    const char *metadata; /* one JSON object, metadata_bytes long, not zero-terminated */
    uint64_t metadata_bytes;
    int mapped;
    char error[320]; /* after a refusal: "field: what was found, what is allowed" */
} kdtr_file;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline int kdtr_fail(kdtr_file *file, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(file->error, sizeof file->error, format, values);
    va_end(values);
    return -1;
}

static inline uint64_t kdtr_read(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    while (bytes-- > 0) value = value << 8 | at[bytes];
    return value;
}

static inline uint64_t kdtr_pad(uint64_t bytes) { return (bytes + 63) & ~(uint64_t)63; }

static inline int kdtr_zero(const unsigned char *at, uint64_t bytes) {
    while (bytes > 0 && *at == 0) at++, bytes--;
    return bytes == 0;
}

/* zlib's CRC-32, four bits at a time: a table of 16 words instead of 256. */
static inline uint32_t kdtr_crc32(const unsigned char *at, uint64_t bytes) {
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    uint32_t crc = 0xffffffff;
    while (bytes-- > 0) {
        crc ^= *at++;
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

/* Strict UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. */
static inline int kdtr_utf8(const unsigned char *at, uint64_t bytes) {
    static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
    const unsigned char *end = at + bytes;
    while (at < end) {
        uint32_t code = *at++;
        int more = code < 0x80 ? 0 : code >> 5 == 6 ? 1 : code >> 4 == 14 ? 2 : code >> 3 == 30 ? 3 : -1, i;
        if (more < 0 || end - at < more) return 0;
        code &= more == 0 ? 0x7fu : 0x3fu >> more;
        for (i = 0; i < more; i++, at++) {
            if (*at >> 6 != 2) return 0;
            code = code << 6 | (*at & 0x3f);
        }
        if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
    }
    return 1;
}

/* JSON: a checker of RFC 8259 over [at, end); each function moves `at` past what it accepts and returns 0 for an error. */
typedef struct { const unsigned char *at, *end; } kdtr_text;

static inline int kdtr_next(const kdtr_text *text) { return text->at < text->end ? *text->at : -1; }

static inline int kdtr_accept(kdtr_text *text, int character) {
    int same = kdtr_next(text) == character;
    text->at += same;
    return same;
}

static inline void kdtr_space(kdtr_text *text) {
    while (kdtr_accept(text, ' ') || kdtr_accept(text, '\t') || kdtr_accept(text, '\n') || kdtr_accept(text, '\r')) {}
}

static inline int kdtr_digits(kdtr_text *text) {
    const unsigned char *start = text->at;
    while (kdtr_next(text) >= '0' && kdtr_next(text) <= '9') text->at++;
    return text->at > start;
}

static inline int kdtr_number(kdtr_text *text) {
    const unsigned char *start = text->at;
    kdtr_accept(text, '-');
    if (!kdtr_accept(text, '0') && !kdtr_digits(text)) return 0;
    if (kdtr_accept(text, '.') && !kdtr_digits(text)) return 0;
    if (kdtr_accept(text, 'e') || kdtr_accept(text, 'E')) {
        if (!kdtr_accept(text, '+')) kdtr_accept(text, '-');
        if (!kdtr_digits(text)) return 0;
    }
    return text->at - start <= KDTR_MAX_NUMBER;
}

static inline int kdtr_word(kdtr_text *text, const char *word) {
    while (*word && kdtr_accept(text, *word)) word++;
    return *word == 0;
}

static inline int kdtr_escape(kdtr_text *text) {
    int c = kdtr_next(text), i;
    text->at += c >= 0;
    if (c != 'u') return c > 0 && strchr("\"\\/bfnrt", c) != NULL;
    for (i = 0; i < 4; i++, text->at++) {
        c = kdtr_next(text);
        if (c <= 0 || !strchr("0123456789abcdefABCDEF", c)) return 0;
    }
    return 1;
}

static inline int kdtr_string(kdtr_text *text) {
    int c;
    if (!kdtr_accept(text, '"')) return 0;
    while ((c = kdtr_next(text)) >= 0x20) {
        text->at++;
        if (c == '"') return 1;
        if (c == '\\' && !kdtr_escape(text)) return 0;
    }
    return 0;
}

/* Recursive, but never deeper than KDTR_MAX_DEPTH. */
static inline int kdtr_value(kdtr_text *text, int depth) {
    int c = kdtr_next(text), close = c == '{' ? '}' : ']';
    if (c == '"') return kdtr_string(text);
    if (c == 't') return kdtr_word(text, "true");
    if (c == 'f') return kdtr_word(text, "false");
    if (c == 'n') return kdtr_word(text, "null");
    if (c != '{' && c != '[') return kdtr_number(text);
    if (depth == KDTR_MAX_DEPTH) return 0;
    text->at++;
    kdtr_space(text);
    if (kdtr_accept(text, close)) return 1;
    do {
        kdtr_space(text);
        if (c == '{') {
            if (!kdtr_string(text)) return 0;
            kdtr_space(text);
            if (!kdtr_accept(text, ':')) return 0;
            kdtr_space(text);
        }
        if (!kdtr_value(text, depth + 1)) return 0;
        kdtr_space(text);
    } while (kdtr_accept(text, ','));
    return kdtr_accept(text, close);
}

static inline int kdtr_json_object(const unsigned char *at, uint64_t bytes) {
    kdtr_text text;
    text.at = at;
    text.end = at + bytes;
    kdtr_space(&text);
    if (kdtr_next(&text) != '{' || !kdtr_value(&text, 0)) return 0;
    kdtr_space(&text);
    return text.at == text.end;
}

static inline int kdtr_check_header(kdtr_file *file) {
    const unsigned char *h = file->base;
    uint64_t front;
    if (file->bytes < KDTR_HEADER)
        return kdtr_fail(file, "file_bytes: %llu bytes; a KDTR file has at least 64", (unsigned long long)file->bytes);
    if (memcmp(h, "KDTR\r\n\x1a\n", 8)) return kdtr_fail(file, "magic: not a KDTR file");
    if (kdtr_read(h + 8, 4) != 1)
        return kdtr_fail(file, "version: %lu; this reader knows 1", (unsigned long)kdtr_read(h + 8, 4));
    if (kdtr_read(h + 60, 4) != kdtr_crc32(h, 60)) return kdtr_fail(file, "header_crc: the header was changed");
    if (!kdtr_zero(h + 40, 20)) return kdtr_fail(file, "reserved: not zero");
    if (kdtr_read(h + 24, 8) != file->bytes)
        return kdtr_fail(file, "file_bytes: the header says %llu, the file has %llu: cut short or added to",
                         (unsigned long long)kdtr_read(h + 24, 8), (unsigned long long)file->bytes);
    file->count = (uint32_t)kdtr_read(h + 12, 4);
    file->metadata_bytes = kdtr_read(h + 16, 8);
    if (file->metadata_bytes > KDTR_MAX_METADATA)
        return kdtr_fail(file, "metadata_bytes: %llu; at most 1048576", (unsigned long long)file->metadata_bytes);
    if (file->count > KDTR_MAX_TENSORS)
        return kdtr_fail(file, "tensor_count: %lu; at most 65536", (unsigned long)file->count);
    front = kdtr_pad(KDTR_HEADER + (uint64_t)KDTR_ENTRY * file->count + file->metadata_bytes);
    if (front > file->bytes)
        return kdtr_fail(file, "tensor_count: %lu tensors need a table beyond the end", (unsigned long)file->count);
    return 0;
}

static inline int kdtr_check_front(kdtr_file *file) {
    const unsigned char *table = file->base + KDTR_HEADER;
    uint64_t table_bytes = (uint64_t)KDTR_ENTRY * file->count;
    const unsigned char *metadata = table + table_bytes;
    uint64_t end = KDTR_HEADER + table_bytes + file->metadata_bytes;
    file->metadata = (const char *)metadata;
    if (kdtr_read(file->base + 32, 4) != kdtr_crc32(table, table_bytes))
        return kdtr_fail(file, "table_crc: the tensor table was changed");
    if (kdtr_read(file->base + 36, 4) != kdtr_crc32(metadata, file->metadata_bytes))
        return kdtr_fail(file, "metadata_crc: the metadata was changed");
    if (!kdtr_zero(file->base + end, kdtr_pad(end) - end)) return kdtr_fail(file, "metadata padding: not zero");
    if (!kdtr_utf8(metadata, file->metadata_bytes) || !kdtr_json_object(metadata, file->metadata_bytes))
        return kdtr_fail(file, "metadata: not a JSON object in UTF-8, or nested deeper than 32, or a number longer than 64");
    return 0;
}

static inline int kdtr_check_name(kdtr_file *file, uint32_t index, const unsigned char *previous) {
    const unsigned char *name = file->base + KDTR_HEADER + (uint64_t)KDTR_ENTRY * index;
    uint64_t length = 0, i;
    int order;
    while (length < KDTR_NAME && name[length]) length++;
    if (length == 0) return kdtr_fail(file, "tensor #%lu name: empty", (unsigned long)index);
    if (length == KDTR_NAME || !kdtr_zero(name + length, KDTR_NAME - length))
        return kdtr_fail(file, "tensor #%lu name: not zero-padded, or longer than 151 bytes", (unsigned long)index);
    for (i = 0; i < length; i++)
        if (name[i] < 0x20 || name[i] == 0x7f)
            return kdtr_fail(file, "tensor #%lu name: has a control character", (unsigned long)index);
    if (!kdtr_utf8(name, length)) return kdtr_fail(file, "tensor #%lu name: not UTF-8", (unsigned long)index);
    order = previous ? memcmp(previous, name, KDTR_NAME) : -1;
    if (order == 0) return kdtr_fail(file, "tensor #%lu name: '%s' twice", (unsigned long)index, (const char *)name);
    if (order > 0) return kdtr_fail(file, "tensor #%lu name: not in ascending order", (unsigned long)index);
    return 0;
}

static inline int kdtr_find_dtype(const unsigned char *field) {
    int dtype = 0;
    while (dtype < KDTR_DTYPES && memcmp(field, kdtr_dtypes[dtype].name, 8)) dtype++;
    return dtype;
}

/* The bytes of a tensor, or UINT64_MAX for a shape with more than KDTR_MAX_ELEMENTS elements (a zero counts as one). */
static inline uint64_t kdtr_size(const kdtr_tensor *t) {
    uint64_t elements = 1, bytes = kdtr_dtypes[t->dtype].bytes;
    uint32_t i;
    for (i = 0; i < t->ndim; i++) {
        uint64_t size = t->shape[i], counted = size ? size : 1;
        if (counted > KDTR_MAX_ELEMENTS / elements) return UINT64_MAX;
        elements *= counted;
        bytes *= t->dtype == KDTR_INT4 && i + 1 == t->ndim ? (size + 1) / 2 : size;
    }
    return bytes;
}

/* All that an entry says but its offset, which makes a pointer only once it is known to lie in the file. */
static inline void kdtr_describe(const unsigned char *entry, kdtr_tensor *out) {
    uint32_t i;
    out->name = (const char *)entry;
    out->dtype = (kdtr_dtype)kdtr_find_dtype(entry + 152);
    out->ndim = (uint32_t)kdtr_read(entry + 160, 4);
    for (i = 0; i < KDTR_MAX_NDIM; i++) out->shape[i] = kdtr_read(entry + 168 + 8 * i, 8);
    out->data = NULL;
    out->bytes = kdtr_read(entry + 240, 8);
}

/* Fill `out` with tensor number `index`, less than file->count, of a file that was accepted. */
static inline void kdtr_get(const kdtr_file *file, uint32_t index, kdtr_tensor *out) {
    const unsigned char *entry = file->base + KDTR_HEADER + (uint64_t)KDTR_ENTRY * index;
    kdtr_describe(entry, out);
    out->data = file->base + kdtr_read(entry + 232, 8);
}

/* One entry, whose data must start at *end; moves *end behind its data. */
static inline int kdtr_check_entry(kdtr_file *file, uint32_t index, uint64_t *end) {
    const unsigned char *entry = file->base + KDTR_HEADER + (uint64_t)KDTR_ENTRY * index;
    const char *name = (const char *)entry;
    uint64_t offset = kdtr_read(entry + 232, 8), bytes = kdtr_read(entry + 240, 8), ndim = kdtr_read(entry + 160, 4), size;
    kdtr_tensor t;
    if (kdtr_check_name(file, index, index ? entry - KDTR_ENTRY : NULL)) return -1;
    if (kdtr_find_dtype(entry + 152) == KDTR_DTYPES) return kdtr_fail(file, "tensor '%s' dtype: unknown", name);
    if (ndim > KDTR_MAX_NDIM)
        return kdtr_fail(file, "tensor '%s' ndim: %lu; at most 8", name, (unsigned long)ndim);
    if (!kdtr_zero(entry + 168 + 8 * ndim, 8 * (KDTR_MAX_NDIM - ndim)))
        return kdtr_fail(file, "tensor '%s' shape: not zero beyond ndim", name);
    kdtr_describe(entry, &t);
    if (t.dtype == KDTR_INT4 && ndim == 0) return kdtr_fail(file, "tensor '%s' shape: int4 needs a last axis", name);
    if ((size = kdtr_size(&t)) == UINT64_MAX)
        return kdtr_fail(file, "tensor '%s' shape: more than 2**48 elements", name);
    if (bytes != size)
        return kdtr_fail(file, "tensor '%s' bytes: %llu; its dtype and shape need %llu", name, (unsigned long long)bytes,
                         (unsigned long long)size);
    if (offset != *end)
        return kdtr_fail(file, "tensor '%s' offset: %llu; the data before it ends at %llu", name, (unsigned long long)offset,
                         (unsigned long long)*end);
    if (kdtr_pad(bytes) > file->bytes - offset)
        return kdtr_fail(file, "tensor '%s' bytes: %llu; %llu are left in the file", name, (unsigned long long)bytes,
                         (unsigned long long)(file->bytes - offset));
    if (!kdtr_zero(entry + 248, 8)) return kdtr_fail(file, "tensor '%s' reserved: not zero", name);
    *end = offset + kdtr_pad(bytes);
    return 0;
}

static inline int kdtr_check_data(kdtr_file *file, uint32_t index) {
    const unsigned char *entry = file->base + KDTR_HEADER + (uint64_t)KDTR_ENTRY * index, *data;
    uint64_t i;
    kdtr_tensor t;
    kdtr_get(file, index, &t);
    data = (const unsigned char *)t.data;
    if (kdtr_read(entry + 164, 4) != kdtr_crc32(data, t.bytes))
        return kdtr_fail(file, "tensor '%s' crc: its data was changed", t.name);
    if (!kdtr_zero(data + t.bytes, kdtr_pad(t.bytes) - t.bytes))
        return kdtr_fail(file, "tensor '%s' padding: not zero", t.name);
    for (i = 0; t.dtype == KDTR_BOOL && i < t.bytes; i++)
        if (data[i] > 1) return kdtr_fail(file, "tensor '%s' data: a bool that is neither 0 nor 1", t.name);
    return 0;
}

static inline int kdtr_check(kdtr_file *file, int verify) {
    uint64_t end;
    uint32_t i;
    if (kdtr_check_header(file) || kdtr_check_front(file)) return -1;
    end = kdtr_pad(KDTR_HEADER + (uint64_t)KDTR_ENTRY * file->count + file->metadata_bytes);
    for (i = 0; i < file->count; i++)
        if (kdtr_check_entry(file, i, &end)) return -1;
    if (end != file->bytes)
        return kdtr_fail(file, "file_bytes: %llu, but the data ends at %llu", (unsigned long long)file->bytes,
                         (unsigned long long)end);
    for (i = 0; verify && i < file->count; i++)
        if (kdtr_check_data(file, i)) return -1;
    return 0;
}

/* Read a file that is already in memory, at a multiple of 8 bytes; the memory must outlive `file`.
   Returns 0, or -1 with the reason in file->error. verify = 0 leaves the tensors' bytes unread. */
static inline int kdtr_open_memory(kdtr_file *file, const void *memory, uint64_t bytes, int verify) {
    memset(file, 0, sizeof *file);
    if ((uintptr_t)memory % 8) return kdtr_fail(file, "memory: not at a multiple of 8 bytes");
    if (bytes > SIZE_MAX / 2) return kdtr_fail(file, "file_bytes: larger than this machine's memory");
    file->base = (const unsigned char *)memory;
    file->bytes = bytes;
    if (kdtr_check(file, verify) == 0) return 0;
    file->base = NULL;
    file->count = 0;
    return -1;
}

#ifdef KDTR_HAS_OPEN
/* Map the file at `path`; kdtr_close unmaps it. Returns 0, or -1 with the reason in file->error and nothing left open. */
static inline int kdtr_open(kdtr_file *file, const char *path, int verify) {
    struct stat status;
    void *memory = MAP_FAILED;
    int descriptor = open(path, O_RDONLY | O_NONBLOCK), failed, regular; /* a pipe must not block */
    memset(file, 0, sizeof *file);
    if (descriptor < 0) return kdtr_fail(file, "path: %s", strerror(errno));
    failed = fstat(descriptor, &status);
    regular = !failed && S_ISREG(status.st_mode);
    if (regular && status.st_size >= KDTR_HEADER)
        memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    close(descriptor);
    if (!regular) return kdtr_fail(file, "path: not a regular file");
    if (status.st_size < KDTR_HEADER)
        return kdtr_fail(file, "file_bytes: %lu bytes; a KDTR file has at least 64", (unsigned long)status.st_size);
    if (memory == MAP_FAILED) return kdtr_fail(file, "path: cannot be mapped: %s", strerror(errno));
    if (kdtr_open_memory(file, memory, (uint64_t)status.st_size, verify)) {
        munmap(memory, (size_t)status.st_size);
        return -1;
    }
    file->mapped = 1;
    return 0;
}
#endif

/* Unmap what kdtr_open mapped. Pointers into the file end here. */
static inline void kdtr_close(kdtr_file *file) {
#ifdef KDTR_HAS_OPEN
    if (file->mapped) munmap((void *)(uintptr_t)file->base, (size_t)file->bytes);
#endif
    memset(file, 0, sizeof *file);
}

/* Find a tensor by name, by bisection: 1 and fills `out`, or 0. */
static inline int kdtr_find(const kdtr_file *file, const char *name, kdtr_tensor *out) {
    uint32_t low = 0, high = file->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(name, (const char *)file->base + KDTR_HEADER + (uint64_t)KDTR_ENTRY * middle);
        if (order == 0) {
            kdtr_get(file, middle, out);
            return 1;
        }
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return 0;
}

#endif
