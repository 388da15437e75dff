/* Calls libhatchback as a program in C does, and says how long each call took. `hatchback-bench daemon`
 * compiles and runs this program.
 * usage: caller TARGET FLASH REQUESTS
 * REQUESTS has the number of requests and the samples of each. Then each sample has its dense
 * features, and for each sparse feature the number of its keys and the keys. The program prints a
 * hash of all scores. For each line with a number N that it reads, it makes N calls and prints
 * their times in nanoseconds. */
#include <hatchback.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* The arrays of one request. */
struct request {
    float *dense;
    hatchback_bags *sparse;
};

static hatchback_model model;
static hatchback_shape shape;
static uint32_t requests, samples;

static void *taken(size_t count, size_t size) {
    void *memory = calloc(count + 1, size);
    if (memory) return memory;
    fprintf(stderr, "out of memory\n");
    exit(1);
}

static void refused(const char *what) {
    fprintf(stderr, "%s: %s\n", what, hatchback_error());
    exit(1);
}

static void wanted(int found, int needed) {
    if (found == needed) return;
    fprintf(stderr, "the requests end early\n");
    exit(1);
}

/* Reads one request; the keys of a feature are next to each other for all samples. */
static struct request read_request(FILE *file) {
    struct request request;
    uint32_t i, f, k, count;
    request.dense = taken((size_t)samples * shape.dense_features, sizeof(float));
    request.sparse = taken(shape.sparse_features, sizeof(hatchback_bags));
    for (f = 0; f < shape.sparse_features; f++) {
        request.sparse[f].keys = taken(0, sizeof(uint64_t));
        request.sparse[f].offsets = taken(samples, sizeof(uint32_t));
    }
    for (i = 0; i < samples; i++) {
        for (f = 0; f < shape.dense_features; f++)
            wanted(fscanf(file, "%f", &request.dense[i * shape.dense_features + f]), 1);
        for (f = 0; f < shape.sparse_features; f++) {
            hatchback_bags *bags = &request.sparse[f];
            uint32_t *offsets = (uint32_t *)bags->offsets;
            uint64_t *keys;
            wanted(fscanf(file, "%" SCNu32, &count), 1);
            offsets[i + 1] = offsets[i] + count;
            keys = realloc((uint64_t *)bags->keys, (offsets[i + 1] + 1) * sizeof(uint64_t));
            if (!keys) exit(1);
            for (k = offsets[i]; k < offsets[i + 1]; k++)
                wanted(fscanf(file, "%" SCNu64, &keys[k]), 1);
            bags->keys = keys;
        }
    }
    return request;
}

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void call(const struct request *request, float *scores, hatchback_status *statuses) {
    uint64_t generation;
    hatchback_result result = hatchback_score(model, samples, request->dense, request->sparse, 0,
                                              scores, statuses, &generation);
    if (result != HATCHBACK_OK) refused("score");
}

int main(int count, char **arguments) {
    struct request *all;
    hatchback_process process;
    hatchback_status *statuses;
    float *scores;
    uint64_t hash = 14695981039346656037u, *times;
    size_t i, byte, calls, next = 0;
    FILE *file;
    if (count != 4 || !(file = fopen(arguments[3], "r"))) return 2;
    if (hatchback_open(arguments[1], &process) != HATCHBACK_OK) refused("open");
    if (hatchback_load(process, arguments[2], NULL, &model) != HATCHBACK_OK) refused("load");
    if (hatchback_describe(model, &shape) != HATCHBACK_OK) refused("describe");
    wanted(fscanf(file, "%" SCNu32 " %" SCNu32, &requests, &samples), 2);
    all = taken(requests, sizeof *all);
    scores = taken((size_t)samples * shape.outputs, sizeof *scores);
    statuses = taken(samples, sizeof *statuses);
    for (i = 0; i < requests; i++) all[i] = read_request(file);

    for (i = 0; i < requests; i++) {
        call(&all[i], scores, statuses);
        for (byte = 0; byte < samples * shape.outputs * sizeof *scores; byte++)
            hash = (hash ^ ((unsigned char *)scores)[byte]) * 1099511628211u;
    }
    printf("%" PRIu64 "\n", hash);
    fflush(stdout);
    while (scanf("%zu", &calls) == 1) {
        times = taken(calls, sizeof *times);
        for (i = 0; i < calls; i++, next++) {
            const uint64_t start = nanoseconds();
            call(&all[next % requests], scores, statuses);
            times[i] = nanoseconds() - start;
        }
        for (i = 0; i < calls; i++) printf("%" PRIu64 " ", times[i]);
        printf("\n");
        fflush(stdout);
        free(times);
    }
    return hatchback_close(process) == HATCHBACK_OK ? 0 : 1;
}
