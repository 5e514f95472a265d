/* Loops over threads: torch's own, by the function that its OpenMP runtime starts a team with. */

#include "cpu_common.h"

enum { GRAIN = 32768 }; /* numbers that are worth handing to a thread */

typedef void (*StartTeam)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
typedef struct {
    Task task;
    const void *call;
    i64 count, step, next;
} Loop;

static StartTeam start_team;

EXPORT void set_team(StartTeam start) { start_team = start; }

static void work(void *data)
{
    Loop *loop = data;
    for (;;) {
        i64 first = __atomic_fetch_add(&loop->next, loop->step, __ATOMIC_RELAXED);
        if (first >= loop->count)
            return;
        i64 last = least(first + loop->step, loop->count);
        for (i64 i = first; i < last; i++)
            loop->task(loop->call, i);
    }
}

void each(Task task, const void *call, i64 count, i64 size, i64 threads)
{
    Loop loop = {task, call, count, most(1, GRAIN / most(1, size)), 0};
    if (threads > 1 && start_team && count > loop.step)
        start_team(work, &loop, (unsigned)threads, 0);
    else
        work(&loop);
}
