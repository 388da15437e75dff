/* libhatchback: scores recommendation models from flash directories, in the calling process.
 *
 * A `hatchback_process` is a memory budget with the models that are loaded into it. Each model
 * follows its flash directory: when an update makes a new generation live there, a thread of the
 * library swaps to it within a second or two, while requests are served.
 *
 * Handles are numbers. The handle of a process is never that of a model. Any number of threads may
 * use a handle at the same time. A call with a handle that was closed, or was never open, returns
 * HATCHBACK_CLOSED. If another thread closes the handle during a call, that call either ends as if
 * the handle were open or returns HATCHBACK_CLOSED.
 *
 * A child made by fork has none of the library's threads. Each call there with a handle of the parent
 * returns HATCHBACK_CLOSED, also hatchback_close. The parent's handles are not affected. A child may
 * open a process of its own, if no other thread was in a call at the time of the fork.
 *
 * Each call says whether it blocks. A call that does not block takes no lock for longer than it
 * takes to copy its arguments.
 *
 * What a pointer argument points to belongs to the caller and need not outlive the call. Strings
 * are UTF-8 and end with a zero. A call that fails writes none of its results, except that
 * hatchback_open and hatchback_load write the zero handle. */
#ifndef HATCHBACK_H
#define HATCHBACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: the number behind `libhatchback.so`. */
#define HATCHBACK_ABI 1

/* A memory budget with its models. Handle 0 is never open. */
typedef struct hatchback_process {
    uint64_t handle;
} hatchback_process;

/* A served model. Handle 0 is never open. */
typedef struct hatchback_model {
    uint64_t handle;
} hatchback_model;

/* The result of a call. The numbers are frozen. */
typedef enum hatchback_result {
    HATCHBACK_OK = 0,
    HATCHBACK_BUSY = 1,       /* every request slot is taken; nothing was scored, try later */
    HATCHBACK_REQUEST = 2,    /* an argument or the batch does not fit the model */
    HATCHBACK_OPEN = 3,       /* the target or the flash directory is refused */
    HATCHBACK_FAILED = 4,     /* the request failed; the model continues to serve */
    HATCHBACK_NOT_FINITE = 5, /* a score is NaN or infinite; hatchback_error names the sample */
    HATCHBACK_DEADLINE_EXCEEDED = 6, /* the request had no scores in time */
    HATCHBACK_CLOSED = 7      /* the handle was closed, was never open, or is the parent's of a fork */
} hatchback_result;

/* The shape of requests to a model. It does not change while the model is served: a later generation
 * that takes more has empty bags and the value of `missing` for it, and its further outputs are not
 * written. To send them, load the model again. */
typedef struct hatchback_shape {
    uint32_t dense_features;
    uint32_t sparse_features;
    uint32_t outputs;   /* scores per sample */
    uint32_t batch_max; /* most samples in a request */
    uint32_t shared_dense_features; /* one value for all samples; `dense_features` has the others */
} hatchback_shape;

/* The keys of one sparse feature. Sample i has the keys keys[offsets[i]] to
 * keys[offsets[i + 1] - 1]. */
typedef struct hatchback_bags {
    const uint64_t *keys;
    const uint32_t *offsets; /* one more than samples, or 2 if it is shared; ascending */
    const float *weights;    /* one for each key of a weighted feature; of another one NULL */
} hatchback_bags;

/* The kinds of a raw value. */
enum { HATCHBACK_TEXT = 0, HATCHBACK_INTEGER = 1, HATCHBACK_NUMBER = 2, HATCHBACK_MISSING = 3 };

/* A raw value. `kind` says which of the others is read. */
typedef struct hatchback_value {
    const char *text;
    int64_t integer;
    double number;
    uint32_t kind;
} hatchback_value;

/* Where the rows of one sample came from. A key is counted once for each table of its feature. */
typedef struct hatchback_status {
    uint32_t fresh;     /* the row of the live generation */
    uint32_t defaulted; /* the default row: the miss policy or the deadline did not wait */
    uint32_t absent;    /* the default row: the model has no such key */
    uint32_t damaged;   /* the default row: the row's page failed its check */
    uint32_t late;      /* 1 if the deadline cut fetches short, else 0 */
} hatchback_status;

/* What a model did since its generation was loaded or swapped in. */
typedef struct hatchback_statistics {
    uint64_t generation;       /* sequence number of the generation that is served */
    uint64_t requests;         /* requests that a worker took */
    uint64_t batches;          /* batches in which the workers scored them */
    uint64_t busy;             /* requests refused because every slot was taken */
    uint64_t failed;           /* requests that a worker answered with an error */
    uint64_t expired;          /* requests whose deadline passed before they had scores */
    uint64_t waiting;          /* requests that wait for a worker now */
    uint64_t lookups;          /* lookups of all tables */
    uint64_t cached_lookups;   /* lookups of cached tables */
    uint64_t missed_lookups;   /* lookups of cached tables whose row was not in the cache */
    uint64_t pages_read;       /* pages read from flash */
    uint64_t pages_damaged;    /* pages that failed their check or could not be read */
    uint64_t prefetch_waiting; /* keys queued to prefetch and not fetched yet */
    uint64_t prefetch_dropped; /* keys to prefetch that did not fit into the queue */
} hatchback_statistics;

/* A line of the memory plan. Texts end with a zero and are cut to fit. */
typedef struct hatchback_memory_line {
    char model[64]; /* name of the model */
    char part[64];  /* what the memory is for */
    uint64_t bytes;
} hatchback_memory_line;

/* A function that receives a log message. `level` is 1 error, 2 warning or 3 information. It may be
 * called from any thread. `message` lives until the function returns. */
typedef void (*hatchback_logger)(int level, const char *message, void *context);

/* Returns the version of the library, such as "0.1.0". Never blocks. The text lives for ever. */
const char *hatchback_version(void);

/* Passes the library's messages to `logger`, or drops them if it is NULL. `logger` must not call
 * hatchback_open, hatchback_close, hatchback_load, hatchback_unload or hatchback_explain: a message
 * comes in the middle of such work, and the call would wait for itself. Another thread may still be
 * in the previous logger; keep its `context` until every process is closed. Never blocks. */
hatchback_result hatchback_set_logger(hatchback_logger logger, void *context);

/* Opens the budget and the device of the file `target`, and starts the thread that follows flash
 * directories. Blocks while it reads the file and opens the device. */
hatchback_result hatchback_open(const char *target, hatchback_process *process);

/* Closes a process and the handles of its models. Calls in progress end first; the last of them
 * frees the memory. Blocks until the thread that follows flash directories has ended. */
hatchback_result hatchback_close(hatchback_process process);

/* Serves the live generation of the directory `flash` within the process's budget, as `name`, or
 * under the name of its lineage if `name` is NULL. Takes all memory. Blocks while it opens the
 * model, and during a swap of another model of the process. */
hatchback_result hatchback_load(hatchback_process process, const char *flash, const char *name,
                                hatchback_model *model);

/* Ends serving a model and frees its memory. Blocks until the model's requests are answered, and
 * during a swap of a model of the process. */
hatchback_result hatchback_unload(hatchback_model model);

/* Writes the shape of requests to `model`. Never blocks. */
hatchback_result hatchback_describe(hatchback_model model, hatchback_shape *shape);

/* Returns the number of the sparse feature `name` in a request, or -1. Never blocks. */
int32_t hatchback_feature(hatchback_model model, const char *name);

/* Returns the first column of the output `name` in the scores, or -1. The only output of a model has
 * all columns; of several outputs each has one. Never blocks. */
int32_t hatchback_output(hatchback_model model, const char *name);

/* Writes to `name` the name of the output that has column `column` of the scores. `name` has room
 * for `name_bytes` bytes with the zero. A name that does not fit is HATCHBACK_REQUEST. Never
 * blocks. */
hatchback_result hatchback_output_name(hatchback_model model, uint32_t column, char *name,
                                       uint32_t name_bytes);

/* Scores `samples` samples: `dense` is [samples][dense_features], and behind it one row of
 * [shared_dense_features]. `sparse` has one entry for each sparse feature, `scores` is
 * [samples][outputs], `statuses` is [samples] or NULL. Writes to `generation`, which may be NULL,
 * the sequence number of the one generation that scored them all.
 *
 * Never waits for a free request slot, and blocks until the scores are there. If `timeout_us` is
 * above 0, the call returns by then, or a millisecond and the delay of the system's scheduler later.
 * Rows of tables with the miss policy `deadline` that are not read in time are replaced by the
 * default row. If a row of a table with the miss policy `wait` is not read in time, the result is
 * HATCHBACK_DEADLINE_EXCEEDED. */
hatchback_result hatchback_score(hatchback_model model, uint32_t samples, const float *dense,
                                 const hatchback_bags *sparse, uint64_t timeout_us, float *scores,
                                 hatchback_status *statuses, uint64_t *generation);

/* Writes to `positions`, [k], the samples with the highest scores in column `column` of `scores`,
 * which is [samples][outputs]: the best first, of equal scores the first. `k` is 1 or more; of a `k`
 * above `samples` only the first `samples` places are written. Never blocks. */
hatchback_result hatchback_top_k(const float *scores, uint32_t samples, uint32_t outputs,
                                 uint32_t column, uint32_t k, uint32_t *positions);

/* Writes the key of a raw value of the sparse feature `feature`, by the key function of the model's
 * schema. Never blocks. */
hatchback_result hatchback_key_of_text(hatchback_model model, uint32_t feature, const char *value,
                                       uint64_t *key);
hatchback_result hatchback_key_of_integer(hatchback_model model, uint32_t feature, int64_t value,
                                          uint64_t *key);
hatchback_result hatchback_key_of_number(hatchback_model model, uint32_t feature, double value,
                                         uint64_t *key);

/* Writes the key of the cross `feature`, for one raw value of each of its `count` columns, in the order
 * of the model. A request has the keys of a cross like those of any feature. Never blocks. */
hatchback_result hatchback_key_of_cross(hatchback_model model, uint32_t feature,
                                        const hatchback_value *values, uint32_t count, uint64_t *key);

/* Queues `count` keys of the sparse feature `feature` whose rows a later request will look up. Never
 * blocks. Writes to `queued`, which may be NULL, how many keys fit into the queue. */
hatchback_result hatchback_prefetch(hatchback_model model, uint32_t feature, const uint64_t *keys,
                                    uint32_t count, uint32_t *queued);

/* Explains the score of `sample`, a line of JSON as `hatchback run` reads it. Writes to `report` the
 * JSON of `hatchback explain`: for each feature the keys, their rows with the release that wrote each,
 * and what the feature adds to the score. The text lives until this thread's next explanation. A
 * thread of low priority reads the rows from the model's flash directory, past the caches. Takes a
 * second network within `memory_bytes_max`. Blocks until it ends, and loads and swaps wait for it. */
hatchback_result hatchback_explain(hatchback_model model, const char *sample, const char **report);

/* Writes the counters of `model`. Never blocks. */
hatchback_result hatchback_get_statistics(hatchback_model model, hatchback_statistics *statistics);

/* Writes the first `lines_max` lines of the memory plans of all models to `lines`, and to `count`
 * how many lines there are. The sum of all lines is what the models take. Never blocks. */
hatchback_result hatchback_get_memory(hatchback_process process, hatchback_memory_line *lines,
                                      uint32_t lines_max, uint32_t *count);

/* Returns the error text of this thread's last call that failed; never NULL. The text lives until
 * the thread's next call that fails. It may be empty at exit. Never blocks. */
const char *hatchback_error(void);

#ifdef __cplusplus
}
#endif
#endif
