/* Mode normalization of a float32 tensor on a CPU, one call each way: the passes, the mixing, and
   what is around it, the linear gate and the running estimates. The one file to compile: it
   includes all others. */

#include "mode_group_norm.c"
#include "mixing.c"
#include "switches.c"
#include "gpu_launch.c"

typedef struct {
    const float *mean, *weight, *gates;
    const float *more; /* the gradient that comes to the gates from elsewhere, or NULL */
    const float *usage; /* and to their means, (K), or NULL */
    const float *bias;
    float *out[2];
    float *dmean, *dvar;
    i64 samples, channels, modes, positions;
} Gate;

INLINE float dot(const float *a, const float *b, i64 size)
{
    float unused, product;
    sums(a, b, size, 0, &unused, &product);
    return product;
}

/* out: gates (N, K), softmax(W m + b) */
static void sample_gates(const void *data, i64 n)
{
    const Gate *gate = data;
    float *gates = gate->out[0] + n * gate->modes, greatest = 0, total = 0;
    for (i64 k = 0; k < gate->modes; k++) {
        const float *weight = gate->weight + k * gate->channels;
        gates[k] = dot(weight, gate->mean + n * gate->channels, gate->channels) + gate->bias[k];
        greatest = k && greatest > gates[k] ? greatest : gates[k];
    }
    for (i64 k = 0; k < gate->modes; k++) {
        gates[k] = __builtin_expf(gates[k] - greatest);
        total += gates[k];
    }
    for (i64 k = 0; k < gate->modes; k++)
        gates[k] /= total;
}

/* From gradients of gates, mean and var to those of logits, in place, and to offset and slope. */
static void sample_logits(const void *data, i64 n)
{
    const Gate *gate = data;
    const float *gates = gate->gates + n * gate->modes;
    float *dgates = gate->out[0] + n * gate->modes;
    float *dmean = gate->dmean + n * gate->channels, *dvar = gate->dvar + n * gate->channels;
    i64 modes = gate->weight ? gate->modes : 0, greatest = 0;
    float along = 0;
    for (i64 k = 0; k < modes; k++) {
        dgates[k] += gate->more ? gate->more[n * modes + k] : 0;
        dgates[k] += gate->usage ? gate->usage[k] / (float)gate->samples : 0;
        greatest = gates[k] > gates[greatest] ? k : greatest;
    }
    /* gates sum to 1: only differences count, and digits are kept where one gate is near 1 */
    float origin = dgates[greatest];
    for (i64 k = 0; k < modes; k++)
        along += gates[k] * (dgates[k] - origin);
    for (i64 k = 0; k < modes; k++) {
        const float *weight = gate->weight + k * gate->channels;
        dgates[k] = gates[k] * (dgates[k] - origin - along);
        for (i64 c = 0; c < gate->channels; c++)
            dmean[c] += dgates[k] * weight[c];
    }
    float share = 1 / (float)gate->positions;
    for (i64 c = 0; c < gate->channels; c++) {
        dmean[c] *= share;
        dvar[c] *= 2 * share;
    }
}

/* out: gradients of the gate's weight (K, C) and bias (K), from those of the logits */
static void tile_gate_gradients(const void *data, i64 tile)
{
    const Gate *gate = data;
    i64 first = tile * TILE, width = least(TILE, gate->channels - first);
    for (i64 k = 0; k < gate->modes; k++) {
        double total[TILE] = {0}, alone = 0;
        for (i64 n = 0; n < gate->samples; n++) {
            double dlogit = gate->gates[n * gate->modes + k];
            alone += dlogit;
            for (i64 j = 0; j < width; j++)
                total[j] += dlogit * gate->mean[n * gate->channels + first + j];
        }
        for (i64 j = 0; j < width; j++)
            gate->out[0][k * gate->channels + first + j] = (float)total[j];
        if (tile == 0)
            gate->out[1][k] = (float)alone;
    }
}

INLINE int all_finite(const float *x, i64 size)
{
    float zero = 0;
    for (i64 i = 0; i < size; i++)
        zero += x[i] - x[i];
    return zero == 0;
}

/* As `mixing.update_running`; momentum below 0 averages over all batches. */
static void update_running(const float *mode_mean, const float *mode_var, const float *mass,
                           float *mean, float *var, float *share, i64 *tracked, float momentum,
                           i64 usage, i64 samples, i64 channels, i64 modes)
{
    int moves = all_finite(mode_mean, modes * channels) && all_finite(mode_var, modes * channels);
    int any = 0;
    for (i64 k = 0; k < modes; k++)
        any |= moves && mass[k] >= TINY;
    if (tracked)
        *tracked += any;
    for (i64 k = 0; k < modes; k++) {
        if (!moves || !(mass[k] >= TINY))
            continue;
        float part = mass[k] / (float)samples, rate = momentum;
        if (share)
            share[k] += part;
        if (momentum < 0)
            rate = usage ? (part > 0 ? part / share[k] : 0) : 1 / (float)most(1, *tracked);
        else if (usage)
            rate *= part;
        for (i64 i = k * channels; i < (k + 1) * channels; i++) {
            float step = mode_mean[i] - mean[i];
            var[i] = (1 - rate) * var[i] + rate * mode_var[i] + rate * (1 - rate) * step * step;
            mean[i] += rate * step;
        }
    }
}

/* ---- What Python calls ---- */

#define SIZES                                                                                      \
    float eps, i64 weight_step, i64 bias_step, i64 samples, i64 channels, i64 modes,               \
        i64 positions, i64 last, i64 threads

/* gate_weight NULL: the gates are given. running_mean NULL: nothing to update, or to normalise
   with. usage: the mass over N, or NULL. kept: mean, var, scale (N, C), μ, σ² (K, C), mass (K).
   scratch: (N, C) and (K, C). */
EXPORT void modenorm_forward(const float *x, const float *gate_weight, const float *gate_bias,
                             const float *weight, const float *bias, float *y, float *gates,
                             float *kept, float *scratch, float *usage, float *running_mean,
                             float *running_var, float *share, i64 *tracked, float momentum,
                             i64 by_usage, i64 from_batch, SIZES)
{
    i64 rows = samples * channels, table = modes * channels;
    float *mean = kept, *var = kept + rows, *scale = kept + 2 * rows;
    float *mode_mean = kept + 3 * rows, *mode_var = mode_mean + table, *mass = mode_var + table;
    modenorm_moments(x, mean, from_batch ? var : 0, samples, channels, positions, last, threads);
    Gate gate = {.mean = mean, .weight = gate_weight, .bias = gate_bias, .out = {gates},
                 .channels = channels, .modes = modes};
    if (gate_weight)
        each(sample_gates, &gate, samples, table, threads);
    if (from_batch)
        modenorm_statistics(mean, var, gates, mass, mode_mean, mode_var, samples, channels, modes,
                            threads);
    for (i64 k = 0; usage && k < modes; k++)
        usage[k] = mass[k] / (float)samples;
    if (from_batch && running_mean)
        update_running(mode_mean, mode_var, mass, running_mean, running_var, share, tracked,
                       momentum, by_usage, samples, channels, modes);
    modenorm_coefficients(mean, gates, from_batch ? mode_mean : running_mean,
                          from_batch ? mode_var : running_var, weight, bias, scale, scratch,
                          scratch + rows, eps, weight_step, bias_step, samples, channels, modes,
                          threads);
    modenorm_apply(x, mean, scale, scratch, y, samples, channels, positions, last, threads);
}

/* kept: as forward left it. dgates: of the gates, or of the logits where there is a gate; dused
   and dusage come from elsewhere, then, or are NULL. dx, dweight, dbias may be NULL. scratch:
   4 (N, C), 3 (K, C). */
EXPORT void modenorm_backward(const float *dy, const float *x, const float *gates,
                              const float *kept, const float *gate_weight, const float *weight,
                              const float *bias, const float *dused, const float *dusage,
                              float *dx, float *dgates, float *dgate_weight, float *dgate_bias,
                              float *dweight, float *dbias, float *scratch, SIZES)
{
    i64 rows = samples * channels, table = modes * channels;
    const float *mean = kept, *var = kept + rows, *scale = kept + 2 * rows;
    const float *mode_mean = kept + 3 * rows, *mode_var = mode_mean + table;
    const float *mass = mode_var + table;
    float *dscale = scratch, *dshift = scratch + rows, *dmean = scratch + 2 * rows;
    float *dvar = scratch + 3 * rows, *u = scratch + 4 * rows, *s = u + table, *scaled = s + table;
    modenorm_reduce_backward(dy, x, mean, dshift, dscale, samples, channels, positions, last,
                             threads);
    modenorm_mode_gradients(dscale, dshift, mean, gates, mode_mean, mode_var, mass, weight, u, s,
                            scaled, dweight, dbias, eps, weight_step, bias_step, samples, channels,
                            modes, threads);
    modenorm_sample_gradients(dscale, dshift, mean, var, gates, mode_mean, mode_var, u, s, scaled,
                              bias, dmean, dvar, dgates, bias_step, samples, channels, modes,
                              threads);
    Gate gate = {.mean = mean, .weight = gate_weight, .gates = gates, .more = dused,
                 .usage = dusage, .out = {dgates}, .dmean = dmean, .dvar = dvar, .samples = samples,
                 .channels = channels, .modes = modes, .positions = positions};
    each(sample_logits, &gate, samples, table, threads);
    if (gate_weight) {
        Gate parameters = {.mean = mean, .gates = dgates, .out = {dgate_weight, dgate_bias},
                           .samples = samples, .channels = channels, .modes = modes};
        i64 count = (channels + TILE - 1) / TILE;
        each(tile_gate_gradients, &parameters, count, samples * modes * TILE, threads);
    }
    if (dx)
        modenorm_apply_backward(dy, x, mean, scale, dvar, dmean, dx, samples, channels, positions,
                                last, threads);
}

/* ---- The same for an autograd node of C++, with arrays in the order of mode_norm_arrays.py ---- */

typedef struct {
    float eps, momentum;
    i64 by_usage, weight_step, bias_step, samples, channels, modes, positions, last;
} Layer;

typedef struct {
    const float *x, *gates, *gate_weight, *gate_bias, *weight, *bias;
    float *running_mean, *running_var;
    i64 *tracked;
    float *share, *usage, *used, *kept, *scratch, *y;
} Forward;

typedef struct {
    const float *dy, *x, *gates, *gate_weight, *gate_bias, *weight, *bias, *used, *dused, *dusage;
    float *kept, *scratch, *dx, *dlogits, *dgate_weight, *dgate_bias, *dweight, *dbias;
} Backward;

#define SIZES_OF(layer)                                                                            \
    (layer)->eps, (layer)->weight_step, (layer)->bias_step, (layer)->samples, (layer)->channels,   \
        (layer)->modes, (layer)->positions, (layer)->last

/* Gates lie behind what else is kept. */
static float *kept_gates(const Layer *layer, float *kept)
{
    i64 rows = layer->samples * layer->channels, table = layer->modes * layer->channels;
    return kept + 3 * rows + 2 * table + layer->modes;
}

EXPORT int modenorm_run_forward(const Layer *layer, i64 threads, const Forward *at)
{
    modenorm_forward(at->x, at->gate_weight, at->gate_bias, at->weight, at->bias, at->y,
                     kept_gates(layer, at->kept), at->kept, at->scratch, at->usage,
                     at->running_mean, at->running_var, at->share, at->tracked, layer->momentum,
                     layer->by_usage, 1, SIZES_OF(layer), threads);
    return 0;
}

/* Gradients of the gates lie behind the other scratch memory. */
EXPORT int modenorm_run_backward(const Layer *layer, i64 threads, const Backward *at)
{
    i64 rows = layer->samples * layer->channels, table = layer->modes * layer->channels;
    modenorm_backward(at->dy, at->x, kept_gates(layer, at->kept), at->kept, at->gate_weight,
                      at->weight, at->bias, at->dused, at->dusage, at->dx,
                      at->scratch + 4 * rows + 3 * table, at->dgate_weight, at->dgate_bias,
                      at->dweight, at->dbias, at->scratch, SIZES_OF(layer), threads);
    return 0;
}
