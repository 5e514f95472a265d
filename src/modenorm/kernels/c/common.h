/* What the C files share: loops over threads, vectors, sums over a block. */

#ifndef MODENORM_CPU_COMMON
#define MODENORM_CPU_COMMON

typedef __INT64_TYPE__ i64;

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }

/* ---- Loops over threads: torch's own, by what its OpenMP runtime starts a team with ---- */

enum { GRAIN = 32768 }; /* numbers that are worth handing to a thread */

typedef void (*Task)(const void *call, i64 index);
typedef void (*StartTeam)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

enum { RANGES = 64, APART = 8 }; /* most ranges of a loop; numbers between their counters */

typedef struct {
    Task task;
    const void *call;
    i64 count, step, ranges, workers;
    i64 next[RANGES * APART];
} Loop;

static StartTeam start_team;

EXPORT void modenorm_set_team(StartTeam start) { start_team = start; }

/* Each thread goes through a range of its own, then helps others with theirs: threads that write
   side by side to memory that is new would wait for each other's pages. */
static void work(void *data)
{
    Loop *loop = data;
    i64 own = __atomic_fetch_add(&loop->workers, 1, __ATOMIC_RELAXED);
    for (i64 k = 0; k < loop->ranges; k++) {
        i64 range = (own + k) % loop->ranges, end = (range + 1) * loop->count / loop->ranges;
        for (;;) {
            i64 *next = loop->next + range * APART;
            i64 first = __atomic_fetch_add(next, loop->step, __ATOMIC_RELAXED);
            if (first >= end)
                break;
            i64 last = least(first + loop->step, end);
            for (i64 i = first; i < last; i++)
                loop->task(loop->call, i);
        }
    }
}

/* Calls task for every index below count, each of which takes about `size` numbers. */
static void each(Task task, const void *call, i64 count, i64 size, i64 threads)
{
    Loop loop = {.task = task, .call = call, .count = count};
    loop.step = most(1, GRAIN / most(1, size));
    int shared = threads > 1 && start_team && count > loop.step;
    loop.ranges = shared ? least(threads, RANGES) : 1;
    for (i64 range = 0; range < loop.ranges; range++)
        loop.next[range * APART] = range * count / loop.ranges;
    if (shared)
        start_team(work, &loop, (unsigned)threads, 0);
    else
        work(&loop);
}

/* ---- Sums over a block that stays in cache ---- */

INLINE vec load(const float *x) { return *(const loose *)x; }
INLINE vec all(float value) { return (vec){0} + value; }

INLINE float lanes(vec v)
{
    float part[LANES];
    __builtin_memcpy(part, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            part[i] += part[i + width];
    return part[0];
}

INLINE float sum(const float *x, i64 size)
{
    vec a = all(0), b = a, c = a, d = a;
    float rest = 0;
    i64 i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        a += load(x + i);
        b += load(x + i + LANES);
        c += load(x + i + 2 * LANES);
        d += load(x + i + 3 * LANES);
    }
    for (; i + LANES <= size; i += LANES)
        a += load(x + i);
    for (; i < size; i++)
        rest += x[i];
    return size < LANES ? rest : lanes((a + b) + (c + d)) + rest;
}

/* Σ (x − centre) and Σ weight · (x − centre); for weight NULL, Σ (x − centre)². */
INLINE void sums(const float *weight, const float *x, i64 size, float centre, float *first,
                 float *second)
{
    vec a = all(0), b = a, c = a, d = a, middle = all(centre);
    float one = 0, two = 0;
    i64 i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        vec p = load(x + i) - middle, q = load(x + i + LANES) - middle;
        vec v = weight ? load(weight + i) : p, w = weight ? load(weight + i + LANES) : q;
        a += v;
        b += w;
        c += v * p;
        d += w * q;
    }
    for (; i + LANES <= size; i += LANES) {
        vec p = load(x + i) - middle, v = weight ? load(weight + i) : p;
        a += v;
        c += v * p;
    }
    for (; i < size; i++) {
        float p = x[i] - centre, v = weight ? weight[i] : p;
        one += v;
        two += v * p;
    }
    *first = size < LANES ? one : lanes(a + b) + one;
    *second = size < LANES ? two : lanes(c + d) + two;
}

#endif
