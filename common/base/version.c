/* The one object that knows the commit: it alone is compiled anew when the commit changes. */
#include "common/base/base.h"

#ifndef BT_VERSION
#define BT_VERSION "unknown"
#endif

const char *bt_version(void)
{
    return BT_VERSION;
}
