/* Scores samples through libhatchback and prints the same scores as `hatchback run`. tests/c.rs
 * compiles and runs this program.
 * usage: score TARGET FLASH SAMPLES
 * A line of SAMPLES has the dense features, then for each sparse feature the number of its keys and
 * the keys. */
#define _POSIX_C_SOURCE 200809L /* fork */
#include "expect.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BATCH = 4, KEYS_MAX = 4096 };

static const hatchback_process no_process = {0};
static const hatchback_model no_model = {0};

/* A call fails after the C library has freed what belongs to this thread, the error text too. */
static void close_at_exit(void) {
    if (hatchback_close(no_process) != HATCHBACK_CLOSED || !hatchback_error()) _exit(4);
}

/* Keys are queued, and each mistake has its error. */
static int mistakes_of_prefetch(hatchback_model model, const hatchback_shape *shape) {
    uint64_t keys[2] = {1, 2};
    const uint64_t *unaligned;
    uint32_t queued = 7;
    EXPECT(hatchback_prefetch(no_model, 0, keys, 2, &queued), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_prefetch(model, shape->sparse_features, keys, 2, &queued), HATCHBACK_REQUEST, "feature = ");
    EXPECT(hatchback_prefetch(model, 0, NULL, 2, &queued), HATCHBACK_REQUEST, "keys is NULL");
    EXPECT(queued, 7, "keys is NULL");
    unaligned = (const void *)((const char *)keys + 1);
    EXPECT(hatchback_prefetch(model, 0, unaligned, 1, &queued), HATCHBACK_REQUEST, "keys is NULL or not aligned");
    EXPECT(queued, 7, "keys is NULL");
    EXPECT(hatchback_prefetch(model, 0, keys, 2, &queued), HATCHBACK_OK, "keys is NULL");
    EXPECT(queued <= 2, 1, "keys is NULL");
    EXPECT(hatchback_prefetch(model, 0, NULL, 0, NULL), HATCHBACK_OK, "keys is NULL");
    EXPECT(hatchback_key_of_integer(model, 0, 7, keys), HATCHBACK_OK, "keys is NULL");
    EXPECT(keys[0], 7, "keys is NULL");
    EXPECT(hatchback_key_of_integer(model, 0, -7, keys), HATCHBACK_OK, "keys is NULL");
    EXPECT(keys[0], (uint64_t)-7, "keys is NULL");
    EXPECT(hatchback_key_of_number(model, 0, 0.5, keys), HATCHBACK_REQUEST, "0.5");
    EXPECT(hatchback_key_of_text(model, 0, "seven", keys), HATCHBACK_REQUEST, "seven");
    EXPECT(hatchback_key_of_text(model, 0, NULL, keys), HATCHBACK_REQUEST, "value is NULL");
    EXPECT(hatchback_key_of_text(model, shape->sparse_features, "seven", keys), HATCHBACK_REQUEST, "feature = ");
    EXPECT(keys[0], (uint64_t)-7, "feature = ");
    return 0;
}

/* The only output has a name and a column, and each mistake has its error. */
static int mistakes_of_outputs(hatchback_model model, const hatchback_shape *shape) {
    char name[64] = "untouched", small[2] = "u";
    EXPECT(hatchback_output(model, "no such output"), -1, "no output `no such output`");
    EXPECT(hatchback_output(model, NULL), -1, "name is NULL");
    EXPECT(hatchback_output(no_model, "score"), -1, "the model is closed");
    EXPECT(hatchback_output_name(no_model, 0, name, 64), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_output_name(model, shape->outputs, name, 64), HATCHBACK_REQUEST, "column = ");
    EXPECT(hatchback_output_name(model, 0, NULL, 64), HATCHBACK_REQUEST, "name is NULL");
    EXPECT(hatchback_output_name(model, 0, NULL, 0), HATCHBACK_REQUEST, "name_bytes = 0");
    EXPECT(hatchback_output_name(model, 0, small, 2), HATCHBACK_REQUEST, "name_bytes = 2");
    EXPECT(strcmp(name, "untouched") || strcmp(small, "u"), 0, "name_bytes = 2");
    EXPECT(hatchback_output_name(model, 0, name, 64), HATCHBACK_OK, "name_bytes = 2");
    EXPECT(hatchback_output(model, name), 0, "name_bytes = 2");
    return 0;
}

/* The best scores have their positions, and each mistake has its error. */
static int mistakes_of_top_k(void) {
    const float scores[] = {9, 1, 8, 3, 7, 1, 6, 3, 5, 2};
    uint32_t best[5] = {7, 7, 7, 7, 7};
    EXPECT(hatchback_top_k(scores, 5, 2, 2, 1, best), HATCHBACK_REQUEST, "column = 2 of 2");
    EXPECT(hatchback_top_k(scores, 5, 0, 0, 1, best), HATCHBACK_REQUEST, "column = 0 of 0");
    EXPECT(hatchback_top_k(scores, 5, 2, 1, 0, best), HATCHBACK_REQUEST, "k = 0; k is 1 or more");
    EXPECT(hatchback_top_k(NULL, 5, 2, 1, 3, best), HATCHBACK_REQUEST, "scores is NULL");
    EXPECT(hatchback_top_k(scores, 5, 2, 1, 3, NULL), HATCHBACK_REQUEST, "positions is NULL");
    EXPECT(best[0], 7, "positions is NULL");
    EXPECT(hatchback_top_k(scores, 5, 2, 1, 3, best), HATCHBACK_OK, "positions is NULL");
    EXPECT(best[0] == 1 && best[1] == 3 && best[2] == 4 && best[3] == 7, 1, "positions is NULL");
    /* Of more than there are, all: the place of a sixth is not written. */
    uint32_t more[6] = {7, 7, 7, 7, 7, 7};
    EXPECT(hatchback_top_k(scores, 5, 2, 1, 6, more), HATCHBACK_OK, "positions is NULL");
    EXPECT(more[0] == 1 && more[1] == 3 && more[2] == 4 && more[5] == 7, 1, "positions is NULL");
    return 0;
}

/* The plan has lines with names and bytes. */
static int memory_of(hatchback_process process) {
    hatchback_memory_line lines[64];
    uint32_t count = 0, i;
    if (hatchback_get_memory(process, lines, 64, &count) != HATCHBACK_OK) return refused("memory");
    if (count == 0 || count > 64) return 1;
    for (i = 0; i < count; i++)
        if (!lines[i].model[0] || !lines[i].part[0] || memchr(lines[i].part, 0, 64) == NULL) return 1;
    return 0;
}

/* The handle of a process is not that of a model, and no neighbour of an open handle is open. */
static int mistakes_of_handles(const char *flash, hatchback_process process, hatchback_model model) {
    hatchback_process not_process = {model.handle};
    hatchback_model not_model = {process.handle}, again;
    hatchback_shape shape;
    uint64_t handle;
    EXPECT(hatchback_describe(not_model, &shape), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_unload(not_model), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_load(not_process, flash, NULL, &again), HATCHBACK_CLOSED, "the process is closed");
    EXPECT(hatchback_close(not_process), HATCHBACK_CLOSED, "the process is closed");
    for (handle = 0; handle < 64; handle++) {
        not_model.handle = not_process.handle = handle;
        if (handle != model.handle && hatchback_unload(not_model) != HATCHBACK_CLOSED) return 1;
        if (handle != process.handle && hatchback_close(not_process) != HATCHBACK_CLOSED) return 1;
    }
    EXPECT(hatchback_describe(model, &shape), HATCHBACK_OK, "the process is closed");
    return 0;
}

/* A child of fork is refused by every call with a handle, and the parent's handles stay open. */
static int mistakes_of_fork(const char *target, const char *flash, hatchback_process process, hatchback_model model,
                            const float *dense, const hatchback_bags *bags) {
    hatchback_process own;
    hatchback_model again;
    hatchback_shape shape;
    float scores[BATCH];
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_CLOSED, "cannot use it");
        EXPECT(hatchback_load(process, flash, "again", &again), HATCHBACK_CLOSED, "cannot use it");
        EXPECT(hatchback_unload(model), HATCHBACK_CLOSED, "cannot use it");
        EXPECT(hatchback_close(process), HATCHBACK_CLOSED, "cannot use it");
        EXPECT(hatchback_open(target, &own), HATCHBACK_OK, "cannot use it");
        EXPECT(hatchback_load(own, flash, NULL, &again), HATCHBACK_OK, "cannot use it");
        EXPECT(hatchback_score(again, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_OK, "cannot use it");
        EXPECT(hatchback_close(own), HATCHBACK_OK, "cannot use it");
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return 1;
    return hatchback_describe(model, &shape) != HATCHBACK_OK;
}

/* Mistakes that a caller can make; each must return its error and no scores. */
static int mistakes(const char *target, const char *flash, hatchback_process process, hatchback_model model,
                    const hatchback_shape *shape) {
    hatchback_process other = {7};
    hatchback_model again = {7};
    hatchback_statistics statistics;
    hatchback_memory_line line;
    uint32_t count = 0;
    float scores[BATCH];
    uint32_t offsets[2] = {0, 0}, one_key[2] = {0, 1}, wild[2] = {7, 3}, long_bag[2] = {0, 1000000};
    uint64_t key;
    float *dense = calloc(shape->dense_features + 1, sizeof *dense);
    hatchback_bags *bags = calloc(shape->sparse_features + 1, sizeof *bags);
    uint32_t f;
    hatchback_result late = HATCHBACK_OK;
    if (!dense || !bags) return 1;
    for (f = 0; f < shape->sparse_features; f++) bags[f].offsets = offsets;
    EXPECT(hatchback_open("/nowhere.toml", &other), HATCHBACK_OPEN, "/nowhere.toml");
    EXPECT(other.handle, 0, "/nowhere.toml");
    EXPECT(hatchback_open(NULL, &other), HATCHBACK_REQUEST, "target is NULL");
    EXPECT(hatchback_open(target, NULL), HATCHBACK_REQUEST, "process is NULL");
    EXPECT(hatchback_load(process, "/nowhere", NULL, &again), HATCHBACK_OPEN, "/nowhere");
    EXPECT(again.handle, 0, "/nowhere");
    EXPECT(hatchback_load(process, NULL, NULL, &again), HATCHBACK_REQUEST, "flash is NULL");
    EXPECT(hatchback_load(process, flash, NULL, NULL), HATCHBACK_REQUEST, "model is NULL");
    EXPECT(hatchback_load(process, flash, NULL, &again), HATCHBACK_OPEN, "is served already");
    EXPECT(hatchback_load(no_process, flash, NULL, &again), HATCHBACK_CLOSED, "the process is closed");
    EXPECT(hatchback_close(no_process), HATCHBACK_CLOSED, "the process is closed");
    EXPECT(hatchback_get_memory(no_process, &line, 1, &count), HATCHBACK_CLOSED, "the process is closed");
    EXPECT(hatchback_get_memory(process, NULL, 1, &count), HATCHBACK_REQUEST, "lines is NULL");
    EXPECT(count, 0, "lines is NULL");
    EXPECT(hatchback_get_memory(process, &line, 1, NULL), HATCHBACK_REQUEST, "count is NULL");
    EXPECT(hatchback_unload(no_model), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_describe(model, NULL), HATCHBACK_REQUEST, "shape is NULL");
    EXPECT(hatchback_get_statistics(model, NULL), HATCHBACK_REQUEST, "statistics is NULL");
    EXPECT(hatchback_get_statistics(no_model, &statistics), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_feature(model, "no such feature"), -1, "no such feature");
    EXPECT(hatchback_score(no_model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_score(model, 0, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "samples = 0");
    EXPECT(hatchback_score(model, shape->batch_max + 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "samples = ");
    EXPECT(hatchback_score(model, 1, NULL, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "dense is NULL");
    EXPECT(hatchback_score(model, 1, dense, NULL, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "sparse is NULL");
    EXPECT(hatchback_score(model, 1, dense, bags, 0, NULL, NULL, NULL), HATCHBACK_REQUEST, "scores is NULL");
    bags[0].weights = (const float *)(uintptr_t)1; /* points to nothing */
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "weights of feature");
    bags[0].keys = &key;
    bags[0].offsets = one_key;
    key = 0;
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "weights of feature");
    bags[0].weights = NULL;
    bags[0].offsets = wild;
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "offsets 7 to 3");
    bags[0].offsets = long_bag;
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_REQUEST, "offsets 0 to 1000000");
    bags[0].offsets = offsets;
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_OK, "offsets 0 to 1000000");
    if (mistakes_of_handles(flash, process, model)) return 1;
    if (mistakes_of_fork(target, flash, process, model, dense, bags)) return 1;
    for (f = 0; f < shape->dense_features; f++) dense[f] = 3.4e38f;
    scores[0] = 7;
    EXPECT(hatchback_score(model, 1, dense, bags, 0, scores, NULL, NULL), HATCHBACK_NOT_FINITE, "sample 0: score[0] is ");
    EXPECT(HATCHBACK_NOT_FINITE, 5, "score[0]");
    EXPECT(scores[0] != 7, 0, "score[0]");
    if (mistakes_of_prefetch(model, shape)) return 1;
    if (mistakes_of_outputs(model, shape)) return 1;
    if (mistakes_of_top_k()) return 1;
    memset(dense, 0, (shape->dense_features + 1) * sizeof *dense);
    /* A microsecond is over before a worker reads the row of a new key. */
    bags[shape->sparse_features - 1].keys = &key;
    bags[shape->sparse_features - 1].offsets = one_key;
    for (key = 0; key < 100 && late == HATCHBACK_OK; key++)
        late = hatchback_score(model, 1, dense, bags, 1, scores, NULL, NULL);
    EXPECT(late, HATCHBACK_DEADLINE_EXCEEDED, "deadline exceeded");
    EXPECT(hatchback_score(model, 1, dense, bags, 60000000, scores, NULL, NULL), HATCHBACK_OK, "deadline exceeded");
    free(dense);
    free(bags);
    return 0;
}

int main(int count, char **arguments) {
    hatchback_process process;
    hatchback_model model;
    hatchback_statistics statistics;
    uint64_t generation, sequence = 0;
    hatchback_shape shape;
    hatchback_status statuses[BATCH];
    hatchback_bags *bags;
    uint64_t **keys;
    uint32_t **offsets, f, i, n, read = 0, samples;
    float *dense, *scores;
    FILE *file;
    if (count != 4 || !(file = fopen(arguments[3], "r")) || atexit(close_at_exit)) return 2;
    if (hatchback_open(arguments[1], &process) != HATCHBACK_OK) return refused("open");
    if (hatchback_load(process, arguments[2], NULL, &model) != HATCHBACK_OK) return refused("load");
    if (hatchback_describe(model, &shape) != HATCHBACK_OK) return refused("describe");
    dense = malloc(BATCH * shape.dense_features * sizeof *dense + 1);
    scores = malloc(BATCH * shape.outputs * sizeof *scores);
    bags = malloc(shape.sparse_features * sizeof *bags);
    keys = malloc(shape.sparse_features * sizeof *keys);
    offsets = malloc(shape.sparse_features * sizeof *offsets);
    if (!dense || !scores || !bags || !keys || !offsets) return 2;
    for (f = 0; f < shape.sparse_features; f++) {
        keys[f] = malloc(KEYS_MAX * sizeof **keys);
        offsets[f] = malloc((BATCH + 1) * sizeof **offsets);
        if (!keys[f] || !offsets[f]) return 2;
        bags[f].keys = keys[f];
        bags[f].offsets = offsets[f];
        bags[f].weights = NULL;
    }
    do {
        for (samples = 0; samples < BATCH; samples++) {
            for (i = 0; i < shape.dense_features; i++)
                if (fscanf(file, "%f", &dense[samples * shape.dense_features + i]) != 1) break;
            for (f = 0; f < shape.sparse_features; f++) {
                if (fscanf(file, "%" SCNu32, &n) != 1) break;
                if (samples == 0) offsets[f][0] = 0;
                offsets[f][samples + 1] = offsets[f][samples] + n;
                for (i = 0; i < n; i++)
                    if (fscanf(file, "%" SCNu64, &keys[f][offsets[f][samples] + i]) != 1) return 2;
            }
            if (f < shape.sparse_features) break;
        }
        if (samples == 0) break;
        if (hatchback_score(model, samples, dense, bags, 0, scores, statuses, &generation) != HATCHBACK_OK)
            return refused("score");
        if (sequence && sequence != generation) return 3;
        sequence = generation;
        for (i = 0; i < samples; i++)
            printf("%.9g %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 "\n", scores[i * shape.outputs],
                   statuses[i].fresh, statuses[i].defaulted, statuses[i].absent, statuses[i].damaged, statuses[i].late);
        read += samples;
    } while (samples == BATCH);
    if (read == 0) return 2;
    if (hatchback_get_statistics(model, &statistics) != HATCHBACK_OK) return refused("statistics");
    if (statistics.generation != sequence || statistics.requests == 0 || statistics.failed) return 3;
    if (mistakes(arguments[1], arguments[2], process, model, &shape)) return 1;
    if (memory_of(process)) return 3;
    if (hatchback_close(process) != HATCHBACK_OK) return refused("close");
    if (hatchback_describe(model, &shape) != HATCHBACK_CLOSED || hatchback_close(process) != HATCHBACK_CLOSED) return 3;
    fclose(file);
    for (f = 0; f < shape.sparse_features; f++) {
        free(keys[f]);
        free(offsets[f]);
    }
    free(dense);
    free(scores);
    free(bags);
    free(keys);
    free(offsets);
    return 0;
}
