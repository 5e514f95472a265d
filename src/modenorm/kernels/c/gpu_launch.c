/* Hands kernels that follow each other to the CUDA driver in one call. */

#include "common.h"

typedef __UINT32_TYPE__ u32;
typedef __UINT64_TYPE__ u64;

/* As in cuda.h, which need not be installed. */
typedef struct {
    u32 id, padding;
    union {
        char bytes[64];
        int on;
    } value;
} LaunchAttribute;
typedef struct {
    u32 grid[3], block[3], shared;
    void *stream;
    LaunchAttribute *attributes;
    u32 count;
} LaunchConfig;
typedef int (*Driver)(const LaunchConfig *config, void *function, void **arguments, void **extra);

enum { OVERLAPPING = 6, MOST_ARGUMENTS = 40 }; /* the first: programmatic stream serialization */

/* What a kernel is given: base < 0 means the value itself, else an offset from an address. */
typedef struct {
    i64 base;
    u64 value;
} Argument;
typedef struct {
    void *function;
    u32 grid[3], threads, shared, overlaps;
    i64 count;
} Kernel;
typedef struct {
    Driver driver;
    const Kernel *kernels;
    i64 count;
    const Argument *arguments; /* of all kernels, one after the other */
} Sequence;

/* Launch kernels on a stream, with the arrays at these addresses. Returns the driver's error. */
EXPORT int modenorm_launch(const Sequence *sequence, void *stream, const u64 *addresses)
{
    const Argument *arguments = sequence->arguments;
    const Kernel *end = sequence->kernels + sequence->count;
    for (const Kernel *kernel = sequence->kernels; kernel < end; kernel++) {
        u64 values[MOST_ARGUMENTS];
        void *pointers[MOST_ARGUMENTS];
        for (i64 i = 0; i < kernel->count; i++, arguments++) {
            values[i] = arguments->value;
            if (arguments->base >= 0)
                values[i] += addresses[arguments->base];
            pointers[i] = &values[i];
        }
        LaunchAttribute attribute = {.id = OVERLAPPING, .value.on = 1};
        LaunchConfig config = {
            .grid = {kernel->grid[0], kernel->grid[1], kernel->grid[2]},
            .block = {kernel->threads, 1, 1},
            .shared = kernel->shared,
            .stream = stream,
            .attributes = &attribute,
            .count = kernel->overlaps,
        };
        int error = sequence->driver(&config, kernel->function, pointers, 0);
        if (error)
            return error;
    }
    return 0;
}
