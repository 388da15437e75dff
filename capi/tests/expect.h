/* Ends the calling function with 1 where a call of the library has another result or message. */
#include "hatchback.h"

#include <stdio.h>
#include <string.h>

static int refused(const char *what) {
    fprintf(stderr, "%s: %s\n", what, hatchback_error());
    return 1;
}

#define EXPECT(call, result, text)                                                          \
    do {                                                                                    \
        if ((call) != (result) || !strstr(hatchback_error(), (text))) return refused(#call); \
    } while (0)
