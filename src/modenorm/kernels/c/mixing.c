/* The mixing on a CPU, float32: the same four functions as kernels/torch_mixing.py.

   Letters: N samples, C channels, K modes; formulas in docs/math.md. Sums over samples are taken
   for a few channels at a time, in float64; sums over channels one sample after the other. */

#include "common.h"

enum { TILE = 32 }; /* channels */

#define TINY 1.17549435e-38f /* the smallest normal number: what the mass of a mode is at least */

typedef struct {
    const float *mean, *var, *gates, *mode_mean, *mode_var, *weight, *bias, *mass;
    const float *dscale, *dshift, *u, *s, *scaled;
    float *out[5]; /* what the part writes */
    i64 samples, channels, modes;
    i64 weight_step, bias_step; /* from mode to mode: C, or 0 if they share one */
    float eps;
} Mix;

INLINE double above_tiny(double mass) { return mass < TINY ? TINY : mass; } /* NaN stays */

INLINE float inverse(float var, float eps) { return 1 / __builtin_sqrtf(var + eps); }

/* out: mass (K), μ (K, C), σ² (K, C) */
static void tile_statistics(const void *data, i64 tile)
{
    const Mix *mix = data;
    i64 first = tile * TILE, width = least(TILE, mix->channels - first), modes = mix->modes;
    const float *mean = mix->mean + first, *var = mix->var + first;
    for (i64 k = 0; k < modes; k++) {
        float *mode_mean = mix->out[1] + k * mix->channels + first;
        float *mode_var = mix->out[2] + k * mix->channels + first;
        double mass = 0, total[TILE] = {0}, square[TILE] = {0};
        for (i64 n = 0; n < mix->samples; n++) {
            double gate = mix->gates[n * modes + k];
            mass += gate;
            for (i64 j = 0; j < width; j++)
                total[j] += gate * mean[n * mix->channels + j];
        }
        float middle[TILE];
        for (i64 j = 0; j < width; j++)
            middle[j] = (float)(total[j] / above_tiny(mass));
        for (i64 n = 0; n < mix->samples; n++) {
            double gate = mix->gates[n * modes + k];
            for (i64 j = 0; j < width; j++) {
                float apart = mean[n * mix->channels + j] - middle[j];
                square[j] += gate * (var[n * mix->channels + j] + apart * apart);
            }
        }
        for (i64 j = 0; j < width; j++) {
            mode_mean[j] = middle[j];
            mode_var[j] = (float)(square[j] / above_tiny(mass));
        }
        if (tile == 0)
            mix->out[0][k] = (float)mass;
    }
}

/* out: scale (N, C), shift (N, C), α/σ (K, C) */
static void tile_coefficients(const void *data, i64 tile)
{
    const Mix *mix = data;
    i64 first = tile * TILE, width = least(TILE, mix->channels - first), modes = mix->modes;
    float *scaled = mix->out[2] + first;
    for (i64 k = 0; k < modes; k++)
        for (i64 j = 0; j < width; j++) {
            i64 c = first + j;
            float value = inverse(mix->mode_var[k * mix->channels + c], mix->eps);
            value *= mix->weight ? mix->weight[k * mix->weight_step + c] : 1;
            scaled[k * mix->channels + j] = value;
        }
    for (i64 n = 0; n < mix->samples; n++) {
        const float *mean = mix->mean + n * mix->channels + first;
        float scale[TILE] = {0}, shift[TILE] = {0};
        for (i64 k = 0; k < modes; k++) {
            const float *mode_mean = mix->mode_mean + k * mix->channels + first;
            const float *of_mode = scaled + k * mix->channels;
            const float *bias = mix->bias + k * mix->bias_step + first;
            float gate = mix->gates[n * modes + k];
            for (i64 j = 0; j < width; j++) {
                scale[j] += gate * of_mode[j];
                shift[j] += gate * ((mean[j] - mode_mean[j]) * of_mode[j]);
            }
            for (i64 j = 0; mix->bias && mix->bias_step && j < width; j++)
                shift[j] += gate * bias[j];
        }
        for (i64 j = 0; mix->bias && !mix->bias_step && j < width; j++)
            shift[j] += mix->bias[first + j];
        i64 at = n * mix->channels + first;
        __builtin_memcpy(mix->out[0] + at, scale, (unsigned long)width * sizeof(float));
        __builtin_memcpy(mix->out[1] + at, shift, (unsigned long)width * sizeof(float));
    }
}

/* out: u, s (over the mass) and α/σ (K, C), dweight and dbias like weight and bias, or NULL */
static void tile_mode_gradients(const void *data, i64 tile)
{
    const Mix *mix = data;
    i64 first = tile * TILE, width = least(TILE, mix->channels - first), modes = mix->modes;
    const float *a = mix->dscale + first, *d = mix->dshift + first, *mean = mix->mean + first;
    double dweight[TILE] = {0}, dbias[TILE] = {0};
    for (i64 k = 0; k < modes; k++) {
        const float *mode_mean = mix->mode_mean + k * mix->channels + first;
        double divisor = above_tiny(mix->mass[k]), t[TILE] = {0}, e[TILE] = {0};
        for (i64 n = 0; n < mix->samples; n++) {
            double gate = mix->gates[n * modes + k];
            i64 at = n * mix->channels;
            for (i64 j = 0; j < width; j++) {
                t[j] += gate * (a[at + j] + (mean[at + j] - mode_mean[j]) * d[at + j]);
                e[j] += gate * d[at + j];
            }
        }
        for (i64 j = 0; j < width; j++) {
            i64 c = first + j, at = k * mix->channels + c;
            float over = inverse(mix->mode_var[at], mix->eps);
            float scaled = mix->weight ? over * mix->weight[k * mix->weight_step + c] : over;
            mix->out[0][at] = (float)(-scaled * e[j] / divisor);
            mix->out[1][at] = (float)(-0.5 * scaled * over * over * t[j] / divisor);
            mix->out[2][at] = scaled;
            dweight[j] = over * t[j] + (mix->weight_step ? 0 : dweight[j]);
            if (mix->out[3])
                mix->out[3][k * mix->weight_step + c] = (float)dweight[j];
            if (mix->out[4] && mix->bias_step)
                mix->out[4][at] = (float)e[j];
        }
    }
    if (!mix->out[4] || mix->bias_step)
        return;
    for (i64 n = 0; n < mix->samples; n++)
        for (i64 j = 0; j < width; j++)
            dbias[j] += d[n * mix->channels + j];
    for (i64 j = 0; j < width; j++)
        mix->out[4][first + j] = (float)dbias[j];
}

/* out: dmean (N, C), dvar (N, C), dgates (N, K) */
static void sample_gradients_of(const void *data, i64 n)
{
    const Mix *mix = data;
    i64 channels = mix->channels, row = n * channels;
    for (i64 c = 0; c < channels; c++)
        mix->out[0][row + c] = mix->out[1][row + c] = 0;
    for (i64 k = 0; k < mix->modes; k++) {
        float gate = mix->gates[n * mix->modes + k];
        double total = 0;
        for (i64 first = 0; first < channels; first += TILE) {
            i64 width = least(TILE, channels - first), at = row + first, of = k * channels + first;
            const float *a = mix->dscale + at, *d = mix->dshift + at;
            const float *mean = mix->mean + at, *var = mix->var + at;
            const float *mode_mean = mix->mode_mean + of, *mode_var = mix->mode_var + of;
            const float *u = mix->u + of, *s = mix->s + of, *scaled = mix->scaled + of;
            const float *bias = mix->bias_step ? mix->bias + of : 0;
            float *dmean = mix->out[0] + at, *dvar = mix->out[1] + at, term[TILE];
            for (i64 j = 0; j < width; j++) {
                float apart = mean[j] - mode_mean[j];
                float spread = var[j] + apart * apart - mode_var[j];
                term[j] = (a[j] + d[j] * apart) * scaled[j] + apart * u[j] + spread * s[j];
            }
            for (i64 j = 0; j < width; j++) { /* more arrays in one loop are not vectorised */
                dmean[j] += gate * (u[j] + 2 * s[j] * (mean[j] - mode_mean[j]));
                dvar[j] += gate * s[j];
            }
            for (i64 j = 0; bias && j < width; j++)
                term[j] += d[j] * bias[j];
            total += sum(term, width);
        }
        mix->out[2][n * mix->modes + k] = (float)total;
    }
}

/* ---- What Python calls ---- */

#define SIZES i64 samples, i64 channels, i64 modes, i64 threads
#define GIVEN .samples = samples, .channels = channels, .modes = modes

static void tiles(Task task, const Mix *mix, i64 threads)
{
    i64 count = (mix->channels + TILE - 1) / TILE;
    each(task, mix, count, mix->samples * mix->modes * least(TILE, mix->channels), threads);
}

EXPORT void modenorm_statistics(const float *mean, const float *var, const float *gates,
                                float *mass, float *mode_mean, float *mode_var, SIZES)
{
    Mix mix = {.mean = mean, .var = var, .gates = gates, .out = {mass, mode_mean, mode_var}, GIVEN};
    tiles(tile_statistics, &mix, threads);
}

EXPORT void modenorm_coefficients(const float *mean, const float *gates, const float *mode_mean,
                         const float *mode_var, const float *weight, const float *bias,
                         float *scale, float *shift, float *scaled, float eps, i64 weight_step,
                         i64 bias_step, SIZES)
{
    Mix mix = {.mean = mean, .gates = gates, .mode_mean = mode_mean, .mode_var = mode_var,
               .weight = weight, .bias = bias, .weight_step = weight_step, .bias_step = bias_step,
               .out = {scale, shift, scaled}, .eps = eps, GIVEN};
    tiles(tile_coefficients, &mix, threads);
}

EXPORT void modenorm_mode_gradients(const float *dscale, const float *dshift, const float *mean,
                           const float *gates, const float *mode_mean, const float *mode_var,
                           const float *mass, const float *weight, float *u, float *s,
                           float *scaled, float *dweight, float *dbias, float eps, i64 weight_step,
                           i64 bias_step, SIZES)
{
    Mix mix = {.dscale = dscale, .dshift = dshift, .mean = mean, .gates = gates,
               .mode_mean = mode_mean, .mode_var = mode_var, .mass = mass, .weight = weight,
               .weight_step = weight_step, .bias_step = bias_step,
               .out = {u, s, scaled, dweight, dbias}, .eps = eps, GIVEN};
    tiles(tile_mode_gradients, &mix, threads);
}

EXPORT void modenorm_sample_gradients(const float *dscale, const float *dshift, const float *mean,
                             const float *var, const float *gates, const float *mode_mean,
                             const float *mode_var, const float *u, const float *s,
                             const float *scaled, const float *bias, float *dmean, float *dvar,
                             float *dgates, i64 bias_step, SIZES)
{
    Mix mix = {.dscale = dscale, .dshift = dshift, .mean = mean, .var = var, .gates = gates,
               .mode_mean = mode_mean, .mode_var = mode_var, .u = u, .s = s, .scaled = scaled,
               .bias = bias, .bias_step = bias_step, .out = {dmean, dvar, dgates}, GIVEN};
    each(sample_gradients_of, &mix, samples, modes * channels, threads);
}

#undef SIZES
#undef GIVEN
