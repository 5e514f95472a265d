/* The four streaming passes on a CPU, float32: the same functions as kernels/torch_passes.py.

   Letters: N samples, C channels, L positions. Channels first, a tensor is N·C rows of L numbers.
   Channels last, a sample is L rows of C numbers side by side; several positions are taken as one
   wider row, so that loops are long and columns of the same channel are sums of their own.
   Every sum has one order that depends on the sizes alone: the number of threads changes nothing.
   Blocks that stay in cache are summed in float32, blocks among each other in float64. */

#include "common.h"

enum {
    BLOCK = 2048,  /* numbers of a row that are summed together: 8 KiB */
    WIDE = 256,    /* most columns of a widened row, channels last */
    STRIP = 4 * LANES, /* of which so many are summed at once */
    LINE = 16,     /* numbers that are read from memory together */
    FIRST = 8,     /* widened rows that the mean is first taken of */
    TALL = 32,     /* widened rows that are summed together: 32 KiB; more if they are narrow */
    PIECE = 65536, /* numbers of a sample that are mapped together, channels last */
};

/* ---- Mean and sum of squares of a set that grows: Chan's rule ---- */

INLINE void grow(double *mean, double *square, double count, double size, double m, double s)
{
    double share = size / (count + size), apart = m - *mean;
    *mean += apart * share;
    *square += s + apart * apart * count * share;
}

/* ---- One call of a pass ---- */

typedef struct {
    const float *x, *dy, *centre, *scale, *slope, *offset;
    float *first, *second; /* what the pass writes */
    i64 samples, channels, positions;
    i64 tile, tiles;     /* channels last: columns of a tile, tiles of a sample */
    i64 piece, pieces;   /* channels last: positions of a piece, pieces of a sample */
} Call;

/* ---- Channels first: one row ---- */

static void row_moments(const void *data, i64 row)
{
    const Call *call = data;
    const float *x = call->x + row * call->positions;
    double mean = 0, square = 0;
    for (i64 start = 0; start < call->positions; start += BLOCK) {
        i64 size = least(BLOCK, call->positions - start);
        float middle = sum(x + start, size) / (float)size, one = 0, two = 0;
        if (call->second)
            sums(0, x + start, size, middle, &one, &two);
        double rest = (double)one / (double)size;
        grow(&mean, &square, (double)start, (double)size, middle + rest, two - one * rest);
    }
    call->first[row] = (float)mean;
    if (call->second)
        call->second[row] = (float)(square / (double)call->positions);
}

static void row_apply(const void *data, i64 row)
{
    const Call *call = data;
    const float *restrict x = call->x + row * call->positions;
    float *restrict y = call->first + row * call->positions;
    float centre = call->centre[row], scale = call->scale[row], offset = call->offset[row];
    for (i64 i = 0; i < call->positions; i++)
        y[i] = (x[i] - centre) * scale + offset;
}

static void row_reduce(const void *data, i64 row)
{
    const Call *call = data;
    i64 begin = row * call->positions, end = begin + call->positions;
    double total = 0, product = 0;
    for (i64 start = begin; start < end; start += BLOCK) {
        i64 size = least(BLOCK, end - start);
        float one, two;
        sums(call->dy + start, call->x + start, size, call->centre[row], &one, &two);
        total += one;
        product += two;
    }
    call->first[row] = (float)total;
    call->second[row] = (float)product;
}

static void row_apply_backward(const void *data, i64 row)
{
    const Call *call = data;
    const float *restrict x = call->x + row * call->positions;
    const float *restrict dy = call->dy + row * call->positions;
    float *restrict dx = call->first + row * call->positions;
    float centre = call->centre[row], scale = call->scale[row];
    float slope = call->slope[row], offset = call->offset[row];
    for (i64 i = 0; i < call->positions; i++)
        dx[i] = scale * dy[i] + (slope * (x[i] - centre) + offset);
}

/* ---- Channels last: a tile of a sample's channels ---- */

/* `copies` positions make a widened row of `width` columns, `pitch` numbers after the last one;
   `full` such rows, `tall` of them in a block, and `rest` columns of one more. */
typedef struct {
    i64 start, channels, at, copies, width, pitch, full, tall, rest;
} Tile;

INLINE Tile tile_of(const Call *call, i64 sample, i64 tile, i64 position, i64 positions)
{
    Tile t;
    i64 first = tile * call->tile;
    t.channels = least(call->tile, call->channels - first);
    i64 wide = STRIP % t.channels && t.channels % STRIP ? WIDE : STRIP; /* strips without a rest */
    t.copies = t.channels == call->channels ? most(1, least(wide / t.channels, positions)) : 1;
    t.width = t.copies * t.channels;
    t.pitch = t.copies * call->channels;
    t.full = positions / t.copies;
    t.tall = t.width > WIDE / 4 ? TALL : 2 * TALL;
    t.rest = positions % t.copies * t.channels;
    t.start = (sample * call->positions + position) * call->channels + first;
    t.at = sample * call->channels + first;
    return t;
}

/* Of every column: Σ (x − middle) and Σ (x − middle)²; with dy, Σ dy and Σ dy · (x − middle).
   A strip of columns stays in registers. Where a row is wider than that, memory is not read in its
   order, and the block after this one is asked for meanwhile. */
INLINE void block_sums(const float *dy, const float *x, const float *middle, i64 pitch, i64 rows,
                       i64 width, float *restrict one, float *restrict two)
{
    i64 j = 0, next = rows * pitch;
    int asks = width > STRIP && width == pitch;
    for (; j + STRIP <= width; j += STRIP) {
        vec sum[STRIP / LANES], product[STRIP / LANES], centre[STRIP / LANES];
        for (int k = 0; k < STRIP / LANES; k++) {
            sum[k] = product[k] = all(0);
            centre[k] = load(middle + j + k * LANES);
        }
        for (i64 r = 0; r < rows; r++) {
            for (int k = 0; asks && k < STRIP; k += LINE, next += LINE) {
                __builtin_prefetch(x + next, 0, 2);
                if (dy)
                    __builtin_prefetch(dy + next, 0, 2);
            }
            for (int k = 0; k < STRIP / LANES; k++) {
                i64 at = r * pitch + j + k * LANES;
                vec p = load(x + at) - centre[k], v = dy ? load(dy + at) : p;
                sum[k] += v;
                product[k] += v * p;
            }
        }
        for (int k = 0; k < STRIP / LANES; k++) {
            *(loose *)(one + j + k * LANES) = sum[k];
            *(loose *)(two + j + k * LANES) = product[k];
        }
    }
    for (i64 i = j; i < width; i++)
        one[i] = two[i] = 0;
    for (i64 r = 0; r < rows; r++)
        for (i64 i = j; i < width; i++) {
            float p = x[r * pitch + i] - middle[i], v = dy ? dy[r * pitch + i] : p;
            one[i] += v;
            two[i] += v * p;
        }
}

/* Joins a block to the moments of `count` rows; `middle` is near the mean of either. */
INLINE void block_moments(const float *x, i64 pitch, i64 rows, i64 width, i64 count,
                          const float *restrict middle, double *mean, double *square)
{
    float one[WIDE], two[WIDE];
    block_sums(0, x, middle, pitch, rows, width, one, two);
    for (i64 j = 0; j < width; j++) {
        double rest = one[j] * (1 / (double)rows), squares = two[j] - one[j] * rest;
        grow(mean + j, square + j, (double)count, (double)rows, middle[j] + rest, squares);
    }
}

INLINE void rounded(float *restrict to, const double *from, i64 width)
{
    for (i64 j = 0; j < width; j++)
        to[j] = (float)from[j];
}

/* The first few rows are summed around their own mean, the others around that of all before them:
   where these differ, the difference is a part of the variance, so it costs no digits. */
static void tile_moments(const void *data, i64 index)
{
    const Call *call = data;
    Tile t = tile_of(call, index / call->tiles, index % call->tiles, 0, call->positions);
    const float *x = call->x + t.start;
    if (call->positions == 1) {
        for (i64 c = 0; c < t.channels; c++) {
            call->first[t.at + c] = x[c];
            if (call->second)
                call->second[t.at + c] = x[c] - x[c]; /* NaN where there is no number */
        }
        return;
    }
    double mean[WIDE] = {0}, square[WIDE] = {0};
    float middle[WIDE] = {0};
    i64 begin = least(FIRST, t.full);
    for (i64 row = 0; row < begin; row++)
        for (i64 j = 0; j < t.width; j++)
            middle[j] += x[row * t.pitch + j] * (1 / (float)begin);
    block_moments(x, t.pitch, begin, t.width, 0, middle, mean, square);
    for (i64 row = begin; row < t.full; row += t.tall) {
        i64 rows = least(t.tall, t.full - row);
        rounded(middle, mean, t.width);
        block_moments(x + row * t.pitch, t.pitch, rows, t.width, row, middle, mean, square);
    }
    rounded(middle, mean, t.rest);
    block_moments(x + t.full * t.pitch, t.pitch, 1, t.rest, t.full, middle, mean, square);
    for (i64 c = 0; c < t.channels; c++) {
        double m = 0, s = 0, count = 0;
        for (i64 j = c; j < t.width; j += t.channels) {
            double size = (double)(t.full + (j < t.rest));
            grow(&m, &s, count, size, mean[j], square[j]);
            count += size;
        }
        call->first[t.at + c] = (float)m;
        if (call->second)
            call->second[t.at + c] = (float)(s / (double)call->positions);
    }
}

INLINE void widen(float *restrict to, const float *from, Tile t)
{
    for (i64 j = 0; j < t.width; j += t.channels)
        __builtin_memcpy(to + j, from + t.at, (unsigned long)t.channels * sizeof(float));
}

INLINE void block_reduce(const float *dy, const float *x, const float *centre, i64 pitch, i64 rows,
                         i64 width, double *total, double *product)
{
    float one[WIDE], two[WIDE];
    block_sums(dy, x, centre, pitch, rows, width, one, two);
    for (i64 j = 0; j < width; j++) {
        total[j] += one[j];
        product[j] += two[j];
    }
}

static void tile_reduce(const void *data, i64 index)
{
    const Call *call = data;
    Tile t = tile_of(call, index / call->tiles, index % call->tiles, 0, call->positions);
    const float *x = call->x + t.start, *dy = call->dy + t.start;
    if (call->positions == 1) {
        for (i64 c = 0; c < t.channels; c++) {
            call->first[t.at + c] = dy[c];
            call->second[t.at + c] = dy[c] * (x[c] - call->centre[t.at + c]);
        }
        return;
    }
    double total[WIDE] = {0}, product[WIDE] = {0};
    float centre[WIDE];
    widen(centre, call->centre, t);
    for (i64 row = 0; row < t.full; row += t.tall) {
        i64 rows = least(t.tall, t.full - row), at = row * t.pitch;
        block_reduce(dy + at, x + at, centre, t.pitch, rows, t.width, total, product);
    }
    i64 at = t.full * t.pitch;
    block_reduce(dy + at, x + at, centre, t.pitch, 1, t.rest, total, product);
    for (i64 c = 0; c < t.channels; c++) {
        double one = 0, two = 0;
        for (i64 j = c; j < t.width; j += t.channels) {
            one += total[j];
            two += product[j];
        }
        call->first[t.at + c] = (float)one;
        call->second[t.at + c] = (float)two;
    }
}

/* The two maps: a piece of a tile's positions. dy is NULL in the forward one. */
INLINE void tile_map(const Call *call, i64 index, const float *dy)
{
    i64 tile = index % call->tiles, piece = index / call->tiles % call->pieces;
    i64 sample = index / call->tiles / call->pieces, first = piece * call->piece;
    Tile t = tile_of(call, sample, tile, first, least(call->piece, call->positions - first));
    float centre[WIDE], slope[WIDE], offset[WIDE], scale[WIDE];
    widen(centre, call->centre, t);
    widen(offset, call->offset, t);
    widen(slope, dy ? call->slope : call->scale, t);
    if (dy)
        widen(scale, call->scale, t);
    for (i64 row = 0; row <= t.full; row++) {
        i64 width = row < t.full ? t.width : t.rest;
        const float *restrict x = call->x + t.start + row * t.pitch;
        const float *restrict upstream = dy + t.start + row * t.pitch;
        float *restrict out = call->first + t.start + row * t.pitch;
        for (i64 j = 0; j < width; j++) {
            float value = (x[j] - centre[j]) * slope[j] + offset[j];
            out[j] = dy ? scale[j] * upstream[j] + value : value;
        }
    }
}

static void tile_apply(const void *data, i64 index) { tile_map(data, index, 0); }

static void tile_apply_backward(const void *data, i64 index)
{
    const Call *call = data;
    tile_map(call, index, call->dy);
}

/* ---- What Python calls ---- */

#if defined(__linux__)
int madvise(void *start, unsigned long size, int advice);

/* Asks for memory that is about to be written in large pages: a new tensor of some megabytes costs
   more in thousands of page faults than in arithmetic. Does nothing where there are none. */
static void use_large_pages(float *array, i64 size)
{
    const unsigned long page = 4096;
    unsigned long start = ((unsigned long)array + page - 1) / page * page;
    unsigned long end = (unsigned long)(array + size) / page * page;
    if (size * (i64)sizeof(float) >= 1 << 22)
        madvise((void *)start, end - start, 14); /* MADV_HUGEPAGE */
}
#else
static void use_large_pages(float *array, i64 size) { (void)array, (void)size; }
#endif

static void run(Task row, Task tile, Call *call, int reduces, i64 last, i64 threads)
{
    i64 samples = call->samples, channels = call->channels, positions = call->positions;
    if (!last) {
        each(row, call, samples * channels, positions, threads);
        return;
    }
    /* few samples: narrow tiles or short pieces, so that there is something to share */
    call->tile = least(channels, reduces && samples < 16 ? LANES : WIDE);
    call->tiles = (channels + call->tile - 1) / call->tile;
    call->piece = reduces ? positions : most(1, PIECE / most(1, channels));
    call->pieces = (positions + call->piece - 1) / call->piece;
    i64 size = call->tile * least(positions, call->piece);
    each(tile, call, samples * call->tiles * call->pieces, size, threads);
}

#define SIZES i64 samples, i64 channels, i64 positions, i64 last, i64 threads
#define GIVEN .samples = samples, .channels = channels, .positions = positions

EXPORT void modenorm_moments(const float *x, float *mean, float *var, SIZES)
{
    Call call = {.x = x, .first = mean, .second = var, GIVEN};
    run(row_moments, tile_moments, &call, 1, last, threads);
}

EXPORT void modenorm_apply(const float *x, const float *centre, const float *scale,
                           const float *shift, float *y, SIZES)
{
    Call call = {.x = x, .centre = centre, .scale = scale, .offset = shift, .first = y, GIVEN};
    use_large_pages(y, samples * channels * positions);
    run(row_apply, tile_apply, &call, 0, last, threads);
}

EXPORT void modenorm_reduce_backward(const float *dy, const float *x, const float *centre,
                                     float *total, float *product, SIZES)
{
    Call call = {.dy = dy, .x = x, .centre = centre, .first = total, .second = product, GIVEN};
    run(row_reduce, tile_reduce, &call, 1, last, threads);
}

EXPORT void modenorm_apply_backward(const float *dy, const float *x, const float *centre,
                                    const float *scale, const float *slope, const float *offset,
                                    float *dx, SIZES)
{
    Call call = {.dy = dy, .x = x, .centre = centre, .scale = scale, .first = dx, GIVEN};
    call.slope = slope;
    call.offset = offset;
    use_large_pages(dx, samples * channels * positions);
    run(row_apply_backward, tile_apply_backward, &call, 0, last, threads);
}

#undef SIZES
#undef GIVEN
