/* The only object file with the commit's name: only this one is compiled again for a new commit. */
#include "common/base/base.h"

#ifndef BT_VERSION
#define BT_VERSION "unknown"
#endif

const char *bt_version(void)
{
    return BT_VERSION;
}
