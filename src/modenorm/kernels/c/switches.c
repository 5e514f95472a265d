/* The switches on the modes of up to eight gates, and their gradients: as kernels/gpu/switches.py.

   Letters: K modes of each gate, S switches in all. */

#include "common.h"

enum { ARRAYS = 8 };

#define EIGHT(name)                                                                                \
    const float *name##0, const float *name##1, const float *name##2, const float *name##3,        \
        const float *name##4, const float *name##5, const float *name##6, const float *name##7
#define ALL(name) {name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7}

INLINE double logistic(double x) { return 1 / (1 + __builtin_exp(-x)); }

/* used: biases with the logarithms of switches added (layers, K). found: changes, their slopes,
   the cost's slopes (3, S). */
EXPORT void modenorm_switches(EIGHT(bias), const float *log_odds, const float *strength,
                              const float *noise, float *cost, float *used, float *found,
                              float temperature, float low, float high, float closed, float shift,
                              i64 layers, i64 modes, i64 threads)
{
    (void)threads;
    const float *bias[ARRAYS] = ALL(bias);
    i64 count = layers * modes;
    double total = 0, width = high - low;
    for (i64 i = 0; i < count; i++) {
        double inner = noise[i] < 1e-6 ? 1e-6 : noise[i] > 1 - 1e-6 ? 1 - 1e-6 : noise[i];
        double soft = logistic((log_odds[i] + __builtin_log(inner / (1 - inner))) / temperature);
        double stretched = soft * width + low, hard = stretched;
        hard = hard < 0 ? 0 : hard > 1 ? 1 : hard;
        double factor = hard * (1 - closed) + closed, share = logistic(log_odds[i] - shift);
        double slope = soft * (1 - soft) * width * (1 - closed) / temperature / factor;
        float change = (float)__builtin_log(factor);
        used[i] = bias[i / modes][i % modes] + change;
        found[i] = change;
        found[count + i] = stretched < 0 || stretched > 1 ? 0 : (float)slope;
        found[2 * count + i] = (float)(*strength * share * (1 - share));
        total += share;
    }
    *cost = (float)(*strength * total);
}

/* The gradient of the log odds (S), by those of used biases, or NULL, and of the cost, or NULL. */
EXPORT void modenorm_switches_backward(EIGHT(used), const float *cost, const float *found,
                                       float *gradient, i64 layers, i64 modes, i64 threads)
{
    (void)threads;
    const float *used[ARRAYS] = ALL(used);
    i64 count = layers * modes;
    for (i64 i = 0; i < count; i++) {
        const float *upstream = used[i / modes];
        gradient[i] = upstream ? upstream[i % modes] * found[count + i] : 0;
        gradient[i] += cost ? *cost * found[2 * count + i] : 0;
    }
}
