/* Makes the mistake that its argument names: the tests ask with it whether an instrumented build
 * tells. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int shared;

static void *count(void *arg)
{
    for (int i = 0; i < 100000; i++) {
        shared += *(int *)arg;
    }
    return NULL;
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    volatile int one = argc - 1;
    if (strcmp(what, "leak") == 0) {
        char *volatile p = malloc(100);
        p[0] = 'x';
        p = NULL;
    } else if (strcmp(what, "overrun") == 0) {
        volatile char *p = malloc(100);
        p[99 + one] = 'x';
        free((void *)p);
    } else if (strcmp(what, "overflow") == 0) {
        int x = INT_MAX;
        printf("%d\n", x + one);
    } else if (strcmp(what, "race") == 0) {
        int by = one;
        pthread_t t[2];
        for (int i = 0; i < 2; i++) {
            if (pthread_create(&t[i], NULL, count, &by) != 0) {
                return 1;
            }
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(t[i], NULL);
        }
    } else if (strcmp(what, "nothing") != 0) {
        fprintf(stderr, "usage: faulty leak|overrun|overflow|race|nothing\n");
        return 2;
    }
    return 0;
}
