/* baton-prefill: the worker runtime, started in the prefill role. Both roles are linked into both
 * binaries, so that a worker can change its role at run time. */
#include "common/worker/worker.h"

int main(int argc, char **argv)
{
    return bt_worker_main(argc, argv, BT_ROLE_PREFILL, &bt_prefill, &bt_decode);
}
