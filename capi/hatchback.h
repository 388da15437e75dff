/* libhatchback: scores recommendation models from a flash directory, in the calling process.
 *
 * A handle may be used by any number of threads at once, until hatchback_close. All memory is taken by hatchback_open,
 * within the target's budget; a call never waits for a free request slot. Strings are UTF-8. */
#ifndef HATCHBACK_H
#define HATCHBACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A model, open for scoring. */
typedef struct hatchback hatchback;

/* What a call came to. The numbers are frozen. */
typedef enum hatchback_result {
    HATCHBACK_OK = 0,
    HATCHBACK_BUSY = 1,    /* every request slot is taken; nothing was done, try again later */
    HATCHBACK_REQUEST = 2, /* an argument or the batch does not fit the model */
    HATCHBACK_OPEN = 3,    /* the target or the flash directory is refused */
    HATCHBACK_FAILED = 4   /* the request could not be computed; the model serves on */
} hatchback_result;

/* What requests to a model look like. */
typedef struct hatchback_shape {
    uint32_t dense_features;
    uint32_t sparse_features;
    uint32_t outputs;   /* scores of a sample */
    uint32_t batch_max; /* samples in a request */
} hatchback_shape;

/* The keys of one sparse feature: those of sample i are keys[offsets[i]] to keys[offsets[i + 1] - 1]. */
typedef struct hatchback_bags {
    const uint64_t *keys;
    const uint32_t *offsets; /* one more than there are samples; the first is 0 */
} hatchback_bags;

/* What the rows of one sample were; every lookup is counted once. */
typedef struct hatchback_status {
    uint32_t fresh;     /* the live generation's own row */
    uint32_t defaulted; /* the default row, because the miss policy or the deadline did not wait */
    uint32_t absent;    /* the default row, because the model has no such key */
    uint32_t damaged;   /* the default row, because the row's page failed its check */
    uint32_t late;      /* 1 where the deadline cut fetches short, else 0 */
} hatchback_status;

/* Opens what is live in the directory `flash` within the budget of the file `target`. */
hatchback_result hatchback_open(const char *target, const char *flash, hatchback **model);

/* What requests to `model` look like. */
hatchback_result hatchback_describe(const hatchback *model, hatchback_shape *shape);

/* The number of the sparse feature `name` in a request, or -1. */
int32_t hatchback_feature(const hatchback *model, const char *name);

/* Scores `samples` samples: `dense` is [samples][dense_features], `sparse` has one entry for each sparse feature,
 * `scores` is [samples][outputs], `statuses` is [samples] or NULL. With `timeout_us` above 0, rows of tables with the
 * miss policy `deadline` that have not arrived by then are answered with the default row. */
hatchback_result hatchback_score(const hatchback *model, uint32_t samples, const float *dense,
                                 const hatchback_bags *sparse, uint64_t timeout_us, float *scores,
                                 hatchback_status *statuses);

/* What was wrong in the last call of this thread that did not return HATCHBACK_OK; never NULL. */
const char *hatchback_error(void);

/* Frees `model`, which may be NULL. No other call may be using it. */
void hatchback_close(hatchback *model);

#ifdef __cplusplus
}
#endif
#endif
