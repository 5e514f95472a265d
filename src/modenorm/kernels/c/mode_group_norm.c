/* Mode group normalization of a float32 tensor on a CPU, one call each way; formulas in
   docs/math.md. Letters: N samples, C channels, K modes. Every sample has modes of its own, so
   almost all is sums over its channels, which are taken a few at a time and joined in float64. */

#include "passes.c"

enum { BAND = 32 }; /* channels */

typedef struct {
    const float *mean, *var; /* var NULL: variances are those of the means */
    const float *gate_weight, *gate_bias, *weight, *bias, *mode_mean, *mode_var, *log_mass;
    const float *dscale, *dshift, *dused;
    float *out[6]; /* what the part writes */
    i64 samples, channels, modes, positions;
    float eps;
} Channels;

INLINE float over_deviation(float var, float eps) { return 1 / __builtin_sqrtf(var + eps); }

/* The logarithms of a channel's gates, softmax over k of w m + b. */
INLINE void log_gates(const Channels *call, float mean, float *logs)
{
    float greatest = 0, total = 0;
    for (i64 k = 0; k < call->modes; k++) {
        logs[k] = call->gate_weight[k] * mean + call->gate_bias[k];
        greatest = k && greatest > logs[k] ? greatest : logs[k];
    }
    for (i64 k = 0; k < call->modes; k++)
        total += __builtin_expf(logs[k] - greatest);
    total = __builtin_logf(total);
    for (i64 k = 0; k < call->modes; k++)
        logs[k] = logs[k] - greatest - total;
}

/* out: gates (N, C, K); μ, σ² and log C (N, K); scale and shift (N, C). Gates are first taken
   relative to a mode's largest one: all of them together may be too small a number. */
static void sample_channel_modes(const void *data, i64 n)
{
    const Channels *call = data;
    i64 channels = call->channels, modes = call->modes;
    const float *mean = call->mean + n * channels;
    const float *var = call->var ? call->var + n * channels : 0;
    float *gates = call->out[0] + n * channels * modes;
    float *mode_mean = call->out[1] + n * modes, *mode_var = call->out[2] + n * modes;
    float *log_mass = call->out[3] + n * modes;
    float *scale = call->out[4] + n * channels, *shift = call->out[5] + n * channels, over = 0;
    double mass[modes], total[modes];
    float inverse[modes], highest[modes];
    for (i64 k = 0; k < modes; k++) {
        mass[k] = total[k] = 0;
        highest[k] = -__builtin_inff();
    }
    for (i64 c = 0; c < channels; c++) {
        log_gates(call, mean[c], gates + c * modes);
        for (i64 k = 0; k < modes; k++)
            highest[k] = gates[c * modes + k] > highest[k] ? gates[c * modes + k] : highest[k];
    }
    for (i64 c = 0; c < channels; c++)
        for (i64 k = 0; k < modes; k++) {
            float part = __builtin_expf(gates[c * modes + k] - highest[k]);
            gates[c * modes + k] = part;
            mass[k] += part;
            total[k] += (double)part * mean[c];
        }
    for (i64 k = 0; k < modes; k++) {
        mode_mean[k] = (float)(total[k] / mass[k]);
        log_mass[k] = highest[k] + (float)__builtin_log(mass[k]);
        highest[k] = __builtin_expf(highest[k]);
        total[k] = 0;
    }
    for (i64 c = 0; c < channels; c++) {
        float q = var ? var[c] : 0;
        for (i64 k = 0; k < modes; k++) {
            float apart = mean[c] - mode_mean[k];
            total[k] += (double)gates[c * modes + k] * (apart * apart + q);
            gates[c * modes + k] *= highest[k];
        }
    }
    for (i64 k = 0; k < modes; k++) {
        mode_var[k] = (float)(total[k] / mass[k]);
        inverse[k] = over_deviation(mode_var[k], call->eps) / (float)modes;
        over += inverse[k];
    }
    for (i64 c = 0; c < channels; c++) {
        float weight = call->weight ? call->weight[c] : 1, moved = 0;
        for (i64 k = 0; k < modes; k++)
            moved += inverse[k] * (mean[c] - mode_mean[k]);
        scale[c] = weight * over;
        shift[c] = weight * moved + (call->bias ? call->bias[c] : 0);
    }
}

/* out: offset and slope of dx (N, C), a sample's part of the gradients of the gate (N, 2, K) */
static void sample_channel_gradients(const void *data, i64 n)
{
    const Channels *call = data;
    i64 channels = call->channels, modes = call->modes;
    const float *mean = call->mean + n * channels;
    const float *var = call->var ? call->var + n * channels : 0;
    const float *mode_mean = call->mode_mean + n * modes, *mode_var = call->mode_var + n * modes;
    const float *log_mass = call->log_mass + n * modes;
    const float *a = call->dscale + n * channels, *d = call->dshift + n * channels;
    const float *dused = call->dused ? call->dused + n * channels * modes : 0;
    float *offset = call->out[0] + n * channels, *slope = call->out[1] + n * channels;
    float *dweight = call->out[2] + 2 * n * modes, *dbias = dweight + modes;
    float u[modes], s[modes], share = 1 / (float)call->positions;
    double e = 0, t[modes], of_weight[modes], of_bias[modes];
    for (i64 k = 0; k < modes; k++)
        t[k] = of_weight[k] = of_bias[k] = 0;
    for (i64 c = 0; c < channels; c++) {
        float weight = call->weight ? call->weight[c] : 1;
        e += weight * d[c];
        for (i64 k = 0; k < modes; k++)
            t[k] += weight * (a[c] + d[c] * (mean[c] - mode_mean[k]));
    }
    for (i64 k = 0; k < modes; k++) {
        double inverse = over_deviation(mode_var[k], call->eps);
        u[k] = (float)(-inverse * e / (double)modes);
        s[k] = (float)(-0.5 * inverse * inverse * inverse * t[k] / (double)modes);
    }
    for (i64 c = 0; c < channels; c++) {
        float gates[modes], dlogs[modes], dmean = 0, dvar = 0, along = 0, q = var ? var[c] : 0;
        log_gates(call, mean[c], gates);
        for (i64 k = 0; k < modes; k++) {
            float apart = mean[c] - mode_mean[k];
            float weight = __builtin_expf(gates[k] - log_mass[k]);
            gates[k] = __builtin_expf(gates[k]);
            dlogs[k] = weight * (u[k] * apart + s[k] * (q + apart * apart - mode_var[k]));
            dlogs[k] += dused ? gates[k] * dused[c * modes + k] : 0;
            dmean += weight * (u[k] + 2 * s[k] * apart);
            dvar += weight * s[k];
            along += dlogs[k];
        }
        for (i64 k = 0; k < modes; k++) {
            float dlogit = dlogs[k] - gates[k] * along;
            dmean += dlogit * call->gate_weight[k];
            of_weight[k] += (double)dlogit * mean[c];
            of_bias[k] += dlogit;
        }
        offset[c] = dmean * share;
        slope[c] = var ? 2 * dvar * share : 0;
    }
    for (i64 k = 0; k < modes; k++) {
        dweight[k] = (float)of_weight[k];
        dbias[k] = (float)of_bias[k];
    }
}

/* out: gradients of weight and bias (C), or NULL */
static void band_parameters(const void *data, i64 band)
{
    const Channels *call = data;
    i64 first = band * BAND, width = least(BAND, call->channels - first), modes = call->modes;
    double dweight[BAND] = {0}, dbias[BAND] = {0};
    for (i64 n = 0; n < call->samples; n++) {
        i64 at = n * call->channels + first;
        const float *mean = call->mean + at, *a = call->dscale + at, *d = call->dshift + at;
        for (i64 j = 0; j < width; j++)
            dbias[j] += d[j];
        for (i64 k = 0; call->out[0] && k < modes; k++) {
            float middle = call->mode_mean[n * modes + k];
            float inverse = over_deviation(call->mode_var[n * modes + k], call->eps);
            for (i64 j = 0; j < width; j++)
                dweight[j] += inverse * (a[j] + d[j] * (mean[j] - middle));
        }
    }
    for (i64 j = 0; call->out[0] && j < width; j++)
        call->out[0][first + j] = (float)(dweight[j] / (double)modes);
    for (i64 j = 0; call->out[1] && j < width; j++)
        call->out[1][first + j] = (float)dbias[j];
}

/* ---- What Python calls ---- */

#define SIZES                                                                                      \
    float eps, i64 pixel, i64 samples, i64 channels, i64 modes, i64 positions, i64 last,           \
        i64 threads
#define GIVEN                                                                                      \
    .samples = samples, .channels = channels, .modes = modes, .positions = positions, .eps = eps

/* kept: mean, scale (N, C), μ, σ², log C (N, K), and var (N, C) if pixel. scratch: (N, C). */
EXPORT void modenorm_channels_forward(const float *x, const float *gate_weight,
                                      const float *gate_bias, const float *weight,
                                      const float *bias, float *y, float *gates, float *kept,
                                      float *scratch, SIZES)
{
    i64 rows = samples * channels, of_modes = samples * modes;
    float *mean = kept, *scale = kept + rows, *mode_mean = scale + rows;
    float *mode_var = mode_mean + of_modes, *log_mass = mode_var + of_modes;
    float *var = pixel ? log_mass + of_modes : 0;
    modenorm_moments(x, mean, var, samples, channels, positions, last, threads);
    Channels call = {.mean = mean, .var = var, .gate_weight = gate_weight, .gate_bias = gate_bias,
                     .weight = weight, .bias = bias,
                     .out = {gates, mode_mean, mode_var, log_mass, scale, scratch}, GIVEN};
    each(sample_channel_modes, &call, samples, 4 * modes * channels, threads);
    modenorm_apply(x, mean, scale, scratch, y, samples, channels, positions, last, threads);
}

/* kept: as forward left it. dused: the gradient of the gates as an output, or NULL. dx, dweight,
   dbias may be NULL. scratch: 4 (N, C), (N, 2, K). */
EXPORT void modenorm_channels_backward(const float *dy, const float *x, const float *kept,
                                       const float *gate_weight, const float *gate_bias,
                                       const float *weight, const float *dused, float *dx,
                                       float *dgate_weight, float *dgate_bias, float *dweight,
                                       float *dbias, float *scratch, SIZES)
{
    i64 rows = samples * channels, of_modes = samples * modes;
    const float *mean = kept, *scale = kept + rows, *mode_mean = scale + rows;
    const float *mode_var = mode_mean + of_modes, *log_mass = mode_var + of_modes;
    const float *var = pixel ? log_mass + of_modes : 0;
    float *dscale = scratch, *dshift = scratch + rows, *offset = scratch + 2 * rows;
    float *slope = scratch + 3 * rows, *parts = scratch + 4 * rows;
    modenorm_reduce_backward(dy, x, mean, dshift, dscale, samples, channels, positions, last,
                             threads);
    Channels call = {.mean = mean, .var = var, .gate_weight = gate_weight, .gate_bias = gate_bias,
                     .weight = weight, .mode_mean = mode_mean, .mode_var = mode_var,
                     .log_mass = log_mass, .dscale = dscale, .dshift = dshift, .dused = dused,
                     .out = {offset, slope, parts}, GIVEN};
    each(sample_channel_gradients, &call, samples, 4 * modes * channels, threads);
    for (i64 k = 0; k < 2 * modes; k++) {
        double total = 0;
        for (i64 n = 0; n < samples; n++)
            total += parts[2 * n * modes + k];
        *(k < modes ? dgate_weight + k : dgate_bias + k - modes) = (float)total;
    }
    call.out[0] = dweight, call.out[1] = dbias;
    if (dweight || dbias)
        each(band_parameters, &call, (channels + BAND - 1) / BAND, samples * modes * BAND,
             threads);
    if (dx && var)
        modenorm_apply_backward(dy, x, mean, scale, slope, offset, dx, samples, channels,
                                positions, last, threads);
    else if (dx) /* the slope is zero, and x need not be read */
        modenorm_apply(dy, slope, scale, offset, dx, samples, channels, positions, last, threads);
}

/* ---- The same for an autograd node of C++, with arrays in the order of mode_group_norm_arrays.py ---- */

typedef struct {
    float eps;
    i64 pixel, samples, channels, modes, positions, last;
} ChannelLayer;

typedef struct {
    const float *x, *gate_weight, *gate_bias, *weight, *bias;
    float *gates, *kept, *scratch, *y;
} ChannelForward;

typedef struct {
    const float *dy, *x, *gate_weight, *gate_bias, *weight, *dgates;
    float *kept, *scratch, *dx, *dgate_weight, *dgate_bias, *dweight, *dbias;
} ChannelBackward;

#define SIZES_OF(layer)                                                                            \
    (layer)->eps, (layer)->pixel, (layer)->samples, (layer)->channels, (layer)->modes,             \
        (layer)->positions, (layer)->last

/* Gates, which nobody asks for, lie behind the other scratch memory. */
EXPORT int modenorm_run_channels_forward(const ChannelLayer *layer, i64 threads,
                                         const ChannelForward *at)
{
    float *gates = at->scratch + layer->samples * layer->channels;
    modenorm_channels_forward(at->x, at->gate_weight, at->gate_bias, at->weight, at->bias, at->y,
                              gates, at->kept, at->scratch, SIZES_OF(layer), threads);
    return 0;
}

EXPORT int modenorm_run_channels_backward(const ChannelLayer *layer, i64 threads,
                                          const ChannelBackward *at)
{
    modenorm_channels_backward(at->dy, at->x, at->kept, at->gate_weight, at->gate_bias, at->weight,
                               at->dgates, at->dx, at->dgate_weight, at->dgate_bias, at->dweight,
                               at->dbias, at->scratch, SIZES_OF(layer), threads);
    return 0;
}

#undef SIZES_OF
#undef SIZES
#undef GIVEN
