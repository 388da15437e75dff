/* Scores samples of a model with the features `f0`, texts, `f1`, integers, and the cross `f2`.
 * usage: cross TARGET FLASH [TEXT INTEGER]...     prints the key of the cross and the score of each */
#include "expect.h"

#include <inttypes.h>
#include <stdlib.h>

enum { WIDTH = 6 }; /* of each feature's row; the rows are the scores */

/* Each mistake has its error, and writes no key. */
static int mistakes(hatchback_model model, uint32_t cross) {
    hatchback_value values[2] = {{"a", 0, 0, HATCHBACK_TEXT}, {NULL, 3, 0, HATCHBACK_INTEGER}};
    uint64_t key = 7;
    EXPECT(hatchback_key_of_cross(model, 0, values, 2, &key), HATCHBACK_REQUEST, "one value for each column");
    EXPECT(hatchback_key_of_cross(model, cross, values, 1, &key), HATCHBACK_REQUEST, "a list of 1");
    EXPECT(hatchback_key_of_cross(model, cross, values, 9, &key), HATCHBACK_REQUEST, "count = 9, over the 8");
    EXPECT(hatchback_key_of_cross(model, cross, NULL, 2, &key), HATCHBACK_REQUEST, "values is NULL");
    EXPECT(hatchback_key_of_cross(model, cross, values, 2, NULL), HATCHBACK_REQUEST, "key is NULL");
    EXPECT(hatchback_key_of_text(model, cross, "a", &key), HATCHBACK_REQUEST, "it crosses other columns");
    values[0].text = NULL;
    EXPECT(hatchback_key_of_cross(model, cross, values, 2, &key), HATCHBACK_REQUEST, "text is NULL");
    values[0].kind = HATCHBACK_MISSING;
    EXPECT(hatchback_key_of_cross(model, cross, values, 2, &key), HATCHBACK_REQUEST, "null is not a text");
    values[0].kind = HATCHBACK_NUMBER;
    EXPECT(hatchback_key_of_cross(model, cross, values, 2, &key), HATCHBACK_REQUEST, "is not a text");
    values[0].kind = 9;
    EXPECT(hatchback_key_of_cross(model, cross, values, 2, &key), HATCHBACK_REQUEST, "kind = 9");
    EXPECT(key, 7, "kind = 9");
    return 0;
}

int main(int count, char **arguments) {
    hatchback_process process;
    hatchback_model model;
    uint64_t keys[3];
    uint32_t one_key[2] = {0, 1};
    hatchback_bags bags[3];
    int i, f, cross;
    float scores[64];
    if (hatchback_open(arguments[1], &process) != HATCHBACK_OK) return refused("open");
    if (hatchback_load(process, arguments[2], NULL, &model) != HATCHBACK_OK) return refused("load");
    cross = hatchback_feature(model, "f2");
    if (cross != 2) return refused("cross");
    for (f = 0; f < 3; f++) {
        bags[f].keys = &keys[f];
        bags[f].offsets = one_key;
        bags[f].weights = NULL;
    }
    for (i = 3; i + 1 < count; i += 2) {
        hatchback_value values[2] = {{NULL, 0, 0, HATCHBACK_TEXT}, {NULL, 0, 0, HATCHBACK_INTEGER}};
        values[0].text = arguments[i];
        values[1].integer = atoll(arguments[i + 1]);
        if (hatchback_key_of_text(model, 0, values[0].text, &keys[0]) != HATCHBACK_OK) return refused("text");
        if (hatchback_key_of_integer(model, 1, values[1].integer, &keys[1]) != HATCHBACK_OK) return refused("integer");
        if (hatchback_key_of_cross(model, 2, values, 2, &keys[2]) != HATCHBACK_OK) return refused("cross");
        if (hatchback_score(model, 1, NULL, bags, 0, scores, NULL, NULL) != HATCHBACK_OK) return refused("score");
        printf("%" PRIu64 " %.9g\n", keys[2], scores[WIDTH * 2]);
    }
    if (mistakes(model, 2)) return 1;
    return hatchback_close(process) == HATCHBACK_OK ? 0 : refused("close");
}
