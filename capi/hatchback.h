/* libhatchback: scores recommendation models from a flash directory, in the calling process.
 *
 * Any number of threads may use a handle at the same time, until hatchback_close. hatchback_open
 * takes all memory, within the target's budget. A call never waits for a free request slot. Strings
 * are UTF-8. */
#ifndef HATCHBACK_H
#define HATCHBACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A model, open for scoring. */
typedef struct hatchback hatchback;

/* The result of a call. The numbers are frozen. */
typedef enum hatchback_result {
    HATCHBACK_OK = 0,
    HATCHBACK_BUSY = 1,      /* every request slot is taken; nothing was scored, try later */
    HATCHBACK_REQUEST = 2,   /* an argument or the batch does not fit the model */
    HATCHBACK_OPEN = 3,      /* the target or the flash directory is refused */
    HATCHBACK_FAILED = 4,    /* the request failed; the model continues to serve */
    HATCHBACK_NOT_FINITE = 5, /* a score is NaN or infinite; hatchback_error names the sample */
    HATCHBACK_DEADLINE_EXCEEDED = 6 /* the request had no scores in time */
} hatchback_result;

/* The shape of requests to a model. */
typedef struct hatchback_shape {
    uint32_t dense_features;
    uint32_t sparse_features;
    uint32_t outputs;   /* scores per sample */
    uint32_t batch_max; /* most samples in a request */
} hatchback_shape;

/* The keys of one sparse feature. Sample i has the keys keys[offsets[i]] to
 * keys[offsets[i + 1] - 1]. */
typedef struct hatchback_bags {
    const uint64_t *keys;
    const uint32_t *offsets; /* one more than samples; the first is 0 */
} hatchback_bags;

/* Where the rows of one sample came from; every lookup is counted once. */
typedef struct hatchback_status {
    uint32_t fresh;     /* the row of the live generation */
    uint32_t defaulted; /* the default row: the miss policy or the deadline did not wait */
    uint32_t absent;    /* the default row: the model has no such key */
    uint32_t damaged;   /* the default row: the row's page failed its check */
    uint32_t late;      /* 1 if the deadline cut fetches short, else 0 */
} hatchback_status;

/* Opens the live generation of the directory `flash` within the budget of the file `target`. */
hatchback_result hatchback_open(const char *target, const char *flash, hatchback **model);

/* Writes the shape of requests to `model`. */
hatchback_result hatchback_describe(const hatchback *model, hatchback_shape *shape);

/* Returns the number of the sparse feature `name` in a request, or -1. */
int32_t hatchback_feature(const hatchback *model, const char *name);

/* Scores `samples` samples: `dense` is [samples][dense_features], `sparse` has one entry for each
 * sparse feature, `scores` is [samples][outputs], `statuses` is [samples] or NULL. If `timeout_us`
 * is above 0, the call returns by then, or a millisecond later. Rows of tables with the miss policy
 * `deadline` that are not read in time are replaced by the default row. If a row of a table with the
 * miss policy `wait` is not read in time, the result is HATCHBACK_DEADLINE_EXCEEDED. `scores` and
 * `statuses` are written only if the result is HATCHBACK_OK. */
hatchback_result hatchback_score(const hatchback *model, uint32_t samples, const float *dense,
                                 const hatchback_bags *sparse, uint64_t timeout_us, float *scores,
                                 hatchback_status *statuses);

/* Queues `count` keys of the sparse feature `feature` whose rows a later request will look up. Never
 * waits. Writes to `queued`, which may be NULL, how many keys had room. */
hatchback_result hatchback_prefetch(const hatchback *model, uint32_t feature, const uint64_t *keys,
                                    uint32_t count, uint32_t *queued);

/* Returns the error text of this thread's last call that failed; never NULL. */
const char *hatchback_error(void);

/* Frees `model`, which may be NULL. No other call may use `model` then. */
void hatchback_close(hatchback *model);

#ifdef __cplusplus
}
#endif
#endif
