/* Stands in for the driver: torch counts cards here, and nothing may run on them.
   EMULATED_CARDS in the machine, of which CUDA_VISIBLE_DEVICES shows some, as the driver does. */
#include <stdlib.h>

static int visible(int cards) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char *end;
    int count = 0;
    if (list == NULL) return cards;
    for (;; list = end + 1) {
        long card = strtol(list, &end, 10);
        if (end == list || card < 0 || card >= cards) return count; /* the rest is not seen */
        count++;
        if (*end != ',') return count;
    }
}

/* c10::cuda::device_count() */
signed char _ZN3c104cuda12device_countEv(void) {
    const char *cards = getenv("EMULATED_CARDS"), *inside = getenv("EMULATED_CARDS_INSIDE");
    if (inside) return (signed char)atoi(inside); /* what stubs.py wants torch's C++ to see */
    return (signed char)visible(cards ? atoi(cards) : 8);
}

/* What torch asks the driver itself: no card has a context. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "an emulated card";
    return 0;
}
