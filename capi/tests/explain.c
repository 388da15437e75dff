/* Explains the samples of a file through libhatchback and prints the report of each on a line.
 * tests/c.rs compiles and runs this program.
 * usage: explain TARGET FLASH SAMPLES */
#include "expect.h"

int main(int count, char **arguments) {
    static char line[1 << 16];
    static const hatchback_model no_model = {0};
    hatchback_process process;
    hatchback_model model;
    hatchback_statistics before, after;
    const char *report = "untouched";
    FILE *file;
    if (count != 4 || !(file = fopen(arguments[3], "r"))) return 2;
    if (hatchback_open(arguments[1], &process) != HATCHBACK_OK) return refused("open");
    if (hatchback_load(process, arguments[2], NULL, &model) != HATCHBACK_OK) return refused("load");

    EXPECT(hatchback_explain(no_model, "{}", &report), HATCHBACK_CLOSED, "the model is closed");
    EXPECT(hatchback_explain(model, NULL, &report), HATCHBACK_REQUEST, "sample is NULL");
    EXPECT(hatchback_explain(model, "{}", NULL), HATCHBACK_REQUEST, "report is NULL");
    EXPECT(hatchback_explain(model, "{", &report), HATCHBACK_REQUEST, "EOF");
    EXPECT(hatchback_explain(model, "{\"dense\":[1]}", &report), HATCHBACK_REQUEST, "dense: 1 values");
    if (strcmp(report, "untouched")) return 1;

    if (hatchback_get_statistics(model, &before) != HATCHBACK_OK) return refused("statistics");
    while (fgets(line, sizeof line, file)) {
        if (hatchback_explain(model, line, &report) != HATCHBACK_OK) return refused("explain");
        puts(report);
    }
    /* The served model looked nothing up, and read no page. */
    if (hatchback_get_statistics(model, &after) != HATCHBACK_OK) return refused("statistics");
    if (memcmp(&before, &after, sizeof before)) return 1;
    fclose(file);
    return hatchback_close(process) == HATCHBACK_OK ? 0 : refused("close");
}
